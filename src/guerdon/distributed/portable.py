"""Python objects as bytes between the ranks: pickle restricted to data, so that reading runs no code.

Plain containers, text and numbers are allowed. Everything else is named in a pickle by module and class, and only the
names listed below are allowed.
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
        "guerdon.teacher_core",
        "guerdon.training.policy_trainer",
    }
)
"""Modules whose dataclasses, enums and errors are allowed; their constructors only make data."""

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
"""Dtypes of numbers and text. numpy's own reconstructors are not allowed: some read bytes as object addresses."""


def dumps(value: Any) -> bytes:
    """Serialises a value for `loads`; raises PicklingError for object arrays, and what pickle raises for non-data."""
    data = io.BytesIO()
    pickler = pickle.Pickler(data, pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = copyreg.dispatch_table | _WAYS
    if (torch := sys.modules.get("torch")) is not None:
        # torch's own reduction embeds a torch file, which may hold code.
        pickler.dispatch_table[torch.Tensor] = lambda x: (_tensor, (x.detach().cpu().numpy(),))
    pickler.dump(value)
    return data.getvalue()


def loads(data: bytes) -> Any:
    """Deserialises what `dumps` wrote; raises UnpicklingError with the name that is not allowed."""
    return _Unpickler(io.BytesIO(data)).load()


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Returns an allowed class, or a function that makes one."""
        if (module, name) in _OTHERS:
            return super().find_class(module, name)
        if module in _OWN_MODULES and name.isidentifier():  # rejects a class's attributes
            found = super().find_class(module, name)
            is_own = isinstance(found, type) and found.__module__ == module
            if is_own and (dataclasses.is_dataclass(found) or issubclass(found, enum.Enum | GuerdonError)):
                return found
        raise pickle.UnpicklingError(f"{module}.{name} may not be exchanged between ranks")


def _plain(array: np.ndarray) -> str:
    """Returns the dtype's name; raises PicklingError unless it is of numbers or text."""
    if not _DTYPE.fullmatch(array.dtype.str):
        raise pickle.PicklingError(f"an array of {array.dtype} may not be exchanged between ranks")
    return array.dtype.str


def _array(dtype: str, shape: tuple[int, ...], data: bytes | bytearray) -> np.ndarray:
    """Makes an array; numpy checks the data against the shape."""
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype) or type(data) not in (bytes, bytearray):
        raise pickle.UnpicklingError(f"an array of {dtype!r} may not be exchanged between ranks")
    return np.ndarray(shape, dtype, data)


def _scalar(dtype: str, data: bytes) -> Any:
    return _array(dtype, (), data)[()]


_WAYS: dict[type, Callable[[Any], Any]] = {
    np.ndarray: lambda x: (_array, (_plain(x), x.shape, pickle.PickleBuffer(np.ascontiguousarray(x).data))),
    **{
        kind: lambda x: (_scalar, (_plain(np.asarray(x)), np.asarray(x).tobytes()))
        for kind in np.sctypeDict.values()
        if kind not in (np.object_, np.void)
    },
}
"""Reduces arrays and numpy scalars to the name of a plain dtype, a shape and bytes."""


def _tensor(array: np.ndarray) -> torch.Tensor:
    import torch

    return torch.from_numpy(array)
