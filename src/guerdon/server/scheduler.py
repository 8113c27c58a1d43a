"""What to compute next: one model's queue and its budget. Pure: no clock, no thread; time is an argument.

Cost is tokens computed: a sequence that begins like another of its group in the batch costs only the rest. There
is no timer: whatever waits when the worker is free makes the next batch. A big request gives way after each
budget's worth of tokens, so that small ones join; sequences that begin alike stay together. Only a scorer with
preferred batch sizes (a user's padded function) makes its first sequence wait for company.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from guerdon.core import MIN_SHARED, Score, Sequence, common_prefix
from guerdon.errors import GuerdonError, Overloaded

Result = Score | GuerdonError


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request: its sequences, and their results as they come in.

    Times are in seconds on the caller's clock: `arrived`, and `taken` when its last sequence was taken up.
    `weights_version` names the weights that gave the results.
    """

    sequences: list[Sequence]
    priority: int = 0
    arrived: float = 0.0
    taken: float = 0.0
    compute_s: float = 0.0
    cancelled: bool = False
    weights_version: str = ""
    results: list[Result | None] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    queued: list[bool] = field(default_factory=list)
    unanswered: int = 0
    owner: object = None
    """The caller's own mark, handed back untouched."""

    def __post_init__(self) -> None:
        self.results = [None] * len(self.sequences)
        self.waiting = deque(range(len(self.sequences)))
        self.queued = [True] * len(self.sequences)
        self.unanswered = len(self.sequences)


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences to compute together, as places in their jobs; `num_tokens` is the estimated cost."""

    entries: list[tuple[Job, int]] = field(default_factory=list)
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


@dataclass(frozen=True, slots=True)
class Limits:
    """What one batch and one queue may hold.

    `shares` says whether the model computes a shared beginning once. `batch_sizes` are preferred numbers of
    sequences, for which the first in line waits at most `max_delay_s`; then only they bound a batch.
    """

    max_batch_tokens: int = 4096
    max_queue_tokens: int = 4_000_000
    max_queue_sequences: int = 16_384
    shares: bool = True
    batch_sizes: tuple[int, ...] = ()
    max_delay_s: float = 0.0


class Scheduler:
    """The queue of one model. Not thread-safe: its owner holds a lock."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.num_tokens = 0
        self.num_sequences = 0
        self._turns = itertools.count()
        self._jobs: list[tuple[int, int, Job]] = []
        self._groups: dict[Hashable, deque[tuple[Job, int]]] = {}
        self._num_dead = 0
        self._tokens_per_s = 0.0

    def add(self, job: Job) -> None:
        """Accepts the whole job, or raises Overloaded at once; an empty queue accepts any job."""
        tokens = sum(s.num_tokens for s in job.sequences)
        self.check_room(len(job.sequences), tokens)
        self.num_tokens += tokens
        self.num_sequences += len(job.sequences)
        self._push(job)
        if self.limits.shares:
            for i, s in enumerate(job.sequences):
                self._groups.setdefault(_group(s), deque()).append((job, i))

    def check_room(self, num_sequences: int, num_tokens: int = 0, held: tuple[int, int] = (0, 0)) -> None:
        """Raises Overloaded where the queue has no room for so much more; an empty queue has room for anything.

        `held` are the sequences and tokens that wait elsewhere for their turn in this queue.
        """
        waiting, waiting_tokens = self.num_sequences + held[0], self.num_tokens + held[1]
        if waiting and (
            waiting_tokens + num_tokens > self.limits.max_queue_tokens
            or waiting + num_sequences > self.limits.max_queue_sequences
        ):
            raise Overloaded(
                f"the queue has no room for {num_sequences} more sequences ({num_tokens} tokens): "
                f"{waiting} ({waiting_tokens} tokens) wait; try again later, or send fewer at once",
                self.retry_after_s(held[1]),
            )

    def cancel(self, job: Job) -> None:
        """Drops what of the job has not been taken yet; what runs now finishes unread."""
        job.cancelled = True
        for i in job.waiting:
            if job.queued[i]:
                self._leave(job, i)
        job.waiting.clear()
        self._num_dead += 1
        if 2 * self._num_dead > len(self._jobs):
            # Behind others of higher priority a dropped job might never come to the head, where it would go.
            self._jobs = [entry for entry in self._jobs if entry[2].waiting]
            heapq.heapify(self._jobs)
            self._num_dead = 0

    def drop_all(self) -> list[Job]:
        """Empties the queue; returns the jobs that were in it."""
        jobs = [job for *_, job in self._jobs if job.waiting]
        for job in jobs:
            self.cancel(job)
        return jobs

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a finished batch how fast the worker is, for Retry-After."""
        rate = num_tokens / max(seconds, 1e-6)
        self._tokens_per_s = rate if not self._tokens_per_s else 0.9 * self._tokens_per_s + 0.1 * rate

    def retry_after_s(self, num_held_tokens: int = 0) -> float:
        """Seconds until half of what waits now, here and held back elsewhere, will be done, between 1 and 60."""
        if not self._tokens_per_s:
            return 1.0
        return min(60.0, max(1.0, 0.5 * (self.num_tokens + num_held_tokens) / self._tokens_per_s))

    def starts_at(self) -> float | None:
        """When the next batch may start: None with an empty queue, 0.0 for at once."""
        if not self.num_sequences:
            return None
        sizes = self.limits.batch_sizes
        if not sizes or self.num_sequences >= min(sizes):
            return 0.0
        return min(job.arrived for *_, job in self._jobs if job.waiting) + self.limits.max_delay_s

    def take(self, now: float, *, hurry: bool = False) -> Batch | None:
        """The next batch at time `now`, or None where there is none, or none yet; `hurry` waits for no company."""
        start = self.starts_at()
        if start is None or (start > now and not hurry):
            return None
        batch = self._padded() if self.limits.batch_sizes else self._by_tokens()
        for job in batch.jobs():
            if not job.waiting:
                job.taken = now
        return batch

    def _padded(self) -> Batch:
        """The largest preferred number of sequences that waits; all of them where even the smallest does not."""
        fitting = [n for n in self.limits.batch_sizes if n <= self.num_sequences]
        batch = Batch()
        for _ in range(max(fitting) if fitting else self.num_sequences):
            job = self._head()
            assert job is not None
            i = job.waiting[0]
            self._take(batch, job, i, job.sequences[i].num_tokens)
        return batch

    def _by_tokens(self) -> Batch:
        batch, budget = Batch(), self.limits.max_batch_tokens
        served: dict[Job, int] = {}
        while (job := self._head()) is not None:
            members = self._together(job)
            room, wanted = budget - batch.num_tokens, sum(cost for *_, cost in members)
            # A group that fits the next batch whole waits for it, unless this one would stay mostly empty.
            if batch.entries and room < wanted <= budget and 2 * room < budget:
                return batch
            for owner, i, cost in members:
                if batch.entries and batch.num_tokens + cost > budget:
                    return batch
                self._take(batch, owner, i, cost)
                served[owner] = served.get(owner, 0) + cost
                if 2 * served[owner] >= budget:
                    served[owner] = 0
                    self._give_way(owner)
        return batch

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
        batch.num_tokens += cost
        self._leave(job, i)
        while job.waiting and not job.queued[job.waiting[0]]:
            job.waiting.popleft()

    def _leave(self, job: Job, i: int) -> None:
        job.queued[i] = False
        self.num_tokens -= job.sequences[i].num_tokens
        self.num_sequences -= 1
        if self.limits.shares:
            key = _group(job.sequences[i])
            members = self._groups[key]
            while members and not members[0][0].queued[members[0][1]]:
                members.popleft()
            if not members:
                del self._groups[key]

    def _head(self) -> Job | None:
        while self._jobs and not self._jobs[0][2].waiting:
            heapq.heappop(self._jobs)
        return self._jobs[0][2] if self._jobs else None

    def _push(self, job: Job) -> None:
        heapq.heappush(self._jobs, (-job.priority, next(self._turns), job))

    def _give_way(self, job: Job) -> None:
        if self._jobs and self._jobs[0][2] is job:
            heapq.heappop(self._jobs)
            if job.waiting:
                self._push(job)


def _group(s: Sequence) -> Hashable:
    """What sequences that share a beginning have in common: their first tokens, and the sender's group if given.

    The group alone will not do: two senders may both count theirs from 0.
    """
    return (s.tokens[:MIN_SHARED].tobytes(), s.group) if s.text is None else id(s)
