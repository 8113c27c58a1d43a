"""Live weights: a trainer replaces a served model's weights by vLLM's four phases, over HTTP or by files.

Each tensor is checked and written to a new checkpoint on disk, so that few are in memory. Only a complete checkpoint is
loaded, while the weights that serve are put away on disk: a trainer that dies changes nothing, and two models are in
memory only if the trainer asks for `beside`, or if they cannot be put away.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from guerdon import tensor_files
from guerdon.errors import Forbidden, InvalidRequest, StorageFailed, Unavailable
from guerdon.server.model_repository import Repository
from guerdon.tensor_files import TensorBytes
from guerdon.wire.forms.vllm_control import InitInfo

_BITS: dict[str, np.dtype[Any]] = {"F32": np.dtype("<u4"), "BF16": np.dtype("<u2"), "F16": np.dtype("<u2")}
"""The dtypes of weights, and their bits."""
_AT_ONCE = 1 << 22
"""Numbers that are blended at once."""
_INDEX = "model.safetensors.index.json"


@dataclass(slots=True)
class _Update:
    """An update in progress: its id, its folder, and the file of each tensor that has arrived."""

    id: str
    folder: Path
    base: Path
    wanted: dict[str, TensorBytes]
    is_tied: bool
    files: dict[str, str] = field(default_factory=dict)
    fault: str = ""


class WeightUpdates:
    """The updates of a server's models, one at a time for each. Belongs to one asyncio loop."""

    def __init__(self, repository: Repository, folder: str | None) -> None:
        """`folder` has the files that trainers may name; None turns updates off."""
        self._repository = repository
        self._root = None if folder is None else Path(folder).expanduser().resolve()
        self._settings: dict[str, InitInfo] = {}
        self._open: dict[str, _Update] = {}
        self._own: dict[str, Path] = {}
        self._places: dict[str, tempfile.TemporaryDirectory[str]] = {}
        self._locks: dict[str, asyncio.Lock] = {}

    def lock(self, name: str) -> asyncio.Lock:
        """Returns the lock of a model's updates: its phases come one after the other."""
        return self._locks.setdefault(name, asyncio.Lock())

    def init(self, name: str, settings: InitInfo) -> None:
        """Adopts the settings of a model's updates, and forgets one that is open; raises InvalidRequest, Forbidden."""
        if self._root is None:
            raise Forbidden("this server takes no live weights: start it with --weight-transfer FOLDER")
        if not 0 <= (ema := settings.ema) < 1:
            raise InvalidRequest(f"ema is {ema:g}; it must be at least 0 and below 1, which would change nothing")
        self._repository.folder_of(name)
        self.drop(name)
        self._settings[name] = settings

    def drop(self, name: str) -> None:
        """Forgets the update that is open, if any."""
        if (update := self._open.pop(name, None)) is not None:
            shutil.rmtree(update.folder, ignore_errors=True)

    async def start(self, name: str) -> str:
        """Begins an update, and drops one that was not finished; returns its id."""
        if name not in self._settings:
            raise InvalidRequest(f"live weights of {name} are not set up: POST /init_weight_transfer_engine first")
        self.drop(name)
        base = self._repository.folder_of(name)
        place = self._places.setdefault(name, tempfile.TemporaryDirectory(prefix="guerdon-weights-"))
        self._open[name] = update = await asyncio.to_thread(_begin, base, Path(tempfile.mkdtemp(dir=place.name)))
        return update.id

    async def add(self, name: str, update_id: str, source: bytes | bytearray | str) -> int:
        """Takes the tensors of a body, or of the file of that name; returns how many are still missing.

        Raises InvalidRequest for a tensor of another name or shape, one that came before, and for a torn file; then the
        update cannot be finished. Raises StorageFailed.
        """
        update = self._find(name, update_id)
        try:
            tensors = await asyncio.to_thread(self._tensors, source)
            await asyncio.to_thread(_keep, update, tensors, self._settings[name].ema)
        except (InvalidRequest, StorageFailed) as e:
            update.fault = str(e)
            raise
        return len(update.wanted) - len(update.files)

    async def finish(self, name: str, update_id: str, client: str) -> str:
        """Swaps the new weights in, and returns their version; raises InvalidRequest unless all have arrived.

        Raises Unavailable while the model sleeps or is being changed: the update may be finished later. Else it ends.
        """
        update, settings = self._find(name, update_id), self._settings[name]
        try:
            missing = update.wanted.keys() - update.files.keys()
            if update.fault or missing:
                why = update.fault or f"{len(missing)} tensors are missing, such as {min(missing)}"
                raise InvalidRequest(f"the update of {name} is not complete: {why}; begin it again")
            if self._repository.folder_of(name) != update.base:
                raise InvalidRequest(f"{name} was loaded again since the update began; begin it again")
            if settings.ema:
                self._repository.check_unchanged(name, update.base)
            version = await self._repository.load_folder(name, str(update.folder), client, beside=settings.beside)
        except (Unavailable, asyncio.CancelledError):  # as the server stops; then the swap goes on, in its folder
            raise
        except BaseException:
            self.drop(name)
            raise
        del self._open[name]
        if (before := self._own.get(name)) is not None:
            await asyncio.to_thread(shutil.rmtree, before, ignore_errors=True)
        self._own[name] = update.folder
        return version

    def _find(self, name: str, update_id: str) -> _Update:
        update = self._open.get(name)
        if update is None or update_id not in ("", update.id):
            other = "" if update is None else f" with the id {update_id}: another began since"
            raise InvalidRequest(f"no update of {name} is open{other}; POST /start_weight_update first")
        return update

    def _tensors(self, source: bytes | bytearray | str) -> dict[str, TensorBytes]:
        if not isinstance(source, str):
            return _parse(source, "the body")
        assert self._root is not None
        path = (self._root / source).resolve()
        if not path.is_relative_to(self._root) or not path.is_file():
            raise InvalidRequest(f"there is no file {source!r} in the folder of --weight-transfer")
        return _read(path)


def _keep(update: _Update, tensors: dict[str, TensorBytes], ema: float) -> None:
    """Writes the tensors to a file of the update, blended with those that serve if there is an `ema`."""
    if update.is_tied:  # state_dict() has the output layer a second time
        tensors.pop("lm_head.weight", None)
    for name, tensor in tensors.items():
        own = update.wanted.get(name)
        if own is None:
            raise InvalidRequest(f"{name} is none of the model's tensors, which are named as in its checkpoint")
        if own.shape != tensor.shape:
            raise InvalidRequest(f"{name} has shape {list(tensor.shape)}, and the model's has {list(own.shape)}")
        if name in update.files:
            raise InvalidRequest(f"{name} was sent before in this update")
    file_name = f"model-{len(update.files):06d}.safetensors"
    described = {name: ("F32" if ema else tensor.dtype, tensor.shape) for name, tensor in tensors.items()}
    try:
        with (update.folder / file_name).open("wb") as file:
            file.write(tensor_files.header(described, {"format": "pt"}))
            for name, tensor in tensors.items():
                if not ema:
                    file.write(tensor.data)
                    continue
                pairs = zip(_pieces(update.wanted[name]), _pieces(tensor), strict=True)
                for old, new in pairs:
                    file.write((old.astype(np.float64) * ema + new.astype(np.float64) * (1 - ema)).astype("<f4").data)
        update.files |= dict.fromkeys(tensors, file_name)
        (update.folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": update.files}))
    except OSError as e:
        raise StorageFailed(f"{update.folder} cannot take the weights: {e.strerror}") from e


def _begin(base: Path, folder: Path) -> _Update:
    """Returns an update of the checkpoint `base`, whose other files it copies; raises InvalidRequest, StorageFailed."""
    try:
        file_names = tensor_files.named_files(base, "model.safetensors")  # those that serve
        if not file_names or not all((base / name).is_file() for name in file_names):
            raise InvalidRequest(f"live weights need a checkpoint of model.safetensors, and {base.name} has none")
        wanted = {name: tensor for file in file_names for name, tensor in _read(base / file).items()}
        for path in base.iterdir():
            if path.is_file() and path.suffix not in (".safetensors", ".bin", ".pt") and path.name != _INDEX:
                shutil.copyfile(path, folder / path.name)
        is_tied = json.loads((folder / "config.json").read_text()).get("tie_word_embeddings") is True
    except OSError as e:
        raise StorageFailed(f"{folder} cannot take the files of {base}: {e.strerror}") from e
    return _Update(secrets.token_hex(8), folder, base, wanted, is_tied and "lm_head.weight" not in wanted)


def _read(path: Path) -> dict[str, TensorBytes]:
    try:
        return _parse(np.memmap(path, np.uint8, "r").data, path.name)
    except (OSError, ValueError) as e:
        raise InvalidRequest(f"{path.name} cannot be read: {e}") from e


def _parse(data: Any, what: str) -> dict[str, TensorBytes]:
    """Returns the tensors of a file of safetensors; raises InvalidRequest if it is torn, or none, or has no weights."""
    try:
        found, _ = tensor_files.parse(data)
    except ValueError as e:
        raise InvalidRequest(f"{what} is no whole file of safetensors: {e}") from e
    if other := next((name for name, tensor in found.items() if tensor.dtype not in _BITS), None):
        raise InvalidRequest(f"{what} has {other} as {found[other].dtype}; weights are F32, BF16 or F16")
    return found


def _pieces(tensor: TensorBytes) -> Iterator[np.ndarray]:
    """Yields the tensor's numbers as float32, a few MiB at a time."""
    bits = np.frombuffer(tensor.data, _BITS[tensor.dtype])
    for start in range(0, len(bits), _AT_ONCE):
        some = bits[start : start + _AT_ONCE]
        if tensor.dtype == "BF16":
            yield (some.astype(np.uint32) << 16).view(np.float32)
        else:
            yield some.view(np.float32 if tensor.dtype == "F32" else np.float16).astype(np.float32)
