"""Messages of gRPC on their way in: never more at once than there is memory for, and the clients take turns."""

import asyncio

import pytest

from guerdon.errors import Overloaded
from guerdon.server.front.grpc_messages import Receiving
from guerdon.server.front.http_request import UploadTooSlow
from guerdon.settings.config import LimitsConfig


class Calls:
    """Calls whose messages come one after another, each when it is let."""

    def __init__(self, receiving: Receiving) -> None:
        self._receiving = receiving
        self._go: list[asyncio.Event] = []
        self._clients: list[str] = []
        self._tasks: list[asyncio.Task[bytes]] = []

    @property
    def reading(self) -> list[str]:
        """Whose messages are on their way, in the order in which their turns came."""
        return [client for client, go in zip(self._clients, self._go, strict=True) if not go.is_set()]

    async def begin(self, *clients: str) -> None:
        """One more call of each of them, in this order."""
        for client in clients:
            self._tasks.append(asyncio.create_task(self._receiving.message(_Context(self, client), client, 600.0)))
        await settled()

    async def let_one_come(self) -> None:
        """The message that is on its way the longest is there."""
        next(go for go in self._go if not go.is_set()).set()
        await settled()

    async def end(self) -> None:
        """Lets all of them come."""
        while self.reading:
            await self.let_one_come()
        assert await asyncio.gather(*self._tasks) == [b"message"] * len(self._tasks)

    async def read(self, client: str) -> bytes:
        self._clients.append(client)
        self._go.append(go := asyncio.Event())
        await go.wait()
        return b"message"


class _Context:
    """What gRPC gives a call, as far as its message is concerned."""

    def __init__(self, calls: Calls, client: str) -> None:
        self._calls, self._client = calls, client

    async def read(self) -> bytes:
        return await self._calls.read(self._client)


async def settled() -> None:
    """Until nothing goes on by itself any more."""
    for _ in range(50):
        await asyncio.sleep(0)


def receiving(count: int, clients: str) -> Receiving:
    return Receiving(LimitsConfig(max_body_mb=4, max_bodies_mb=4 * count), tuple(clients))


@pytest.mark.parametrize("clients", ["", "a", "ab", "abc", "abcd", "abcdef"])
@pytest.mark.parametrize("count", [1, 2, 4])
async def test_no_more_come_at_once_than_there_is_memory_for(count: int, clients: str) -> None:
    calls = Calls(receiving(count, clients))
    await calls.begin(*(clients or ("",)) * 5)
    assert len(calls.reading) == count
    await calls.end()


async def test_each_client_has_a_place_of_its_own_if_there_are_enough() -> None:
    calls = Calls(receiving(4, "abc"))
    await calls.begin(*"aaaaaabbbbbb")
    assert calls.reading == ["a", "a", "b"]
    await calls.begin("c")
    assert calls.reading == ["a", "a", "b", "c"]
    await calls.end()


async def test_a_client_does_not_wait_for_anothers_flood_if_there_are_too_few() -> None:
    calls = Calls(receiving(2, "abc"))
    await calls.begin(*"aaaaaaaa", "c")
    assert calls.reading == ["a", "a"]
    await calls.let_one_come()
    await calls.let_one_come()
    assert calls.reading == ["a", "c"]
    await calls.end()


async def test_messages_that_never_come_hold_up_the_next_one_no_longer_than_one_would() -> None:
    """All of them end when they have had their time since they began, those that wait for a turn among them."""
    at_the_door, calls = receiving(2, ""), 0

    class Never:
        async def read(self) -> bytes:
            nonlocal calls
            calls += 1
            await asyncio.Event().wait()
            raise AssertionError

    class Here:
        async def read(self) -> bytes:
            return b"message"

    never = [asyncio.create_task(at_the_door.message(Never(), "", 0.3)) for _ in range(200)]
    await settled()
    assert await at_the_door.message(Here(), "", 60.0) == b"message"
    kinds = [type(error) for error in await asyncio.gather(*never, return_exceptions=True)]
    assert set(kinds) == {UploadTooSlow, Overloaded}
    assert kinds.count(UploadTooSlow) == 2
    assert calls < 20
