"""What bodies without tensors ask to have scored, and by which options; each error names the key and index at fault."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from guerdon.core import Message, ScoreRequest
from guerdon.errors import InvalidRequest
from guerdon.messages import part_text, plain
from guerdon.wire.bodies import check_depth, kind_of
from guerdon.wire.rows import check_count, groups_of

MAX_JOINED = 1 << 24
"""More characters than one prompt comes to with all its responses: the body itself is much smaller then."""

_KINDS = "a string, a list of strings, a list of token ids, or a list of such lists"


def read_input(value: Any, name: str) -> ScoreRequest:
    """The samples of a key that holds texts or token ids, one of either or a list of them."""
    if isinstance(value, str):
        return ScoreRequest(texts=[value])
    first = _entries(value, name, _KINDS)[0]
    if isinstance(first, str):
        return ScoreRequest(texts=read_texts(value, name))
    if isinstance(first, bool | dict | None):
        raise InvalidRequest(f"{name}[0] is {kind_of(first)}; send {_KINDS}")
    return ScoreRequest(tokens=read_ids(value, name))


def read_texts(value: Any, name: str) -> list[str]:
    """One string or a list of them."""
    if isinstance(value, str):
        return [value]
    for i, text in enumerate(_entries(value, name, "a string, or a list of strings")):
        if not isinstance(text, str):
            raise InvalidRequest(f"{name}[{i}] is {kind_of(text)}; send a list of strings only")
    return value


def read_ids(value: Any, name: str) -> list[np.ndarray]:
    """One list of token ids or a list of such lists, as int64 `[T]` each."""
    entries = _entries(value, name, "a list of token ids, or a list of such lists")
    if not isinstance(entries[0], list):
        return [_ids(entries, name)]
    for i, row in enumerate(entries):
        if not isinstance(row, list):
            raise InvalidRequest(f"{name}[{i}] is {kind_of(row)}; send a list of lists of token ids only")
    return [_ids(row, f"{name}[{i}]") for i, row in enumerate(entries)]


def is_single(value: Any) -> bool:
    """Whether a key that was read without an error holds one sample by itself, not a list of samples."""
    return isinstance(value, str) or not isinstance(value[0], str | list)


def read_messages(value: Any, name: str) -> list[Message]:
    """One conversation, as far as its form goes: its contents are judged, and read, where it is scored."""
    for i, message in enumerate(_entries(value, name, "a list of objects with role and content")):
        if not isinstance(message, dict):
            raise InvalidRequest(f"{name}[{i}] is {kind_of(message)}; send an object with role and content")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{name}[{i}].role is {kind_of(message.get('role'))}; send a string, such as user")
    check_depth(value, name)
    return value


def conversed(conversation: list[Message]) -> ScoreRequest:
    """One conversation as a sample; those that differ in the assistant's last message alone are of one group."""
    prompt = conversation[:-1] if conversation[-1]["role"] == "assistant" else conversation
    try:
        told = repr([(message["role"], message["content"]) for message in plain(prompt)])
    except InvalidRequest:  # of the sample itself, in whose place it will be told
        return ScoreRequest(messages=[conversation])
    return ScoreRequest(messages=[conversation], groups=groups_of([told]))


def read_text_or_parts(value: Any, name: str) -> list[str]:
    """One text or a list of them, each a string or an object whose `content` is a list of text parts."""
    if isinstance(value, str | dict):
        return [_text(value, name)]
    entries = _entries(value, name, "a string, or a list of strings")
    return [_text(entry, f"{name}[{i}]") for i, entry in enumerate(entries)]


def joined(prompts: list[str], responses: list[str]) -> ScoreRequest:
    """Each response right behind its prompt, with nothing between them; one prompt goes before all responses.

    Raises InvalidRequest where that one makes far more text of them than was sent.
    """
    if len(prompts) == 1:
        num_characters = len(prompts[0]) * len(responses) + sum(map(len, responses))
        if num_characters > MAX_JOINED:
            raise InvalidRequest(
                f"one prompt of {len(prompts[0]):,} characters before each of {len(responses):,} responses makes "
                f"{num_characters:,} characters, at most {MAX_JOINED:,} are taken; send fewer responses in a request"
            )
        prompts = prompts * len(responses)
    texts = [prompt + response for prompt, response in zip(prompts, responses, strict=True)]
    return ScoreRequest(texts=texts, prompts=prompts, groups=groups_of(prompts))


def with_special_tokens(request: ScoreRequest, body: dict[str, Any], query: Mapping[str, str]) -> ScoreRequest:
    """The request with those in its texts where body or URL ask for them; token ids are taken as they are."""
    request.add_special_tokens = bool(flag(body, query, "add_special_tokens")) and request.texts is not None
    return request


def flag(body: dict[str, Any], query: Mapping[str, str], name: str) -> bool | None:
    """The body's switch, else the one behind the URL's `?`; None where it stands in neither, or is null."""
    value = body.get(name)
    if value is None and name in query:
        if query[name] not in ("true", "false"):
            raise InvalidRequest(f"the URL has {name}={query[name]}; write {name}=true or {name}=false")
        return query[name] == "true"
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name} is {kind_of(value)}; send true or false")
    return value


def integer(body: dict[str, Any], name: str) -> int | None:
    """The body's whole number; None where it has none, or null."""
    value = body.get(name)
    if value is not None and type(value) is not int:
        what = repr(value) if isinstance(value, float) else kind_of(value)
        raise InvalidRequest(f"{name} is {what}; send a whole number")
    return value


def choice(body: dict[str, Any], name: str, *choices: str) -> str | None:
    """The body's word, one of `choices`; None where it has none, or null."""
    value = body.get(name)
    if value is not None and value not in choices:
        what = repr(value) if isinstance(value, str) else kind_of(value)
        raise InvalidRequest(f"{name} is {what}; send {' or '.join(choices)}")
    return value


def refuse(body: dict[str, Any], reasons: Mapping[str, str]) -> None:
    """Raises InvalidRequest where the body asks for what would change the numbers and is not done here.

    `reasons` tell of each such key why not, or what to do; null, false, 0 and what is empty ask for nothing.
    """
    for name, reason in reasons.items():
        if body.get(name):
            raise InvalidRequest(f"{name} is not supported: {reason}")


def _entries(value: Any, name: str, wanted: str) -> list[Any]:
    if not isinstance(value, list):
        raise InvalidRequest(f"{name} is {kind_of(value)}; send {wanted}")
    if not value:
        raise InvalidRequest(f"{name} is an empty list; send {wanted}")
    check_count(len(value), name)
    return value


def _ids(values: list[Any], name: str) -> np.ndarray:
    if not all(type(value) is int for value in values):
        i, wrong = next((i, value) for i, value in enumerate(values) if type(value) is not int)
        what = repr(wrong) if isinstance(wrong, float) else kind_of(wrong)
        raise InvalidRequest(f"{name}[{i}] is {what}; token ids are whole numbers")
    try:
        return np.array(values, np.int64)
    except OverflowError:
        raise InvalidRequest(f"{name} has the id {max(values)}, which is in no model's vocabulary") from None


def _text(value: Any, name: str) -> str:
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        return "\n".join(part_text(part, f"{name}.content[{i}]") for i, part in enumerate(value["content"]))
    if not isinstance(value, str):
        raise InvalidRequest(f"{name} is {kind_of(value)}; send a string")
    return value
