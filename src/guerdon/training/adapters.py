"""Low-rank adapters (LoRA, Hu et al. 2021) on the linear layers of a trunk, by peft."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor

from guerdon.errors import ConfigError

ADAPTER = "default"
SEED = 0
PEFT_PREFIX = "base_model.model."


def add_adapters(trunk: Any, rank: int, alpha: float) -> None:
    """Puts float32 adapters on all linear layers of the trunk, in place; all else in it is frozen.

    They begin as nothing, so outputs stay what they were, and they begin the same at every start: what is replayed
    after a crash gives the same weights. Raises ConfigError where peft is not installed or finds no linear layer.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise ConfigError("lora is set, and peft is not installed", "pip install 'guerdon[lora]'") from e
    settings = LoraConfig(r=rank, lora_alpha=alpha, lora_dropout=0.0, target_modules="all-linear")
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        try:
            inject_adapter_in_model(settings, trunk, ADAPTER)
        # How peft says that nothing matched.
        except ValueError as e:
            raise ConfigError(f"peft cannot adapt a {type(trunk).__name__}: {e}", "leave lora out") from e
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()


def is_adapter(name: str) -> bool:
    """Whether a trunk's parameter of that name is one of an adapter."""
    return f".{ADAPTER}." in name


def to_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The trunk's adapter tensors under the names of peft's own files."""
    return {peft_name(name): tensor for name, tensor in tensors.items()}


def peft_name(name: str) -> str:
    """What peft's own files call the adapter's parameter of that name."""
    return PEFT_PREFIX + name.replace(f".{ADAPTER}.", ".")


def describe_adapters(trunk: Any, base: str) -> dict[str, Any]:
    """What peft's `adapter_config.json` says, so that `PeftModel.from_pretrained` reads the adapters, too."""
    settings = trunk.peft_config[ADAPTER].to_dict()
    settings |= {"base_model_name_or_path": base, "inference_mode": True}
    return json.loads(json.dumps(settings, default=_plain))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set) else str(value)
