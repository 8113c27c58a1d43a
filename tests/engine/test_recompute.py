"""Activations computed twice give the same numbers, in whatever thread the second time is."""

from __future__ import annotations

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from guerdon.core import Sequence
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.engine import Engine
from guerdon.engine.layers import recompute_activations
from guerdon.settings.config import ModelConfig

ARCHITECTURES = ("llama", "gemma2", "gpt2", "opt", "mixtral", "mamba")


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def in_another_thread(loss: torch.Tensor) -> None:
    """As on a GPU, where autograd runs the backward, and with it the second forward, in a thread of its own."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def gradients(engine: Engine, rows: list[np.ndarray]) -> list[torch.Tensor]:
    for _, values in engine.values(rows):
        in_another_thread(torch.cat(values).square().sum())
    parameters = [*engine.trunk.named_parameters(), *engine.head.named_parameters()]
    assert all(p.grad is not None for name, p in parameters if "expert" not in name)
    return [torch.zeros_like(p) if p.grad is None else p.grad for _, p in parameters]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_gradients_are_bitwise_the_same(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = zoo.rows(3, groups=((40, 3), (20, 2)))
    plain = Engine(load_critic(ModelConfig(model=str(folder), max_batch_tokens=100)))
    loaded = load_critic(ModelConfig(model=str(folder), max_batch_tokens=100))
    names = list(loaded.trunk.state_dict())
    recompute_activations(loaded.trunk)
    engine = Engine(loaded)
    assert engine.path == plain.path and list(loaded.trunk.state_dict()) == names and not loaded.trunk.training
    for got, want in zip(gradients(engine, rows), gradients(plain, rows), strict=True):
        assert (got == want).all()


def test_each_layer_runs_twice_for_a_backward_and_once_without(tmp_path: Path) -> None:
    loaded = load_critic(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path / "llama"))))
    calls: Counter[int] = Counter()
    for i, layer in enumerate(loaded.trunk.layers):
        layer.mlp.gate_proj.register_forward_hook(lambda *_, i=i: calls.update([i]))
    recompute_activations(loaded.trunk)
    engine = Engine(loaded)
    row = zoo.rows()[:1]
    calls.clear()
    gradients(engine, row)
    assert calls == {0: 2, 1: 2}
    calls.clear()
    engine.score([Sequence(row[0])])
    assert calls == {0: 1, 1: 1}
