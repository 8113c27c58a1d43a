"""Loading: whoever saved the checkpoint, trunk, head and rules give what plain transformers gives."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import zoo
from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint import stored
from guerdon.engine.checkpoint.reward_models import LoadedModel, load_reward_model
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import ModelConfig
from tiers import slow_but

ROWS = [row for row in zoo.rows() if len(row) > 1][-4:]


def load(folder: Path, **settings: Any) -> LoadedModel:
    return load_reward_model(ModelConfig(model=str(folder), **settings))


def score(loaded: LoadedModel, rows: list[np.ndarray], **more: Any) -> list[Score]:
    engine = Engine(loaded)
    scores = engine.score([Sequence(row, **more) for row in rows])
    engine.use("single")  # the trunk may be asked again
    return scores


def assert_equals_reference(scores: list[Score], reference: np.ndarray) -> None:
    np.testing.assert_allclose([s.reward for s in scores], reference, atol=1e-4 * reference.std(), rtol=0)


@pytest.mark.parametrize("kind", ["trlx", "trlx-critic", "trl", "openrlhf", "openrlhf-critic"])
@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gpt-neox", "gptj", "gpt2"]))
def test_value_heads_of_every_library(name: str, kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path, kind)
    loaded = load(folder)
    scores = score(loaded, ROWS)
    assert_equals_reference(scores, zoo.reference(folder, ROWS))
    assert loaded.info.kind == "value-head"
    if kind in ("trlx", "openrlhf"):
        assert loaded.info.outputs == ("rewards",)
        return
    assert loaded.info.outputs == ("rewards", "values")
    zoo.assert_values([made.values for made in scores], folder, ROWS)


@pytest.mark.parametrize(
    "name", slow_but(("llama", "bert"), ["llama", "qwen2", "gpt2", "bert", "roberta", "modernbert", "deberta-v2"])
)
def test_token_classification_with_one_label_gives_values(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path, "tokcls")
    loaded, rows = load(folder, max_batch_tokens=150), zoo.rows()
    assert (loaded.info.kind, loaded.info.outputs) == ("token-classification", ("rewards", "values"))
    scores = score(loaded, rows)
    zoo.assert_values([made.values for made in scores], folder, rows)
    assert all(made.reward == made.values[-1] for made in scores)


@pytest.mark.parametrize("name", ["llama", "qwen2", "deberta-v2"])
def test_token_classification_with_two_labels_rewards_steps(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path, "tokcls", num_labels=2)
    loaded = load(folder, step_reduction="last")
    assert (loaded.info.kind, loaded.info.outputs) == ("process-reward", ("rewards", "step_rewards"))
    assert loaded.info.attribute_names == ()
    steps = np.array([3, 0, 7])
    for made, logits in zip(
        score(loaded, ROWS, steps=steps), zoo.reference_tokens(folder, ROWS, torch.float32), strict=True
    ):
        expected = np.exp(logits[:, 1]) / np.exp(logits).sum(axis=1)
        np.testing.assert_allclose(made.steps, expected[steps], atol=1e-5)
        assert made.reward == pytest.approx(expected[7], abs=1e-5)


def test_step_separators_are_trls_qwens_or_the_settings(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("qwen2", tmp_path, "tokcls", num_labels=2))
    encoder = load(folder).encoder
    assert load(folder).head.steps.separator == "<extra_0>"
    named = load(folder, step_separator="\n").head.steps
    assert named.separator_ids == encoder.separator_ids("\n")
    (tokens,) = encoder.encode(["ab\nxyz\nc"])
    assert Sequence(tokens).step_ends(named.separator_ids).tolist() == [2, 6]


@pytest.mark.parametrize(("name", "value"), [("step_separator", "<step>"), ("step_reduction", "mean")])
def test_settings_of_steps_of_a_model_without_steps_are_refused(tmp_path: Path, name: str, value: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is '{value}', and this checkpoint gives no step rewards"):
        load(zoo.checkpoint("qwen2", tmp_path), **{name: value})


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_several_labels_are_attributes_with_their_names(name: str, tmp_path: Path) -> None:
    labels = {0: "helpfulness", 1: "verbosity", 2: "safety"}
    folder = zoo.checkpoint(name, tmp_path, id2label=labels, num_labels=3)
    loaded = load(folder, attribute_weights=[1.0, -0.5, 0.0], mean=0.25, std=2.0)
    assert loaded.info.outputs == ("rewards", "attributes")
    assert loaded.info.attribute_names == ("helpfulness", "verbosity", "safety")
    for trained, activation in ((None, "fitting"), ("multi_label_classification", "sigmoid"), ("regression", "none")):
        zoo.configure(tmp_path, problem_type=trained)
        assert load_reward_model(ModelConfig(model=str(tmp_path))).info.activation == activation
    zoo.configure(tmp_path, problem_type="single_label_classification")
    with pytest.raises(ConfigError, match="chooses one of the labels helpfulness, verbosity, safety"):
        load(folder)
    assert load(folder, attribute_weights=[1.0, -1.0, 0.0]).info.activation == "fitting"
    expected = zoo.reference_outputs(folder, ROWS)
    for made, outputs in zip(score(loaded, ROWS), expected, strict=True):
        np.testing.assert_allclose(made.attributes, outputs, atol=2e-5)
        assert made.reward == pytest.approx((outputs[0] - 0.5 * outputs[1] - 0.25) / 2, abs=2e-5)


def test_a_mean_of_labels_is_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = zoo.checkpoint("llama", tmp_path, id2label={0: "bad", 1: "good"}, num_labels=2)
    for trained, weights, is_told in (
        (None, None, True), ("multi_label_classification", None, True),
        ("regression", None, False), (None, [-1.0, 1.0], False),
    ):  # fmt: skip
        caplog.clear()
        load(zoo.configure(folder, problem_type=trained), attribute_weights=weights)
        assert ("the plain mean of bad, good" in caplog.text) == is_told


@pytest.mark.parametrize(
    ("written", "activation"),
    [
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, "none"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"}, "sigmoid"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Tanh"}}, "Tanh"),
        ({"sentence_transformers": {"version": "5.0"}, "problem_type": "regression"}, "none"),
    ],
)
def test_a_cross_encoder_has_the_activation_that_it_names(
    written: dict[str, Any], activation: str, tmp_path: Path
) -> None:
    folder = zoo.configure(zoo.checkpoint("bert", tmp_path), **written)
    assert load(folder).info.activation == activation


def test_modernbert_pools_as_its_config_says_unless_told_otherwise(tmp_path: Path) -> None:
    folder = zoo.checkpoint("modernbert", tmp_path, classifier_pooling="mean")
    loaded = load(folder)
    assert loaded.head.pooling == "mean"
    assert_equals_reference(score(loaded, ROWS), zoo.reference(folder, ROWS))
    assert load(folder, pooling="first").head.pooling == "first"


def test_openrlhfs_own_head_name_and_its_standardisation(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path, "openrlhf", value_head_prefix="reward_head")
    reference = zoo.reference(folder, ROWS)
    # Every checkpoint it evaluated has these two; its server uses them when told to normalise.
    zoo.configure(folder, mean=0.5, std=4.0)
    assert_equals_reference(score(load(folder), ROWS), reference)
    zoo.configure(folder, normalize_reward=True)
    assert_equals_reference(score(load(folder), ROWS), (reference - 0.5) / 4)
    assert_equals_reference(score(load(folder, mean=0.0, std=1.0), ROWS), reference)


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_the_head_stays_in_float32_with_all_its_digits(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    loaded = load(folder, dtype="bfloat16")
    assert {p.dtype for p in loaded.trunk.parameters()} == {torch.bfloat16}
    in_file = zoo.tensors(folder)
    own = [p for n, p in in_file.items() if n.startswith(("score", "classifier", "bert.pooler"))]
    held = list(loaded.head.parameters())
    assert {p.dtype for p in held} == {torch.float32}
    assert sorted(p.double().sum().item() for p in held) == sorted(p.double().sum().item() for p in own)
    reference, half = zoo.reference(folder, ROWS), zoo.reference(folder, ROWS, torch.bfloat16)
    made = np.array([s.reward for s in score(loaded, ROWS)])
    assert np.abs(made - reference).max() <= 1.5 * np.abs(half - reference).max()


def test_shards_and_other_file_names_are_read(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    reference = zoo.reference(folder, ROWS)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = sorted(state)
    weight_map = {n: f"model-{i % 2 + 1:05}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: state[n] for n in names if weight_map[n] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    assert_equals_reference(score(load(folder), ROWS), reference)
    for file in folder.glob("model*"):
        file.unlink()
    torch.save(state, folder / "hf_ckpt.pt")
    torch.save({"not": "weights"}, folder / "optimizer.pt")
    assert_equals_reference(score(load(folder), ROWS), reference)


def test_leftovers_of_language_models_are_no_reason_to_refuse(tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path)
    reference = zoo.reference(folder, ROWS)
    extra = {"lm_head.weight": torch.zeros(3, 3), "transformer.h.0.attn.masked_bias": torch.tensor(-1e4)}
    save_file(load_file(folder / "model.safetensors") | extra, folder / "model.safetensors")
    assert_equals_reference(score(load(folder), ROWS), reference)


def test_the_version_follows_every_byte(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path, hidden_size=256, intermediate_size=1024)
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    assert len(data) > 5 << 20
    before = open_checkpoint(str(folder))
    versions = {before.version}
    for at in (1 << 20, len(data) // 2, len(data) - (1 << 20) - 1):
        data[at] ^= 1
        path.write_bytes(data)
        after = open_checkpoint(str(folder))
        assert after.sample == before.sample  # which is of the first and the last MiB here
        versions.add(after.version)
    assert len(versions) == 4


def test_the_version_follows_the_weights(tmp_path: Path) -> None:
    first = load(zoo.checkpoint("gpt2", tmp_path / "a")).info.weights_version
    again = load(zoo.checkpoint("gpt2", tmp_path / "b")).info.weights_version
    other = load_reward_model(
        ModelConfig(model=str(zoo.checkpoint("gpt2", tmp_path / "c", seed=1)))
    ).info.weights_version
    assert first == again != other
    assert len(first) == 16


@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "chat_template.jinja"])
def test_the_version_follows_all_that_makes_a_score(file: str, tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("gpt2", tmp_path))
    before = open_checkpoint(str(folder)).version
    path = folder / file
    path.write_text(path.read_text() + " ")
    settings = json.loads((folder / "config.json").read_text())
    if file == "config.json":
        assert open_checkpoint(str(folder)).version == before  # how it is written is of no weight
        path.write_text(json.dumps(settings | {"_name_or_path": "elsewhere"}))
        assert open_checkpoint(str(folder)).version == before
        path.write_text(json.dumps(settings | {"normalize_reward": True, "mean": 1.0}))
    assert open_checkpoint(str(folder)).version != before


@pytest.mark.parametrize("what", ["before the first is mapped", "between the two"])
def test_shards_that_take_each_others_place_amid_a_load_are_no_model(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [zoo.checkpoint("gpt2", tmp_path / str(seed), seed=seed) for seed in (0, 1)]
    for folder in folders:
        tensors = load_file(folder / "model.safetensors")
        names = sorted(tensors)
        (folder / "model.safetensors").unlink()
        shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
        for shard, own in shards.items():
            save_file({name: tensors[name] for name in own}, folder / shard)
        index = {"weight_map": {name: shard for shard, own in shards.items() for name in own}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    open_file, num_opened = stored.open_safetensors, 0

    def opened(path: Path) -> Any:
        nonlocal num_opened
        num_opened += 1
        if num_opened == 1 + (what == "between the two"):
            for shard in ("a.safetensors", "b.safetensors"):
                (folders[1] / shard).rename(folders[0] / shard)
        return open_file(path)

    monkeypatch.setattr(stored, "open_safetensors", opened)
    with pytest.raises(CheckpointError, match="written to while they were read"):
        load(folders[0])


def test_shards_elsewhere_are_not_read(tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path / "own")
    (folder / "model.safetensors").rename(tmp_path / "model.safetensors")
    for name in ("../model.safetensors", str(tmp_path / "model.safetensors")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"score.weight": name}}))
        with pytest.raises(CheckpointError, match=r"index\.json is malformed"):
            load(folder)


@pytest.mark.parametrize(("kind", "file"), [("seqcls", "model.safetensors"), ("trlx", "pytorch_model.bin")])
def test_a_served_model_does_not_change_when_its_files_are_overwritten(kind: str, file: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path, kind)
    loaded = load(folder)
    before = [s.reward for s in score(loaded, ROWS)]
    size = (folder / file).stat().st_size
    with (folder / file).open("r+b") as opened:
        opened.seek(size // 2)
        opened.write(b"\x11" * (size // 4))
    assert [s.reward for s in score(loaded, ROWS)] == before


def test_text_needs_a_tokenizer_and_messages_a_template(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    bare = load(folder)
    assert bare.encoder is None
    assert (bare.info.takes_text, bare.info.takes_messages, bare.info.takes_tokens) == (False, False, True)
    zoo.tokenizer(folder)
    loaded = load(folder)
    assert (loaded.info.takes_text, loaded.info.takes_messages) == (True, True)
    assert (loaded.info.eos_token_id, loaded.pad_token_id) == (zoo.EOS, zoo.PAD)
    zoo.tokenizer(folder, chat_template=None)
    for stale in folder.glob("chat_template*"):
        stale.unlink()
    assert not load(folder).info.takes_messages


def test_max_length_is_the_models_own_or_the_settings(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    assert load(folder, max_length=100).info.max_length == 100
    # Rotary positions have no end, a table has one (see the errors).
    assert load(folder, max_length=1000).info.max_length == 1000
