"""What was answered to the last train requests, so that none is applied a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson

from guerdon.core import TrainReport
from guerdon.errors import InvalidRequest, TrainFailed
from guerdon.wire import critic_tensors

MOST = 10_000


@dataclass(slots=True)
class Answer:
    """What a train request was answered: its report, or why it broke off and how many of its global batches stand."""

    digest: str
    report: TrainReport | None = None
    failure: str = ""
    num_steps: int = 0

    def give(self, id: str, digest: str) -> TrainReport:  # noqa: A002 - what it is called everywhere
        """The report, or raises the failure; InvalidRequest where the request is another one of the same id."""
        if digest != self.digest:
            raise other_content(id)
        if self.report is None:
            raise TrainFailed(self.failure, self.num_steps)
        return self.report


class Answers:
    """The answers to the last `MOST` train requests by id; an id older than those would be applied as a new one."""

    def __init__(self) -> None:
        self._by_id: dict[str, Answer] = {}

    def get(self, id: str) -> Answer | None:  # noqa: A002
        return self._by_id.get(id)

    def put(self, id: str, answer: Answer) -> None:  # noqa: A002
        self._by_id.pop(id, None)
        self._by_id[id] = answer
        if len(self._by_id) > MOST:
            del self._by_id[next(iter(self._by_id))]

    def to_json(self) -> bytes:
        return orjson.dumps(self._by_id, option=orjson.OPT_SERIALIZE_NUMPY)

    @staticmethod
    def from_json(text: bytes) -> Answers:
        answers = Answers()
        for id, entry in orjson.loads(text).items():  # noqa: A001
            answers._by_id[id] = _answer(entry)
        return answers


def other_content(id: str) -> InvalidRequest:  # noqa: A002
    return InvalidRequest(f"train_id {id!r} was used for another request; give every request an id of its own")


def _answer(entry: dict[str, Any]) -> Answer:
    report = entry.pop("report")
    return Answer(**entry, report=report and critic_tensors.from_json(TrainReport, orjson.dumps(report)))
