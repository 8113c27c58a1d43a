"""Linear layers by oneDNN: PyTorch's own results and gradients, on any processor that has the operator."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

import zoo
from guerdon.assembly import build_scorer
from guerdon.core import Sequence
from guerdon.engine import onednn
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.settings.actors import PolicyConfig
from guerdon.settings.config import ModelConfig

EPSILON = torch.finfo(torch.float32).eps


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def assert_close(got: torch.Tensor, want: torch.Tensor, terms: int) -> None:
    """Equal but for the rounding of sums of that many products of numbers of about one."""
    assert got.shape == want.shape
    assert (got - want).abs().max().item() <= 4 * terms * EPSILON


def used_onednn(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each product that oneDNN computes from now on."""
    seen, own = [], onednn._onednn
    monkeypatch.setattr(onednn, "_onednn", lambda x, *more: (seen.append(x.shape[0]), own(x, *more))[1])
    return seen


@pytest.mark.parametrize("shape", [(5, 48), (1, 7, 48), (2, 9, 48), (3, 48)], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_and_its_gradients(shape: tuple[int, ...], has_bias: bool) -> None:
    inputs = [numbers(*shape), numbers(32, 48), numbers(32) if has_bias else None]
    results = []
    for function in (onednn.product, F.linear):
        leaves = [None if tensor is None else tensor.clone().requires_grad_() for tensor in inputs]
        out = function(*leaves)
        out.square().sum().backward()
        results.append([out, *(leaf.grad for leaf in leaves if leaf is not None)])
    for got, want in zip(*results, strict=True):
        assert_close(got / want.abs().max(), want / want.abs().max(), terms=48)


def test_only_the_gradients_that_are_wanted_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = used_onednn(monkeypatch)
    x, weight = numbers(6, 48).requires_grad_(), numbers(32, 48)
    onednn.product(x, weight, None).sum().backward()
    assert len(seen) == 2  # the product, and the gradient of x
    assert_close(x.grad, torch.ones(6, 32) @ weight, terms=32)


def test_a_row_alone_is_computed_twice_and_other_dtypes_stay_with_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = used_onednn(monkeypatch)
    x, weight, bias = numbers(1, 48), numbers(32, 48), numbers(32)
    assert_close(onednn.product(x, weight, bias), F.linear(x, weight, bias), terms=48)
    assert seen == [2]
    assert onednn.product(x[None], weight, None).shape == (1, 1, 32)
    seen.clear()
    onednn.product(x.double(), weight.double(), None)
    onednn.product(numbers(0, 48), weight, None)
    assert not seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("inputs", "outputs"), [(32, 64), (49, 33), (384, 384), (576, 1), (1536, 576)])
def test_a_row_has_the_same_bits_among_any_number(inputs: int, outputs: int, dtype: torch.dtype) -> None:
    x, weight, bias = (numbers(*shape).to(dtype) for shape in ((513, inputs), (outputs, inputs), (outputs,)))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        want = onednn.product(x, weight, bias)
        for threads in (1, 2):
            torch.set_num_threads(threads)
            for count in (1, 2, 3, 4, 7, 16, 31, 100, 512):
                for start in (0, 513 - count):
                    assert torch.equal(onednn.product(x[start : start + count], weight, bias), want[start:][:count])
    finally:
        torch.set_num_threads(before)


def test_modules_that_have_a_replacement() -> None:
    dense, conv = nn.Linear(48, 32), Conv1D(32, 48)
    x = numbers(7, 48)
    for module in (dense, conv):
        assert_close(onednn.replacement(module)(module, x), module(x), terms=48)

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    assert onednn.replacement(Scaled(48, 32)) is None
    assert onednn.replacement(nn.LayerNorm(48)) is None


@pytest.mark.parametrize("arch", ["llama", "gpt2", "bert"])
def test_a_served_model_gives_the_plain_models_scores(
    arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = zoo.checkpoint(arch, tmp_path / arch)
    scorer = build_scorer(ModelConfig(model=str(folder)))
    seen = used_onednn(monkeypatch)
    rows = zoo.rows(6)
    found = [result.reward for result in scorer.score([Sequence(row) for row in rows])]
    assert seen
    np.testing.assert_allclose(found, zoo.reference(folder, rows), atol=1e-5)


def test_who_asks_first_does_not_matter() -> None:
    with torch.inference_mode():  # in which no gradient can be taken
        assert onednn._agrees(torch.float32)


@pytest.mark.parametrize("arch", ["llama", "gpt2"])
def test_an_output_head_computes_by_onednn(arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_policy(PolicyConfig(model=str(zoo.language_model(arch, tmp_path / arch))))
    states = torch.randn(8, loaded.head.width)
    seen = used_onednn(monkeypatch)
    found = loaded.head(states)
    assert seen
    torch.testing.assert_close(found, loaded.model.get_output_embeddings()(states), atol=1e-5, rtol=1e-5)
