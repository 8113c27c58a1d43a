"""Batches of preferred sizes, for users' padded functions, as NeMo-Aligner has them by PyTriton. Pure."""

from __future__ import annotations

from collections.abc import Callable

from guerdon.server.batching.fair_queue import FairQueue
from guerdon.server.batching.jobs import Batch, Job, Limits


def fill_padded(
    batch: Batch,
    queue: FairQueue,
    num_waiting: int,
    limits: Limits,
    now: float,
    take: Callable[[Batch, Job, int, int], None],
) -> None:
    """Takes whole jobs until they reach the largest preferred number of the `num_waiting` sequences.

    If the first has waited its whole delay, all that waits joins, up to a budget's tokens, as in Triton's batcher.
    `take(batch, job, i, cost)` moves a sequence from the queue to the batch.
    """
    num_sequences = len(batch.entries) + num_waiting
    wanted = max((n for n in limits.batch_sizes if n <= num_sequences), default=num_sequences)
    first = min((job.arrived for job in queue), default=now)
    is_late = 0 < limits.max_delay_s <= now - first
    while (job := queue.head()) is not None:
        own = [(i, job.lengths[i]) for i in job.waiting if job.queued[i]]
        num_tokens = batch.num_tokens + sum(cost for _, cost in own)
        if len(batch.entries) >= wanted and not (is_late and num_tokens <= limits.max_batch_tokens):
            return
        for i, cost in own:
            take(batch, job, i, cost)
