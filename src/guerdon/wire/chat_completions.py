"""OpenAI's chat completions for a judge: the request's body, and the parsed fields of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import orjson

from guerdon.core import Message
from guerdon.wire.bodies import cut

_SHOWN = 300


_WHOLE = ("", "stop", "eos", "eos_token", "end_turn", "stop_sequence", "stop_token", "complete")
_CUT = ("length", "max_tokens", "max_output_tokens", "model_length")
_FILTERED = ("content_filter", "safety", "refusal")
"""Finish reasons of an answer that is whole, too long, or filtered; any other is a fault."""
_TEXT, _THINKING = ("text", "output_text"), ("thinking", "redacted_thinking", "reasoning", "reasoning_content")
"""Types of a content's parts."""


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """One answer: its text without thinking, or why there is none, and the tokens that it was billed for.

    `finish` is the server's finish_reason; `refusal` is the model's own text if it refused, and `fault` says why there
    is no text to read.
    """

    text: str
    finish: str = ""
    refusal: str = ""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    fault: str = ""

    @property
    def outcome(self) -> str:
        """One of `answered`, `refused`, `cut` and `unusable`."""
        finish = self.finish.lower()
        if self.refusal or finish in _FILTERED:
            return "refused"
        if finish in _CUT:
            return "cut"
        return "unusable" if self.fault or finish not in _WHOLE else "answered"


class _Message(msgspec.Struct):
    content: str | list[dict[str, Any] | str] | None = None
    refusal: str | None = None
    reasoning: Any = None
    reasoning_content: Any = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    message: _Message
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = 0


class _Completion(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None


_COMPLETION = msgspec.json.Decoder(_Completion)


def write_messages(messages: Iterable[Message]) -> str:
    """Returns the messages as JSON; raises ValueError for a text that is not valid Unicode."""
    try:
        return orjson.dumps([*messages], option=orjson.OPT_SORT_KEYS).decode()
    except TypeError as e:
        raise ValueError("its text is not valid Unicode: it has a lone surrogate") from e


def write_request(model: str, messages: str, more: Mapping[str, Any] | None = None) -> bytes:
    """Returns the body that sends the messages; equal arguments give equal bytes, whatever the order of `more`."""
    body = {**(more or {}), "model": model, "messages": orjson.Fragment(messages)}
    return orjson.dumps(body, option=orjson.OPT_SORT_KEYS)


def read_answer(body: bytes) -> ChatAnswer:
    """Returns a completion's content; raises ValueError if the body is none."""
    try:
        read = _COMPLETION.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as e:
        raise ValueError(f"it is no chat completion: {e}") from e
    if not read.choices:
        raise ValueError("it has no choices")
    (choice, *others), usage = read.choices, read.usage or _Usage()
    text, refusal, fault = _read_content(choice.message)
    if others:
        text, refusal, fault = "", "", f"it has {1 + len(others)} choices, and one was asked for"
    finish, num_completion = choice.finish_reason or "", usage.completion_tokens or 0
    return ChatAnswer(text, finish, refusal, usage.prompt_tokens, num_completion, fault)


def _read_content(message: _Message) -> tuple[str, str, str]:
    """Returns a message's text, its refusal, and its fault, if any."""
    texts, refusals, is_thought = [], [message.refusal or ""], bool(message.reasoning or message.reasoning_content)
    parts = message.content if isinstance(message.content, list) else [message.content or ""]
    for i, part in enumerate(parts):
        kind, text = ("text", part) if isinstance(part, str) else (part.get("type", "text"), part.get("text"))
        if kind in _TEXT and isinstance(text, str):
            texts.append(text)
        elif kind == "refusal" and isinstance(part, dict):
            refusals.append(str(part.get("refusal") or "without a word"))
        elif kind in _THINKING:
            is_thought = True
        else:
            return "", "", f"part {i} of its content is no text, but of the type {cut(str(kind))}"
    text = "\n".join(texts)
    if text.strip():
        return text, "".join(refusals), ""
    fault = "it calls a tool" if message.tool_calls else "it is all thinking" if is_thought else "it is empty"
    return text, "".join(refusals), fault


def read_error(body: bytes) -> str:
    """Returns the message of an error's body, wherever servers put it; else the start of the body."""
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return cut(body[:_SHOWN].decode(errors="replace"))
    for _ in range(2):
        if isinstance(found, dict):
            found = next((found[key] for key in ("error", "message", "detail") if key in found), found)
    return cut(found if isinstance(found, str) else body[:_SHOWN].decode(errors="replace"))
