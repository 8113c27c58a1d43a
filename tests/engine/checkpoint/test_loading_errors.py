"""Loading what cannot be served: each is one line that says what is wrong, and one that says what to do."""

import json
import math
import pickle
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import zoo
from guerdon.engine import generating
from guerdon.engine.checkpoint import stored
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.placement import check_memory
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.engine.generating import DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.engine.microbatches import Batcher
from guerdon.errors import CheckpointError, ConfigError, StartError, TooLarge
from guerdon.settings.config import LanguageModelConfig, ModelConfig


def refused(folder: Path | str, kind: type[StartError] = CheckpointError, **settings: object) -> str:
    """The message of the error that loading must end in, and its help: one line each."""
    with pytest.raises(kind) as caught:
        load_reward_model(ModelConfig(model=str(folder), **settings))
    assert caught.value.help
    assert "\n" not in str(caught.value) + caught.value.help
    return f"{caught.value}; {caught.value.help}"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Changes the tensors of a safetensors checkpoint."""
    state = load_file(folder / "model.safetensors")
    change(state)
    save_file(state, folder / "model.safetensors")
    return folder


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return zoo.checkpoint("llama", tmp_path / "llama")


def test_no_checkpoint_at_all(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "my_scorer.py").write_text("def shortness(texts): ...\n")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    assert "nobody/nothing is neither a folder here nor" in refused("nobody/nothing")
    assert "my_scorer:FUNCTION" in refused(tmp_path / "my_scorer.py")
    assert "there is no folder ./nowhere/at/all" in refused("./nowhere/at/all")
    assert "is a file" in refused(llama / "config.json")
    assert "no config.json" in refused(tmp_path / "empty")
    (llama / "model.safetensors").unlink()
    assert "no weights" in refused(llama)


class Trap:
    """Unpickling this would run code."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("trapped"),)


@pytest.mark.parametrize("legacy", [True, False])
def test_pickled_objects_are_never_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, legacy: bool) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path, "trlx")
    monkeypatch.chdir(tmp_path)
    if legacy:
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps({"v_head.weight": Trap()}, protocol=2))
    else:
        torch.save({"v_head.weight": Trap()}, folder / "pytorch_model.bin")
    message = refused(folder)
    assert "holds a Python object (getattr), and objects are never loaded" in message
    assert not (tmp_path / "trapped").exists()


@pytest.mark.parametrize("name", ["llama", "bert", "roberta", "modernbert"])
def test_a_missing_head_is_never_made_up(tmp_path: Path, name: str) -> None:
    folder = zoo.checkpoint(name, tmp_path)

    def drop(state: dict[str, torch.Tensor]) -> None:
        for key in [k for k in state if k.startswith(("score", "classifier"))]:
            del state[key]

    message = refused(rewrite(folder, drop))
    assert "classifier" in message or "without a reward head" in message


def test_what_transformers_raises_names_the_cause(llama: Path, tmp_path: Path) -> None:
    zoo.configure(llama, rope_parameters={"rope_type": "nobodys", "rope_theta": 1.0})
    assert "cannot build a LlamaModel of these files: KeyError: 'nobodys'; correct config.json" in refused(llama)
    experts = zoo.checkpoint("mixtral", tmp_path / "experts")
    rewrite(experts, lambda state: state.pop("model.layers.0.block_sparse_moe.experts.1.w1.weight"))
    assert "cannot build a MixtralModel of these files" in refused(experts)
    tuples = zoo.checkpoint("bert", tmp_path / "bert", return_dict=False)
    assert Engine(load_reward_model(ModelConfig(model=str(tuples)))).path == "packed"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("model.layers.1.mlp.up_proj.weight", None, "lack layers.1.mlp.up_proj.weight"),
        ("score.weight", (1, 48), "takes 48 features, the model gives 32"),
        ("score.gate.weight", (1, 32), "unknown form: gate.weight, weight"),
        ("score.weight", (32,), "unknown form: weight"),
    ],
)
def test_other_tensors_are_named(name: str, shape: tuple[int, ...] | None, message: str, llama: Path) -> None:
    rewrite(llama, lambda state: state.update({name: torch.zeros(shape)}) if shape else state.pop(name))
    assert message in refused(llama)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_hidden_layers": 1}, "hold model.layers.1."),
        ({"intermediate_size": 128}, "mlp.down_proj.weight has shape [32, 64] in the files, [32, 128] by config.json"),
        ({"id2label": {"0": "a", "1": "b"}}, "1 outputs, config.json says 2 labels"),
        ({"model_type": "own"}, "model_type 'own'"),
        ({"model_type": "own", "auto_map": {"AutoConfig": "own.Config"}}, "brings its own Python code"),
    ],
)
def test_a_config_of_another_model_is_refused(settings: dict[str, Any], message: str, llama: Path) -> None:
    (llama / "own.py").write_text("raise SystemExit('run')")
    assert message in refused(zoo.configure(llama, **settings))


def test_named_entities_are_no_rewards(tmp_path: Path) -> None:
    assert "5 labels per token" in refused(zoo.checkpoint("llama", tmp_path / "a", "tokcls", num_labels=5))
    assert "5 labels per token" in refused(zoo.checkpoint("bert", tmp_path / "b", "tokcls", num_labels=5))


def test_models_without_a_head(tmp_path: Path) -> None:
    assert "GPT2LMHeadModel without a reward head" in refused(zoo.language_model("gpt2", tmp_path / "lm"))
    folder = zoo.configure(zoo.checkpoint("bert", tmp_path / "bert"), architectures=["BertForMaskedLM"])
    assert "BertForMaskedLM without a reward head" in refused(folder)


@pytest.mark.parametrize("model_type", ["vit", "big_bird", "clip", "t5"])
def test_other_kinds_of_model(llama: Path, model_type: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(llama)
    assert f"holds a {'sequence-to-sequence model' if model_type == 't5' else model_type}" in refused(llama)


@pytest.mark.parametrize("is_decoder", [False, True])
@pytest.mark.parametrize("name", ["ernie", "megatron-bert"])
def test_classifiers_of_other_encoders_are_no_decoders_whatever_they_say(
    tmp_path: Path, name: str, is_decoder: bool
) -> None:
    folder = zoo.checkpoint(name, tmp_path, is_decoder=is_decoder)
    assert f"holds a {name} (" in refused(folder)


def claim(folder: Path, dtype: str, itemsize: int, num_bytes: int) -> None:
    """A sparse file: its header claims so many bytes, the disk holds none of them."""
    shape = [num_bytes // itemsize // 1024, 1024]
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, shape[0] * 1024 * itemsize]}
    header = json.dumps({"score.weight": tensor}).encode()
    path = folder / "model.safetensors"
    try:
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(header)) + header)
            file.truncate(8 + len(header) + tensor["data_offsets"][1])
    except OSError:
        pytest.skip("this file system has no sparse files of that size")


def test_too_little_memory_for_the_weights_in_their_dtype(llama: Path) -> None:
    # Bytes that can be mapped, but would be four times as many in float32.
    claim(llama, "F8_E4M3", 1, psutil.virtual_memory().total // 2)
    message = refused(llama, dtype="float32")
    (llama / "model.safetensors").unlink()
    assert re.search(r"needs about \d+\.\d GiB in float32, \d+\.\d GiB are free on this machine", message)


def test_a_file_beyond_what_memory_can_map(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored.Files, "sample", lambda *_: "")  # which would read a page of each 16 MiB
    claim(llama, "F32", 4, 4 << 40)
    message = refused(llama)
    (llama / "model.safetensors").unlink()
    assert re.search(r"\(4096\.0 GiB\) is more than|needs about 4096\.0 GiB", message)


def test_settings_that_do_not_fit_the_model(tmp_path: Path, llama: Path) -> None:
    assert "2 numbers, the model has 1 outputs" in refused(llama, ConfigError, attribute_weights=[0.5, 0.5])
    assert "std 0.0" in refused(llama, ConfigError, std=0.0)
    assert "no device 'abacus'" in refused(llama, ConfigError, device="abacus")
    assert "max_length is 0" in refused(llama, ConfigError, max_length=0)
    gpt2 = zoo.checkpoint("gpt2", tmp_path / "gpt2")
    assert "the model has 256 positions" in refused(gpt2, ConfigError, max_length=257)
    zoo.configure(gpt2, eos_token_id=None)
    assert "needs an EOS" in refused(gpt2, ConfigError, pooling="first_eos")


GPU = torch.device("cuda", 0)


def full(*_: Any, **__: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.\nSee the documentation")


@pytest.mark.parametrize("path", ["single", "packed+shared", "packed"])
def test_a_self_check_without_memory_chooses_nothing(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, tried = Batcher.plan, []

    def short(batcher: Batcher, by: str, *args: Any) -> Any:
        tried.append(by)
        if by == path:
            full()
        if by == "packed+shared":
            raise NotImplementedError("so that others are tried")
        return plan(batcher, by, *args)

    loaded = load_critic(ModelConfig(model=str(zoo.checkpoint("llama", tmp_path))))
    monkeypatch.setattr(Batcher, "plan", short)
    with pytest.raises(
        TooLarge, match=r"too little memory for the self-check: CUDA out of memory\. Tried to allocate 20\.00 MiB\.$"
    ) as e:
        Engine(loaded)
    assert tried[-1] == path and "--device" in e.value.help


def test_a_decoder_without_memory_is_not_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = load_policy(LanguageModelConfig(model=str(zoo.language_model("llama", tmp_path))))
    engine = LanguageEngine(policy)
    monkeypatch.setattr(generating.PackedDecoder, "begin", full)
    with pytest.raises(TooLarge, match="CUDA out of memory"):
        DecoderChoice(policy, engine)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Fakes a GPU with so many bytes free, and so many in PyTorch's cache."""

    def tell(free_bytes: int, kept_bytes: int) -> None:
        free = [free_bytes]
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free[0], 1 << 40))
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: free.__setitem__(0, free_bytes + kept_bytes))

    return tell


def test_memory_that_pytorch_caches_counts_as_free(tmp_path: Path, gpu: Callable[[int, int], None]) -> None:
    checkpoint = open_checkpoint(str(zoo.checkpoint("llama", tmp_path)))
    own_bytes = 2 * sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
    gpu(own_bytes - 8, 8)
    check_memory(checkpoint, torch.bfloat16, GPU)
    gpu(own_bytes - 8, 7)
    with pytest.raises(TooLarge, match="are free on cuda:0"):
        check_memory(checkpoint, torch.bfloat16, GPU)
