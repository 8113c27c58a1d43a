"""A teacher's log-probs of a JSONL file's responses, in shards of safetensors; resumes after a stop.

A shard has whole rows of the file, and these tensors of its S samples with N asked tokens in all:

| tensor | type | holds |
| --- | --- | --- |
| `rows`, `samples` | int64 `[S]` | the row of the file without blank lines, and which of its samples, from 0 |
| `offsets` | int64 `[S+1]` | sample i has the tokens `offsets[i]` to `offsets[i+1]`, none if it failed |
| `tokens`, `logprobs` | int32, float32 `[N]` | the tokens' ids, and their log-probs |
| `top_ids`, `top_logprobs` | int32, float32 `[N,k]` | the k likeliest ids of each, best first |

Its metadata has `first_row`, `next_row`, `digest` (of all rows up to `next_row`) and `errors`, JSON of each failed
sample's number in the shard and why. `logprobs.json` has the settings and versions of all shards.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tqdm import tqdm

from guerdon import durable, tensor_files
from guerdon.client.jsonl import asks_of, read_rows
from guerdon.client.score_file import RowGroup, RowsInFlight
from guerdon.errors import ServerFault, StartError

SETTINGS = "logprobs.json"
SHARD_BYTES = 32 << 20
"""Size at which a shard is written: so much is lost by a crash, and held twice while it is written."""
_ABOUT = ("tokenizer", "dtype")
"""What decides about the numbers beside the weights."""
_TIMEOUT_S = 3600.0
_TABLES = {"tokens": np.int32, "logprobs": np.float32, "top_ids": np.int32, "top_logprobs": np.float32}
_DTYPES = {"float32": "F32", "int32": "I32", "int64": "I64"}


@dataclass(slots=True)
class LogprobSummary:
    """Counts of a run, of all rows, also those of an earlier run (`num_resumed`)."""

    num_rows: int = 0
    num_resumed: int = 0
    num_samples: int = 0
    num_tokens: int = 0
    num_failed: int = 0
    seconds: float = 0.0
    first_error: str = ""

    def __str__(self) -> str:
        resumed = f" ({self.num_resumed} rows from an earlier run)" if self.num_resumed else ""
        text = f"{self.num_tokens:,} tokens of {self.num_samples:,} samples in {self.num_rows:,} rows{resumed}"
        failed = f"; {self.num_failed} failed, the first: {self.first_error}" if self.num_failed else ""
        return f"{text}, {self.seconds:.1f} s{failed}"


@dataclass(slots=True)
class _Row(RowGroup):
    """A row's samples, asked about in one request."""

    asks: dict[str, Any] = field(default_factory=dict)
    digest: str = ""

    def submit(self, scorer: Any) -> None:
        self.future = scorer.submit(**self.asks, token_ids=True, timeout_s=_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class _Asker:
    """A teacher's `submit` with the run's settings."""

    submit: Callable[..., Future[Any]]


def write_logprobs(
    teacher: Any,
    in_path: str | Path,
    folder: str | Path,
    *,
    top_k: int = 32,
    temperature: float = 1.0,
    template: bool = False,
    max_in_flight: int = 64,
    progress: bool = True,
) -> LogprobSummary:
    """Writes the log-probs of each row's response tokens, and their `top_k` likeliest ids, to `folder`; or continues.

    `teacher` is a TeacherClient or a LocalTeacher. A row is one of `score_file`'s, or {"tokens", "prompt_length"}.
    Raises StartError if a row is malformed, if the folder is of another file or other settings, or if the model's
    weights or tokenizer are others; StorageFailed if writing fails; and the GuerdonError of a server that fails or does
    not answer. After the last two the same call continues.
    """
    source, target, started = Path(in_path), Path(folder), time.monotonic()
    num_rows = sum(1 for line, row in read_rows(source) if asks_of(row, source, line, template))
    config = teacher.config()
    about = {key: value["string_value"] for key, value in config.get("parameters", {}).items() if key in _ABOUT}
    settings = {"top_k": top_k, "temperature": temperature, "template": template, "model": config["name"], **about}
    asker = _Asker(lambda **asked: teacher.submit(top_k, temperature=temperature, **asked))
    probe = asker.submit(tokens=[[0, 0]]).result()  # raises if the teacher takes no such settings
    if probe.chunks is not None:
        raise StartError(
            f"{settings['model']} reads the ids of a student with another tokenizer, whose chunks these files lack",
            "serve the model under a second name without student_tokenizer, or ask it while you train",
        )
    with _only_writer(target):
        output = _Output(target, settings, LogprobSummary())
        digest = output.resume(source)
        output.check_version(probe.weights_version)
        summary = output.summary
        rows = _rows(source, template, summary.num_rows, digest)
        with (
            tqdm(total=num_rows, initial=summary.num_rows, unit="row", disable=not progress) as bar,
            RowsInFlight(rows, asker, max_in_flight, lambda: None) as answered,
        ):
            for row, answers in answered:
                output.add(row, answers)
                bar.update()
            output.flush()
    summary.seconds = time.monotonic() - started
    return summary


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Makes and locks the folder; raises StartError if another run writes to it, StorageFailed if the disk fails."""
    with durable.storing(f"cannot write {folder}"):
        durable.make_folder(folder)
        try:
            lock = durable.locked(folder / "lock")
        except BlockingIOError as e:
            raise StartError(f"another run writes to {folder}", "wait for it, or give another folder") from e
        with lock:
            yield


def _rows(source: Path, template: bool, num_done: int, digest: str) -> Iterator[_Row]:
    for number, (line, row) in enumerate(read_rows(source)):
        if number >= num_done:
            digest = _extended(digest, row)
            asks = asks_of(row, source, line, template)
            yield _Row(None, samples=[*next(iter(asks.values()))], asks=asks, digest=digest)


def _extended(digest: str, row: dict[str, Any]) -> str:
    return hashlib.blake2b(digest.encode() + orjson.dumps(row, option=orjson.OPT_SORT_KEYS), digest_size=16).hexdigest()


class _Output:
    """The folder: the shards that are there, and the rows of the next one."""

    def __init__(self, folder: Path, settings: dict[str, Any], summary: LogprobSummary) -> None:
        self._folder, self._settings, self.summary = folder, settings, summary
        self._version = ""
        self._first, self._num_bytes = 0, 0
        self._tables: dict[str, list[np.ndarray]] = {}
        self._errors: dict[int, str] = {}
        self._digest = ""

    def resume(self, source: Path) -> str:
        """Counts what the folder has; returns the digest of its rows. Raises StartError if it is another run's."""
        summary, path = self.summary, self._folder / SETTINGS
        if not path.is_file():
            if any(self._folder.glob("*.safetensors")):
                raise StartError(f"{self._folder} has shards and no {SETTINGS}", "give a new or empty folder")
            return ""
        try:
            told = orjson.loads(path.read_bytes())
            self._version = told.pop("weights_version")
        except (ValueError, KeyError, AttributeError, TypeError) as e:
            raise StartError(f"{path} is damaged ({e})", "give a new or empty folder") from e
        told.setdefault("dtype", self._settings.get("dtype"))  # older folders lack it
        if differs := [name for name in self._settings | told if self._settings.get(name) != told.get(name)]:
            name = differs[0]
            raise StartError(
                f"{self._folder} was begun with {name} {told.get(name)!r}, this run has {self._settings.get(name)!r}",
                "use the same settings and model, or give another folder",
            )
        for shard in sorted(self._folder.glob("shard-*.safetensors")):
            tensors, facts = read_shard(shard)
            if int(facts["first_row"]) != summary.num_rows:
                raise StartError(f"{shard} begins at another row than the shard before ends", "give another folder")
            summary.num_rows, self._digest = int(facts["next_row"]), facts["digest"]
            summary.num_samples += len(tensors["rows"])
            summary.num_tokens += len(tensors["tokens"])
            self._count(json.loads(facts["errors"]).values())
        digest, number = "", 0
        for number, (_, row) in enumerate(read_rows(source), 1):
            if number > summary.num_rows:
                break
            digest = _extended(digest, row)
        if digest != self._digest or number < summary.num_rows:
            raise StartError(f"{self._folder} has rows of another file than {source}", "give another folder")
        summary.num_resumed = self._first = summary.num_rows
        return digest

    def check_version(self, version: str) -> None:
        """Raises StartError if the folder is by other weights; a new one gets its settings."""
        if version and version != self._version:
            if self._version:
                raise StartError(
                    f"{self._folder} is by the weights {self._version}, and the teacher has {version} now",
                    "serve the same weights again, or give another folder",
                )
            self._version = version
            text = orjson.dumps({**self._settings, "weights_version": version}, option=orjson.OPT_INDENT_2)
            durable.write_new(self._folder / SETTINGS, text)

    def add(self, row: Any, answers: Any) -> None:
        """Takes a row's answers, of which a refused request has only errors; writes the shard if it is large enough."""
        summary, top_k = self.summary, self._settings["top_k"]
        self.check_version(answers.weights_version)
        for number, error in enumerate(answers.errors):
            for name, dtype in _TABLES.items():
                table = None if error else getattr(answers, name, None)
                width = [top_k] if name.startswith("top") else []
                count = 0 if error or not answers.tokens else len(answers.tokens[number])
                made = np.empty([count, *width], dtype) if table is None else table[number].astype(dtype, copy=False)
                if len(made) != count:  # all rows after it would be another sample's
                    raise ServerFault(f"the server sent {len(made)} {name} for {count} tokens")
                self._tables.setdefault(name, []).append(made)
                self._num_bytes += made.nbytes
            for name, value in (("rows", summary.num_rows), ("samples", number)):
                self._tables.setdefault(name, []).append(np.array([value]))
            if error:
                self._errors[len(self._tables["rows"]) - 1] = error
                self._count([error])
            summary.num_tokens += len(self._tables["tokens"][-1])
        summary.num_samples += len(answers.errors)
        summary.num_rows += 1
        self._digest = row.digest
        if self._num_bytes >= SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        """Writes a shard of the rows since the last one, if there are any."""
        if self.summary.num_rows == self._first:
            return
        counts = [len(table) for table in self._tables.get("tokens", ())]
        tensors = {name: np.concatenate(tables) for name, tables in self._tables.items()}
        tensors["offsets"] = np.cumsum([0, *counts])
        facts = {"first_row": self._first, "next_row": self.summary.num_rows, "digest": self._digest}
        metadata = {name: str(value) for name, value in facts.items()} | {"errors": json.dumps(self._errors)}
        name = f"shard-{self._first:012d}.safetensors"
        shapes = {stem: (_DTYPES[str(table.dtype)], table.shape) for stem, table in tensors.items()}
        header = tensor_files.header(shapes, metadata)
        parts = (np.ascontiguousarray(table).data for table in tensors.values())
        durable.write_new(self._folder / name, b"".join([header, *parts]))
        self._first, self._num_bytes, self._tables, self._errors = self.summary.num_rows, 0, {}, {}

    def _count(self, errors: Any) -> None:
        for error in errors:
            self.summary.num_failed += 1
            self.summary.first_error = self.summary.first_error or error


def read_shard(path: Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Returns a shard's tensors, mapped and not yet read, and its metadata; raises StartError if it is damaged."""
    dtypes = {stored: np.dtype(name) for name, stored in _DTYPES.items()}
    try:
        found, facts = tensor_files.parse(np.memmap(path, np.uint8, "r").data)
        return {n: np.frombuffer(one.data, dtypes[one.dtype]).reshape(one.shape) for n, one in found.items()}, facts
    except (OSError, ValueError, KeyError) as e:
        raise StartError(f"{path} is no shard of log-probs: {e}", "remove it, and what comes after it") from e
