"""A teacher's output head as the client has it, and the logits that it makes of hidden states."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from guerdon import tensor_files
from guerdon.errors import GuerdonError, ServerFault, install_command

_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}


@dataclass(frozen=True, slots=True, eq=False)
class Head:
    """A teacher's output head: the matrix, bias, scale and soft cap of its logits.

    `weight` `[V,H]` and `bias` `[V]`, None if the head has none, are float32, float16 or uint16 with the bits of
    bfloat16, which numpy lacks. `soft_cap` is None if logits are not capped. `digest` covers all of these;
    `weights_version` names the weights that the head was fetched with.
    """

    weight: np.ndarray
    bias: np.ndarray | None
    logit_scale: float
    soft_cap: float | None
    digest: str
    weights_version: str
    _on_device: dict[Any, Any] = field(default_factory=dict, init=False, repr=False)

    @classmethod
    def from_file(cls, file: bytes | bytearray) -> Head:
        """Reads the safetensors file that a teacher sends; raises ServerFault if it is malformed."""
        try:
            tensors, metadata = tensor_files.parse(file)
            arrays = {  # copied, to be writable and aligned
                name: np.frombuffer(tensor.data, _DTYPES[tensor.dtype]).reshape(tensor.shape).copy()
                for name, tensor in tensors.items()
            }
            return cls(
                arrays["weight"],
                arrays.get("bias"),
                float(metadata["logit_scale"]),
                float(metadata["soft_cap"]) if "soft_cap" in metadata else None,
                metadata["digest"],
                metadata["weights_version"],
            )
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            raise ServerFault("the server sent a head that cannot be read") from e

    def logits(self, hidden: Any) -> Any:
        """Returns the logits `[N,V]` of hidden states `[N,H]`, a torch tensor on their device and in the head's dtype.

        `hidden` is a tensor or an array. The first call copies the head to the device, where it stays. Raises
        GuerdonError if torch is not installed.
        """
        try:
            import torch
        except ImportError as e:
            raise GuerdonError(
                f"logits need torch, which is not installed: {install_command('server')}, or compute them from weight, "
                "bias, logit_scale and soft_cap as in docs/teacher_forms.md"
            ) from e
        hidden = torch.as_tensor(hidden)
        if hidden.device not in self._on_device:
            arrays = [None if array is None else torch.from_numpy(array) for array in (self.weight, self.bias)]
            self._on_device[hidden.device] = [
                None if x is None else (x.view(torch.bfloat16) if x.dtype == torch.uint16 else x).to(hidden.device)
                for x in arrays
            ]
        weight, bias = self._on_device[hidden.device]
        logits = torch.nn.functional.linear(hidden.to(weight.dtype), weight, bias) * self.logit_scale
        return logits if self.soft_cap is None else self.soft_cap * torch.tanh(logits / self.soft_cap)
