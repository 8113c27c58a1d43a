"""Converts real GGUF files, written by gguf's own writer and quantiser, and computes with what comes out."""

import json
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import zoo
from guerdon import cli
from guerdon.engine.checkpoint.converting import convert_gguf, read_gguf
from guerdon.errors import Exit, GuerdonError

HEADS, GROUPS = 2, 1
Q4_1 = gguf.GGMLQuantizationType.Q4_1


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose matrices Q4_1's blocks of 32 fit."""
    folder = tmp_path_factory.mktemp("gguf") / "source"
    shape = {"num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "tie_word_embeddings": True}
    zoo.language_model("llama", folder, **shape)
    return zoo.tokenizer(folder)


def write_gguf(
    source: Path, path: Path, *, quantised: bool, architecture: str = "llama", without: str = ""
) -> dict[str, torch.Tensor]:
    """Writes the checkpoint as llama.cpp's converter does; returns the weights that the file stands for.

    The tensor `without` is left out.
    """
    model = AutoModelForCausalLM.from_pretrained(source)
    config, writer = model.config, gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(GROUPS)
    writer.add_rope_dimension_count(config.hidden_size // HEADS)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    _add_tokenizer(writer, source, config.vocab_size)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    meant = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        own = names.get_name(name, try_suffixes=(".weight",))
        if own == without:
            continue
        values = tensor.numpy()
        if quantised and values.ndim == 2:
            values = gguf.quants.dequantize(gguf.quants.quantize(values, Q4_1), Q4_1)
        meant[name] = torch.from_numpy(values.copy())
        for part, heads in (("attn_q.", HEADS), ("attn_k.", GROUPS)):
            if part in own:
                values = _interleave(values, heads)
        if quantised and values.ndim == 2:
            writer.add_tensor(own, gguf.quants.quantize(values, Q4_1), raw_dtype=Q4_1)
        else:
            writer.add_tensor(own, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def _interleave(weight: np.ndarray, heads: int) -> np.ndarray:
    """The order of rotated rows that llama.cpp computes with."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tokenizer(writer: gguf.GGUFWriter, source: Path, vocab_size: int) -> None:
    made = json.loads((source / "tokenizer.json").read_text())
    words = sorted(made["model"]["vocab"], key=made["model"]["vocab"].get)
    words += [f"[unused{i}]" for i in range(len(words), vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(words)
    writer.add_token_types([3 if i < zoo.FIRST_TOKEN else 1 for i in range(vocab_size)])
    writer.add_token_merges([" ".join(pair) for pair in made["model"]["merges"]])
    writer.add_bos_token_id(zoo.BOS)
    writer.add_eos_token_id(zoo.EOS)
    writer.add_pad_token_id(zoo.PAD)
    writer.add_chat_template(zoo.CHAT_TEMPLATE)


@pytest.mark.parametrize("quantised", [False, True])
def test_a_converted_folder_holds_what_the_file_stands_for(source: Path, tmp_path: Path, quantised: bool) -> None:
    meant = write_gguf(source, tmp_path / "model.gguf", quantised=quantised)
    file = read_gguf(tmp_path / "model.gguf")
    assert file.architecture == "llama"
    assert file.quantised_as == ("Q4_1" if quantised else "")
    assert file.num_parameters == sum(tensor.numel() for tensor in meant.values())

    convert_gguf(file, tmp_path / "out")

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    state = model.state_dict()
    assert {name: bool(torch.equal(state[name], tensor)) for name, tensor in meant.items()} == dict.fromkeys(
        meant, True
    )
    assert not hasattr(model.config, "quantization_config")
    tokenizer, own = AutoTokenizer.from_pretrained(tmp_path / "out"), AutoTokenizer.from_pretrained(source)
    text = "the thing, and another: 1 + 2"
    assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text, add_special_tokens=False)
    assert tokenizer.chat_template == own.chat_template
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.gguf", "out"]


def test_the_command_writes_half_precision_and_says_what_the_file_was(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_gguf(source, tmp_path / "model.gguf", quantised=True)
    argv = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), "--dtype", "bfloat16"]
    assert cli.main(argv) == Exit.DONE
    assert "dequantised from Q4_1, not the original weights" in capsys.readouterr().out
    assert {tensor.dtype for tensor in zoo.tensors(tmp_path / "out").values()} == {torch.bfloat16}


def refused(path: Path, folder: Path) -> str:
    """The message of the error that the conversion must end in, with help; it must leave nothing behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(GuerdonError) as caught:
        convert_gguf(read_gguf(path), folder)
    assert caught.value.help
    assert sorted(path.parent.iterdir()) == before
    return str(caught.value)


def test_a_folder_with_files_is_not_overwritten(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "model.gguf", quantised=False)
    assert "exists" in refused(tmp_path / "model.gguf", source)
    assert (source / "config.json").exists()


def test_files_that_cannot_be_read(source: Path, tmp_path: Path) -> None:
    assert "there is no file" in refused(tmp_path / "none.gguf", tmp_path / "out")
    (tmp_path / "text.gguf").write_text("not a model at all, but long enough to look into")
    assert "no whole GGUF file" in refused(tmp_path / "text.gguf", tmp_path / "out")
    write_gguf(source, tmp_path / "whole.gguf", quantised=False)
    (tmp_path / "half.gguf").write_bytes((tmp_path / "whole.gguf").read_bytes()[:-5000])
    assert "no whole GGUF file" in refused(tmp_path / "half.gguf", tmp_path / "out")


def test_a_file_without_an_architecture_is_named(source: Path, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write_gguf(source, path, quantised=False)
    path.write_bytes(path.read_bytes().replace(b"general.architecture", b"general.architectuer", 1))
    assert "does not say 'general.architecture'" in refused(path, tmp_path / "out")


def test_a_missing_weight_is_not_made_up(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "model.gguf", quantised=True, without="blk.1.ffn_up.weight")
    assert "lacks model.layers.1.mlp.up_proj.weight" in refused(tmp_path / "model.gguf", tmp_path / "out")


def test_an_architecture_that_transformers_does_not_read(source: Path, tmp_path: Path) -> None:
    write_gguf(source, tmp_path / "rwkv.gguf", quantised=False, architecture="rwkv7")
    assert "rwkv7" in refused(tmp_path / "rwkv.gguf", tmp_path / "out")
