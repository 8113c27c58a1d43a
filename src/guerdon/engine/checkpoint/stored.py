"""A checkpoint on disk: finds its files, lists their tensors and reads them, without running any of its code."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from guerdon.engine.checkpoint import faults
from guerdon.engine.checkpoint.digests import digest_files
from guerdon.engine.checkpoint.tokenizer_files import PIPELINE, TEKKEN, TOKENIZER_FILES
from guerdon.errors import CheckpointError, first_line
from guerdon.tensor_files import named_files

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
NOT_WEIGHTS = re.compile(
    r"training_args|optimizer|optim_|scheduler|rng_state|extra_state|adapter_model|consolidated|tokenizer"
    r"|(^|[_-])rank_?\d|model_states|^common\."
)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
ADAPTER_CONFIG = "adapter_config.json"
HEAD_FILE = "value_head.safetensors"
"""The head of a critic that guerdon has trained with adapters, or of a reward model of LlamaFactory."""
HEAD_FILES = (HEAD_FILE, "value_head.bin")
_TEXTS = (
    "tokenizer*", "vocab*", "merges.txt", "added_tokens.json", "special_tokens_map.json", "*.model", "chat_template*",
    "additional_chat_templates/*",
)  # fmt: skip
_AGAIN = "copy it again from where the checkpoint came"
FLOATS = ("F64", "F32", "F16", "BF16", "F8")
"""Starts of safetensors' dtypes for weights that are not packed."""
MIB = 1 << 20
PAGE = 1 << 12


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read when it is indexed by `[...]`, as transformers reads safetensors.

    It returns a copy: a view of the mapped file would change under the model when a trainer overwrites the file.
    """

    source: Any
    shape: tuple[int, ...]
    is_float: bool = True

    def __getitem__(self, index: Any) -> torch.Tensor:
        tensor: torch.Tensor = self.source[index].clone()
        return tensor

    def get_shape(self) -> list[int]:
        """Returns the shape; transformers calls it to read a slice."""
        return list(self.shape)


@dataclass
class StoredCheckpoint:
    """An opened checkpoint: its parsed `config.json`, and its tensors by name, not yet read.

    One of an adapter has the config and the tensors of its base model until `merge_adapter` has merged them.
    `sample` is a digest of samples of the weights' bytes, which needs no time, unlike `version`. `digested` is the part
    of the settings that both cover.
    """

    folder: Path
    settings: dict[str, Any]
    tensors: dict[str, StoredTensor]
    sample: str
    files: Files
    digested: dict[str, Any]
    adapter: StoredAdapter | None = None
    _digests: Future[list[str]] | None = field(default=None, repr=False)

    @property
    def base(self) -> StoredCheckpoint | None:
        """The model that an adapter belongs to; None for a whole model."""
        return None if self.adapter is None else self.adapter.base

    @property
    def model_folder(self) -> Path:
        """The folder of the model's `config.json`, for messages: of an adapter that of its base model."""
        return self.folder if self.base is None else self.base.model_folder

    @property
    def text_folder(self) -> Path:
        """The folder of the tokenizer: an adapter without one has its base model's."""
        has_own = any((self.folder / name).is_file() for name in TOKENIZER_FILES)
        return self.folder if has_own or self.base is None else self.base.text_folder

    @property
    def generation_file(self) -> Path:
        """The path of `generation_config.json`, which may not exist; an adapter without one has its base model's."""
        path = self.folder / "generation_config.json"
        return path if path.is_file() or self.base is None else self.base.generation_file

    @property
    def origin(self) -> Origin:
        """A loaded model's facts about its checkpoint."""
        adapter = "" if self.adapter is None else f"{self.adapter.kind} of {self.adapter.base.folder}"
        return Origin(self.folder, self.settings, self.text_folder, self.generation_file, adapter)

    @property
    def stamps(self) -> tuple[tuple[int, ...], ...]:
        """The stamps of all files, a base model's among them."""
        return self.files.stamps + (() if self.base is None else self.base.stamps)

    def start_hashing(self) -> None:
        """Starts to hash the weight files in the background."""
        if self._digests is None:
            self._digests = digest_files(self.files.weights)
        if self.base is not None:
            self.base.start_hashing()

    @property
    def version(self) -> str:
        """16 hex digits that change with the weights, the config and the tokenizer, for an adapter also the base's.

        Waits until all bytes are hashed; raises CheckpointError if they cannot be read.
        """
        self.start_hashing()
        assert self._digests is not None
        own = self.files.version(self.digested, self._digests.result())
        return own if self.base is None else joined(self.base.version, own)

    def read(self, name: str) -> torch.Tensor:
        """Returns one tensor as float32 on the CPU."""
        return self.tensors[name][...].to(torch.float32)

    def check_unchanged(self) -> None:
        """Raises CheckpointError if a file was written to or replaced since the checkpoint was opened."""
        sample = self.files.sample(self.digested)
        if self.base is not None:
            self.base.check_unchanged()
            sample = joined(self.base.sample, sample)
        is_same = find_files(self.folder) == self.files and sample == self.sample
        if is_same and self._digests is not None:  # files changed within the last seconds are hashed again
            is_same = self._digests.result() == digest_files(self.files.weights).result()
        if not is_same:
            raise CheckpointError(
                f"the files in {self.folder} were written to while they were read",
                "load it again when the writer is done",
            )


@dataclass(frozen=True)
class Origin:
    """Where a loaded model comes from, without its tensors; `adapter` describes the one that was merged, if any."""

    folder: Path
    settings: dict[str, Any]
    text_folder: Path
    generation_file: Path
    adapter: str


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter of peft's format: its parsed `adapter_config.json`, its tensors, and the model that it belongs to.

    A critic that guerdon has trained also has the tensors of its `head`, and `facts`, its `trainer.json`; a reward
    model of LlamaFactory has the head alone.
    """

    settings: dict[str, Any]
    tensors: dict[str, StoredTensor]
    base: StoredCheckpoint
    head: dict[str, StoredTensor]
    facts: dict[str, Any]

    @property
    def kind(self) -> str:
        """Such as "LORA, rank 16"."""
        kind, rank = self.settings.get("peft_type", "?"), self.settings.get("r")
        return f"{kind}, rank {rank}" if rank else str(kind)


def joined(base: str, own: str) -> str:
    """Returns 16 hex digits that change with both."""
    return hashlib.blake2b(f"{base}+{own}".encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class Files:
    """A checkpoint's files, with the device, inode, size and time of last change of each of them."""

    weights: tuple[Path, ...]
    texts: tuple[Path, ...]
    stamps: tuple[tuple[int, ...], ...]

    def version(self, settings: dict[str, Any], digests: list[str]) -> str:
        """Returns BLAKE2b of the config, the tokenizer's files, and each weight file's name and digest."""
        digest = self._digest_texts(settings)
        for path, own in zip(self.weights, digests, strict=True):
            digest.update(f"{path.name}:{own};".encode())
        return digest.hexdigest()

    def sample(self, settings: dict[str, Any]) -> str:
        """Returns BLAKE2b of each weight file's first and last MiB, and of a page every 16 MiB."""
        digest = self._digest_texts(settings)
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

    def _digest_texts(self, settings: dict[str, Any]) -> Any:
        digest = hashlib.blake2b(digest_of(settings).encode(), digest_size=8)
        for path in self.texts:
            digest.update(f"{path.name}:{path.stat().st_size};".encode() + path.read_bytes())
        return digest


def find_texts(folder: Path) -> set[Path]:
    """Returns the paths of the tokenizer's and the chat templates' files; nobody reads tekken beside tokenizer.json."""
    patterns = _TEXTS if (folder / PIPELINE).is_file() else (*_TEXTS, TEKKEN)
    return {path for pattern in patterns for path in folder.glob(pattern)}


def find_files(folder: Path) -> Files:
    """Returns the files of a model or an adapter; raises CheckpointError if one is missing or no whole file."""
    is_adapter = _is_there(folder / ADAPTER_CONFIG)
    weights = _named_files(folder, ADAPTER_WEIGHTS) if is_adapter else _weight_files(folder)
    if not weights:
        remedy = "copy it there: adapter_config.json alone is no adapter"
        faults.raise_lacking(folder, " or ".join(ADAPTER_WEIGHTS), remedy)
    weights += [path for path in (folder / name for name in HEAD_FILES) if path.is_file() and path not in weights]
    texts = {path for path in find_texts(folder) if path.is_file() or path.is_symlink()}
    if is_adapter:
        texts -= set(weights)
    config = folder / (ADAPTER_CONFIG if is_adapter else "config.json")
    paths = [config, *sorted(texts), *sorted(weights)]
    for path in paths:
        if not path.is_dir():
            faults.check_file(path, may_be_empty=path in texts)
    found = [path.stat() for path in paths]
    stamps = tuple((s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns) for s in found)
    return Files(tuple(sorted(weights)), tuple(sorted(path for path in texts if path.is_file())), stamps)


def digest_of(settings: dict[str, Any]) -> str:
    """Returns 12 hex digits that change with the config, except for the path that it was saved to."""
    plain = {name: value for name, value in settings.items() if name != "_name_or_path"}
    return hashlib.blake2b(json.dumps(plain, sort_keys=True, default=str).encode(), digest_size=6).hexdigest()


def open_checkpoint(
    model: str, revision: str | None = None, base: str | None = None, above: tuple[Path, ...] = ()
) -> StoredCheckpoint:
    """Opens a local folder or downloads a hub id; raises CheckpointError if a file is missing or broken.

    `base` is the model of an adapter, by default the one that the adapter's own file names. `above` are the adapters
    whose base it is.
    """
    folder = find_folder(model, revision)
    if folder.resolve() in above:
        raise CheckpointError(f"the adapter {folder} is its own base model", "give the model that it was trained on")
    if _is_there(folder / ADAPTER_CONFIG):
        return _open_adapter(folder, base, (*above, folder.resolve()))
    if base is not None:
        raise CheckpointError(f"{model} is no adapter, but a base model is set: {base}", "leave --base out")
    if not _is_there(folder / "config.json"):
        faults.raise_lacking(
            folder, "config.json", "give a checkpoint's folder, or copy the base model's config.json there"
        )
    # Stat before reading or mapping, so that `check_unchanged` notices files that are replaced from now on.
    files = find_files(folder)
    settings = read_settings(folder / "config.json")
    sample = files.sample(settings)
    tensors = _open_files(files.weights, may_be_quantised=bool(faults.find_quantised(settings)[0]))
    faults.check_merged(folder, tensors)
    return StoredCheckpoint(folder, settings, tensors, sample, files, settings)


_NOT_DIGESTED = ("base_model_name_or_path", "revision", "inference_mode")
"""Settings of an adapter that do not change its output for the same base model."""


def _open_adapter(folder: Path, base: str | None, above: tuple[Path, ...]) -> StoredCheckpoint:
    for name in (*WEIGHTS, *(f"{name}.index.json" for name in WEIGHTS)):
        if _is_there(folder / name):
            raise CheckpointError(
                f"{folder} holds an adapter beside a model, {name}: it is unclear which of them is meant",
                f"move {ADAPTER_CONFIG} away to serve the model, or {name} to serve the adapter",
            )
    files = find_files(folder)
    settings = read_settings(folder / ADAPTER_CONFIG)
    head = _open_files(path for path in files.weights if path.name in HEAD_FILES)
    is_ours = bool(head) and not all(name.startswith("v_head.") for name in head)  # as LLaMA-Factory's are
    facts = read_settings(folder / "trainer.json") if is_ours else {}
    tensors = _open_files(path for path in files.weights if path.name not in HEAD_FILES)
    named = base or settings.get("base_model_name_or_path")
    if not isinstance(named, str) or not named:
        raise CheckpointError(f"{folder / ADAPTER_CONFIG} names no base model", "give it: --base FOLDER")
    beside = folder / Path(named).expanduser()
    named = str(beside) if not Path(named).expanduser().is_dir() and beside.is_dir() else named
    try:
        under = open_checkpoint(named, None if base else settings.get("revision"), above=above)
    except CheckpointError as e:
        raise CheckpointError(
            f"the base model of the adapter {folder} cannot be loaded: {e}", f"{e.help}; or give another by --base"
        ) from e
    digested = {name: value for name, value in settings.items() if name not in _NOT_DIGESTED}
    digested |= {name: facts[name] for name in ("mean", "std") if name in facts}
    sample = joined(under.sample, files.sample(digested))
    adapter = StoredAdapter(settings, tensors, under, head, facts)
    return StoredCheckpoint(folder, under.settings, under.tensors, sample, files, digested, adapter)


def _open_files(paths: Iterable[Path], *, may_be_quantised: bool = False) -> dict[str, StoredTensor]:
    """Returns the tensors of all files by their names without wrappers; raises CheckpointError for a strange one."""
    tensors: dict[str, StoredTensor] = {}
    places: dict[str, str] = {}
    for path in paths:
        opened = open_safetensors(path) if path.suffix == ".safetensors" else open_torch(path)
        for stored_name, tensor in opened.items():
            faults.check_tensor(path, stored_name, tensor.shape, tensor.is_float or may_be_quantised)
            name = faults.without_wrappers(stored_name)
            place = f"{stored_name} in {path.name}"
            if name in tensors:
                raise CheckpointError(
                    f"{path.parent} has {name} twice: {places[name]}, {place}",
                    "leave one copy of the model in the folder, and save it unwrapped",
                )
            tensors[name], places[name] = tensor, place
    return tensors


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
        reason = first_line(e)
        raise CheckpointError(
            f"{model} is neither a folder here nor could it be downloaded from the hub: {reason}",
            "check the spelling, the network and HF_TOKEN, or download it and give the folder",
        ) from e
    return folder


def read_settings(path: Path) -> dict[str, Any]:
    """Returns the JSON object in the file; raises CheckpointError if there is none."""
    faults.check_file(path)
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as e:
        raise CheckpointError(f"{path} is not valid JSON: {e}", _AGAIN) from e
    if not isinstance(settings, dict):
        raise CheckpointError(f"{path} is not a JSON object", _AGAIN)
    return settings


def _weight_files(folder: Path) -> list[Path]:
    if found := _named_files(folder, WEIGHTS):
        return found
    for pattern in ("*.safetensors", "*.bin", "*.pt"):
        found = [path for path in sorted(folder.glob(pattern)) if not NOT_WEIGHTS.search(path.name)]
        for path in found:
            if shard := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\.\w+)", path.name):
                start, number, of, count, end = shard.groups()
                names = [f"{start}{i:0{len(number)}}{of}{count}{end}" for i in range(1, int(count) + 1)]
                _check_all_exist(folder, names, f"by the name of {path.name}")
        if found:
            return found
    return faults.raise_lacking(folder, "weights", "it needs *.safetensors or *.bin files beside config.json")


def _named_files(folder: Path, names: tuple[str, ...]) -> list[Path]:
    """Returns the first of the files that exists, or the shards of its index; a dangling link counts as existing."""
    for name in names:
        index = folder / f"{name}.index.json"
        try:
            found = named_files(folder, name)
        except ValueError as e:
            faults.check_file(index)
            raise CheckpointError(f"{index} is malformed", _AGAIN) from e
        if found:
            _check_all_exist(folder, found, f"that {index.name} names")
            return [folder / path for path in found]
    return []


def _is_there(path: Path) -> bool:
    """Whether there is a file, or a link to one that may be missing."""
    return path.is_file() or path.is_symlink()


def _check_all_exist(folder: Path, names: list[str], why: str) -> None:
    absent = [name for name in names if not _is_there(folder / name)]
    if absent:
        what = f"{absent[0]}: it lacks {len(absent)} of {len(names)} weight files {why}"
        faults.raise_lacking(folder, what, "finish the download, or copy the whole folder again")


def open_safetensors(path: Path) -> dict[str, StoredTensor]:
    """Returns the file's tensors by name, not yet read; raises CheckpointError if it cannot be read or mapped."""
    faults.check_file(path)
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
        raise faults.unreadable_safetensors(path, e) from e
    return {
        name: StoredTensor(source, tuple(source.get_shape()), source.get_dtype().startswith(FLOATS))
        for name, source in slices.items()
    }


def open_torch(path: Path) -> dict[str, StoredTensor]:
    """Returns the tensors of a file of `torch.save`, of the older form too; raises CheckpointError."""
    with path.open("rb") as file:
        is_zip = file.read(4) == b"PK\x03\x04"
    try:
        # Only the zip format can be mapped; weights_only makes pickle refuse everything but tensors.
        data = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    except MemoryError:  # it says nothing about the file
        raise
    except Exception as e:  # damaged bytes lead torch's reader to IndexError, KeyError, AssertionError
        raise faults.unreadable_torch(path, e) from e
    faults.check_state_dict(path, data)
    return {name: stored_tensor(tensor) for name, tensor in data.items()}


def stored_tensor(tensor: torch.Tensor) -> StoredTensor:
    """Returns a tensor in memory as if it were in a file."""
    return StoredTensor(tensor, tuple(tensor.shape), tensor.is_floating_point())
