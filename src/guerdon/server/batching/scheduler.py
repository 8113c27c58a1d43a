"""What to compute next: one model's queue and its budget. Pure: no clock, no thread; time is an argument.

Cost is tokens computed: a sequence that begins like another of its group in the batch costs only the rest. There
is no timer: whatever waits when the worker is free makes the next batch. A client's requests are done one after the
other in the order of arrival; when one has had half a budget, and time is left, another half goes to those that are
nearest to their end, so that small ones join and of equal ones the first is done first. Sequences that begin alike stay
together. Only a scorer with preferred batch sizes (a user's padded function) makes its first sequence wait for company.

Clients that have something waiting get equal parts of the tokens computed, by start-time fair queueing (Goyal, Vin
and Cheng, 1996): next is whoever had least, and one that had nothing waiting joins where the others are now, so that it
neither pays for what it had while nobody else asked nor saves what it did not use. Priority orders a client's own
requests only: else whoever asks for the highest would have it all.

A request that cannot be done by its deadline, at the pace of the last full batches, is refused when it comes, or
dropped before more of it is computed; but never one alone, so that a pace that was measured wrong is measured again.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass, field, replace

from guerdon.core import MIN_SHARED, Score, Sequence, common_prefix
from guerdon.errors import GuerdonError, Overloaded
from guerdon.server.batching.line import Line
from guerdon.server.batching.pace import Pace
from guerdon.server.batching.room import Room
from guerdon.server.tracing import Part

Result = Score | GuerdonError

SPLIT = 32
"""A group that fits the next batch whole waits for it, if its parts in two would compute more than a 32nd of a budget
twice. What a batch costs whatever its size is less than that: a feed-forward in parts of 1,024 tokens took 3% longer
than in parts of 4,096."""


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request: its sequences, and their results as they come in.

    Times are in seconds on the caller's clock: `arrived`, `deadline`, and `taken` when its last sequence was taken up.
    Of the sequences there are `num_queued` that were not taken yet; computing them costs about `cost_left` tokens.
    `weights_version` names the weights that gave the results. `client` is who asks, by name.
    """

    sequences: list[Sequence]
    priority: int = 0
    arrived: float = 0.0
    client: str = ""
    deadline: float = math.inf
    taken: float = 0.0
    compute_s: float = 0.0
    cancelled: bool = False
    weights_version: str = ""
    results: list[Result | None] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    queued: list[bool] = field(default_factory=list)
    unanswered: int = 0
    num_queued: int = 0
    costs: list[int] = field(default_factory=list)
    cost_left: int = 0
    owner: object = None
    """The caller's own mark, handed back untouched."""
    traced: Part | None = None

    def __post_init__(self) -> None:
        self.results = [None] * len(self.sequences)
        self.waiting = deque(range(len(self.sequences)))
        self.queued = [True] * len(self.sequences)
        self.unanswered = self.num_queued = len(self.sequences)


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences to compute together, as places in their jobs; `num_tokens` is the estimated cost, that of `costs`."""

    entries: list[tuple[Job, int]] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in batch order."""
        return [job.sequences[i] for job, i in self.entries]

    def jobs(self) -> dict[Job, int]:
        """The jobs that have a part in the batch, with the number of their sequences in it."""
        counts: dict[Job, int] = {}
        for job, _ in self.entries:
            counts[job] = counts.get(job, 0) + 1
        return counts

    def halves(self) -> tuple[Batch, Batch]:
        """Two batches of half the sequences each."""
        half = len(self.entries) // 2
        first, second = self.costs[:half], self.costs[half:]
        return Batch(self.entries[:half], first, sum(first)), Batch(self.entries[half:], second, sum(second))


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch and one queue may hold.

    `shares` says whether the model computes a shared beginning once. `batch_sizes` are preferred numbers of
    sequences, for which the first in line waits at most `max_delay_s`; with them a job's sequences stay together.
    """

    max_batch_tokens: int = 4096
    max_queue_tokens: int = 4_000_000
    max_queue_sequences: int = 16_384
    shares: bool = True
    batch_sizes: tuple[int, ...] = ()
    max_delay_s: float = 0.0


class Scheduler:
    """The queue of one model, of which `clients` have parts of their own. Not thread-safe: its owner holds a lock.

    `room` counts what waits here and what its owner holds back from here.
    """

    def __init__(self, limits: Limits, clients: Collection[str] = ()) -> None:
        self.limits = limits
        self.room = Room(limits.max_queue_sequences, limits.max_queue_tokens, clients)
        self.num_sequences = 0
        self._turns = itertools.count()
        self._lines: dict[str, Line] = {}
        self._left_at: dict[str, int] = {}  # how far those clients were that have no line now
        self._at = 0  # how far the one was that was served last
        self._groups: dict[Hashable, deque[tuple[Job, int]]] = {}
        self._batch = Batch()
        self._pace = Pace()
        self._cost = 0  # of all that waits
        self.late: list[Job] = []
        """Jobs that `take` dropped, as they could not be done by their deadlines; for the owner to take out."""

    def add(self, job: Job, now: float | None = None) -> None:
        """Accepts the whole job, or raises Overloaded at once, as `Room.check`, or if it would miss its deadline.

        Without `now` no deadline counts.
        """
        num_tokens = sum(s.num_tokens for s in job.sequences)
        self.room.check(len(job.sequences), num_tokens, job.client)
        self._price(job)
        if now is not None and self.num_sequences and self._would_be_late(job, job.deadline - now):
            raise Overloaded(
                f"{self.num_sequences} sequences ({self.room.tokens.taken} tokens) wait, too many to score "
                f"{job.cost_left} tokens more in {job.deadline - now:.3g} s; try again later, or allow more time",
                self.room.retry_after_s(),
            )
        self.room.take(len(job.sequences), num_tokens, job.client)
        self.put(job)

    def put(self, job: Job) -> None:
        """Takes in a job that `room` counts already."""
        self.num_sequences += len(job.sequences)
        self._price(job)
        self._cost += job.cost_left
        self._push(job)
        if self.limits.shares:
            for i, s in enumerate(job.sequences):
                self._groups.setdefault(_group(s), deque()).append((job, i))

    def cancel(self, job: Job) -> None:
        """Drops what of the job has not been taken yet; what runs now finishes unread."""
        job.cancelled = True
        for i in job.waiting:
            if job.queued[i]:
                self._leave(job, i)
        job.waiting.clear()
        line = self._lines.get(job.client)
        if line is None:
            return
        line.num_dead += 1
        if 2 * line.num_dead > len(line.jobs):
            # Behind others of higher priority a dropped job might never come to the head, where it would go.
            line.jobs = [entry for entry in line.jobs if entry[2].waiting]
            heapq.heapify(line.jobs)
            line.num_dead = 0

    def drop_all(self) -> list[Job]:
        """Empties the queue; returns the jobs that were in it."""
        jobs = list(dict.fromkeys([*self._batch.jobs(), *self._waiting()]))
        self._batch = Batch()
        for job in jobs:
            self.cancel(job)
        return jobs

    def resize(self, max_batch_tokens: int) -> None:
        """Lets a batch hold at most so many tokens from now on."""
        self.limits = replace(self.limits, max_batch_tokens=max_batch_tokens)

    def change(self, limits: Limits) -> None:
        """Has other limits from now on, as another model has that takes this one's place; the queue's stay."""
        self.limits = limits
        self._pace = Pace()
        self._groups.clear()
        self._cost = 0
        for job in self._waiting():
            job.costs = []
            self._price(job)
            self._cost += job.cost_left
            if limits.shares:
                for i in filter(job.queued.__getitem__, job.waiting):
                    self._groups.setdefault(_group(job.sequences[i]), deque()).append((job, i))

    def requests(self) -> tuple[set[Job], int]:
        """The jobs that wait with what is left of them, and the number of those of which nothing was taken yet."""
        waiting = list(self._waiting())
        begun = {job for job in waiting if job.num_queued < len(job.sequences)}
        return begun, len(waiting) - len(begun)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from the batch that was taken last how fast the worker is."""
        self.room.observe(num_tokens, seconds)
        self._pace.end(seconds)

    def starts_at(self) -> float | None:
        """When the next batch may start: None with an empty queue, 0.0 for at once."""
        if self._batch.entries:
            return 0.0
        if not self.num_sequences:
            return None
        sizes = self.limits.batch_sizes
        if not sizes or self.num_sequences >= min(sizes):
            return 0.0
        return min(job.arrived for job in self._waiting()) + self.limits.max_delay_s

    def take(self, now: float, *, hurry: bool = False) -> Batch | None:
        """The next batch at time `now`, or None where there is none, or none yet; `hurry` waits for no company.

        Where memory ends amid it, MemoryError is raised and the next call goes on: no sequence is lost.
        """
        start = self.starts_at()
        if start is None or (start > now and not hurry):
            return None
        if self.limits.batch_sizes:
            self._padded(self._batch, now)
        else:
            self._by_tokens(self._batch, now)
        batch, self._batch = self._batch, Batch()
        is_full = not self.limits.batch_sizes and 2 * batch.num_tokens >= self.limits.max_batch_tokens
        self._pace.begin(batch.num_tokens, is_full=is_full)
        for job in batch.jobs():
            if not job.waiting:
                job.taken = now
        return batch

    def _padded(self, batch: Batch, now: float) -> None:
        """Takes whole jobs until they reach the largest preferred number of sequences that waits.

        If the first has waited its whole delay, all that waits joins, up to a budget's tokens, as in Triton's batcher.
        """
        num_sequences = len(batch.entries) + self.num_sequences
        wanted = max((n for n in self.limits.batch_sizes if n <= num_sequences), default=num_sequences)
        delay_s = self.limits.max_delay_s
        first = min((job.arrived for job in self._waiting()), default=now)
        is_late = 0 < delay_s <= now - first
        while (job := self._head()) is not None:
            own = [(i, job.sequences[i].num_tokens) for i in job.waiting if job.queued[i]]
            num_tokens = batch.num_tokens + sum(cost for _, cost in own)
            if len(batch.entries) >= wanted and not (is_late and num_tokens <= self.limits.max_batch_tokens):
                return
            for i, cost in own:
                self._take(batch, job, i, cost)

    def _by_tokens(self, batch: Batch, now: float) -> None:
        budget = self.limits.max_batch_tokens
        while (job := self._head()) is not None:
            if self._is_late(job, batch, now):
                self.cancel(job)
                self.late.append(job)
                continue
            members = self._together(job)
            room, wanted = budget - batch.num_tokens, sum(cost for *_, cost in members)
            if batch.entries and room < wanted <= budget and _shared(members) > budget // SPLIT:
                return
            for owner, i, cost in members:
                if batch.entries and batch.num_tokens + cost > budget:
                    return
                self._take(batch, owner, i, cost)
                if owner.client == job.client:
                    has_time = not self._pace.is_late(2 * self._whole(job, batch), job.deadline - now)
                    self._lines[job.client].serve(job, cost, (budget + 1) // 2, has_time=has_time)

    def _together(self, job: Job) -> list[tuple[Job, int, int]]:
        """The group of the job's next sequence, the job's own first, with the tokens that each adds to a batch.

        Of a beginning that is shared at most half a budget counts, so that a long prompt keeps its responses
        together. A group that passes one batch's budget is not followed further: all of a queue may begin alike.
        """
        first = job.sequences[job.waiting[0]]
        budget = self.limits.max_batch_tokens
        if not self.limits.shares:
            return [(job, job.waiting[0], first.num_tokens)]
        group = self._groups[_group(first)]
        own = ((j, i) for j, i in group if j is job and j.queued[i])
        others = ((j, i) for j, i in group if j is not job and j.queued[i])
        members: list[tuple[Job, int, int]] = []
        total = 0
        for owner, i in itertools.chain(own, others):
            s = owner.sequences[i]
            alike = common_prefix(first.tokens, s.tokens) if members else 0
            cost = s.num_tokens - (alike if alike >= MIN_SHARED else 0)
            if len(members) == 1:
                surplus = max(0, alike - budget // 2)
                members[0] = (*members[0][:2], members[0][2] - surplus)
                total -= surplus
            members.append((owner, i, cost))
            total += cost
            if total > budget and len(members) > 1:
                break
        return members

    def _take(self, batch: Batch, job: Job, i: int, cost: int) -> None:
        batch.entries.append((job, i))
        batch.costs.append(cost)
        batch.num_tokens += cost
        self._lines[job.client].at += cost
        self._leave(job, i)
        while job.waiting and not job.queued[job.waiting[0]]:
            job.waiting.popleft()

    def _leave(self, job: Job, i: int) -> None:
        job.queued[i] = False
        job.num_queued -= 1
        job.cost_left -= job.costs[i]
        self._cost -= job.costs[i]
        self.room.give(1, job.sequences[i].num_tokens, job.client)
        self.num_sequences -= 1
        if self.limits.shares:
            key = _group(job.sequences[i])
            members = self._groups[key]
            while members and not members[0][0].queued[members[0][1]]:
                members.popleft()
            if not members:
                del self._groups[key]

    def _waiting(self) -> Iterator[Job]:
        return (job for line in self._lines.values() for *_, job in line.jobs if job.waiting)

    def _head(self) -> Job | None:
        """The next job of the client that is least far; of those equally far the one that came first."""
        best: Line | None = None
        for client, line in list(self._lines.items()):
            if line.next_job() is None:
                self._left_at[client] = line.at
                del self._lines[client]
            elif best is None or (line.at, line.jobs[0][1]) < (best.at, best.jobs[0][1]):
                best = line
        if best is None:
            return None
        self._at = best.at
        return best.next_job()

    def _push(self, job: Job) -> None:
        line = self._lines.get(job.client)
        if line is None:
            line = self._lines[job.client] = Line(self._left_at.pop(job.client, 0))
        line.at = max(line.at, self._at)
        heapq.heappush(line.jobs, (-job.priority, next(self._turns), job))

    def _price(self, job: Job) -> None:
        """Estimates what each sequence of a job costs: behind the first that begins like it only the rest."""
        if job.costs:
            return
        firsts: dict[Hashable, Sequence] = {}
        for s in job.sequences:
            first = firsts.setdefault(_group(s), s) if self.limits.shares else s
            alike = 0 if first is s else common_prefix(first.tokens, s.tokens)
            job.costs.append(s.num_tokens - (alike if alike >= MIN_SHARED else 0))
        job.cost_left = sum(cost for cost, is_queued in zip(job.costs, job.queued, strict=True) if is_queued)

    def _is_late(self, job: Job, batch: Batch, now: float) -> bool:
        """Whether a job cannot be done in time, even at once; never so of one that waits alone.

        One that has begun gets the benefit of the doubt.
        """
        if job.deadline == math.inf or self.num_sequences == job.num_queued:
            return False
        late = self._pace.would_be_late if job.num_queued == len(job.sequences) else self._pace.is_late
        return late(self._whole(job, batch), job.deadline - now)

    def _whole(self, job: Job, batch: Batch) -> int:
        """The tokens of all batches that a job is in, if it is first in them: it is done when the last of them is."""
        size = max(1, self._pace.batch_tokens)
        whole = -(-job.cost_left // size) * size
        return max(job.cost_left, min(whole, batch.num_tokens + self._cost))

    def _would_be_late(self, job: Job, seconds_left: float) -> bool:
        """Whether a job that comes now is unlikely to be done in time."""
        late = self._pace.would_be_late
        if not late(self._cost + job.cost_left, seconds_left):
            return False
        line = self._lines.get(job.client)
        before = [j.cost_left for priority, _, j in (line.jobs if line else []) if -priority >= job.priority]
        num_tokens = sum(before) + job.cost_left
        if any(2 * left >= self.limits.max_batch_tokens for left in before):  # half goes to the nearest to their end
            nearer = sum(left for left in before if left <= job.cost_left) + job.cost_left
            num_tokens = min(num_tokens, 2 * nearer + self.limits.max_batch_tokens)
        others = (sum(j.cost_left for *_, j in o.jobs) for name, o in self._lines.items() if name != job.client)
        return late(num_tokens + sum(min(num_tokens, left) for left in others), seconds_left)


def _shared(members: list[tuple[Job, int, int]]) -> int:
    """The tokens that a group's sequences begin alike with, by what they cost behind the first."""
    return max((owner.sequences[i].num_tokens - cost for owner, i, cost in members[1:]), default=0)


def _group(s: Sequence) -> Hashable:
    """What sequences that share a beginning have in common: their first tokens, and the sender's group if given.

    The group alone will not do: two senders may both count theirs from 0.
    """
    return (s.tokens[:MIN_SHARED].tobytes(), s.group) if s.text is None else id(s)
