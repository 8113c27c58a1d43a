"""Low-rank adapters (LoRA, Hu et al. 2021) on the linear layers of a trunk, by peft."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.engine.checkpoint.reward_models import LoadedModel
from guerdon.errors import ConfigError, install_command
from guerdon.settings.config import LearningConfig

ADAPTER = "default"
PEFT_PREFIX = "base_model.model."


def add_adapters(
    trunk: Any, config: LearningConfig, loaded: LoadedModel | LoadedPolicy, seed: int = 0, task: str | None = None
) -> dict[str, Any]:
    """Adds float32 adapters to linear layers of the model or trunk, in place, and freezes everything else.

    Adapters start as the identity, so that outputs stay equal. The same `seed` gives the same adapters at every start,
    because a replay after a crash must give the same weights; the global random state does not change. The model is run
    once. Returns peft's `adapter_config.json`, with which `PeftModel.from_pretrained` reads the adapters, too; `task`
    is peft's name of what they are for. Raises ConfigError if peft is not installed, matches no layer, or cannot adapt
    one.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as e:
        raise ConfigError("lora is set, and peft is not installed", install_command("lora")) from e
    targets = config.lora_targets
    settings = LoraConfig(r=config.lora, lora_alpha=config.lora_alpha, lora_dropout=0.0, target_modules=targets)
    # By default fork_rng initialises every GPU.
    with torch.random.fork_rng([trunk.device] if trunk.device.type == "cuda" else []):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(settings, trunk, ADAPTER)
            with loaded.fsdp.no_gradients():
                trunk(input_ids=torch.zeros(1, 2, dtype=torch.long, device=trunk.device), use_cache=False)
        # ValueError if nothing matches, re.error, and anything that an adapter raises on an unusual layer, such as a
        # router that returns a tuple.
        except Exception as e:
            raise ConfigError(
                f"peft cannot adapt a {type(trunk).__name__} by lora_targets {targets}: {type(e).__name__}: {e}",
                r"give lora_targets that match other layers, such as '.*\.(q|k|v|o)_proj', or remove lora",
            ) from e
    for name, parameter in trunk.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()
    described = trunk.peft_config[ADAPTER].to_dict()
    path, base = Path(loaded.config.model).expanduser(), loaded.config.model
    described["base_model_name_or_path"] = str(path.resolve()) if path.is_dir() else base
    described |= {"revision": loaded.config.revision, "task_type": task, "inference_mode": True}
    return json.loads(json.dumps(described, default=lambda x: sorted(x) if isinstance(x, set) else str(x)))


@contextlib.contextmanager
def without_adapters(model: nn.Module) -> Iterator[None]:
    """Disables the model's adapters within the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            layer.enable_adapters(False)
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def is_adapter(name: str) -> bool:
    """Whether the parameter of that name belongs to an adapter."""
    return f".{ADAPTER}." in name


def adapted_share(trunk: Any) -> float:
    """Returns the share of adapted weights among all matrices, experts included, without embeddings."""
    embeddings = {id(p) for module in trunk.modules() if isinstance(module, nn.Embedding) for p in module.parameters()}
    matrices = {name: p for name, p in trunk.named_parameters() if p.dim() > 1 and id(p) not in embeddings}
    own = {name: p.numel() for name, p in matrices.items() if not is_adapter(name)}
    return sum(count for name, count in own.items() if ".base_layer." in name) / sum(own.values())


def to_peft(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns the trunk's adapter tensors under their names in peft's files."""
    return {PEFT_PREFIX + name.replace(f".{ADAPTER}.", "."): tensor for name, tensor in tensors.items()}
