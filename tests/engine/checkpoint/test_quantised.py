"""Quantised checkpoints in the released layouts, written with torch alone: their weights are what the formats say.

FP8, MXFP4 and bitsandbytes are also compared with transformers' or bitsandbytes' own code.
"""

import json
import logging
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import zoo
from guerdon.assembly import build_scorer, build_trainer
from guerdon.core import Sequence
from guerdon.engine.checkpoint.quantised import dequantised
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError
from guerdon.settings.config import AdapterConfig, CriticConfig, ModelConfig, TeacherConfig
from light_peft import import_bitsandbytes
from teaching import plain

Layout = Callable[[str, Tensor, torch.Generator], tuple[dict[str, Tensor], Tensor]]
"""Of a matrix: the tensors that a library writes for it, and the matrix that they mean."""
GROUP = 8


def integers(shape: tuple[int, ...], bits: int, random: torch.Generator) -> Tensor:
    return torch.randint(0, 2**bits, shape, generator=random)


def words(numbers: Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> Tensor:
    """Unsigned numbers in int32 words, one by one: the k-th of a word in its k-th lowest bits."""
    table = numbers.numpy() if axis == 0 else numbers.numpy().T
    per = 32 // bits
    table = np.pad(table, ((0, -len(table) % per), (0, 0)))
    made = np.zeros((len(table) // per, table.shape[1]), np.uint32)
    for row in range(len(made)):
        for k in range(per):
            made[row] |= table[row * per + (order or range(per))[k]].astype(np.uint32) << np.uint32(bits * k)
    return torch.from_numpy((made if axis == 0 else made.T.copy()).view(np.int32))


def fp8_blocks(name: str, weight: Tensor, random: torch.Generator, width: int = 16) -> tuple[dict[str, Tensor], Tensor]:
    """DeepSeek's and Qwen's: a scale for each block, the last of which are smaller; here 24 x 16."""
    rows, columns = -(-weight.shape[0] // 24), -(-weight.shape[1] // width)
    scale = torch.rand(rows, columns, generator=random) + 0.5
    stored, meant = weight.to(torch.float8_e4m3fn), torch.empty_like(weight)
    for i in range(weight.shape[0]):
        for j in range(weight.shape[1]):
            meant[i, j] = stored[i, j].float() * scale[i // 24, j // width]
    return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scale}, meant


def fp8_rows(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' FP8 with a scale for each row, and one for activations, which is not read."""
    scale = (torch.rand(len(weight), 1, generator=random) + 0.5).bfloat16()
    stored = weight.to(torch.float8_e4m3fn)
    more = {f"{name}.weight_scale": scale, f"{name}.input_scale": torch.ones(1)}
    return {f"{name}.weight": stored, **more}, stored.float() * scale.float()


def int8_rows(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    stored = (weight / scale).round().to(torch.int8)
    return {f"{name}.weight": stored, f"{name}.weight_scale": scale}, stored.float() * scale


def packed(name: str, weight: Tensor, random: torch.Generator, bits: int = 4) -> tuple[dict[str, Tensor], Tensor]:
    """compressed-tensors' integers, with zeros, of groups in an order of their own."""
    (rows, columns), half = weight.shape, 2 ** (bits - 1)
    groups = columns // GROUP
    numbers = integers((rows, columns), bits, random) - half
    zeros, scale = integers((rows, groups), bits, random) - half, torch.rand(rows, groups, generator=random) / half
    owners = torch.randint(0, groups, (columns,), generator=random)
    meant = (numbers - zeros[:, owners]) * scale[:, owners]
    stored = {
        "weight_packed": words(numbers + half, bits, 1), "weight_zero_point": words(zeros + half, bits, 0),
        "weight_scale": scale, "weight_shape": torch.tensor([rows, columns]), "weight_g_idx": owners.int(),
    }  # fmt: skip
    return {f"{name}.{part}": tensor for part, tensor in stored.items()}, meant


def gptq(name: str, weight: Tensor, random: torch.Generator, shift: int = 1) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    groups = columns // GROUP
    numbers, zeros = integers((columns, rows), 4, random), integers((groups, rows), 4, random)
    scale, owners = torch.rand(groups, rows, generator=random).half() / 8, torch.arange(columns).flip(0) // GROUP
    stored = {
        "qweight": words(numbers, 4, 0), "qzeros": words((zeros - shift) % 16, 4, 1), "scales": scale,
        "g_idx": owners.int(),
    }  # fmt: skip
    return {f"{name}.{p}": t for p, t in stored.items()}, ((numbers - zeros[owners]) * scale.float()[owners]).T


def awq(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    rows, columns = weight.shape
    groups, order = columns // GROUP, (0, 2, 4, 6, 1, 3, 5, 7)
    numbers, zeros = integers((columns, rows), 4, random), integers((groups, rows), 4, random)
    scale, owners = torch.rand(groups, rows, generator=random).half() / 8, torch.arange(columns) // GROUP
    stored = {"qweight": words(numbers, 4, 1, order), "qzeros": words(zeros, 4, 1, order), "scales": scale}
    return {f"{name}.{p}": t for p, t in stored.items()}, ((numbers - zeros[owners]) * scale.float()[owners]).T


def bits_and_bytes(kind: str, nested: bool) -> Layout:
    def write(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        import_bitsandbytes()
        functional = pytest.importorskip("bitsandbytes").functional
        flat = weight.view(-1, 64)  # its kernels for CPUs are wrong for rows shorter than a block
        stored, state = functional.quantize_4bit(flat, blocksize=64, compress_statistics=nested, quant_type=kind)
        meant, state.shape = functional.dequantize_4bit(stored, state).view_as(weight), weight.shape
        parts = {f"{name}.weight.{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
        return {f"{name}.weight": stored, **parts}, meant

    return write


def int8_of_bits_and_bytes(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
    most = weight.abs().amax(1)
    stored = (weight / most[:, None] * 127).round().to(torch.int8)
    more = {f"{name}.SCB": most, f"{name}.weight_format": torch.tensor(0, dtype=torch.uint8)}
    return {f"{name}.weight": stored, **more}, stored.float() * most[:, None] / 127


GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}
LAYOUTS: dict[str, tuple[dict[str, Any], Layout]] = {
    "fp8": ({"quant_method": "fp8", "weight_block_size": [24, 16]}, fp8_blocks),
    "fp8 wide": ({"quant_method": "fp8", "weight_block_size": [24, 128]}, lambda *a: fp8_blocks(*a, width=128)),
    "fp8 rows": ({"quant_method": "compressed-tensors", **GROUPS}, fp8_rows),
    "fbgemm": ({"quant_method": "fbgemm_fp8"}, fp8_rows),
    "int8 rows": ({"quant_method": "compressed-tensors", **GROUPS}, int8_rows),
    "packed": ({"quant_method": "compressed-tensors", **GROUPS}, packed),
    "packed in 8 bits": ({"quant_method": "compressed-tensors"}, lambda *a: packed(*a, bits=8)),
    "gptq": ({"quant_method": "gptq", "bits": 4}, gptq),
    "gptq v2": ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, lambda *a: gptq(*a, shift=0)),
    "awq": ({"quant_method": "awq", "bits": 4, "version": "gemm"}, awq),
    "nf4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("nf4", False)),
    "nf4 twice": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("nf4", True)),
    "fp4": ({"quant_method": "bitsandbytes", "load_in_4bit": True}, bits_and_bytes("fp4", False)),
    "int8": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, int8_of_bits_and_bytes),
}


def quantise(folder: Path, settings: dict[str, Any], layout: Layout, meant: Path) -> Path:
    """Quantises the layers' matrices of a checkpoint; writes the model that they mean to the other folder."""
    state, random = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0)
    whole, parts = {}, {}
    for name, tensor in state.items():
        is_matrix = name.endswith(("_proj.weight", ".w1.weight", ".w2.weight", ".w3.weight"))
        made, value = layout(name.removesuffix(".weight"), tensor, random) if is_matrix else ({name: tensor}, tensor)
        whole[name], parts = value.contiguous(), parts | {k: v.contiguous() for k, v in made.items()}
    meant.mkdir()
    for path in folder.glob("*.json"):
        (meant / path.name).write_bytes(path.read_bytes())
    save_file(whole, meant / "model.safetensors", metadata={"format": "pt"})
    save_file(parts, folder / "model.safetensors", metadata={"format": "pt"})
    zoo.configure(folder, quantization_config=settings)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_rewards_are_those_of_the_weights_that_are_meant(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = quantise(zoo.checkpoint("llama", tmp_path / "rm"), *LAYOUTS[name], tmp_path / "meant")
    tensors = dequantised(open_checkpoint(str(folder)), torch.float32).tensors
    for key, want in load_file(tmp_path / "meant/model.safetensors").items():
        np.testing.assert_allclose(tensors[key][...].numpy(), want.numpy(), rtol=1e-6, atol=1e-7, err_msg=key)
        assert tensors[key].shape == tuple(want.shape)
    with caplog.at_level(logging.INFO):
        engine = Engine(load_reward_model(ModelConfig(model=str(folder), dequantize=True)))
    assert f"is dequantised from {LAYOUTS[name][0]['quant_method']}: 0.0 GiB as float32" in caplog.text
    rows = zoo.rows()
    got = [score.reward for score in engine.score([Sequence(row) for row in rows])]  # type: ignore[union-attr]
    zoo.assert_rewards(got, tmp_path / "meant", rows)
    with pytest.raises(CheckpointError, match=r"is quantised \(.*full-precision") as caught:
        load_reward_model(ModelConfig(model=str(folder)))
    assert "--dequantize" in caught.value.help


def test_fp8_blocks_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    """transformers dequantises without a GPU, where a layer's sizes are multiples of the blocks'."""
    settings = {"quant_method": "fp8", "weight_block_size": [8, 8], "activation_scheme": "dynamic"}

    def even(name: str, weight: Tensor, random: torch.Generator) -> tuple[dict[str, Tensor], Tensor]:
        scale = torch.rand(weight.shape[0] // 8, weight.shape[1] // 8, generator=random) + 0.5
        stored = weight.to(torch.float8_e4m3fn)
        whole = stored.float() * scale.repeat_interleave(8, 0).repeat_interleave(8, 1)
        return {f"{name}.weight": stored, f"{name}.weight_scale_inv": scale}, whole

    folder = quantise(zoo.language_model("llama", tmp_path / "lm"), settings, even, tmp_path / "meant")
    want = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict()
    for name, tensor in dequantised(open_checkpoint(str(folder)), torch.float32).tensors.items():
        np.testing.assert_allclose(tensor[...].float().numpy(), want[name].float().numpy(), rtol=1e-6, err_msg=name)


def test_mxfp4_is_what_transformers_makes_of_it(tmp_path: Path) -> None:
    """gpt-oss: experts in blocks of 32 numbers, of which two are a byte; the exponent of each block is another."""
    folder = zoo.checkpoint("gpt-oss", tmp_path / "rm")
    state, random, meant = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(0), {}
    table = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    for name in [name for name in state if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        blocks = integers((experts, outputs, inputs // 32, 16), 8, random).to(torch.uint8)
        scales = (integers((experts, outputs, inputs // 32), 2, random) + 122).to(torch.uint8)
        state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        value = torch.zeros(experts, inputs, outputs)
        for e, o, i in np.ndindex(experts, outputs, inputs):
            byte = int(blocks[e, o, i // 32, i % 32 // 2])
            nibble = byte >> 4 if i % 2 else byte & 15
            sign = -1.0 if nibble & 8 else 1.0
            value[e, i, o] = sign * table[nibble & 7] * math.pow(2.0, int(scales[e, o, i // 32]) - 127)
        meant[name] = value
        own = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert torch.equal(own, value)
    save_file({k: v.contiguous() for k, v in state.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    zoo.configure(folder, quantization_config={"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    tensors = dequantised(open_checkpoint(str(folder)), torch.float32).tensors
    assert len(meant) == 4
    for name, want in meant.items():
        assert torch.equal(tensors[name][...], want) and tensors[name].shape == tuple(want.shape)
    engine = Engine(load_reward_model(ModelConfig(model=str(folder), dequantize=True)))
    rest = {name: tensor for name, tensor in state.items() if not name.endswith(("_blocks", "_scales"))}
    save_file(rest | {k: v.contiguous() for k, v in meant.items()}, folder / "model.safetensors")
    zoo.configure(folder, quantization_config=None)
    want = zoo.reference(folder, rows := zoo.rows())
    got = [score.reward for score in engine.score([Sequence(row) for row in rows])]  # type: ignore[union-attr]
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("settings", "damage", "message"),
    [
        ({"quant_method": "hqq"}, "", "is quantised by hqq, which cannot be dequantised here"),
        ({"quant_method": "gptq", "bits": 3}, "", r"is not as gptq writes it \(3 bits\)"),
        ({"quant_method": "gptq", "bits": 4}, "scales", r"is not as gptq writes it \('scales'\): it has g_idx \["),
        (
            {"quant_method": "awq", "bits": 4, "version": "gemv"},
            "",
            r"is not as awq writes it \(version gemv, 4 bits\)",
        ),
    ],
)
def test_what_cannot_be_dequantised(settings: dict[str, Any], damage: str, message: str, tmp_path: Path) -> None:
    layout = awq if settings["quant_method"] == "awq" else gptq
    folder = quantise(zoo.checkpoint("llama", tmp_path / "rm"), settings, layout, tmp_path / "meant")
    if damage:
        state = load_file(folder / "model.safetensors")
        save_file({k: v for k, v in state.items() if not k.endswith(damage)}, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        load_reward_model(ModelConfig(model=str(folder), dequantize=True))
    assert caught.value.help and json.dumps(str(caught.value)).count("\\n") == 0


@pytest.mark.parametrize(
    ("name", "part", "damage"),
    [
        ("fp8", "weight_scale_inv", lambda x: x[:-1]),
        ("fp8 rows", "weight_scale", lambda x: x[:-1]),
        ("packed", "weight_g_idx", lambda x: x + 1000),
        ("packed", "weight_zero_point", lambda x: x[:1]),
        ("gptq", "g_idx", lambda x: x + 1000),
        ("gptq", "qzeros", lambda x: x[:, :1]),
        ("gptq", "scales", lambda x: x[:, :3]),
        ("awq", "scales", lambda x: x[:3]),
        ("int8", "SCB", lambda x: x[:-1]),
        ("nf4", "absmax", lambda x: x[:-1]),
        ("nf4", "quant_state.bitsandbytes__nf4", lambda x: x[:-9]),
    ],
)
def test_parts_that_do_not_fit_each_other(
    name: str, part: str, damage: Callable[[Tensor], Tensor], tmp_path: Path
) -> None:
    folder = quantise(zoo.checkpoint("llama", tmp_path / "rm"), *LAYOUTS[name], tmp_path / "meant")
    state = load_file(folder / "model.safetensors")
    key = next(one for one in state if one.endswith(part))
    save_file(state | {key: damage(state[key]).contiguous()}, folder / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=f"is not as {LAYOUTS[name][0]['quant_method']} writes it .*: it has "
    ) as e:
        load_reward_model(ModelConfig(model=str(folder), dequantize=True))
    assert e.value.help and "\n" not in str(e.value)


@pytest.mark.slow
def test_experts_teachers_and_critics(tmp_path: Path) -> None:
    """Released experts are apart in the files, each with scales of its own, and one tensor in the model."""
    folder = quantise(zoo.checkpoint("mixtral", tmp_path / "rm"), *LAYOUTS["fp8"], tmp_path / "meant")
    assert any("experts.1" in name for name in load_file(folder / "model.safetensors"))
    rows = zoo.rows()
    engine = Engine(load_reward_model(ModelConfig(model=str(folder), dequantize=True)))
    got = [score.reward for score in engine.score([Sequence(row) for row in rows])]  # type: ignore[union-attr]
    np.testing.assert_allclose(got, zoo.reference(tmp_path / "meant", rows), rtol=1e-5, atol=1e-5)
    critic: Any = build_trainer(CriticConfig(model=str(folder), dequantize=True))
    found = critic.engine.score([Sequence(row) for row in rows])
    np.testing.assert_allclose([x.reward for x in found], got, rtol=1e-5, atol=1e-5)
    language = quantise(zoo.language_model("llama", tmp_path / "lm"), *LAYOUTS["gptq"], tmp_path / "meant lm")
    teacher: Any = build_scorer(TeacherConfig(model=str(language), dequantize=True))
    logits = plain(tmp_path / "meant lm", rows)
    for row, one, table in zip(rows, teacher.score([Sequence(row) for row in rows]), logits, strict=True):
        want = table[:-1].log_softmax(-1).gather(1, torch.from_numpy(row[1:, None]))[:, 0]
        np.testing.assert_allclose(one.answer.logprobs[-len(want) :], want.numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_adapters_over_a_quantised_base(tmp_path: Path) -> None:
    """As QLoRA trains them: merged, and sharing the base."""
    import_bitsandbytes()
    peft = pytest.importorskip("peft")
    base, rows = zoo.language_model("llama", tmp_path / "lm"), zoo.rows()
    quantise(base, *LAYOUTS["nf4"], tmp_path / "meant")
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "meant", num_labels=1).eval()
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="SEQ_CLS", target_modules="all-linear"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1 * parameter.requires_grad)
        model.eval().save_pretrained(tmp_path / "adapter")
        want = [model(input_ids=torch.from_numpy(row)[None]).logits.item() for row in rows]
    adapters = [AdapterConfig(name="a", model=str(tmp_path / "adapter"))]
    merged = ModelConfig(model=str(tmp_path / "adapter"), base=str(base), dequantize=True)
    zoo.configure(tmp_path / "adapter", "adapter_config.json", base_model_name_or_path=str(base))
    for config in (merged, ModelConfig(model=str(base), adapters=adapters, dequantize=True)):
        found: Any = build_scorer(config).score([Sequence(row) for row in rows])
        np.testing.assert_allclose([one.reward for one in found], want, rtol=1e-5, atol=1e-5)
