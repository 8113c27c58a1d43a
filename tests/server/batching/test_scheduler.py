"""Which sequences make the next batch, and in which order scores and orders go: no clock and no thread."""

import time
from typing import Any

import numpy as np
import pytest

from guerdon.core import Sequence
from guerdon.errors import Overloaded
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.orders import Order
from guerdon.server.batching.scheduler import Scheduler
from guerdon.teacher_core import ANSWER_BYTES_A_TOKEN, LogprobQuery


def seq(start: int, length: int, **kw: int) -> Sequence:
    return Sequence(np.arange(start, start + length), **kw)


def job(*lengths: int, start: int = 0, **kw: float) -> Job:
    return Job([seq(start + 10_000 * i, n) for i, n in enumerate(lengths)], **kw)  # type: ignore[arg-type]


def taken(batch: Batch | None) -> list[int]:
    assert batch is not None
    return [len(s.tokens) for s in batch.sequences]


def scheduler(**kw: object) -> Scheduler:
    return Scheduler(Limits(**{"max_batch_tokens": 100, **kw}))  # type: ignore[arg-type]


def test_whatever_waits_is_taken_at_once_up_to_the_budget() -> None:
    s = scheduler()
    assert s.take(0.0) is None
    s.add(job(40))
    s.add(job(50, start=1_000_000))
    s.add(job(60, start=2_000_000))
    assert taken(s.take(0.0)) == [40, 50]
    assert taken(s.take(0.0)) == [60]
    assert s.take(0.0) is None and s.room.tokens.taken == s.num_sequences == 0


@pytest.mark.parametrize("shares", [True, False])
def test_other_limits_while_sequences_wait_lose_none(shares: bool) -> None:
    s = scheduler(shares=not shares)
    first, second = job(20, 30), job(30, start=5_000_000)
    s.add(first)
    s.add(second)
    s.change(Limits(max_batch_tokens=50, shares=shares))
    assert taken(s.take(0.0)) == [20, 30]
    s.cancel(second)
    s.add(job(40))
    assert taken(s.take(0.0)) == [40]
    assert s.num_sequences == s.room.sequences.taken == 0 and not s._prefixes._groups


def test_a_sequence_longer_than_the_budget_goes_alone() -> None:
    s = scheduler()
    s.add(job(500, 10))
    assert taken(s.take(0.0)) == [500]
    assert taken(s.take(0.0)) == [10]


def test_a_big_request_gives_way_to_a_small_one() -> None:
    s = scheduler()
    s.add(job(*[60] * 10))
    s.add(job(30, start=5_000_000))
    assert taken(s.take(0.0)) == [60, 30]


def test_all_of_a_small_request_joins_although_everything_begins_alike() -> None:
    s = scheduler()
    big = Job([Sequence(np.concatenate([np.arange(20), np.full(30, 100 + i)])) for i in range(50)])
    small = Job([Sequence(np.concatenate([np.arange(20), np.full(10, 900 + i)])) for i in range(4)])
    s.add(big)
    s.add(small)
    s.take(0.0)
    batch = s.take(0.0)
    assert batch is not None and batch.jobs()[small] == 4


def test_a_shared_beginning_costs_once() -> None:
    s = scheduler()
    rows = [Sequence(np.concatenate([np.arange(50), np.full(10, 100 + i)])) for i in range(20)]
    s.add(Job(rows))
    batch = s.take(0.0)
    assert batch is not None and len(batch.entries) == 5 and batch.num_tokens == 50 + 5 * 10


@pytest.mark.parametrize("shares", [True, False])
def test_large_answers_make_smaller_batches(shares: bool) -> None:
    """Equal sequences cost one computation, and each an answer that stays in memory until the batch is done."""
    s = scheduler(shares=shares)
    query = LogprobQuery(answer_bytes=20 * ANSWER_BYTES_A_TOKEN)
    s.add(Job([Sequence(np.arange(30), ask=query) for _ in range(12)]))
    assert taken(s.take(0.0)) == [30] * (3 if shares else 2)


def test_sequences_of_one_group_come_together_from_different_requests() -> None:
    s = scheduler()
    s.add(Job([seq(0, 40, group=1)]))
    s.add(Job([seq(50_000, 50, group=2)]))
    s.add(Job([seq(0, 45, group=1)]))
    batch = s.take(0.0)
    assert batch is not None and [x.group for x in batch.sequences] == [1, 1, 2]


def test_a_group_waits_for_a_batch_that_holds_it_whole() -> None:
    s = scheduler()
    s.add(job(70))
    group = Job([Sequence(np.concatenate([np.arange(500, 540), np.full(10, 900 + i)])) for i in range(4)])
    s.add(group)
    assert taken(s.take(0.0)) == [70]
    assert taken(s.take(0.0)) == [50] * 4


def prompt_and_responses(shared: int, responses: int, length: int) -> Job:
    prompt = np.arange(50_000, 50_000 + shared)
    return Job([Sequence(np.concatenate([prompt, np.full(length, 900 + i)])) for i in range(responses)])


def test_a_long_prompt_is_not_computed_twice_to_fill_a_batch() -> None:
    s = scheduler(max_batch_tokens=1000)
    s.add(job(300))
    s.add(prompt_and_responses(shared=400, responses=8, length=50))
    assert taken(s.take(0.0)) == [300]
    batch = s.take(0.0)
    assert taken(batch) == [450] * 8
    assert batch is not None and batch.num_tokens == 800


@pytest.mark.parametrize(("responses", "sizes"), [(32, [32]), (36, [12, 24])], ids=["whole", "more than twice"])
def test_a_group_may_have_twice_the_budget(responses: int, sizes: list[int]) -> None:
    """In two batches its prompt would be computed twice; what is left of a larger one is whole again."""
    s = scheduler(max_batch_tokens=1000)
    s.add(prompt_and_responses(shared=400, responses=responses, length=50))
    s.add(job(100))
    batches = [s.take(0.0), s.take(0.0)]
    assert [len(taken(batch)) for batch in batches[: len(sizes)]] == sizes
    assert sum(batch.num_tokens for batch in batches[: len(sizes)]) == 400 * len(sizes) + 50 * responses


def test_a_short_prompt_fills_a_batch_though_it_is_computed_twice() -> None:
    s = scheduler(max_batch_tokens=1000)
    s.add(job(300))
    s.add(prompt_and_responses(shared=30, responses=8, length=100))
    assert taken(s.take(0.0)) == [300] + [130] * 6
    assert taken(s.take(0.0)) == [130] * 2


def test_higher_priority_goes_first() -> None:
    s = scheduler()
    s.add(job(80))
    s.add(job(90, start=5_000_000, priority=1))
    assert taken(s.take(0.0)) == [90]


def test_a_cancelled_request_costs_nothing_more() -> None:
    s = scheduler()
    gone, stays = job(60, 60, 60), job(50, start=7_000_000)
    s.add(gone)
    s.add(stays)
    assert taken(s.take(0.0)) == [60]
    s.cancel(gone)
    assert s.num_sequences == 1 and s.room.tokens.taken == 50
    assert taken(s.take(0.0)) == [50]
    assert s.take(0.0) is None


def test_a_full_queue_refuses_with_the_time_to_wait() -> None:
    s = scheduler(max_queue_tokens=200)
    s.add(job(10))
    s.take(0.0)
    s.room.pace.end(1.0)
    s.add(job(150))
    with pytest.raises(Overloaded) as refused:
        s.add(job(60))
    assert refused.value.retry_after_s == pytest.approx(7.5)
    s.take(0.0)
    s.add(job(1000))  # an empty queue takes anything


def test_the_number_of_waiting_sequences_is_bounded_too() -> None:
    s = scheduler(max_queue_sequences=3)
    s.add(job(1, 1))
    with pytest.raises(Overloaded):
        s.add(job(1, 1))


def test_a_job_knows_when_its_last_sequence_was_taken() -> None:
    s = scheduler()
    first = job(80, 80)
    s.add(first)
    s.take(1.0)
    assert first.taken == 0.0
    s.take(2.0)
    assert first.taken == 2.0


def test_preferred_sizes_wait_for_company_but_no_longer_than_the_delay() -> None:
    s = scheduler(shares=False, batch_sizes=(4, 8), max_delay_s=0.5)
    s.add(job(5, 5, 5, arrived=10.0))
    assert s.starts_at() == 10.5 and s.take(10.4) is None
    assert taken(s.take(10.5)) == [5, 5, 5]
    for _ in range(9):
        s.add(job(5, arrived=20.0))
    assert len(taken(s.take(20.0))) == 8
    assert s.take(20.0) is None
    assert len(taken(s.take(20.0, hurry=True))) == 1


def test_preferred_sizes_take_no_request_apart() -> None:
    s = scheduler(shares=False, batch_sizes=(1, 4))
    s.add(job(*[5] * 64))
    assert len(taken(s.take(0.0))) == 64  # in spite of the budget, too
    for count in (3, 3, 2):
        s.add(job(*[5] * count))
    assert [len(taken(s.take(0.0))) for _ in range(2)] == [6, 2]


def test_what_waited_its_delay_takes_all_along_up_to_the_budget() -> None:
    s = scheduler(shares=False, batch_sizes=(2,), max_delay_s=0.5)
    for i in range(25):
        s.add(job(5, arrived=10.0 + i / 100))
    assert [len(taken(s.take(10.5))) for _ in range(2)] == [20, 2]  # 100 tokens; then the first came at 10.2


def test_a_huge_request_of_many_prompts_is_taken_apart_quickly() -> None:
    s = scheduler(max_batch_tokens=4096, max_queue_sequences=100_000, max_queue_tokens=10**9)
    prompts = [np.arange(40) + 100 * p for p in range(2_000)]
    s.add(Job([Sequence(np.concatenate([p, [7, r]])) for p in prompts for r in range(8)]))
    started = time.process_time()
    sizes = []
    while (batch := s.take(0.0)) is not None:
        sizes.append(len(batch.entries))
    assert sum(sizes) == 16_000
    assert min(sizes[:-1]) % 8 == 0  # no prompt's group was cut
    assert time.process_time() - started < 20  # it takes half a second; scanning the rest for each prompt takes minutes


def test_groups_of_the_same_number_from_two_senders_keep_apart() -> None:
    s = scheduler()
    s.add(Job([seq(0, 40, group=0)]))
    s.add(Job([seq(50_000, 40, group=0)]))
    s.add(Job([seq(0, 40, group=0)]))
    assert [x.tokens[0] for x in s.take(0.0).sequences] == [0, 0, 50_000]


def test_a_prompt_longer_than_the_budget_keeps_its_responses() -> None:
    s = scheduler()
    s.add(Job([Sequence(np.concatenate([np.arange(500), np.full(5, 1000 + i)])) for i in range(8)]))
    assert len(s.take(0.0).entries) == 8


def test_dropped_requests_leave_even_behind_others_that_go_first() -> None:
    s = scheduler()
    s.add(job(90, priority=1))
    for i in range(100):
        dropped = job(10, start=20_000 * (i + 1))
        s.add(dropped)
        s.cancel(dropped)
    assert len(s._queue._lines[""].jobs) <= 3
    assert taken(s.take(0.0)) == [90]
    assert s.take(0.0) is None


def test_what_neighbours_share_costs_once_even_if_the_groups_first_lacks_it() -> None:
    """As a judge's questions: all begin with a prompt, and those about one response share that, too."""
    prompt, responses = np.arange(30), [np.full(20, 100 + i) for i in range(3)]
    rows = [np.concatenate([prompt, response, [900 + k, 5]]) for response in responses for k in range(4)]
    s = scheduler(max_batch_tokens=30 + 3 * 20 + 12 * 2)
    s.add(Job([Sequence(row) for row in rows]))
    batch = s.take(0.0)
    assert batch is not None and len(batch.entries) == 12 and batch.num_tokens == 30 + 3 * 20 + 12 * 2


def ordered_scheduler(**limits: Any) -> Scheduler:
    return Scheduler(Limits(**limits))


def order(num_sequences: int = 0, num_tokens: int = 0) -> Order:
    return Order(lambda group: None, num_sequences=num_sequences, num_tokens=num_tokens)


def ordered_job(num_sequences: int = 1, length: int = 10, priority: int = 0) -> Job:
    return Job([Sequence(np.full(length, i)) for i in range(num_sequences)], priority)


def enqueue(s: Scheduler, *items: Job | Order) -> None:
    for item in items:
        s.add(item) if isinstance(item, Job) else s.orders.add(item)


def take_all(s: Scheduler) -> list[object]:
    """Everything in the order in which it is taken, a batch as the set of its jobs."""
    out: list[object] = []
    while (item := s.take(0.0)) is not None:
        out.append(set(item.jobs()) if isinstance(item, Batch) else item)
    return out


def waiting(s: Scheduler) -> tuple[int, int]:
    return s.room.sequences.taken, s.room.tokens.taken


def test_scores_and_orders_keep_the_order_in_which_they_came() -> None:
    s, a, b, c, d = ordered_scheduler(), ordered_job(), ordered_job(), ordered_job(), ordered_job()
    first, second, third = order(), order(), order()
    enqueue(s, a, b, first, c, second, third, d)
    assert s.requests() == (set(), 7)
    assert take_all(s) == [{a, b}, first, {c}, second, third, {d}]
    assert (*waiting(s), s.starts_at()) == (0, 0, None)


def test_an_order_waits_for_all_batches_of_the_scores_before_it_and_no_priority_passes_it() -> None:
    s, big, urgent, train = ordered_scheduler(max_batch_tokens=20), ordered_job(5), ordered_job(priority=9), order()
    enqueue(s, big, train, urgent)
    assert take_all(s) == [{big}, {big}, {big}, train, {urgent}]


def test_a_job_that_arrives_while_an_order_runs_waits_for_that_order_only() -> None:
    s, train, late = ordered_scheduler(), order(), ordered_job()
    enqueue(s, train)
    assert s.take(0.0) is train
    enqueue(s, late)
    assert take_all(s) == [{late}]


def test_scores_before_an_order_wait_for_no_company() -> None:
    s, few, train = ordered_scheduler(batch_sizes=(8,), max_delay_s=60.0), ordered_job(2), order()
    enqueue(s, few)
    assert s.take(1.0) is None and s.starts_at() == 60.0
    enqueue(s, train)
    assert s.starts_at() == 0.0
    assert take_all(s) == [{few}, train]


def test_held_scores_and_orders_count_in_the_queue() -> None:
    s = ordered_scheduler(max_queue_sequences=4, max_queue_tokens=1000)
    enqueue(s, order(2, 20), ordered_job(2))
    assert waiting(s) == (4, 40)
    for item in (ordered_job(), order(1, 10), order()):  # an order without sequences counts as one
        with pytest.raises(Overloaded):
            enqueue(s, item)
    with pytest.raises(Overloaded):
        s.room.check_coming(1, 0, "")
    s.orders.add(order(), finds_room=True)
    assert waiting(s) == (5, 40)
    take_all(s)
    enqueue(s, order())
    assert waiting(s) == (1, 0)
    take_all(s)
    enqueue(s, order(9, 9999))  # an empty queue takes anything
    with pytest.raises(Overloaded):
        enqueue(s, ordered_job())


def test_a_held_score_is_dropped_if_its_client_disconnects() -> None:
    s, train, gone, stays = ordered_scheduler(), order(), ordered_job(), ordered_job()
    enqueue(s, train, gone, stays)
    s.cancel(gone)
    assert gone.cancelled and s.room.sequences.taken == 1 + 1
    assert take_all(s) == [train, {stays}]


def test_dropping_all_gives_everything_back() -> None:
    s, a, train, b = ordered_scheduler(), ordered_job(), order(3, 3), ordered_job()
    enqueue(s, a, train, b)
    assert s.drop_all() == ([a, b], [train])
    assert take_all(s) == [] and waiting(s) == (0, 0)
