"""Every form of attention over packed trees against attention written out over all pairs, in float64.

The kernels of `varlen` run on GPUs only; here one in plain torch replaces them, with the same parts, merging and
gradients. Fake tensors show that the real operators accept the same arguments. `test_attention_gpu.py` has the same
cases with the real kernels.
"""

import contextvars
import functools
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.flex_attention import flex_attention
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import masking_utils as masks

from attended import CASES, CHUNK, CHUNKED, SCALE, WINDOW, Case, WrittenOut, tensors, tree, visible, written_out
from guerdon.engine.attention import flex as flex_module
from guerdon.engine.attention import varlen
from guerdon.engine.attention.by_segment import by_segment
from guerdon.engine.attention.cascade import cascade
from guerdon.engine.attention.flex import BLOCK, block_mask, flex
from guerdon.engine.attention.patterns import CAUSAL, FULL, Reach, cut, reach_of
from guerdon.engine.host import keep_freed
from guerdon.engine.packing import PackedBatch, pack
from tiers import slow_but

Compute = Callable[[PackedBatch, Tensor, Tensor, Tensor, Tensor, Case], Tensor]


@pytest.fixture(autouse=True)
def kept() -> None:
    keep_freed(torch.device("cpu"))  # tables of all pairs are freed and allocated again


def alone(*lengths: int) -> PackedBatch:
    """A batch of rows of these lengths, which share nothing."""
    (batch,) = pack([np.arange(n) for n in lengths], budget=10**6, share=False)
    return batch


def reach(batch: PackedBatch, case: Case) -> Reach:
    found = cut(case.pattern, case.causal, batch.max_length)[1]
    assert found is not None
    return found


def sinks_of(case: Case, sinks: Tensor) -> Tensor | None:
    return sinks if case.sinks else None


FORMS: dict[str, tuple[Compute, list[str]]] = {
    "by_segment": (
        lambda batch, q, k, v, sinks, case: by_segment(
            batch, q, k, v, SCALE, case.causal, case.pattern, case.softcap, sinks_of(case, sinks)
        ),
        list(CASES),
    ),
    "by_segment in blocks": (
        lambda batch, q, k, v, sinks, case: by_segment(
            batch, q, k, v, SCALE, case.causal, case.pattern, case.softcap, sinks_of(case, sinks)
        ),
        list(CASES),
    ),
    "cascade": (lambda batch, q, k, v, sinks, case: cascade(batch, q, k, v, SCALE), ["plain"]),
    "cascade in blocks": (lambda batch, q, k, v, sinks, case: cascade(batch, q, k, v, SCALE), ["plain"]),
    "varlen": (
        lambda batch, q, k, v, sinks, case: varlen.varlen(
            batch, q, k, v, SCALE, reach(batch, case), sinks_of(case, sinks), kernel=WrittenOut()
        ),
        ["plain", "window", "sinks", "window and sinks", "encoder", "encoder, window"],
    ),
    "varlen by levels": (
        lambda batch, q, k, v, sinks, case: varlen.varlen(
            batch, q, k, v, SCALE, CAUSAL, sinks_of(case, sinks), gathers=False, kernel=WrittenOut()
        ),
        ["plain", "sinks"],
    ),
}


def relative(got: Tensor, want: Tensor) -> float:
    return ((got.double() - want).norm() / want.norm()).item()


@functools.cache
def reference(name: str, seed: int, share: bool) -> list[Tensor]:
    """Output and gradients of attention written out in float64, for the tree of that seed and its `tensors`."""
    case, batch = CASES[name], tree(seed, share=share)
    *inputs, grad = tensors(batch)
    leaves = [x.requires_grad_() for x in inputs]
    out = written_out(batch, leaves[0], leaves[1], leaves[2], leaves[3], case)
    return [out.detach(), *torch.autograd.grad(out, leaves[: 4 if case.sinks else 3], grad)]


def shared_and_not(names: Iterable[str]) -> list[tuple[str, bool]]:
    """Each case with a tree that shares and with one that does not; encoders share nothing."""
    return [(name, share) for name in names for share in (True, False) if CASES[name].causal or not share]


@pytest.mark.parametrize(
    ("form", "name", "share"), [(form, *which) for form, (_, names) in FORMS.items() for which in shared_and_not(names)]
)
@pytest.mark.parametrize("seed", slow_but((0,), range(2)))
def test_outputs_and_gradients_equal_attention_written_out(
    form: str, name: str, share: bool, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "in blocks" in form:
        monkeypatch.setattr("guerdon.engine.attention.cascade.QUERY_BLOCK", 16)
    case = CASES[name]
    batch = tree(seed, share=share)
    assert max(len(s.ancestors) for s in batch.segments) == (3 if share else 0)
    assert 1 in {s.stop - s.start for s in batch.segments} and batch.max_length > 2 * WINDOW
    # PyTorch's own calls sum in float32 whatever they are given.
    for dtype, most in ((torch.float32, 2e-6), *([(torch.float64, 1e-12)] if "varlen" in form else [])):
        *inputs, grad = tensors(batch, dtype=dtype)
        some = [x.clone().requires_grad_() for x in inputs]
        got = FORMS[form][0](batch, some[0], some[1], some[2], some[3], case)
        slopes = torch.autograd.grad(got, some[: 4 if case.sinks else 3], grad)
        # `tensors` are the same numbers in either dtype.
        for x, y in zip((got, *slopes), reference(name, seed, share), strict=True):
            assert x.dtype == dtype and relative(x, y) <= most
        with torch.no_grad():
            again = FORMS[form][0](batch, *inputs[:4], case)
        assert torch.equal(again, got)


@pytest.mark.parametrize(
    ("name", "share"),
    slow_but(
        ("plain", "window and softcap"),
        shared_and_not(["plain", "window", "softcap", "window and softcap", "chunks", "encoder", "encoder, window"]),
    ),
)
def test_flex_equals_attention_written_out(name: str, share: bool) -> None:
    case = CASES[name]
    batch = tree(1, share=share)
    query, key, value, *_ = tensors(batch)
    pattern, known = cut(case.pattern, case.causal, batch.max_length)
    got = flex(batch, query, key, value, SCALE, case.causal, pattern, known, case.softcap)
    assert relative(got, reference(name, 1, share)[0]) <= 1e-12


@pytest.mark.parametrize(
    "name", slow_but(("window",), ["plain", "window", "softcap", "window and softcap", "chunks", "encoder"])
)
@pytest.mark.parametrize("lengths", [(1,), (30, 7, 50), (300, 200)])
def test_flex_of_a_batch_that_is_filled_equals_attention_written_out(name: str, lengths: tuple[int, ...]) -> None:
    case, batch = CASES[name], alone(*lengths)
    query, key, value, sinks, _ = tensors(batch, heads=4, kv_heads=2)
    pattern, known = cut(case.pattern, case.causal, batch.max_length)
    got = flex(batch, query, key, value, SCALE, case.causal, pattern, known, case.softcap)
    for _, mask in batch.cache.values():
        at, zero = torch.arange(mask.shape[-1]), torch.zeros((), dtype=torch.long)
        assert len(at) > batch.num_tokens and mask.mask_mod(zero, zero, at, at).all()  # each sees itself at least
    assert got.shape == query.shape and relative(got, written_out(batch, query, key, value, sinks, case)) <= 1e-12


@pytest.mark.parametrize(
    ("name", "share"),
    slow_but(("window",), shared_and_not(["plain", "window", "chunks", "encoder", "encoder, window"])),
)
def test_blocks_that_flex_leaves_out_are_seen_by_nobody_and_whole_ones_by_all(name: str, share: bool) -> None:
    case = CASES[name]
    batch = tree(2, share=share, longest=400 if case.causal else 200)
    pattern, known = cut(case.pattern, case.causal, batch.max_length)
    mask = block_mask(batch, case.causal, pattern, known, torch.device("cpu"))
    side = -(-batch.num_tokens // BLOCK)
    seen = torch.zeros(side * BLOCK, side * BLOCK, dtype=torch.bool)
    seen[: batch.num_tokens, : batch.num_tokens] = visible(batch, case)
    blocks = seen.view(side, BLOCK, side, BLOCK)
    by_any, by_all = blocks.any(3).any(1), blocks.all(3).all(1)
    tables = []
    for count, at in ((mask.kv_num_blocks, mask.kv_indices), (mask.full_kv_num_blocks, mask.full_kv_indices)):
        assert count is not None and at is not None
        table = torch.zeros(side, side, dtype=torch.bool)
        for row in range(side):
            table[row, at[0, 0, row, : count[0, 0, row]].long()] = True
        tables.append(table)
    partial, whole = tables
    assert not (partial & whole).any()
    assert not by_any[~(partial | whole)].any()
    assert by_all[whole].all()
    if pattern is None:
        assert torch.equal(partial | whole, by_any) and torch.equal(whole, by_all) and whole.any()
    elif known is not None:
        # Some that nobody sees are left in, where sequences meet, but not all that there are without the window.
        plain = block_mask(batch, case.causal, None, None, torch.device("cpu"))
        assert plain.full_kv_num_blocks is not None
        assert (partial | whole).sum() < (plain.kv_num_blocks.sum() + plain.full_kv_num_blocks.sum())


# As many blocks as there are heads of either kind, one block, few tokens, and none of that.
@pytest.mark.slow
@pytest.mark.parametrize("first", slow_but([(300, 200)], [((300, 200),), ((200,),), ((100,),), ((40, 1),), ((300,),)]))
def test_flex_is_compiled_by_kind_and_not_by_batch_and_never_runs_uncompiled(
    first: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs: list[Any] = []

    def backend(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        # Any output of the query's shape: what flex attention computes is tested above.
        return lambda *given: (next(x for x in given if isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] == 4),)

    def run(name: str, batch: PackedBatch, *, in_one_matrix: bool = False) -> None:
        case = CASES[name]
        query, key, value, *_ = tensors(batch, heads=4, kv_heads=2, dtype=torch.float32)
        if in_one_matrix:  # as some models compute them
            by_token = torch.cat([x.transpose(1, 2).flatten(2) for x in (query, key, value)], 2)
            query, key, value = (x.unflatten(2, (-1, 16)).transpose(1, 2) for x in by_token.split([64, 32, 32], 2))
        pattern, known = cut(case.pattern, case.causal, batch.max_length)
        out = flex(batch, query, key, value, SCALE, case.causal, pattern, known, case.softcap)
        assert out.shape == query.shape

    kinds = ["plain", "window", "softcap"]
    as_on_a_gpu = torch.compile(flex_attention, dynamic=True, fullgraph=True, backend=backend)
    monkeypatch.setattr(flex_module, "flex_attention", as_on_a_gpu)
    monkeypatch.setattr(flex_module, "VARIANTS", len(kinds))
    lengths = [first, (300,), (300, 200), (200,), (129,), (128,), (127,), (40, 1), (600, 100)]
    batches = [*(alone(*some) for some in lengths), *(tree(n, share=n > 30, longest=n) for n in (30, 40, 50))]
    torch._dynamo.reset()
    try:
        with torch._dynamo.config.patch(recompile_limit=1):
            for batch in batches:
                for name in kinds:
                    run(name, batch)
            run("plain", batches[0], in_one_matrix=True)
            assert len(graphs) == len(kinds)
            with pytest.raises(FailOnRecompileLimitHit):
                run("window and softcap", batches[0])
    finally:
        torch._dynamo.reset()


def test_calls_of_flex_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_module, "flex_attention", lambda query, key, value, **_: query)
    batch = alone(20)
    query, key, value, *_ = tensors(batch)

    def in_a_context_of_its_own() -> list[int]:
        counts = []
        for _ in range(100):
            flex(batch, query, key, value, SCALE, True)
            counts.append(len(contextvars.copy_context()))
        return counts

    counts = contextvars.Context().run(in_a_context_of_its_own)
    assert set(counts) == {counts[0]}


class Largest(TorchDispatchMode):
    """Knows the most numbers that a tensor has had which an operator made."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view:
            self.count = max(self.count, out.numel())
        return out


@pytest.mark.parametrize("name", ["plain", "window", "chunks", "softcap", "sinks", "window and sinks", "encoder"])
def test_off_the_cpu_logits_of_all_queries_are_never_held_at_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    heads = []

    def fused(query: Tensor, key: Tensor, value: Tensor, **given: Any) -> Tensor:
        """As the kernels for GPUs want it, which hold no logits."""
        heads.append((query.shape[1], key.shape[1], value.shape[1]))
        assert not given["enable_gqa"] and not (given["is_causal"] and given["attn_mask"] is not None)
        return torch.empty_like(query)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", fused)
    case, batch = CASES[name], alone(5000, 3)
    query, key, value, sinks, _ = (x.to("meta") for x in tensors(batch, heads=4, kv_heads=2, size=8))
    with Largest() as largest:
        out = by_segment(
            batch, query, key, value, SCALE, case.causal, case.pattern, case.softcap, sinks_of(case, sinks)
        )
    assert out.shape == query.shape
    assert heads == [(4, 4, 4)] * len(heads) and bool(heads) is not (bool(case.softcap) or case.sinks)
    most = 4 * 1024 * (5000 + 1)
    assert largest.count <= (most if not case.mask else most // 4), largest.count


def test_windows_take_no_more_keys_than_they_reach() -> None:
    batch, kernel = tree(0), WrittenOut()
    query, key, value, *_ = tensors(batch)
    varlen.varlen(batch, query, key, value, SCALE, (WINDOW - 1, 0), kernel=kernel)
    (part,) = kernel.parts
    assert part.max_keys <= part.max_queries + WINDOW - 1
    assert (part.cu_keys.diff() <= part.cu_queries.diff() + WINDOW - 1).all()


def test_heads_whose_numbers_lie_apart_are_moved_together() -> None:
    batch = tree(0)
    *inputs, grad = tensors(batch)
    apart = [x.transpose(2, 3).contiguous().transpose(2, 3).requires_grad_() for x in inputs[:3]]
    assert all(x.stride(3) > 1 for x in apart)
    found = []
    for some in (inputs[:3], apart):
        leaves = [x.detach().requires_grad_() for x in some]
        out = varlen.varlen(batch, *leaves, SCALE, CAUSAL, kernel=WrittenOut())
        found.append([out, *torch.autograd.grad(out, leaves, grad)])
    assert all(torch.equal(x, y) for x, y in zip(*found, strict=True))


def test_a_level_is_one_call_and_nothing_shared_is_copied() -> None:
    batch, kernel = tree(0), WrittenOut()
    query, key, value, *_ = tensors(batch)
    varlen.varlen(batch, query, key, value, SCALE, CAUSAL, gathers=False, kernel=kernel)
    assert [p.reach for p in kernel.parts] == [CAUSAL, FULL, FULL, FULL]
    assert all(int(p.cu_keys[-1]) <= batch.num_tokens for p in kernel.parts)


def test_parts_for_the_backward_pass_are_made_for_it_alone() -> None:
    batch = tree(0)
    query, key, value, *_ = tensors(batch)
    device = query.device
    varlen.varlen(batch, query, key, value, SCALE, CAUSAL, kernel=WrittenOut())
    with torch.no_grad():
        varlen.varlen(batch, query.requires_grad_(), key, value, SCALE, CAUSAL, kernel=WrittenOut())
    assert ("gathered", CAUSAL, device) in batch.cache and ("levels", device) not in batch.cache
    varlen.varlen(batch, query, key, value, SCALE, CAUSAL, kernel=WrittenOut())
    assert ("levels", device) in batch.cache


@pytest.mark.parametrize("form", ["cascade", "varlen"])
def test_a_gradient_of_the_gradient_is_refused_and_not_wrong(form: str) -> None:
    batch = tree(0)
    query, key, value, sinks, _ = tensors(batch, dtype=torch.float32)
    out = FORMS[form][0](batch, query.requires_grad_(), key, value, sinks, CASES["plain"])
    (slope,) = torch.autograd.grad(out.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        slope.sum().backward()


@pytest.mark.parametrize(
    ("name", "gathers"), [*((n, True) for n in FORMS["varlen"][1]), *((n, False) for n in FORMS["varlen by levels"][1])]
)
def test_the_operators_take_what_they_are_given(name: str, gathers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    batch = tree(0, share=case.causal)
    found = reach(batch, case)
    monkeypatch.setattr(
        varlen, "to_device", lambda x, device: torch.empty(x.shape, dtype=torch.from_numpy(x).dtype, device=device)
    )
    device = torch.device("cuda")
    with FakeTensorMode():
        query, key, value, grad = (
            torch.empty(batch.num_tokens, n, 64, dtype=torch.bfloat16, device=device) for n in (8, 2, 2, 8)
        )
        sinks = torch.empty(8, dtype=torch.bfloat16, device=device) if case.sinks else None
        parts = varlen.gathered(batch, found, device) if gathers else varlen.levels(batch, device)
        out, lse = varlen._forward(query, key, value, sinks, SCALE, parts, varlen.FLASH)
        slopes = varlen._backward(grad, query, key, value, sinks, out, lse, SCALE, parts, varlen.FLASH)
    assert lse.shape == (8, batch.num_tokens) and lse.dtype == torch.float32
    for x, y in [(out, query), *zip(slopes, (query, key, value, sinks), strict=True)]:
        assert x is y is None or (x.shape, x.dtype, x.device) == (y.shape, y.dtype, y.device)


# ------------------------------------------------------------------------------------------------ patterns


def positions() -> tuple[Tensor, Tensor]:
    at = torch.arange(80)
    return at[:, None], at[None]


@pytest.mark.parametrize(
    ("function", "known"),
    [
        (masks.causal_mask_function, CAUSAL),
        (masks.bidirectional_mask_function, FULL),
        (masks.sliding_window_causal_mask_function(7), (6, 0)),
        (masks.sliding_window_bidirectional_mask_function(7), (7, 7)),
        (masks.sliding_window_overlay(7), (6, -1)),
        (masks.and_masks(masks.sliding_window_causal_mask_function(9), masks.sliding_window_overlay(5)), (4, 0)),
    ],
)
def test_masks_of_known_functions_have_a_reach(function: Any, known: Reach) -> None:
    q, k = positions()
    before, after = (x if x >= 0 else 1000 for x in known)
    assert reach_of(function) == known
    assert torch.equal(function(0, 0, q, k).expand(80, 80), (k >= q - before) & (k <= q + after))


@pytest.mark.parametrize(
    "function",
    [
        CHUNKED,
        masks.or_masks(masks.sliding_window_causal_mask_function(7), masks.causal_mask_function),
        masks.and_masks(masks.causal_mask_function, masks.padding_mask_function(torch.ones(1, 80, dtype=torch.bool))),
        lambda b, h, q, k: k <= q,
        np.less_equal,
    ],
)
def test_other_masks_have_no_reach(function: Any) -> None:
    assert reach_of(function) is None


@pytest.mark.parametrize("length", [1, 2, WINDOW - 1, WINDOW, WINDOW + 1, WINDOW + 2, CHUNK, CHUNK + 1])
@pytest.mark.parametrize("name", CASES)
def test_a_pattern_is_dropped_only_where_it_hides_nothing(name: str, length: int) -> None:
    case = CASES[name]
    pattern, found = cut(case.pattern, case.causal, length)
    q, k = (x[:length, :length] for x in (positions()[0].expand(80, 80), positions()[1].expand(80, 80)))
    plain = k <= q if case.causal else k >= 0
    seen = case.mask(0, 0, q, k) if case.mask is not None else plain
    if pattern is None:
        assert torch.equal(seen, plain) and found == (CAUSAL if case.causal else FULL)
    if found is not None:
        before, after = (x if x >= 0 else 1000 for x in found)
        assert torch.equal(seen, (k >= q - before) & (k <= q + after))
