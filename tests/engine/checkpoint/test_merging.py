"""Adapters served by merging: the same numbers as of peft's unmerged model, one sequence at a time."""

import dataclasses
import functools
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification

import zoo
from guerdon import cli
from guerdon.core import Sequence
from guerdon.engine.checkpoint import placement, stored
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError, Exit, TooLarge
from guerdon.settings.config import LanguageModelConfig, ModelConfig, TeacherConfig
from light_peft import import_bitsandbytes
from tiers import slow_but

import_bitsandbytes()
peft = pytest.importorskip("peft")

pytestmark = pytest.mark.filterwarnings("ignore")
ROWS = zoo.rows(1, ((20, 2), (9, 1)))
CLASSES = {
    "SEQ_CLS": AutoModelForSequenceClassification,
    "TOKEN_CLS": AutoModelForTokenClassification,
    "CAUSAL_LM": AutoModelForCausalLM,
}


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "lora_alpha": 8, "task_type": "SEQ_CLS", **settings})


def adapted(base: Path, config: Any, *, resize: int | None = None, **settings: Any) -> Any:
    """The base model with random adapters, unmerged, as a trainer has it."""
    torch.manual_seed(0)
    labels = {} if config.task_type == "CAUSAL_LM" else {"num_labels": 1}
    model = CLASSES[config.task_type].from_pretrained(base, attn_implementation="eager", **labels, **settings)
    if resize is not None:
        model.resize_token_embeddings(resize)
    model = peft.get_peft_model(model.eval(), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    return model.eval()


@torch.no_grad()
def outputs(model: Any, rows: list[np.ndarray] = ROWS) -> list[np.ndarray]:
    """Logits of each sequence by itself."""
    return [model(input_ids=torch.from_numpy(row)[None]).logits[0].float().numpy() for row in rows]


def rewards(folder: Path, rows: list[np.ndarray] = ROWS, **settings: Any) -> np.ndarray:
    engine = Engine(load_reward_model(ModelConfig(model=str(folder), **settings)))
    return np.array([score.reward for score in engine.score([Sequence(row) for row in rows])])


def logprobs(folder: Path, rows: list[np.ndarray] = ROWS) -> list[np.ndarray]:
    """A teacher's log-probs of the tokens after the first."""
    engine = TeacherEngine(load_policy(TeacherConfig(model=str(folder))))
    return [score.answer.logprobs for score in engine.score([Sequence(row) for row in rows])]


def expected_logprobs(model: Any, rows: list[np.ndarray] = ROWS) -> list[np.ndarray]:
    return [
        torch.log_softmax(torch.from_numpy(logits), -1)[range(len(row) - 1), row[1:]].numpy()
        for row, logits in zip(rows, outputs(model, rows), strict=True)
    ]


def refused(folder: Path | str, load: Callable[[str], object] | None = None) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        (load or (lambda model: load_reward_model(ModelConfig(model=model))))(str(folder))
    assert caught.value.help and "\n" not in f"{caught.value}{caught.value.help}"
    return caught.value


def policy(model: str) -> object:
    return load_policy(LanguageModelConfig(model=model))


# ------------------------------------------------------------------------------------------------ rewards

ADAPTERS = {
    "all layers": ("llama", lora(target_modules="all-linear")),
    "Conv1D": ("gpt2", lora(target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)),
    "encoder": ("bert", lora(target_modules="all-linear")),
    "experts": ("mixtral", lora(target_modules=["q_proj"], target_parameters=["mlp.experts.gate_up_proj"])),
    "rsLoRA": ("llama", lora(use_rslora=True)),
    "DoRA": ("llama", lora(use_dora=True)),
    "DoRA of Conv1D": ("gpt2", lora(use_dora=True, target_modules=["c_attn"], fan_in_fan_out=True)),
    "patterns": (
        "llama",
        lora(
            target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"q_proj": 2}, alpha_pattern={"v_proj": 32}
        ),
    ),
    "all biases": ("qwen2", lora(bias="all")),
    "biases of LoRA": ("qwen2", lora(bias="lora_only")),
    "all biases of an encoder": ("bert", lora(target_modules=["query"], bias="all")),
    "a bias in B": ("qwen2", lora(lora_bias=True)),
    "embeddings by LoRA": ("llama", lora(target_modules=["embed_tokens", "q_proj"])),
    "embeddings in whole": ("llama", lora(modules_to_save=["score", "embed_tokens"])),
    "some tokens": ("llama", lora(trainable_token_indices=[5, 6])),
    "one layer": ("llama", lora(layers_to_transform=[1], layers_pattern="layers")),
    "a base that PiSSA changes": ("llama", lora(init_lora_weights="pissa")),
    "IA3": ("llama", peft.IA3Config(task_type="SEQ_CLS", target_modules=["v_proj"], feedforward_modules=[])),
}


@pytest.mark.parametrize(
    "name",
    slow_but(
        ("all layers", "Conv1D", "encoder", "some tokens"),
        ADAPTERS,
    ),
)
def test_rewards_are_those_of_the_unmerged_model(name: str, tmp_path: Path) -> None:
    architecture, config = ADAPTERS[name]
    encoder = architecture in zoo.ENCODERS
    base = (zoo.checkpoint if encoder else zoo.language_model)(architecture, tmp_path / "base")
    model = adapted(base, config)
    model.save_pretrained(tmp_path / "adapter")
    want = np.concatenate(outputs(model)).ravel()
    assert np.ptp(want) > 0.1
    np.testing.assert_allclose(rewards(tmp_path / "adapter"), want, atol=1e-5)


@pytest.mark.parametrize("size", slow_but((310,), [290, 310]))
@pytest.mark.parametrize("tied", slow_but((False,), [False, True]))
@pytest.mark.parametrize("how", slow_but(("in whole", "tokens"), ["as it is", "in whole", "by LoRA", "tokens"]))
def test_another_number_of_tokens(how: str, tied: bool, size: int, tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base", tie_word_embeddings=tied)
    ways: dict[str, dict[str, Any]] = {
        "as it is": {},
        "in whole": {"modules_to_save": ["embed_tokens"]},
        "by LoRA": {"target_modules": ["embed_tokens", "q_proj"]},
        "tokens": {"trainable_token_indices": [5, size - 1]},
    }
    model = adapted(base, lora(**ways[how]), resize=size)
    model.save_pretrained(tmp_path / "adapter")
    rows = [row.clip(max=size - 1) for row in ROWS] + [np.array([7, size - 1, size - 2])]
    want = np.concatenate(outputs(model, rows)).ravel()
    np.testing.assert_allclose(rewards(tmp_path / "adapter", rows), want, atol=1e-5)
    assert load_reward_model(ModelConfig(model=str(tmp_path / "adapter"))).info.vocab_size == size


@pytest.mark.parametrize("architecture", slow_but(("llama",), ["llama", "bert"]))
def test_a_process_reward_model(architecture: str, tmp_path: Path) -> None:
    encoder = architecture == "bert"
    base = (zoo.checkpoint if encoder else zoo.language_model)(architecture, tmp_path / "base")
    model = adapted(base, lora(task_type="TOKEN_CLS", target_modules=["query", "q_proj", "v_proj"]))
    model.save_pretrained(tmp_path / "adapter")
    engine = Engine(load_reward_model(ModelConfig(model=str(tmp_path / "adapter"))))
    for score, want in zip(engine.score([Sequence(row) for row in ROWS]), outputs(model), strict=True):
        np.testing.assert_allclose(score.values, want[:, 0], atol=1e-5)


def test_an_adapter_of_a_reward_model_keeps_its_head_and_its_rule(tmp_path: Path) -> None:
    base = zoo.checkpoint("llama", tmp_path / "base", num_labels=3)
    model = peft.get_peft_model(
        AutoModelForSequenceClassification.from_pretrained(base).eval(),
        lora(task_type=None, target_modules="all-linear"),
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
    model.save_pretrained(tmp_path / "adapter")
    want = np.stack(outputs(model)).mean(axis=1)
    np.testing.assert_allclose(rewards(tmp_path / "adapter"), want, atol=1e-5)


@pytest.mark.slow
def test_a_half_precision_base_is_merged_in_float32(tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base")
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    model = adapted(base, lora(target_modules="all-linear"), dtype=torch.float32)
    model.save_pretrained(tmp_path / "adapter")
    want = np.concatenate(outputs(model)).ravel()
    np.testing.assert_allclose(rewards(tmp_path / "adapter", dtype="float32"), want, atol=1e-5)
    got = rewards(tmp_path / "adapter", dtype="bfloat16")
    np.testing.assert_allclose(got, want, atol=0.1)
    assert np.abs(got - want).max() > 1e-4


def test_the_padding_token_of_the_adapters_tokenizer_counts(tmp_path: Path) -> None:
    """TRL reads a reward before its tokenizer's padding token, which it makes EOS where there is none."""
    base = zoo.language_model("llama", tmp_path / "base", pad_token_id=None)
    model = adapted(base, lora())
    model.save_pretrained(tmp_path / "adapter")
    rows = [np.append(row, zoo.EOS) for row in ROWS]
    np.testing.assert_allclose(rewards(tmp_path / "adapter", rows), np.ravel(outputs(model, rows)), atol=1e-5)
    zoo.tokenizer(tmp_path / "adapter")
    zoo.configure(tmp_path / "adapter", "tokenizer_config.json", pad_token="</s>")
    model.config.pad_token_id = zoo.EOS
    want = np.ravel(outputs(model, rows))
    np.testing.assert_allclose(rewards(tmp_path / "adapter", rows), want, atol=1e-5)
    np.testing.assert_allclose(want, np.ravel(outputs(model, ROWS)), atol=1e-5)  # it was read before the EOS


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_every_kind_that_peft_knows_is_merged_right_or_refused(tmp_path: Path) -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    base = zoo.language_model("llama", tmp_path / "base")
    own: dict[str, dict[str, Any]] = {
        "IA3": {"feedforward_modules": []},
        "OFT": {"oft_block_size": 4, "r": 0},
        "LN_TUNING": {"target_modules": ["input_layernorm", "norm"]},
        "TRAINABLE_TOKENS": {"target_modules": ["embed_tokens"]},
        "C3A": {"block_size": 4},
        "ROAD": {"group_size": 4},
        "CPT": {"task_type": "CAUSAL_LM"},
        "ADAPTION_PROMPT": {"task_type": "CAUSAL_LM", "target_modules": "self_attn"},
    }
    usual = {
        "target_modules": ["q_proj", "v_proj"], "r": 4, "total_step": 10, "num_virtual_tokens": 4, "vector_length": 4,
        "num_vectors": 8, "rank": 4, "adapter_len": 2, "adapter_layers": 1, "token_dim": 32, "num_layers": 2,
        "num_attention_heads": 4, "token_indices": [5, 6], "num_tasks": 1, "cpt_token_ids": [5, 6, 7],
        "n_frequency": 16, "boft_block_size": 4, "init_weights": False,
    }  # fmt: skip
    merged, unmerged, untried = {}, {}, {}
    for kind, config_class in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        folder, fields = tmp_path / kind.value, {field.name for field in dataclasses.fields(config_class)}
        settings = {name: value for name, value in usual.items() if name in fields} | own.get(kind.value, {})
        try:
            model = adapted(base, config_class(**{"task_type": "SEQ_CLS", **settings}))
            model.save_pretrained(folder)
        except Exception as e:  # it needs data, another library, or another model
            untried[kind.value] = f"{type(e).__name__}: {e}"
            continue
        try:
            if model.peft_config["default"].task_type == "CAUSAL_LM":
                refused(folder, policy)
            got = rewards(folder)
        except CheckpointError as e:
            unmerged[kind.value] = str(e)
            continue
        want = np.concatenate(outputs(model)).ravel()
        merged[kind.value] = np.abs(got - want).max() / want.std()
    print(json.dumps([merged, unmerged, untried], indent=1, default=float))
    assert all(difference < 1e-4 for difference in merged.values()), merged
    for kind in ("PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING"):
        assert f"of the kind {kind}, which adds to the input" in unmerged[kind]
    assert {"LORA", "ADALORA", "LOHA", "LOKR", "OFT", "BOFT", "VERA", "IA3", "HRA", "FOURIERFT"} <= merged.keys()


# ------------------------------------------------------------------------------------------------ language models

LANGUAGE_ADAPTERS = {
    "all layers": {"target_modules": "all-linear"},
    "the output layer": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "both embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    "the input's alone": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "some tokens": {"target_modules": ["q_proj"], "trainable_token_indices": [5, 6]},
    "DoRA": {"target_modules": "all-linear", "use_dora": True},
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", slow_but(("all layers", "the input's alone"), LANGUAGE_ADAPTERS))
def test_log_probs_are_those_of_the_unmerged_model(name: str, tied: bool, tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base", tie_word_embeddings=tied)
    adapted(base, lora(task_type="CAUSAL_LM", **LANGUAGE_ADAPTERS[name])).save_pretrained(tmp_path / "adapter")
    fresh = AutoModelForCausalLM.from_pretrained(base, attn_implementation="eager")
    model = peft.PeftModel.from_pretrained(fresh, tmp_path / "adapter").eval()
    for got, want in zip(logprobs(tmp_path / "adapter"), expected_logprobs(model), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("tied", slow_but((True,), [False, True]))
def test_a_language_model_with_more_tokens(tied: bool, tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base", tie_word_embeddings=tied)
    model = adapted(base, lora(task_type="CAUSAL_LM"), resize=310)
    model.save_pretrained(tmp_path / "adapter")
    rows = [*ROWS, np.array([305, 309, 4, 301])]
    for got, want in zip(logprobs(tmp_path / "adapter", rows), expected_logprobs(model, rows), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


def test_llama_factorys_head_beside_an_adapter(tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base")
    model = adapted(base, lora(task_type="CAUSAL_LM"))
    model.save_pretrained(tmp_path / "adapter")
    head = torch.nn.Linear(zoo.HIDDEN, 1)
    save_file({f"v_head.summary.{n}": t for n, t in head.state_dict().items()}, tmp_path / "adapter" / stored.HEAD_FILE)
    states = [model(torch.from_numpy(row)[None], output_hidden_states=True).hidden_states[-1] for row in ROWS]
    want = [head(hidden[0, -1]).item() for hidden in states]
    np.testing.assert_allclose(rewards(tmp_path / "adapter"), want, atol=1e-5)
    assert len(logprobs(tmp_path / "adapter")) == len(ROWS)  # a teacher leaves it out


@pytest.mark.slow
def test_an_adapter_on_an_adapter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # a `../base` beside the working directory would come first
    base = zoo.language_model("llama", tmp_path / "base")
    adapted(base, lora(task_type="CAUSAL_LM")).save_pretrained(tmp_path / "sft")
    configure(tmp_path / "sft", base_model_name_or_path="../base")
    first = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), tmp_path / "sft")
    first.merge_and_unload().save_pretrained(tmp_path / "merged")
    model = adapted(tmp_path / "merged", lora(target_modules="all-linear"))
    model.save_pretrained(tmp_path / "rm")
    want = np.concatenate(outputs(model)).ravel()
    np.testing.assert_allclose(rewards(tmp_path / "rm", base=str(tmp_path / "sft")), want, atol=1e-5)


# ------------------------------------------------------------------------------------------------ where the base is


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a LoRA reward model and its base."""
    folder = tmp_path_factory.mktemp("saved")
    base = zoo.tokenizer(zoo.language_model("llama", folder / "base"))
    adapted(base, lora()).save_pretrained(folder / "adapter")
    return folder


@pytest.fixture
def adapter(saved: Path, tmp_path: Path) -> Path:
    """A copy of that adapter beside its base."""
    shutil.copytree(saved, tmp_path, dirs_exist_ok=True)
    return configure(tmp_path / "adapter", base_model_name_or_path=str(tmp_path / "base"))


configure = functools.partial(zoo.configure, file="adapter_config.json")


def test_the_base_is_found_by_the_adapters_file_or_given(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    want = rewards(adapter)
    base = adapter.parent / "base"
    moved = base.rename(adapter.parent / "moved")
    error = refused(adapter)
    assert (
        "the base model of the adapter" in str(error) and f"no folder {base}" in str(error) and "--base" in error.help
    )
    np.testing.assert_array_equal(rewards(adapter, base=str(moved)), want)
    np.testing.assert_array_equal(rewards(configure(adapter, base_model_name_or_path="../moved")), want)
    monkeypatch.chdir(adapter.parent)
    np.testing.assert_array_equal(rewards(configure(adapter, base_model_name_or_path="moved")), want)
    assert "names no base model" in str(refused(configure(adapter, base_model_name_or_path=None)))
    error = refused(moved, lambda model: load_reward_model(ModelConfig(model=model, base=str(moved))))
    assert "is no adapter" in str(error)


def test_adapters_in_a_circle(adapter: Path) -> None:
    other = adapter.with_name("other")
    shutil.copytree(adapter, other)
    configure(other, base_model_name_or_path=str(adapter))
    assert "is its own base model" in str(refused(configure(adapter, base_model_name_or_path=str(other))))
    assert "is its own base model" in str(refused(configure(adapter, base_model_name_or_path=str(adapter))))


def test_the_tokenizer_is_the_adapters_own_or_the_bases(adapter: Path) -> None:
    assert load_reward_model(ModelConfig(model=str(adapter))).info.takes_messages
    zoo.tokenizer(adapter, chat_template=None)
    assert not load_reward_model(ModelConfig(model=str(adapter))).info.takes_messages


def test_the_version_is_of_base_and_adapter(adapter: Path) -> None:
    def version() -> str:
        checkpoint = open_checkpoint(str(adapter))
        checkpoint.check_unchanged()
        return checkpoint.version

    first = version()
    shutil.copytree(adapter.parent / "base", adapter.parent / "elsewhere")
    configure(adapter, base_model_name_or_path=str(adapter.parent / "elsewhere"))
    assert version() == first  # where it is, is of no weight
    configure(adapter, lora_alpha=16)
    other = version()
    for folder, file in ((adapter, "adapter_model"), (adapter.parent / "elsewhere", "model")):
        path = folder / f"{file}.safetensors"
        state = load_file(path)
        state[sorted(state)[-1]] += 1
        save_file(state, path)
        assert version() not in (first, other)
        other = version()
    zoo.tokenizer(adapter, chat_template=None)
    assert version() not in (first, other)


def test_a_file_that_changes_while_it_is_read_is_noticed(adapter: Path) -> None:
    for path in (adapter / "adapter_model.safetensors", adapter.parent / "base" / "model.safetensors"):
        checkpoint = open_checkpoint(str(adapter))
        checkpoint.start_hashing()
        path.write_bytes(path.read_bytes())
        with pytest.raises(CheckpointError, match="written to while they were read"):
            checkpoint.check_unchanged()


@pytest.mark.slow
def test_an_older_bin_file(adapter: Path) -> None:
    want = rewards(adapter)
    torch.save(load_file(adapter / "adapter_model.safetensors"), adapter / "adapter_model.bin")
    (adapter / "adapter_model.safetensors").unlink()
    np.testing.assert_array_equal(rewards(adapter), want)


def test_what_it_is_served_as(adapter: Path) -> None:
    critic = load_critic(ModelConfig(model=str(adapter)))
    assert critic.info.outputs == ("values",) and critic.origin.adapter.startswith("LORA, rank 4 of ")
    error = refused(adapter, policy)
    assert "is the adapter of a reward model (SEQ_CLS)" in str(error) and "serve-critic" in error.help


# ------------------------------------------------------------------------------------------------ what does not fit


@pytest.mark.parametrize("task", ["CAUSAL_LM", "SEQ_2_SEQ_LM", "QUESTION_ANS", "FEATURE_EXTRACTION"])
def test_an_adapter_for_another_task(adapter: Path, task: str) -> None:
    error = refused(configure(adapter, task_type=task))
    if task == "CAUSAL_LM":
        assert "a causal language model (CAUSAL_LM)" in str(error) and "serve-teacher or serve-judge" in error.help
    else:
        assert f"is an adapter for {task}, which is not served" in str(error) and "SEQ_CLS" in error.help


@pytest.mark.parametrize(
    ("architecture", "overrides", "what"),
    [
        ("llama", {"hidden_size": 64, "head_dim": 16}, "score.weight has shape"),
        ("llama", {"num_hidden_layers": 1}, "holds model.layers.1."),
        ("llama", {"num_hidden_layers": 3}, "lacks model.layers.2."),
        ("llama", {"vocab_size": 200}, None),  # nothing of this adapter depends on the number of tokens
        ("gpt2", {}, ""),
        *(pytest.param(name, {}, "", marks=pytest.mark.slow) for name in ("bert", "phi3")),
    ],
)
def test_another_base(adapter: Path, architecture: str, overrides: dict[str, int], what: str | None) -> None:
    make = zoo.checkpoint if architecture in zoo.ENCODERS else zoo.language_model
    base = make(architecture, adapter.parent / "other", **overrides)
    if what is None:
        load_reward_model(ModelConfig(model=str(adapter), base=str(base)))
        return
    error = refused(adapter, lambda model: load_reward_model(ModelConfig(model=model, base=str(base))))
    assert what in str(error) and (str(adapter) in str(error) or "the files" in str(error))
    assert architecture != "llama" or "--base" in error.help


def test_a_head_that_the_adapter_lacks_is_never_made_up(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "score" not in name}, path)
    assert "score.weight" in str(refused(adapter))


def test_a_weight_too_few_and_one_too_many(adapter: Path) -> None:
    path = adapter / "adapter_model.safetensors"
    state = load_file(path)
    name = "base_model.model.model.layers.1.self_attn.v_proj.lora_B.weight"
    save_file({key: value for key, value in state.items() if key != name}, path)
    assert "it lacks model.layers.1.self_attn.v_proj.lora_B" in str(refused(adapter))
    save_file(state | {name.replace("v_proj", "k_proj"): state[name].clone()}, path)
    assert "it holds model.layers.1.self_attn.k_proj.lora_B" in str(refused(adapter))


def test_new_tokens_without_their_weights(tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base")
    adapted(base, lora(task_type="CAUSAL_LM"), resize=310).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if "lm_head" not in name}, path)
    error = refused(tmp_path / "adapter", policy)
    assert "more tokens than its base model" in str(error) and "lm_head.weight" in str(error)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_pointers_and_truncated_files_of_an_adapter(adapter: Path, name: str) -> None:
    data = (adapter / name).read_bytes()
    (adapter / name).write_bytes(b"version https://git-lfs.github.com/spec/v1\nsize 12\n")
    assert f"{adapter / name} is a git-lfs pointer" in str(refused(adapter))
    (adapter / name).write_bytes(data[:-20])
    assert str(adapter / name) in str(refused(adapter))
    (adapter / name).unlink()
    (adapter / name).symlink_to("/nowhere/at/all")
    assert "is a link to /nowhere/at/all" in str(refused(adapter))
    (adapter / name).unlink()
    assert name in str(refused(adapter))


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "model.safetensors.index.json"])
def test_an_adapter_beside_a_model_is_not_guessed(adapter: Path, name: str) -> None:
    (adapter / name).write_bytes(b"{}")
    assert f"holds an adapter beside a model, {name}" in str(refused(adapter))


@pytest.mark.slow
def test_a_config_beside_an_adapter_is_of_no_weight(adapter: Path) -> None:
    want = rewards(adapter)
    (adapter / "config.json").write_text("{}")  # some trainers copy the base model's
    np.testing.assert_array_equal(rewards(adapter), want)


def test_a_quantised_base_is_told_with_the_way_out(adapter: Path) -> None:
    zoo.configure(adapter.parent / "base", quantization_config={"quant_method": "bitsandbytes"})
    error = refused(adapter)
    assert "is quantised (bitsandbytes)" in str(error) and "--base" in error.help


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"peft_type": "MAGIC"}, "a kind that peft does not know: MAGIC"),
        ({"peft_type": None}, "a kind that peft does not know: None"),
        ({"use_magic": True}, "a setting that the installed peft does not know: use_magic"),
        ({"init_lora_weights": "pissa_niter_4"}, "at random (pissa_niter_4)"),
        ({"alora_invocation_tokens": [5, 6]}, "peft cannot merge"),
        ({"layer_replication": [[0, 2], [1, 2]]}, ""),
        ({"r": 8}, "peft cannot merge"),
    ],
)
def test_settings_that_cannot_be_merged(adapter: Path, settings: dict[str, object], what: str) -> None:
    error = refused(configure(adapter, **settings))
    assert str(adapter) in str(error) and what in str(error)


def test_settings_of_a_newer_peft_that_are_off_are_read(adapter: Path) -> None:
    rewards(configure(adapter, use_magic=False, magic=None))


def test_a_merge_that_computes_something_else_is_noticed(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peft.tuners.lora.layer import Linear

    whole = Linear.get_delta_weight
    monkeypatch.setattr(Linear, "get_delta_weight", lambda *args: 1.5 * whole(*args))
    assert "computes something else" in str(refused(adapter))


def test_without_peft_the_error_has_the_command(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "peft"]:
        monkeypatch.setitem(sys.modules, name, None)
    error = refused(adapter)
    assert "peft is not installed" in str(error) and "pip install '.[lora]'" in error.help


def test_memory_to_merge_is_counted(adapter: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_weights = sum(tensor.numel() for tensor in load_file(adapter.parent / "base" / "model.safetensors").values())
    monkeypatch.setattr(placement, "_host_bytes", lambda: 7 * num_weights)  # the model in float32 would fit
    with pytest.raises(TooLarge, match="to merge its adapter") as caught:
        rewards(adapter)
    assert "guerdon convert" in caught.value.help


# ------------------------------------------------------------------------------------------------ converting


@pytest.mark.parametrize("dtype", slow_but(("float32",), ["float32", "bfloat16"]))
def test_convert_writes_a_whole_model(adapter: Path, dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = adapter.parent / "out"
    assert cli.main(["convert", str(adapter), str(out), "--dtype", dtype]) == Exit.DONE
    assert "merging LORA, rank 4" in capsys.readouterr().out
    assert not (out / "adapter_config.json").exists() and (out / "tokenizer.json").exists()
    model = AutoModelForSequenceClassification.from_pretrained(out, dtype=torch.float32, attn_implementation="eager")
    atol = 1e-5 if dtype == "float32" else 0.1
    np.testing.assert_allclose(rewards(adapter), np.ravel(outputs(model.eval())), atol=atol)
    np.testing.assert_allclose(rewards(adapter), rewards(out), atol=atol)
    assert {tensor.dtype for tensor in zoo.tensors(out).values()} == {getattr(torch, dtype)}
    assert cli.main(["convert", str(adapter), str(out)]) == Exit.CANNOT_START


@pytest.mark.parametrize("tied", slow_but((True,), [False, True]))
def test_convert_a_language_model_with_more_tokens(tied: bool, tmp_path: Path) -> None:
    base = zoo.language_model("llama", tmp_path / "base", tie_word_embeddings=tied)
    config = lora(task_type="CAUSAL_LM", modules_to_save=["embed_tokens"])
    adapted(base, config).save_pretrained(tmp_path / "adapter")
    assert cli.main(["convert", str(tmp_path / "adapter"), str(tmp_path / "out")]) == Exit.DONE
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager").eval()
    for got, want in zip(logprobs(tmp_path / "adapter"), expected_logprobs(model), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.slow
def test_convert_experts_by_their_released_names(tmp_path: Path) -> None:
    base = zoo.language_model("mixtral", tmp_path / "base")
    config = lora(task_type="CAUSAL_LM", target_modules=["q_proj"])
    adapted(base, config).save_pretrained(tmp_path / "adapter")
    assert cli.main(["convert", str(tmp_path / "adapter"), str(tmp_path / "out")]) == Exit.DONE
    assert zoo.tensors(tmp_path / "out").keys() == zoo.tensors(base).keys()


def test_convert_refuses_what_is_whole_and_takes_another_base(adapter: Path) -> None:
    base, out = adapter.parent / "base", adapter.parent / "out"
    assert cli.main(["convert", str(base), str(out)]) == Exit.CANNOT_START
    moved = base.rename(adapter.parent / "moved")
    assert cli.main(["convert", str(adapter), str(out)]) == Exit.CANNOT_START and not out.exists()
    assert cli.main(["convert", str(adapter), str(out), "--base", str(moved)]) == Exit.DONE


# ------------------------------------------------------------------------------------------------ trainers


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("pads", [False, True])
def test_what_trls_reward_trainer_saves(pads: bool, tmp_path: Path) -> None:
    """Trained, saved and served: the rewards of the trainer's own model, padded as it was trained."""
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import RewardConfig, RewardTrainer

    base = zoo.tokenizer(zoo.language_model("llama", tmp_path / "base"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    if not pads:
        tokenizer.pad_token = None
    pairs = [{"chosen": f"question {i} yes", "rejected": f"question {i} no, not at all"} for i in range(8)]
    trainer = RewardTrainer(
        model=AutoModelForSequenceClassification.from_pretrained(base, num_labels=1),
        args=RewardConfig(
            str(tmp_path / "run"), max_steps=3, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[],
            use_cpu=True, bf16=False, save_steps=3, logging_steps=10,
        ),
        processing_class=tokenizer,
        train_dataset=Dataset.from_list(pairs),
        peft_config=lora(target_modules=["q_proj", "v_proj", "up_proj"], modules_to_save=["score"]),
    )  # fmt: skip
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    texts = [pair[key] + tokenizer.eos_token for pair in pairs for key in ("chosen", "rejected")]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    model = trainer.model.eval()
    with torch.no_grad():
        want = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0].numpy()
    rows = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts]
    for folder in (tmp_path / "saved", tmp_path / "run" / "checkpoint-3"):
        np.testing.assert_allclose(rewards(folder, rows), want, atol=1e-5)


@pytest.mark.slow
def test_experts_by_the_names_of_older_releases(tmp_path: Path) -> None:
    """Adapters of single experts, which transformers now keeps in one tensor: as the files' own arithmetic has it."""
    base = zoo.language_model("mixtral", tmp_path / "base")
    state, adapter, rank, alpha = load_file(base / "model.safetensors"), {}, 2, 6
    torch.manual_seed(0)
    for name, weight in state.items():
        if ".experts." in name:
            rows, columns = weight.shape
            a, b = torch.randn(rank, columns) * 0.2, torch.randn(rows, rank) * 0.2
            module = f"base_model.model.{name.removesuffix('.weight')}"
            adapter |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            state[name] = weight + alpha / rank * b @ a
    shutil.copytree(base, tmp_path / "whole")
    save_file(state, tmp_path / "whole" / "model.safetensors", metadata={"format": "pt"})
    lora(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=["w1", "w2", "w3"]).save_pretrained(
        tmp_path / "a"
    )
    save_file(adapter, tmp_path / "a" / "adapter_model.safetensors", metadata={"format": "pt"})
    configure(tmp_path / "a", base_model_name_or_path=str(base))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", attn_implementation="eager").eval()
    for got, want in zip(logprobs(tmp_path / "a"), expected_logprobs(model), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5)
