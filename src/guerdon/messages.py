"""The one rule for reading conversations, whichever protocol they come by."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from guerdon.core import Message
from guerdon.errors import InvalidRequest


def plain(conversation: Any) -> list[Message]:
    """Returns the conversation with every content as one text; the messages' other fields stay.

    A content is a text, or a list of text parts, which are joined by newlines; beside tool calls it may be null or
    missing, and is then empty. Raises InvalidRequest with the message and the part.
    """
    if not isinstance(conversation, list) or not conversation:
        raise InvalidRequest("messages must be a non-empty list of objects with role and content")
    made: list[Message] = []
    for i, message in enumerate(conversation):
        where = f"message {i}"
        if not isinstance(message, dict):
            raise InvalidRequest(f"{where} is a {type(message).__name__}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"{where} needs a role, such as user or assistant")
        made.append({**message, "content": _text(message, where)})
    return made


def response(conversation: Any) -> str:
    """Returns the assistant's message that ends the conversation; raises InvalidRequest if there is none."""
    last = plain(conversation)[-1]
    if last["role"] != "assistant":
        raise InvalidRequest(
            f"the last message is the {last['role']}'s, not the assistant's: there is no response to score"
        )
    return last["content"]


def transcript(conversation: Sequence[Message]) -> str:
    """Returns a conversation as one text: a single user's message as it is, several each after its role.

    Raises InvalidRequest if a message is malformed.
    """
    messages = plain([*conversation]) if conversation else []
    if len(messages) == 1 and messages[0]["role"] == "user":
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def before_response(conversation: Sequence[Message]) -> list[Message]:
    """Returns the conversation without the assistant's message that ends it; empty if there is none."""
    last = conversation[-1] if conversation else None
    return [*conversation[:-1]] if isinstance(last, dict) and last.get("role") == "assistant" else []


def answered(conversation: Sequence[Message], text: str) -> list[Message]:
    """Returns the conversation with the assistant's response.

    If the last of its messages, of which there must be one, is the assistant's, the response continues it.
    """
    last = conversation[-1]
    if last.get("role") == "assistant" and last.get("content") is not None:
        with suppress(InvalidRequest):  # scoring reports what is not text
            return [*conversation[:-1], {**last, "content": _text(last, "the last message") + text}]
    return [*conversation, {"role": "assistant", "content": text}]


def with_reference(conversation: Any, label: Any) -> Any:
    """Returns the conversation with the label as its last message's `reference`, JSON if it is no text."""
    last = conversation[-1] if isinstance(conversation, list) and conversation else None
    if not isinstance(last, dict):
        return conversation
    reference = label if isinstance(label, str) else json.dumps(label, ensure_ascii=False)
    return [*conversation[:-1], {**last, "reference": reference}]


def part_text(part: Any, where: str) -> str:
    """Returns the text of one part of a content; raises InvalidRequest with `where` it is for any other part."""
    text = part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part
    if not isinstance(text, str):
        raise InvalidRequest(f'{where} is no text; send parts such as {{"type": "text", "text": "..."}} only')
    return text


def _text(message: Message, where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        return "\n".join(part_text(part, f"{where}, part {i}") for i, part in enumerate(content))
    if content is None and message.get("tool_calls"):
        return ""
    raise InvalidRequest(
        f"{where} needs a content that is text, or a list of text parts; only beside tool_calls it may be missing"
    )


def shown(text: str) -> str:
    """Returns a text for an error's message, in quotes, at most its first 40 characters."""
    return repr(text if len(text) <= 40 else text[:40] + "...")
