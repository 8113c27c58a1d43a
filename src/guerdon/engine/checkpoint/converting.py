"""Writes a folder that transformers and guerdon load: from a GGUF file, an adapter and its base, or InternLM2."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict

from guerdon.durable import ASIDE, place, storing
from guerdon.engine.checkpoint import internlm2
from guerdon.engine.checkpoint.gguf_files import GgufFile, load_gguf
from guerdon.engine.checkpoint.merging import merge
from guerdon.engine.checkpoint.stored import StoredCheckpoint, find_texts
from guerdon.errors import CheckpointError


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
