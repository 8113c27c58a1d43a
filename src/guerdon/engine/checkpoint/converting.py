"""Writes a folder that transformers and guerdon load: from a GGUF file, an adapter and its base, or InternLM2."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import save_torch_state_dict

from guerdon.durable import ASIDE, place, storing
from guerdon.engine.checkpoint import internlm2
from guerdon.engine.checkpoint.merging import merge
from guerdon.engine.checkpoint.stored import StoredCheckpoint, find_texts
from guerdon.errors import CheckpointError, StartError, install_command

_PLAIN = ("F32", "F16", "BF16", "F64")
"""Types of tensors that are not quantised."""


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A GGUF file's header: architecture, number of parameters, types of its matrices."""

    path: Path
    architecture: str
    num_parameters: int
    types: dict[str, int]

    @property
    def quantised_as(self) -> str:
        """The most frequent types of quantised tensors, such as "Q4_1 and Q8_0"; empty if there are none."""
        return " and ".join(name for name in self.types if name not in _PLAIN)


def read_gguf(path: Path) -> GgufFile:
    """Reads the file's header; raises CheckpointError if it is no GGUF file, StartError if a package is missing."""
    if find_spec("gguf") is None:
        raise StartError("gguf is not installed", install_command("gguf"))
    if not path.is_file():
        raise CheckpointError(f"there is no file {path}", "check the path")
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        architecture = reader.fields["general.architecture"].contents()
    except (ValueError, IndexError, OSError) as e:
        raise CheckpointError(f"{path} is no whole GGUF file: {e}", "give one; if it is one, download it again") from e
    except KeyError as e:
        raise CheckpointError(f"{path} does not say {e}", "give the GGUF file of a language model") from e
    types = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    num_parameters = sum(prod(map(int, tensor.shape)) for tensor in reader.tensors)
    return GgufFile(path, architecture, num_parameters, dict(types.most_common()))


def load_gguf(file: GgufFile, dtype: str) -> tuple[Any, Any]:
    """Returns the file's model in `dtype` and its tokenizer; raises CheckpointError if transformers cannot read it."""
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": file.path.parent, "gguf_file": file.path.name}
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            **where,
            dtype=getattr(torch, dtype),
            quantization_config=GgufConfig(dequantize=True),
            output_loading_info=True,
        )
        tokenizer = AutoTokenizer.from_pretrained(**where)
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as e:
        raise CheckpointError(
            f"transformers cannot read {file.path} (architecture {file.architecture}): {e}",
            "upgrade transformers, or give the checkpoint that the file was made from",
        ) from e
    # transformers only warns, and fills them with random numbers.
    if missing := sorted(report["missing_keys"]):
        more = f" and {len(missing) - 1} more weights" if len(missing) > 1 else ""
        raise CheckpointError(f"{file.path} lacks {missing[0]}{more}", "give the file of a whole model")
    # The saved model is dense. Some versions of transformers leave the entry, and would look for quantised blocks.
    vars(model.config).pop("quantization_config", None)
    return model, tokenizer


def convert_gguf(file: GgufFile, folder: Path, dtype: str = "float32") -> None:
    """Writes the file's model and tokenizer to `folder`, whole or not at all.

    Dequantises weights to `dtype`; the quantisation's rounding remains. Raises CheckpointError if the folder holds
    files or transformers cannot read the model, StorageFailed if the disk is full.
    """
    _check_new(folder)
    model, tokenizer = load_gguf(file, dtype)
    with _writing(folder) as aside:
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)


def convert_adapter(checkpoint: StoredCheckpoint, folder: Path, dtype: str = "float32") -> None:
    """Writes an adapter's base model with the adapter merged, in `dtype`, to `folder`, whole or not at all.

    A whole model of InternLM2 becomes one of Llama. Raises CheckpointError if it is neither, if the folder holds files,
    or as `merge_adapter` and `to_llama`, and StorageFailed if the disk is full.
    """
    if checkpoint.adapter is None and checkpoint.settings.get("model_type") == internlm2.MODEL_TYPE:
        _check_new(folder)
        own, tensors = internlm2.to_llama(checkpoint)
        texts = internlm2.to_tokenizer(checkpoint) | {"config.json": json.dumps({**own, "dtype": dtype}, indent=2)}
        with _writing(folder) as aside:
            save_torch_state_dict({name: tensor.to(getattr(torch, dtype)) for name, tensor in tensors.items()}, aside)
            for name, text in texts.items():
                (aside / name).write_text(text, encoding="utf-8")
        return
    if checkpoint.adapter is None:
        raise CheckpointError(f"{checkpoint.folder} holds a whole model", "serve it unconverted")
    _check_new(folder)
    merged = merge(checkpoint, checkpoint.adapter)
    model = merged.model.to(getattr(torch, dtype))
    settings = {**merged.settings, "dtype": dtype}
    with _writing(folder) as aside:
        if merged.head:
            save_torch_state_dict(merged.tensors(), aside)
        else:  # transformers writes tensors by the names of the released checkpoints
            model.save_pretrained(aside)
        (aside / "config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
        for path in filter(Path.is_file, find_texts(checkpoint.text_folder)):
            target = aside / path.relative_to(checkpoint.text_folder)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(path, target)
        if checkpoint.generation_file.is_file():
            shutil.copyfile(checkpoint.generation_file, aside / checkpoint.generation_file.name)


def _check_new(folder: Path) -> None:
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} exists already", "give another folder, or remove it")


@contextmanager
def _writing(folder: Path) -> Iterator[Path]:
    """Yields an empty folder, which gets the name of `folder` if nothing fails; raises StorageFailed."""
    aside = folder.with_name(ASIDE + folder.name)
    with storing(f"cannot write {folder}"):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            yield aside
            if folder.exists():
                folder.rmdir()
            place(aside, folder)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
