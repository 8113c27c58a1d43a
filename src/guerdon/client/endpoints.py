"""Chooses the server for a request: the fewest outstanding tokens, neither down nor full. No clock, no I/O."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from guerdon.client.calls import ModelSignature


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server as the client sees it; `outstanding` counts the tokens, or an estimate, without an answer yet."""

    url: str
    outstanding: int = 0
    num_requests: int = 0
    num_failures: int = 0
    """Consecutive failures; 0 while the server is up."""
    down_until: float = 0.0
    busy_until: float = 0.0
    """The server was full: until this time another with room is preferred."""
    last_taken: int = 0
    seen: bool = False
    """Whether it has ever answered; if not, a wrong address is more likely than a restart."""
    signatures: dict[str, ModelSignature] = field(default_factory=dict)
    """Its models' signatures by name; forgotten when the server is lost, because it may come back with other models."""


class Endpoints:
    """Balances requests over several servers. Times are seconds of any clock, given by the caller.

    A lost server gets no requests for `probe_s`, doubled with each failed probe up to `max_probe_s`; then a single
    request probes it, and the first answer takes it back. A full server gets none while another has room. After each
    `take`, call exactly one of `mark_answered`, `mark_lost`, `mark_full` and `release` with the same cost.
    """

    def __init__(self, urls: Sequence[str], *, probe_s: float = 0.5, max_probe_s: float = 15.0) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._probe_s, self._max_probe_s = probe_s, max_probe_s
        self._num_taken = 0
        self._has_waited = False

    def take(self, cost: int, now: float) -> Endpoint:
        """Returns the server for a request of `cost` tokens; if all are full or down, the one that is back first."""
        up = [e for e in self.all if _takes_requests(e, now)]
        if free := [e for e in up if now >= e.busy_until]:
            endpoint = min(free, key=lambda e: (e.outstanding, e.last_taken))
        elif up:
            endpoint = min(up, key=lambda e: (e.busy_until, e.last_taken))
        else:
            endpoint = min(self.all, key=lambda e: (e.down_until, e.last_taken))
        self._num_taken += 1
        endpoint.last_taken = self._num_taken
        endpoint.outstanding += cost
        endpoint.num_requests += 1
        return endpoint

    def mark_answered(self, endpoint: Endpoint, cost: int) -> None:
        """Records an answer, which may be an error."""
        self.release(endpoint, cost)
        endpoint.seen, endpoint.num_failures, endpoint.down_until = True, 0, 0.0

    def mark_lost(self, endpoint: Endpoint, cost: int, now: float, *, has_answered: bool = False) -> None:
        """Records that the connection failed or, if `has_answered`, that the server cannot serve."""
        self.release(endpoint, cost)
        endpoint.seen |= has_answered
        endpoint.signatures.clear()
        # Many requests fail in one crash; counted as one failure, or the next probe would be far away.
        if now >= endpoint.down_until:
            pause_s = min(self._max_probe_s, self._probe_s * 2.0 ** min(endpoint.num_failures, 30))
            endpoint.num_failures += 1
            endpoint.down_until = now + pause_s

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
        return any(_takes_requests(e, now) and now >= e.busy_until for e in self.all)

    def is_none_known(self) -> bool:
        """Returns whether every server has failed and none has ever answered: perhaps the addresses are wrong."""
        return all(e.num_failures and not e.seen for e in self.all)

    def is_first_wait(self) -> bool:
        """Returns True once: one of all calls that wait for the servers to start logs so."""
        is_first, self._has_waited = not self._has_waited, True
        return is_first


def _takes_requests(endpoint: Endpoint, now: float) -> bool:
    if endpoint.num_failures == 0:
        return True
    return now >= endpoint.down_until and endpoint.num_requests == 0
