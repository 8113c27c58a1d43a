"""Messages of gRPC on their way in: so few at once that whatever their clients send fits the memory that bodies have.

gRPC tells a message's size only when all of it is there, so that each on its way may be as large as the largest.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from typing import Any

from guerdon.errors import InvalidRequest, Overloaded
from guerdon.server.batching.sharing import FairTurns, Shares
from guerdon.server.front.admission import RETRY_AFTER_S
from guerdon.server.front.http_request import UploadTooSlow
from guerdon.settings.config import LimitsConfig


class Receiving:
    """Reads messages within bounds of number, memory and time.

    So many may come at once as there is memory for. Where there are several clients, and fewer than that, one of these
    is each client's own, so that those of others that never come cannot keep it out. What is left, else all, is
    everybody's, for which the clients take turns.

    Streams have as many places of their own, one each for as long as it is open, since nothing tells whether a stream
    rests or its next message is on its way.
    """

    def __init__(self, limits: LimitsConfig, clients: tuple[str, ...]) -> None:
        count = max(1, limits.max_bodies_mb // limits.max_body_mb)
        own = clients if 1 < len(clients) < count else ()
        self._own = {name: FairTurns(1) for name in own}
        self._common = FairTurns(count - len(own))
        self._calls = Shares(limits.max_requests, clients)
        self._streams = Shares(count, clients)
        self._limits = limits

    @contextlib.contextmanager
    def stream(self, client: str) -> Iterator[None]:
        """A context that holds one stream's place; entering it raises Overloaded if there is none."""
        if not self._streams.has_room(client, 1):
            raise Overloaded(
                f"{self._streams.taken} streams are open, and {client or 'this server'} may have no more: ask by "
                "ModelInfer, or raise --max-bodies-mb",
                RETRY_AFTER_S,
            )
        self._streams.take(client, 1)
        try:
            yield
        finally:
            self._streams.give(client, 1)

    async def next_message(self, context: Any, timeout_s: float) -> bytes | None:
        """Returns a stream's next message; None if its client sends no more. Raises UploadTooSlow."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await context.read()
        except TimeoutError as e:
            raise _too_slow(timeout_s) from e
        return data if isinstance(data, bytes) else None

    async def message(self, context: Any, client: str, timeout_s: float) -> bytes:
        """Returns the bytes of the call's message, which has `timeout_s` seconds to come, its wait for a turn included.

        So calls whose messages never come end together, and hold up whoever comes after them no longer. Raises
        Overloaded if it had to wait and did not come in time, or if too many calls wait; UploadTooSlow, and
        InvalidRequest if none comes.
        """
        if not self._calls.has_room(client, 1):
            raise Overloaded("too many calls wait for their messages; try again", RETRY_AFTER_S)
        turns = self._turns(client)
        had_to_wait = not turns.is_free
        self._calls.take(client, 1)
        try:
            async with asyncio.timeout(timeout_s), turns.turn(client):
                data = await context.read()
        except TimeoutError as e:
            if had_to_wait:
                raise Overloaded(
                    f"the messages of other calls took all places, and this one did not come within {timeout_s:g} s; "
                    "try again",
                    RETRY_AFTER_S,
                ) from e
            raise _too_slow(timeout_s) from e
        finally:
            self._calls.give(client, 1)
        if not isinstance(data, bytes):  # gRPC has ended the call by itself where it was too large
            raise InvalidRequest(f"no message came, or one of more than {self._limits.max_body_mb} MiB")
        return data

    def _turns(self, client: str) -> FairTurns:
        own = self._own.get(client)
        return self._common if own is None or (self._common.is_free and not own.is_free) else own


def _too_slow(timeout_s: float) -> UploadTooSlow:
    return UploadTooSlow(f"the message did not come within {timeout_s:g} s; send it faster, or fewer rows")
