"""Where a frozen model's weights are: on their device, or put away while the model sleeps; the base of `Fallback`.

While it sleeps a GPU's weights are in the host's memory, as an offloaded critic's. Those of a CPU are in a file without
a name, whose space the system frees however the process ends. Modules, names and hooks stay, and the parameters are
empty: waking needs neither the checkpoint nor another self-check.
"""

from __future__ import annotations

import tempfile
from typing import IO, Any

import torch
from torch import Tensor, nn

from guerdon.engine import onednn
from guerdon.engine.fsdp import Fsdp
from guerdon.engine.layers import free_weights
from guerdon.errors import StorageFailed


class Resting:
    """The places of one model's weights."""

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
            self._reorder()

    def _tensors(self) -> dict[Tensor, None]:
        modules = [module for part in self.parts() for module in part.modules()]
        held = [tensor for m in modules for tensor in (*m._parameters.values(), *m._buffers.values())]
        return dict.fromkeys(tensor for tensor in held if tensor is not None)  # a tensor's hash is its identity

    def _reorder(self) -> None:
        for layer in self._reordered:
            layer.weight = nn.Parameter(onednn.reordered(layer.weight.detach()), requires_grad=False)


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
