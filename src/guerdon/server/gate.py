"""How many requests, and bytes of their bodies, are in progress over all transports, and the bounds on them."""

from __future__ import annotations

from guerdon.config import ServerConfig
from guerdon.errors import Overloaded

_RETRY_AFTER_S = 1.0


class Gate:
    """Counts what is in progress, and refuses what goes beyond the config's bounds."""

    def __init__(self, config: ServerConfig) -> None:
        self.max_requests = config.max_requests
        self.max_bytes = max(config.max_bodies_mb, config.max_body_mb) << 20  # one body always fits
        self.num_requests = 0
        self.num_bytes = 0


class Place:
    """A context that holds one request's place at the gate; entering raises Overloaded where all are taken."""

    __slots__ = ("_gate", "_num_bytes")

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._num_bytes = 0

    def reach(self, num_bytes: int) -> None:
        """As `hold`, where these are more than were announced."""
        if num_bytes > self._num_bytes:
            self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Says how many bytes of body the request has now; raises Overloaded where the gate has no room for them."""
        gate = self._gate
        total = gate.num_bytes + num_bytes - self._num_bytes
        if total > gate.max_bytes:
            raise Overloaded(
                f"the bodies of the requests in progress would exceed {gate.max_bytes >> 20} MiB; try again",
                _RETRY_AFTER_S,
            )
        gate.num_bytes, self._num_bytes = total, num_bytes

    def __enter__(self) -> Place:
        gate = self._gate
        if gate.num_requests >= gate.max_requests:
            raise Overloaded(
                f"{gate.max_requests} requests are in progress, which is the limit; try again", _RETRY_AFTER_S
            )
        gate.num_requests += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._gate.num_requests -= 1
        self._gate.num_bytes -= self._num_bytes
