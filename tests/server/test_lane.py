"""The order of one model's scores and orders: pure, so that every case can be laid out by hand."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from guerdon.core import Sequence
from guerdon.errors import Overloaded
from guerdon.server.batching.lane import Lane
from guerdon.server.batching.scheduler import Batch, Job, Limits, Scheduler


@dataclass(eq=False)
class Order:
    num_sequences: int = 0
    num_tokens: int = 0
    is_ready: bool = True
    client: str = ""


def lane(**limits: object) -> Lane[Order]:
    return Lane(Scheduler(Limits(**limits)))  # type: ignore[arg-type]


def job(num_sequences: int = 1, length: int = 10, priority: int = 0) -> Job:
    return Job([Sequence(np.full(length, i)) for i in range(num_sequences)], priority)


def taken(queue: Lane[Order]) -> list[object]:
    """Everything in the order in which it is taken, a batch as the set of its jobs."""
    out: list[object] = []
    while (item := queue.take(0.0)) is not None:
        out.append(set(item.jobs()) if isinstance(item, Batch) else item)
    return out


def test_scores_and_orders_keep_the_order_in_which_they_came() -> None:
    queue, a, b, c, d = lane(), job(), job(), job(), job()
    first, second, third = Order(), Order(), Order()
    for item in (a, b, first, c, second, third, d):
        queue.add(item) if isinstance(item, Job) else queue.add_order(item)
    assert taken(queue) == [{a, b}, first, {c}, second, third, {d}]
    assert (queue.num_sequences, queue.num_tokens, queue.starts_at()) == (0, 0, None)


def test_an_order_waits_for_all_batches_of_the_scores_before_it_and_no_priority_passes_it() -> None:
    queue, big, urgent, order = lane(max_batch_tokens=20), job(5), job(priority=9), Order()
    queue.add(big)
    queue.add_order(order)
    queue.add(urgent)
    assert taken(queue) == [{big}, {big}, {big}, order, {urgent}]


def test_what_comes_while_an_order_runs_goes_behind_it_alone() -> None:
    queue, order, late = lane(), Order(), job()
    queue.add_order(order)
    assert queue.take(0.0) is order
    queue.add(late)
    assert taken(queue) == [{late}]


def test_scores_before_an_order_wait_for_no_company() -> None:
    queue, few, order = lane(batch_sizes=(8,), max_delay_s=60.0), job(2), Order()
    queue.add(few)
    assert queue.take(1.0) is None and queue.starts_at() == 60.0
    queue.add_order(order)
    assert queue.starts_at() == 0.0
    assert taken(queue) == [{few}, order]


def test_held_scores_and_orders_count_in_the_queue() -> None:
    queue = lane(max_queue_sequences=4, max_queue_tokens=1000)
    queue.add_order(Order(2, 20))
    queue.add(job(2))
    assert (queue.num_sequences, queue.num_tokens) == (4, 40)
    with pytest.raises(Overloaded):
        queue.add(job())
    with pytest.raises(Overloaded):
        queue.add_order(Order(1, 10))
    with pytest.raises(Overloaded):
        queue.check_room(1)
    with pytest.raises(Overloaded):
        queue.add_order(Order())  # which counts as one sequence
    taken(queue)
    queue.add_order(Order())
    assert (queue.num_sequences, queue.num_tokens) == (1, 0)
    taken(queue)
    queue.add_order(Order(9, 9999))  # an empty queue takes anything
    with pytest.raises(Overloaded):
        queue.add(job())


def test_a_held_score_is_dropped_when_its_caller_leaves() -> None:
    queue, order, gone, stays = lane(), Order(), job(), job()
    queue.add_order(order)
    queue.add(gone)
    queue.add(stays)
    queue.cancel(gone)
    assert gone.cancelled and queue.num_sequences == 1 + 1
    assert taken(queue) == [order, {stays}]


def test_dropping_all_gives_everything_back() -> None:
    queue, a, order, b = lane(), job(), Order(3, 3), job()
    queue.add(a)
    queue.add_order(order)
    queue.add(b)
    assert queue.drop_all() == ([a, b], [order])
    assert taken(queue) == [] and queue.num_tokens == 0


def test_an_order_that_is_not_ready_holds_its_place_and_those_behind_it() -> None:
    queue, before, place, behind = lane(), job(), Order(is_ready=False), job()
    queue.add(before)
    queue.add_order(place)
    queue.add(behind)
    assert taken(queue) == [{before}] and queue.starts_at() is None
    assert queue.fill(place, 3, 30) and queue.starts_at() == 0.0
    assert (queue.num_sequences, queue.num_tokens) == (4, 40)
    assert taken(queue) == [place, {behind}]
    assert not queue.fill(place, 3, 30)


def test_a_place_that_is_dropped_lets_those_behind_it_go() -> None:
    queue, place, behind, order, last = lane(), Order(is_ready=False), job(), Order(), job()
    queue.add_order(place)
    queue.add(behind)
    queue.add_order(order)
    queue.add(last)
    assert queue.drop_order(place) and not queue.drop_order(place)
    assert (queue.num_sequences, queue.num_tokens) == (3, 20)
    assert taken(queue) == [{behind}, order, {last}]
    queue.add_order(order)
    queue.add_order(place)
    assert queue.drop_unready() == [place]
    assert taken(queue) == [order]


def test_a_place_without_room_for_what_it_is_to_hold_stays_until_it_is_dropped() -> None:
    queue, place = lane(max_queue_sequences=4), Order(is_ready=False)
    queue.add_order(Order(2, 20))
    queue.add_order(place)
    with pytest.raises(Overloaded):
        queue.fill(place, 3, 30)
    assert queue.num_sequences == 3 and not place.is_ready
    assert queue.fill(place, 2, 20)
