"""A train request as the global batches that one optimiser step each is made from; numpy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from guerdon.core import TrainRequest


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """The rows of one optimiser step that have something to learn.

    `rows` are int64 `[T_i]`, cut behind the last token whose value counts, or behind its action: a causal model never
    reads what follows. `targets` are float32 `[3, T_i]`, prev_values, returns and mask of these tokens. `sum_mask` is
    the mask's sum over all of them, `num_tokens` the number of tokens where it is above 0.
    """

    rows: list[np.ndarray]
    targets: list[np.ndarray]
    sum_mask: float
    num_tokens: int


def global_batches(request: TrainRequest, size: int, *, with_action: bool = False) -> list[GlobalBatch]:
    """The request's rows in order, `size` at a time; the last batch may be smaller.

    `with_action` keeps the token behind the last one whose value counts: for a model whose values depend on how long
    the row is, for a row is as long as that when it is scored.
    """
    return [_batch(request, slice(start, start + size), int(with_action)) for start in range(0, len(request), size)]


def _batch(request: TrainRequest, part: slice, more: int) -> GlobalBatch:
    tokens, mask = request.tokens[part], request.mask[part]
    targets = np.stack([request.prev_values[part], request.returns[part], mask])
    counts = mask > 0
    width = mask.shape[1]
    rows, own = [], []
    for i in np.flatnonzero(counts.any(axis=1)):
        length = width - int(counts[i, ::-1].argmax())
        rows.append(tokens[i, : length + more])
        own.append(np.pad(targets[:, i, :length], ((0, 0), (0, more))))
    return GlobalBatch(rows, own, float(mask.sum(dtype=np.float64)), int(counts.sum()))
