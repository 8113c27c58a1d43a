"""How many requests, and bytes of their bodies, are in progress over all transports, and the bounds on them."""

from __future__ import annotations

from collections.abc import Collection

from guerdon.errors import Overloaded
from guerdon.server.batching.sharing import Shares
from guerdon.settings.config import LimitsConfig

RETRY_AFTER_S = 1.0


class Gate:
    """Counts what is in progress, and refuses what goes beyond the config's bounds.

    `clients` are the names of those who share both evenly once there is not enough of it.
    """

    def __init__(self, config: LimitsConfig, clients: Collection[str] = ()) -> None:
        # One body always fits; where clients have parts of their own, into everybody's half.
        least_mb = config.max_body_mb * (2 if len(clients) > 1 else 1)
        self.requests = Shares(config.max_requests, clients)
        self.bytes = Shares(max(config.max_bodies_mb, least_mb) << 20, clients)

    @property
    def num_requests(self) -> int:
        """How many requests are in progress."""
        return self.requests.taken

    @property
    def num_bytes(self) -> int:
        """How many bytes their bodies have."""
        return self.bytes.taken

    def check_room(self, client: str) -> None:
        """Raises Overloaded where the client may have no more requests in progress."""
        if not self.requests.has_room(client, 1):
            raise Overloaded(
                f"{self.requests.total} requests are in progress, which is the limit{_share(self.requests, client)}; "
                "try again",
                RETRY_AFTER_S,
            )


class Place:
    """A context that holds one request's place at the gate; entering raises Overloaded where all are taken."""

    __slots__ = ("_client", "_gate", "_num_bytes", "_num_requests")

    def __init__(self, gate: Gate, client: str = "") -> None:
        self._gate = gate
        self._client = client
        self._num_bytes = 0
        self._num_requests = 0

    def reach(self, num_bytes: int) -> None:
        """As `hold`, where these are more than were announced."""
        if num_bytes > self._num_bytes:
            self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Says how many bytes of body the request has now; raises Overloaded where the gate has no room for them."""
        more, total = num_bytes - self._num_bytes, self._gate.bytes
        if more > 0 and not total.has_room(self._client, more):
            raise Overloaded(
                f"the bodies of the requests in progress would exceed {total.total >> 20} MiB"
                f"{_share(total, self._client)}; try again",
                RETRY_AFTER_S,
            )
        total.take(self._client, more)
        self._num_bytes = num_bytes

    def answered(self) -> None:
        """Says that the request's answer is there: it is no longer in progress, and holds its bytes alone."""
        self._gate.requests.give(self._client, self._num_requests)
        self._num_requests = 0

    def __enter__(self) -> Place:
        self._gate.check_room(self._client)
        self._gate.requests.take(self._client, 1)
        self._num_requests = 1
        return self

    def __exit__(self, *_: object) -> None:
        self.answered()
        self._gate.bytes.give(self._client, self._num_bytes)


def _share(of: Shares, client: str) -> str:
    """What an error adds where others have parts that this client cannot take."""
    return f", or {client}'s share of it" if of.taken < of.total and client else ""
