"""Weights in oneDNN's own order: scores keep their bits, and models that this does not suit keep plain weights."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

import zoo
from guerdon.assembly import build_scorer, build_trainer
from guerdon.core import Score, Sequence
from guerdon.engine import onednn
from guerdon.settings.config import CriticConfig, ModelConfig, TeacherConfig

needs_onednn = pytest.mark.skipif(not onednn.can_reorder(torch.float32), reason="oneDNN has no products here")


def orders(engine: Any) -> set[bool]:
    """Whether linear layers of the trunk have reordered weights: what occurs."""
    return {m.weight.is_mkldnn for m in engine.trunk.modules() if type(m) is nn.Linear}


def rewards(results: list[Any]) -> np.ndarray:
    return np.array([result.reward for result in results if isinstance(result, Score)])


@needs_onednn
@pytest.mark.parametrize("name", ["llama", "qwen3", "bert"])
def test_a_frozen_model_is_reordered_and_scores_as_before(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / "model")
    engine = build_scorer(ModelConfig(model=str(folder)))
    assert orders(engine) == {True}
    rows = zoo.rows()
    sequences = [Sequence(row) for row in rows]
    got = rewards(engine.score(sequences))
    assert np.abs(got - zoo.reference(folder, rows)).max() < 1e-5
    assert np.abs(rewards(engine.score_plainly(sequences)) - zoo.reference(folder, rows)).max() < 1e-5
    assert np.array_equal(got, rewards(engine.score(sequences)))  # after the plain path
    for layer in engine.trunk.modules():
        if type(layer) is nn.Linear:
            layer.weight = nn.Parameter(onednn.dense(layer.weight.detach()), requires_grad=False)
    assert np.array_equal(got, rewards(engine.score(sequences)))


def test_what_learns_keeps_plain_weights(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "model")
    assert orders(build_trainer(CriticConfig(model=str(folder))).engine) == {False}


@needs_onednn
def test_a_teacher_is_reordered(tmp_path: Path) -> None:
    folder = zoo.language_model("llama", tmp_path / "model")
    assert orders(build_scorer(TeacherConfig(model=str(folder)))) == {True}


def test_a_model_that_reads_its_weights_itself_keeps_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        up = torch.einsum("...d,nd->...n", x, self.up_proj.weight)
        return self.down_proj(self.act_fn(self.gate_proj(x)) * up)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    folder = zoo.checkpoint("llama", tmp_path / "model")
    engine = build_scorer(ModelConfig(model=str(folder)))
    assert orders(engine) == {False}
    rows = zoo.rows()
    got = rewards(engine.score([Sequence(row) for row in rows]))
    assert np.abs(got - zoo.reference(folder, rows)).max() < 1e-5


@needs_onednn
def test_a_reordered_weight_is_the_same_weight() -> None:
    weight = torch.randn(48, 40, generator=torch.Generator().manual_seed(0))
    assert onednn.reordered(weight).is_mkldnn
    assert torch.equal(onednn.dense(onednn.reordered(weight)), weight)
    x = torch.randn(3, 40).requires_grad_()
    onednn.product(x, onednn.reordered(weight), None).sum().backward()
    assert x.grad is not None and torch.equal(x.grad, torch.autograd.grad(onednn.product(x, weight, None).sum(), x)[0])
    for rows in (x.detach()[0], x.detach()[:1], x.detach()[:0]):
        assert torch.equal(onednn.product(rows, onednn.reordered(weight), None), onednn.product(rows, weight, None))
