"""The load sent: as many requests at once as asked for, or each at its time, whatever becomes of those before."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from guerdon.cli.bench.load import Load
from guerdon.client.clients import AsyncRewardClient
from guerdon.client.results import Scores
from guerdon.errors import GuerdonError

NOT_SENT = "NotSent"
"""The kind of error of a request that was due while `max_open` others waited for their answers."""
_PAUSE_S = 0.1
"""After a failed request its place waits this long, so that a server that is down is not asked without a break."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came of one request: when it was sent, or due, after the first, and how long the answer took, in seconds.

    `late_s` is how long after it was due this command came to send it, which is a part of `seconds`. `queue_s` and
    `compute_s` are the server's own times. `error` is the class of what the request ended with, or of its first failed
    sample; `text` what it says.
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
        """When it was answered, after the first was sent."""
        return self.sent_s + self.seconds


@dataclass(frozen=True, slots=True)
class Extent:
    """How much is sent: until one of the two is reached; None does not bound."""

    seconds: float | None
    requests: int | None

    def allows(self, index: int, sent_s: float) -> bool:
        """Whether the request of that number may still be sent."""
        return (self.requests is None or index < self.requests) and (self.seconds is None or sent_s < self.seconds)


class Driver:
    """Sends one load by one client; every answer is told to `on_answer`, in the order in which they come."""

    def __init__(
        self,
        client: AsyncRewardClient,
        load: Load,
        timeout_s: float,
        on_answer: Callable[[Answer], None],
        max_open: int = 1024,
    ) -> None:
        self._client, self._load, self._timeout_s, self._on_answer = client, load, timeout_s, on_answer
        self._max_open = max_open
        self._started = self._cpu_started = 0.0
        self._num_open = 0
        self.cores = 0.0
        """How many cores this process kept busy: with a rate while it sent, as to wait for the answers takes none."""

    async def closed(self, concurrency: int, extent: Extent, first: int = 0) -> None:
        """Keeps `concurrency` requests on their way, from number `first` on; returns with the last answer."""
        self._start()
        num_sent = 0

        async def one() -> None:
            nonlocal num_sent
            while extent.allows(num_sent, self._now()):
                index, num_sent = num_sent, num_sent + 1
                if (await self._ask(first + index)).error:
                    await asyncio.sleep(_PAUSE_S)

        await asyncio.gather(*(one() for _ in range(min(concurrency, extent.requests or concurrency))))
        self._sent()

    async def open(self, rate: float, extent: Extent, seed: int, first: int = 0) -> None:
        """Sends `rate` requests a second on average, at random times (a Poisson process); returns with the last answer.

        A request's time counts from when it was due.
        """
        random = np.random.default_rng(seed)
        self._start()
        index, due_s = 0, 0.0
        async with asyncio.TaskGroup() as tasks:
            while extent.allows(index, due_s):
                if (wait_s := due_s - self._now()) > 0:
                    await asyncio.sleep(wait_s)
                if self._num_open < self._max_open:
                    tasks.create_task(self._ask(first + index, due_s))
                    await asyncio.sleep(0)  # it begins, and is counted
                else:
                    self._on_answer(self._not_sent(first + index, due_s))
                index, due_s = index + 1, due_s + float(random.exponential(1 / rate))
            self._sent()

    def _start(self) -> None:
        self._started, self._cpu_started = time.perf_counter(), time.process_time()

    def _sent(self) -> None:
        self.cores = (time.process_time() - self._cpu_started) / self._now()

    def _now(self) -> float:
        return time.perf_counter() - self._started

    def _not_sent(self, index: int, due_s: float) -> Answer:
        text = f"{self._max_open} requests waited for their answers when it was due"
        n = self._load.num_sequences(index)  # the request itself is not made: there is no time for it
        return Answer(due_s, 0.0, n, None, n, error=NOT_SENT, text=text)

    async def _ask(self, index: int, due_s: float | None = None) -> Answer:
        """Without `due_s` it is due once it is made."""
        self._num_open += 1
        request = self._load.request(index)
        n, num_tokens = request.num_sequences, request.num_tokens
        now_s = self._now()
        sent_s = now_s if due_s is None else due_s
        late_s = now_s - sent_s
        try:
            scores = await self._client.score(**request.samples, timeout_s=self._timeout_s)
        except GuerdonError as e:
            kind, text = type(e).__name__, str(e)
            answer = Answer(sent_s, self._now() - sent_s, n, num_tokens, n, late_s, error=kind, text=text)
        else:
            answer = _of_scores(scores, sent_s, self._now() - sent_s, late_s, num_tokens)
        finally:
            self._num_open -= 1
        self._on_answer(answer)
        return answer


def _of_scores(scores: Scores, sent_s: float, seconds: float, late_s: float, num_tokens: int | None) -> Answer:
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
