"""Reads a GGUF file, llama.cpp's format."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

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
    import torch
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
