"""Chooses the server for a request: the fewest outstanding tokens, neither down nor full. No clock, no I/O."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from guerdon.client.calls import ModelSignature

_WARNINGS_S = 2.0


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server as the client sees it; `outstanding` counts the tokens, or an estimate, without an answer yet."""

    url: str
    outstanding: int = 0
    num_requests: int = 0
    num_failures: int = 0
    """Consecutive failures; 0 while the server is up."""
    probe_at: float = 0.0
    """When a lost server is probed next."""
    is_probed: bool = False
    """A probe of the lost server is under way."""
    is_back: bool = False
    """A probe found the lost server ready; a single request then tries it."""
    busy_until: float = 0.0
    """The server was full: until this time another with room is preferred."""
    last_taken: int = 0
    seen: bool = False
    """Whether it has ever answered; if not, a wrong address is more likely than a restart."""
    signatures: dict[str, ModelSignature] = field(default_factory=dict)
    """Its models' signatures by name; forgotten when the server is lost, because it may come back with other models."""


class Endpoints:
    """Balances requests over several servers. Times are seconds of any clock, given by the caller.

    A lost server gets no requests. It is probed about every `probe_s`, at random times, so that many clients do not
    probe it at once; when a probe finds it ready, a single request tries it, and the first answer takes it back. A full
    server gets no requests while another has room. After each `take`, call exactly one of `mark_answered`, `mark_lost`,
    `mark_full` and `release` with the same cost; after each `take_probes`, call `end_probe` for each server.
    """

    def __init__(self, urls: Sequence[str], *, probe_s: float = 1.0, rng: random.Random | None = None) -> None:
        self.all = [Endpoint(url) for url in urls]
        self.lost: set[Endpoint] = set()
        self._probe_s, self._rng = probe_s, rng or random.Random()
        self._num_taken = 0
        self._has_waited = False
        self._warned_at = -math.inf

    def take(self, cost: int, now: float) -> Endpoint:
        """Returns the server for a request of `cost` tokens; if all are full or down, the one to expect back first."""
        up = [e for e in self.all if _takes_requests(e)]
        if free := [e for e in up if now >= e.busy_until]:
            endpoint = min(free, key=lambda e: (e.outstanding, e.last_taken))
        elif up:
            endpoint = min(up, key=lambda e: (e.busy_until, e.last_taken))
        else:
            endpoint = min(self.all, key=lambda e: (e.probe_at, e.last_taken))
        self._num_taken += 1
        endpoint.last_taken = self._num_taken
        endpoint.outstanding += cost
        endpoint.num_requests += 1
        return endpoint

    def mark_answered(self, endpoint: Endpoint, cost: int) -> None:
        """Records an answer, which may be an error."""
        self.release(endpoint, cost)
        endpoint.seen, endpoint.num_failures, endpoint.is_back = True, 0, False
        self.lost.discard(endpoint)

    def mark_lost(self, endpoint: Endpoint, cost: int, now: float, *, has_answered: bool = False) -> None:
        """Records that the connection failed or, if `has_answered`, that the server cannot serve."""
        self.release(endpoint, cost)
        endpoint.seen |= has_answered
        endpoint.is_back = False
        endpoint.signatures.clear()
        self.lost.add(endpoint)
        # Many requests fail in one crash; were each to delay the probe, the last one would.
        if endpoint.num_failures == 0 or now >= endpoint.probe_at:
            endpoint.num_failures += 1
            self._plan_probe(endpoint, now)

    def take_probes(self, now: float) -> list[Endpoint]:
        """Returns the lost servers to probe now, each by one probe at a time."""
        due = [e for e in self.lost if not (e.is_probed or e.is_back) and now >= e.probe_at]
        for endpoint in due:
            endpoint.is_probed = True
        return due

    def end_probe(self, endpoint: Endpoint, now: float, *, is_ready: bool) -> None:
        """Records the end of a probe."""
        endpoint.is_probed = False
        if not is_ready:
            self._plan_probe(endpoint, now)
        elif endpoint in self.lost:  # else a request was answered meanwhile
            endpoint.seen = endpoint.is_back = True

    def mark_full(self, endpoint: Endpoint, cost: int, until: float) -> None:
        """Records that the server has no room until the time `until`."""
        self.release(endpoint, cost)
        endpoint.seen, endpoint.busy_until = True, until

    def release(self, endpoint: Endpoint, cost: int) -> None:
        """Records the end of a request that reveals nothing about the server: it was cancelled, or timed out."""
        endpoint.outstanding -= cost
        endpoint.num_requests -= 1

    def has_free(self, now: float) -> bool:
        """Returns whether some server is neither down nor full."""
        return any(_takes_requests(e) and now >= e.busy_until for e in self.all)

    def is_none_known(self) -> bool:
        """Returns whether every server has failed and none has ever answered: perhaps the addresses are wrong."""
        return all(e.num_failures and not e.seen for e in self.all)

    def is_first_wait(self) -> bool:
        """Returns True once: one of all calls that wait for the servers to start logs so."""
        is_first, self._has_waited = not self._has_waited, True
        return is_first

    def may_warn(self, now: float) -> bool:
        """Returns True once in two seconds: one of all calls that wait for the same servers logs so."""
        is_due = now - self._warned_at >= _WARNINGS_S
        if is_due:
            self._warned_at = now
        return is_due

    def _plan_probe(self, endpoint: Endpoint, now: float) -> None:
        endpoint.probe_at = now + self._probe_s * self._rng.uniform(0.75, 1.25)


def _takes_requests(endpoint: Endpoint) -> bool:
    return endpoint.num_failures == 0 or (endpoint.is_back and endpoint.num_requests == 0)
