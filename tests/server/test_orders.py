"""One model's scores and orders keep the order in which they came: pure, so that every case can be laid out by hand."""

from typing import Any

import numpy as np
import pytest

from guerdon.core import Sequence
from guerdon.errors import Overloaded
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.orders import Order
from guerdon.server.batching.scheduler import Scheduler


def scheduler(**limits: Any) -> Scheduler:
    return Scheduler(Limits(**limits))


def order(num_sequences: int = 0, num_tokens: int = 0) -> Order:
    return Order(lambda group: None, num_sequences=num_sequences, num_tokens=num_tokens)


def job(num_sequences: int = 1, length: int = 10, priority: int = 0) -> Job:
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
    s, a, b, c, d = scheduler(), job(), job(), job(), job()
    first, second, third = order(), order(), order()
    enqueue(s, a, b, first, c, second, third, d)
    assert s.requests() == (set(), 7)
    assert take_all(s) == [{a, b}, first, {c}, second, third, {d}]
    assert (*waiting(s), s.starts_at()) == (0, 0, None)


def test_an_order_waits_for_all_batches_of_the_scores_before_it_and_no_priority_passes_it() -> None:
    s, big, urgent, train = scheduler(max_batch_tokens=20), job(5), job(priority=9), order()
    enqueue(s, big, train, urgent)
    assert take_all(s) == [{big}, {big}, {big}, train, {urgent}]


def test_a_job_that_arrives_while_an_order_runs_waits_for_that_order_only() -> None:
    s, train, late = scheduler(), order(), job()
    enqueue(s, train)
    assert s.take(0.0) is train
    enqueue(s, late)
    assert take_all(s) == [{late}]


def test_scores_before_an_order_wait_for_no_company() -> None:
    s, few, train = scheduler(batch_sizes=(8,), max_delay_s=60.0), job(2), order()
    enqueue(s, few)
    assert s.take(1.0) is None and s.starts_at() == 60.0
    enqueue(s, train)
    assert s.starts_at() == 0.0
    assert take_all(s) == [{few}, train]


def test_held_scores_and_orders_count_in_the_queue() -> None:
    s = scheduler(max_queue_sequences=4, max_queue_tokens=1000)
    enqueue(s, order(2, 20), job(2))
    assert waiting(s) == (4, 40)
    for item in (job(), order(1, 10), order()):  # an order without sequences counts as one
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
        enqueue(s, job())


def test_a_held_score_is_dropped_if_its_client_disconnects() -> None:
    s, train, gone, stays = scheduler(), order(), job(), job()
    enqueue(s, train, gone, stays)
    s.cancel(gone)
    assert gone.cancelled and s.room.sequences.taken == 1 + 1
    assert take_all(s) == [train, {stays}]


def test_dropping_all_gives_everything_back() -> None:
    s, a, train, b = scheduler(), job(), order(3, 3), job()
    enqueue(s, a, train, b)
    assert s.drop_all() == ([a, b], [train])
    assert take_all(s) == [] and waiting(s) == (0, 0)
