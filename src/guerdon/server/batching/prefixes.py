"""Which waiting sequences begin alike, so that one batch computes their shared prefix once. Pure."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Hashable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import Any

from guerdon.core import MIN_SHARED, WHOLE_GROUP, Sequence, common_prefix
from guerdon.server.batching.jobs import Job
from guerdon.teacher_core import ANSWER_BYTES_A_TOKEN


class PrefixGroups:
    """The waiting sequences grouped by their first tokens; without `is_on` every sequence stands alone."""

    def __init__(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._groups: dict[Hashable, deque[tuple[Job, int]]] = {}

    def price(self, job: Job) -> None:
        """Sets the job's costs and keys: each sequence costs its unshared tokens. Thread-safe.

        What it shares is estimated from the first of its group and the one before it.
        """
        # The first tokens, and the sender's group if given; two senders may both count theirs from 0.
        job.keys = [
            (s.tokens[:MIN_SHARED].tobytes(), s.group, s.adapter) if s.text is None else id(s)
            for s in (job.sequences if self._is_on else ())
        ]
        groups: dict[Hashable, _Alike] = {}
        job.costs = []
        for i, s in enumerate(job.sequences):
            alike = groups.setdefault(job.keys[i], _Alike()).next(s) if self._is_on else 0
            job.costs.append(job.lengths[i] - alike + (0 if s.ask is None else _answer_tokens(s.ask)))

    def add(self, job: Job, numbers: ListLike[int]) -> None:
        """Adds sequences of a job that has its price."""
        if self._is_on:
            for i in numbers:
                self._groups.setdefault(job.keys[i], deque()).append((job, i))

    def discard(self, job: Job, i: int) -> None:
        """Forgets a sequence that is not queued any more."""
        if not self._is_on:
            return
        members = self._groups[job.keys[i]]
        while members and not members[0][0].queued[members[0][1]]:
            members.popleft()
        if not members:
            del self._groups[job.keys[i]]

    def members(self, job: Job, budget: int) -> list[tuple[Job, int, int]]:
        """Returns the group of the job's next sequence, the job's own first, with the tokens each adds to a batch.

        At most half a budget of a shared prefix counts, so that a long prompt keeps its responses together. Ends after
        the first member beyond a group's limit, because a whole queue may share a prefix.
        """
        first = job.sequences[job.waiting[0]]
        if not self._is_on:
            cost = job.lengths[job.waiting[0]] + (0 if first.ask is None else _answer_tokens(first.ask))
            return [(job, job.waiting[0], cost)]
        group = self._groups[job.keys[job.waiting[0]]]
        own = ((j, i) for j, i in group if j is job and j.queued[i])
        others = ((j, i) for j, i in group if j is not job and j.queued[i])
        members: list[tuple[Job, int, int]] = []
        total, group_prefix = 0, _Alike()
        for owner, i in itertools.chain(own, others):
            s = owner.sequences[i]
            alike = group_prefix.next(s)
            cost = owner.lengths[i] - alike + (0 if s.ask is None else _answer_tokens(s.ask))
            if len(members) == 1:
                surplus = max(0, alike - budget // 2)
                members[0] = (*members[0][:2], members[0][2] - surplus)
                total -= surplus
            members.append((owner, i, cost))
            total += cost
            if total > WHOLE_GROUP * budget and len(members) > 1:
                break
        return members


@dataclass(slots=True)
class _Alike:
    """The prefixes that sequences of one group share, taken in order.

    A judge's questions about a response share more with each other than with those about the group's first response.
    """

    first: Sequence | None = None
    last: Sequence | None = None

    def next(self, s: Sequence) -> int:
        """Returns how many tokens `s` shares with the first of its group or the one before it, 0 if too few."""
        before = {id(one): one for one in (self.first, self.last) if one is not None}
        self.first, self.last = self.first or s, s
        if len(s.tokens) < MIN_SHARED:
            return 0
        alike = max((common_prefix(one.tokens, s.tokens) for one in before.values()), default=0)
        return alike if alike >= MIN_SHARED else 0


def _answer_tokens(ask: Any) -> int:
    """Returns what an answer adds to the cost, since it stays in memory until the batch is done."""
    return -(-ask.answer_bytes // ANSWER_BYTES_A_TOKEN)
