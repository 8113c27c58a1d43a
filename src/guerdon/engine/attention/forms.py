"""Chooses the form (the implementation) of a layer's attention over a packed batch, from one table.

On a GPU each form is checked against the reference before its first use, on a small tree: a form that raises or differs
is skipped, and the next one is used. The check runs once for each kind of layer, whatever batches arrive.

The order on a CPU is measured (`benchmarks/attention.py`); `native` also gives a row the same bits in any batch. The
order on a GPU is reasoned and not measured: with any form attention is about a twentieth of an 8B model's forward.
`varlen` needs one call of FlashAttention and one copy of the shared keys for each sequence; `cascade` needs one more
call a level and merges in several passes over the output, which is cheaper than copies of many times the batch. flex
attention's kernel is slower than FlashAttention's and must be compiled, but copies nothing and supports float32, soft
caps and any mask. `by_segment` needs dozens of calls a layer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import masking_utils as masks

from guerdon.core import MIN_SHARED
from guerdon.engine.attention.by_segment import by_segment, of_few
from guerdon.engine.attention.cascade import cascade
from guerdon.engine.attention.flex import flex
from guerdon.engine.attention.patterns import CAUSAL, FULL, Pattern, Reach, reach_of
from guerdon.engine.attention.varlen import varlen
from guerdon.engine.native.forest import Mask, forest
from guerdon.engine.native.library import DTYPES, kernels
from guerdon.engine.packing import PackedBatch, pack
from guerdon.errors import first_line

log = logging.getLogger(__name__)
T = TypeVar("T")

COPIES = 8
"""Copied keys, as a multiple of the batch's tokens, beyond which cascade is cheaper; reasoned, not measured."""
WINDOW = 20
"""The window that forms are checked with: shorter than the sequences of the check."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest accepted norm of a tensor's difference from the float32 reference, relative to the tensor's norm."""


@dataclass(frozen=True, slots=True)
class Need:
    """A layer's needs of attention, by device and kind of batch.

    `reach` is the mask's, None if it is not causal, full or a window; `chunk` is the pattern's. `copies` says whether
    the shared keys in reach, copied for each sequence, would be more than COPIES times the batch. `with_flash` says
    whether FlashAttention supports the device.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    value_size: int
    causal: bool
    reach: Reach | None
    softcap: float | None
    sinks: bool
    shared: bool
    copies: bool
    gradients: bool
    with_flash: bool
    chunk: int | None = None


def need_of(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    reach: Reach | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Need:
    """Returns a layer's needs for this batch, with tensors of `Compute`'s shapes."""
    sharing: tuple[bool, bool] | None = batch.cache.get(("sharing", reach))
    if sharing is None:
        furthest = reach[0] if reach is not None and reach[0] >= 0 and reach[1] == 0 else batch.max_length
        shared = [s.position for s in batch.segments]  # as many tokens as come before it
        copied = sum(min(length, furthest) for length in shared)
        sharing = batch.cache["sharing", reach] = any(shared), copied > COPIES * batch.num_tokens
    differentiated = any(x is not None and x.requires_grad for x in (query, key, value, sinks))
    return Need(
        query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3], causal, reach, softcap,
        sinks is not None, *sharing, torch.is_grad_enabled() and differentiated, _with_flash(query.device),
        chunk,
    )  # fmt: skip


@functools.cache
def _with_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


Compute = Callable[[PackedBatch, Tensor, Tensor, Tensor, float, Need, Pattern | None, Tensor | None], Tensor]
"""Computes attention `[1,H,T,E]` of query `[1,H,T,D]`, key `[1,K,T,D]` and value `[1,K,T,E]`.

Its arguments are the batch, these three, the scale, the need, the layer's pattern and its sinks.
"""
OfFew = Callable[[PackedBatch, np.ndarray, Tensor, Tensor, Tensor, float, Need, Tensor | None], Tensor]
"""As `Compute`, of the queries at the tokens `read` (int64) only, 0 for all others; without gradients.

Its arguments are the batch, `read`, query, key and value, the scale, the need and the sinks.
"""


@dataclass(frozen=True, slots=True)
class AttentionForm:
    """An implementation of attention, and which needs it supports; `of_few` is a faster one if few queries are read."""

    name: str
    supports: Callable[[Need], bool]
    compute: Compute
    of_few: OfFew | None = None


def _supports_flash(need: Need) -> bool:
    has_kernel = need.with_flash and need.dtype in (torch.float16, torch.bfloat16)
    sizes = need.size == need.value_size <= 256 and need.size % 8 == 0
    return has_kernel and sizes and need.reach is not None and not need.softcap


def _supports_flex(need: Need) -> bool:
    return need.device.type == "cuda" and min(need.size, need.value_size) >= 16 and not need.sinks


def _supports_cascade_on_cpu(need: Need) -> bool:
    plain = need.reach == CAUSAL and not need.softcap and not need.sinks
    return need.device.type == "cpu" and plain and need.size == need.value_size


def _supports_native(need: Need) -> bool:
    masks = need.reach is not None or need.chunk is not None
    slopes = not need.gradients or _supports_cascade_on_cpu(need)  # the gradients are cascade's
    is_known = need.device.type == "cpu" and need.dtype in DTYPES
    return is_known and masks and slopes and kernels() is not None


def _native(
    batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, scale: float, need: Need,
    pattern: Pattern | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    if not need.gradients:
        return forest(batch, query, key, value, scale, _native_mask(need), need.softcap, sinks)
    assert _supports_cascade_on_cpu(need)  # its gradients know no other mask
    return cascade(batch, query, key, value, scale, _forest_and_lse)


def _forest_and_lse(
    batch: PackedBatch, query: Tensor, key: Tensor, value: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    lse = torch.empty(query.shape[:3], dtype=torch.float32)
    return forest(batch, query, key, value, scale, Mask(CAUSAL), lse=lse), lse


def _native_mask(need: Need) -> Mask:
    return Mask(CAUSAL if need.reach is None else need.reach, need.chunk)


NATIVE = AttentionForm(
    "native",
    _supports_native,
    _native,
    lambda batch, read, query, key, value, scale, need, sinks: forest(
        batch, query, key, value, scale, _native_mask(need), need.softcap, sinks, read
    ),
)
CASCADE_ON_CPU = AttentionForm(
    "cascade",
    _supports_cascade_on_cpu,
    lambda batch, query, key, value, scale, need, pattern, sinks: cascade(batch, query, key, value, scale),
    lambda batch, read, query, key, value, scale, need, sinks: of_few(batch, read, query, key, value, scale),
)
VARLEN = AttentionForm(
    "varlen",
    _supports_flash,
    lambda batch, query, key, value, scale, need, pattern, sinks: varlen(
        batch, query, key, value, scale, need.reach or CAUSAL, sinks
    ),
)
CASCADE = AttentionForm(
    "cascade",
    lambda need: _supports_flash(need) and need.shared and need.reach == CAUSAL,
    lambda batch, query, key, value, scale, need, pattern, sinks: varlen(
        batch, query, key, value, scale, CAUSAL, sinks, gathers=False
    ),
)
FLEX = AttentionForm(
    "flex",
    _supports_flex,
    lambda batch, query, key, value, scale, need, pattern, sinks: flex(
        batch, query, key, value, scale, need.causal, pattern, need.reach, need.softcap
    ),
)
BY_SEGMENT = AttentionForm(
    "by_segment",
    lambda need: True,
    lambda batch, query, key, value, scale, need, pattern, sinks: by_segment(
        batch, query, key, value, scale, need.causal, pattern, need.softcap, sinks
    ),
)


def candidates(need: Need) -> list[AttentionForm]:
    """Returns the forms that support the need, best first; the last is the reference."""
    if need.device.type == "cpu":
        order = [NATIVE, CASCADE_ON_CPU, BY_SEGMENT]
    elif need.copies:
        order = [CASCADE, FLEX, VARLEN, BY_SEGMENT]
    else:
        order = [VARLEN, CASCADE, FLEX, BY_SEGMENT]
    return [form for form in order if form.supports(need)]


_skipped: ContextVar[dict[str, str] | None] = ContextVar("guerdon_skipped", default=None)
_chosen: ContextVar[set[str] | None] = ContextVar("guerdon_chosen", default=None)


@contextmanager
def _noting(variable: ContextVar[T | None], noted: T) -> Iterator[T]:
    token = variable.set(noted)
    try:
        yield noted
    finally:
        variable.reset(token)


def noting_chosen() -> AbstractContextManager[set[str]]:
    """Returns a context that yields a set of the forms chosen inside."""
    return _noting(_chosen, set())


def noting_skipped() -> AbstractContextManager[dict[str, str]]:
    """Returns a context that yields a dict of forms skipped for needs inside, and why, whenever they were checked."""
    return _noting(_skipped, {})


def choose_form(need: Need) -> AttentionForm:
    """Returns the first form that supports the need and, on a GPU, has passed its check."""
    form, failures = _choose_form(need)
    if (noted := _skipped.get()) is not None:
        noted.update(failures)
    if (chosen := _chosen.get()) is not None:
        chosen.add(form.name)
    return form


@functools.cache
def _choose_form(need: Need) -> tuple[AttentionForm, dict[str, str]]:
    """Returns the form, and why earlier ones are skipped, also for a batch with more or fewer copies."""
    form, failures = _first_passed(need)
    if need.shared:
        # Check now, at start, and not when such a batch arrives and would wait for a compiler.
        failures |= _first_passed(dataclasses.replace(need, copies=not need.copies))[1]
    return form, failures


def _first_passed(need: Need) -> tuple[AttentionForm, dict[str, str]]:
    *others, reference = candidates(need)
    failures: dict[str, str] = {}
    if need.device.type == "cpu":
        return [*others, reference][0], failures
    # What a check depends on: a shared tree covers one without sharing, one window covers all.
    kind = dataclasses.replace(_for_small_tree(need)[1], shared=need.causal, copies=False)
    for form in others:
        failure = _check_once(form, kind)
        if failure is None:
            return form, failures
        failures[form.name] = failure
    return reference, failures


@functools.cache
def _check_once(form: AttentionForm, kind: Need) -> str | None:
    failure = check_form(form, kind)
    if failure is not None:
        log.warning("attention by %s is skipped: %s", form.name, failure)
    return failure


def check_form(form: AttentionForm, need: Need) -> str | None:
    """Checks the form on a small tree; returns why it must not be used for the need, None if it agrees."""
    try:
        # An enclosing context, such as activation checkpointing, must not see the tensors saved here.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            difference = differences(form, need)
    except torch.OutOfMemoryError:  # it says nothing about the form
        raise
    except Exception as e:  # a missing kernel or a compiler may raise anything
        return first_line(e)[:120]
    most = TOLERANCE.get(need.dtype, 2e-2)
    return None if difference <= most else f"differs from the reference by {difference:.1e}"


def differences(form: AttentionForm, need: Need) -> float:
    """Returns the largest difference of the output or a gradient from the reference, as in TOLERANCE."""
    batch = _tree(need.shared)
    random = torch.Generator().manual_seed(0)
    heads = [(need.heads, need.size), (need.kv_heads, need.size), (need.kv_heads, need.value_size)]
    shapes = [*((1, batch.num_tokens, n, d) for n, d in heads), (1, batch.num_tokens, need.heads, need.value_size)]
    *inputs, grad = (torch.randn(x, generator=random).to(need.device, need.dtype).transpose(1, 2) for x in shapes)
    sinks = torch.linspace(-1, 2, need.heads).to(need.device, need.dtype) if need.sinks else None
    pattern, need = _for_small_tree(need)
    found = []
    for some, dtype in ((BY_SEGMENT, torch.float32), (form, need.dtype)):
        leaves = [x.detach().to(dtype).requires_grad_(need.gradients) for x in inputs]
        with torch.set_grad_enabled(need.gradients):
            out = some.compute(
                batch, leaves[0], leaves[1], leaves[2], need.size**-0.5, need, pattern,
                None if sinks is None else sinks.to(dtype),
            )  # fmt: skip
            slopes = torch.autograd.grad(out, leaves, grad.to(dtype)) if need.gradients else ()
        found.append([out.detach().float(), *(x.float() for x in slopes)])
    return max(
        ((got - want).norm() / want.norm()).nan_to_num(torch.inf).item() for want, got in zip(*found, strict=True)
    )


def _tree(shared: bool) -> PackedBatch:
    """Returns a batch of several of flex's blocks, with three levels of sharing and sequences of one token."""
    random = np.random.default_rng(0)
    prompt, turn = random.integers(0, 99, 3 * MIN_SHARED), random.integers(0, 99, 2 * MIN_SHARED)
    rows = [np.concatenate([prompt, turn, random.integers(0, 99, n)]) for n in (40, 7, 1)]
    rows += [np.concatenate([prompt, random.integers(0, 99, n)]) for n in (150, 1)]
    rows += [random.integers(0, 99, n) for n in (1, 130)]
    (batch,) = pack(rows, budget=sum(map(len, rows)), share=shared)
    return batch


def _for_small_tree(need: Need) -> tuple[Pattern | None, Need]:
    """Returns a pattern of the need's kind that masks something in the small tree, and the need with its reach."""
    if need.reach in (CAUSAL, FULL):
        return None, need
    if need.reach is None:
        function = masks.chunked_causal_mask_function(WINDOW, torch.zeros(1, dtype=torch.long, device=need.device))
    elif need.reach[1] == 0:
        function = masks.sliding_window_causal_mask_function(WINDOW)
    else:
        function = masks.sliding_window_bidirectional_mask_function(WINDOW)
    pattern = Pattern(function, WINDOW, reach_of(function))
    return pattern, dataclasses.replace(need, reach=pattern.reach)
