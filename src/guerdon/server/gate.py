"""How many requests are in progress over all transports, and the bound on them."""

from __future__ import annotations

from guerdon.errors import Overloaded


class Gate:
    """A context that holds one place for a request; entering raises Overloaded where all are taken."""

    def __init__(self, max_requests: int) -> None:
        self.max_requests = max_requests
        self.num_requests = 0

    def __enter__(self) -> None:
        if self.num_requests >= self.max_requests:
            raise Overloaded(f"{self.max_requests} requests are in progress, which is the limit; try again", 1.0)
        self.num_requests += 1

    def __exit__(self, *_: object) -> None:
        self.num_requests -= 1
