"""Decides one call's steps, without I/O: which server, what to send next, whether to retry and when.

Each call is a generator that yields steps and is sent their results, or has their GuerdonError thrown in. The driver
performs the steps.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, TypeVar

from guerdon import errors
from guerdon.client.calls import Call, ModelSignature
from guerdon.client.endpoints import Endpoint, Endpoints
from guerdon.wire.tensors import InferReply, InferRequest

T = TypeVar("T")

log = logging.getLogger(__name__)

_FIRST_WARNING_S = 3.0
"""A call that waits longer logs a warning, and again after four times as long."""

_GLANCE_S = 0.25
"""How often a call that waits for a lost server looks whether it is back."""

Headers = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Time-outs, tries and backoff of a client's calls.

    `connect_timeout_s` limits the opening of a connection and the wait for a server's first answer, `timeout_s` a
    whole call with all its tries (a call's own `timeout_s` overrides it). A call is tried at most `tries` times, if a
    retry can help; asking server after server until one is not full is one try. The backoff starts at `backoff_s` and
    doubles up to `max_backoff_s`; a random part of up to `jitter` (0 to 1) is taken off each pause, and a server's
    Retry-After is added to it.

    If no server has ever answered, a call fails at once, because the address may be wrong; with `wait_for_start` it
    waits for them as for servers that restart, and logs so.
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
        """Retries until `timeout_s` is over: a server that restarts loads its model first, which takes minutes."""
        return cls(timeout_s=timeout_s, tries=1_000_000, wait_for_start=wait_for_start)

    def next_delay(self, attempt: int, error: errors.GuerdonError, rng: random.Random) -> float | None:
        """Returns the seconds to wait after the failed try number `attempt` (from 1), None to give up."""
        if not error.retryable or attempt >= self.tries:
            return None
        backoff_s = min(self.max_backoff_s, self.backoff_s * 2.0 ** min(attempt - 1, 60))
        return (error.retry_after_s or 0.0) + backoff_s * (1.0 - self.jitter * rng.random())


@dataclass(frozen=True, slots=True)
class _ModelStep:
    """A step at a server, about one of its models."""

    endpoint: Endpoint
    model: str


@dataclass(frozen=True, slots=True)
class Ready(_ModelStep):
    """Ask whether the model is ready: yields None; raises Unavailable or InvalidRequest if it is not."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Describe(_ModelStep):
    """Fetch the model's metadata: yields a ModelSignature."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Configure(_ModelStep):
    """Fetch the model's configuration: yields a dict in Triton's terms."""

    timeout_s: float


@dataclass(frozen=True, slots=True)
class FetchHead(_ModelStep):
    """Fetch a teacher's output head: yields the file's bytes, None if its digest is still `digest`."""

    timeout_s: float
    digest: str


@dataclass(frozen=True, slots=True)
class Infer(_ModelStep):
    """Send the request, with the headers of a trace if there is one: yields an InferResult."""

    request: InferRequest
    timeout_s: float
    trace: Headers = ()


@dataclass(frozen=True, slots=True)
class Probe(_ModelStep):
    """Start to ask whether the model is ready, without waiting, and call `RetryingCaller.end_probe` with the answer.

    No call should wait for a lost server, whose host may drop packets.
    """

    timeout_s: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Sleep."""

    seconds: float


@dataclass(frozen=True, slots=True)
class InferResult:
    """A server's reply, with the times that it states."""

    reply: InferReply
    queue_s: float = 0.0
    compute_s: float = 0.0


Exchange = Ready | Describe | Configure | FetchHead | Infer
Step = Exchange | Probe | Wait
Steps = Generator[Step, Any, T]
Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class RetryingCaller:
    """Makes the steps of calls; all calls of one client share it."""

    endpoints: Endpoints
    policy: RetryPolicy
    clock: Clock
    rng: random.Random

    def ask(self, call: Call[T]) -> Steps[T]:
        """Returns the call's result; raises its GuerdonError after the last try.

        If a connection breaks, the request goes to another server, or to the same one again: it must change nothing,
        or have an id that the server knows. If `call.may_repeat` denies both, it is not sent again once it may have
        arrived.
        """
        model, kept = call.model, [call]
        deadline = self.clock() + (self.policy.timeout_s if call.timeout_s is None else call.timeout_s)

        def infer(endpoint: Endpoint, signature: ModelSignature) -> Steps[T]:
            left_s = max(0.001, deadline - self.clock())
            try:
                result: InferResult = yield Infer(endpoint, model, kept[0].build(signature, left_s), left_s)
            except errors.Unavailable as e:
                # A full queue has refused the request, and without a connection it was never sent. Any other error may
                # be a proxy's, and the server may have the request.
                may_have_it = (
                    e.may_have_arrived if isinstance(e, errors.Unreachable) else not isinstance(e, errors.Overloaded)
                )
                if e.retryable and may_have_it and not kept[0].may_repeat(signature):
                    e.retryable = False
                    e.add_note("not retried: the server may have it, and could not recognise the retry")
                raise
            return kept[0].parse(result.reply, result.queue_s, result.compute_s)

        def send(endpoint: Endpoint) -> Steps[T]:
            known = endpoint.signatures.get(model)
            signature = yield from self._signature(endpoint, model, deadline)
            try:
                return (yield from infer(endpoint, signature))
            except errors.InvalidRequest:
                if known is None:
                    raise
                # The model may have been replaced since it was described.
                if endpoint.signatures.get(model) is known:
                    endpoint.signatures.pop(model, None)
                signature = yield from self._signature(endpoint, model, deadline)
                if signature == known:
                    raise
            return (yield from infer(endpoint, signature))

        try:
            return (yield from self._try(model, send, call.cost, deadline))
        finally:
            kept.clear()  # the frames of an error hold the functions above, and through them the request

    def describe(self, model: str) -> Steps[ModelSignature]:
        """Returns the model's signature, from a server that is up."""
        deadline = self.clock() + self.policy.timeout_s
        return (yield from self._try(model, lambda endpoint: self._signature(endpoint, model, deadline), 0, deadline))

    def configuration(self, model: str) -> Steps[dict[str, Any]]:
        """Returns the model's configuration, from a server that is up; raises the error of a server that has none."""
        limit_s = self.policy.connect_timeout_s
        return (yield from self._fetch(model, lambda at, left_s: Configure(at, model, min(limit_s, left_s))))

    def fetch_head(self, model: str, digest: str) -> Steps[bytes | None]:
        """Returns the file of a teacher's output head, None if its digest is `digest`."""
        return (yield from self._fetch(model, lambda at, left_s: FetchHead(at, model, left_s, digest)))

    def _fetch(self, model: str, make_step: Callable[[Endpoint, float], Step]) -> Steps[Any]:
        """Returns the result of one step at a server that is up; `make_step` takes the seconds left, too."""
        deadline = self.clock() + self.policy.timeout_s

        def send(endpoint: Endpoint) -> Steps[Any]:
            return (yield make_step(endpoint, max(0.001, deadline - self.clock())))

        return (yield from self._try(model, send, 0, deadline))

    def wait_ready(self, model: str, timeout_s: float) -> Steps[None]:
        """Returns when a server has the model ready; raises DeadlineExceeded with the answer of each server.

        Raises at once what no wait can mend: UnknownModel if no server has such a model, and the error of a refused
        key or certificate.
        """
        started = self.clock()
        pause_s, warn_after_s = min(0.1, self.policy.backoff_s), _FIRST_WARNING_S
        while True:
            answers: list[str] = []
            num_unknown = 0
            for endpoint in self.endpoints.all:
                left_s = started + timeout_s - self.clock()
                try:
                    yield Ready(endpoint, model, max(0.1, min(left_s, self.policy.connect_timeout_s)))
                except (errors.Unauthenticated, errors.Forbidden):
                    raise
                except errors.GuerdonError as e:
                    if isinstance(e, errors.Unreachable) and not e.retryable:
                        raise
                    unknown = None
                    if not isinstance(e, errors.Unreachable):
                        unknown = yield from self._find_unknown(endpoint, model)
                    answers.append(f"{endpoint.url}: {unknown}" if unknown else str(e))
                    num_unknown += unknown is not None
                else:
                    endpoint.seen = True
                    return
            if num_unknown == len(answers):
                raise errors.UnknownModel("; ".join(answers))
            left_s = started + timeout_s - self.clock()
            if left_s <= 0:
                raise errors.DeadlineExceeded(f"no server was ready within {timeout_s:g} s: {'; '.join(answers)}")
            if self.clock() - started >= warn_after_s and left_s > _FIRST_WARNING_S:  # else the error says it soon
                log.warning("still waiting: %s", "; ".join(answers))
                warn_after_s *= 4
            yield Wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, 2.0)

    def _find_unknown(self, endpoint: Endpoint, model: str) -> Steps[errors.UnknownModel | None]:
        """Returns the server's error if it has no such model and will have none.

        Readiness alone does not distinguish that from a model that is still loading. Other servers of the protocol
        word their error differently, and may load it later.
        """
        try:
            yield Describe(endpoint, model, self.policy.connect_timeout_s)
        except errors.UnknownModel as e:
            return e if str(e).startswith("unknown model ") else None
        except errors.GuerdonError:
            pass
        return None

    def _signature(self, endpoint: Endpoint, model: str, deadline: float) -> Steps[ModelSignature]:
        signature = endpoint.signatures.get(model)
        if signature is None:
            left_s = max(0.001, deadline - self.clock())
            signature = yield Describe(endpoint, model, min(self.policy.connect_timeout_s, left_s))
            endpoint.signatures[model] = signature
            endpoint.seen = True
        return signature

    def end_probe(self, endpoint: Endpoint, error: errors.GuerdonError | None) -> None:
        """Records the answer to a Probe, None if the model is ready."""
        # A refused key or another answer that no wait can mend is for the next request to report.
        is_ready = error is None or not isinstance(error, errors.Unavailable | errors.DeadlineExceeded)
        self.endpoints.end_probe(endpoint, self.clock(), is_ready=is_ready)

    def _try(self, model: str, send: Callable[[Endpoint], Steps[Any]], cost: int, deadline: float) -> Steps[Any]:
        endpoints = self.endpoints
        attempt, num_full, started, warn_after_s = 1, 0, self.clock(), _FIRST_WARNING_S
        retry_at = started
        while True:
            if endpoints.lost:
                yield from self._probe_lost(model)
            endpoint = endpoints.take(cost, self.clock())
            try:
                result = yield from send(endpoint)
            except errors.Unavailable as e:
                if not e.retryable:
                    endpoints.mark_answered(endpoint, cost)
                    raise
                error = e
            except errors.GuerdonError as e:
                if isinstance(e, errors.DeadlineExceeded):
                    endpoints.release(endpoint, cost)
                else:
                    endpoints.mark_answered(endpoint, cost)
                raise
            except BaseException:
                endpoints.release(endpoint, cost)
                raise
            else:
                endpoints.mark_answered(endpoint, cost)
                return result

            now = self.clock()
            if isinstance(error, errors.Overloaded):
                endpoints.mark_full(endpoint, cost, now + max(error.retry_after_s or 0.0, self.policy.backoff_s))
                num_full += 1
                if num_full < len(endpoints.all) and endpoints.has_free(now) and now < deadline:
                    continue  # not counted as a try, or many full servers would use up all tries without a pause
            else:
                endpoints.mark_lost(endpoint, cost, now, has_answered=not isinstance(error, errors.Unreachable))
            if endpoints.is_none_known():
                if len(endpoints.all) > 1:
                    error = errors.Unreachable(f"none of the servers answers; {error}")
                if not self.policy.wait_for_start:
                    raise error  # nothing runs at these addresses: a retry would only hide a mistyped port
                if endpoints.is_first_wait():
                    log.warning("%s; waiting for it, up to %.0f s", error, deadline - started)
            if now >= retry_at:  # else a probe had the call sent early, which is no try
                delay_s = self.policy.next_delay(attempt, error, self.rng)
                if delay_s is not None and not isinstance(error, errors.Overloaded) and endpoints.has_free(now):
                    delay_s = 0.0
                if delay_s is None or now + delay_s >= deadline:
                    if attempt > 1:
                        error.add_note(f"gave up after {attempt} tries")
                    raise error
                attempt, retry_at = attempt + 1, now + delay_s
            num_full, waited_s = 0, now - started
            if waited_s >= warn_after_s:
                if endpoints.may_warn(now):
                    log.warning("no answer for %.0f s: %s; trying again", waited_s, error)
                warn_after_s = 4 * waited_s
            if isinstance(error, errors.Overloaded):
                if retry_at > now:
                    yield Wait(retry_at - now)
            else:  # waits until a lost server is back, or for the next try
                while (left_s := retry_at - (now := self.clock())) > 0 and not endpoints.has_free(now):
                    yield Wait(min(left_s, _GLANCE_S))
                    yield from self._probe_lost(model)

    def _probe_lost(self, model: str) -> Steps[None]:
        for endpoint in self.endpoints.take_probes(self.clock()):
            yield Probe(endpoint, model, self.policy.connect_timeout_s)
