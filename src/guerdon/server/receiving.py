"""Messages of gRPC on their way in: so few at once that whatever their clients send fits the memory that bodies have.

gRPC tells a message's size only when all of it is there, so that each on its way may be as large as the largest.
"""

from __future__ import annotations

import asyncio
from typing import Any

from guerdon.config import LimitsConfig
from guerdon.errors import InvalidRequest
from guerdon.server.body import UploadTooSlow
from guerdon.server.turns import FairTurns


class Receiving:
    """Reads messages within bounds of memory and time.

    Clients that wait take turns, and where there are several none of them has more than half of the places.
    """

    def __init__(self, limits: LimitsConfig, clients: tuple[str, ...]) -> None:
        count = max(1, limits.max_bodies_mb // limits.max_body_mb)
        self._all = FairTurns(count)
        self._own = {name: FairTurns(max(1, count // 2)) for name in clients if len(clients) > 1}
        self._limits = limits

    async def message(self, context: Any, client: str) -> bytes:
        """The bytes of the call's message; raises UploadTooSlow, and InvalidRequest where none comes."""
        own = self._own.get(client)
        if own is None:
            return await self._in_turn(context, client)
        async with own.turn(client):
            return await self._in_turn(context, client)

    async def _in_turn(self, context: Any, client: str) -> bytes:
        async with self._all.turn(client):
            limits = self._limits
            timeout_s = min(limits.read_timeout_s, limits.request_timeout_s)
            try:
                async with asyncio.timeout(timeout_s):
                    data = await context.read()
            except TimeoutError as e:
                text = f"the message did not come within {timeout_s:g} s; send it faster, or fewer rows"
                raise UploadTooSlow(text) from e
        if not isinstance(data, bytes):  # gRPC has ended the call by itself where it was too large
            raise InvalidRequest(f"no message came, or one of more than {limits.max_body_mb} MiB")
        return data
