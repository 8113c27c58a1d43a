"""The last layer computes only what is read, with the same result; recomputed activations give the same gradients."""

import threading
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from attended import SCALE, tensors, tree
from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.engine.attention.by_segment import by_segment, of_few
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.engine import Engine
from guerdon.engine.layers import recompute_activations
from guerdon.settings.config import ModelConfig
from tiers import slow_but


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("kv_heads", [1, 4])
def test_a_few_queries_see_what_they_would_among_all(kv_heads: int, share: bool) -> None:
    batch = tree(0, share=share)
    q, k, v, *_ = tensors(batch, kv_heads=kv_heads)
    read = np.random.default_rng(0).permutation(batch.last)  # in any order
    out = of_few(batch, read, q, k, v, SCALE)
    whole = by_segment(batch, q, k, v, SCALE, True)
    assert torch.allclose(out[:, :, read], whole[:, :, read], atol=1e-12)
    others = np.setdiff1d(np.arange(batch.num_tokens), read)
    assert not out[:, :, others].any()


def widths(engine: Any, sequences: list[Sequence]) -> dict[str, set[int]]:
    """By part of the first and the last layer, of how many tokens it computed something."""
    found = defaultdict(set)
    handles = []
    for place in (0, -1):
        layer = engine.trunk.layers[place]
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj"):
            part = layer.get_submodule(name)

            # A hook before the forward, as one behind it may see what was widened again.
            def see(_: Any, args: tuple[Any, ...], key: str = f"{place} {name}") -> None:
                found[key].add(args[0].shape[-2])

            handles.append(part.register_forward_pre_hook(see))
    engine.score(sequences)
    for handle in handles:
        handle.remove()
    return dict(found)


def test_the_last_layer_computes_what_is_read(tmp_path: Path) -> None:
    engine = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path))))
    prompt = np.arange(3, 43)
    rows = [np.concatenate([prompt, np.arange(50 + i, 60 + i)]) for i in range(4)]
    sequences = [Sequence(row) for row in rows]
    assert widths(engine, sequences) == {
        "0 self_attn.q_proj": {80}, "0 self_attn.k_proj": {80}, "0 self_attn.o_proj": {80}, "0 mlp.up_proj": {80},
        "-1 self_attn.q_proj": {4}, "-1 self_attn.k_proj": {80}, "-1 self_attn.o_proj": {4}, "-1 mlp.up_proj": {4},
    }  # fmt: skip


@pytest.mark.parametrize("arch", ["llama", "qwen3", "mistral-sliding", "gemma2", "gpt2"])
def test_scores_are_those_of_all_its_tokens(arch: str, tmp_path: Path) -> None:
    engine = build_scorer(ModelConfig(model=str(zoo.checkpoint(arch, tmp_path))))
    assert engine.info.path == "packed+shared"
    sequences = [Sequence(row) for row in zoo.rows(9)]
    rewards = []
    for score in (engine.score, engine.score_plainly):
        results = [result for result in score(sequences) if isinstance(result, Score)]
        rewards.append([result.reward for result in results])
    assert len(rewards[0]) == 9
    assert rewards[0] == pytest.approx(rewards[1], abs=2e-6)


def test_values_of_every_token_need_the_whole_layer(tmp_path: Path) -> None:
    engine = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path, kind="tokcls"))))
    sequences = [Sequence(row, steps=np.array([len(row) - 1])) for row in (np.arange(3, 20), np.arange(30, 60))]
    assert {key: value for key, value in widths(engine, sequences).items() if key.startswith("-1")} == {
        f"-1 {name}": {47} for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.up_proj")
    }


# ------------------------------------------------------------------------------------ activation checkpointing

ARCHITECTURES = ("llama", "gemma2", "gpt2", "opt", "mixtral", "mamba")


def in_another_thread(loss: torch.Tensor) -> None:
    """Runs backward in another thread, as autograd does on a GPU, and with it the second forward."""
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join()


def gradients(engine: Engine, rows: list[np.ndarray]) -> list[torch.Tensor]:
    for _, values in engine.values(rows):
        in_another_thread(torch.cat(values).square().sum())
    parameters = [*engine.trunk.named_parameters(), *engine.head.named_parameters()]
    assert all(p.grad is not None for name, p in parameters if "expert" not in name)
    return [torch.zeros_like(p) if p.grad is None else p.grad for _, p in parameters]


@pytest.mark.parametrize("name", slow_but(("llama",), ARCHITECTURES))
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
