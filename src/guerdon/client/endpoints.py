"""Which server takes the next request: the fewest outstanding tokens, neither down nor full. No clock, no I/O."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

from guerdon.client.calls import ModelSignature


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server as the client knows it; `outstanding` is the tokens (or their estimate) it has not answered yet."""

    url: str
    outstanding: int = 0
    num_requests: int = 0
    num_failures: int = 0
    """Losses in a row; 0 while the server is up."""
    down_until: float = 0.0
    busy_until: float = 0.0
    """It is up and said that it has no room: until then it is passed over where another has."""
    last_taken: int = 0
    seen: bool = False
    """Whether it has ever answered: a server that never did is more likely a wrong address than a restart."""
    signatures: dict[str, ModelSignature] = field(default_factory=dict)
    """What its models take and give, by name; asked anew after a loss, as other models may have come back."""


class Endpoints:
    """Balances requests over several servers. Thread-safe; times are seconds of any clock, given by the caller.

    A lost server is left out for `probe_s`, doubled with each failed probe up to `max_probe_s`; then a single
    request tries it, and the first answer takes it back. A full one is passed over while another has room. Every
    `take` must be followed by exactly one of `answered`, `lost`, `refused` and `release` with the same cost.
    """

    def __init__(self, urls: Sequence[str], *, probe_s: float = 0.5, max_probe_s: float = 15.0) -> None:
        self.all = [Endpoint(url) for url in urls]
        self._probe_s, self._max_probe_s = probe_s, max_probe_s
        self._lock = threading.Lock()
        self._num_taken = 0
        self._has_waited = False

    def take(self, cost: int, now: float) -> Endpoint:
        """The server for a request of `cost` tokens; where all are full or down, the one that will be back first."""
        with self._lock:
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

    def answered(self, endpoint: Endpoint, cost: int) -> None:
        """The server gave an answer, be it an error."""
        with self._lock:
            self._give_back(endpoint, cost)
            endpoint.seen, endpoint.num_failures, endpoint.down_until = True, 0, 0.0

    def lost(self, endpoint: Endpoint, cost: int, now: float, *, spoke: bool = False) -> None:
        """The connection failed or, where it `spoke`, the server said that it cannot serve."""
        with self._lock:
            self._give_back(endpoint, cost)
            endpoint.seen |= spoke
            endpoint.signatures.clear()
            # All requests that one crash took down count as one failure, or the next probe would be far away.
            if now >= endpoint.down_until:
                pause_s = min(self._max_probe_s, self._probe_s * 2.0 ** min(endpoint.num_failures, 30))
                endpoint.num_failures += 1
                endpoint.down_until = now + pause_s

    def refused(self, endpoint: Endpoint, cost: int, until: float) -> None:
        """The server has no room for the request; it counts as full until the time `until`."""
        with self._lock:
            self._give_back(endpoint, cost)
            endpoint.seen, endpoint.busy_until = True, until

    def release(self, endpoint: Endpoint, cost: int) -> None:
        """The request ended without saying anything about the server: cancelled, or timed out."""
        with self._lock:
            self._give_back(endpoint, cost)

    def any_free(self, now: float) -> bool:
        """Whether some server is neither down nor full."""
        with self._lock:
            return any(_takes_requests(e, now) and now >= e.busy_until for e in self.all)

    def none_ever_answered(self) -> bool:
        """Whether every server has failed and none has answered yet: the addresses are wrong, or nothing runs there."""
        with self._lock:
            return all(e.num_failures and not e.seen for e in self.all)

    def is_first_wait(self) -> bool:
        """Whether nobody has asked this before: of all calls that wait for the servers to start one says so."""
        with self._lock:
            is_first, self._has_waited = not self._has_waited, True
            return is_first

    @staticmethod
    def _give_back(endpoint: Endpoint, cost: int) -> None:
        endpoint.outstanding -= cost
        endpoint.num_requests -= 1


def _takes_requests(endpoint: Endpoint, now: float) -> bool:
    if endpoint.num_failures == 0:
        return True
    return now >= endpoint.down_until and endpoint.num_requests == 0
