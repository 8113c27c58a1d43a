"""The self-check at start: picks the best path that agrees with the plain forward on a few short probes.

Some models accept a packed batch and silently compute something else, such as models with a recurrent state. So each
start compares the hidden states of each path with those of one sequence at a time, and the gradients, too, if the model
will be trained. `independence` proves what no tolerance can: that neighbours and later tokens change nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from guerdon import memory
from guerdon.core import MIN_SHARED, SAME_BITS, SHARING, Score, Sequence, common_prefix
from guerdon.distributed.ranks import Ranks
from guerdon.engine import independence, onednn
from guerdon.engine.attention import forms, registry
from guerdon.engine.checkpoint.weights import LoadedTrunk
from guerdon.engine.continuing import LEAST_SAVED
from guerdon.engine.fallback import OTHER_BITS
from guerdon.engine.forward import Forward, HiddenStates
from guerdon.engine.host import mapping_blocks
from guerdon.engine.independence import is_equal, row_states
from guerdon.engine.microbatches import MicroBatch
from guerdon.errors import CheckpointError, SampleFailed, TooLarge, first_line
from guerdon.settings.config import LanguageModelConfig

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest accepted difference between two paths' hidden states, relative to their root mean square."""
GRADIENT_TOLERANCE = {dtype: 2 * most for dtype, most in TOLERANCE.items()}
"""The same for gradients, which are rounded in the forward and in the backward pass."""
_LONGEST = 64
"""Tokens of the longest probe; all together are more than 128, from which on some models compress their keys."""

_TRIMMED_BYTES = 32 << 20
"""Freed bytes of plain weights that the process may keep: returning them to the system searches the whole heap."""

_LOOKING_AHEAD = {"is_causal": (False,), "use_bidirectional_attention": (True, "all"), "bidirectional": (True,)}
"""Settings of `config.json` with which attention sees later tokens, in some architectures."""
_ALONE = "neighbours change nothing: each row is computed alone"
_NOT_FINITE = "its weights are broken, or too large for its dtype: try --dtype float32, or an earlier checkpoint"


def choose_path(forward: Forward, loaded: LoadedTrunk, *, reads_last: bool) -> None:
    """Collective; makes `forward` use the best path that passes on all ranks; writes it, why, and proofs into its info.

    Raises CheckpointError if `require_packed` is set and no packed path passes, and if a token's state depends on later
    tokens, unless `reads_last` says that results are read from each row's last state.
    """
    config, info = loaded.config, loaded.info
    proofs, shares = list(info.proofs), forward.causal
    if forward.causal:
        sees_later, change = _sees_later(forward)
        text_config = loaded.trunk.config.get_text_config()
        stated = {name: getattr(text_config, name, None) for name in _LOOKING_AHEAD}
        found = next((f" (config.json has {name}: {v})" for name, v in stated.items() if v in _LOOKING_AHEAD[name]), "")
        cause = f"a later token changes an earlier one's state by {change:.1e}{found}"
        if sees_later and not reads_last:
            what = "a log-prob" if isinstance(config, LanguageModelConfig) else "a value"
            raise CheckpointError(
                f"{info.name} is not causal: {cause}, and {what} must not depend on what comes after it",
                "serve it as a reward model; critics, teachers and policies need a causal model",
            )
        proofs.append(
            f"prompts are not shared: {cause}" if sees_later else f"other later tokens change nothing ({_of(change)})"
        )
        shares = not sees_later
    best = _Choice("single", "--deterministic")
    if not config.deterministic:
        best = _best_path(forward, gradients=loaded.trains, shares=shares)
    if config.require_packed and not best.path.startswith("packed"):
        raise CheckpointError(
            f"{info.name} cannot run packed: {best.why}", "leave out --require-packed to serve it the plain way"
        )
    if forward.device.type == "cpu":
        other = best.why_bits_differ
        proofs.append(f"{OTHER_BITS}: {other}" if other else SAME_BITS)
    forward.path = best.path
    forward.use(best.path)
    is_frozen = not (loaded.trains or forward.ranks.is_sharded)
    if is_frozen and forward.device.type == "cpu" and best.path.startswith("packed"):
        with checking(forward.ranks):
            prepack(forward, probe_rows(info.vocab_size, info.max_length, forward.pad_token_id)[-2:], best.last_two)
    forward.info = dataclasses.replace(info, path=best.path, why=best.why, proofs=(*proofs, best.proof))


def _sees_later(forward: Forward) -> tuple[bool, float]:
    """Collective; returns whether on any rank a token's state depends on later tokens, and how much it changes."""
    info, ranks = forward.info, forward.ranks
    row = probe_rows(info.vocab_size, info.max_length, forward.pad_token_id)[-2]
    with checking(ranks):
        own = independence.change_later(forward, row)
    change = max(ranks.tell_all(own))
    if not change:
        return False, change
    with checking(ranks):
        reached = independence.is_reached_by_later(forward, row)
    return any(ranks.tell_all(reached)), change


@dataclass(frozen=True)
class _Choice:
    """A path, why no better one is used, and what is proved of a row's neighbours.

    On a CPU `why_bits_differ` is why a row's bits may depend on its batch on any rank, empty if they do not; then
    `last_two` are the last two probes' states.
    """

    path: str
    why: str
    proof: str = _ALONE
    why_bits_differ: str = ""
    last_two: list[torch.Tensor] | None = None


def _best_path(forward: Forward, *, gradients: bool, shares: bool) -> _Choice:
    """Returns the first path that passes on all ranks."""
    info = forward.info
    rows = probe_rows(info.vocab_size, info.max_length, forward.pad_token_id)
    candidates = ["packed+shared", "packed"] if shares else ["packed"]
    # Ranks in step run as many forwards; a prompt alone may have other rotary frequencies than before its response.
    if shares and not forward.ranks.in_step and not forward.length_classes.depend_on_length:
        candidates.append("shared")
    if forward.device.type != "cpu":
        candidates.append("padded")  # on a CPU padding costs more than batching gains
    with checking(forward.ranks):
        probes = [_Probe(forward, rows, gradients)]
        with independence.cut_windows(forward.trunk) as has_windows:
            if has_windows:
                probes.append(_Probe(forward, rows, gradients, cuts_windows=True))
    reasons = []
    for path in candidates:
        with forms.noting_skipped() as skipped, checking(forward.ranks):
            found = [probe.compare_on_all_ranks(path) for probe in probes]
        refusal = next((one.refusal(forward.dtype) for one in found if one.refusal(forward.dtype)), "")
        if refusal:
            reasons.append(f"{path}: {refusal}")
            continue
        reasons += [f"attention without {form}: {why}" for form, why in skipped.items()]
        states, slopes = max(one.states for one in found), [one.slopes for one in found if one.slopes is not None]
        also = f", its gradients within {max(slopes):.1e}" if slopes else ", gradients are the plain one's" * gradients
        who = "neighbours and siblings" if path in SHARING else "neighbours"
        change, count = max(one.swapped for one in found), sum(one.num_swapped for one in found)
        why_bits_differ = next((one.why_bits_differ for one in found if one.why_bits_differ), "")
        if count:
            proof = f"{who} change nothing in {count} swaps ({_of(change)})"
        else:
            proof = _ALONE if why_bits_differ else f"{who} change nothing (0.0)"
        why = "; ".join([*reasons, f"agrees with the plain forward within {states:.1e}{also}"])
        last_two = None if why_bits_differ or forward.device.type != "cpu" else probes[0].states(slice(-2, None))
        return _Choice(path, why, proof, why_bits_differ, last_two)
    return _Choice("single", "; ".join(reasons))


def _of(change: float) -> str:
    return f"{change:.1e}" if change else "0.0"


@contextlib.contextmanager
def checking(ranks: Ranks) -> Iterator[None]:
    """Runs a self-check inside the context; raises TooLarge on all ranks if any rank's device runs out of memory."""
    with ranks.raise_on_all_ranks():
        try:
            yield
        except torch.OutOfMemoryError as e:
            raise TooLarge(
                f"the device has too little memory for the self-check: {first_line(e)}",
                "free some, choose another machine or --device, or a smaller --dtype such as bfloat16",
            ) from e


@dataclass
class _Comparison:
    """How far a path is from the plain forward, and what a row's company changes; the worst of all ranks."""

    states: float = 0.0
    slopes: float | None = None
    swapped: float = 0.0
    num_swapped: int = 0
    why_bits_differ: str = ""
    is_reached: bool = False
    error: str = ""

    def refusal(self, dtype: torch.dtype) -> str:
        """Returns why the path must not be used; empty if it may."""
        if self.error:
            return self.error
        if self.states > TOLERANCE.get(dtype, 5e-2):
            return f"differs from the plain forward by {self.states:.1e}"
        if self.slopes is not None and self.slopes > GRADIENT_TOLERANCE.get(dtype, 1e-1):
            return f"its gradients differ from the plain forward's by {self.slopes:.1e}"
        if self.is_reached or self.swapped > independence.ROUNDING.get(dtype, 5e-2):
            return f"a row's states change with its neighbours, by {self.swapped:.1e}"
        return ""


class _Probe:
    """A few sequences, with the plain forward's results for each alone."""

    def __init__(
        self, forward: Forward, rows: list[np.ndarray], gradients: bool, *, cuts_windows: bool = False
    ) -> None:
        """With `cuts_windows` the attention's windows are shorter than the sequences."""
        self._forward, self._rows, self._cuts_windows = forward, rows, cuts_windows
        # Only sequences in one batch can show that they do not change each other.
        self._budget = max(forward.max_batch_tokens, sum(map(len, rows)))
        self._packed: dict[int, torch.Tensor] = {}
        with self._windows(), forward.no_gradients():
            self._states = {x.rows[0]: x for x in self._forward.run(self._plan("single"))}
        # Any weights do that make each element of each hidden state count.
        random = torch.Generator().manual_seed(0)
        width = next(iter(self._states.values())).hidden.shape[-1]
        self._weights = [torch.randn(len(row), width, generator=random).to(forward.device) for row in rows]
        for weights, seen in zip(self._weights, forward.seen(rows, "packed"), strict=True):
            weights[len(seen) :] = 0
        with self._windows():
            self._gradients = {x.rows[0]: x.hidden for x in self._run_backward("single")} if gradients else None

    def compare_on_all_ranks(self, path: str) -> _Comparison:
        """Collective; returns the worst of all ranks' comparisons, or why the path cannot run."""
        swaps: list[independence.Swap] = []

        def compare() -> _Comparison:
            found = _Comparison(*self._compare(path))
            if self._forward.device.type == "cpu":
                found.why_bits_differ = independence.why_bits_differ(self._forward, path, self._rows, self._packed)
                if not found.why_bits_differ and self._gradients is None and not self._forward.ranks.in_step:
                    return found  # rows that have the same bits alone do not depend on neighbours
            found.swapped, swaps[:] = independence.swap_neighbours(self._forward, path)
            found.num_swapped = sum(swap.num_rows for swap in swaps)
            if path == "shared":
                if not self._cuts_windows:  # behind a shorter window keys are not read
                    independence.check_copies(self._forward, self._rows[0])
                self._forward.continuation.most_rows = 1  # experts may round otherwise among other siblings only
                found.is_reached = bool(found.swapped and independence.swap_neighbours(self._forward, path)[0])
            return found

        worst = self._on_all_ranks(path, compare)
        if not worst.error and path != "shared" and (worst.swapped or self._gradients is not None):
            reached = self._on_all_ranks(
                path, lambda: _Comparison(is_reached=any(independence.is_reached(self._forward, x) for x in swaps))
            )
            worst = dataclasses.replace(worst, is_reached=reached.is_reached, error=reached.error)
        return worst

    def states(self, some: slice) -> list[torch.Tensor]:
        """Returns some rows' states by the path that was compared last."""
        return [self._packed[row] for row in range(len(self._rows))[some]]

    def _on_all_ranks(self, path: str, compare: Callable[[], _Comparison]) -> _Comparison:
        forward = self._forward
        own = _Comparison()
        try:
            registry.register()
            forward.use(path)
            forward.continuation.least_saved = 1  # probes are short
            if path.startswith("packed") and forward.trunk.config._attn_implementation != registry.NAME:
                raise NotImplementedError("its attention is not in transformers' registry")
            with self._windows():
                own = compare()
        except torch.OutOfMemoryError:  # it says nothing about the path
            raise
        except (ValueError, NotImplementedError, RuntimeError, TypeError, LookupError, AttributeError) as e:
            own = _Comparison(error=first_line(e)[:120])
        finally:
            forward.continuation.least_saved, forward.continuation.most_rows = LEAST_SAVED, sys.maxsize
            forward.use("single")
            forward.reset_after_error()
        found = [_Comparison(*told) for told in forward.ranks.tell_all(dataclasses.astuple(own))]
        slopes = [one.slopes for one in found if one.slopes is not None]
        return _Comparison(
            max(one.states for one in found),
            max(slopes) if slopes else None,
            max(one.swapped for one in found),
            min(one.num_swapped for one in found),
            next((one.why_bits_differ for one in found if one.why_bits_differ), ""),
            any(one.is_reached for one in found),
            next((one.error for one in found if one.error), ""),
        )

    def _windows(self) -> contextlib.AbstractContextManager[Any]:
        return independence.cut_windows(self._forward.trunk) if self._cuts_windows else contextlib.nullcontext()

    def _compare(self, path: str) -> tuple[float, float | None]:
        """Returns the largest relative difference of a sequence's readable states, and of its gradients.

        Raises NotImplementedError if no two sequences shared what the path lets them share, which proves nothing.
        """
        states, together, shared = 0.0, False, False
        rows, alone = self._rows, self._states
        with self._forward.no_gradients():
            if path == "shared":  # many trunks run a single token behind a cache by other code
                rows = [*rows, rows[0][: common_prefix(*rows[:2]) + 1]]
                (short,) = self._forward.run(self._plan("single", rows[-1:]))
                alone = alone | {len(rows) - 1: dataclasses.replace(short, rows=[len(rows) - 1])}
            for batch in self._forward.run(self._plan(path, rows)):
                read = self._forward.readable(batch, rows)
                self._packed |= zip(batch.rows, read, strict=True)
                plain = [self._forward.readable(alone[row], rows)[0] for row in batch.rows]
                pairs = zip(read, plain, strict=True)
                states = max(states, *(relative_difference(got, want[: len(got)]) for got, want in pairs))
                together |= len(batch.rows) > 1
                shared |= any(len(spans) > 1 for spans in batch.spans)
        if not together:
            raise NotImplementedError("no two of the sequences tried fit in one batch")
        if path in SHARING and not shared:
            raise NotImplementedError("no two of the sequences tried share a beginning in one batch")
        if self._gradients is None or path == "shared":
            return states, None
        return states, max(self._gradients_difference(batch) for batch in self._run_backward(path))

    def _plan(self, path: str, rows: list[np.ndarray] | None = None) -> Iterator[MicroBatch]:
        """Plans the probes in one batch if the path can: not split by length, and by no other rank's number of rows."""
        rows = self._forward.seen(rows or self._rows, path)
        for batch in self._forward.batcher.plan(path, rows, [None] * len(rows), self._budget):
            batch.read = self._forward.read_indices(batch, rows)
            yield batch

    def _run_backward(self, path: str) -> Iterator[HiddenStates]:
        """Yields the path's states, with the gradients of the embeddings in place of the hidden states."""
        forward = self._forward

        def total(states: HiddenStates) -> torch.Tensor:
            read = [states.hidden[forward.to_device(states.gather(i))] for i in range(len(states.rows))]
            weights = [self._weights[row] for row in states.rows]
            parts = [(x.float() * w[: len(x)]).sum() for x, w in zip(read, weights, strict=True)]
            return torch.stack(parts).sum()

        yield from independence.embedding_gradients(forward, self._plan(path), total)

    def _gradients_difference(self, states: HiddenStates) -> float:
        assert self._gradients is not None
        own = [self._forward.to_device(states.gather(i)) for i in range(len(states.rows))]
        # A token that several sequences share has the sum of their gradients.
        want = torch.zeros_like(states.hidden, dtype=torch.float32)
        for at, row in zip(own, states.rows, strict=True):
            want.index_add_(0, at, self._gradients[row][: len(at)].float())
        return max(relative_difference(states.hidden[at], want[at]) for at in own)


def relative_difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """Returns the root mean square of the difference, relative to that of the wanted numbers; inf if it is none."""
    got, want = got.float(), want.float()
    relative = ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()
    return relative if np.isfinite(relative) else float("inf")


def probe_rows(vocab_size: int | None, max_length: int | None, avoid: int) -> list[np.ndarray]:
    """Returns a few short random sequences, int64 `[T]`, most with a shared prefix, all without the token `avoid`."""
    longest = min(_LONGEST, max_length or _LONGEST)
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(vocab_size or 2), [avoid])
    prompt = rng.choice(ids, max(longest // 2, min(MIN_SHARED, longest - 1)))
    rows = [np.concatenate([prompt, rng.choice(ids, max(1, longest // k))]) for k in (3, 8)]
    rows += [rng.choice(ids, n) for n in (longest, max(1, longest // 4), 1)]
    return [r[:longest].astype(np.int64) for r in rows]


def check_finite(
    forward: Forward, score: Callable[[list[Sequence]], list[Score | SampleFailed]], *, every: bool
) -> None:
    """Collective; raises CheckpointError if no probe has a finite score, with `every` if any has none."""
    info = forward.info
    with forward.ranks.raise_on_all_ranks():
        rows = probe_rows(info.vocab_size, info.max_length, forward.pad_token_id)
        if forward.device.type == "cpu":  # elsewhere a shared prompt brings forms that are first tried here
            rows = rows[-3:]
        results = score([Sequence(row, steps=np.array([len(row) - 1])) for row in rows])
        failed = [result for result in results if isinstance(result, SampleFailed)]
        if len(failed) == len(rows) and not every:
            raise CheckpointError(f"{info.name} scores nothing: {failed[0]}", _NOT_FINITE)
        if failed and every:
            raise CheckpointError(f"{len(failed)} of {len(rows)} random sequences fail: {failed[0]}", _NOT_FINITE)


def prepack(forward: Forward, rows: list[np.ndarray], before: list[Tensor] | None = None) -> bool:
    """Keeps the trunk's weights in oneDNN's order, and says whether it did; the chosen path must be in use.

    Otherwise oneDNN brings them into that order in every product, which is 5 to 10% of a forward of SmolLM2's shape on
    an AMD EPYC (`benchmarks/RESULTS.md`).
    `before` are the rows' states by the plain weights in any batch, computed here if they are unknown. The weights are
    as before if the states had other bits by them, or if the trunk uses its weights in ways of its own. The path
    `single` restores the plain order in each product, which loses nothing.
    """
    owners = Counter(id(p) for module in forward.trunk.modules() for p in module.parameters(recurse=False))
    # Those that multiply as PyTorch's do, by a weight that is no other module's.
    layers = [
        module
        for module in forward.trunk.modules()
        if type(module) is nn.Linear
        and onednn.is_plain(module)
        and type(module.weight) is nn.Parameter
        and owners[id(module.weight)] == 1
        and onednn.can_reorder(module.weight.dtype)
    ]
    if before is None:
        before = row_states(forward, forward.path, rows)
    freed = 0
    try:
        with mapping_blocks():
            for layer in layers:
                freed += layer.weight.nbytes
                layer.weight = nn.Parameter(onednn.reordered(layer.weight.detach()), requires_grad=False)
                if freed > _TRIMMED_BYTES:
                    memory.trim()
                    freed = 0
        after = row_states(forward, forward.path, rows)
        forward.use("single")
        row_states(forward, "single", rows[-1:])
        forward.use(forward.path)
        if all(map(is_equal, after, before)):
            return bool(layers)
    except (RuntimeError, NotImplementedError, AttributeError):  # an operator that does not take such weights
        forward.reset_after_error()
    onednn.restore(forward.trunk)
    forward.use(forward.path)
    return False
