"""Fair sharing between clients: quotas and turns."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Collection


class Shares:
    """A bounded amount that clients, named by strings, take from and give back to. Pure: no clock, no thread.

    Half of it is common; the other half is reserved in equal parts (`own` each), one for each of the `clients`. With
    fewer than two of them all of it is common. `taken` is the total that all clients hold.
    """

    def __init__(self, total: int, clients: Collection[str] = ()) -> None:
        self.total = total
        self.taken = 0
        self._clients = frozenset(clients if len(clients) > 1 else ())
        self.own = total // (2 * len(self._clients)) if self._clients else 0
        self._common = total - self.own * len(self._clients)
        self._common_taken = 0
        self._held: dict[str, int] = {}

    def has_room(self, client: str, amount: int) -> bool:
        """Whether the client may take this much more; it always may within its own part."""
        if not self._clients:
            return self.taken + amount <= self.total
        own = self.own if client in self._clients else 0
        if self._held.get(client, 0) + amount <= own:
            return True
        return self._common_taken + self._from_common(client, amount) <= self._common

    def take(self, client: str, amount: int) -> None:
        """Counts this much more for the client, even if there is no room."""
        self.taken += amount
        if self._clients:
            self._move(client, amount)

    def give(self, client: str, amount: int) -> None:
        """Gives this much back."""
        self.taken -= amount
        if self._clients:
            self._move(client, -amount)

    def _move(self, client: str, amount: int) -> None:
        self._common_taken += self._from_common(client, amount)
        held = self._held.get(client, 0) + amount
        if held:
            self._held[client] = held
        else:
            self._held.pop(client, None)

    def most(self, client: str) -> int:
        """Returns the client's maximum without competitors."""
        return self._common + (self.own if client in self._clients else 0)

    def held(self, client: str) -> int:
        """Returns the client's holding; without reserved parts, all clients'."""
        return self._held.get(client, 0) if self._clients else self.taken

    def _from_common(self, client: str, amount: int) -> int:
        """Returns how much of `amount` more comes from the common half."""
        own = self.own if client in self._clients else 0
        held = self._held.get(client, 0)
        return max(0, held + amount - own) - max(0, held - own)


class FairTurns:
    """A semaphore of `count` turns. Waiting clients alternate; each client's own calls keep their order.

    Belongs to one asyncio loop.
    """

    def __init__(self, count: int) -> None:
        self._free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}  # the client whose turn is next comes first

    @property
    def is_free(self) -> bool:
        """Whether `acquire` would return at once."""
        return bool(self._free)

    @contextlib.asynccontextmanager
    async def turn(self, client: str) -> AsyncIterator[None]:
        """Holds a turn inside the context; waits for one on entry."""
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
            queue = self._waiting.get(client, deque())
            if not mine.cancelled():  # the turn came just before the cancellation
                self.release()
            elif mine in queue:  # else its turn had already been passed on when it learnt of the cancellation
                queue.remove(mine)
                if not queue:
                    del self._waiting[client]
            raise

    def release(self) -> None:
        """Ends a turn and starts the next one."""
        while self._waiting:
            client, queue = next(iter(self._waiting.items()))
            del self._waiting[client]
            first = queue.popleft()
            if queue:
                self._waiting[client] = queue
            if not first.cancelled():
                first.set_result(None)
                return
        self._free += 1
