"""Scores a JSONL file with many requests in flight, writes the rows in input order, and resumes after a stop."""

from __future__ import annotations

import itertools
import logging
import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import orjson
from tqdm import tqdm

from guerdon.client import Scores
from guerdon.client.jsonl import Sample, is_pair, read_rows, samples_of, strip_added
from guerdon.client.pair_report import PairReport
from guerdon.errors import (
    InvalidRequest,
    Overloaded,
    PayloadTooLarge,
    SampleFailed,
    StartError,
    StorageFailed,
    UnknownModel,
)

log = logging.getLogger(__name__)

_SAME = 0.02
"""Rewards of one text by the same weights differ by less, relatively or absolutely, whatever shares their batch."""

_ROW_ERRORS = (InvalidRequest, PayloadTooLarge, SampleFailed)
"""Errors that a retry would repeat; after any other the row may be scored later."""

_MAX_GROUP = 64
_TIMEOUT_S = 3600.0
"""Long, because no caller waits for a single row, and one slow request should not end the run."""

_LEAST_PAUSE_S = 0.1


class ScoreClient(Protocol):
    """A RewardClient, or anything else with its `submit`."""

    @property
    def submit(self) -> Callable[..., Future[Scores]]: ...


@dataclass(slots=True)
class FileSummary:
    """Counts and statistics of a scored file, over all its rows, also those of an earlier run (`num_resumed`)."""

    num_rows: int = 0
    num_samples: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    num_joined: int = 0
    """Rows whose prompt is a text, to which the responses were appended without `template`."""
    seconds: float = 0.0
    first_error: str | None = None
    rewards: list[float] = field(default_factory=list, repr=False)
    pairs: PairReport = field(default_factory=PairReport, repr=False)
    """The rows with a chosen and a rejected response; `print(summary.pairs)` shows how often the model agrees."""

    @property
    def mean(self) -> float:
        """The mean reward of the samples that did not fail; NaN without any."""
        return float(np.mean(self.rewards)) if self.rewards else float("nan")

    def __str__(self) -> str:
        resumed = f" ({self.num_resumed} rows from an earlier run)" if self.num_resumed else ""
        text = f"{self.num_samples} samples in {self.num_rows} rows{resumed}, {self.seconds:.1f} s"
        if self.rewards:
            text += f"; rewards: mean {self.mean:.4f}, min {min(self.rewards):.4f}, max {max(self.rewards):.4f}"
        return text + (f"; {self.num_failed} failed, the first: {self.first_error}" if self.num_failed else "")

    def _add(self, row: dict[str, Any], rewards: Sequence[float | None], errors: Sequence[str | None]) -> None:
        if is_pair(row):
            self.pairs.add(row, rewards)
        self.num_rows += 1
        self.num_joined += isinstance(row.get("prompt"), str)
        self.num_samples += len(rewards)
        self.rewards += [reward for reward in rewards if reward is not None]
        self.num_failed += sum(reward is None for reward in rewards)
        self.first_error = self.first_error or next(filter(None, errors), None)


def score_file(
    scorer: ScoreClient,
    in_path: str | Path,
    out_path: str | Path,
    *,
    template: bool = False,
    retry_failed: bool = False,
    max_in_flight: int = 256,
    progress: bool = True,
) -> FileSummary:
    """Scores every row of `in_path` (JSONL, or .gz of it) and writes it with its `rewards` to `out_path`.

    A row is one of {"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"} (with or without a
    prompt), {"messages"} and {"text"}. Prompt and response are concatenated; a prompt of messages, and with `template`
    any prompt, makes a conversation. Functions at the server may read a row's prompt and its "label", any JSON value.

    `rewards` has one number a sample, null if it failed; `errors` then says why. `attributes`, if the model has
    several, is a list of numbers a sample, or an object if they have names. `weights_version` names the weights if the
    server does, and `template` is true if it was applied. Rows that `out_path` already has are kept; with
    `retry_failed`, those with failed samples are scored again first. About `max_in_flight` samples are under way at
    once, fewer while the server's queue is full. The path `-` means stdin, which is read to its end first, or stdout,
    which cannot be resumed.

    Before a new row is scored, raises StartError if a row is malformed, or if `out_path` belongs to another input or to
    other weights: its first row with a reward is sent again to learn the server's. Raises StorageFailed if writing
    fails, and the GuerdonError of a server that fails or does not answer; after either, the same call continues.
    """
    target, is_file = Path(out_path), str(out_path) != "-"
    to_file = f"cannot write {target}", "; make room on the disk, or mend it, and the same call continues"
    if retry_failed and not is_file:
        raise StartError("stdout has no rows to score again", "give the output file of the earlier run")
    summary = FileSummary()
    with _source(in_path) as source:
        if is_file:
            _check_paths(source.path, target)
        num_samples = sum(len(samples_of(row, source.name, line, template)) for line, row in source.rows())
        started = time.monotonic()
        output = _Output(source, target if is_file else None, template)
        if is_file and target.exists():
            with _check_storage(*to_file):
                output.check_weights(scorer)
                if retry_failed:
                    output.score_again(scorer, max_in_flight)
        with (
            _check_storage(*(to_file if is_file else ("cannot write stdout", ""))),
            _writing(target) if is_file else nullcontext(sys.stdout.buffer) as out,
        ):
            if is_file:
                output.keep(out, summary)
            summary.num_resumed = summary.num_rows
            rows = itertools.islice(source.rows(), summary.num_resumed, None)
            with (
                tqdm(total=num_samples, initial=summary.num_samples, unit="sample", disable=not progress) as bar,
                RowsInFlight(group_rows(rows, source.name, template), scorer, max_in_flight, out.flush) as answers,
            ):
                for group, scores in answers:
                    for row, part, line in output.lines(group, scores):
                        out.write(line)
                        summary._add(row, _rewards(part), part.errors)
                        bar.update(len(part))
            out.flush()
    summary.seconds = time.monotonic() - started
    return summary


@dataclass(frozen=True, slots=True)
class _Source:
    """The file of the rows, and its name in errors."""

    path: Path
    name: Path

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        return read_rows(self.path, self.name)


@contextmanager
def _source(path: str | Path) -> Iterator[_Source]:
    """Yields the file of the rows; copies stdin to a temporary one, because rows are read twice."""
    if str(path) != "-":
        yield _Source(Path(path), Path(path))
        return
    where = tempfile.gettempdir()
    with ExitStack() as stack:
        with _check_storage(f"cannot keep stdin in {where}", "; make room there, or set TMPDIR"):
            kept = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="guerdon-")), "stdin")
            with kept.open("wb") as file:
                shutil.copyfileobj(sys.stdin.buffer, file)
        yield _Source(kept, Path("stdin"))


def _rewards(scores: Scores) -> list[float | None]:
    return [None if np.isnan(reward) else reward for reward in scores.rewards.tolist()]


class _Output:
    """The scored rows: those that the file already has, and the version of the weights that made them.

    `target` is None for stdout.
    """

    def __init__(self, source: _Source, target: Path | None, template: bool) -> None:
        self._source, self._target, self._template = source, target, template
        self._version: str | None = None

    def lines(self, group: RowGroup, scores: Scores) -> Iterator[tuple[dict[str, Any], Scores, bytes]]:
        """Yields each row of the group with its own scores and its line; raises StartError for other weights."""
        self._check_version(scores.weights_version, _rewards(scores))
        start = 0
        for row, count in group.rows:
            part = slice(start, start + count)
            start += count
            rewards, errors = scores.rewards[part], scores.errors[part]
            added: dict[str, Any] = {"rewards": rewards}
            if scores.attributes is not None:
                names, attributes = scores.attribute_names, np.ascontiguousarray(scores.attributes[part])
                named = (dict(zip(names, values, strict=True)) for values in attributes)
                added["attributes"] = [*named] if names else attributes
            if any(errors):
                added["errors"] = errors
            if scores.weights_version:
                added["weights_version"] = scores.weights_version
            if self._template:
                added["template"] = True
            options = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
            yield row, Scores(rewards, errors), orjson.dumps(strip_added(row) | added, option=options)

    def _check_version(self, version: str, rewards: Iterable[float | None], now: str = "the server has") -> None:
        """Raises StartError if rewards are of another version than those before, or if only some name theirs.

        Rows without any reward need not name one: a request that was refused has none.
        """
        if not version and all(reward is None for reward in rewards):
            return
        if self._version is None:
            self._version = version
        elif version != self._version:
            before, after = (
                f"weights {name}" if name else "weights without a version" for name in (self._version, version)
            )
            if self._target is None:
                raise StartError(f"the server's weights changed from {self._version} to {version}", "score again")
            raise StartError(
                f"{self._target} has rewards of {before}, and {now} {after}",
                "move this file away to score all rows with the server's weights, or serve the earlier ones",
            )

    def check_weights(self, scorer: ScoreClient) -> None:
        """Scores the first row with a reward again; raises StartError unless all rows have its weights.

        Logs a warning if only its rewards differ: settings such as the pooling are no part of the weights' version.
        """
        assert self._target is not None
        first: RowGroup | None = None
        with open(self._target, "rb") as out:
            for samples, row, _ in self._rows(out):
                if first is None and any(reward is not None for reward in row["rewards"]):
                    first = RowGroup(None, [(row, len(samples))], samples)
        if first is not None:
            ((row, _),) = first.rows
            with RowsInFlight(iter([first]), scorer, 1, lambda: None) as answers:
                ((_, scores),) = answers
            if not scores.weights_version and all(scores.errors):
                raise StartError(
                    f"{self._target} has rewards of a row that the model refuses: {scores.errors[0]}",
                    "move this file away, or score it with the model and the settings that began it",
                )
            self._check_version(scores.weights_version, row["rewards"])
            before, now = (np.array(rewards, np.float64) for rewards in (row["rewards"], scores.rewards))
            if not np.allclose(before, now, rtol=_SAME, atol=_SAME, equal_nan=True):
                log.warning(
                    "%s: a row had the rewards %s and gets %s now by the same weights: did it have other settings?",
                    self._target,
                    row["rewards"],
                    _rewards(scores),
                )

    def keep(self, out: BinaryIO, summary: FileSummary) -> None:
        """Adds the rows that `out` already has to the summary, and truncates an incomplete last one."""
        end = 0
        for _, done, text in self._rows(out):
            summary._add(done, done["rewards"], done.get("errors", ()))
            end += len(text)
        out.truncate(end)

    def score_again(self, scorer: ScoreClient, max_in_flight: int) -> None:
        """Replaces the scores of output rows with failed samples: of all, or of none if the server fails."""
        assert self._target is not None
        copy = self._target.with_name(self._target.name + ".part")
        try:
            with open(self._target, "rb") as out, open(self._target, "rb") as failed, open(copy, "wb") as part:
                groups = (
                    RowGroup(None, [(row, len(samples))], samples)
                    for samples, row, _ in self._rows(failed)
                    if None in row["rewards"]
                )
                with RowsInFlight(groups, scorer, max_in_flight, part.flush) as answers:
                    scored = iter(answers)
                    for _, row, text in self._rows(out):
                        if None in row["rewards"]:
                            ((_, _, text),) = self.lines(*next(scored))
                        part.write(text)
            copy.replace(self._target)
        finally:
            copy.unlink(missing_ok=True)

    def _rows(self, out: BinaryIO) -> Iterator[tuple[list[Sample], dict[str, Any], bytes]]:
        """Yields each whole row's samples, output row and line; raises StartError if it is not of this input."""
        rows = self._source.rows()
        out.seek(0)
        for number, text in enumerate(out, 1):
            line, row = next(rows, (0, {}))
            samples = samples_of(row, self._source.name, line, self._template) if row else []
            if not text.endswith(b"\n"):
                start = orjson.dumps(strip_added(row))[:-1] + b',"rewards":['
                if row and (text.startswith(start) or start.startswith(text)):
                    return
                raise self._other_input(number)
            done = _parse_scored(text, len(samples))
            if done is None or strip_added(done) != strip_added(row):
                raise self._other_input(number)
            if done.get("template", False) != self._template:
                raise StartError(
                    f"{self._target}, line {number}: scored {'without' if self._template else 'with'} --template",
                    f"continue it {'without' if self._template else 'with'} --template, or move this file away",
                )
            self._check_version(done.get("weights_version", ""), done["rewards"], f"line {number} of it has")
            yield samples, done, text

    def _other_input(self, number: int) -> StartError:
        return StartError(
            f"{self._target}, line {number}: not the scored row of {self._source.name}, line {number}; it is "
            "of another input",
            "give another output path, or delete this file",
        )


def _parse_scored(text: bytes, num_samples: int) -> dict[str, Any] | None:
    """Returns the output row in a line, None if it is malformed or has another number of samples."""
    try:
        row = orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(row, dict):
        return None
    rewards, errors = row.get("rewards"), row.get("errors", [])
    if not isinstance(rewards, list) or len(rewards) != num_samples or not isinstance(errors, list):
        return None
    return row if all(reward is None or type(reward) in (int, float) for reward in rewards) else None


def _check_paths(source: Path, target: Path) -> None:
    if source.exists() and not source.is_file():
        raise StartError(f"{source} is not a regular file", "write the rows to a file first: they are read twice")
    if target.suffix == ".gz" or target == source or (target.exists() and not target.is_file()):
        raise StartError(f"cannot write to {target}", "give another path, ending in .jsonl")
    if target.exists() and source.exists() and target.samefile(source):
        raise StartError(f"cannot write to {target}: it is the same file as {source}", "give another path")


@contextmanager
def _check_storage(failed: str, remedy: str) -> Iterator[None]:
    """Raises StorageFailed with the remedy if the disk is full, read-only or broken."""
    try:
        yield
    except BrokenPipeError:  # the reader of stdout has gone
        raise
    except OSError as e:
        raise StorageFailed(f"{failed}: {e.strerror or e}{remedy}") from e


@contextmanager
def _writing(target: Path) -> Iterator[BinaryIO]:
    """Opens the output; removes it if the run fails before its first row."""
    was_there = target.exists()
    try:
        with _open(target) as out:
            yield out
    except BaseException:
        if not was_there and target.exists() and not target.stat().st_size:
            target.unlink()
        raise


def _open(target: Path) -> BinaryIO:
    try:
        return open(target, "ab+")
    except OSError as e:
        raise StartError(f"cannot write to {target}: {e.strerror}", "check the folder and its permissions") from e


@dataclass(slots=True)
class RowGroup:
    """Neighbouring rows with the same prompt, each with the number of its samples; sent in one request."""

    prompt: Any
    rows: list[tuple[dict[str, Any], int]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    future: Future[Scores] | None = None
    """None before it is sent, and after the server had no room for it."""

    def submit(self, scorer: ScoreClient) -> None:
        if not self.samples:
            self.future = Future()
            self.future.set_result(Scores(np.zeros(0, np.float32), []))
            return
        kind = "texts" if isinstance(self.samples[0], str) else "messages"
        hints: dict[str, list[Any]] = {}  # which functions at the server may read
        if all(isinstance(row.get("prompt"), str) for row, _ in self.rows):
            hints["prompts"] = [row["prompt"] for row, count in self.rows for _ in range(count)]
        if any("label" in row for row, _ in self.rows):
            hints["labels"] = [row.get("label") for row, count in self.rows for _ in range(count)]
        if len(self.rows) > 1:  # a judge that compares is not to compare those of different rows
            hints["groups"] = [i for i, (_, count) in enumerate(self.rows) for _ in range(count)]
        self.future = scorer.submit(**{kind: self.samples, **hints, "timeout_s": _TIMEOUT_S})

    @property
    def is_busy(self) -> bool:
        return self.future is not None and not self.future.done()


class RowsInFlight:
    """Iterates over the groups with their scores, in order, while later groups are under way.

    Sends groups until `max_samples` samples are under way; halves that limit when the server has no room, and raises it
    again with each answer.
    """

    def __init__(
        self, groups: Iterator[RowGroup], scorer: ScoreClient, max_samples: int, on_wait: Callable[[], None]
    ) -> None:
        self._groups, self._scorer, self._on_wait = groups, scorer, on_wait
        self._max_samples = self._limit = max_samples
        self._waiting: deque[RowGroup] = deque()

    def __enter__(self) -> RowsInFlight:
        return self

    def __exit__(self, *_: object) -> None:
        for group in self._waiting:
            if group.future is not None:
                group.future.cancel()

    def __iter__(self) -> Iterator[tuple[RowGroup, Scores]]:
        while self._fill():
            group = self._waiting[0]
            assert group.future is not None, "the first group is always sent"
            if group.is_busy:
                self._on_wait()
            try:
                scores = group.future.result()
            except Overloaded as e:
                self._make_room(e)
                continue
            except UnknownModel:
                raise
            except _ROW_ERRORS as e:
                n = len(group.samples)
                scores = Scores(np.full(n, np.nan, np.float32), [str(e)] * n)
            self._waiting.popleft()
            self._limit = min(self._max_samples, self._limit + 1)
            yield group, scores

    def _fill(self) -> bool:
        """Sends the groups for which there is room, always the first; returns whether there is one."""
        waiting = self._waiting
        held = sum(len(group.rows) + len(group.samples) for group in waiting)
        while held < 2 * self._max_samples and (group := next(self._groups, None)) is not None:
            waiting.append(group)
            held += len(group.rows) + len(group.samples)
        busy = sum(len(group.samples) for group in waiting if group.is_busy)
        for group in waiting:
            if group.future is None:
                if busy >= self._limit and group is not waiting[0]:
                    break
                group.submit(self._scorer)
                busy += len(group.samples)
        return bool(waiting)

    def _make_room(self, error: Overloaded) -> None:
        """Marks all refused groups as unsent, halves the limit and waits."""
        for group in self._waiting:
            future = group.future
            if future is not None and future.done() and isinstance(future.exception(), Overloaded):
                group.future = None
        self._limit = max(1, self._limit // 2)
        self._on_wait()
        time.sleep(max(_LEAST_PAUSE_S, error.retry_after_s or 0.0))


def group_rows(rows: Iterator[tuple[int, dict[str, Any]]], source: Path, template: bool) -> Iterator[RowGroup]:
    """Yields neighbouring rows with the same prompt as groups of at most 64 samples."""
    group: RowGroup | None = None
    for line, row in rows:
        samples, prompt = samples_of(row, source, line, template), row.get("prompt")
        if group is not None and not (
            prompt is not None
            and prompt == group.prompt
            and len(group.samples) + len(samples) <= _MAX_GROUP
            and {type(s) for s in samples} == {type(s) for s in group.samples}
        ):
            yield group
            group = None
        group = group or RowGroup(prompt)
        group.rows.append((row, len(samples)))
        group.samples += samples
    if group is not None:
        yield group
