"""The kernels that run on GPUs only, on the trees and cases of `test_attention.py`, against float64 on the CPU."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from attended import CASES, SCALE, Case, tensors, tree, written_out
from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine.attention import forms
from guerdon.engine.attention.forms import CASCADE, FLEX, VARLEN, AttentionForm, choose_form, need_of
from guerdon.engine.attention.patterns import cut
from guerdon.engine.packing import pack
from guerdon.settings.config import ModelConfig

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: these kernels run nowhere else"),
    pytest.mark.timeout(600),  # flex attention is compiled
]
MOST = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}
"""Largest relative root-mean-square difference: the inputs are rounded before both, the weights within the kernel."""


def ask(case: Case, dtype: torch.dtype, batch: Any, *, gradients: bool = True, **shape: int) -> tuple[Any, ...]:
    """The need, its pattern, tensors on the GPU, and the same on the CPU."""
    exact = tensors(batch, dtype=dtype, **shape)
    some = [x.cuda() for x in exact]
    leaves = [x.detach().requires_grad_(gradients) for x in some[:4]]
    pattern, reach = cut(case.pattern, case.causal, batch.max_length)
    sinks = leaves[3] if case.sinks else None
    need = need_of(batch, leaves[0], leaves[1], leaves[2], case.causal, reach, case.softcap, sinks)
    return need, pattern, leaves, sinks, some[4], [x.double() for x in exact]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("form", [VARLEN, CASCADE, FLEX], ids=["varlen", "cascade", "flex"])
def test_outputs_and_gradients_equal_attention_written_out(
    form: AttentionForm, name: str, size: int, dtype: torch.dtype
) -> None:
    case = CASES[name]
    for seed in range(2):
        batch = tree(seed, share=case.causal, longest=200)
        need, pattern, leaves, sinks, grad, exact = ask(case, dtype, batch, heads=8, kv_heads=2, size=size)
        if not form.supports(need):
            pytest.skip("not what this form is for")
        out = form.compute(batch, leaves[0], leaves[1], leaves[2], SCALE, need, pattern, sinks)
        count = 4 if case.sinks else 3
        slopes = torch.autograd.grad(out, leaves[:count], grad)
        want = [x.requires_grad_() for x in exact[:4]]
        full = written_out(batch, want[0], want[1], want[2], want[3], case)
        for x, y in [(out, full), *zip(slopes, torch.autograd.grad(full, want[:count], exact[4]), strict=True)]:
            assert x.dtype == dtype
            assert (x.cpu().double() - y).norm() <= MOST[dtype] * y.norm()


@pytest.mark.parametrize("form", [VARLEN, CASCADE], ids=["varlen", "cascade"])
def test_a_query_alone_behind_each_prompt(form: AttentionForm) -> None:
    """FlashAttention turns single queries of grouped heads around; the log-sum-exp must still be each head's."""
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 99, 40) for _ in range(3)]
    rows = [np.concatenate([p, [t]]) for p in prompts for t in (100, 101)]
    (batch,) = pack(rows, budget=9999, share=True)
    case = CASES["sinks"]
    need, pattern, leaves, sinks, grad, exact = ask(case, torch.bfloat16, batch, heads=8, kv_heads=2, size=64)
    out = form.compute(batch, leaves[0], leaves[1], leaves[2], SCALE, need, pattern, sinks)
    slopes = torch.autograd.grad(out, leaves, grad)
    want = [x.requires_grad_() for x in exact[:4]]
    full = written_out(batch, want[0], want[1], want[2], want[3], case)
    for x, y in [(out, full), *zip(slopes, torch.autograd.grad(full, want, exact[4]), strict=True)]:
        assert (x.cpu().double() - y).norm() <= 2e-2 * y.norm()


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_the_best_form_of_the_table_passes_its_trial(name: str, gradients: bool) -> None:
    forms._choose_form.cache_clear()
    forms._check_once.cache_clear()
    case = CASES[name]
    batch = tree(0, share=case.causal)
    need = ask(case, torch.bfloat16, batch, gradients=gradients, heads=8, kv_heads=2, size=64)[0]
    with forms.noting_skipped() as left_out:
        best = choose_form(need)
    assert not left_out
    assert best is (FLEX if case.softcap or "chunks" in name else VARLEN)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "bert"])
def test_models_run_packed_and_are_no_further_from_float32_than_transformers_own(name: str, tmp_path: Path) -> None:
    shape = {} if name == "bert" else {"head_dim": 16}
    folder = zoo.checkpoint(name, tmp_path / name, **shape)
    rows = zoo.rows(2, groups=((40, 4), (25, 3), (60, 1)))
    engine = build_scorer(ModelConfig(model=str(folder), device="cuda", dtype="bfloat16"))
    assert engine.info.path.startswith("packed") and "without" not in engine.info.why, engine.info.why
    got = np.array([r.reward for r in engine.score([Sequence(row) for row in rows])])  # type: ignore[union-attr]
    want, own = zoo.reference(folder, rows), zoo.reference(folder, rows, dtype=torch.bfloat16)
    assert np.sqrt(np.square(got - want).mean()) <= 1.5 * np.sqrt(np.square(own - want).mean())
