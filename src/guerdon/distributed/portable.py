"""Python objects as bytes between the ranks, by pickle without its power: what is read builds data, and runs nothing.

Plain containers, text and numbers need no name in a pickle. All else is named by module and class, and only those of
the lists below are known here.
"""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import io
import pickle
import sys
from typing import TYPE_CHECKING, Any

from guerdon.errors import GuerdonError

if TYPE_CHECKING:
    import numpy as np
    import torch

_OWN_MODULES = frozenset(
    {
        "guerdon.actor.learning",
        "guerdon.actor.rollouts",
        "guerdon.actor.settings",
        "guerdon.actor.worker",
        "guerdon.algorithms.losses",
        "guerdon.algorithms.policy_losses",
        "guerdon.core",
        "guerdon.distributed.ranks",
        "guerdon.errors",
        "guerdon.training.policy",
    }
)
"""Of these the data classes, enumerations and errors; nothing but data is made by their constructors."""

_OTHERS = frozenset(
    {
        ("builtins", "bytearray"),
        ("builtins", "complex"),
        ("builtins", "frozenset"),
        ("builtins", "range"),
        ("builtins", "set"),
        ("builtins", "slice"),
        ("guerdon.distributed.portable", "_tensor"),
        ("guerdon.errors", "_unpickled"),
        ("numpy", "dtype"),
        ("numpy", "ndarray"),
        *(
            (f"numpy.{core}.{module}", name)
            for core in ("core", "_core")  # its name until numpy 1 and since numpy 2
            for module, name in (("multiarray", "_reconstruct"), ("multiarray", "scalar"), ("numeric", "_frombuffer"))
        ),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
    }
)


def dumps(value: Any) -> bytes:
    """The value as `loads` reads it; raises whatever pickle raises for what is no data."""
    data = io.BytesIO()
    pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
    if (torch := sys.modules.get("torch")) is not None:
        # Its own way is a file of torch's within the pickle, which is read as one that may hold any code.
        pickler.dispatch_table = copyreg.dispatch_table | {torch.Tensor: _reduced}
    pickler.dump(value)
    return data.getvalue()


def loads(data: bytes) -> Any:
    """What `dumps` was given; raises UnpicklingError, which names what is not known here, for anything else."""
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """The class, or the function that makes one."""
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module in _OWN_MODULES and name.isidentifier():  # no attribute of a class either
            found = super().find_class(module, name)
            if isinstance(found, type) and found.__module__ == module and _is_data(found):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is nothing that ranks tell each other")


def _is_data(found: type) -> bool:
    return dataclasses.is_dataclass(found) or issubclass(found, enum.Enum | GuerdonError)


def _reduced(tensor: torch.Tensor) -> Any:
    return _tensor, (tensor.detach().cpu().numpy(),)


def _tensor(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
