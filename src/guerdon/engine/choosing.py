"""Which way a model runs: the best path that agrees with the plain forward, tried on a few short sequences.

Some models take a packed batch without complaint and compute something else, such as those with a recurrent state. So
every start compares the hidden states of each path with those of one sequence at a time, and for a model that will be
trained the gradients, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from guerdon.core import MIN_SHARED, ModelInfo
from guerdon.distributed.ranks import Ranks
from guerdon.engine.attention import forms, registry
from guerdon.engine.checkpoint.sharding import alike
from guerdon.errors import TooLarge

if TYPE_CHECKING:
    from guerdon.engine.forward import Forward, Layout

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 2e-2}
"""Largest accepted difference between two paths' hidden states, relative to their root mean square."""
GRADIENT_TOLERANCE = {dtype: 2 * most for dtype, most in TOLERANCE.items()}
"""The same for gradients, which are rounded on the way up and on the way down."""
_LONGEST = 64
"""Tokens of the longest sequence that is tried."""


def choose(engine: Forward, info: ModelInfo, *, gradients: bool) -> tuple[str, str]:
    """The first path that agrees with the plain forward on all ranks, and why not a better one."""
    rows = probe_rows(info.vocab_size, info.max_length, engine.pad_token_id)
    candidates = ["packed+shared", "packed"] if engine.causal else ["packed"]
    if engine.device.type != "cpu":
        candidates.append("padded")  # on a CPU padding costs more than batching gains
    with trying(engine.ranks):
        probe = _Probe(engine, rows, gradients)
    reasons = []
    for path in candidates:
        with forms.noting_left_out() as left_out, trying(engine.ranks):
            states, slopes, refusal = probe.verdict(path)
        if refusal:
            reasons.append(f"{path}: {refusal}")
        elif states > TOLERANCE.get(engine.dtype, 5e-2):
            reasons.append(f"{path}: differs from the plain forward by {states:.1e}")
        elif slopes is not None and slopes > GRADIENT_TOLERANCE.get(engine.dtype, 1e-1):
            reasons.append(f"{path}: its gradients differ from the plain forward's by {slopes:.1e}")
        else:
            also = "" if slopes is None else f", its gradients within {slopes:.1e}"
            reasons += [f"attention without {form}: {why}" for form, why in left_out.items()]
            return path, "; ".join([*reasons, f"agrees with the plain forward within {states:.1e}{also}"])
    return "single", "; ".join(reasons)


@contextlib.contextmanager
def trying(ranks: Ranks) -> Iterator[None]:
    """Within it a self-check runs; raises TooLarge on all ranks where one has no memory for it on its device."""
    with alike(ranks):
        try:
            yield
        except torch.OutOfMemoryError as e:
            raise TooLarge(
                f"no memory is left on the device to try a few short sequences: {(str(e).splitlines() or [''])[0]}",
                "free some, choose another machine or --device, or a smaller --dtype such as bfloat16",
            ) from e


class _Probe:
    """A few sequences, and what the plain forward makes of each by itself."""

    def __init__(self, engine: Forward, rows: list[np.ndarray], gradients: bool) -> None:
        self._engine, self._rows = engine, rows
        # Only sequences that share a batch can show that they do not change each other.
        self._budget = max(engine.max_batch_tokens, sum(map(len, rows)))
        with engine.no_gradients():
            self._states = {x.rows[0]: x for x in self._run("single")}
        # Any numbers will do that make every element of every hidden state count by itself.
        random = torch.Generator().manual_seed(0)
        width = next(iter(self._states.values())).hidden.shape[-1]
        self._counts = [torch.randn(len(row), width, generator=random).to(engine.device) for row in rows]
        self._gradients = {x.rows[0]: x.hidden for x in self._gradients_by("single")} if gradients else None

    def verdict(self, path: str) -> tuple[float, float | None, str]:
        """`differences` and an empty text, or why the path cannot be run; of all ranks the worst."""
        engine = self._engine
        states, slopes, refusal = 0.0, None, ""
        try:
            registry.register()
            engine.use(path)
            if path.startswith("packed") and engine.trunk.config._attn_implementation != registry.NAME:
                raise NotImplementedError("its attention is not in transformers' registry")
            states, slopes = self.differences(path)
        except torch.OutOfMemoryError:  # it says nothing about the path
            raise
        except (ValueError, NotImplementedError, RuntimeError, TypeError, LookupError, AttributeError) as e:
            refusal = (str(e).splitlines() or [type(e).__name__])[0][:120]
        finally:
            engine.use("single")
            engine.forget_broken()
        told = engine.ranks.tell_all((states, slopes, refusal))
        refusals = [other for *_, other in told if other]
        all_slopes = None if slopes is None else max(other for _, other, _ in told if other is not None)
        return max(other for other, *_ in told), all_slopes, refusals[0] if refusals else ""

    def differences(self, path: str) -> tuple[float, float | None]:
        """Largest relative root-mean-square difference of a sequence's readable states, and of its gradients.

        Raises NotImplementedError where it says nothing, as no two sequences shared what the path has them share.
        """
        states, together, shared = 0.0, False, False
        with self._engine.no_gradients():
            for layout in self._run(path):
                states = max(states, self._states_differ(layout))
                together |= len(layout.rows) > 1
                shared |= any(len(spans) > 1 for spans in layout.spans)
        if not together:
            raise NotImplementedError("no two of the sequences tried fit in one batch")
        if path == "packed+shared" and not shared:
            raise NotImplementedError("no two of the sequences tried share a beginning in one batch")
        if self._gradients is None:
            return states, None
        return states, max(self._gradients_differ(layout) for layout in self._gradients_by(path))

    def _run(self, path: str) -> Iterator[Layout]:
        return self._engine.run(path, self._rows, [None] * len(self._rows), budget=self._budget)

    def _states_differ(self, layout: Layout) -> float:
        read = self._engine.readable(layout, self._rows)
        plain = [self._engine.readable(self._states[row], self._rows)[0] for row in layout.rows]
        return max(_relative(got, want) for got, want in zip(read, plain, strict=True))

    def _gradients_by(self, path: str) -> Iterator[Layout]:
        """The path's layouts, with the gradients of the embeddings in the place of the hidden states.

        Whatever goes wrong in the backward pass of a layer reaches the embeddings below it.
        """
        engine = self._engine
        leaves: list[torch.Tensor] = []

        def catch(_: Any, __: Any, embedded: torch.Tensor) -> torch.Tensor:
            leaves[:] = [embedded.detach().requires_grad_()]
            return leaves[0].clone()  # some models scale it in place, which a leaf does not allow

        handle = engine.trunk.get_input_embeddings().register_forward_hook(catch)
        try:
            with torch.enable_grad():
                for layout in self._run(path):
                    read = [layout.hidden[engine.index(layout.gather(i))] for i in range(len(layout.rows))]
                    counts = [self._counts[row] for row in layout.rows]
                    total = torch.stack([(x.float() * c).sum() for x, c in zip(read, counts, strict=True)]).sum()
                    layout.hidden = torch.autograd.grad(total, leaves[0])[0].flatten(0, 1)
                    yield layout
        finally:
            handle.remove()

    def _gradients_differ(self, layout: Layout) -> float:
        assert self._gradients is not None
        own = [self._engine.index(layout.gather(i)) for i in range(len(layout.rows))]
        # A token that several sequences share has the sum of their gradients.
        want = torch.zeros_like(layout.hidden, dtype=torch.float32)
        for at, row in zip(own, layout.rows, strict=True):
            want.index_add_(0, at, self._gradients[row].float())
        return max(_relative(layout.hidden[at], want[at]) for at in own)


def _relative(got: torch.Tensor, want: torch.Tensor) -> float:
    got, want = got.float(), want.float()
    relative = ((got - want).square().mean().sqrt() / want.square().mean().sqrt()).item()
    return relative if np.isfinite(relative) else float("inf")


def probe_rows(vocab_size: int | None, max_length: int | None, avoid: int) -> list[np.ndarray]:
    """A few short random sequences, int64 `[T]`, most with a shared beginning; never the padding token."""
    longest = min(_LONGEST, max_length or _LONGEST)
    rng = np.random.default_rng(0)
    ids = np.setdiff1d(np.arange(vocab_size or 2), [avoid])
    prompt = rng.choice(ids, max(longest // 2, min(MIN_SHARED, longest - 1)))
    rows = [np.concatenate([prompt, rng.choice(ids, max(1, longest // k))]) for k in (2, 3, 8)]
    rows += [rng.choice(ids, n) for n in (max(1, longest // 4), longest, 1)]
    return [r[:longest].astype(np.int64) for r in rows]
