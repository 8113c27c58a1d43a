"""Reads the rows of a JSONL file, checks them, and makes samples of them."""

from __future__ import annotations

import difflib
import functools
import gzip
import itertools
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import orjson

from guerdon.core import Message
from guerdon.errors import StartError
from guerdon.messages import answered

ADDED = ("rewards", "attributes", "errors", "weights_version", "template")
"""The fields that scoring adds to a row."""

_FORMS = '{"prompt", "responses"}, {"prompt", "response"}, {"chosen", "rejected"}, {"messages"} or {"text"}'

_LONG_NUMBER = re.compile(rb"\d{19}")

_ANSWERS = ("responses", "response", "chosen", "rejected")
_CONTEXTS = ("messages", "text", "question", "instruction", "input", "query", "context", "history", "conversations")
"""Keys by which data sets call a prompt."""

_OF_TEMPLATES = ("tools", "chat_template_kwargs")
"""Columns that TRL's RewardTrainer gives to the chat template."""

Sample = str | list[Message]


def strip_added(row: dict[str, Any]) -> dict[str, Any]:
    """Returns the row without the fields that scoring adds."""
    return {key: value for key, value in row.items() if key not in ADDED}


def read_rows(path: Path, name: Path | None = None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields the rows with their line numbers from 1, and skips blank lines; errors call the file `name` if given."""
    name = name or path
    try:
        with gzip.open(path) if path.suffix == ".gz" else open(path, "rb") as file:
            for number, text in enumerate(file, 1):
                if text.isspace():
                    continue
                try:
                    row = orjson.loads(text)
                except orjson.JSONDecodeError as e:
                    raise _malformed(name, number, f"not valid JSON ({e})") from e
                if not isinstance(row, dict):
                    raise _malformed(name, number, "not a JSON object")
                # orjson makes floats of longer integers, which would be other labels.
                if _LONG_NUMBER.search(text) and repr(msgspec.json.decode(text)) != repr(row):
                    raise _malformed(name, number, "a whole number has more than 64 bits; write it in quotes")
                yield number, row
    except (OSError, EOFError, zlib.error) as e:
        raise StartError(f"cannot read {name}: {e}", "check the path, and that a .gz file is whole") from e


def is_pair(row: dict[str, Any]) -> bool:
    """Returns whether the row's samples are a chosen and a rejected response."""
    if "chosen" not in row or "rejected" not in row:
        return False
    return row.get("prompt") is None or not ("responses" in row or "response" in row)


def samples_of(row: dict[str, Any], path: Path, line: int, template: bool) -> list[Sample]:
    """Returns the row's samples, texts or conversations; raises StartError naming the line if its form is unknown."""
    prompt = row.get("prompt")
    try:
        if "prompt" not in row and (near := _misspelt_prompt(tuple(row))):
            raise ValueError(f"it has the key {near!r} and no prompt; did you mean prompt?")
        if prompt is None and (apart := _find_apart(row)):
            raise ValueError(
                f"it has {apart} and no prompt; call {apart} prompt if the answers follow it, or remove it"
            )
        if is_pair(row):
            samples = [_join(prompt, row[name], template) for name in ("chosen", "rejected")]
        elif "responses" in row and prompt is not None:
            if not isinstance(row["responses"], list):
                raise ValueError("responses is not a list")
            samples = [_join(prompt, response, template) for response in row["responses"]]
        elif "response" in row and prompt is not None:
            samples = [_join(prompt, row["response"], template)]
        elif "messages" in row:
            samples = [_check_conversation(row["messages"])]
        elif isinstance(row.get("text"), str):
            samples = [row["text"]]
        else:
            raise ValueError(f"none of the forms has the keys {', '.join(map(str, row)) or 'of an empty object'}")
        if len({type(sample) for sample in samples}) > 1:
            raise ValueError("its responses are both texts and messages")
        if isinstance(samples and samples[0], list) and (name := next(filter(row.get, _OF_TEMPLATES), "")):
            raise ValueError(f"it has {name}, which servers do not render; render the text yourself, or remove it")
    except ValueError as e:
        raise _malformed(path, line, str(e)) from e
    return samples


@functools.lru_cache(64)
def _misspelt_prompt(keys: tuple[str, ...]) -> str | None:
    """Returns the key that seems to be the prompt's: without a prompt the scores would differ."""
    names = {key.lower(): key for key in keys}
    return next((names[name] for name in difflib.get_close_matches("prompt", names, 1, 0.9)), None)


def _find_apart(row: dict[str, Any]) -> str | None:
    """Returns the key of what seems to be the prompt of a row's answers, and would not be scored with them."""
    in_pairs = is_pair(row)
    for name, other in itertools.product(_ANSWERS, _CONTEXTS if in_pairs else ("messages", "text")):
        asked, given = row.get(other), row.get(name)
        for answer in given if name == "responses" and isinstance(given, list) else [given]:
            is_whole = _is_whole(answer, asked) or (not in_pairs and _is_whole(asked, answer))
            if asked and answer is not None and not is_whole:
                return other
    return None


def _is_whole(sample: Any, part: Any) -> bool:
    """Returns whether it is a text with that part, or a conversation with its answer."""
    if isinstance(sample, str):
        return isinstance(part, str) and part.strip() in sample
    roles = [message.get("role") for message in sample if isinstance(message, dict)] if isinstance(sample, list) else []
    return roles[-1:] == ["assistant"] and roles[0] != "assistant"


def _join(prompt: Any, response: Any, template: bool) -> Sample:
    """Returns the sample of a prompt and its response; a response that is a whole conversation is the sample."""
    if isinstance(response, list):
        conversation = _check_conversation(response)
        if prompt is None or conversation[0]["role"] != "assistant":
            if isinstance(prompt, list) and conversation[: len(prompt)] != prompt:
                raise ValueError("a response begins with another message than the assistant's, and not as its prompt")
            return conversation
        return [*_to_turns(prompt), *conversation]
    if not isinstance(response, str):
        raise ValueError(f"a response is a {type(response).__name__}, neither text nor a list of messages")
    if prompt is None:
        return response
    if isinstance(prompt, str) and not template:
        return prompt + response
    return answered(_to_turns(prompt), response)


def _to_turns(prompt: Any) -> list[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else _check_conversation(prompt)


def _check_conversation(messages: Any) -> list[Message]:
    if not isinstance(messages, list) or not messages:
        raise ValueError("messages must be a list of at least one {role, content}")
    for message in messages:
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise ValueError("each message must have a role and a content")
    return messages


def _malformed(path: Path, line: int, why: str) -> StartError:
    return StartError(f"{path}, line {line}: {why}", f"each line is one of {_FORMS}")


def asks_of(row: dict[str, Any], path: Path, line: int, template: bool) -> dict[str, Any]:
    """Returns what a teacher is asked about the row's samples, as keywords of `TeacherClient.submit`.

    Besides the forms of `samples_of` a row may have `tokens`, ids of which the first `prompt_length` are the prompt's.
    Raises StartError naming the line if its form is unknown.
    """
    try:
        if "tokens" in row:
            ids, length = row["tokens"], row.get("prompt_length", 1)
            if not isinstance(ids, list) or not ids or any(type(id_) is not int for id_ in ids):
                raise ValueError("tokens is not a list of ids")
            if type(length) is not int or not 1 <= length <= len(ids):
                raise ValueError(f"prompt_length is {length!r}; it must be from 1 to the {len(ids)} tokens")
            return {"tokens": [ids], "prompt_lengths": [length]}
        samples, prompt = samples_of(row, path, line, template), row.get("prompt")
        for sample in samples:
            if isinstance(sample, list) and sample[-1]["role"] != "assistant":
                raise ValueError(f"its messages end with the {sample[-1]['role']}'s, so no answer is asked about")
        if prompt is None or isinstance(samples[0], list):
            return {"texts" if isinstance(samples[0], str) else "messages": samples}
        return {"texts": samples, "prompts": [prompt] * len(samples)}
    except (ValueError, IndexError) as e:
        raise _malformed(path, line, str(e) if isinstance(e, ValueError) else "it has no responses") from e
