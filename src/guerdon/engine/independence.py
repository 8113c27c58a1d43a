"""Proves that a hidden state does not depend on neighbours in its batch, siblings under its prompt, or later tokens.

A tolerance cannot prove it: in bfloat16 rounding is larger than what a recurrent state of freshly initialised weights
carries from one row into the next. So the same batch is computed twice, with the same shapes and other contents in some
places. All other states must be equal in bits, because their arithmetic is the same. Experts may take other numbers of
tokens and round differently, so that a difference counts as a dependence only if it has a gradient, which is exactly
zero without one. On a CPU it also compares the bits of a row in batches of other shapes.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from guerdon.core import MIN_SHARED
from guerdon.engine.attention import forms
from guerdon.engine.continuing import copied, mapped
from guerdon.engine.forward import Forward, HiddenStates
from guerdon.engine.microbatches import MicroBatch
from guerdon.engine.native.library import find

_LEAF = 5
"""Tokens of a row after its prompt: a state that is carried from row to row is strongest at their beginning."""
_ROWS = 3
"""Rows of their own, and as many siblings."""
WINDOW = 20
"""Window size during probes, so that short probes reach beyond it."""
ROUNDING = {torch.float32: 1e-4, torch.float16: 1e-2}
"""Largest change without a gradient that passes for rounding; in bfloat16 and others 5e-2."""
_WINDOWS = ("sliding_window", "attention_chunk_size", "attention_window_size", "local_attention", "window_size")


@contextlib.contextmanager
def cut_windows(trunk: Any) -> Iterator[bool]:
    """Makes every attention window of the trunk short inside the context; yields whether it has one."""
    places = [trunk.config.get_text_config(), *trunk.modules()]  # modules keep copies
    own = [(place, name, getattr(place, name, None)) for place in places for name in _WINDOWS]
    cut: list[tuple[Any, str, int]] = []
    try:
        for place, name, value in own:
            if type(value) is not int or value <= WINDOW:
                continue
            with contextlib.suppress(AttributeError, ValueError):  # a property, or checked against something else
                setattr(place, name, WINDOW)
                cut.append((place, name, value))
        yield bool(cut)
    finally:
        for place, name, value in cut:
            setattr(place, name, value)


# ------------------------------------------------------------------------------------------------- neighbours


@dataclass(frozen=True)
class Swap:
    """A batch in which some rows exchanged their contents: which states must stay equal, and which tokens changed.

    `kept` and `changed` are indices into the batch's tokens, int64.
    """

    batch: MicroBatch
    kept: np.ndarray
    changed: np.ndarray
    num_rows: int


def swap_neighbours(forward: Forward, path: str) -> tuple[float, list[Swap]]:
    """Returns the largest change of a state whose row kept its content, as `largest_change`, and a description of the
    exchange.

    The path's attention must be in use. Every row is kept once, while all beside it are exchanged.
    """
    # Rows of one length, and longer ones that share a beginning, without padding.
    leaf = min(_LEAF, forward.info.max_length or _LEAF)
    ids = np.setdiff1d(np.arange(forward.info.vocab_size or 2), [forward.pad_token_id])
    rng = np.random.default_rng(1)
    prompt = rng.choice(ids, min(MIN_SHARED, (forward.info.max_length or MIN_SHARED + _LEAF) - leaf))
    leaves = [rng.choice(ids, leaf) for _ in range(2 * _ROWS)]
    rows = [*leaves[:_ROWS], *(np.concatenate([prompt, one]) for one in leaves[_ROWS:])]
    change, swaps = 0.0, []
    budget = max(forward.max_batch_tokens, sum(map(len, rows)))
    with forward.no_gradients():
        for batch in forward.batcher.plan(path, rows, [None] * len(rows), budget):
            before = next(iter(forward.run([batch]))).hidden
            for swap in _exchanges(batch, leaf):
                after = next(iter(forward.run([swap.batch]))).hidden
                kept = forward.to_device(swap.kept)
                change = max(change, largest_change(after[kept], before[kept]))
                swaps.append(swap)
    return change, swaps


def is_reached(forward: Forward, swap: Swap) -> bool:
    """Whether a kept state has a gradient by the embedding of a token that was exchanged."""
    return _has_gradient(forward, swap.batch, swap.kept, swap.changed)


def _exchanges(batch: MicroBatch, leaf: int) -> Iterator[Swap]:
    """Yields the batch with the leaves of every other row exchanged, and of all others; none if the batch is small."""
    leaves = {i: batch.gather(i)[-leaf:] for i in range(len(batch.rows))}
    order = sorted(leaves, key=lambda i: leaves[i][0])
    for odd in (0, 1) if len(order) > 3 else ():
        kept, others = order[odd::2], order[1 - odd :: 2]
        tokens = batch.tokens.copy()
        for has_prompt in (False, True):  # siblings with siblings: experts take as many tokens as before
            kind = [leaves[i] for i in others if (len(batch.gather(i)) > leaf) == has_prompt]
            for one, other in zip(kind, kind[1:] + kind[:1], strict=True):
                tokens.reshape(-1)[one] = batch.tokens.reshape(-1)[other]
        yield Swap(
            dataclasses.replace(batch, tokens=tokens),
            np.unique(np.concatenate([batch.gather(i) for i in kept])),
            np.concatenate([leaves[i] for i in others]),
            len(kept),
        )


def check_copies(forward: Forward, row: np.ndarray) -> None:
    """Raises NotImplementedError if tokens do not read all of the cache that they continue from, or a sibling's.

    Some trunks begin a new state if more than one token follows, or mask the wrong keys if their first layer keeps
    none, which a tolerance misses while weights are small. So two siblings continue from copies of a cache: the first
    one's states need a gradient by every tensor of its copy, and must have none by the other's copy and tokens.
    """
    tokens, start = forward.to_device(row), 2 * len(row) // 3
    leaves: list[Tensor] = []

    def leaf(tensor: Tensor) -> Tensor:
        own = tensor.clone()
        if own.is_floating_point() and own.numel() and own.dim():
            leaves.append(own.requires_grad_())
        return own.clone()

    def is_read(slope: Tensor | None) -> bool:
        if slope is None:
            return False
        of_tokens = [dim for dim, size in enumerate(slope.shape) if size == start]  # every token's key is visible
        return all(bool(slope.movedim(dim, 0).flatten(1).any(1).all()) for dim in of_tokens) and bool(slope.any())

    step, run = forward.continuation.step, forward.run_trunk
    with forward.no_gradients():
        _, cache = step(run, [tokens[:start]], None, 0, keeps=True)
    siblings = [tokens[start:], tokens[start:].flip(0)]
    with torch.enable_grad(), torch.autograd.graph.allow_mutation_on_saved_tensors(), _embedded(forward) as embedded:
        hidden, _ = step(run, siblings, mapped(copied(cache, 2), leaf), start, keeps=False)
        slopes = torch.autograd.grad(_weighted_sum(hidden[0]), [*leaves, embedded[0]], allow_unused=True)
    if unread := sum(not is_read(None if slope is None else slope[:1]) for slope in slopes):
        raise NotImplementedError(f"a response would not read {unread} of {len(leaves)} tensors in its prompt's cache")
    if any(slope is not None and slope[1:].any() for slope in slopes):
        raise NotImplementedError("a response's states depend on its siblings")


# -------------------------------------------------------------------------------------------------- the same bits


def why_bits_differ(forward: Forward, path: str, rows: list[np.ndarray], together: dict[int, Tensor]) -> str:
    """Returns why a row's states may have other bits in another batch, empty if they have the same; for CPUs.

    Compares the rows' readable states from one packed batch, by row, with those of one batch in another order without
    sharing, and of some rows alone. The path's attention must be in use.
    """
    if path == "shared":
        return "a prompt that sequences share is computed before them"
    library, why = find()
    if library is None:
        return why
    if forward.ranks.is_sharded:
        return "ranks that share the weights sum in an order of their own"

    everything = list(range(len(rows)))
    companies = [
        (everything[::-1], "packed"),
        *(([i], path) for i in everything[1::3]),  # each is a pass over the weights
    ]
    with forms.noting_chosen() as chosen:
        others = [
            dict(zip(some, row_states(forward, how, [rows[i] for i in some]), strict=True)) for some, how in companies
        ]
    if chosen != {forms.NATIVE.name}:
        return f"attention by {', '.join(sorted(chosen - {forms.NATIVE.name}))}"
    different = {i for other in others for i, state in other.items() if not is_equal(state, together[i])}
    return f"{len(different)} of {len(rows)} sequences had other bits in another batch" if different else ""


def row_states(forward: Forward, path: str, rows: list[np.ndarray]) -> list[Tensor]:
    """Returns the rows' readable states, from one batch if the path can; its attention must be in use."""
    own = forward.seen(rows, path)
    budget = max(forward.max_batch_tokens, sum(map(len, own)))
    found: dict[int, Tensor] = {}
    with forward.no_gradients():
        for batch in forward.batcher.plan(path, own, [None] * len(own), budget):
            batch.read = forward.read_indices(batch, own)
            found |= zip(batch.rows, forward.readable(next(iter(forward.run([batch]))), own), strict=True)
    return [found[row] for row in range(len(rows))]


def is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether all numbers are equal, or NaN in both."""
    return one.shape == other.shape and bool(((one == other) | (one.isnan() & other.isnan())).all())


# ----------------------------------------------------------------------------------------------- later tokens


def change_later(forward: Forward, row: np.ndarray) -> float:
    """Returns the largest change of a state in the first half of `row` when the second half changes.

    It is computed by the plain forward, whose attention must be in use.
    """
    half = len(row) // 2
    with forward.no_gradients():
        before, after = (
            next(iter(forward.run(_alone(forward, one)))).hidden[:half]
            for one in (row, np.concatenate([row[:half], row[half:][::-1]]))
        )
    return largest_change(after, before)


def is_reached_by_later(forward: Forward, row: np.ndarray) -> bool:
    """Whether a state in the first half of `row` has a gradient by the embedding of a token in the second half."""
    (batch,), half = _alone(forward, row), len(row) // 2
    return _has_gradient(forward, batch, np.arange(half), np.arange(half, len(row)))


def _alone(forward: Forward, row: np.ndarray) -> list[MicroBatch]:
    return list(forward.batcher.plan("single", [row], [None], len(row)))


# ------------------------------------------------------------------------------------------ change and gradient


def largest_change(got: Tensor, want: Tensor) -> float:
    """Returns the largest difference of a number, relative to the root mean square of those wanted; 0 if none differs.

    Numbers that are NaN in both do not differ.
    """
    if is_equal(got, want):
        return 0.0
    got, want = got.float(), want.float()
    relative = ((got - want).abs().max() / want.square().mean().sqrt()).item()
    return relative if np.isfinite(relative) else float("inf")


def embedding_gradients(
    forward: Forward, batches: Iterable[MicroBatch], total: Callable[[HiddenStates], Tensor]
) -> Iterator[HiddenStates]:
    """Yields the batches' states, with the gradients of the `total` by the embeddings in place of the hidden states.

    An error in any layer's backward pass reaches the embeddings below it.
    """
    with _embedded(forward) as leaves, torch.enable_grad():
        for states in forward.run(batches):
            states.hidden = torch.autograd.grad(total(states), leaves[0])[0].flatten(0, 1)
            yield states


@contextlib.contextmanager
def _embedded(forward: Forward) -> Iterator[list[Tensor]]:
    """Yields a list that has the last forward's embeddings, by which there are gradients."""
    leaves: list[Tensor] = []

    def catch(_: Any, __: Any, embedded: Tensor) -> Tensor:
        leaves[:] = [embedded.detach().requires_grad_()]
        return leaves[0].clone()  # some models scale it in place, which a leaf does not allow

    handle = forward.trunk.get_input_embeddings().register_forward_hook(catch)
    try:
        yield leaves
    finally:
        handle.remove()


def _has_gradient(forward: Forward, batch: MicroBatch, states_at: np.ndarray, tokens_at: np.ndarray) -> bool:
    def total(states: HiddenStates) -> Tensor:
        return _weighted_sum(states.hidden[forward.to_device(states_at)])

    (states,) = embedding_gradients(forward, [batch], total)
    return bool(states.hidden[forward.to_device(tokens_at)].count_nonzero())


def _weighted_sum(states: Tensor) -> Tensor:
    """Returns a number on which every element of the states has an influence of its own."""
    random = torch.randn(states.shape, generator=torch.Generator().manual_seed(0))
    return (states.float() * random.to(states.device)).sum()
