"""Turns: so many at once, alternating between clients, and none is lost where somebody leaves."""

import asyncio
import random

from guerdon.server.batching.sharing import FairTurns


async def order_of(turns: FairTurns, clients: str) -> str:
    """The clients in the order in which they have their turn, where all ask at once."""
    seen = []

    async def one(client: str) -> None:
        async with turns.turn(client):
            seen.append(client)
            await asyncio.sleep(0)

    await asyncio.gather(*map(one, clients))
    return "".join(seen)


def test_clients_take_turns() -> None:
    assert asyncio.run(order_of(FairTurns(1), "aaaaaabbc")) == "aabcabaaa"


def test_one_client_is_served_in_the_order_of_arrival() -> None:
    async def run() -> list[int]:
        turns, seen = FairTurns(1), []

        async def one(i: int) -> None:
            async with turns.turn(""):
                seen.append(i)
                await asyncio.sleep(0)

        await asyncio.gather(*map(one, range(10)))
        return seen

    assert asyncio.run(run()) == list(range(10))


def test_no_more_than_the_count_at_once_and_all_come_free_whoever_leaves() -> None:
    async def run() -> None:
        turns, inside, most = FairTurns(3), 0, 0
        luck = random.Random(0)

        async def one(client: str) -> None:
            nonlocal inside, most
            async with turns.turn(client):
                inside += 1
                most = max(most, inside)
                try:
                    await asyncio.sleep(luck.random() / 200)
                    if luck.random() < 0.2:
                        raise ValueError
                finally:
                    inside -= 1

        tasks = [asyncio.create_task(one(luck.choice("abc"))) for _ in range(300)]
        for _ in range(100):
            await asyncio.sleep(0)
            luck.choice(tasks).cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert (most, inside, turns._free, turns._waiting) == (3, 0, 3, {})

    asyncio.run(run())


def test_a_turn_that_came_to_one_who_leaves_goes_to_the_next() -> None:
    async def run() -> str:
        turns, seen = FairTurns(1), []

        async def one(client: str) -> None:
            async with turns.turn(client):
                seen.append(client)

        async with turns.turn("a"):
            left, stays = asyncio.create_task(one("b")), asyncio.create_task(one("c"))
            await asyncio.sleep(0)
        left.cancel()  # its turn has come, and it does not know yet
        await asyncio.gather(left, stays, return_exceptions=True)
        return "".join(seen)

    assert asyncio.run(run()) == "c"
