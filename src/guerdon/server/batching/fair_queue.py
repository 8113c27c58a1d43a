"""Which client's request is next. Pure: no clock, no thread.

Clients that have something waiting get equal parts of the computed tokens, by start-time fair queueing (Goyal, Vin and
Cheng, 1996). Next is the client that was charged least. A client with an empty queue joins at the others' virtual time:
idle time earns no credit, and use without competition costs nothing. Priority orders a client's own requests only;
otherwise whoever asks for the highest would get everything.

A client's requests are served in the order of arrival. After half a budget, if the first request has time left, another
half goes to those nearest to their end: small ones join, and of equal ones the first is finished first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from guerdon.server.batching.jobs import Job


@dataclass(slots=True)
class _Line:
    """One client's jobs, a heap in order of service; `at` counts the tokens charged to the client so far.

    `serving` is the first job and `served` the tokens it was given. After half a budget the jobs in `nearest`, last
    one first, are served for another half.
    """

    at: int
    jobs: list[tuple[int, int, Job]] = field(default_factory=list)
    num_dead: int = 0
    serving: Job | None = None
    served: int = 0
    nearest: list[Job] = field(default_factory=list)


class FairQueue:
    """The waiting jobs of one model, by client."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._lines: dict[str, _Line] = {}
        self._left_at: dict[str, int] = {}  # what clients without a line had been charged
        self._at = 0  # what the client served last had been charged

    def __iter__(self) -> Iterator[Job]:
        return (job for line in self._lines.values() for *_, job in line.jobs if job.waiting)

    def push(self, job: Job) -> None:
        """Adds a job after the client's others of its priority."""
        line = self._lines.get(job.client)
        if line is None:
            line = self._lines[job.client] = _Line(self._left_at.pop(job.client, 0))
        line.at = max(line.at, self._at)
        heapq.heappush(line.jobs, (-job.priority, next(self._numbers), job))

    def head(self) -> Job | None:
        """Returns the next job of the client that was charged least; if equal, the one that arrived first."""
        best: tuple[_Line, Job] | None = None
        for client, line in list(self._lines.items()):
            while line.jobs and not line.jobs[0][2].waiting:
                heapq.heappop(line.jobs)
            while line.nearest and not line.nearest[-1].waiting:
                line.nearest.pop()
            if not line.jobs:
                self._left_at[client] = line.at
                del self._lines[client]
            elif best is None or (line.at, line.jobs[0][1]) < (best[0].at, best[0].jobs[0][1]):
                best = line, line.nearest[-1] if line.nearest else line.jobs[0][2]
        if best is None:
            return None
        self._at = best[0].at
        return best[1]

    def charge(self, client: str, cost: int) -> None:
        """Charges computed tokens to a client with a waiting job."""
        self._lines[client].at += cost

    def serve(self, job: Job, cost: int, most: int) -> bool:
        """Counts tokens of the head's turn; returns whether they are as many as a turn has at `most`."""
        line = self._lines[job.client]
        if not line.nearest and job is not line.serving:
            line.serving, line.served = job, 0
        line.served += cost
        return line.served >= most

    def pass_on(self, job: Job, *, has_time: bool) -> None:
        """Passes the turn from the head to the client's other jobs if the head `has_time`, and then back."""
        line = self._lines[job.client]
        if line.nearest:
            line.nearest = []
        elif not has_time:
            return
        else:
            waiting = [entry for entry in line.jobs if entry[2].waiting]
            first = min(waiting, default=None)
            equals = [entry for entry in waiting if first is not None and entry[0] == first[0]]
            equals.sort(key=lambda entry: (entry[2].cost_left, entry[1]), reverse=True)
            line.nearest = [job for *_, job in equals]
        line.serving, line.served = None, 0

    def drop(self, job: Job) -> None:
        """Notes that nothing of the job waits any more."""
        line = self._lines.get(job.client)
        if line is None:
            return
        line.num_dead += 1
        if 2 * line.num_dead > len(line.jobs):
            # Behind others of higher priority a dropped job might never come to the head, where it would go.
            line.jobs = [entry for entry in line.jobs if entry[2].waiting]
            heapq.heapify(line.jobs)
            line.num_dead = 0

    def tokens_until(self, job: Job, max_batch_tokens: int) -> int:
        """Estimates the tokens that are computed until a job is done that arrives now."""
        line = self._lines.get(job.client)
        before = [j.cost_left for priority, _, j in (line.jobs if line else []) if -priority >= job.priority]
        num_tokens = sum(before) + job.cost_left
        if any(2 * left >= max_batch_tokens for left in before):  # half goes to the nearest to their end
            nearer = sum(left for left in before if left <= job.cost_left) + job.cost_left
            num_tokens = min(num_tokens, 2 * nearer + max_batch_tokens)
        others = (sum(j.cost_left for *_, j in o.jobs) for name, o in self._lines.items() if name != job.client)
        return num_tokens + sum(min(num_tokens, left) for left in others)
