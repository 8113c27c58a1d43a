"""Scores a JSONL file: many requests in flight, rows out in the order of the input, continued where it stopped."""

from __future__ import annotations

import gzip
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import numpy as np
import orjson
from tqdm import tqdm

from guerdon.client.results import Scores
from guerdon.core import Message
from guerdon.errors import (
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    PayloadTooLarge,
    SampleFailed,
    ServerFault,
    StartError,
    UnknownModel,
)

ADDED = ("rewards", "attributes", "errors")
"""The fields that an output row has beyond its input row."""

_FORMS = '{"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"}, {"messages"} or {"text"}'

_OF_THE_ROW = (InvalidRequest, PayloadTooLarge, SampleFailed, ServerFault, DeadlineExceeded)
"""Errors that may befall one row; any other would befall all that follow."""

Sample = str | list[Message]
_Row = tuple[dict[str, Any], int]
"""An input row and the number of its samples."""


class Scorer(Protocol):
    """What scores the rows: a RewardClient, or anything that submits as it does."""

    @property
    def submit(self) -> Callable[..., Future[Scores]]: ...


@dataclass(slots=True)
class FileSummary:
    """What a file came to; statistics are over all its rows, also those of an earlier run (`num_resumed`)."""

    num_rows: int = 0
    num_samples: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    seconds: float = 0.0
    first_error: str | None = None
    rewards: list[float] = field(default_factory=list, repr=False)

    @property
    def mean(self) -> float:
        """The mean reward of the samples that did not fail; NaN where there are none."""
        return float(np.mean(self.rewards)) if self.rewards else float("nan")

    def __str__(self) -> str:
        resumed = f" ({self.num_resumed} rows from an earlier run)" if self.num_resumed else ""
        text = f"{self.num_samples} samples in {self.num_rows} rows{resumed}, {self.seconds:.1f} s"
        if self.rewards:
            text += f"; rewards: mean {self.mean:.4f}, min {min(self.rewards):.4f}, max {max(self.rewards):.4f}"
        return text + (f"; {self.num_failed} failed, the first: {self.first_error}" if self.num_failed else "")

    def _add(self, rewards: Sequence[float | None], errors: Sequence[str | None]) -> None:
        self.num_rows += 1
        self.num_samples += len(rewards)
        self.rewards += [reward for reward in rewards if reward is not None]
        self.num_failed += sum(reward is None for reward in rewards)
        self.first_error = self.first_error or next(filter(None, errors), None)


def score_file(
    scorer: Scorer,
    in_path: str | Path,
    out_path: str | Path,
    *,
    template: bool = False,
    max_in_flight: int = 256,
    progress: bool = True,
) -> FileSummary:
    """Scores every row of `in_path` (JSONL, or .gz of it) and writes it with its `rewards` to `out_path`.

    A row is one of {"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"} (with or without a
    prompt), {"messages"} and {"text"}. Prompt and response are joined as they are; a prompt of messages, and any
    prompt with `template`, makes a conversation. `rewards` has one number a sample, null where it failed; then
    `errors` says why. Rows that `out_path` already has are kept and not scored again.

    Raises StartError, before anything is scored, where a row is malformed or `out_path` is of another input; and
    the GuerdonError of a server that does not answer, after which the same call continues.
    """
    source, target = Path(in_path), Path(out_path)
    if target.suffix == ".gz" or target == source:
        raise StartError(f"cannot write to {target}", "give another path, ending in .jsonl")
    num_samples = sum(len(_samples(row, source, line, template)) for line, row in _read(source))
    summary = FileSummary()
    started = time.monotonic()
    waiting: deque[tuple[list[_Row], Future[Scores]]] = deque()
    with open(target, "ab+") as out:
        rows = _read(source)
        _skip_done(rows, out, source, target, summary)
        summary.num_resumed = summary.num_rows
        with tqdm(total=num_samples, initial=summary.num_samples, unit="sample", disable=not progress) as bar:
            try:
                for group in _groups(rows, source, template):
                    waiting.append((group.rows, group.submit(scorer)))
                    while len(waiting) >= max_in_flight or (waiting and waiting[0][1].done()):
                        bar.update(_write(out, *waiting.popleft(), summary))
                while waiting:
                    bar.update(_write(out, *waiting.popleft(), summary))
            finally:
                for _, future in waiting:
                    future.cancel()
    summary.seconds = time.monotonic() - started
    return summary


@dataclass(slots=True)
class _Group:
    """Neighbouring rows with the same prompt; they go in one request."""

    prompt: Any
    rows: list[_Row] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    def submit(self, scorer: Scorer) -> Future[Scores]:
        if not self.samples:
            empty: Future[Scores] = Future()
            empty.set_result(Scores(np.zeros(0, np.float32), []))
            return empty
        kind = "texts" if isinstance(self.samples[0], str) else "messages"
        return scorer.submit(**{kind: self.samples, "groups": [0] * len(self.samples)})


_MAX_GROUP = 64


def _groups(rows: Iterator[tuple[int, dict[str, Any]]], source: Path, template: bool) -> Iterator[_Group]:
    group: _Group | None = None
    for line, row in rows:
        samples, prompt = _samples(row, source, line, template), row.get("prompt")
        if group is not None and not (
            prompt is not None
            and prompt == group.prompt
            and len(group.samples) + len(samples) <= _MAX_GROUP
            and {type(s) for s in samples} == {type(s) for s in group.samples}
        ):
            yield group
            group = None
        group = group or _Group(prompt)
        group.rows.append((row, len(samples)))
        group.samples += samples
    if group is not None:
        yield group


def _write(out: BinaryIO, rows: list[_Row], future: Future[Scores], summary: FileSummary) -> int:
    """Writes the rows with their scores; returns the number of samples."""
    num_samples = sum(count for _, count in rows)
    if not future.done():
        out.flush()
    try:
        scores = future.result()
    except GuerdonError as e:
        if isinstance(e, UnknownModel) or not isinstance(e, _OF_THE_ROW):
            raise
        scores = Scores(np.full(num_samples, np.nan, np.float32), [str(e)] * num_samples)
    start = 0
    for row, count in rows:
        part = slice(start, start + count)
        start += count
        added: dict[str, Any] = {"rewards": scores.rewards[part]}
        if scores.attributes is not None:
            added["attributes"] = np.ascontiguousarray(scores.attributes[part])
        if any(scores.errors[part]):
            added["errors"] = scores.errors[part]
        kept = {key: value for key, value in row.items() if key not in ADDED}
        out.write(orjson.dumps({**kept, **added}, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
        rewards = [None if np.isnan(reward) else reward for reward in scores.rewards[part].tolist()]
        summary._add(rewards, scores.errors[part])
    return num_samples


def _skip_done(
    rows: Iterator[tuple[int, dict[str, Any]]], out: BinaryIO, source: Path, target: Path, summary: FileSummary
) -> None:
    """Consumes the rows that `out` already holds, and drops what follows its last whole line."""
    out.seek(0)
    end = 0
    for number, text in enumerate(out, 1):
        if not text.endswith(b"\n"):
            break
        _, row = next(rows, (0, None))
        try:
            done = orjson.loads(text)
            rewards = done["rewards"]
            is_same = row is not None and _bare(done) == _bare(row)
        except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError):
            is_same = False
        if not is_same:
            raise StartError(
                f"{target}, line {number}: not the scored row of {source}, line {number}; it is of another input",
                "give another output path, or delete this file",
            )
        summary._add(rewards, done.get("errors", ()))
        end += len(text)
    out.truncate(end)


def _bare(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if key not in ADDED}


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The rows with their line numbers from 1; blank lines are skipped."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if text.isspace():
                    continue
                try:
                    row = orjson.loads(text)
                except orjson.JSONDecodeError as e:
                    raise _malformed(path, number, f"not valid JSON ({e})") from e
                if not isinstance(row, dict):
                    raise _malformed(path, number, "not a JSON object")
                yield number, row
    except (OSError, EOFError) as e:
        raise StartError(f"cannot read {path}: {e}", "check the path, and that a .gz file is whole") from e


def _samples(row: dict[str, Any], path: Path, line: int, template: bool) -> list[Sample]:
    prompt = row.get("prompt")
    try:
        if "responses" in row and prompt is not None:
            if not isinstance(row["responses"], list):
                raise ValueError("responses is not a list")
            samples = [_joined(prompt, response, template) for response in row["responses"]]
        elif "response" in row and prompt is not None:
            samples = [_joined(prompt, row["response"], template)]
        elif "chosen" in row and "rejected" in row:
            samples = [_joined(prompt, row[name], template) for name in ("chosen", "rejected")]
        elif "messages" in row:
            samples = [_conversation(row["messages"])]
        elif isinstance(row.get("text"), str):
            samples = [row["text"]]
        else:
            raise ValueError(f"none of the forms {_FORMS}")
    except ValueError as e:
        raise _malformed(path, line, str(e)) from e
    if len({type(sample) for sample in samples}) > 1:
        raise _malformed(path, line, "its responses are both texts and messages")
    return samples


def _joined(prompt: Any, response: Any, template: bool) -> Sample:
    """The sample of a prompt and its response; a response that is a whole conversation stands for itself."""
    if isinstance(response, list):
        conversation = _conversation(response)
        if prompt is None or conversation[0]["role"] != "assistant":
            return conversation
        return [*_turns(prompt), *conversation]
    if not isinstance(response, str):
        raise ValueError(f"a response is a {type(response).__name__}, neither text nor a list of messages")
    if prompt is None:
        return response
    if isinstance(prompt, str) and not template:
        return prompt + response
    return [*_turns(prompt), {"role": "assistant", "content": response}]


def _turns(prompt: Any) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _conversation(prompt)


def _conversation(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one {role, content}")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError("each message must have a role and a content")
    return messages


def _malformed(path: Path, line: int, why: str) -> StartError:
    return StartError(f"{path}, line {line}: {why}", f"each line is one of {_FORMS}")
