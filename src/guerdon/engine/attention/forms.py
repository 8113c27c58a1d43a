"""Which form computes a layer's attention over a packed batch: one table, by what the layer asks and where it runs.

On a GPU a form is tried before its first use, on a small tree, against the reference: one that raises there or differs
is left out, and the next takes its place. It is tried once for each kind of layer, whatever batches come.

The order on a CPU is measured (`benchmarks/attention.py`). That on a GPU is reasoned and not measured: attention takes
about a twentieth of an 8B model's forward, whichever way. `varlen` is one call of FlashAttention and one copy of what
is shared for each sequence, while `cascade` calls it once more for each level and merges in several passes over the
output; copies of many times the batch cost more than that. flex attention's kernel is slower than FlashAttention's and
has to be compiled, but copies nothing and takes float32, soft caps and any mask. `by_segment` is dozens of calls a
layer.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import masking_utils as masks

from guerdon.core import MIN_SHARED
from guerdon.engine.attention.by_segment import by_segment
from guerdon.engine.attention.cascade import cascade
from guerdon.engine.attention.flex import flex
from guerdon.engine.attention.patterns import CAUSAL, FULL, Pattern, Span, span_of
from guerdon.engine.attention.varlen import varlen
from guerdon.engine.packing import PackedBatch, pack

log = logging.getLogger(__name__)

COPIES = 8
"""Beyond so many times the batch's tokens, copies of shared keys cost more than a cascade; reasoned, not measured."""
WINDOW = 20
"""The window that a form is tried with: shorter than the sequences it is tried on."""
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Largest accepted norm of the difference from the reference in float32, of a whole tensor, relative to its norm."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What a layer asks of attention, where, and of what batch.

    `span` tells whether its mask is causal, full or a window (which `span` it is), None for any other. `copies` tells
    that the shared keys in reach, copied for each sequence, would be more than COPIES times the batch. `with_flash`
    tells of a GPU that FlashAttention runs on.
    """

    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    size: int
    value_size: int
    causal: bool
    span: Span | None
    softcap: float | None
    sinks: bool
    shared: bool
    copies: bool
    gradients: bool
    with_flash: bool


def asking(
    batch: PackedBatch,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    causal: bool,
    span: Span | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Asked:
    """What a layer asks with these tensors, as `Compute` has them, of this batch."""
    sharing: tuple[bool, bool] | None = batch.cache.get(("sharing", span))
    if sharing is None:
        reach = span[0] if span is not None and span[0] >= 0 and span[1] == 0 else batch.max_length
        shared = [s.position for s in batch.segments]  # a segment continues as many tokens as are before it
        copied = sum(min(length, reach) for length in shared)
        sharing = batch.cache["sharing", span] = any(shared), copied > COPIES * batch.num_tokens
    differentiated = any(x is not None and x.requires_grad for x in (query, key, value, sinks))
    return Asked(
        query.device, query.dtype, query.shape[1], key.shape[1], query.shape[3], value.shape[3], causal, span, softcap,
        sinks is not None, *sharing, torch.is_grad_enabled() and differentiated, _with_flash(query.device),
    )  # fmt: skip


@functools.cache
def _with_flash(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 8


class Compute(Protocol):
    """A form: attention `[1,H,T,E]` of query `[1,H,T,D]`, key `[1,K,T,D]` and value `[1,K,T,E]`."""

    def __call__(
        self,
        batch: PackedBatch,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        asked: Asked,
        pattern: Pattern | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Computes it, as `asked`."""


@dataclass(frozen=True, slots=True)
class Form:
    """A way to compute attention, and whether it can what is asked."""

    name: str
    can: Callable[[Asked], bool]
    compute: Compute


def _can_flash(asked: Asked) -> bool:
    has_kernel = asked.with_flash and asked.dtype in (torch.float16, torch.bfloat16)
    sizes = asked.size == asked.value_size <= 256 and asked.size % 8 == 0
    return has_kernel and sizes and asked.span is not None and not asked.softcap


def _can_flex(asked: Asked) -> bool:
    return asked.device.type == "cuda" and min(asked.size, asked.value_size) >= 16 and not asked.sinks


def _can_cascade_on_cpu(asked: Asked) -> bool:
    plain = asked.span == CAUSAL and not asked.softcap and not asked.sinks
    return asked.device.type == "cpu" and plain and asked.size == asked.value_size


CASCADE_ON_CPU = Form(
    "cascade",
    _can_cascade_on_cpu,
    lambda batch, query, key, value, scale, asked, pattern, sinks: cascade(batch, query, key, value, scale),
)
VARLEN = Form(
    "varlen",
    _can_flash,
    lambda batch, query, key, value, scale, asked, pattern, sinks: varlen(
        batch, query, key, value, scale, asked.span or CAUSAL, sinks
    ),
)
CASCADE = Form(
    "cascade",
    lambda asked: _can_flash(asked) and asked.shared and asked.span == CAUSAL,
    lambda batch, query, key, value, scale, asked, pattern, sinks: varlen(
        batch, query, key, value, scale, CAUSAL, sinks, gathers=False
    ),
)
FLEX = Form(
    "flex",
    _can_flex,
    lambda batch, query, key, value, scale, asked, pattern, sinks: flex(
        batch, query, key, value, scale, asked.causal, pattern, asked.span, asked.softcap
    ),
)
BY_SEGMENT = Form(
    "by_segment",
    lambda asked: True,
    lambda batch, query, key, value, scale, asked, pattern, sinks: by_segment(
        batch, query, key, value, scale, asked.causal, pattern, asked.softcap, sinks
    ),
)


def candidates(asked: Asked) -> list[Form]:
    """The forms that can compute it, best first; the last is the reference."""
    if asked.device.type == "cpu":
        order = [CASCADE_ON_CPU, BY_SEGMENT]
    elif asked.copies:
        order = [CASCADE, FLEX, VARLEN, BY_SEGMENT]
    else:
        order = [VARLEN, CASCADE, FLEX, BY_SEGMENT]
    return [form for form in order if form.can(asked)]


_left_out: ContextVar[dict[str, str] | None] = ContextVar("guerdon_left_out", default=None)


@contextmanager
def noting_left_out() -> Iterator[dict[str, str]]:
    """Names of forms that failed the trials of what is asked within, whenever those were, and why."""
    noted: dict[str, str] = {}
    token = _left_out.set(noted)
    try:
        yield noted
    finally:
        _left_out.reset(token)


def chosen(asked: Asked) -> Form:
    """The first form that can compute it and, on a GPU, has passed its trial."""
    form, failures = _chosen(asked)
    noted = _left_out.get()
    if noted is not None:
        noted.update(failures)
    return form


@functools.cache
def _chosen(asked: Asked) -> tuple[Form, dict[str, str]]:
    """The form, and why others are left out that come before it, or would for a batch that copies more or less."""
    form, failures = _first_passed(asked)
    if asked.shared:
        # Tried now, at the start, and not while such a batch waits for a compiler.
        failures |= _first_passed(dataclasses.replace(asked, copies=not asked.copies))[1]
    return form, failures


def _first_passed(asked: Asked) -> tuple[Form, dict[str, str]]:
    *others, reference = candidates(asked)
    failures: dict[str, str] = {}
    for form in others:
        failure = None if asked.device.type == "cpu" else _tried(form, _kind(asked))
        if failure is None:
            return form, failures
        failures[form.name] = failure
    return reference, failures


def _kind(asked: Asked) -> Asked:
    """What a trial depends on: a tree that shares tries what one that does not would, one window stands for all."""
    return dataclasses.replace(_smaller(asked)[1], shared=asked.causal, copies=False)


@functools.cache
def _tried(form: Form, kind: Asked) -> str | None:
    failure = trial(form, kind)
    if failure is not None:
        log.warning("attention by %s is left out: %s", form.name, failure)
    return failure


def trial(form: Form, asked: Asked) -> str | None:
    """Why the form is not to be used for what is asked, found on a small tree; None where it agrees."""
    try:
        # What encloses this, such as activation checkpointing, must not count or keep what is saved here.
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
            difference = differences(form, asked)
    except torch.OutOfMemoryError:  # it says nothing about the form
        raise
    except Exception as e:  # a kernel that is missing, or a compiler, raises what it likes
        return (str(e).splitlines() or [type(e).__name__])[0][:120]
    most = TOLERANCE.get(asked.dtype, 2e-2)
    return None if difference <= most else f"differs from the reference by {difference:.1e}"


def differences(form: Form, asked: Asked) -> float:
    """The largest difference of output or a gradient from the reference in float32, as TOLERANCE counts it."""
    batch = _tree(asked.shared)
    random = torch.Generator().manual_seed(0)
    heads = [(asked.heads, asked.size), (asked.kv_heads, asked.size), (asked.kv_heads, asked.value_size)]
    shapes = [*((1, batch.num_tokens, n, d) for n, d in heads), (1, batch.num_tokens, asked.heads, asked.value_size)]
    *inputs, grad = (torch.randn(x, generator=random).to(asked.device, asked.dtype).transpose(1, 2) for x in shapes)
    sinks = torch.linspace(-1, 2, asked.heads).to(asked.device, asked.dtype) if asked.sinks else None
    pattern, asked = _smaller(asked)
    found = []
    for some, dtype in ((BY_SEGMENT, torch.float32), (form, asked.dtype)):
        leaves = [x.detach().to(dtype).requires_grad_(asked.gradients) for x in inputs]
        with torch.set_grad_enabled(asked.gradients):
            out = some.compute(
                batch, leaves[0], leaves[1], leaves[2], asked.size**-0.5, asked, pattern,
                None if sinks is None else sinks.to(dtype),
            )  # fmt: skip
            slopes = torch.autograd.grad(out, leaves, grad.to(dtype)) if asked.gradients else ()
        found.append([out.detach().float(), *(x.float() for x in slopes)])
    return max(
        ((got - want).norm() / want.norm()).nan_to_num(torch.inf).item() for want, got in zip(*found, strict=True)
    )


def _tree(shared: bool) -> PackedBatch:
    """Sequences of several of flex's blocks, three levels of sharing, and some of one token."""
    random = np.random.default_rng(0)
    prompt, turn = random.integers(0, 99, 3 * MIN_SHARED), random.integers(0, 99, 2 * MIN_SHARED)
    rows = [np.concatenate([prompt, turn, random.integers(0, 99, n)]) for n in (40, 7, 1)]
    rows += [np.concatenate([prompt, random.integers(0, 99, n)]) for n in (150, 1)]
    rows += [random.integers(0, 99, n) for n in (1, 130)]
    (batch,) = pack(rows, budget=sum(map(len, rows)), share=shared)
    return batch


def _smaller(asked: Asked) -> tuple[Pattern | None, Asked]:
    """The same with a mask of its kind that hides something of the small tree, and the pattern that says so."""
    if asked.span in (CAUSAL, FULL):
        return None, asked
    if asked.span is None:
        function = masks.chunked_causal_mask_function(WINDOW, torch.zeros(1, dtype=torch.long, device=asked.device))
    elif asked.span[1] == 0:
        function = masks.sliding_window_causal_mask_function(WINDOW)
    else:
        function = masks.sliding_window_bidirectional_mask_function(WINDOW)
    pattern = Pattern(function, WINDOW, span_of(function))
    return pattern, dataclasses.replace(asked, span=pattern.span)
