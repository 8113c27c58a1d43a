"""What all models have in common when they are loaded: device, dtype, an opened checkpoint, the same on all ranks."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch

from guerdon import memory
from guerdon.distributed.ranks import Ranks, agreed
from guerdon.engine.checkpoint.merging import merge_adapter
from guerdon.engine.checkpoint.model_config import check_generates, read_config
from guerdon.engine.checkpoint.placement import check_memory, pick_device, pick_dtype
from guerdon.engine.checkpoint.quantised import dequantised
from guerdon.engine.checkpoint.stored import StoredCheckpoint, digest_of, open_checkpoint
from guerdon.engine.host import keep_freed
from guerdon.engine.product_speed import say_if_other_is_faster
from guerdon.errors import CheckpointError
from guerdon.settings.config import LanguageModelConfig, ModelConfig

OWN = frozenset({"model", "name", "revision", "base", "device", "max_queue_tokens", "max_queue_sequences"})
"""Settings that may differ between ranks: where the files are, and what does not change any result."""


class Loading:
    """Opens a model, and checks that all ranks load the same one."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._hashes = True

    def open(
        self,
        config: ModelConfig | LanguageModelConfig,
        device: torch.device | None,
        moment_bytes: int | None,
        *,
        for_text: bool,
        with_copy: bool = False,
    ) -> tuple[StoredCheckpoint, Any, torch.device, torch.dtype]:
        """Collective; returns the checkpoint with its adapter merged, its config, and the model's device and dtype.

        `device` is by default the ranks', else the config's; a model that is not `for_text` is a reward model or a
        critic. Raises as `open_checkpoint`, `read_config`, `check_memory`, `compare` and `merge_adapter`.
        """
        memory.resume_collections()  # the libraries are imported, and not everything that loading makes stays
        device = device or self._ranks.device or pick_device(config.device)
        keep_freed(device)
        dtype = pick_dtype(config.dtype, device)
        if self._ranks.is_leader:
            say_if_other_is_faster(dtype, device)
        checkpoint = open_checkpoint(config.model, config.revision, config.base)
        if config.dequantize:
            checkpoint = dequantised(checkpoint, dtype)
        model_config = read_config(checkpoint)
        if for_text:
            check_generates(checkpoint, model_config)
        check_memory(checkpoint, dtype, device, moment_bytes, with_copy=with_copy, ranks=self._ranks)
        # After the check, so that no rank counts memory that its neighbours have allocated for theirs.
        self.compare(checkpoint, dtype, config)
        checkpoint = merge_adapter(checkpoint, for_text=for_text)
        return checkpoint, read_config(checkpoint), device, dtype

    def compare(
        self, checkpoint: StoredCheckpoint, dtype: torch.dtype, config: ModelConfig | LanguageModelConfig
    ) -> None:
        """Collective; raises CheckpointError on all ranks unless they load the same weights with the same settings.

        Raises another rank's error if it failed before. Afterwards the weights' bytes are hashed in the background; if
        several ranks of a host share the files, one of them does it.
        """
        ranks = self._ranks
        if ranks.size > 1:
            facts: dict[str, Any] = {"config.json": digest_of(checkpoint.settings)}
            facts["weights"] = checkpoint.sample
            facts |= {name: value for name, value in dataclasses.asdict(config).items() if name not in OWN}
            facts["dtype"] = str(dtype).removeprefix("torch.")
            # Agree first: a rank that failed earlier sends its error and not these facts.
            ranks.agree()
            self._compare(facts, config.model)
            own = f"{ranks.members[ranks.rank].host} {checkpoint.stamps}"
            self._hashes = ranks.tell_all(own).index(own) == ranks.rank
        if self._hashes:
            checkpoint.start_hashing()

    def weights_version(self, checkpoint: StoredCheckpoint, model: str) -> str:
        """Collective; returns the version of the weights that all ranks have read.

        Raises CheckpointError if the versions differ, and as `check_unchanged`.
        """
        checkpoint.check_unchanged()
        own = {"weights": checkpoint.version} if self._hashes else {}
        if self._ranks.size == 1:
            return own["weights"]
        self._ranks.agree()
        return self._compare(own, model)["weights"]

    def _compare(self, facts: dict[str, Any], model: str) -> dict[str, Any]:
        """Returns the facts of rank 0; raises CheckpointError on all ranks if any of them has other facts."""
        ranks = self._ranks
        first, *others = ranks.tell_all(facts)
        for rank, other in enumerate(others, 1):
            for name, value in other.items():
                if value != first[name]:
                    error = CheckpointError(
                        f"the ranks would load different models as {model}: {name} is {first[name]} on rank 0 "
                        f"({ranks.members[0].host}) and {value} on rank {rank} ({ranks.members[rank].host})",
                        "give all hosts the same files, revision and settings",
                    )
                    raise agreed(error)
        return first


@contextlib.contextmanager
def loading_on(ranks: Ranks) -> Iterator[Loading]:
    """Collective; re-raises any rank's error on all ranks, which would otherwise wait for it in their first forward."""
    with ranks.raise_on_all_ranks():
        yield Loading(ranks)


def place(model: Any, device: torch.device, ranks: Ranks) -> Any:
    """Moves the model to its device; a sharded one is there already and becomes a plain model again."""
    if not ranks.is_sharded:
        return model.to(device)
    # Keep it out of the config.json that a trainer writes.
    vars(model.config).pop("distributed_config", None)
    return model
