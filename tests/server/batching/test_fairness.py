"""Fairness between clients: places in the queue, turns, and the same over HTTP."""

import asyncio
import random
import re
from collections import Counter
from pathlib import Path

import httpx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scorers
import served
from guerdon.core import Sequence
from guerdon.errors import Overloaded
from guerdon.server.batching.jobs import Job, Limits
from guerdon.server.batching.orders import Order
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.batching.sharing import FairTurns, Shares
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig
from guerdon.wire import kserve
from server.arithmetic_critic import WAIT_TOKEN, ArithmeticService, request
from server.critic.test_critic_transports import train
from server.helpers import INFER, body_of, wait_until
from server.keys import SCORE, TRAIN, bearer, keyed

BUDGET = 100


def job(client: str, *lengths: int, priority: int = 0, start: int = 0) -> Job:
    """A job of sequences that have nothing in common with each other, nor with those of another `start`."""
    rows = [Sequence(np.arange(n) + 1000 * (start + i)) for i, n in enumerate(lengths)]
    return Job(rows, priority, client=client)


def scheduler(clients: tuple[str, ...] = (), **kw: object) -> Scheduler:
    return Scheduler(Limits(**{"max_batch_tokens": BUDGET, **kw}), clients)  # type: ignore[arg-type]


def tokens_by_client(s: Scheduler, num_batches: int) -> Counter[str]:
    """What the next batches compute for each client."""
    counts: Counter[str] = Counter()
    for _ in range(num_batches):
        batch = s.take(0.0)
        if batch is None:
            break
        for (owner, _), cost in zip(batch.entries, batch.costs, strict=True):
            counts[owner.client] += cost
    return counts


def test_one_clients_flood_leaves_another_half_of_every_batch() -> None:
    s = scheduler()
    for i in range(50):
        s.add(job("flood", *[10] * 20, start=100 * i))
    s.add(job("small", *[10] * 20, start=90_000))
    assert tokens_by_client(s, 1) == {"flood": 50, "small": 50}
    assert tokens_by_client(s, 3) == {"flood": 150, "small": 150}
    assert tokens_by_client(s, 1) == {"flood": 100}


def test_many_small_requests_get_no_more_than_one_large() -> None:
    s = scheduler()
    s.add(job("one", *[10] * 100))
    for i in range(100):
        s.add(job("many", 10, start=1000 + i))
    assert tokens_by_client(s, 6) == {"one": 300, "many": 300}


def test_parts_are_equal_in_tokens_and_not_in_sequences() -> None:
    s = scheduler()
    s.add(job("long", *[50] * 20))
    s.add(job("short", *[5] * 200, start=1000))
    counts = tokens_by_client(s, 10)
    assert abs(counts["long"] - counts["short"]) <= 50


def test_no_priority_passes_another_clients_requests() -> None:
    s = scheduler()
    s.add(job("plain", *[10] * 50))
    s.add(job("urgent", *[10] * 50, priority=99, start=1000))
    s.add(job("urgent", *[10] * 5, priority=100, start=2000))
    batch = s.take(0.0)
    assert batch is not None
    assert [owner.priority for owner, _ in batch.entries if owner.client == "urgent"] == [100] * 5
    assert Counter(owner.client for owner, _ in batch.entries) == {"plain": 5, "urgent": 5}


def test_who_was_away_neither_pays_for_the_past_nor_saved_anything() -> None:
    s = scheduler()
    s.add(job("early", *[10] * 100))
    assert tokens_by_client(s, 5) == {"early": 500}  # while nobody else asked
    s.add(job("late", *[10] * 100, start=1000))
    counts = tokens_by_client(s, 4)
    assert abs(counts["early"] - counts["late"]) <= 10
    assert s.take(0.0) is not None
    while s.take(0.0):
        pass
    s.add(job("early", *[10] * 30, start=3000))
    s.add(job("late", *[10] * 30, start=4000))
    counts = tokens_by_client(s, 4)
    assert abs(counts["early"] - counts["late"]) <= BUDGET


def test_who_leaves_and_comes_again_has_no_more_than_who_stays() -> None:
    s = scheduler(("again", "stays"))
    s.add(job("stays", *[10] * 400))
    counts: Counter[str] = Counter()
    for i in range(30):
        if not s.room.sequences.held("again"):
            s.add(job("again", 80, start=1000 + i))
        counts += tokens_by_client(s, 1)
    assert abs(counts["again"] - counts["stays"]) <= BUDGET


def test_samples_that_begin_alike_are_together_although_they_are_two_clients_and_each_pays_its_own() -> None:
    s = scheduler(max_batch_tokens=1000)
    begin = np.arange(40)
    s.add(Job([Sequence(np.concatenate([begin, [100 + i]]), group=1) for i in range(3)], client="a"))
    s.add(job("b", 30, start=5))
    s.add(Job([Sequence(np.concatenate([begin, [200 + i]]), group=1) for i in range(3)], client="b"))
    batch = s.take(0.0)
    assert batch is not None
    assert [owner.client for owner, _ in batch.entries] == ["a", "a", "a", "b", "b", "b", "b"]
    assert batch.costs == [41, 1, 1, 1, 1, 1, 30]


def test_padded_batches_are_shared_too() -> None:
    s = scheduler(shares=False, batch_sizes=(4,))
    for i in range(20):
        s.add(job("a", 10))
        s.add(job("b", 10, start=100 + i))
    assert tokens_by_client(s, 1) == {"a": 20, "b": 20}


LENGTHS = st.lists(st.integers(1, 150), min_size=1, max_size=8)
REQUESTS = st.lists(st.tuples(st.sampled_from("abc"), LENGTHS, st.integers(-1, 2)), min_size=1, max_size=12)


@settings(max_examples=150)
@given(REQUESTS, st.lists(st.integers(0, 11), max_size=4), st.sampled_from([(), (3, 5)]), st.booleans())
def test_every_sequence_is_taken_once_or_dropped(
    requests: list[tuple[str, list[int], int]], dropped: list[int], sizes: tuple[int, ...], shares: bool
) -> None:
    s = scheduler(("a", "b"), batch_sizes=sizes, shares=shares)
    jobs = [job(c, *lengths, priority=p, start=20 * i) for i, (c, lengths, p) in enumerate(requests)]
    seen: Counter[tuple[Job, int]] = Counter()
    for i, made in enumerate(jobs):
        s.add(made)
        if i % 3 == 2:
            seen.update((batch := s.take(0.0, hurry=True)) and batch.entries)
    for i in dropped:
        if i < len(jobs) and not jobs[i].cancelled:
            s.cancel(jobs[i])
    while (batch := s.take(0.0, hurry=True)) is not None:
        assert batch.num_tokens == sum(batch.costs)
        assert sizes or batch.num_tokens <= BUDGET or len(batch.entries) == 1
        seen.update(batch.entries)
    assert set(seen.values()) <= {1}
    assert all((made, i) in seen for made in jobs if not made.cancelled for i in range(len(made.sequences)))
    assert s.num_sequences == s.room.tokens.taken == s.room.sequences.taken == 0
    assert not s._prefixes._groups and all(not s.room.tokens.held(c) for c in "abc")


@settings(max_examples=150)
@given(REQUESTS)
def test_clients_that_keep_waiting_are_never_further_apart_than_a_batch(
    requests: list[tuple[str, list[int], int]],
) -> None:
    s = scheduler()
    for i, (client, lengths, priority) in enumerate(requests):
        s.add(job(client, *lengths, priority=priority, start=20 * i))
    waiting = {client: sum(sum(lengths) for c, lengths, _ in requests if c == client) for client, *_ in requests}
    got = dict.fromkeys(waiting, 0)
    while (batch := s.take(0.0)) is not None:
        for (owner, _), cost in zip(batch.entries, batch.costs, strict=True):
            got[owner.client] += cost
        busy = [got[c] for c in got if got[c] < waiting[c]]
        assert not busy or max(busy) - min(busy) <= BUDGET + 150


@settings(max_examples=150)
@given(REQUESTS)
def test_a_client_alone_is_served_as_without_names(requests: list[tuple[str, list[int], int]]) -> None:
    named, nameless = scheduler(("a", "b", "c")), scheduler()
    for i, (_, lengths, priority) in enumerate(requests):
        for s, client in ((named, "a"), (nameless, "")):
            s.add(job(client, *lengths, priority=priority, start=20 * i))
    while (batch := nameless.take(0.0)) is not None:
        same = named.take(0.0)
        assert same is not None
        assert [x.tokens[0] for x in same.sequences] == [x.tokens[0] for x in batch.sequences]
    assert named.take(0.0) is None


def test_running_out_of_memory_while_choosing_a_batch_loses_no_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    s, a = scheduler(), job("a", 30, 30, 30, 30)
    s.add(a)
    head, calls = s._queue.head, []

    def short() -> Job | None:
        calls.append(1)
        if len(calls) == 3:
            raise MemoryError
        return head()

    monkeypatch.setattr(s._queue, "head", short)
    with pytest.raises(MemoryError):
        s.take(0.0)
    batch = s.take(0.0)
    assert batch is not None and [i for _, i in batch.entries] == [0, 1, 2]
    assert s.num_sequences == 1


def refused(s: Scheduler, made: Job) -> bool:
    try:
        s.add(made)
    except Overloaded:
        return True
    return False


def test_a_flood_is_refused_while_another_still_gets_in() -> None:
    s = scheduler(("flood", "small"), max_queue_tokens=1000, max_queue_sequences=100)
    accepted = sum(not refused(s, job("flood", 50, start=i)) for i in range(100))
    assert accepted == 15  # half of it is everybody's, a quarter its own
    with pytest.raises(Overloaded, match="15 of them of flood"):
        s.add(job("flood", 50, start=200))
    assert sum(not refused(s, job("small", 50, start=300 + i)) for i in range(100)) == 5


def test_a_request_larger_than_all_gets_in_where_nothing_of_its_client_waits_and_then_no_other() -> None:
    s = scheduler(("a", "b", "c"), max_queue_tokens=600)
    for i in range(4):
        s.add(job("a", 100, start=i))
    s.add(job("b", *[100] * 20, start=100))
    assert s.room.tokens.taken == 2400
    assert refused(s, job("b", 10, start=200))
    assert refused(s, job("c", *[100] * 20, start=300))  # one beyond the bounds is enough
    assert not refused(s, job("c", 90, start=400))  # its own part is untouched
    assert refused(s, job("c", 90, start=500))
    assert s.room.tokens.taken == 2490


def test_a_request_larger_than_the_queue_gets_in_beside_small_ones_that_keep_coming() -> None:
    s = scheduler(max_queue_sequences=10)
    s.add(job("", 10))
    assert refused(s, job("", *[10] * 10, start=10))  # there will be room for it once less waits
    s.add(job("", *[10] * 11, start=100))
    assert s.room.sequences.taken == 12
    assert refused(s, job("", *[10] * 11, start=200))  # one beyond the bounds is enough
    assert refused(s, job("", 10, start=300))
    while s.room.sequences.taken > 9:
        s.take(0.0)
    assert not refused(s, job("", 10, start=400))


def test_a_request_larger_than_its_client_could_have_gets_in_and_takes_nothing_of_the_others_parts() -> None:
    s = scheduler(("a", "b", "c"), max_queue_tokens=600)  # of which 300 are everybody's, and 100 each client's own
    s.add(job("a", 10))
    assert refused(s, job("a", *[100] * 4, start=100))
    s.add(job("a", *[100] * 5, start=200))
    assert s.room.tokens.taken == 510
    assert not refused(s, job("b", 90, start=300)) and not refused(s, job("c", 90, start=400))
    assert s.room.tokens.taken == 690
    for client in "abc":
        assert refused(s, job(client, *[100] * 6, start=500))


def test_a_request_not_yet_decoded_is_refused_only_if_it_could_find_no_room() -> None:
    s = scheduler(max_queue_tokens=100)
    s.add(job("", 40))
    for num_tokens in (60, 61, 100, 101, 4_000_000):  # much of them may be padding, and what is larger than all gets in
        s.room.check_coming(1, num_tokens, "")
    s.add(job("", 30, start=10))
    s.room.check_coming(1, 30, "")
    for num_tokens in (31, 60, 100):
        with pytest.raises(Overloaded):
            s.room.check_coming(1, num_tokens, "")
    s.room.check_coming(1, 101, "")
    s.add(job("", 101, start=20))
    for num_tokens in (0, 101):
        with pytest.raises(Overloaded):
            s.room.check_coming(1, num_tokens, "")


def test_the_room_of_what_is_held_behind_an_order_is_its_clients() -> None:
    s = scheduler(("a", "b"), max_queue_sequences=8)
    place = Order(lambda group: None)
    s.orders.add(place)
    assert sum(not refused(s, job("a", 1, start=i)) for i in range(20)) == 5  # and one is the order's
    assert sum(not refused(s, job("b", 1, start=100 + i)) for i in range(20)) == 2
    s.orders.drop(place)
    assert s.room.sequences.taken == 7 and not refused(s, job("a", 1, start=200))
    batch = s.take(0.0)
    assert batch is not None and s.room.sequences.taken == s.room.tokens.taken == 0


AMOUNTS = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, 40)), max_size=60)


@settings(max_examples=200)
@given(AMOUNTS, st.sampled_from([(), ("a",), ("a", "b"), ("a", "b", "c")]), st.integers(1, 100))
def test_shares_never_exceed_their_total_and_each_client_has_its_own_part(
    asked: list[tuple[str, int]], clients: tuple[str, ...], total: int
) -> None:
    shares = Shares(total, clients)
    own = total // (2 * len(clients)) if len(clients) > 1 else 0
    taken: list[tuple[str, int]] = []
    for n, (client, amount) in enumerate(asked):
        if shares.has_room(client, amount):
            shares.take(client, amount)
            taken.append((client, amount))
        else:
            assert client not in clients or shares.held(client) + amount > own
        if n % 5 == 4 and taken:
            shares.give(*taken.pop(0))
        assert shares.taken == sum(amount for _, amount in taken) <= total
    for client in clients:
        assert shares.has_room(client, max(0, own - shares.held(client)))
    for client, amount in taken:
        shares.give(client, amount)
    assert shares.taken == 0 and not shares._held and shares._common_taken == 0


KEYS = {"flood": "flood-0123456789abcdef", "small": "small-0123456789abcdef"}
ROW = list(range(10, 60))
batches: list[list[float]] = []
"""The first ids of the rows of each batch."""


def held(tokens: list[np.ndarray]) -> list[float]:
    """A user's function: the first ids, but not before `scorers.hold` is set."""
    batches.append(firsts := [float(t[0]) for t in tokens])
    scorers.hold.wait(120)
    return firsts


async def both(url: str) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def ask(key: str, row: list[int]) -> httpx.Response:
            body, headers = body_of([row] * 4), {"Authorization": f"Bearer {key}"}
            return await client.post(INFER, content=body, headers=headers)

        async def until_queued(num_rows: int) -> None:
            """Returns when so many rows are refused, computed or wait."""
            while True:
                text = (await client.get("/metrics", headers={"Authorization": f"Bearer {KEYS['small']}"})).text
                (waiting,) = re.findall(r'^guerdon_queue_sequences\{model="reward_model"\} (.*)$', text, re.MULTILINE)
                num_done = sum(task.done() for task in [*flood, *mine])
                if float(waiting) + sum(map(len, batches)) + 4 * num_done == num_rows:
                    return

        mine: list[asyncio.Task[httpx.Response]] = []
        flood = [asyncio.create_task(ask(KEYS["flood"], ROW)) for _ in range(60)]
        await until_queued(4 * 60)
        refused = [(await task) for task in flood if task.done()]
        mine += [asyncio.create_task(ask(KEYS["small"], [1, *ROW])) for _ in range(3)]
        await until_queued(4 * 63)
        scorers.hold.set()
        told = await asyncio.gather(*flood)
        assert [(await task).status_code for task in mine] == [200] * 3
    assert Counter(answer.status_code for answer in told) == {503: len(refused), 200: 60 - len(refused)}
    assert len(refused) >= 10 and all(float(answer.headers["retry-after"]) >= 1 for answer in refused)
    # It waits for what runs and has half of the next batches; the flood's last waits for all before it.
    last = max(i for i, firsts in enumerate(batches) if 1 in firsts)
    assert len(batches) > 10 and last < len(batches) / 2


def test_a_flood_is_refused_and_another_client_is_served_soon(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join(f"score {name} {key}\n" for name, key in KEYS.items()))
    model = ModelConfig(model=f"{__name__}:held", max_batch_tokens=400, max_queue_sequences=160)
    scorers.hold.clear()
    batches.clear()
    with served.running(model, api_keys_file=str(keys)) as server:
        try:
            asyncio.run(both(server.http_url))
        finally:
            scorers.hold.set()


async def behind_a_train(url: str, service: ArithmeticService) -> None:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:

        async def asked(model: str, key: str, body: bytes, json_length: int) -> int:
            headers = bearer(key) | {"Inference-Header-Content-Length": str(json_length)}
            return (await client.post(f"/v2/models/{model}/infer", content=body, headers=headers)).status_code

        def trained(name: str, **more: int) -> asyncio.Task[int]:
            body, json_length = kserve.encode_request(train(request(name, 1, **more)))
            return asyncio.create_task(asked("critic_train", TRAIN, body, json_length))

        trains = [trained("runs", first_token=WAIT_TOKEN)]
        await asyncio.to_thread(wait_until, lambda: bool(service.trainer.trained))
        rows = body_of([[1, 2]])
        flood = [asyncio.create_task(asked("critic_infer", SCORE, rows, len(rows))) for _ in range(40)]
        await asyncio.to_thread(wait_until, lambda: sum(task.done() for task in flood) == 18)  # they are refused
        trains += [trained(f"waits {i}") for i in range(4)]
        await asyncio.to_thread(wait_until, lambda: service.loops.depth()["critic_infer"][0] >= 22 + 4)
        service.trainer.go.set()
        assert await asyncio.gather(*trains) == [200] * 5
        assert Counter(await asyncio.gather(*flood)) == {200: 22, 503: 18}


def test_a_flood_of_scores_leaves_room_for_the_trainers_trains(tmp_path: Path) -> None:
    config = keyed(tmp_path, grpc_port=None)
    service = ArithmeticService(server=config, max_queue_sequences=32)
    with RunningServer(service, config) as server:
        try:
            asyncio.run(behind_a_train(server.http_url, service))
        finally:
            service.trainer.go.set()


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
