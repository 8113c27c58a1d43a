"""A checkpoint on disk: finds its files, lists their tensors and reads them, without running any of its code."""

from __future__ import annotations

import hashlib
import json
import pickle
import re
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from guerdon.engine.checkpoint.digests import digest_files
from guerdon.errors import CheckpointError

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
NOT_WEIGHTS = re.compile(r"(training_args|optimizer|scheduler|rng_state|adapter_model|consolidated|tokenizer)")
TEXTS = (
    "tokenizer*",
    "vocab*",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "*.model",
    "chat_template*",
    "additional_chat_templates/*",
)
"""Files of tokenizers and chat templates."""
MIB = 1 << 20
PAGE = 1 << 12


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read when it is indexed by `[...]`, as transformers reads safetensors.

    It returns a copy: a view of the mapped file would change under the model when a trainer overwrites the file.
    """

    source: Any
    shape: tuple[int, ...]

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.source[index].clone()
        return tensor

    def get_shape(self) -> list[int]:
        """Returns the shape; transformers calls it to read a slice."""
        return list(self.shape)


@dataclass
class StoredCheckpoint:
    """An opened checkpoint: its parsed `config.json`, and its tensors by name, not yet read.

    `sampled_version` is its version by guerdon 0.1: 12 hex digits from samples of the weights' bytes.
    """

    folder: Path
    settings: dict[str, Any]
    tensors: dict[str, StoredTensor]
    sampled_version: str
    files: Files
    _digests: Future[list[str]] | None = field(default=None, repr=False)

    def start_hashing(self) -> None:
        """Starts to hash the weight files in the background."""
        if self._digests is None:
            self._digests = digest_files(self.files.weights)

    @property
    def version(self) -> str:
        """16 hex digits that change with the weights, the config and the tokenizer.

        Waits until all bytes are hashed; raises CheckpointError if they cannot be read.
        """
        self.start_hashing()
        assert self._digests is not None
        return self.files.version(self.settings, self._digests.result())

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor as float32 on the CPU."""
        return self.tensors[name][...].to(torch.float32)

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file was written to or replaced since the checkpoint was opened."""
        is_same = find_files(self.folder) == self.files and self.files.sampled(self.settings) == self.sampled_version
        if is_same and self._digests is not None:  # files changed within the last seconds are hashed again
            is_same = self._digests.result() == digest_files(self.files.weights).result()
        if not is_same:
            raise CheckpointError(
                f"the files in {self.folder} were written to while they were read",
                "load it again when the writer is done",
            )


@dataclass(frozen=True)
class Files:
    """A checkpoint's files, with the device, inode, size and time of last change of each of them."""

    weights: tuple[Path, ...]
    texts: tuple[Path, ...]
    stamps: tuple[tuple[int, ...], ...]

    def version(self, settings: dict[str, Any], digests: list[str]) -> str:
        """Returns BLAKE2b of the config, the tokenizer's files, and each weight file's name and digest."""
        digest = self._digest_texts(settings, digest_size=8)
        for path, own in zip(self.weights, digests, strict=True):
            digest.update(f"{path.name}:{own};".encode())
        return digest.hexdigest()

    def sampled(self, settings: dict[str, Any]) -> str:
        """Returns guerdon 0.1's version: BLAKE2b of each file's first and last MiB, and of a page every 16 MiB."""
        digest = self._digest_texts(settings, digest_size=6)
        for path in self.weights:
            size = path.stat().st_size
            digest.update(f"{path.name}:{size};".encode())
            with path.open("rb") as file:
                digest.update(file.read(MIB))
                for start in range(16 * MIB, size, 16 * MIB):
                    file.seek(start)
                    digest.update(file.read(PAGE))
                file.seek(max(0, size - MIB))
                digest.update(file.read(MIB))
        return digest.hexdigest()

    def _digest_texts(self, settings: dict[str, Any], digest_size: int) -> Any:
        digest = hashlib.blake2b(digest_of(settings).encode(), digest_size=digest_size)
        for path in self.texts:
            digest.update(f"{path.name}:{path.stat().st_size};".encode() + path.read_bytes())
        return digest


def find_files(folder: Path) -> Files:
    """Returns the folder's files; raises CheckpointError if there are no weights."""
    weights = tuple(sorted(_weight_files(folder)))
    texts = tuple(sorted({path for pattern in TEXTS for path in folder.glob(pattern) if path.is_file()}))
    found = [path.stat() for path in (folder / "config.json", *texts, *weights)]
    return Files(weights, texts, tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in found))


def digest_of(settings: dict[str, Any]) -> str:
    """Returns 12 hex digits that change with the config, except for the path that it was saved to."""
    plain = {name: value for name, value in settings.items() if name != "_name_or_path"}
    return hashlib.blake2b(json.dumps(plain, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()


def open_checkpoint(model: str, revision: str | None = None) -> StoredCheckpoint:
    """Opens a local folder or downloads a hub id; raises CheckpointError if a file is missing or broken."""
    folder = find_folder(model, revision)
    _check_config(folder)
    # Stat before reading or mapping, so that `check_unchanged` notices files that are replaced from now on.
    files = find_files(folder)
    settings = _read_settings(folder)
    sampled = files.sampled(settings)
    tensors: dict[str, StoredTensor] = {}
    for file in files.weights:
        tensors.update(open_safetensors(file) if file.suffix == ".safetensors" else _open_torch(file))
    return StoredCheckpoint(folder, settings, tensors, sampled, files)


def find_folder(model: str, revision: str | None = None) -> Path:
    """Returns `model` if it is a folder, else the local copy of the hub's repository of that name."""
    folder = Path(model).expanduser()
    if folder.is_dir():
        return folder
    if folder.suffix == ".gguf":
        if not folder.is_file():
            raise CheckpointError(f"there is no file {model}", "check the path; a GGUF file must be converted first")
        raise CheckpointError(
            f"{model} is a GGUF file, which cannot be served directly",
            f"`guerdon convert {model} FOLDER` writes a folder that can",
        )
    if folder.suffix == ".py" and folder.is_file():
        raise CheckpointError(
            f"{model} is a Python file", f"to serve a function of it, give {folder.stem}:FUNCTION in the file's folder"
        )
    if folder.is_file():
        raise CheckpointError(f"{model} is a file", "give the folder that holds config.json and the weights")
    if not HUB_ID.fullmatch(model):
        raise CheckpointError(f"there is no folder {model}", "check the path")
    return _download(model, revision)


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    small = ["*.json", "*.txt", "*.model", "*.jinja"]
    try:
        folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*small, "*.safetensors"]))
        if not any(folder.glob("*.safetensors")):
            folder = Path(snapshot_download(model, revision=revision, allow_patterns=[*small, "*.bin", "*.pt"]))
    # The hub's client raises its own errors, ValueError for a malformed name and OSError offline.
    except (HfHubHTTPError, OSError, ValueError) as e:
        reason = next((line for line in str(e).splitlines() if line.strip()), type(e).__name__).strip()
        raise CheckpointError(
            f"{model} is neither a folder here nor could it be downloaded from the hub: {reason}",
            "check the spelling, the network and HF_TOKEN, or download it and give the folder",
        ) from e
    return folder


def _check_config(folder: Path) -> None:
    has_config = (folder / "config.json").is_file()
    # Refused beside weights, too: transformers would apply it to the base model's weights.
    if (folder / "adapter_config.json").is_file():
        raise CheckpointError(
            f"{folder} holds {'an adapter beside a model' if has_config else 'only an adapter'}",
            "merge it into its base model (merge_and_unload) and save that, without adapter_config.json",
        )
    if not has_config:
        if (folder / "model_index.json").is_file():
            raise CheckpointError(f"{folder} holds a diffusion pipeline", "give the folder of a reward model")
        _refuse_gguf(folder, "config.json")
        raise CheckpointError(
            f"{folder} has no config.json", "give a checkpoint's own folder, or copy the base model's config.json there"
        )


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}", "copy it again from where the checkpoint came") from e
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is not a JSON object", "copy it again from where the checkpoint came")
    return settings


def _weight_files(folder: Path) -> tuple[Path, ...]:
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return (folder / name,)
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _shards(index)
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = [p for p in sorted(folder.glob(pattern)) if not NOT_WEIGHTS.search(p.name)]
        if found:
            return tuple(found)
    _refuse_gguf(folder, "weights that transformers loads")
    raise CheckpointError(f"{folder} has no weights", "it needs *.safetensors or *.bin files beside config.json")


def _refuse_gguf(folder: Path, what: str) -> None:
    """Raises CheckpointError if the folder, which lacks `what`, holds a GGUF file instead."""
    if file := next(folder.glob("*.gguf"), None):
        raise CheckpointError(
            f"{folder} has a GGUF file, but no {what}", f"`guerdon convert {file} FOLDER` writes a folder that has"
        )


def _shards(index: Path) -> tuple[Path, ...]:
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise CheckpointError(f"{index} is malformed", "copy it again from where the checkpoint came") from e
    # Refuse paths that lead out of the folder.
    if any(Path(name).name != name for name in names):
        raise CheckpointError(f"{index} is malformed", "copy it again from where the checkpoint came")
    absent = [name for name in names if not (index.parent / name).is_file()]
    if absent:
        raise CheckpointError(
            f"{index.parent} lacks {len(absent)} of {len(names)} weight files: {absent[0]}", "finish the download"
        )
    return tuple(index.parent / name for name in names)


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the file's tensors by name, not yet read; raises CheckpointError if it cannot be read or mapped."""
    try:
        file = safe_open(path, framework="pt")
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    except RuntimeError as e:
        size_gib = path.stat().st_size / 2**30
        raise CheckpointError(
            f"{path} ({size_gib:.1f} GiB) is more than this machine's memory can map",
            "use a machine with more memory, or save the checkpoint in smaller shards or in bfloat16",
        ) from e
    except (SafetensorError, OSError) as e:
        raise CheckpointError(
            f"{path} cannot be read: {e}", "it is truncated or a git-lfs pointer: copy or download it again"
        ) from e
    return {name: StoredTensor(source, tuple(source.get_shape())) for name, source in slices.items()}


def _open_torch(path: Path) -> dict[str, StoredTensor]:
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        # Only the zip format can be mapped; weights_only makes pickle refuse everything but tensors.
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except (pickle.UnpicklingError, RuntimeError, EOFError, OSError, ValueError) as e:
        raise CheckpointError(
            f"{path} is not a plain file of tensors ({type(e).__name__})",
            "it is truncated, or holds Python objects, which are never loaded: save it again as safetensors",
        ) from e
    if not isinstance(data, dict) or not all(isinstance(v, torch.Tensor) for v in data.values()):
        raise CheckpointError(f"{path} is not a state dict", "save the model's state_dict() as safetensors")
    return {name: StoredTensor(tensor, tuple(tensor.shape)) for name, tensor in data.items()}
