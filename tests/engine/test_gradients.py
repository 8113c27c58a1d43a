"""Values and the gradients of every parameter against plain transformers, one sequence at a time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModel

import zoo
from guerdon.core import Score, Sequence
from guerdon.engine.attention import cascade
from guerdon.engine.attention.by_segment import by_segment
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.engine import Engine
from guerdon.engine.packing import pack
from guerdon.errors import CheckpointError
from guerdon.settings.config import ModelConfig
from tiers import of_each_kind, slow_but


def make_rows(groups: tuple[tuple[int, int], ...] = ((40, 3), (25, 2), (3, 2))) -> list[np.ndarray]:
    """Ragged groups, a row that begins another, its twin, and the shortest possible."""
    rows = zoo.rows(3, groups)
    return [*rows, rows[0][:1].copy()]


def weights(rows: list[np.ndarray]) -> list[torch.Tensor]:
    """What each value counts in the loss, so that every token has a gradient of its own."""
    random = np.random.default_rng(4)
    return [torch.from_numpy(random.standard_normal(len(row)).astype(np.float32)) for row in rows]


def build(folder: Path, **config: Any) -> Engine:
    return Engine(load_critic(ModelConfig(model=str(folder), **config)))


def backward(engine: Engine, rows: list[np.ndarray]) -> list[np.ndarray]:
    """The values of each row; the gradients of the weighted sum of all values are left in the parameters."""
    counts, values = weights(rows), {}
    for numbers, some in engine.values(rows):
        torch.stack([(v * counts[i]).sum() for i, v in zip(numbers, some, strict=True)]).sum().backward()
        values.update({i: v.detach().numpy() for i, v in zip(numbers, some, strict=True)})
    return [values[i] for i in range(len(rows))]


def reference(
    folder: Path, rows: list[np.ndarray], counts: list[torch.Tensor] | None = None, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, list[Any]]:
    """A trunk and a head of plain transformers and torch with gradients in them, and the values."""
    trunk: Any = AutoModel.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
    head = torch.nn.Linear(trunk.config.hidden_size, 1, bias=False)
    name = next(name for name in zoo.tensors(folder) if name in ("score.weight", "classifier.weight"))
    with torch.no_grad():
        head.weight.copy_(zoo.tensors(folder)[name])
    values = []
    for row, count in zip(rows, counts or weights(rows), strict=True):
        hidden = trunk(input_ids=torch.from_numpy(row)[None], use_cache=False).last_hidden_state[0]
        values.append(head(hidden.float())[:, 0])
        (values[-1] * count).sum().backward()
    return trunk, head, [v.detach().numpy() for v in values]


def gradients(trunk: Any, head: Any) -> dict[str, torch.Tensor]:
    named = [*trunk.named_parameters(), *((f"head.{i}", p) for i, p in enumerate(head.parameters()))]
    return {name: torch.zeros_like(p) if p.grad is None else p.grad.clone() for name, p in named}


def assert_gradients_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor], relative: float) -> None:
    assert got.keys() == want.keys()
    # A key's bias moves all logits of a query alike: its true gradient is 0, and what is there is rounding.
    least = 1e-3 * torch.stack([g.norm() for g in want.values()]).max()
    for name, w in want.items():
        assert (got[name] - w).norm() <= relative * max(w.norm(), least), name


def build_on(path: str, folder: Path, **config: Any) -> Engine:
    engine = build(folder, **config)
    engine.path = path
    engine.use(path)
    return engine


@pytest.mark.parametrize("name", of_each_kind(zoo.DECODERS))
def test_values_and_gradients_equal_transformers_one_by_one(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = make_rows()
    trunk, head, values = reference(folder, rows)
    want = gradients(trunk, head)
    own = build(folder).path
    assert own == zoo.PATHS[name]
    for path in ["packed+shared", "packed"] if own == "packed+shared" else [own]:
        engine = build_on(path, folder, max_batch_tokens=150)
        got = backward(engine, rows)
        for g, v in zip(got, values, strict=True):
            np.testing.assert_allclose(g, v, atol=1e-4 * np.concatenate(values).std())
        assert_gradients_equal(gradients(engine.trunk, engine.head), want, 1e-4)


@pytest.mark.parametrize("path", ["padded", "single"])
@pytest.mark.parametrize("name", slow_but(("llama", "gpt2"), ["llama", "gpt2", "mamba"]))
def test_gradients_on_the_plain_paths(path: str, name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = make_rows()
    trunk, head, _ = reference(folder, rows)
    engine = build_on(path, folder, max_batch_tokens=300)
    backward(engine, rows)
    assert_gradients_equal(gradients(engine.trunk, engine.head), gradients(trunk, head), 1e-4)


@pytest.mark.parametrize("kind", ["seqcls", "trlx-critic"])
def test_values_are_bitwise_those_that_are_served(kind: str, tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("gpt2", tmp_path / kind, kind), mean=0.3, std=1.7, max_batch_tokens=150)
    rows = zoo.rows(3, least=9)[:-1]  # a twin would be computed once when served
    results = engine.score([Sequence(row) for row in rows])
    for under in (torch.enable_grad(), torch.no_grad()):
        with under:
            for numbers, values in engine.values(rows):
                for i, value in zip(numbers, values, strict=True):
                    served = results[i]
                    assert isinstance(served, Score) and served.values is not None
                    assert value.dtype == torch.float32 and (value.detach().numpy() == served.values).all()
                    assert value.requires_grad == torch.is_grad_enabled()


def test_every_row_comes_once_in_micro_batches_within_the_budget(tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"), max_batch_tokens=100)
    seen: list[int] = []
    engine.trunk.register_forward_pre_hook(
        lambda _, __, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True
    )  # fmt: skip
    rows = make_rows()
    batches = list(engine.values(rows))
    assert sorted(i for numbers, _ in batches for i in numbers) == list(range(len(rows)))
    assert all(len(v) == len(rows[i]) for numbers, values in batches for i, v in zip(numbers, values, strict=True))
    assert len(batches) > 1 and max(seen) < 100 + 16 * len(rows) and sum(seen) < sum(map(len, rows))


def test_a_dynamic_rope_trains_beside_serving(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = zoo.checkpoint("llama", tmp_path / "llama", rope_parameters=rope, max_position_embeddings=48)
    rows = make_rows()
    engine = build(folder, max_length=256)
    engine.score([Sequence(row) for row in rows])
    backward(engine, rows)
    total = {name: torch.zeros_like(p) for name, p in gradients(engine.trunk, engine.head).items()}
    for i, row in enumerate(rows):
        # A model of its own for each row, for this rope remembers the longest sequence that it has seen.
        trunk, head, _ = reference(folder, [row], weights(rows)[i : i + 1])
        for name, gradient in gradients(trunk, head).items():
            total[name] += gradient
    assert max(map(len, rows)) > 48
    assert_gradients_equal(gradients(engine.trunk, engine.head), total, 1e-4)


def test_bfloat16_gradients_are_no_further_from_float32_than_transformers_own(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    rows = make_rows(((cascade.QUERY_BLOCK + 20, 3), (40, 4), (30, 2)))
    want = gradients(*reference(folder, rows)[:2])
    own = gradients(*reference(folder, rows, dtype=torch.bfloat16)[:2])
    engine = build(folder, dtype="bfloat16")
    backward(engine, rows)
    got = gradients(engine.trunk, engine.head)

    def distances(made: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(made[name].float() - w).norm() / w.norm() for name, w in want.items()])

    # One small tensor alone may be near by luck, on one processor and not on another, so compare over all tensors.
    assert distances(got).mean() <= 1.5 * distances(own).mean()
    assert distances(got).max() <= 1.5 * distances(own).max()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cascade_has_the_gradients_of_attention_segment_by_segment(kv_heads: int, dtype: torch.dtype) -> None:
    block = cascade.QUERY_BLOCK
    rows = make_rows(((block - 1, 2), (block + 60, 4), (2 * block + 5, 2)))
    rows += [np.concatenate([rows[0], rows[4][:n]]) for n in (30, 50)]  # levels below levels
    (batch,) = pack(rows, budget=9999, share=True)
    assert max(len(s.ancestors) for s in batch.segments) > 1
    random = torch.Generator().manual_seed(0)
    # As the models give them: heads side by side in memory.
    shapes = [(1, batch.num_tokens, heads, 8) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, grad = (torch.randn(*shape, generator=random).to(dtype).transpose(1, 2) for shape in shapes)
    inputs = [x.requires_grad_() for x in inputs]
    got = torch.autograd.grad(cascade.cascade(batch, *inputs, 0.3), inputs, grad)
    exact = [x.detach().float().requires_grad_() for x in inputs]
    want = torch.autograd.grad(by_segment(batch, *exact, 0.3, True), exact, grad.float())
    for g, w in zip(got, want, strict=True):
        assert g.dtype == dtype
        assert (g.float() - w).norm() <= (1e-6 if dtype == torch.float32 else 1e-2) * w.norm()


def test_only_what_needs_a_gradient_gets_one(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    rows = make_rows()
    trunk, *_ = reference(folder, rows)
    engine = build(folder)
    for name, parameter in engine.trunk.named_parameters():
        parameter.requires_grad_("layers.1.self_attn.q_proj" in name)
    backward(engine, rows)
    grown = {name for name, p in engine.trunk.named_parameters() if p.grad is not None}
    assert grown == {"layers.1.self_attn.q_proj.weight"}
    for name in grown:
        want, got = trunk.get_parameter(name).grad, engine.trunk.get_parameter(name).grad
        assert (got - want).norm() <= 1e-4 * want.norm()


@pytest.mark.parametrize("wrong", slow_but(("key",), ["key", "value"]))
def test_a_path_with_wrong_gradients_is_not_taken(wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = cascade._backward

    def backward_without(*args: Any) -> tuple[torch.Tensor, ...]:
        dq, dk, dv = right(*args)
        return (dq, torch.zeros_like(dk), dv) if wrong == "key" else (dq, dk, torch.zeros_like(dv))

    folder = zoo.checkpoint("llama", tmp_path / "llama")
    monkeypatch.setattr(cascade, "_backward", backward_without)
    engine = build(folder)
    assert engine.path == "shared" and "packed+shared: its gradients differ" in engine.info.why
    with pytest.raises(CheckpointError, match="gradients differ"):
        build(folder, require_packed=True)
    # What only serves is not held up by it.
    assert Engine(load_reward_model(ModelConfig(model=str(folder)))).path == "packed+shared"
