"""At most so many at once, the clients taking turns. One asyncio loop's own."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator


class FairTurns:
    """So many turns at once; whoever waits gets the next in the order of arrival, but that clients alternate."""

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the client whose turn is next comes first

    @property
    def is_free(self) -> bool:
        """Whether who comes now has a turn at once."""
        return bool(self._free)

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """A context that has a turn; entering it waits for one."""
        await self.acquire(client)
        try:
            yield
        finally:
            self.release()

    async def acquire(self, client: str) -> None:
        """Waits for a turn, which lasts until `release`."""
        if self._free:  # then nobody waits
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if mine.cancelled():
                self._leave(client, mine)
            else:  # it came just before
                self.release()
            raise

    def _leave(self, client: str, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(client, deque())
        if mine not in line:  # its turn came and was passed on, after it was cancelled and before it knew
            return
        line.remove(mine)
        if not line:
            del self._waiting[client]

    def release(self) -> None:
        """Ends a turn, so that the next one begins."""
        while self._waiting:
            client, line = next(iter(self._waiting.items()))
            del self._waiting[client]
            first = line.popleft()
            if line:
                self._waiting[client] = line
            if not first.cancelled():
                first.set_result(None)
                return
        self._free += 1
