"""The self-check at start: picks the best path that agrees with the plain forward on a few short probes.

Some models accept a packed batch and silently compute something else, such as models with a recurrent state. So each
start compares the hidden states of each path with those of one sequence at a time, and the gradients, too, if the model
will be trained.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from guerdon.core import MIN_SHARED, Score, Sequence
from guerdon.distributed.ranks import Ranks
from guerdon.engine.attention import forms, registry
from guerdon.engine.checkpoint.weights import LoadedTrunk
from guerdon.engine.forward import Forward, HiddenStates
from guerdon.engine.microbatches import MicroBatch
from guerdon.errors import CheckpointError, SampleFailed, TooLarge

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest accepted difference between two paths' hidden states, relative to their root mean square."""
GRADIENT_TOLERANCE = {dtype: 2 * most for dtype, most in TOLERANCE.items()}
"""The same for gradients, which are rounded in the forward and in the backward pass."""
_LONGEST = 64
"""Tokens of the longest probe."""

_NOT_FINITE = "its weights are broken, or too large for its dtype: try --dtype float32, or an earlier checkpoint"


def choose_path(forward: Forward, loaded: LoadedTrunk) -> None:
    """Collective; makes `forward` use the best path that passes on all ranks, and writes path and reason into its info.

    Raises CheckpointError if `require_packed` is set and no packed path passes.
    """
    config, info = loaded.config, loaded.info
    path, why = "single", "--deterministic"
    if not config.deterministic:
        path, why = _best_path(forward, gradients=loaded.trains)
    if config.require_packed and not path.startswith("packed"):
        raise CheckpointError(
            f"{info.name} cannot run packed: {why}", "leave out --require-packed to serve it the plain way"
        )
    forward.path, forward.info = path, dataclasses.replace(info, path=path, why=why)
    forward.use(path)


def _best_path(forward: Forward, *, gradients: bool) -> tuple[str, str]:
    """Returns the first path that agrees with the plain forward on all ranks, and why no better one does."""
    info = forward.info
    rows = probe_rows(info.vocab_size, info.max_length, forward.pad_token_id)
    candidates = ["packed+shared", "packed"] if forward.causal else ["packed"]
    if forward.device.type != "cpu":
        candidates.append("padded")  # on a CPU padding costs more than batching gains
    with checking(forward.ranks):
        probe = _Probe(forward, rows, gradients)
    reasons = []
    for path in candidates:
        with forms.noting_skipped() as skipped, checking(forward.ranks):
            states, slopes, refusal = probe.compare_on_all_ranks(path)
        if refusal:
            reasons.append(f"{path}: {refusal}")
        elif states > TOLERANCE.get(forward.dtype, 5e-2):
            reasons.append(f"{path}: differs from the plain forward by {states:.1e}")
        elif slopes is not None and slopes > GRADIENT_TOLERANCE.get(forward.dtype, 1e-1):
            reasons.append(f"{path}: its gradients differ from the plain forward's by {slopes:.1e}")
        else:
            also = "" if slopes is None else f", its gradients within {slopes:.1e}"
            reasons += [f"attention without {form}: {why}" for form, why in skipped.items()]
            return path, "; ".join([*reasons, f"agrees with the plain forward within {states:.1e}{also}"])
    return "single", "; ".join(reasons)


@contextlib.contextmanager
def checking(ranks: Ranks) -> Iterator[None]:
    """Runs a self-check inside the context; raises TooLarge on all ranks if any rank's device runs out of memory."""
    with ranks.raise_on_all_ranks():
        try:
            yield
        except torch.OutOfMemoryError as e:
            raise TooLarge(
                f"the device has too little memory for the self-check: {(str(e).splitlines() or [''])[0]}",
                "free some, choose another machine or --device, or a smaller --dtype such as bfloat16",
            ) from e


class _Probe:
    """A few sequences, and what the plain forward computes for each of them alone."""

    def __init__(self, forward: Forward, rows: list[np.ndarray], gradients: bool) -> None:
        self._forward, self._rows = forward, rows
        # Only sequences in one batch can show that they do not change each other.
        self._budget = max(forward.max_batch_tokens, sum(map(len, rows)))
        with forward.no_gradients():
            self._states = {x.rows[0]: x for x in self._run("single")}
        # Any weights do that make each element of each hidden state count.
        random = torch.Generator().manual_seed(0)
        width = next(iter(self._states.values())).hidden.shape[-1]
        self._weights = [torch.randn(len(row), width, generator=random).to(forward.device) for row in rows]
        self._gradients = {x.rows[0]: x.hidden for x in self._run_backward("single")} if gradients else None

    def compare_on_all_ranks(self, path: str) -> tuple[float, float | None, str]:
        """Collective; returns the worst rank's `_compare` and an empty text, or why the path cannot run."""
        forward = self._forward
        states, slopes, refusal = 0.0, None, ""
        try:
            registry.register()
            forward.use(path)
            if path.startswith("packed") and forward.trunk.config._attn_implementation != registry.NAME:
                raise NotImplementedError("its attention is not in transformers' registry")
            states, slopes = self._compare(path)
        except torch.OutOfMemoryError:  # it says nothing about the path
            raise
        except (ValueError, NotImplementedError, RuntimeError, TypeError, LookupError, AttributeError) as e:
            refusal = (str(e).splitlines() or [type(e).__name__])[0][:120]
        finally:
            forward.use("single")
            forward.reset_after_error()
        found = forward.ranks.tell_all((states, slopes, refusal))
        refusals = [other for *_, other in found if other]
        all_slopes = None if slopes is None else max(other for _, other, _ in found if other is not None)
        return max(other for other, *_ in found), all_slopes, refusals[0] if refusals else ""

    def _compare(self, path: str) -> tuple[float, float | None]:
        """Returns the largest relative difference of a sequence's readable states, and of its gradients.

        Raises NotImplementedError if no two sequences shared what the path lets them share, which proves nothing.
        """
        states, together, shared = 0.0, False, False
        with self._forward.no_gradients():
            for batch in self._run(path):
                states = max(states, self._states_difference(batch))
                together |= len(batch.rows) > 1
                shared |= any(len(spans) > 1 for spans in batch.spans)
        if not together:
            raise NotImplementedError("no two of the sequences tried fit in one batch")
        if path == "packed+shared" and not shared:
            raise NotImplementedError("no two of the sequences tried share a beginning in one batch")
        if self._gradients is None:
            return states, None
        return states, max(self._gradients_difference(batch) for batch in self._run_backward(path))

    def _run(self, path: str) -> Iterator[HiddenStates]:
        return self._forward.run(self._plan(path))

    def _plan(self, path: str) -> Iterator[MicroBatch]:
        """Plans the probes in one batch if the path can: not split by length, and by no other rank's number of rows."""
        limits: list[int | None] = [None] * len(self._rows)
        for batch in self._forward.batcher.plan(path, self._rows, limits, self._budget):
            batch.read = self._forward.read_indices(batch, self._rows)
            yield batch

    def _states_difference(self, states: HiddenStates) -> float:
        read = self._forward.readable(states, self._rows)
        plain = [self._forward.readable(self._states[row], self._rows)[0] for row in states.rows]
        return max(_relative(got, want) for got, want in zip(read, plain, strict=True))

    def _run_backward(self, path: str) -> Iterator[HiddenStates]:
        """Yields the path's states, with the gradients of the embeddings in place of the hidden states.

        An error in any layer's backward pass reaches the embeddings below it.
        """
        forward = self._forward
        leaves: list[torch.Tensor] = []

        def catch(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
            leaves[:] = [embedded.detach().requires_grad_()]
            return leaves[0].clone()  # some models scale it in place, which a leaf does not allow

        handle = forward.trunk.get_input_embeddings().register_forward_hook(catch)
        try:
            with torch.enable_grad():
                for states in self._run(path):
                    read = [states.hidden[forward.to_device(states.gather(i))] for i in range(len(states.rows))]
                    weights = [self._weights[row] for row in states.rows]
                    total = torch.stack([(x.float() * w).sum() for x, w in zip(read, weights, strict=True)]).sum()
                    states.hidden = torch.autograd.grad(total, leaves[0])[0].flatten(0, 1)
                    yield states
        finally:
            handle.remove()

    def _gradients_difference(self, states: HiddenStates) -> float:
        assert self._gradients is not None
        own = [self._forward.to_device(states.gather(i)) for i in range(len(states.rows))]
        # A token that several sequences share has the sum of their gradients.
        want = torch.zeros_like(states.hidden, dtype=torch.float32)
        for at, row in zip(own, states.rows, strict=True):
            want.index_add_(0, at, self._gradients[row].float())
        return max(_relative(states.hidden[at], want[at]) for at in own)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.float(), want.float()
    relative = ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()
    return relative if np.isfinite(relative) else float("inf")


def probe_rows(vocab_size: int | None, max_length: int | None, avoid: int) -> list[np.ndarray]:
    """Returns a few short random sequences, int64 `[T]`, most with a shared prefix, all without the token `avoid`."""
    longest = min(_LONGEST, max_length or _LONGEST)
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(vocab_size or 2), [avoid])
    prompt = rng.choice(ids, max(longest // 2, min(MIN_SHARED, longest - 1)))
    rows = [np.concatenate([prompt, rng.choice(ids, max(1, longest // k))]) for k in (2, 3, 8)]
    rows += [rng.choice(ids, n) for n in (max(1, longest // 4), longest, 1)]
    return [r[:longest].astype(np.int64) for r in rows]


def check_finite(
    forward: Forward, score: Callable[[list[Sequence]], list[Score | SampleFailed]], *, every: bool
) -> None:
    """Collective; raises CheckpointError if no probe has a finite score, with `every` if any has none."""
    info = forward.info
    with forward.ranks.raise_on_all_ranks():
        rows = probe_rows(info.vocab_size, info.max_length, forward.pad_token_id)
        results = score([Sequence(row, steps=np.array([len(row) - 1])) for row in rows])
        failed = [result for result in results if isinstance(result, SampleFailed)]
        if len(failed) == len(rows) and not every:
            raise CheckpointError(f"{info.name} scores nothing: {failed[0]}", _NOT_FINITE)
        if failed and every:
            raise CheckpointError(f"{len(failed)} of {len(rows)} random sequences fail: {failed[0]}", _NOT_FINITE)
