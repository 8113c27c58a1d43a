"""What token ids mean: texts of them, and digests by which two tokenizers are compared without sending either."""

from __future__ import annotations

import hashlib
import json
from typing import Any, Protocol, runtime_checkable

import numpy as np


def identity(tokenizer: Any) -> str:
    """Returns as JSON a digest of a transformers tokenizer's vocabulary and chat template, and its added tokens.

    Added tokens are listed one by one, because models of one family differ in them: another padding token changes no
    other id's meaning. How text is split does not matter to senders of ids.
    """
    added = tokenizer.get_added_vocab()
    if tokenizer.is_fast:
        base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    else:
        size = tokenizer.vocab_size  # special tokens of the vocabulary itself count as added, too, and are below it
        base = {token: i for token, i in tokenizer.get_vocab().items() if i < size or token not in added}
    template = tokenizer.chat_template
    parts = {
        "tokens": _digest(sorted(base.items())),
        "added": {token: i for token, i in sorted(added.items()) if base.get(token) != i},
        "template": _digest(template) if template else "",
    }
    return json.dumps(parts)


def difference(own: str, other: str) -> str | None:
    """Returns why ids of the tokenizer `own` mean other tokens to `other`, both as `identity`; None if they do not."""
    mine, theirs = json.loads(own), json.loads(other)
    if mine["tokens"] != theirs["tokens"]:
        return "their vocabularies differ"
    by_id = {i: token for token, i in theirs["added"].items()}
    for token, i in mine["added"].items():
        if theirs["added"].get(token, i) != i or by_id.get(i, token) != token:
            there = by_id.get(i, "nothing")
            return f"id {i} is {token} to the one, and {there} to the other"
    return None


def reported(config: dict[str, Any]) -> str:
    """Returns the tokenizer's identity from a served model's configuration; "" if it has none."""
    try:
        found = config["parameters"]["tokenizer"]["string_value"]
        return found if {"tokens", "added", "template"} <= json.loads(found).keys() else ""
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


def has_other_template(own: str, other: str) -> bool:
    """Whether both have a chat template, and these differ."""
    mine, theirs = json.loads(own)["template"], json.loads(other)["template"]
    return bool(mine and theirs) and mine != theirs


def _digest(of: Any) -> str:
    return hashlib.blake2b(repr(of).encode(errors="backslashreplace"), digest_size=8).hexdigest()


@runtime_checkable
class Decodes(Protocol):
    """Turns token ids into text."""

    def pieces(self, tokens: np.ndarray) -> list[str]:
        """Returns the text that each token adds to those before it."""
        ...

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of the whole sequence."""
        ...

    def texts_of(self, ids: np.ndarray) -> list[str]:
        """Returns the text of each id by itself."""
        ...

    def texts_among(self, ids: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> list[str]:
        """Returns the text of each id at its place among the sequence's `tokens`, as in vLLM."""
        ...
