"""More than there is time for: what is begun is finished in time, and the rest is refused and not computed.

A virtual clock and a worker that takes a tenth more or less than it should; nothing here depends on the machine.
"""

import heapq
import itertools
import random
from collections import Counter

import numpy as np
import pytest

from guerdon.core import Sequence
from guerdon.errors import Overloaded
from guerdon.server.batching.jobs import Job, Limits
from guerdon.server.batching.scheduler import Scheduler
from tiers import slow_but

SECONDS = 200.0
"""Of simulated time."""
RATE = 10_000
"""Tokens a second."""
ROW = 200
BUDGET = 4096


def make_job(start: int, num_rows: int, now: float, timeout_s: float, client: str = "") -> Job:
    rows = np.arange(ROW) + 1000 * np.arange(start, start + num_rows)[:, np.newaxis]
    return Job([Sequence(row) for row in rows], 0, now, client, now + timeout_s)


def simulate(
    load: float, sizes: list[int], *, timeouts: float, seconds: float = SECONDS, clients: tuple[str, ...] = ("",)
) -> Counter[str]:
    """Tokens that were answered in time, by client, and under "computed" all that were computed.

    Requests of `sizes` rows come at random, `load` times as many as can be served, and leave after `timeouts` times
    the mean time that one takes alone. Their clients come again at once when they are refused no more than anybody.
    """
    luck = random.Random(0)
    mean_s = ROW * sum(sizes) / len(sizes) / RATE
    s = Scheduler(Limits(max_batch_tokens=BUDGET, max_queue_tokens=10**9, max_queue_sequences=10**9), clients)
    now, numbers, counts = 0.0, itertools.count(), Counter[str]()
    arrives, leaving = 0.0, []
    while now < seconds:
        batch = s.take(now)
        s.take_late()
        ends = arrives
        if batch is not None:
            took = sum(x.num_tokens for x in batch.sequences) / RATE * luck.uniform(0.9, 1.1)
            ends = now + took
        while arrives <= ends:
            i = next(numbers)
            made = make_job(1000 * i, luck.choice(sizes), arrives, timeouts * mean_s, luck.choice(clients))
            try:
                s.add(made, arrives)
                heapq.heappush(leaving, (made.deadline, i, made))
            except Overloaded:
                counts["refused"] += 1
            arrives += luck.expovariate(load / mean_s)
        now = ends
        if batch is not None:
            s.room.pace.end(took)
            counts["computed"] += sum(x.num_tokens for x in batch.sequences)
            for job, count in batch.jobs().items():
                job.unanswered -= count
                if not job.unanswered and now <= job.deadline and not job.cancelled:
                    counts[job.client] += ROW * len(job.sequences)
        while leaving and leaving[0][0] <= now:
            *_, left = heapq.heappop(leaving)
            if left.unanswered and not left.cancelled:
                s.cancel(left)
    return counts


@pytest.mark.parametrize("sizes", slow_but(([1, 8, 64],), [[64], [4], [1, 8, 64], [200]]))
@pytest.mark.parametrize(("load", "seconds"), [(1.5, SECONDS), (4.0, SECONDS), (20.0, SECONDS / 5)])
def test_overload_costs_at_most_a_tenth_of_what_is_answered_in_time(
    sizes: list[int], load: float, seconds: float
) -> None:
    counts = simulate(load, sizes, timeouts=10, seconds=seconds)
    assert counts[""] >= 0.9 * RATE * seconds
    assert counts["refused"]


def test_nothing_is_refused_for_its_deadline_if_there_is_time() -> None:
    counts = simulate(0.7, [1, 8, 64], timeouts=200)
    assert not counts["refused"] and counts[""] == pytest.approx(0.7 * RATE * SECONDS, rel=0.15)


def test_clients_have_equal_parts_of_what_is_answered_in_time() -> None:
    counts = simulate(4.0, [64], timeouts=10, clients=("a", "b"))
    assert counts["a"] + counts["b"] >= 0.9 * RATE * SECONDS
    assert counts["a"] == pytest.approx(counts["b"], rel=0.1)


def test_what_is_larger_than_a_batch_is_done_in_the_order_of_arrival() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET))
    jobs = [make_job(1000 * i, 64, 0.0, 1e9) for i in range(24)]
    for made in jobs:
        s.add(made)
    done = []
    while (batch := s.take(float(len(done)))) is not None:
        for job, count in batch.jobs().items():
            job.unanswered -= count
            if not job.unanswered:
                done.append(job)
    assert done == jobs
    assert sum(not all(job.queued) for job in jobs) == 24


def test_a_small_request_goes_between_large_ones() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET))
    for i in range(24):
        s.add(make_job(1000 * i, 64, 0.0, 1e9))
    assert s.take(0.0) is not None
    small = make_job(50_000, 2, 0.0, 1e9)
    s.add(small)
    batches = [s.take(0.0), s.take(0.0)]
    assert sum(batch.jobs().get(small, 0) for batch in batches if batch is not None) == 2


def full_batch(s: Scheduler, seconds: float) -> None:
    """Has the scheduler see how long a full batch takes."""
    s.add(make_job(900_000, 20, 0.0, 1e9))
    batch = s.take(0.0)
    assert batch is not None and not s.num_sequences
    s.room.pace.end(seconds)


def test_what_cannot_be_done_in_time_is_refused_but_never_what_is_alone() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET))
    full_batch(s, 0.4)  # 10,000 tokens a second
    alone = make_job(0, 64, 0.0, 0.1)
    s.add(alone, 0.0)
    with pytest.raises(Overloaded, match="allow more time") as refused:
        s.add(make_job(1000, 64, 0.0, 2.0), 0.0)
    assert refused.value.retry_after_s >= 1
    s.add(make_job(1000, 64, 0.0, 4.0), 0.0)
    assert s.take(0.0) is not None and s.take_late() == [alone]


@pytest.mark.parametrize(("timeout_s", "after_s"), [(10.0, 3.6), (1.0, 10.8), (0.1, 11.0)])
def test_who_is_refused_for_its_deadline_is_told_when_there_is_time(timeout_s: float, after_s: float) -> None:
    """110,000 tokens wait, which take 11 s; with its own 6,000 it needs 11.6 s, and a fifth of its time stays free."""
    s = Scheduler(Limits(max_batch_tokens=BUDGET, max_queue_tokens=10**9))
    full_batch(s, 0.4)  # 10,000 tokens a second
    for i in range(110):
        s.add(make_job(1000 * i, 5, 0.0, 100.0), 0.0)
    with pytest.raises(Overloaded, match="allow more time") as refused:
        s.add(make_job(900_000, 30, 0.0, timeout_s), 0.0)
    assert refused.value.retry_after_s == pytest.approx(after_s)


def test_a_pace_that_was_measured_wrong_is_measured_again() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET))
    full_batch(s, 4000.0)
    served = 0
    for i in range(40):
        for k in range(3):
            try:
                s.add(make_job(1000 * (3 * i + k), 64, float(i), 10.0), float(i))
            except Overloaded:
                continue
        while (batch := s.take(float(i))) is not None:
            s.room.pace.end(batch.num_tokens / RATE)
            served += len(batch.entries)
        s.take_late()
    assert served > 64 * 40 * 2


def test_small_batches_mend_a_pace_that_was_measured_too_low() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET))
    full_batch(s, 40.0)  # 100 tokens a second
    refused = 0
    for i in range(20):
        for k in range(2):
            try:
                s.add(make_job(1000 * (2 * i + k), 2, float(i), 5.0), float(i))
            except Overloaded:
                refused += 1
        while (batch := s.take(float(i))) is not None:
            s.room.pace.end(batch.num_tokens / RATE)
    assert 0 < refused < 10


def test_another_model_is_measured_anew() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET))
    full_batch(s, 4000.0)
    s.change(Limits(max_batch_tokens=BUDGET, shares=True))
    for i in range(3):
        s.add(make_job(1000 * i, 64, 0.0, 2.0), 0.0)


def test_a_shared_prompt_counts_once() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET, shares=True))
    full_batch(s, 0.4)  # 10,000 tokens a second
    s.add(make_job(0, 8, 0.0, 1e9), 0.0)
    prompt = np.arange(2000) + 10**6
    rows = [Sequence(np.append(prompt, [i, i, i])) for i in range(64)]
    s.add(Job(rows, 0, 0.0, "", 2.0), 0.0)  # 128,192 tokens, of which 2,192 are computed


def test_large_requests_with_the_same_prompts_give_way_too() -> None:
    s = Scheduler(Limits(max_batch_tokens=BUDGET, shares=True))
    prompts = [np.arange(500) + 1000 * i for i in range(100)]
    for _ in range(2):
        s.add(Job([Sequence(prompt) for prompt in prompts], 0, 0.0, "", 1e9))
    small = make_job(10**6, 2, 0.0, 1e9)
    s.add(small)
    batches = [s.take(0.0) for _ in range(3)]
    assert sum(batch.jobs().get(small, 0) for batch in batches if batch is not None) == 2
