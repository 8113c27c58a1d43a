"""Checkpoints: training on from one is bitwise training without interruption; others can read it; damage is refused."""

import dataclasses
import json
import os
import re
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import build, same, values, weights
from plain import request
from safetensors.torch import load_file, save_file
from transformers import AutoModel, AutoTokenizer

import zoo
from guerdon.critic_core import TrainRequest
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, StorageFailed
from guerdon.settings.config import CriticConfig, LearningConfig, ModelConfig
from guerdon.training import critic_trainer
from guerdon.training import trainer_checkpoint as tensor_files
from guerdon.training.critic_trainer import CriticTrainer
from tiers import slow_but

ROWS = zoo.rows(0, ((40, 4), (20, 2), (3, 3)))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("model") / "base"))


@pytest.fixture(scope="module")
def shared(base: Path) -> CriticTrainer:
    """A critic that has learnt, of tests that ask for nothing of what became of it before."""
    trainer = build(base)
    trainer.train(request(ROWS))
    return trainer


@pytest.fixture(scope="module")
def kept_of_shared(shared: CriticTrainer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(shared, tmp_path_factory.mktemp("shared") / "kept")


def asked(count: int = 4) -> list[TrainRequest]:
    return [request(ROWS, seed=i, name=str(i)) for i in range(count)]


def saved(trainer: CriticTrainer, folder: Path) -> Path:
    folder.mkdir()
    trainer.save(folder)
    return folder


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "float32": ("llama", {}),
    "bfloat16": ("llama", {"dtype": "bfloat16"}),
    "lora": ("llama", {"lora": 4}),
    "lora-bfloat16": ("gpt2", {"lora": 4, "dtype": "bfloat16"}),
    "8bit": ("llama", {"optimizer": "adamw_8bit", "dtype": "bfloat16"}),
    "schedule": ("qwen3", {"lr_schedule": "cosine", "warmup_steps": 2, "total_steps": 8}),
    "recomputed": ("llama", {"activation_checkpointing": True}),
    "experts": ("mixtral", {}),
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize("kind", slow_but([*KINDS][::3], KINDS))
def test_training_on_from_it_is_training_without_interruption(kind: str, tmp_path: Path) -> None:
    name, settings = KINDS[kind]
    if kind == "8bit":
        pytest.importorskip("bitsandbytes")
    folder = zoo.checkpoint(name, tmp_path / "base")
    first, *_ = a = build(folder, **settings), build(folder, **settings)
    before, after, other = asked(3)
    first.train(before)
    kept = saved(first, tmp_path / "kept")
    at_save, told = weights(first), values(first, ROWS)
    report = first.train(after)

    a[1].train(other, 1)  # what it had become before is forgotten
    a[1].load(kept)
    assert same(weights(a[1]), at_save)
    np.testing.assert_array_equal(values(a[1], ROWS), told)
    assert repr(a[1].train(after)) == repr(report)
    assert same(weights(a[1]), weights(first))
    assert a[1].state() == first.state()
    # And both write the same files, bit for bit.
    ends = [saved(trainer, tmp_path / str(i)) for i, trainer in enumerate(a)]
    assert files(ends[0]) == files(ends[1])
    for name in files(ends[0]) - {"rng.safetensors"}:
        assert (ends[0] / name).read_bytes() == (ends[1] / name).read_bytes(), name


@pytest.mark.parametrize("name", slow_but(("llama", "mixtral"), zoo.DECODERS))
def test_the_folder_is_a_checkpoint_that_is_served(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / "base")
    trainer = build(folder, mean=0.5, std=2.0)
    rows = ROWS[:4]
    trainer.train(request(rows))
    kept = saved(trainer, tmp_path / "kept")
    want = values(trainer, rows)
    np.testing.assert_array_equal(
        values(Engine(load_reward_model(ModelConfig(model=str(kept), max_batch_tokens=150))), rows), want
    )
    if name == "llama":  # the loading of a critic is that of a reward model, whatever the decoder
        again = build(kept)
        np.testing.assert_array_equal(values(again, rows), want)
        assert again.state()["step"] == 0


@pytest.mark.parametrize("kind", slow_but(("trl",), ["trlx", "trlx-critic", "trl", "openrlhf-critic", "tokcls"]))
def test_so_is_that_of_every_kind_of_head(kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path / "base", kind)
    trainer = build(folder)
    trainer.train(request(ROWS))
    kept = saved(trainer, tmp_path / "kept")
    np.testing.assert_array_equal(values(build(kept), ROWS), values(trainer, ROWS))


def test_several_attributes_are_written_as_the_one_value_that_they_became(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "base", num_labels=3)
    trainer = build(folder, attribute_weights=[0.5, -1.0, 2.0])
    kept = saved(trainer, tmp_path / "kept")
    assert load_file(kept / "model.safetensors")["score.weight"].shape == (1, zoo.HIDDEN)
    np.testing.assert_array_equal(values(build(kept), ROWS), values(trainer, ROWS))


def test_plain_transformers_reads_trunk_and_tokenizer(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "base"))
    trainer = build(folder, dtype="bfloat16")
    trainer.train(request(ROWS))
    kept = saved(trainer, tmp_path / "kept")
    trunk = AutoModel.from_pretrained(kept)
    own = dict(trainer.engine.trunk.named_parameters())
    assert all(torch.equal(p, own[name]) and p.dtype == torch.bfloat16 for name, p in trunk.named_parameters())
    texts = ["hello there", "1 + 1"]
    assert (
        AutoTokenizer.from_pretrained(kept)(texts)["input_ids"]
        == AutoTokenizer.from_pretrained(folder)(texts)["input_ids"]
    )


def test_nothing_in_it_is_a_pickle_and_others_may_read_it(kept_of_shared: Path) -> None:
    kept = kept_of_shared
    assert {path.suffix for path in kept.iterdir()} == {".safetensors", ".json", ".jinja"}
    assert {"model.safetensors", "optimizer.safetensors", "rng.safetensors", "trainer.json"} < files(kept)
    mode = (kept / "trainer.json").stat().st_mode
    assert all(path.stat().st_mode == mode for path in kept.iterdir())


def test_large_weights_are_written_in_parts(
    base: Path, shared: CriticTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 20_000)
    kept = saved(shared, tmp_path / "kept")
    assert len(list(kept.glob("model-*-of-*.safetensors"))) > 2 < len(list(kept.glob("optimizer-*.safetensors")))
    again = build(base)
    again.load(kept)
    assert same(weights(again), weights(shared))
    np.testing.assert_array_equal(values(build(kept), ROWS), values(shared, ROWS))


def test_every_file_is_on_the_disk_when_save_returns(
    shared: CriticTrainer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: dict[str, int] = {}
    fsync = os.fsync

    def watched(number: int) -> None:
        fsync(number)
        synced[Path(f"/proc/self/fd/{number}").readlink().name] = os.fstat(number).st_size

    monkeypatch.setattr(os, "fsync", watched)
    monkeypatch.setattr(tensor_files, "SHARD_BYTES", 20_000)
    kept = saved(shared, tmp_path / "kept")
    assert synced == {path.name: path.stat().st_size for path in kept.iterdir()}


def test_torchs_random_numbers_go_on(shared: CriticTrainer, tmp_path: Path) -> None:
    kept = saved(shared, tmp_path / "kept")
    want = torch.rand(3)
    shared.load(kept)
    assert torch.equal(torch.rand(3), want)


# ------------------------------------------------------------------------------------------- versions


def test_versions_name_the_step_and_after_going_back_the_load(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "base")
    trainer = build(folder, global_batch_size=100)
    base = trainer.weights_version
    seen = {base: weights(trainer)}
    first = saved(trainer, tmp_path / "first")
    for one in asked(3):
        report = trainer.train(one)
        assert report.weights_version == trainer.info.weights_version
        assert re.fullmatch(rf"{base}\+{report.step}\.[0-9a-f]{{12}}", trainer.weights_version)
        assert trainer.weights_version not in seen
        seen[trainer.weights_version] = weights(trainer)
    second = saved(trainer, tmp_path / "second")
    trainer.load(first, 1)
    for one in asked(3)[::-1]:
        trainer.train(one)
        assert trainer.weights_version not in seen
        seen[trainer.weights_version] = weights(trainer)
    third = saved(trainer, tmp_path / "third")
    # A restart goes on under the version that the weights had.
    for kept in (second, third):
        again = build(folder, global_batch_size=100)
        again.load(kept)
        assert same(weights(again), seen[again.weights_version])
    assert again.weights_version == trainer.weights_version
    assert re.fullmatch(rf"{base}\+3\.[0-9a-f]{{12}}-load1", trainer.weights_version)


@pytest.mark.slow
def test_two_critics_share_a_version_only_if_they_share_their_weights(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "base")
    one, twin, other, faster = build(folder), build(folder), build(folder), build(folder, learning_rate=2e-3)
    for trainer, seed in ((one, 0), (twin, 0), (other, 1), (faster, 0)):
        trainer.train(request(ROWS, seed=seed))
    assert same(weights(one), weights(twin)) and one.weights_version == twin.weights_version
    assert len({trainer.weights_version for trainer in (one, other, faster)}) == 3
    assert not same(weights(one), weights(other)) and not same(weights(one), weights(faster))
    # Where two began apart they stay apart, though they learn the same from there on.
    for trainer in (one, other, twin):
        trainer.train(request(ROWS, seed=2))
    assert one.weights_version == twin.weights_version != other.weights_version


def test_other_settings_from_the_same_checkpoint_on_have_versions_of_their_own(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "base")
    first = build(folder)
    first.train(request(ROWS, seed=0))
    kept, before = saved(first, tmp_path / "kept"), first.weights_version
    as_before, faster, again = build(folder), build(folder, learning_rate=2e-3), build(folder, learning_rate=2e-3)
    for trainer in (as_before, faster):
        trainer.load(kept)
        assert trainer.weights_version == before
    again.load(saved(faster, tmp_path / "saved before a step"))
    for trainer in (first, as_before, faster, again):
        trainer.train(request(ROWS, seed=1))
    assert as_before.weights_version == first.weights_version
    assert again.weights_version == faster.weights_version != as_before.weights_version
    as_before.load(saved(faster, tmp_path / "of the faster"))
    assert as_before.weights_version == faster.weights_version
    again.load(tmp_path / "of the faster")
    for trainer in (faster, again, as_before):
        trainer.train(request(ROWS, seed=2))
    assert same(weights(faster), weights(again)) and faster.weights_version == again.weights_version
    assert as_before.weights_version != faster.weights_version


def test_settings_of_the_values_are_in_the_versions_before_the_first_step_and_after_it(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "base", num_labels=2)
    settings: list[dict[str, Any]] = [
        {"attribute_weights": [1.0, w], **more} for w in (0.0, 0.5) for more in ({}, {"mean": 1.0})
    ]
    trainers = [build(folder, **some) for some in settings]
    assert len({trainer.weights_version for trainer in trainers}) == len(trainers)
    for trainer in trainers:
        trainer.train(request(ROWS, seed=0))
    assert len({trainer.weights_version for trainer in trainers}) == len(trainers)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(LearningConfig)])
def test_no_setting_of_learning_is_left_out_of_a_version(name: str) -> None:
    other = critic_trainer._settings_in_version(CriticConfig(**{name: "another"}))  # type: ignore[arg-type]
    assert (other == critic_trainer._settings_in_version(CriticConfig())) is (name == "activation_checkpointing")


# ------------------------------------------------------------------------------------------- refusals


@contextmanager
def no_file_beyond(size: int) -> Iterator[None]:
    """As on a disk that is full after so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("size", [100, 20_000, 200_000])
def test_a_full_disk_is_told_and_changes_nothing(size: int, shared: CriticTrainer, tmp_path: Path) -> None:
    before = weights(shared)
    (tmp_path / "full").mkdir()
    with no_file_beyond(size), pytest.raises(StorageFailed, match=r"cannot write .*full/"):
        shared.save(tmp_path / "full")
    assert same(weights(shared), before)
    assert shared.train(request(ROWS), 1).num_steps == 1
    saved(shared, tmp_path / "kept")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def drop_tensor(path: Path) -> None:
    tensors = load_file(path)
    tensors.popitem()
    save_file(tensors, path)


DAMAGE: dict[str, tuple[str, Any]] = {
    "no weights": ("model.safetensors", Path.unlink),
    "no optimiser": ("optimizer.safetensors", Path.unlink),
    "no trainer": ("trainer.json", Path.unlink),
    "weights cut": ("model.safetensors", cut),
    "optimiser cut": ("optimizer.safetensors", cut),
    "random numbers cut": ("rng.safetensors", cut),
    "trainer cut": ("trainer.json", cut),
    "trainer a list": ("trainer.json", lambda path: path.write_text("[]")),
    "a weight less": ("model.safetensors", drop_tensor),
    "a state less": ("optimizer.safetensors", drop_tensor),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_refused_and_changes_nothing(
    damage: str, shared: CriticTrainer, kept_of_shared: Path, tmp_path: Path
) -> None:
    kept = Path(shutil.copytree(kept_of_shared, tmp_path / "kept"))
    trainer, report = shared, shared.train(request(ROWS, seed=1), 1)
    before, version = weights(trainer), trainer.weights_version
    name, harm = DAMAGE[damage]
    harm(kept / name)
    with pytest.raises(CheckpointError, match="kept") as caught:
        trainer.load(kept)
    assert caught.value.help
    assert same(weights(trainer), before)
    assert (trainer.weights_version, trainer.state()["step"]) == (version, report.step)


@pytest.mark.parametrize(
    ("made", "runs", "what"),
    [
        ({}, {"dtype": "bfloat16"}, "dtype float32"),
        ({}, {"lora": 2}, "lora None"),
        ({"lora": 4}, {"lora": 2}, "lora 4"),
        ({"lora": 4}, {"lora": 4, "lora_alpha": 8.0}, "lora_alpha 32"),
        ({}, {"optimizer": "adamw_8bit"}, "optimizer adamw,"),
        ({"lora": 4}, {"lora": 4, "lora_targets": ".*q_proj"}, "lora_targets all-linear"),
        ({}, {"mean": 0.5}, r"kept belongs to a critic with another standardisation, mean 0.0, this run has 0.5"),
        ({"std": 2.0}, {}, r"kept belongs to a critic with another standardisation, std 2.0, this run has 1.0"),
    ],
)
def test_other_settings_are_named(
    made: Any, runs: Any, what: str, base: Path, kept_of_shared: Path, tmp_path: Path
) -> None:
    if "optimizer" in runs:
        pytest.importorskip("bitsandbytes")
    kept = saved(build(base, **made), tmp_path / "kept") if made else kept_of_shared
    with pytest.raises(CheckpointError, match=what):
        build(base, **runs).load(kept)


def test_another_model_is_named(kept_of_shared: Path, tmp_path: Path) -> None:
    kept = kept_of_shared
    wider = build(zoo.checkpoint("llama", tmp_path / "wider", intermediate_size=96))
    with pytest.raises(CheckpointError, match="belongs to a critic of another model"):
        wider.load(kept)


@pytest.mark.parametrize("settings", [{}, {"lora": 4}], ids=["all weights", "lora"])
def test_a_model_of_the_same_shape_with_other_weights_is_another(settings: Any, tmp_path: Path) -> None:
    kept = saved(build(zoo.checkpoint("llama", tmp_path / "base"), **settings), tmp_path / "kept")
    other = build(zoo.checkpoint("llama", tmp_path / "other", seed=5), **settings)
    before = weights(other)
    with pytest.raises(CheckpointError, match="kept belongs to a critic of another model, weights") as caught:
        other.load(kept)
    assert "another checkpoint_dir" in caught.value.help
    assert same(weights(other), before)


def test_the_trainers_file_is_for_people_too(shared: CriticTrainer, tmp_path: Path) -> None:
    trainer = shared
    facts = json.loads((saved(trainer, tmp_path / "kept") / "trainer.json").read_text())
    assert facts["step"] == trainer.state()["step"] >= 3 and facts["weights_version"] == trainer.weights_version
    assert facts["learning_rate"] == trainer.state()["learning_rate"]
