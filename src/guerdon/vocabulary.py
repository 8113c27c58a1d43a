"""What each token id means, told briefly, so that two tokenizers can be compared without sending either."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def identity(tokenizer: Any) -> str:
    """Returns as JSON what ids mean to transformers' tokenizer: a digest of its vocabulary, and the tokens added to it.

    Added tokens are told one by one, because models of one family differ in them: a padding token more changes the
    meaning of no other id. How text is split matters to nobody who sends ids. `template` is the chat template's digest.
    """
    added = tokenizer.get_added_vocab()
    if tokenizer.is_fast:
        base = tokenizer.backend_tokenizer.get_vocab(with_added_tokens=False)
    else:
        size = tokenizer.vocab_size  # special tokens of the vocabulary itself count as added, too, and are below it
        base = {token: i for token, i in tokenizer.get_vocab().items() if i < size or token not in added}
    template = tokenizer.chat_template
    told = {
        "tokens": _digest(sorted(base.items())),
        "added": {token: i for token, i in sorted(added.items()) if base.get(token) != i},
        "template": _digest(template) if template else "",
    }
    return json.dumps(told)


def difference(own: str, other: str) -> str | None:
    """Returns why ids of the tokenizer with the identity `own` mean other tokens to `other`; None if they do not."""
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
    """Returns the identity that a served model's configuration has of its tokenizer; empty if it has none."""
    try:
        told = config["parameters"]["tokenizer"]["string_value"]
        return told if {"tokens", "added", "template"} <= json.loads(told).keys() else ""
    except (AttributeError, KeyError, TypeError, ValueError):
        return ""


def has_other_template(own: str, other: str) -> bool:
    """Whether both have a chat template, and not the same."""
    mine, theirs = json.loads(own)["template"], json.loads(other)["template"]
    return bool(mine and theirs) and mine != theirs


def _digest(of: Any) -> str:
    return hashlib.blake2b(repr(of).encode(errors="backslashreplace"), digest_size=8).hexdigest()
