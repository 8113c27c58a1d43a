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
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from guerdon.errors import GuerdonError

if TYPE_CHECKING:
    import torch

_OWN_MODULES = frozenset(
    {
        "guerdon.actor.update",
        "guerdon.actor.rollouts",
        "guerdon.settings.actors",
        "guerdon.actor.policy_group",
        "guerdon.training.algorithms.losses",
        "guerdon.core",
        "guerdon.critic_core",
        "guerdon.distributed.ranks",
        "guerdon.errors",
        "guerdon.training.policy_trainer",
    }
)
"""Of these the data classes, enumerations and errors; nothing but data is made by their constructors."""

_OTHERS = frozenset(
    {
        ("builtins", "complex"),
        ("guerdon.distributed.portable", "_array"),
        ("guerdon.distributed.portable", "_scalar"),
        ("guerdon.distributed.portable", "_tensor"),
        ("guerdon.errors", "_unpickled"),
        *(
            (module, name)
            for module in ("pathlib", "pathlib._local")
            for name in ("Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath")
        ),
    }
)

_DTYPE = re.compile(r"[<>|]([biufcSU])\d{1,6}")
"""Numbers and text. Of numpy's own ways back none is known here: some take bytes for the addresses of objects."""


def dumps(value: Any) -> bytes:
    """The value as `loads` reads it; raises PicklingError for arrays of objects, and whatever pickle raises for what is
    no data."""
    data = io.BytesIO()
    pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _WAYS
    if (torch := sys.modules.get("torch")) is not None:
        # Its own way is a file of torch's within the pickle, which is read as one that may hold any code.
        pickler.dispatch_table[torch.Tensor] = _reduced_tensor
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


def _reduced(array: np.ndarray) -> Any:
    return _array, (_plain(array), array.shape, pickle.PickleBuffer(np.ascontiguousarray(array).data))


def _reduced_scalar(value: np.generic) -> Any:
    array = np.asarray(value)
    return _scalar, (_plain(array), array.tobytes())


def _plain(array: np.ndarray) -> str:
    """Its dtype by name; raises PicklingError where that is not one of numbers or text."""
    if not _DTYPE.fullmatch(array.dtype.str):
        raise pickle.PicklingError(f"an array of {array.dtype} is nothing that ranks tell each other")
    return array.dtype.str


def _array(dtype: str, shape: tuple[int, ...], data: bytes | bytearray) -> np.ndarray:
    """The array of these numbers, which numpy checks against the shape."""
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype) or type(data) not in (bytes, bytearray):
        raise pickle.UnpicklingError(f"an array of {dtype!r} is nothing that ranks tell each other")
    return np.ndarray(shape, dtype, data)


def _scalar(dtype: str, data: bytes) -> Any:
    return _array(dtype, (), data)[()]


_WAYS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: _reduced,
    **{kind: _reduced_scalar for kind in np.sctypeDict.values() if kind not in (np.object_, np.void)},
}
"""How arrays and single numbers are told: as the name of a plain dtype, a shape and bytes."""


def _reduced_tensor(tensor: torch.Tensor) -> Any:
    return _tensor, (tensor.detach().cpu().numpy(),)


def _tensor(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
