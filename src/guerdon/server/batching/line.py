"""One client's requests in a queue, and which of them is next. Pure: no clock, no thread."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from guerdon.server.batching.scheduler import Job


@dataclass(slots=True)
class Line:
    """One client's jobs, a heap in order of service, and `at`, the tokens charged to the client so far.

    `serving` is the first job and `served` the tokens it was given. After half a budget the jobs in `nearest`, last
    one first, are served for another half.
    """

    at: int
    jobs: list[tuple[int, int, Job]] = field(default_factory=list)
    num_dead: int = 0
    serving: Job | None = None
    served: int = 0
    nearest: list[Job] = field(default_factory=list)

    def next_job(self) -> Job | None:
        """The job whose turn it is."""
        while self.jobs and not self.jobs[0][2].waiting:
            heapq.heappop(self.jobs)
        while self.nearest and not self.nearest[-1].waiting:
            self.nearest.pop()
        if self.nearest:
            return self.nearest[-1]
        return self.jobs[0][2] if self.jobs else None

    def serve(self, job: Job, cost: int, most: int, *, has_time: bool) -> None:
        """Charges tokens to a job; after `most` the turn passes to the others if the job `has_time`, and then back."""
        if not self.nearest and job is not self.serving:
            self.serving, self.served = job, 0
        self.served += cost
        if self.served < most:
            return
        if self.nearest:
            self.nearest = []
        elif not has_time:
            return
        else:
            waiting = [entry for entry in self.jobs if entry[2].waiting]
            first = min(waiting, default=None)
            equals = [entry for entry in waiting if first is not None and entry[0] == first[0]]
            equals.sort(key=lambda entry: (entry[2].cost_left, entry[1]), reverse=True)
            self.nearest = [job for *_, job in equals]
        self.serving, self.served = None, 0
