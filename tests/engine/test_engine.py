"""Engine scores against plain transformers, one sequence at a time: every architecture, every way of batching."""

from pathlib import Path

import numpy as np
import pytest
import torch

import zoo
from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.engine.attention import cascade
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, SampleFailed
from guerdon.settings.config import ModelConfig

PATHS = {name: "packed" if name in zoo.ENCODERS else "packed+shared" for name in zoo.ARCHITECTURES}
PATHS |= dict.fromkeys(("gptj", "falcon", "deberta-v2", "mamba", "jamba"), "single")
"""How each architecture is expected to run; the last line's are outside the attention registry or keep a state."""


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make_rows(seed: int = 0) -> list[np.ndarray]:
    """Ragged groups, lone rows, a duplicate, a row that begins another, and the shortest possible."""
    rows = zoo.rows(seed, groups=((40, 4), (25, 3), (3, 2), (60, 1)))
    return [*rows, rows[4][:1].copy()]


def build(folder: Path, **config: object) -> Engine:
    engine = build_scorer(ModelConfig(model=str(folder), **config))  # type: ignore[arg-type]
    assert isinstance(engine, Engine)
    return engine


def rewards(engine: Engine, rows: list[np.ndarray]) -> np.ndarray:
    results = engine.score([Sequence(row) for row in rows])
    assert all(isinstance(r, Score) for r in results), results
    return np.array([r.reward for r in results])  # type: ignore[union-attr]


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= 1e-4 * want.std()


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_rewards_equal_transformers_one_by_one_whatever_the_batch(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = make_rows()
    want = zoo.reference(folder, rows)
    engine = build(folder)
    assert engine.path == PATHS[name], engine.info.why
    assert_close(rewards(engine, rows), want)
    engine.max_batch_tokens = 150
    assert_close(rewards(engine, rows), want)
    order = np.random.default_rng(1).permutation(len(rows))
    assert_close(rewards(engine, [rows[i] for i in order]), want[order])
    assert_close(np.concatenate([rewards(engine, [row]) for row in rows]), want)


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "gemma2", "gpt2"])
def test_rows_of_several_query_blocks_and_long_prompts(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cascade, "QUERY_BLOCK", 128)  # of the models' 256 positions
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = zoo.rows(5, groups=((cascade.QUERY_BLOCK + 60, 4), (2 * cascade.QUERY_BLOCK - 31, 2)))
    assert_close(rewards(build(folder), rows), zoo.reference(folder, rows))
    want = zoo.reference(folder, rows)
    own = zoo.reference(folder, rows, dtype=torch.bfloat16)
    got = rewards(build(folder, dtype="bfloat16"), rows)
    assert np.abs(got - want).mean() <= 1.5 * np.abs(own - want).mean()


@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt2", "bert", "modernbert", "mamba", "falcon"])
def test_padded_batches_agree_too(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = make_rows()
    engine = build(folder)
    engine.path = "padded"
    engine.use("padded")
    engine.max_batch_tokens = 300
    assert_close(rewards(engine, rows), zoo.reference(folder, rows))


@pytest.mark.parametrize("name", ["llama", "mistral-sliding", "qwen3", "gemma2", "gpt2", "opt", "bert", "roberta"])
def test_bfloat16_is_no_further_from_float32_than_transformers_own(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = [row for seed in range(4) for row in make_rows(seed)]
    want = zoo.reference(folder, rows)
    own = zoo.reference(folder, rows, dtype=torch.bfloat16)
    got = rewards(build(folder, dtype="bfloat16"), rows)
    rms = lambda x: np.sqrt(np.square(x).mean())  # noqa: E731
    assert rms(got - want) <= 1.5 * rms(own - want)


@pytest.mark.parametrize("name", ["llama", "qwen2", "gpt2", "bert"])
def test_values_equal_transformers_one_by_one(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name, "tokcls")
    rows = make_rows()
    engine = build(folder, max_batch_tokens=150)
    assert engine.path == PATHS[name]
    results = engine.score([Sequence(row) for row in rows])
    assert all(isinstance(r, Score) and len(r.values) == len(row) for r, row in zip(results, rows, strict=True))
    got = np.concatenate([r.values for r in results])  # type: ignore[union-attr]
    assert_close(got, np.concatenate(zoo.reference_tokens(folder, rows))[:, 0])


def test_step_rewards_equal_transformers_one_by_one(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "prm", "tokcls", num_labels=2)
    rows = make_rows()
    steps = [np.unique([0, len(row) // 2, len(row) - 1]) for row in rows]
    results = build(folder).score([Sequence(row, steps=s) for row, s in zip(rows, steps, strict=True)])
    for result, want, at in zip(results, zoo.reference_tokens(folder, rows), steps, strict=True):
        right = torch.softmax(torch.from_numpy(want), -1)[:, 1].numpy()
        assert isinstance(result, Score) and result.steps is not None
        np.testing.assert_allclose(result.steps, right[at], atol=1e-5)
        assert result.reward == pytest.approx(right[at].min(), abs=1e-5)


@pytest.mark.parametrize("kind", ["trlx", "trlx-critic", "trl", "openrlhf"])
def test_value_heads_of_other_libraries(kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path / kind, kind)
    rows = make_rows()
    engine = build(folder)
    assert engine.path == "packed+shared"
    assert_close(rewards(engine, rows), zoo.reference(folder, rows))


def test_long_rope_gives_a_short_sequence_its_own_score_beside_a_long_one(tmp_path: Path) -> None:
    factors = {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 10000.0}
    rope = {"rope_type": "longrope", "original_max_position_embeddings": 48, **factors}
    folder = zoo.checkpoint(
        "phi3", tmp_path / "phi3", rope_parameters=rope, original_max_position_embeddings=48
    )  # fmt: skip
    rows = make_rows()
    assert min(map(len, rows)) < 48 < max(map(len, rows))
    assert_close(rewards(build(folder), rows), zoo.reference(folder, rows))


def test_dynamic_rope_forgets_the_long_sequence_before(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    folder = zoo.checkpoint("llama", tmp_path / "llama", rope_parameters=rope, max_position_embeddings=48)
    engine = build(folder, max_length=256)
    rows = make_rows()
    alone = np.array([zoo.reference(folder, [row])[0] for row in rows])
    assert max(map(len, rows)) > 48
    assert_close(rewards(engine, rows), alone)
    assert_close(rewards(engine, rows[::-1])[::-1], alone)


PER_LAYER_TYPE = {
    "full_attention": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["gemma3", "gemma3-with-images"])
def test_dynamic_rope_of_one_layer_type_forgets_the_long_sequence_before(
    name: str, deterministic: bool, tmp_path: Path
) -> None:
    changes: dict[str, object] = {"rope_parameters": PER_LAYER_TYPE, "max_position_embeddings": 48}
    if name == "gemma3-with-images":
        changes = {"text_config": zoo.PECULIAR[name][1]["text_config"] | changes}
    folder = zoo.checkpoint(name, tmp_path / "gemma3", **changes)
    engine = build(folder, max_length=256, deterministic=deterministic)
    random = np.random.default_rng(0)
    rows = [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in (100, 60, 48, 47, 100)]
    alone = np.array([zoo.reference(folder, [row])[0] for row in rows])
    assert_close(np.concatenate([rewards(engine, [row]) for row in rows]), alone)
    assert_close(rewards(engine, rows), alone)


def test_llama_4_scales_by_position_and_not_by_place_in_the_batch(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama4", tmp_path / "llama4", floor_scale=64, attn_scale=0.5, no_rope_layers=[1, 0])
    rows = make_rows()
    engine = build(folder)
    assert engine.path == "packed+shared"
    assert sum(map(len, rows)) > 4 * 64
    assert_close(rewards(engine, rows), zoo.reference(folder, rows))
    random = np.random.default_rng(0)
    halves = [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, 32) for _ in range(2)]  # the last has index 63
    assert_close(rewards(engine, halves), zoo.reference(folder, halves))


def test_roberta_does_not_count_padding_ids_inside_a_sequence(tmp_path: Path) -> None:
    folder = zoo.checkpoint("roberta", tmp_path / "roberta")
    rows = make_rows()
    for row in rows[::2]:
        row[len(row) // 3] = 1  # its padding id
    assert_close(rewards(build(folder), rows), zoo.reference(folder, rows))


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_deterministic_scores_are_bitwise_the_same_whatever_shares_the_batch(name: str, tmp_path: Path) -> None:
    engine = build(zoo.checkpoint(name, tmp_path / name), deterministic=True)
    rows = make_rows()
    alone = np.concatenate([rewards(engine, [row]) for row in rows])
    assert (rewards(engine, rows) == alone).all()
    assert (rewards(engine, rows[::-1])[::-1] == alone).all()


def test_identical_sequences_are_computed_once(tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"))
    row = make_rows()[0]
    seen = []
    engine.trunk.register_forward_pre_hook(
        lambda _, __, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True
    )  # fmt: skip
    got = rewards(engine, [row] * 5)
    assert sum(seen) == len(row) and len(set(got.tolist())) == 1


def test_a_model_that_cannot_run_packed_says_why_and_is_refused_if_packing_is_required(tmp_path: Path) -> None:
    folder = zoo.checkpoint("mamba", tmp_path / "mamba")
    assert "packed" in build(folder).info.why
    with pytest.raises(CheckpointError, match="cannot run packed"):
        build(folder, require_packed=True)


def test_a_score_that_is_not_finite_fails_alone(tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"))
    poison = zoo.VOCAB_SIZE - 1
    with torch.no_grad():
        engine.trunk.embed_tokens.weight[poison] = float("nan")
    rows = [row[row != poison] for row in make_rows()]
    clean = rewards(engine, rows)
    results = engine.score([Sequence(row) for row in [*rows, np.array([5, poison, 7])]])
    assert isinstance(results[-1], SampleFailed)
    assert_close(np.array([r.reward for r in results[:-1]]), clean)  # type: ignore[union-attr]
