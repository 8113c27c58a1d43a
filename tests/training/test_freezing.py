"""Critics of which a part is frozen by a pattern: the rest learns as in plain torch, and no frozen byte changes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from critics import LR, build, same, weights
from plain import PlainCritic, request

import zoo
from guerdon.critic_core import TrainRequest
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import CriticConfig
from guerdon.settings.fields import check_settings
from tiers import slow_but

ROWS = zoo.rows(0, ((40, 5), (20, 3), (30, 5)))[:10]
ATTENTION = r".*\.self_attn\..*"
STEPS = 20


def asked(seed: int = 0) -> TrainRequest:
    return request(ROWS, seed)


def learnt(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


@pytest.mark.parametrize("dtype", slow_but(("float32",), ["float32", "bfloat16"]))
def test_frozen_bytes_stay_and_have_neither_gradients_nor_state(dtype: str, folder: Path) -> None:
    trainer = build(folder, frozen=ATTENTION, dtype=dtype)
    before = weights(trainer)
    kept = {name for name in before if re.fullmatch(ATTENTION, name)}
    assert len(kept) == 4 * 2  # q, k, v and o of two layers
    for seed in range(STEPS // 2):
        trainer.train(asked(seed))
    assert trainer.state()["step"] == STEPS
    assert learnt(before, weights(trainer)) == before.keys() - kept
    state = {name.rsplit("/", 1)[0] for name in trainer._optimiser.tensors()}
    assert state == before.keys() - kept
    assert trainer.state()["num_trainable"] == sum(before[name].numel() for name in before.keys() - kept)


def test_what_is_not_frozen_learns_as_in_plain_torch(folder: Path) -> None:
    trainer, plain = build(folder, frozen=ATTENTION), PlainCritic(folder, lr=LR)
    for name, parameter in plain.parameters.items():
        parameter.requires_grad_(not re.fullmatch(ATTENTION, name))
    report = trainer.train(asked())
    losses, norms = plain.train(asked(), 5)
    assert report.losses == pytest.approx(losses, rel=1e-4) and report.grad_norm == pytest.approx(norms[-1], rel=1e-4)
    own = weights(trainer)
    for name, parameter in plain.parameters.items():
        torch.testing.assert_close(own[name], parameter.detach(), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ({"trainable": "score.*"}, "head.module.0.weight"),
        ({"trainable": r".*\.mlp\..*|score\.weight", "frozen": r"model\..*"}, "head.module.0.weight"),
        ({"trainable": r"model\.norm\.weight"}, "trunk.norm.weight"),
    ],
)
def test_patterns_match_the_names_of_saved_weights(patterns: dict[str, Any], expected: str, folder: Path) -> None:
    trainer = build(folder, **patterns, activation_checkpointing=True)
    before = weights(trainer)
    trainer.train(asked())
    assert learnt(before, weights(trainer)) == {expected}


@pytest.mark.parametrize("setting", ["trainable", "frozen"])
def test_a_pattern_that_matches_nothing_is_refused_with_some_names(setting: str, folder: Path) -> None:
    with pytest.raises(ConfigError, match=f"{setting} is 'self_attn', and matches no weight's whole name") as refused:
        build(folder, **{setting: "self_attn"})
    assert "model.embed_tokens.weight, model.layers.0.self_attn.q_proj.weight, " in refused.value.help
    assert "..." in refused.value.help and refused.value.help.endswith("model.norm.weight, score.weight")


def test_freezing_everything_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing is left to train: trainable is None, frozen '\.\*'"):
        build(folder, frozen=".*")


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"frozen": "("}, r"frozen is '\(', which is no regular expression"),
        ({"trainable": "score.*", "lora": 4}, "trainable is 'score.*', but lora is set, which trains adapters"),
    ],
)
def test_contradictions_are_refused_before_anything_is_loaded(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        check_settings(CriticConfig(model="anything", **settings))


def test_a_checkpoint_belongs_to_its_patterns(folder: Path, tmp_path: Path) -> None:
    trainer = build(folder, frozen=ATTENTION)
    trainer.train(asked())
    saved = tmp_path / "saved"
    saved.mkdir()
    trainer.save(saved)
    again = build(folder, frozen=ATTENTION)
    again.load(saved)
    trainer.train(asked(1))
    again.train(asked(1))
    assert same(weights(trainer), weights(again)) and trainer.weights_version == again.weights_version
    for other in ({}, {"frozen": r".*\.mlp\..*"}, {"frozen": ATTENTION, "trainable": ".*"}):
        with pytest.raises(CheckpointError, match="was made with"):
            build(folder, **other).load(saved)
    all_of_it = tmp_path / "all"
    all_of_it.mkdir()
    build(folder).save(all_of_it)
    with pytest.raises(CheckpointError, match=r"was made with frozen None, this run has \.\*"):
        build(folder, frozen=ATTENTION).load(all_of_it)


def test_patterns_are_a_part_of_the_version(folder: Path) -> None:
    versions = set()
    for patterns in ({}, {"frozen": ATTENTION}, {"trainable": r".*(mlp|norm|embed|score).*"}):
        trainer = build(folder, **patterns)
        trainer.train(asked())
        versions.add(trainer.weights_version)
    assert len(versions) == 3
