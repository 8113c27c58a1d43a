"""Chooses the next batch of one model's queue. Pure: no clock, no thread; time is an argument.

Cost is computed tokens: a sequence that begins like another of its group in the batch costs only the rest
(`prefixes.py`). There is no timer: whatever waits when the worker is free makes the next batch. The clients take turns
(`fair_queue.py`); sequences that begin alike stay together. Only a scorer with preferred batch sizes, a user's padded
function, delays its first sequence until others join it. Orders, such as train requests, keep their place among the
scores (`orders.py`).

A request that cannot meet its deadline at the pace of the last full batches (`room.py`) is refused on arrival, or
dropped before more of it is computed; but never one that waits alone, so that a wrong pace is measured again.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from guerdon.core import WHOLE_GROUP
from guerdon.server.batching.fair_queue import FairQueue
from guerdon.server.batching.jobs import Batch, Job, Limits
from guerdon.server.batching.orders import HeldBack, Order
from guerdon.server.batching.padded import fill_padded
from guerdon.server.batching.prefixes import PrefixGroups
from guerdon.server.batching.room import Pace, Room

SPLIT = 32
"""A group is not split, and waits for the next batch, if that would compute more than a 32nd of a budget twice. The
fixed cost of a batch is less than that: a feed-forward in parts of 1,024 tokens took 3% longer than of 4,096."""


class Scheduler:
    """The queue of one model; each of `clients` has a part of its room. Not thread-safe: its owner holds a lock.

    `num_sequences` wait for a batch; `room` also counts orders and the jobs behind them.
    """

    def __init__(self, limits: Limits, clients: Collection[str] = ()) -> None:
        self.limits = limits
        self.num_sequences = 0
        self.room = Room(limits.max_queue_sequences, limits.max_queue_tokens, clients)
        self.orders = HeldBack(self.room, self._put)
        self._queue = FairQueue()
        self._prefixes = PrefixGroups(is_on=limits.shares)
        self._batch = Batch()
        self._cost = 0  # tokens to compute for all that waits
        self.late: list[Job] = []
        """The jobs that `take` dropped because they could not meet their deadlines, until `take_late`."""

    def add(self, job: Job, now: float | None = None) -> None:
        """Accepts the whole job, or raises Overloaded if there is no room or it would miss its deadline.

        Ignores deadlines without `now`, and behind an order.
        """
        self.room.check(job.num_sequences, job.num_tokens, job.client)
        if self.orders.items:
            self.orders.hold(job)
            return
        if job.priced_by is not self._prefixes:
            self.price(job)
        if now is not None and self.num_sequences:
            self._check_time(job, job.deadline - now)
        self.room.take(job.num_sequences, job.num_tokens, job.client)
        self._put(job)

    def check_coming(self, num_tokens: int, seconds_left: float, client: str) -> None:
        """Raises Overloaded if about so many tokens would be late; assumes the queue's share of shared tokens."""
        if not self.orders.items and self.num_sequences:
            cost = num_tokens * self._cost // max(1, self.room.tokens.taken)
            self._check_time(Job([], client=client, cost_left=cost), seconds_left)

    def price(self, job: Job) -> None:
        """Estimates the job's cost, ahead of `add`, because it takes long for many sequences. Thread-safe."""
        job.priced_by = prefixes = self._prefixes
        prefixes.price(job)
        job.cost_left = sum(cost for cost, is_queued in zip(job.costs, job.queued, strict=True) if is_queued)

    def cancel(self, job: Job) -> None:
        """Drops the job's waiting sequences; running ones finish unread."""
        job.cancelled = True
        if self.orders.drop(job):
            return
        waiting = [i for i in job.waiting if job.queued[i]]
        for i in waiting:
            job.queued[i] = False
            self._prefixes.discard(job, i)
        self.room.give(len(waiting), sum(job.lengths[i] for i in waiting), job.client)
        self.num_sequences -= len(waiting)
        self._cost -= sum(job.costs[i] for i in waiting)
        job.num_queued = job.cost_left = 0
        job.waiting.clear()
        self._queue.drop(job)

    def drop_all(self) -> tuple[list[Job], list[Order]]:
        """Empties the queue; returns the jobs and orders that were in it."""
        jobs = list(dict.fromkeys([*self._batch.jobs(), *self._queue]))
        self._batch = Batch()
        for job in jobs:
            self.cancel(job)
        held, orders = self.orders.drop_all()
        return jobs + held, orders

    def resize(self, max_batch_tokens: int) -> None:
        """Changes how many tokens a batch may hold."""
        self.limits = replace(self.limits, max_batch_tokens=max_batch_tokens)

    def change(self, limits: Limits) -> None:
        """Adopts the batch limits of a model that replaces this one; the queue's size stays limited as before."""
        self.limits = limits
        self.room.pace = Pace()
        self._prefixes = PrefixGroups(is_on=limits.shares)
        self._cost = 0
        for job in self._queue:
            self.price(job)
            self._cost += job.cost_left
            self._prefixes.add(job, [i for i in job.waiting if job.queued[i]])

    def requests(self) -> tuple[set[Job], int]:
        """Returns the waiting jobs that batches have taken in part, and how many requests wait whole, orders too."""
        waiting = list(self._queue)
        begun = {job for job in waiting if job.num_queued < job.num_sequences}
        return begun, len(waiting) - len(begun) + len(self.orders.items)

    def starts_at(self) -> float | None:
        """Returns when the next batch or order may start: None if there is none, 0.0 for at once."""
        if self._batch.entries or self.orders.items:
            return 0.0
        if not self.num_sequences:
            return None
        sizes = self.limits.batch_sizes
        if not sizes or self.num_sequences >= min(sizes):
            return 0.0
        return min(job.arrived for job in self._queue) + self.limits.max_delay_s

    def take(self, now: float, *, hurry: bool = False) -> Batch | Order | None:
        """Returns the next batch or order at time `now`, or None if there is none yet; `hurry` skips `max_delay_s`.

        The batch must be done before the next one is taken. Raises MemoryError if memory runs out; then the next call
        continues, and no sequence is lost.
        """
        if not self._batch.entries and not self.num_sequences:
            return self.orders.take()
        if self.limits.batch_sizes:
            if not hurry and (self.starts_at() or 0.0) > now:
                return None
            fill_padded(self._batch, self._queue, self.num_sequences, self.limits, now, self._take)
        else:
            self._fill(self._batch, now)
        batch, self._batch = self._batch, Batch()
        is_full = not self.limits.batch_sizes and 2 * batch.num_tokens >= self.limits.max_batch_tokens
        self.room.pace.begin(batch.num_tokens, is_full=is_full)
        for job in batch.jobs():
            if not job.waiting:
                job.taken = now
        return batch

    def take_late(self) -> list[Job]:
        """Returns the jobs that are late, and forgets them."""
        late, self.late = self.late, []
        return late

    def _fill(self, batch: Batch, now: float) -> None:
        """Takes sequences until the budget is reached, or a whole group that begins the batch; at least one."""
        budget = self.limits.max_batch_tokens
        while (job := self._queue.head()) is not None:
            if self._is_late(job, batch, now):
                self.cancel(job)
                self.late.append(job)
                continue
            members = self._prefixes.members(job, budget)
            room, wanted = budget - batch.num_tokens, sum(cost for *_, cost in members)
            is_whole = room < wanted <= WHOLE_GROUP * budget and budget // SPLIT < max(
                (owner.lengths[i] - cost for owner, i, cost in members[1:]), default=0
            )
            if batch.entries and is_whole:
                return
            for owner, i, cost in members:
                if batch.entries and batch.num_tokens + cost > budget and not is_whole:
                    return
                self._take(batch, owner, i, cost)
                if owner.client == job.client and self._queue.serve(job, cost, (budget + 1) // 2):
                    has_time = not self.room.pace.is_late(2 * self._tokens_until_done(job, batch), job.deadline - now)
                    self._queue.pass_on(job, has_time=has_time)

    def _put(self, job: Job) -> None:
        """Queues a job that `room` counts already."""
        self.num_sequences += job.num_sequences
        if job.priced_by is not self._prefixes:
            self.price(job)
        self._cost += job.cost_left
        self._queue.push(job)
        self._prefixes.add(job, range(job.num_sequences))

    def _take(self, batch: Batch, job: Job, i: int, cost: int) -> None:
        batch.entries.append((job, i))
        batch.costs.append(cost)
        batch.num_tokens += cost
        self._queue.charge(job.client, cost)
        job.queued[i] = False
        job.num_queued -= 1
        job.cost_left -= job.costs[i]
        self._cost -= job.costs[i]
        self.room.give(1, job.lengths[i], job.client)
        self.num_sequences -= 1
        self._prefixes.discard(job, i)
        while job.waiting and not job.queued[job.waiting[0]]:
            job.waiting.popleft()

    def _is_late(self, job: Job, batch: Batch, now: float) -> bool:
        """Whether a job cannot be done in time, even at once; one that has begun gets the benefit of the doubt.

        False for one that waits alone.
        """
        if job.deadline == math.inf or self.num_sequences == job.num_queued:
            return False
        late = self.room.pace.would_be_late if job.num_queued == job.num_sequences else self.room.pace.is_late
        return late(self._tokens_until_done(job, batch), job.deadline - now)

    def _tokens_until_done(self, job: Job, batch: Batch) -> int:
        """Returns the tokens of all batches until the job is done, if it goes first."""
        size = max(1, self.room.pace.batch_tokens)
        whole = -(-job.cost_left // size) * size
        return max(job.cost_left, min(whole, batch.num_tokens + self._cost))

    def _check_time(self, job: Job, seconds_left: float) -> None:
        """Raises Overloaded if a job that arrives now would probably miss its deadline."""
        if self.room.pace.would_be_late(self._cost + job.cost_left, seconds_left):
            until = min(self._cost + job.cost_left, self._queue.tokens_until(job, self.limits.max_batch_tokens))
            self.room.check_time(until, self._cost, job.cost_left, seconds_left)
