"""Keeps a limited number of samples under way to the server, fewer while its queue is full."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from guerdon.client import Scores
from guerdon.client.jsonl import Sample, samples_of
from guerdon.errors import InvalidRequest, Overloaded, PayloadTooLarge, SampleFailed, UnknownModel

_ROW_ERRORS = (InvalidRequest, PayloadTooLarge, SampleFailed)
"""Errors that a retry would repeat; after any other the row may be scored later."""

Row = tuple[dict[str, Any], int]
"""An input row and the number of its samples."""


class Scorer(Protocol):
    """A RewardClient, or anything else with its `submit`."""

    @property
    def submit(self) -> Callable[..., Future[Scores]]: ...


@dataclass(slots=True)
class RowGroup:
    """Neighbouring rows with the same prompt, sent in one request."""

    prompt: Any
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    future: Future[Scores] | None = None
    """None before it is sent, and after the server had no room for it."""

    def submit(self, scorer: Scorer) -> None:
        if not self.samples:
            self.future = Future()
            self.future.set_result(Scores(np.zeros(0, np.float32), []))
            return
        kind = "texts" if isinstance(self.samples[0], str) else "messages"
        self.future = scorer.submit(**{kind: self.samples, **self._hints(), "timeout_s": _TIMEOUT_S})

    def _hints(self) -> dict[str, list[Any]]:
        """Returns each sample's prompt and label, which functions at the server may read."""
        hints: dict[str, list[Any]] = {}
        if all(isinstance(row.get("prompt"), str) for row, _ in self.rows):
            hints["prompts"] = [row["prompt"] for row, count in self.rows for _ in range(count)]
        if any("label" in row for row, _ in self.rows):
            hints["labels"] = [row.get("label") for row, count in self.rows for _ in range(count)]
        return hints

    @property
    def is_busy(self) -> bool:
        return self.future is not None and not self.future.done()


_MAX_GROUP = 64
_TIMEOUT_S = 3600.0
"""Long, because nobody waits for a single row, and one slow request should not end the run."""

_LEAST_PAUSE_S = 0.1


class Window:
    """Iterates over the groups with their scores, in order, while later groups are under way.

    Sends groups until `max_samples` samples are under way; halves that limit when the server has no room, and raises it
    again with each answer.
    """

    def __init__(
        self, groups: Iterator[RowGroup], scorer: Scorer, max_samples: int, on_wait: Callable[[], None]
    ) -> None:
        self._groups, self._scorer, self._on_wait = groups, scorer, on_wait
        self._max_samples = self._limit = max_samples
        self._waiting: deque[RowGroup] = deque()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._waiting:
            if group.future is not None:
                group.future.cancel()

    def __iter__(self) -> Iterator[tuple[RowGroup, Scores]]:
        while self._fill():
            group = self._waiting[0]
            assert group.future is not None, "the first group is always sent"
            if group.is_busy:
                self._on_wait()
            try:
                scores = group.future.result()
            except Overloaded as e:
                self._make_room(e)
                continue
            except UnknownModel:
                raise
            except _ROW_ERRORS as e:
                n = len(group.samples)
                scores = Scores(np.full(n, np.nan, np.float32), [str(e)] * n)
            self._waiting.popleft()
            self._limit = min(self._max_samples, self._limit + 1)
            yield group, scores

    def _fill(self) -> bool:
        """Sends the groups for which there is room, always the first; returns whether there is one."""
        waiting = self._waiting
        held = sum(len(group.rows) + len(group.samples) for group in waiting)
        while held < 2 * self._max_samples and (group := next(self._groups, None)) is not None:
            waiting.append(group)
            held += len(group.rows) + len(group.samples)
        busy = sum(len(group.samples) for group in waiting if group.is_busy)
        for group in waiting:
            if group.future is None:
                if busy >= self._limit and group is not waiting[0]:
                    break
                group.submit(self._scorer)
                busy += len(group.samples)
        return bool(waiting)

    def _make_room(self, error: Overloaded) -> None:
        """Marks all refused groups as unsent, halves the limit and waits."""
        for group in self._waiting:
            future = group.future
            if future is not None and future.done() and isinstance(future.exception(), Overloaded):
                group.future = None
        self._limit = max(1, self._limit // 2)
        self._on_wait()
        time.sleep(max(_LEAST_PAUSE_S, error.retry_after_s or 0.0))


def group_rows(rows: Iterator[tuple[int, dict[str, Any]]], source: Path, template: bool) -> Iterator[RowGroup]:
    """Yields neighbouring rows with the same prompt as groups of at most 64 samples."""
    group: RowGroup | None = None
    for line, row in rows:
        samples, prompt = samples_of(row, source, line, template), row.get("prompt")
        if group is not None and not (
            prompt is not None
            and prompt == group.prompt
            and len(group.samples) + len(samples) <= _MAX_GROUP
            and {type(s) for s in samples} == {type(s) for s in group.samples}
        ):
            yield group
            group = None
        group = group or RowGroup(prompt)
        group.rows.append((row, len(samples)))
        group.samples += samples
    if group is not None:
        yield group
