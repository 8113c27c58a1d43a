"""Norms, rotary embeddings and feed-forwards in fewer passes: used only if they equal transformers' own."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama import modeling_llama as llama

import zoo
from guerdon.assembly import build_scorer
from guerdon.engine import fewer_passes, onednn
from guerdon.engine.fewer_passes import FewerPasses
from guerdon.settings.config import ModelConfig

ALIKE = ["llama", "qwen3", "mistral"]
SIZE = 16


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def made(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = numbers(*parameter.shape)
    return module


def replaced(folder: Path, arch: str) -> set[str]:
    """The classes of the modules that have a replacement in a model that is served."""
    trunk = build_scorer(ModelConfig(model=str(zoo.checkpoint(arch, folder)))).trunk
    return {type(module).__name__ for module in trunk.modules() if "forward" in module.__dict__}


@pytest.mark.parametrize("arch", ALIKE)
def test_models_with_llamas_code_have_all_three(arch: str, tmp_path: Path) -> None:
    found = replaced(tmp_path, arch)
    assert {name[-len("RMSNorm") :] for name in found} >= {"RMSNorm"}
    assert any(name.endswith("MLP") for name in found)
    assert any(name.endswith("Attention") for name in found)


def test_a_norm_that_adds_one_to_its_weight_stays_as_it_is(tmp_path: Path) -> None:
    found = replaced(tmp_path, "gemma2")
    assert not any(name.endswith("RMSNorm") for name in found)
    assert any(name.endswith("Attention") for name in found)  # its rotary embedding is Llama's


def test_another_activation_stays_as_it_is() -> None:
    mlp = llama.LlamaMLP(llama.LlamaConfig(hidden_size=32, intermediate_size=SIZE, hidden_act="gelu"))
    FewerPasses(mlp).use(True)
    assert "forward" not in mlp.__dict__


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gradients", [False, True])
def test_each_gives_what_transformers_gives(gradients: bool, dtype: torch.dtype) -> None:
    norm = made(llama.LlamaRMSNorm(SIZE, eps=0.1)).to(dtype)
    mlp = made(llama.LlamaMLP(llama.LlamaConfig(hidden_size=32, intermediate_size=SIZE, mlp_bias=True))).to(dtype)
    wave = numbers(1, 5, SIZE, dtype=dtype)
    cases: list[tuple[Any, Any, list[torch.Tensor]]] = [
        (norm, lambda x: fewer_passes.norm(norm, x), [numbers(1, 5, SIZE, dtype=dtype)]),
        (mlp, lambda x: fewer_passes.gated(mlp, x), [numbers(1, 5, 32, dtype=dtype)]),
        (
            lambda q, k: llama.apply_rotary_pos_emb(q, k, wave.cos(), wave.sin())[0],
            lambda q, k: fewer_passes.rotated(q, k, wave.cos(), wave.sin())[0],
            [numbers(1, 4, 5, SIZE, dtype=dtype), numbers(1, 2, 5, SIZE, dtype=dtype)],
        ),
        (
            lambda q, k: llama.apply_rotary_pos_emb(q, k, wave.cos(), wave.sin())[1],
            lambda q, k: fewer_passes.rotated(q, k, wave.cos(), wave.sin())[1],
            [numbers(1, 4, 5, SIZE, dtype=dtype), numbers(1, 2, 5, SIZE, dtype=dtype)],
        ),
    ]
    most = 2e-2 if dtype == torch.bfloat16 else 1e-5
    for own, ours, inputs in cases:
        before = [x.clone() for x in inputs]
        found = []
        for function in (own, ours):
            leaves = [x.clone().requires_grad_(gradients) for x in inputs]
            with torch.set_grad_enabled(gradients):
                out = function(*leaves)
                slopes = torch.autograd.grad(out.square().sum(), leaves, allow_unused=True) if gradients else ()
            found.append([out, *(x for x in slopes if x is not None)])
        for want, got in zip(*found, strict=True):
            assert (got - want).float().norm() <= most * want.float().norm()
        with torch.no_grad():
            again = ours(*inputs)
        assert torch.equal(again, found[1][0])  # to the bit, with gradients or without
        assert all(torch.equal(x, y) for x, y in zip(before, inputs, strict=True))  # its inputs are others', too


def test_the_reference_is_transformers_own(tmp_path: Path) -> None:
    engine = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path))))
    norms = [module for module in engine.trunk.modules() if isinstance(module, llama.LlamaRMSNorm)]
    assert norms
    assert all("forward" in norm.__dict__ for norm in norms)
    # A second one on the same trunk knows what the first has replaced.
    for replaced_by in (FewerPasses(engine.trunk), engine._fewer_passes):
        assert replaced_by is not None
        replaced_by.use(False)
        left = {m.__dict__["forward"].__func__ for m in engine.trunk.modules() if "forward" in m.__dict__}
        assert left <= {onednn.by_dense}  # PyTorch's own, of a weight that is in oneDNN's order
        replaced_by.use(True)
        assert all("forward" in norm.__dict__ for norm in norms)
    with engine.plain_attention():
        left = {m.__dict__["forward"].__func__ for m in engine.trunk.modules() if "forward" in m.__dict__}
        assert left <= {onednn.by_dense}  # PyTorch's own, of a weight that is in oneDNN's order
    assert all("forward" in norm.__dict__ for norm in norms)


def test_code_that_computes_something_else_by_now_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if an update of transformers had changed Llama's norm: it would still be Llama's code, word for word."""

    def forward(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        scaled: torch.Tensor = hidden_states * self.weight
        return scaled

    monkeypatch.setattr(llama.LlamaRMSNorm, "forward", forward)
    fewer_passes._norms_agree.cache_clear()
    try:
        norm = llama.LlamaRMSNorm(SIZE)
        FewerPasses(norm).use(True)
        assert "forward" not in norm.__dict__
    finally:
        fewer_passes._norms_agree.cache_clear()


def test_no_random_number_of_a_run_is_drawn(tmp_path: Path) -> None:
    trunk = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path)))).trunk
    for agrees in (fewer_passes._norms_agree, fewer_passes._gated_agree, fewer_passes._rotations_agree):
        agrees.cache_clear()
    before = torch.get_rng_state()
    FewerPasses(trunk)
    assert torch.equal(torch.get_rng_state(), before)
