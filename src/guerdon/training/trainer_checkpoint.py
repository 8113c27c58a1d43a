"""A trainer's checkpoint: safetensors and JSON, so that reading it runs no code.

| file | holds |
| --- | --- |
| `model*.safetensors`, `config.json`, the tokenizer's files | the model, as a checkpoint that other libraries load |
| `adapter_model.safetensors`, `adapter_config.json` | the adapters instead, if adapters are trained |
| `value_head.safetensors` | the value head of a critic with adapters |
| `optimizer*.safetensors` | the optimiser's state, and float32 masters of lower-precision weights |
| `optimizer/` | the same if it is sharded over ranks: every rank's shards, by `torch.distributed.checkpoint` |
| `rng.safetensors` | the state of torch's random number generators |
| `trainer.json` | the step, and the settings that the checkpoint was made with |

A critic is written as OpenRLHF writes its critics: the trunk under its own names, a `score` head for every token, mean
and std in `config.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.checkpoint.placement import dtype_name
from guerdon.engine.checkpoint.reward_models import LoadedModel
from guerdon.engine.checkpoint.stored import Origin, StoredTensor
from guerdon.engine.checkpoint.tokenizer_files import TOKENIZER_FILES
from guerdon.errors import CheckpointError, StorageFailed
from guerdon.settings.config import LearningConfig
from guerdon.training import collectives, tensor_files
from guerdon.training.optimiser import Optimiser
from guerdon.training.tensor_files import to_json

T = TypeVar("T")

HEAD = "score"
MORE_FILES = (
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
OPTIMISER_FOLDER = "optimizer"
"""The folder of the optimiser's state if that is sharded."""


@dataclass(frozen=True, slots=True)
class TrainerCheckpoint:
    """The parts of a trainer that its checkpoint holds, to write or to restore, on one rank or several.

    `weights` are the tensors by the stem of their file. `made_with` must be equal when the checkpoint is loaded;
    `mismatches` has the start of the error if it differs. `setting` names the setting that chooses the folder. The
    number of `ranks` and their layout may differ at loading.
    """

    weights: dict[str, dict[str, Tensor]]
    optimiser: Optimiser
    device: torch.device
    made_with: dict[str, Any]
    mismatches: dict[str, str]
    setting: str
    ranks: Ranks = ALONE

    def write(self, folder: Path, files: dict[str, bytes], facts: dict[str, Any]) -> None:
        """Collective; writes everything, with `files` by name and more `facts`, into an existing, empty folder.

        Every file is fsynced. Raises StorageFailed on all ranks if any rank cannot write its part.
        """
        with collectives.share_errors(self.ranks):
            self._check_shared(folder)
        optimiser = self.optimiser.tensors()
        for stem, tensors in self.weights.items():
            if tensor_files.is_sharded(tensors):
                tensor_files.write_gathered(folder, stem, tensors, self.ranks)
        if tensor_files.is_sharded(optimiser):
            tensor_files.write_shards(folder / OPTIMISER_FOLDER, optimiser, self.ranks)
        with collectives.share_errors(self.ranks):
            self._write_unsharded(folder, optimiser, files, facts)

    def _check_shared(self, folder: Path) -> None:
        if self.ranks.size > 1 and not folder.is_dir():
            raise StorageFailed(
                f"{folder} does not exist here: ranks on several hosts need a {self.setting} on a shared file system"
            )

    def _write_unsharded(
        self, folder: Path, optimiser: dict[str, Tensor], files: dict[str, bytes], facts: dict[str, Any]
    ) -> None:
        """Writes what the first rank has in whole; the random number generators are the same on all ranks."""
        if not self.ranks.is_leader:
            return
        for stem, tensors in self.weights.items():
            if not tensor_files.is_sharded(tensors):
                tensor_files.write_tensors(folder, stem, tensors)
        for name, data in files.items():
            tensor_files.write_bytes(folder / name, data)
        if not tensor_files.is_sharded(optimiser):
            tensor_files.write_tensors(folder, "optimizer", optimiser)
        tensor_files.write_tensors(folder, "rng", rng_tensors(self.device))
        known = {"step": self.optimiser.step, "learning_rate": self.optimiser.learning_rate}
        tensor_files.write_bytes(folder / "trainer.json", to_json(self.made_with | known | facts))

    def open(self, folder: Path) -> tuple[dict[str, Any], Callable[[], None]]:
        """Returns the facts, and a function that restores everything; nothing changes before it is called.

        Not collective. Raises CheckpointError if the folder is damaged or was made with other settings.
        """
        facts = tensor_files.read_json(folder / "trainer.json")
        for name, own in self.made_with.items():
            if facts.get(name) != own:
                what = self.mismatches.get(name, f"was made with {name}")
                raise CheckpointError(
                    f"{folder} {what} {facts.get(name)}, this run has {own}",
                    f"start with the model and the settings that it was made with, or give another {self.setting}",
                )
        restores = [self._open_weights(folder, stem, own) for stem, own in self.weights.items()]
        restores.append(self._open_optimiser(folder, facts["step"]))
        rng = tensor_files.open_tensors(folder, "rng")

        def restore() -> None:
            for part in restores:
                part()
            restore_rng(rng, self.device)

        return facts, restore

    def _open_weights(self, folder: Path, stem: str, own: dict[str, Tensor]) -> Callable[[], None]:
        stored = tensor_files.open_tensors(folder, stem)
        tensor_files.check_shapes({name: tensor.shape for name, tensor in stored.items()}, own, folder)
        if tensor_files.is_sharded(own):
            return lambda: tensor_files.read_into(folder, own)
        return lambda: tensor_files.copy_into(own, stored)

    def _open_optimiser(self, folder: Path, step: int) -> Callable[[], None]:
        own = self.optimiser.tensors()
        is_stored_sharded = (folder / OPTIMISER_FOLDER).is_dir()
        if not is_stored_sharded and not tensor_files.is_sharded(own):
            stored = tensor_files.open_tensors(folder, "optimizer")
            tensor_files.check_shapes({name: tensor.shape for name, tensor in stored.items()}, own, folder)
            return lambda: self.optimiser.restore(step, lambda name: stored[name][...])
        shapes = (
            tensor_files.StoredShards(folder / OPTIMISER_FOLDER, own).shapes
            if is_stored_sharded
            else {name: tensor.shape for name, tensor in tensor_files.open_tensors(folder, "optimizer").items()}
        )
        tensor_files.check_shapes(shapes, own, folder)

        def restore() -> None:
            # Reads into the state itself, except for numbers that are not tensors.
            tensor_files.read_into(folder / OPTIMISER_FOLDER if is_stored_sharded else folder, own)
            self.optimiser.restore(step, own.__getitem__)

        return restore


# ------------------------------------------------------------------------------------------- what a model's folder has


def model_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """Returns the tensors of trunk and head under their names in a checkpoint."""
    prefix = _trunk_prefix(loaded)
    trunk = {f"{prefix}{name}": tensor for name, tensor in loaded.trunk.state_dict().items()}
    return trunk | head_tensors(loaded)


def head_tensors(loaded: LoadedModel) -> dict[str, Tensor]:
    """Returns the head's tensors under their names in a checkpoint: a single layer without its number."""
    return _named_head(loaded.head.module.state_dict())


def model_parameters(loaded: LoadedModel) -> dict[str, nn.Parameter]:
    """Returns the parameters of trunk and head under their names in a checkpoint."""
    prefix = _trunk_prefix(loaded)
    trunk = {f"{prefix}{name}": parameter for name, parameter in loaded.trunk.named_parameters()}
    return trunk | _named_head(dict(loaded.head.module.named_parameters()))


def _trunk_prefix(loaded: LoadedModel) -> str:
    return f"{loaded.trunk.base_model_prefix}." if loaded.trunk.base_model_prefix else ""


def _named_head(tensors: Mapping[str, T]) -> dict[str, T]:
    alone = all(name.startswith("0.") for name in tensors)
    return {f"{HEAD}.{name.removeprefix('0.') if alone else name}": tensor for name, tensor in tensors.items()}


def critic_files(loaded: LoadedModel) -> dict[str, bytes]:
    """Returns `config.json` and the tokenizer's files of a critic, by name."""
    settings = {
        "architectures": ["CriticModel"],
        "value_head_prefix": HEAD,
        "num_labels": 1,
        "normalize_reward": True,
        "mean": loaded.head.mean,
        "std": loaded.head.std,
    }
    return model_files(
        loaded.origin, next(loaded.trunk.parameters()).dtype, settings, leave_out=("id2label", "label2id")
    )


def model_files(
    origin: Origin, dtype: torch.dtype, more_settings: dict[str, Any], leave_out: tuple[str, ...] = ()
) -> dict[str, bytes]:
    """Returns the model's `config.json`, with other settings, and its small files: tokenizer and generation settings.

    They are kept in memory from the start, because the folder may be gone when the trainer saves, hours or weeks later.
    """
    left_out = ("torch_dtype", "quantization_config", *leave_out)
    settings = {name: value for name, value in origin.settings.items() if name not in left_out}
    settings |= {**more_settings, "dtype": dtype_name(dtype)}
    paths = [*(origin.text_folder / name for name in (*TOKENIZER_FILES, *MORE_FILES)), origin.generation_file]
    files = {path.name: path.read_bytes() for path in paths if path.is_file()}
    return files | {"config.json": to_json(settings)}


def learning_settings(config: LearningConfig) -> dict[str, Any]:
    """Returns the settings without which a checkpoint's tensors mean nothing."""
    return {
        "optimizer": config.optimizer,
        "lora": config.lora,
        "lora_alpha": config.lora_alpha if config.lora else None,
        "lora_targets": config.lora_targets if config.lora else None,
    }


# ------------------------------------------------------------------------------------------- random numbers


def rng_tensors(device: torch.device) -> dict[str, Tensor]:
    """Returns the state of the generators that training draws from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def restore_rng(stored: dict[str, StoredTensor], device: torch.device) -> None:
    """Restores the generators; that of a device which was absent at saving keeps its state."""
    torch.set_rng_state(stored["cpu"][...])
    if device.type == "cuda" and "cuda" in stored:
        torch.cuda.set_rng_state(stored["cuda"][...], device)
