"""The load generator: numbered requests in a closed loop, or at given times whatever becomes of earlier ones."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from guerdon.client import Scores
from guerdon.client.reward_client import AsyncRewardClient
from guerdon.errors import GuerdonError
from load_requests import Load

NOT_SENT = "NotSent"
"""The error of a request that was due while `max_open` others were in flight."""
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class Extent:
    """The end of a load: whichever bound is reached first; None does not bound."""

    seconds: float | None
    requests: int | None

    def allows(self, index: int, sent_s: float) -> bool:
        """Whether request `index` may be sent at `sent_s`."""
        return (self.requests is None or index < self.requests) and (self.seconds is None or sent_s < self.seconds)


def poisson(rate: float, extent: Extent, seed: int) -> Iterator[float]:
    """Yields the times of a Poisson process with `rate` requests per second, from 0."""
    random = np.random.default_rng(seed)
    index, due_s = 0, 0.0
    while extent.allows(index, due_s):
        yield due_s
        index, due_s = index + 1, due_s + float(random.exponential(1 / rate))


class LoadGenerator:
    """Sends numbered requests; a subclass sends one of them."""

    def __init__(self, max_open: int = 1024) -> None:
        self._max_open = max_open
        self._num_open = 0
        self._started = self._cpu_started = 0.0
        self.cores = 0.0
        """Cores that this process used while it sent; waiting for the last answers of an open loop is left out."""

    async def send(self, index: int, due_s: float | None) -> bool:
        """Sends request `index`, due at `due_s` or now; returns False if the server was out of reach or failed."""
        raise NotImplementedError

    def skip(self, index: int, due_s: float) -> None:
        """Records that request `index` was not sent, because `max_open` were in flight."""
        raise NotImplementedError

    async def closed(self, concurrency: int, extent: Extent, first: int = 0) -> None:
        """Keeps `concurrency` requests in flight, numbered from `first`; returns after the last answer."""
        self._start()
        num_sent = 0

        async def send_in_turn() -> None:
            nonlocal num_sent
            while extent.allows(num_sent, self.now_s()):
                index, num_sent = num_sent, num_sent + 1
                if not await self.send(first + index, None):
                    await asyncio.sleep(_PAUSE_S)  # do not busy-loop on a dead server

        await asyncio.gather(*(send_in_turn() for _ in range(min(concurrency, extent.requests or concurrency))))
        self._stop()

    async def open(self, due: Iterable[float], first: int = 0) -> None:
        """Sends a request at each of the ascending times, in seconds; returns after the last answer."""
        self._start()
        async with asyncio.TaskGroup() as tasks:
            for index, due_s in enumerate(due, first):
                if (wait_s := due_s - self.now_s()) > 0:
                    await asyncio.sleep(wait_s)
                if self._num_open < self._max_open:
                    self._num_open += 1
                    tasks.create_task(self._send_counted(index, due_s))
                    await asyncio.sleep(0)  # start the task
                else:
                    self.skip(index, due_s)
            self._stop()

    def now_s(self) -> float:
        """Returns the seconds since the start."""
        return time.perf_counter() - self._started

    async def _send_counted(self, index: int, due_s: float) -> None:
        try:
            await self.send(index, due_s)
        finally:
            self._num_open -= 1

    def _start(self) -> None:
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def _stop(self) -> None:
        self.cores = (time.process_time() - self._cpu_started) / self.now_s()


@dataclass(frozen=True, slots=True)
class Answer:
    """The outcome of one request; times in seconds, `sent_s` since the start.

    `seconds` count from when the request was due and include `late_s`, the delay of this client. `queue_s` and
    `compute_s` are the server's own times. `error` is the class of the error of the request or of its first failed
    sample, `text` its message.
    """

    sent_s: float
    seconds: float
    num_sequences: int
    num_tokens: int | None
    num_failed: int = 0
    late_s: float = 0.0
    queue_s: float = 0.0
    compute_s: float = 0.0
    weights_version: str = ""
    error: str = ""
    text: str = ""

    @property
    def done_s(self) -> float:
        """Seconds from the start to the answer."""
        return self.sent_s + self.seconds


class ClientLoad(LoadGenerator):
    """Sends a load through guerdon's client; `on_answer` gets every answer as it arrives."""

    def __init__(
        self,
        client: AsyncRewardClient,
        load: Load,
        timeout_s: float,
        on_answer: Callable[[Answer], None] = lambda _: None,
        max_open: int = 1024,
    ) -> None:
        super().__init__(max_open)
        self._client, self._load, self._timeout_s, self._on_answer = client, load, timeout_s, on_answer

    def skip(self, index: int, due_s: float) -> None:
        text = f"{self._max_open} requests were in flight when it was due"
        n = self._load.num_sequences(index)  # not the request itself: there is no time to make it
        self._on_answer(Answer(due_s, 0.0, n, None, n, error=NOT_SENT, text=text))

    async def send(self, index: int, due_s: float | None) -> bool:
        request = self._load.request(index)
        now_s = self.now_s()
        sent_s = now_s if due_s is None else due_s
        late_s = now_s - sent_s
        try:
            scores = await self._client.score(**request.samples, timeout_s=self._timeout_s)
        except GuerdonError as e:
            n, seconds = request.num_sequences, self.now_s() - sent_s
            answer = Answer(
                sent_s, seconds, n, request.num_tokens, n, late_s, error=type(e).__name__, text=str(e)
            )  # fmt: skip
        else:
            answer = _answer_of(scores, sent_s, self.now_s() - sent_s, late_s, request.num_tokens)
        self._on_answer(answer)
        return not answer.error


def _answer_of(scores: Scores, sent_s: float, seconds: float, late_s: float, num_tokens: int | None) -> Answer:
    failed = [error for error in scores.errors if error is not None]
    return Answer(
        sent_s=sent_s,
        seconds=seconds,
        num_sequences=len(scores),
        num_tokens=num_tokens,
        num_failed=len(failed),
        late_s=late_s,
        queue_s=scores.queue_s,
        compute_s=scores.compute_s,
        weights_version=scores.weights_version,
        error="SampleFailed" if failed else "",
        text=failed[0] if failed else "",
    )


class Bar:
    """A progress bar of requests if their number is known, else of seconds; hidden unless stderr is a terminal."""

    def __init__(self, extent: Extent, hidden: bool) -> None:
        self._counts_requests = extent.requests is not None
        self._num_scored = self._num_failed = 0
        total = extent.requests if self._counts_requests else extent.seconds
        unit = "{n_fmt}/{total_fmt} requests" if self._counts_requests else "{n:.0f}/{total:.0f} s"
        self._bar: Any = tqdm(
            total=total,
            disable=True if hidden else None,  # None hides it without a terminal
            bar_format="{l_bar}{bar}| " + unit + "{postfix}",
            leave=False,
        )

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def show(self, answer: Answer) -> None:
        """Counts one more answer."""
        if self._bar.disable:
            return
        self._num_scored += answer.num_sequences - answer.num_failed
        self._num_failed += answer.num_failed
        failed = f", {self._num_failed:,} failed" if self._num_failed else ""
        rate = self._num_scored / max(answer.done_s, 1e-9)
        self._bar.set_postfix_str(f"{rate:,.1f} sequences/s{failed}", refresh=False)
        done = 1 if self._counts_requests else max(0.0, min(answer.done_s, self._bar.total) - self._bar.n)
        self._bar.update(done)
