"""Engine scores against plain transformers, one sequence at a time: every architecture, every way of batching."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from guerdon.assembly import build_scorer, build_trainer
from guerdon.core import ModelInfo, Score, Sequence
from guerdon.engine.attention import cascade
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.engine import Engine
from guerdon.engine.forward import Forward
from guerdon.engine.functions import FunctionScorer, PaddedScorer
from guerdon.engine.self_check import probe_rows
from guerdon.errors import CheckpointError, ConfigError, SampleFailed
from guerdon.settings.actors import PolicyConfig
from guerdon.settings.config import CriticConfig, ModelConfig
from tiers import QUICK, slow_but


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


@pytest.mark.parametrize(
    "name", slow_but((*QUICK, "qwen3", "llama4", "gpt-oss", "gptj", "modernbert", "mamba"), zoo.ARCHITECTURES)
)
def test_rewards_equal_transformers_one_by_one_whatever_the_batch(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = make_rows()
    want = zoo.reference(folder, rows)
    engine = build(folder)
    assert engine.path == zoo.PATHS[name], engine.info.why
    by_mask = engine.info.kind == "value-head"  # transformers has no class for it
    pooling = "first" if name in zoo.ENCODERS else "last" if by_mask else "last_non_pad"
    assert (engine.head.pooling, engine.causal) == (pooling, name not in zoo.ENCODERS)
    length = {"falcon": 2048, "mamba": None}.get(name, zoo.MAX_LENGTH)
    assert (engine.info.max_length, engine.info.vocab_size) == (length, zoo.VOCAB_SIZE)
    assert_close(rewards(engine, rows), want)
    plain = engine.score_plainly([Sequence(row) for row in rows])
    assert_close(np.array([result.reward for result in plain]), want)  # type: ignore[union-attr]
    engine.max_batch_tokens = 150
    assert_close(rewards(engine, rows), want)
    order = np.random.default_rng(1).permutation(len(rows))
    assert_close(rewards(engine, [rows[i] for i in order]), want[order])
    assert_close(np.concatenate([rewards(engine, [row]) for row in rows]), want)
    if name in ("llama", "gemma2", "gpt2", "bert", "modernbert", "mamba", "falcon"):
        engine.path = "padded"
        engine.use("padded")
        assert_close(rewards(engine, rows), want)


@pytest.mark.parametrize("name", slow_but(("gemma2",), ["llama", "mistral-sliding", "gemma2", "gpt2"]))
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


@pytest.mark.parametrize(
    "name",
    slow_but(("llama", "bert"), ["llama", "mistral-sliding", "qwen3", "gemma2", "gpt2", "opt", "bert", "roberta"]),
)
def test_bfloat16_is_no_further_from_float32_than_transformers_own(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name)
    rows = [row for seed in range(4) for row in make_rows(seed)]
    want = zoo.reference(folder, rows)
    own = zoo.reference(folder, rows, dtype=torch.bfloat16)
    got = rewards(build(folder, dtype="bfloat16"), rows)
    rms = lambda x: np.sqrt(np.square(x).mean())  # noqa: E731
    assert rms(got - want) <= 1.5 * rms(own - want)


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


def test_identical_sequences_are_computed_once(tmp_path: Path) -> None:
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"))
    row = make_rows()[0]
    seen = []
    engine.trunk.register_forward_pre_hook(
        lambda _, __, kw: seen.append(kw["input_ids"].numel()), with_kwargs=True
    )  # fmt: skip
    got = rewards(engine, [row] * 5)
    assert sum(seen) == len(row) and len(set(got.tolist())) == 1


@pytest.mark.slow
def test_a_model_that_cannot_run_packed_says_why_and_is_refused_if_packing_is_required(tmp_path: Path) -> None:
    folder = zoo.checkpoint("mamba", tmp_path / "mamba")
    assert "packed" in build(folder).info.why
    with pytest.raises(CheckpointError, match="cannot run packed"):
        build(folder, require_packed=True)


def spoilt(folder: Path, name: str, value: float, where: Any = slice(None), **made: Any) -> Path:
    """A checkpoint in which that tensor, or a part of it, holds the value."""
    zoo.checkpoint("llama", folder, **made)
    tensors = load_file(folder / "model.safetensors")
    tensors[name][where] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("settings", [{}, {"deterministic": True}], ids=["packed", "plain"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("score.weight", math.nan),
        ("score.weight", math.inf),
        ("model.norm.weight", math.nan),
        ("model.layers.0.self_attn.o_proj.weight", math.inf),
    ],
)
def test_a_model_that_scores_nothing_does_not_start(
    name: str, value: float, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = spoilt(tmp_path / "rm", name, value)
    with pytest.raises(CheckpointError, match=r"scores nothing: .* not finite") as told:
        build_scorer(ModelConfig(model=str(folder), **settings))
    assert "--dtype float32" in told.value.help
    with pytest.raises(CheckpointError, match="scores nothing"):
        build_trainer(CriticConfig(model=str(folder), **settings))


def test_a_policy_whose_states_are_none_does_not_start(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.language_model("llama", tmp_path / "policy"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][0] = math.nan
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="are not finite"):
        Forward(load_policy(PolicyConfig(model=str(folder))))


def test_an_infinite_bias_is_seen_at_the_start(tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "prm", "score.bias", math.inf, where=1, kind="tokcls", num_labels=2)
    with pytest.raises(CheckpointError, match="scores nothing"):
        build_scorer(ModelConfig(model=str(folder)))


_PROBED = {int(token) for row in probe_rows(zoo.VOCAB_SIZE, zoo.MAX_LENGTH, zoo.PAD) for token in row}
BAD = next(token for token in range(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE) if token not in _PROBED)
"""A token that the self-check does not meet: what is wrong with it shows in what clients send."""


@pytest.mark.parametrize(
    ("kind", "num_labels", "more"),
    [("seqcls", 1, {}), ("seqcls", 3, {}), ("tokcls", 1, {}), ("tokcls", 2, {}), ("seqcls", 1, {"pooling": "mean"})],
)
def test_a_sample_that_has_no_score_fails_alone(kind: str, num_labels: int, more: Any, tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "rm", "model.embed_tokens.weight", math.nan, where=BAD, kind=kind, num_labels=num_labels)
    engine = build_scorer(ModelConfig(model=str(folder), **more))
    assert engine.info.path == "packed+shared"
    rows = [row[row != BAD] for row in zoo.rows(5)]
    fine = [Sequence(row, steps=np.array([len(row) - 1])) for row in rows]
    # It stands at the end, or amid what others begin with, too.
    bad = [np.append(rows[0], BAD), np.insert(rows[1], 20, BAD), np.array([BAD])]
    mixed = [fine[0], *(Sequence(row, steps=np.array([len(row) - 1])) for row in bad), *fine[1:]]
    for score in (engine.score, engine.score_plainly):
        results = score(mixed)
        assert [isinstance(r, SampleFailed) for r in results] == [False, True, True, True, *[False] * (len(fine) - 1)]
        assert all("not finite" in str(r) for r in results[1:4])
        alone = score(fine)
        for got, want in zip([results[0], *results[4:]], alone, strict=True):
            assert got.reward == pytest.approx(want.reward, abs=1e-5) and math.isfinite(got.reward)


@pytest.mark.parametrize("kind", ["seqcls", "tokcls"])
def test_a_reward_beyond_float32_is_none(kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "rm", kind, num_labels=1 if kind == "seqcls" else 2)
    engine = build_scorer(ModelConfig(model=str(folder), mean=1.0, std=1e-30))
    engine.head.std = 1e-41  # a reward that a float64 holds
    row = zoo.rows(5)[0]
    (result,) = engine.score([Sequence(row, steps=np.array([3]))])
    assert isinstance(result, SampleFailed) and "reward for this sample is not finite" in str(result)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, None])
def test_a_function_fails_the_sample_if_its_number_is_not_finite(value: Any) -> None:
    scorer = FunctionScorer(ModelConfig(model="scorers:score"))
    scorer._function = lambda tokens: [1.0, value]
    first, second = scorer.score([Sequence(np.array([1])), Sequence(np.array([2]))])
    assert isinstance(first, Score) and isinstance(second, SampleFailed)
    padded = PaddedScorer(lambda inputs: torch.tensor([1.0, np.nan if value is None else value]), ModelInfo("p", "f"))
    first, second = padded.score([Sequence(np.array([1])), Sequence(np.array([2]))])
    assert isinstance(first, Score) and isinstance(second, SampleFailed)


def test_a_function_has_no_plain_forward_to_be_checked_by() -> None:
    with pytest.raises(ConfigError, match=r"recheck_share is 0\.5"):
        FunctionScorer(ModelConfig(model="scorers:score", recheck_share=0.5))


def test_files_that_change_while_they_are_read_are_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from guerdon.engine.checkpoint import reward_models

    folder, load = zoo.checkpoint("llama", tmp_path / "rm"), reward_models.load_decoder
    other = zoo.checkpoint("llama", tmp_path / "other", seed=1)

    def slow(*asked: Any) -> Any:
        parts = load(*asked)
        (folder / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
        return parts

    monkeypatch.setattr(reward_models, "load_decoder", slow)
    with pytest.raises(CheckpointError, match="written to while they were read"):
        build_scorer(ModelConfig(model=str(folder)))
