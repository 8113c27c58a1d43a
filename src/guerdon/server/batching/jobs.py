"""A request's job, a batch of several jobs' sequences, and the limits of both."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass, field

from guerdon.core import Score, Sequence
from guerdon.errors import GuerdonError
from guerdon.server.tracing import Part


@dataclass(slots=True, eq=False)
class Job:
    """One accepted request: its sequences, and their results as they come in.

    Times are in seconds on the caller's clock: `arrived`, `deadline`, and `taken`, when the last sequence joined a
    batch. `num_sequences` counts all, `lengths` are their tokens and `num_tokens` the sum; the `num_queued` sequences
    that no batch has taken yet cost about `cost_left` tokens to compute. `costs` has each sequence's, as the groups in
    `priced_by` estimate it, and `keys` is equal for those that begin alike. `weights_version` names the weights that
    gave the results. `owner` is the future that the caller awaits.
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
    results: list[Score | GuerdonError | None] = field(default_factory=list)
    waiting: deque[int] = field(default_factory=deque)
    queued: list[bool] = field(default_factory=list)
    unanswered: int = 0
    num_queued: int = 0
    num_sequences: int = 0
    num_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    keys: list[Hashable] = field(default_factory=list)
    priced_by: object = None
    cost_left: int = 0
    owner: object = None
    traced: Part | None = None

    def __post_init__(self) -> None:
        self.unanswered = self.num_queued = self.num_sequences = count = len(self.sequences)
        self.results = [None] * count
        self.waiting = deque(range(count))
        self.queued = [True] * count
        self.lengths = [s.num_tokens for s in self.sequences]
        self.num_tokens = sum(self.lengths)


@dataclass(slots=True, eq=False)
class Batch:
    """Sequences to compute together, as places in their jobs; `num_tokens` is the sum of their estimated `costs`."""

    entries: list[tuple[Job, int]] = field(default_factory=list)
    costs: list[int] = field(default_factory=list)
    num_tokens: int = 0

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences in batch order."""
        return [job.sequences[i] for job, i in self.entries]

    def jobs(self) -> dict[Job, int]:
        """Returns each job with the number of its sequences in the batch."""
        counts: dict[Job, int] = {}
        for job, _ in self.entries:
            counts[job] = counts.get(job, 0) + 1
        return counts


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one batch and one queue.

    `shares` says whether the model computes a shared prefix once. `batch_sizes` are preferred numbers of sequences;
    the first in the queue waits for them at most `max_delay_s`, and a job's sequences stay together.
    """

    max_batch_tokens: int = 4096
    max_queue_tokens: int = 4_000_000
    max_queue_sequences: int = 16_384
    shares: bool = True
    batch_sizes: tuple[int, ...] = ()
    max_delay_s: float = 0.0
