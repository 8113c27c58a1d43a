"""The walk of one call, without I/O: which server, which step next, whether to try again and when.

Each call is a generator that yields steps and is sent their results, or has their GuerdonError thrown in. The
clients only perform the steps, one by threads and one by asyncio.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from guerdon.client.calls import Errand, ModelSignature
from guerdon.client.endpoints import Endpoint, Endpoints
from guerdon.client.spans import Headers
from guerdon.errors import (
    DeadlineExceeded,
    Forbidden,
    GuerdonError,
    InvalidRequest,
    Overloaded,
    Unauthenticated,
    Unavailable,
    UnknownModel,
    Unreachable,
)
from guerdon.wire.kserve import InferReply, InferRequest

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_WORD_AFTER_S = 3.0
"""A call that waits longer says so on the log, and again each time that four times as long has gone by."""


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time-outs, tries and pauses of a client's calls.

    `connect_timeout_s` bounds the opening of a connection and a server's first sign of life, `timeout_s` a whole
    call with all its tries (a call's own `timeout_s` overrides it). A call is tried at most `tries` times, where a
    retry can help; asking server after server until one is not full is one try. The pauses between start at
    `backoff_s` and double up to `max_backoff_s`; each is shortened by a random part of up to `jitter` (0 to 1), and
    comes on top of a server's Retry-After.

    A call for which none of the servers has ever answered fails at once, as the address may be wrong; with
    `wait_for_start` it waits for them as for servers that restart, and the log says so.
    """

    connect_timeout_s: float = 5.0
    timeout_s: float = 600.0
    tries: int = 10
    backoff_s: float = 0.25
    max_backoff_s: float = 10.0
    jitter: float = 0.5
    wait_for_start: bool = False

    @classmethod
    def patient(cls, timeout_s: float, *, wait_for_start: bool = False) -> RetryPolicy:
        """Tries until the time is over: a server that is started again loads its model first, which takes minutes."""
        return cls(timeout_s=timeout_s, tries=1_000_000, wait_for_start=wait_for_start)

    def next_delay(self, attempt: int, error: GuerdonError, rng: random.Random) -> float | None:
        """Seconds to wait after the failed try number `attempt` (from 1), or None to give up."""
        if not error.retryable or attempt >= self.tries:
            return None
        backoff_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt - 1, 60))
        return (error.retry_after_s or 0.0) + backoff_s * (1.0 - self.jitter * rng.random())


@dataclass(frozen=True, slots=True)
class Ready:
    """Ask whether the model is ready: nothing comes back; Unavailable or InvalidRequest where it is not."""

    endpoint: Endpoint
    model: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Describe:
    """Fetch the model's metadata; a ModelSignature comes back."""

    endpoint: Endpoint
    model: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Configure:
    """Fetch the model's configuration; a dict in Triton's terms comes back."""

    endpoint: Endpoint
    model: str
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Infer:
    """Send the request, with the headers of a trace where there is one; an InferResult comes back."""

    endpoint: Endpoint
    model: str
    request: InferRequest
    timeout_s: float
    trace: Headers = ()


@dataclass(frozen=True, slots=True)
class Wait:
    """Do nothing for some seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class InferResult:
    """A server's reply, and the times that it states beside it."""

    reply: InferReply
    queue_s: float = 0.0
    compute_s: float = 0.0


Step = Ready | Describe | Configure | Infer | Wait
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Caller:
    """What all calls of one client share."""

    endpoints: Endpoints
    policy: RetryPolicy
    clock: Clock
    rng: random.Random

    def ask(self, errand: Errand[T]) -> Generator[Step, Any, T]:
        """The errand's result; raises its GuerdonError after the last try.

        A connection that breaks moves the request to another server, or to the same once more: what is asked must
        either change nothing, or be known to the server by its id. What is neither, by `errand.may_repeat`, is sent
        no second time once it may have arrived.
        """
        model, asked = errand.model, [errand]
        deadline = self.clock() + (self.policy.timeout_s if errand.timeout_s is None else errand.timeout_s)

        def infer(endpoint: Endpoint, signature: ModelSignature) -> Generator[Step, Any, T]:
            left_s = max(0.001, deadline - self.clock())
            try:
                result: InferResult = yield Infer(endpoint, model, asked[0].build(signature, left_s), left_s)
            except Unavailable as e:
                # A full queue has not taken it, and without a connection it has not come to any. All else may come
                # from a proxy behind which the server has it.
                may_have_it = e.may_have_arrived if isinstance(e, Unreachable) else not isinstance(e, Overloaded)
                if e.retryable and may_have_it and not asked[0].may_repeat(signature):
                    e.retryable = False
                    e.add_note("not sent again: the server may have got it, and would not know it a second time")
                raise
            return asked[0].parse(result.reply, result.queue_s, result.compute_s)

        def send(endpoint: Endpoint) -> Generator[Step, Any, T]:
            known = endpoint.signatures.get(model)
            signature = yield from self._signature(endpoint, model, deadline)
            try:
                return (yield from infer(endpoint, signature))
            except InvalidRequest:
                if known is None:
                    raise
                # Another model may have come in the place of the one that was described.
                if endpoint.signatures.get(model) is known:
                    endpoint.signatures.pop(model, None)
                signature = yield from self._signature(endpoint, model, deadline)
                if signature == known:
                    raise
            return (yield from infer(endpoint, signature))

        try:
            return (yield from self._try(send, errand.cost, deadline))
        finally:
            asked.clear()  # an error's frames keep the functions above, and by them the request

    def describe(self, model: str) -> Generator[Step, Any, ModelSignature]:
        """The model's signature, from the server that is up."""
        deadline = self.clock() + self.policy.timeout_s
        return (yield from self._try(lambda endpoint: self._signature(endpoint, model, deadline), 0, deadline))

    def configuration(self, model: str) -> Generator[Step, Any, dict[str, Any]]:
        """The model's configuration, from the server that is up; raises the server's error if it tells none."""
        deadline = self.clock() + self.policy.timeout_s

        def ask(endpoint: Endpoint) -> Generator[Step, Any, dict[str, Any]]:
            left_s = max(0.001, deadline - self.clock())
            return (yield Configure(endpoint, model, min(self.policy.connect_timeout_s, left_s)))

        return (yield from self._try(ask, 0, deadline))

    def wait_ready(self, model: str, timeout_s: float) -> Generator[Step, Any, None]:
        """Returns once some server has the model ready; raises DeadlineExceeded saying what each of them said.

        Raises UnknownModel at once where every server says that it has no such model, and what no waiting mends: a
        key or a certificate that is refused.
        """
        started = self.clock()
        pause_s, word_after_s = min(0.1, self.policy.backoff_s), _FIRST_WORD_AFTER_S
        while True:
            said: list[str] = []
            num_unknown = 0
            for endpoint in self.endpoints.all:
                left_s = started + timeout_s - self.clock()
                try:
                    yield Ready(endpoint, model, max(0.1, min(left_s, self.policy.connect_timeout_s)))
                except (Unauthenticated, Forbidden):
                    raise
                except GuerdonError as e:
                    if isinstance(e, Unreachable) and not e.retryable:
                        raise
                    unknown = None
                    if not isinstance(e, Unreachable):
                        unknown = yield from self._unknown(endpoint, model)
                    said.append(f"{endpoint.url}: {unknown}" if unknown else str(e))
                    num_unknown += unknown is not None
                else:
                    endpoint.seen = True
                    return
            if num_unknown == len(said):
                raise UnknownModel("; ".join(said))
            left_s = started + timeout_s - self.clock()
            if left_s <= 0:
                raise DeadlineExceeded(f"no server was ready within {timeout_s:g} s: {'; '.join(said)}")
            if self.clock() - started >= word_after_s:
                log.warning("still waiting: %s", "; ".join(said))
                word_after_s *= 4
            yield Wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 2.0)

    def _unknown(self, endpoint: Endpoint, model: str) -> Generator[Step, Any, UnknownModel | None]:
        """The server's error where it has no such model and will have none.

        Readiness alone does not tell that from a model that is loading, and other servers of the protocol, which
        use other words, may load it yet.
        """
        try:
            yield Describe(endpoint, model, self.policy.connect_timeout_s)
        except UnknownModel as e:
            return e if str(e).startswith("unknown model ") else None
        except GuerdonError:
            pass
        return None

    def _signature(self, endpoint: Endpoint, model: str, deadline: float) -> Generator[Step, Any, ModelSignature]:
        signature = endpoint.signatures.get(model)
        if signature is None:
            left_s = max(0.001, deadline - self.clock())
            signature = yield Describe(endpoint, model, min(self.policy.connect_timeout_s, left_s))
            endpoint.signatures[model] = signature
            endpoint.seen = True
        return signature

    def _try(
        self, send: Callable[[Endpoint], Generator[Step, Any, Any]], cost: int, deadline: float
    ) -> Generator[Step, Any, Any]:
        endpoints = self.endpoints
        attempt, num_full, started, word_after_s = 1, 0, self.clock(), _FIRST_WORD_AFTER_S
        while True:
            endpoint = endpoints.take(cost, self.clock())
            try:
                result = yield from send(endpoint)
            except Unavailable as e:
                if not e.retryable:
                    endpoints.answered(endpoint, cost)
                    raise
                error = e
            except GuerdonError as e:
                if isinstance(e, DeadlineExceeded):
                    endpoints.release(endpoint, cost)
                else:
                    endpoints.answered(endpoint, cost)
                raise
            except BaseException:
                endpoints.release(endpoint, cost)
                raise
            else:
                endpoints.answered(endpoint, cost)
                return result

            now = self.clock()
            if isinstance(error, Overloaded):
                endpoints.refused(endpoint, cost, now + max(error.retry_after_s or 0.0, self.policy.backoff_s))
                num_full += 1
                if num_full < len(endpoints.all) and endpoints.any_free(now) and now < deadline:
                    continue  # counts as no try: of many servers that are all full, none would be left to wait with
            else:
                endpoints.lost(endpoint, cost, now, spoke=not isinstance(error, Unreachable))
            if endpoints.none_ever_answered():
                if len(endpoints.all) > 1:
                    error = Unreachable(f"none of the servers answers; {error}")
                if not self.policy.wait_for_start:
                    raise error  # nothing runs at these addresses: trying on would only hide a mistyped port
                if endpoints.is_first_wait():
                    log.warning("%s; waiting for it, up to %.0f s", error, deadline - started)
            delay_s = self.policy.next_delay(attempt, error, self.rng)
            if delay_s is not None and not isinstance(error, Overloaded) and endpoints.any_free(now):
                delay_s = 0.0
            if delay_s is None or self.clock() + delay_s >= deadline:
                if attempt > 1:
                    error.add_note(f"gave up after {attempt} tries")
                raise error
            waited_s = self.clock() - started
            if waited_s >= word_after_s:
                log.warning("no answer for %.0f s: %s; trying again", waited_s, error)
                word_after_s = 4 * waited_s
            attempt, num_full = attempt + 1, 0
            if delay_s:
                yield Wait(delay_s)
