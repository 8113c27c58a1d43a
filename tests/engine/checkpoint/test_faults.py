"""Files that are no whole checkpoint: for each layout and fault the error names the file, the cause and the remedy."""

import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch.distributed import checkpoint as dcp

import zoo
from guerdon.core import Sequence
from guerdon.engine.checkpoint import faults, stored
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError
from guerdon.settings.config import LanguageModelConfig, ModelConfig

ROWS = zoo.rows(5, ((12, 2), (7, 1)))
LAYOUTS = [  # files of other programs (a folder ends with /): the given folder, what the error says, what the help says
    ("blobs/12ab.incomplete snapshots/9f/config.json", "snapshots/9f", "unfinished download", "run the same download"),
    ("config.json .cache/huggingface/download/model.safetensors.7a.incomplete", "", "unfinished download", "finishes"),
    ("config.json model.safetensors.aria2", "", "unfinished download", "finishes"),
    ("model_world_size_2_rank_0.pt huggingface/config.json", "", "verl's FSDP", "model_merger merge --backend fsdp"),
    ("config.json model_world_size_2_rank_0.pt optim_world_size_2_rank_0.pt", "", "verl's FSDP", "{folder} --target"),
    ("actor/model_world_size_8_rank_7.pt", "", "verl's FSDP", "--local_dir {folder}/actor"),
    ("model_world_size_2_rank_0.pt huggingface/config.json", "huggingface", "verl's FSDP", "--local_dir {folder}"),
    ("dist_ckpt/__0_0.distcp huggingface/config.json", "huggingface", "verl's Megatron", "--backend megatron"),
    ("config.json global_step20/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", "", "DeepSpeed", "zero_to_fp32.py"),
    ("config.json global_step20/mp_rank_00_model_states.pt latest", "", "DeepSpeed", "--safe_serialization"),
    ("_actor/global_step20/zero_pp_rank_0_mp_rank_00_model_states.pt", "", "DeepSpeed", "zero_to_fp32.py"),
    ("zero_pp_rank_0_mp_rank_00_model_states.pt", "", "DeepSpeed", "in the folder above"),
    ("config.json pytorch_model_fsdp_0/__0_0.distcp pytorch_model_fsdp_0/.metadata", "", "accelerate's FSDP",
     "accelerate merge-weights {folder}/pytorch_model_fsdp_0"),
    ("policy.nemo", "", "NeMo", "export_ckpt"),
    ("weights/__0_0.distcp context/model.yaml", "", "NeMo", "export_ckpt"),
    ("model_config.yaml model_weights/common.pt", "", "NeMo", "export_ckpt"),
    ("latest_checkpointed_iteration.txt iter_0000100/mp_rank_00/model_optim_rng.pt", "", "Megatron", "Megatron Bridge"),
    ("iter_0000100/__0_0.distcp iter_0000100/common.pt", "iter_0000100", "Megatron", "convert_torch_dist_to_hf.py"),
    ("config.json mp_rank_00/model_optim_rng.pt", "", "Megatron", "Megatron Bridge"),
    ("config.json __0_0.distcp .metadata", "", "torch.distributed.checkpoint", "dcp_to_torch {folder} "),
    ("policy/weights/__0_0.distcp", "", "torch.distributed.checkpoint", "convert_dcp_to_hf.py"),
    ("config.json model_rank_0.pt model_rank_1.pt", "", "one file for each rank", "gathered"),
    ("config.json pytorch_model_fsdp_rank0.bin", "", "one file for each rank", "full state dict"),
    ("consolidated.00.pth params.json", "", "Meta's or Mistral's own", "model*.safetensors"),
    ("config.json model.gguf", "", "GGUF", "guerdon convert {folder}/model.gguf FOLDER"),
    ("config.json tf_model.h5", "", "another framework", "save_pretrained"),
    ("config.json onnx/model.onnx", "", "another framework", "save_pretrained"),
    ("config.json lightning.ckpt", "", "may hold more than weights", "state dict"),
    ("config.json model.pth", "", "may hold more than weights", "state dict"),
    ("model.tar.gz", "", "an archive", "unpack"),
    ("model_index.json unet/config.json", "", "a diffusion pipeline", "reward model"),
    ("adapter_model.safetensors README.md", "", "without its adapter_config.json", "copy that file"),
    ("checkpoint-10/config.json checkpoint-10/model.safetensors", "", "a folder inside", "give {folder}/checkpoint-10"),
    ("blobs/12ab snapshots/9f/config.json", "", "a folder inside", "give {folder}/snapshots/9f"),
    ("policy/adapter_config.json state.json", "", "a folder inside", "give {folder}/policy"),
    ("checkpoints/step-000002/policy/config.json run.json", "", "a folder inside", "give {folder}/checkpoints/step-0"),
]  # fmt: skip


def refused(folder: Path | str) -> CheckpointError:
    """The error by which a reward model and a language model are refused alike, each part of one line."""
    with pytest.raises(CheckpointError) as caught:
        load_reward_model(ModelConfig(model=str(folder)))
    assert caught.value.help and "\n" not in f"{caught.value}{caught.value.help}"
    return caught.value


def rewards(folder: Path) -> np.ndarray:
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    return np.array([score.reward for score in engine.score([Sequence(row) for row in ROWS])])


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return zoo.checkpoint("llama", tmp_path / "llama")


# ------------------------------------------------------------------------------------------------ layouts


def make(folder: Path, files: str) -> None:
    """Writes the named files, with a whole config and no whole weights."""
    for name in files.split():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes((zoo.checkpoint("llama", folder.parent / "x") / "config.json").read_bytes() if
                         path.name == "config.json" else b"bytes of another program")  # fmt: skip


@pytest.mark.parametrize(("files", "given", "what", "remedy"), LAYOUTS, ids=[files for files, *_ in LAYOUTS])
def test_every_layout_is_named_with_the_command_that_converts_it(
    tmp_path: Path, files: str, given: str, what: str, remedy: str
) -> None:
    folder = tmp_path / "run"
    make(folder, files)
    error = refused(folder / given)
    assert what in str(error) and str(folder) in str(error)
    assert remedy.format(folder=folder) in error.help


def test_every_row_of_the_table_has_such_an_example() -> None:
    said = [what for _, _, what, _ in LAYOUTS]
    assert [layout.what for layout in faults.LAYOUTS if not any(part in layout.what for part in said)] == []


def test_a_folder_that_torch_has_saved_in_parts(llama: Path) -> None:
    dcp.save(load_file(llama / "model.safetensors"), checkpoint_id=llama, no_dist=True)
    (llama / "model.safetensors").unlink()
    error = refused(llama)
    assert "parts of torch.distributed.checkpoint" in str(error) and "dcp_to_torch" in error.help


def test_whole_weights_beside_other_layouts_are_served(llama: Path) -> None:
    want = rewards(llama)
    make(
        llama, "global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt zero_to_fp32.py model_rank_0.pt rng_state_0.pth"
    )
    np.testing.assert_array_equal(rewards(llama), want)


# ------------------------------------------------------------------------------------------------ single files

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 9976576152\n"
STAND_INS = [
    (b"", "is empty", "download"),
    (POINTER, "is a git-lfs pointer to a file of 9,976,576,152 bytes", "git lfs pull"),
    (b"/annex/objects/SHA256E-s12--ab.safetensors\n", "is a git-annex pointer", "git annex get"),
    (b"<!DOCTYPE html>\n<html><head><title>Sign in</title>", "is a web page", "token"),
    (b'<?xml version="1.0"?><Error><Code>AccessDenied</Code></Error>', "is a web page", "token"),
]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("data", "what", "remedy"), STAND_INS, ids=["empty", "lfs", "annex", "html", "xml"])
def test_a_file_that_stands_for_another_is_named(llama: Path, name: str, data: bytes, what: str, remedy: str) -> None:
    zoo.tokenizer(llama)
    if "index" in name:
        (llama / "model.safetensors").unlink()
    (llama / name).write_bytes(data)
    error = refused(llama)
    if name == "tokenizer.json" and not data:  # other files of a tokenizer may be empty
        assert "tokenizer" in str(error)
        return
    assert str(llama / name) in str(error) and what in str(error)
    assert remedy in error.help


def cache(folder: Path, tmp_path: Path) -> Path:
    """The folder as the hub's cache has it: links to files of other names."""
    repository = tmp_path / "hub" / "models--org--my-rm"
    snapshot = repository / "snapshots" / "9fa1"
    snapshot.mkdir(parents=True)
    (repository / "blobs").mkdir()
    for i, path in enumerate(sorted(folder.iterdir())):
        shutil.copy(path, repository / "blobs" / f"blob{i}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob{i}")
    return snapshot


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"])
def test_a_dangling_link_of_the_hubs_cache(llama: Path, tmp_path: Path, name: str) -> None:
    snapshot = cache(zoo.tokenizer(llama), tmp_path)
    np.testing.assert_array_equal(rewards(snapshot), rewards(llama))
    (snapshot / name).resolve().unlink()
    error = refused(snapshot)
    assert f"{snapshot / name} is a link to ../../blobs/blob" in str(error) and "does not exist" in str(error)
    assert "`hf download org/my-rm`" in error.help


def test_a_dangling_shard_and_a_dangling_link_elsewhere(llama: Path) -> None:
    state = load_file(llama / "model.safetensors")
    names = sorted(state)
    (llama / "model.safetensors").unlink()
    for i, part in enumerate((names[:9], names[9:]), 1):
        save_file({name: state[name] for name in part}, llama / f"model-0000{i}-of-00002.safetensors")
    index = {name: f"model-0000{1 + (i >= 9)}-of-00002.safetensors" for i, name in enumerate(names)}
    (llama / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    whole = rewards(llama)
    (llama / "README.md").symlink_to("/nowhere/README.md")  # nothing reads it
    np.testing.assert_array_equal(rewards(llama), whole)
    (llama / "model-00002-of-00002.safetensors").unlink()
    (llama / "model-00002-of-00002.safetensors").symlink_to("/nowhere/there")
    error = refused(llama)
    assert "model-00002-of-00002.safetensors is a link to /nowhere/there" in str(error) and "cp -rL" in error.help
    (llama / "model-00002-of-00002.safetensors").unlink()
    assert "model-00002-of-00002.safetensors: it lacks 1 of 2 weight files" in str(refused(llama))
    (llama / "model.safetensors.index.json").unlink()  # the name of the other shard says it, too
    assert "model-00002-of-00002.safetensors: it lacks 1 of 2 weight files" in str(refused(llama))


def test_links_in_a_circle(llama: Path) -> None:
    (llama / "model.safetensors").unlink()
    (llama / "model.safetensors").symlink_to("model.safetensors")
    assert "is a link to model.safetensors" in str(refused(llama))


@pytest.mark.parametrize("size", [4, 9, 1000, -1000, -1])
def test_a_truncated_safetensors_file_says_how_much_is_missing(llama: Path, size: int) -> None:
    data = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(data[:size])
    have = len(data[:size])
    assert re.search(rf"model.safetensors is truncated: it has {have:,} bytes", str(refused(llama)))
    if size < 0:
        assert f"its header names {len(data):,}" in str(refused(llama))


def test_a_file_of_another_kind_by_the_name_of_safetensors(llama: Path) -> None:
    (llama / "model.safetensors").write_bytes(b"PK\x03\x04" + bytes(range(256)) * 8)
    assert "is no safetensors file" in str(refused(llama))


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("keep", [500, -500, -1])
def test_a_truncated_torch_file(tmp_path: Path, keep: int, legacy: bool) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path, "trlx")
    path = folder / "pytorch_model.bin"
    torch.save(torch.load(path), path, _use_new_zipfile_serialization=not legacy)
    path.write_bytes(path.read_bytes()[:keep])
    error = refused(folder)
    assert f"{path} is truncated" in str(error) and "again" in error.help


def test_a_torch_file_cut_anywhere(tmp_path: Path) -> None:
    path, tensors = tmp_path / "pytorch_model.bin", {f"layers.{i}.weight": torch.ones(5, 3) for i in range(3)}
    torch.save(tensors, path, _use_new_zipfile_serialization=False)
    whole = path.read_bytes()
    for keep in range(4, len(whole), 3):
        path.write_bytes(whole[:keep])
        with pytest.raises(CheckpointError, match="is truncated"):
            stored.open_torch(path)


@pytest.mark.parametrize("wrapped", [{"state_dict": {}, "epoch": 3}, {"module": {}, "ds_version": "0.18"}, [1, 2]])
def test_a_torch_file_with_more_than_tensors_says_what_it_holds(tmp_path: Path, wrapped: object) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path, "trlx")
    torch.save(wrapped, folder / "pytorch_model.bin")
    error = refused(folder)
    assert (", ".join(wrapped) if isinstance(wrapped, dict) else "a list") in str(error)
    assert "state_dict()" in error.help


# ------------------------------------------------------------------------------------------------ tensors


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Path:
    save_file(change(load_file(folder / "model.safetensors")), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.parametrize("shape", [(0,), (0, 32)])
def test_an_empty_tensor_is_what_zero_3_has_not_gathered(llama: Path, shape: tuple[int, ...]) -> None:
    rewrite(llama, lambda state: state | {"model.layers.1.mlp.up_proj.weight": torch.zeros(shape)})
    error = refused(llama)
    assert f"model.layers.1.mlp.up_proj.weight is empty, {list(shape)}" in str(error)
    assert str(llama / "model.safetensors") in str(error)
    assert "stage3_gather_16bit_weights_on_model_save" in error.help and "zero_to_fp32.py" in error.help


def test_dtensors_are_one_ranks_part(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate

    folder = zoo.checkpoint("gpt2", tmp_path, "trlx")
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())
    try:
        mesh = DeviceMesh("cpu", [0, 1])
        state = torch.load(folder / "pytorch_model.bin")
        state["v_head.weight"] = DTensor.from_local(state["v_head.weight"], mesh, [Replicate()])
        torch.save(state, folder / "pytorch_model.bin")
    finally:
        torch.distributed.destroy_process_group()
    error = refused(folder)
    assert f"{folder / 'pytorch_model.bin'} holds DTensors" in str(error) and "full_tensor" in error.help


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "what", "remedy"),
    [
        (lambda _: {"_fsdp_wrapped_module._flat_param": torch.zeros(9)}, "FSDP has flattened", "FULL_STATE_DICT"),
        (lambda state: state | {UP: state[UP].to(torch.int8)}, f"quantised weights: {UP} has integers", ""),
        (lambda state: state | {f"module.{UP}": state[UP] * 2}, f"has {UP} twice: ", ""),
    ],
)
def test_tensors_that_no_model_has(llama: Path, change: Callable[..., Any], what: str, remedy: str) -> None:
    error = refused(rewrite(llama, change))
    assert what in str(error) and remedy in error.help


def test_a_model_with_adapters_that_nobody_merged(llama: Path) -> None:
    def adapt(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        name = "model.layers.0.self_attn.q_proj"
        state[f"base_model.model.{name}.base_layer.weight"] = state.pop(f"{name}.weight")
        return state | {f"base_model.model.{name}.lora_A.default.weight": torch.zeros(2, 32)}

    error = refused(rewrite(llama, adapt))
    assert "unmerged adapters" in str(error) and "merge_and_unload" in error.help


WRAPPERS = [
    "_orig_mod.", "module.", "_orig_mod.module.", "module._orig_mod.", "_fsdp_wrapped_module.", "module.module.",
    "_orig_mod._fsdp_wrapped_module.module.",
]  # fmt: skip
INNER = [
    ("model.", "model._orig_mod."),
    (".self_attn.", "._checkpoint_wrapped_module.self_attn."),
    ("model.layers.1.", "model.layers.1._fsdp_wrapped_module._orig_mod."),
    ("score.", "score.module."),
]


@pytest.mark.parametrize(
    ("wrapper", "inside", "wrapped"),
    [
        *((wrapper, "", "") for wrapper in WRAPPERS[:4]),
        *(pytest.param(wrapper, "", "", marks=pytest.mark.slow) for wrapper in WRAPPERS[4:]),
        *(("_orig_mod.", inside, wrapped) for inside, wrapped in INNER),
    ],
)
def test_names_of_wrapped_models_and_parts_are_read(llama: Path, wrapper: str, inside: str, wrapped: str) -> None:
    want = zoo.reference(llama, ROWS)
    rewrite(
        llama, lambda state: {f"{wrapper}{n.replace(inside, wrapped) if inside else n}": t for n, t in state.items()}
    )
    np.testing.assert_allclose(rewards(llama), want, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "bert", "mixtral"])
def test_wrapped_models_of_other_architectures(tmp_path: Path, name: str) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    want = zoo.reference(folder, ROWS)
    rewrite(folder, lambda state: {f"module._orig_mod.{n}": t for n, t in state.items()})
    np.testing.assert_allclose(rewards(folder), want, atol=1e-5)


def test_a_wrapped_language_model(tmp_path: Path) -> None:
    folder = zoo.language_model("qwen3", tmp_path)
    want = load_policy(LanguageModelConfig(model=str(folder))).model.state_dict()
    rewrite(folder, lambda state: {f"_orig_mod.{n}": t for n, t in state.items()})
    got = load_policy(LanguageModelConfig(model=str(folder))).model.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


def test_a_tensor_in_two_files_is_refused(llama: Path) -> None:
    (llama / "model.safetensors").rename(llama / "new.safetensors")
    shutil.copy(llama / "new.safetensors", llama / "old.safetensors")
    error = refused(llama)
    assert "twice" in str(error) and "new.safetensors" in str(error) and "old.safetensors" in str(error)


@pytest.mark.slow
def test_no_served_architecture_has_a_module_by_the_name_of_a_wrapper() -> None:
    served = {config.model_type for config in transformers.MODEL_FOR_CAUSAL_LM_MAPPING} | set(zoo.ENCODERS)
    folder = Path(transformers.__file__).parent / "models"
    named = [
        path.parent.name
        for path in folder.glob("*/modeling_*.py")
        if re.search(r"self\.(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\s*=", path.read_text())
    ]
    assert not {name for name in named if name in served or name.replace("_", "-") in served}


# ------------------------------------------------------------------------------------------------ configs


@pytest.mark.parametrize("value", [None, {}])
@pytest.mark.parametrize("key", ["quantization_config", "compression_config", "quantization", "architectures"])
def test_a_quantisation_of_nothing_and_an_architecture_that_is_no_list(llama: Path, key: str, value: object) -> None:
    want = zoo.reference(llama, ROWS)
    settings = {key: "LlamaForSequenceClassification" if key == "architectures" else value}
    np.testing.assert_allclose(rewards(zoo.configure(llama, **settings)), want, atol=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
        {"quantization": {"group_size": 64, "bits": 4}},
        {"text_config": {"quantization_config": {"quant_method": "fp8"}}},
    ],
)
def test_quantised_models_are_named_with_their_method(llama: Path, settings: dict[str, object]) -> None:
    message = str(refused(zoo.configure(llama, **settings)))
    (method,) = re.findall(r"is quantised \(([\w-]+)\)", message)
    assert method in ("bitsandbytes", "compressed-tensors", "quantization", "fp8")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("{}", "config.json has no model_type"),
        ("{", "is not valid JSON"),
        ("[]", "is not a JSON object"),
        ("null", "is not a JSON object"),
        ('{"model_type": null}', "config.json has no model_type"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "is no config of a llama"),
        ('{"model_type": "llama", "rope_parameters": 7}', "is no config of a llama"),
    ],
)
def test_a_config_that_is_none(llama: Path, text: str, what: str) -> None:
    (llama / "config.json").write_text(text)
    error = refused(llama)
    assert what in str(error) and str(llama / "config.json") in str(error)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize("value", [None, []])
def test_without_architectures_a_head_is_not_guessed(tmp_path: Path, name: str, value: object) -> None:
    error = refused(zoo.configure(zoo.checkpoint(name, tmp_path), architectures=value))
    assert "config.json names no architectures" in str(error)
    want = {"llama": "LlamaForSequenceClassification", "bert": "BertForSequenceClassification"}
    assert want[name] in error.help


@pytest.mark.parametrize("kind", ["trlx", "trlx-critic", "trl"])
def test_without_architectures_a_head_that_says_itself_what_it_is(tmp_path: Path, kind: str) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path, kind)
    want = zoo.reference(folder, ROWS)
    np.testing.assert_allclose(rewards(zoo.configure(folder, architectures=None)), want, atol=1e-5)


def test_a_file_that_may_not_be_read(llama: Path) -> None:
    (llama / "model.safetensors").chmod(0)
    if os.access(llama / "model.safetensors", os.R_OK):
        pytest.skip("root may read everything")
    assert "model.safetensors cannot be read: Permission denied" in str(refused(llama))
