"""The bases of `Forward`: where its weights are, and that it leaves a path that fails while it serves."""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable
from typing import IO, Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from guerdon.core import SAME_BITS, ModelInfo
from guerdon.distributed.ranks import Ranks
from guerdon.engine import onednn
from guerdon.engine.fsdp import Fsdp
from guerdon.engine.host import mapping_blocks
from guerdon.engine.layers import free_weights
from guerdon.engine.microbatches import LengthClasses
from guerdon.errors import GuerdonError, RanksLost, StorageFailed, describe, is_out_of_memory


class Resting:
    """The places of one frozen model's weights: on their device, or put away while the model sleeps.

    While it sleeps a GPU's weights are in the host's memory, as an offloaded critic's. Those of a CPU are in a file
    without a name, whose space the system frees however the process ends. Modules, names and hooks stay, and the
    parameters are empty: waking needs neither the checkpoint nor another self-check.
    """

    trunk: Any
    device: torch.device
    _fsdp: Fsdp
    _file: IO[bytes] | None = None
    _shapes: list[tuple[Tensor, torch.Size]]
    _reordered: list[nn.Linear]

    def parts(self) -> tuple[nn.Module, ...]:
        """Returns the modules that hold all weights."""
        raise NotImplementedError

    @property
    def is_awake(self) -> bool:
        """Whether the weights are where they compute."""
        return self._file is None and next(self.trunk.parameters()).device.type == self.device.type

    def offload(self) -> None:
        """Moves the weights to the host's memory; nothing may be computed until `onload`."""
        self._fsdp.reset()
        for part in self.parts():
            part.to("cpu")
        torch.cuda.empty_cache()

    def onload(self) -> None:
        """Moves the weights back to the device; if it raises, some may be there until `offload`."""
        for part in self.parts():
            part.to(self.device)

    def discard(self) -> int:
        """Frees the weights, even if something else refers to the model; nothing can be computed any more.

        Returns how many bytes they had.
        """
        num_bytes = sum(_local(tensor).nbytes for tensor in self._tensors())
        free_weights(*self.parts())
        if self._file is not None:
            self._file.close()
        return num_bytes

    def sleep(self) -> int:
        """Gives back the device's memory, on a CPU the process's; nothing may be computed until `wake_up`. Idempotent.

        Returns the weights' bytes, 0 if they were away. Raises StorageFailed if the folder of temporary files has no
        room; the model is awake then.
        """
        num_bytes = 0
        if self.device.type != "cpu":
            num_bytes = sum(_local(tensor).nbytes for tensor in self._tensors())
            self.offload()
        elif self._file is None:
            tensors = list(self._tensors())
            file = tempfile.TemporaryFile(prefix="guerdon-asleep-")  # noqa: SIM115
            try:
                for tensor in tensors:  # one at a time is brought into the plain order
                    num_bytes += file.write(_bytes(onednn.dense(_local(tensor)).contiguous()))
                file.flush()
            except OSError as e:
                file.close()
                raise StorageFailed(f"{tempfile.gettempdir()} has no room for the weights: {e.strerror}") from e
            linears = [module for module in self.trunk.modules() if isinstance(module, nn.Linear)]
            self._reordered = [layer for layer in linears if layer.weight.is_mkldnn]
            shapes = [_local(tensor).shape for tensor in tensors]
            for layer in self._reordered:
                empty = torch.empty(0, dtype=layer.weight.dtype)
                layer.weight = nn.Parameter(empty, requires_grad=False)
            tensors = list(self._tensors())
            self._file, self._shapes = file, list(zip(tensors, shapes, strict=True))
            for tensor in tensors:
                _put(tensor, _local(tensor).new_empty(0))
        return num_bytes

    def wake_up(self) -> None:
        """Takes the weights back, bit for bit; idempotent. If it raises, the model is still asleep."""
        if self.device.type != "cpu":
            self.onload()
        elif self._file is not None:
            self._file.seek(0)
            found = [_local(tensor).new_empty(shape) for tensor, shape in self._shapes]
            for tensor in found:
                if self._file.readinto(into := _bytes(tensor)) != len(into):  # type: ignore[attr-defined]
                    raise StorageFailed("the file of the sleeping model's weights cannot be read")
            for (tensor, _), own in zip(self._shapes, found, strict=True):
                _put(tensor, own)
            self._file.close()
            self._file, self._shapes = None, []
            with mapping_blocks():
                for layer in self._reordered:
                    layer.weight = nn.Parameter(onednn.reordered(layer.weight.detach()), requires_grad=False)

    def _tensors(self) -> dict[Tensor, None]:
        modules = [module for part in self.parts() for module in part.modules()]
        held = [tensor for m in modules for tensor in (*m._parameters.values(), *m._buffers.values())]
        return dict.fromkeys(tensor for tensor in held if tensor is not None)  # a tensor's hash is its identity


def _local(tensor: Any) -> Tensor:
    """Returns the tensor, of one that is split over ranks this rank's shard."""
    return getattr(tensor, "_local_tensor", tensor).detach()


def _put(tensor: Any, data: Tensor) -> None:
    if hasattr(tensor, "_local_tensor"):
        tensor._local_tensor = data
    else:
        tensor.data = data


def _bytes(tensor: Tensor) -> Any:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


log = logging.getLogger(__name__)

T = TypeVar("T")

OTHER_BITS = "bits may change with the batch"
"""What a start on a CPU says if `SAME_BITS` is not proved."""


class Fallback(Resting):
    """The policy of `Forward` for its path."""

    trunk: Any
    path: str
    info: ModelInfo
    ranks: Ranks
    length_classes: LengthClasses

    def use(self, path: str) -> None:
        """Sets the trunk to what `path` needs."""
        raise NotImplementedError

    def reset_after_error(self) -> None:
        """Makes the trunk usable again after a pass that raised."""
        raise NotImplementedError

    def needs_last(self, path: str) -> bool:
        """Whether the path must compute rows with their last token, although no state that is read sees it.

        Some rotary frequencies depend on the row's length. So does sparse attention as transformers computes it: of
        keys with equal scores it takes others.
        """
        return self.length_classes.depend_on_length or not path.startswith("packed")

    def seen(self, rows: list[np.ndarray], path: str) -> list[np.ndarray]:
        """Returns the rows as they are computed by the path: here unchanged."""
        return rows

    def leave_path(self, why: str) -> None:
        """Makes every later forward the plain one, one row at a time, and warns; `why` is the error that it raised."""
        left = self.path
        if left == "single":
            return
        if self.ranks.is_leader:
            log.warning(
                "%s: the path %s fails on samples that the plain forward computes, and is not used any more, which is "
                "slower; report this: %s",
                self.info.name,
                left,
                why,
            )
        onednn.restore(self.trunk)
        proofs = tuple(f"{OTHER_BITS}: {left} failed" if proof == SAME_BITS else proof for proof in self.info.proofs)
        why = f"{left} failed while it served: {why}"
        self.info = dataclasses.replace(self.info, path="single", why=why, proofs=proofs)
        self._switch("single")

    def retry_plainly(self, work: Callable[[], T]) -> T:
        """Returns what `work` does; if it fails by the chosen path but not by the plain one, leaves the path.

        `work` must undo its effects if it raises, and raise on all ranks if any does.
        """
        chosen = self.path
        try:
            return work()
        except Exception as e:
            if chosen == "single" or isinstance(e, RanksLost) or is_out_of_memory(e):
                raise
            why = (str(e) if isinstance(e, GuerdonError) else describe(e)).split("\n", 1)[0]
        self._switch("single")  # out here, because the error keeps the frames that hold the activations
        try:
            result = work()
        except Exception:
            self._switch(chosen)
            raise
        self.path = chosen
        self.leave_path(why)
        return result

    def _switch(self, path: str) -> None:
        self.path = path
        self.use(path)
        self.reset_after_error()
