"""Numbers that are none never leave a model as scores, and a model that gives no others does not start."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from guerdon.assembly import build_scorer, build_trainer
from guerdon.core import ModelInfo, Score, ScoreReply, Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.forward import Forward
from guerdon.engine.functions import FunctionScorer, PaddedScorer
from guerdon.engine.self_check import probe_rows
from guerdon.errors import CheckpointError, ConfigError, SampleFailed
from guerdon.server.sums import Sum
from guerdon.settings.actors import PolicyConfig
from guerdon.settings.config import ComponentConfig, CriticConfig, ModelConfig, RewardConfig


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
    with pytest.raises(CheckpointError, match="differ by inf"):
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


def test_one_value_that_is_none_fails_its_sample(tmp_path: Path) -> None:
    folder = spoilt(tmp_path / "c", "model.embed_tokens.weight", math.nan, where=BAD, kind="tokcls")
    trainer = build_trainer(CriticConfig(model=str(folder)))
    row = next(iter(zoo.rows(5)))
    row = row[row != BAD]
    fine, wrong = trainer.score([Sequence(row), Sequence(np.append(row, BAD))])
    assert np.isfinite(fine.values).all()
    assert isinstance(wrong, SampleFailed) and f"at index {len(row)} of {len(row) + 1}" in str(wrong)


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


@pytest.mark.parametrize(("weight", "reward"), [(1.0, math.nan), (1e30, 1e30), (1.0, math.inf)])
def test_a_sum_is_finite_or_fails(weight: float, reward: float) -> None:
    config = RewardConfig(name="sum", components=[ComponentConfig(model="a", weight=weight)])
    made = Sum(config, [ModelInfo("a", "seqcls")])
    first, second = made.combine([ScoreReply([Score(0.5), Score(reward)], [1, 1], "1")]).results
    assert isinstance(first, Score) and isinstance(second, SampleFailed)


def test_a_function_has_no_plain_forward_to_be_checked_by() -> None:
    with pytest.raises(ConfigError, match=r"recheck_share is 0\.5"):
        FunctionScorer(ModelConfig(model="scorers:score", recheck_share=0.5))


@pytest.mark.parametrize("architecture", ["llama", "mistral-sliding", "bert", "mamba"])
def test_the_plain_forward_is_the_references(architecture: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(architecture, tmp_path / "rm")
    engine = build_scorer(ModelConfig(model=str(folder)))
    path, rows = engine.path, zoo.rows(1)
    plain = [result.reward for result in engine.score_plainly([Sequence(row) for row in rows])]
    assert plain == pytest.approx(zoo.reference(folder, rows), abs=1e-5)
    again = [result.reward for result in engine.score([Sequence(row) for row in rows])]
    assert again == pytest.approx(plain, abs=1e-4) and engine.path == path


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
