"""Groups of rows on their way to the server: a bounded number of samples, fewer while its queue is full."""

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

_OF_THE_ROW = (InvalidRequest, PayloadTooLarge, SampleFailed)
"""Errors that the row would have again; after any other it may be scored later."""

Row = tuple[dict[str, Any], int]
"""An input row and the number of its samples."""


class Scorer(Protocol):
    """What scores the rows: a RewardClient, or anything that submits as it does."""

    @property
    def submit(self) -> Callable[..., Future[Scores]]: ...


@dataclass(slots=True)
class Group:
    """Neighbouring rows with the same prompt; they go in one request."""

    prompt: Any
    rows: list[Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    future: Future[Scores] | None = None
    """None before it is sent, and once the server had no room for it."""

    def submit(self, scorer: Scorer) -> None:
        if not self.samples:
            self.future = Future()
            self.future.set_result(Scores(np.zeros(0, np.float32), []))
            return
        kind = "texts" if isinstance(self.samples[0], str) else "messages"
        self.future = scorer.submit(**{kind: self.samples, **self._told(), "timeout_s": _TIMEOUT_S})

    def _told(self) -> dict[str, list[Any]]:
        """What functions at the server may read of each sample beyond it: its row's prompt and label."""
        told: dict[str, list[Any]] = {}
        if all(isinstance(row.get("prompt"), str) for row, _ in self.rows):
            told["prompts"] = [row["prompt"] for row, count in self.rows for _ in range(count)]
        if any("label" in row for row, _ in self.rows):
            told["labels"] = [row.get("label") for row, count in self.rows for _ in range(count)]
        return told

    @property
    def is_busy(self) -> bool:
        return self.future is not None and not self.future.done()


_MAX_GROUP = 64
_TIMEOUT_S = 3600.0
"""Nobody waits for a single row; the longest request of all should not end the run."""

_LEAST_PAUSE_S = 0.1


class Window:
    """Iterates over the groups with their scores, in order, while later groups are on their way.

    At most `max_samples` samples are, a last group aside; half as many with each time that the server has no room,
    and more again as it answers.
    """

    def __init__(self, groups: Iterator[Group], scorer: Scorer, max_samples: int, on_wait: Callable[[], None]) -> None:
        self._groups, self._scorer, self._on_wait = groups, scorer, on_wait
        self._max_samples = self._limit = max_samples
        self._waiting: deque[Group] = deque()

    def __enter__(self) -> Window:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._waiting:
            if group.future is not None:
                group.future.cancel()

    def __iter__(self) -> Iterator[tuple[Group, Scores]]:
        while self._fill():
            group = self._waiting[0]
            assert group.future is not None, "the first is always sent"
            if group.is_busy:
                self._on_wait()
            try:
                scores = group.future.result()
            except Overloaded as e:
                self._make_room(e)
                continue
            except UnknownModel:
                raise
            except _OF_THE_ROW as e:
                n = len(group.samples)
                scores = Scores(np.full(n, np.nan, np.float32), [str(e)] * n)
            self._waiting.popleft()
            self._limit = min(self._max_samples, self._limit + 1)
            yield group, scores

    def _fill(self) -> bool:
        """Sends what there is room for, the first in any case; returns whether there is a first."""
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
        """Takes back all that the server had no room for, and leaves it time to answer others."""
        for group in self._waiting:
            future = group.future
            if future is not None and future.done() and isinstance(future.exception(), Overloaded):
                group.future = None
        self._limit = max(1, self._limit // 2)
        self._on_wait()
        time.sleep(max(_LEAST_PAUSE_S, error.retry_after_s or 0.0))


def groups_of(rows: Iterator[tuple[int, dict[str, Any]]], source: Path, template: bool) -> Iterator[Group]:
    """Neighbouring rows with the same prompt together, as long as a request does not grow too large."""
    group: Group | None = None
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
        group = group or Group(prompt)
        group.rows.append((row, len(samples)))
        group.samples += samples
    if group is not None:
        yield group
