"""Texts of single tokens as vLLM writes them beside log-probs, with spaces, and characters of several tokens whole."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

UNFINISHED = "\ufffd"
"""A decoder's output for a character with missing bytes."""

_CONTEXT = 4
"""Tokens before another that may hold the beginning of its character, of four bytes at most."""


class TokenTexts:
    """The texts of one tokenizer's tokens; thread-safe.

    vLLM's rule (`vllm/v1/engine/logprobs.py`): a token has its text alone. If that ends within a character, it has what
    it completes of at most four tokens before it, and nothing if it completes none; those before it have nothing, too.
    """

    def __init__(self, decode: Callable[[list[int]], str], fast: Any) -> None:
        """`fast` is the tokenizer of `tokenizers`, None if there is none."""
        self._decode = decode
        self._fast = fast
        self._marker = None if fast is None else _space_marker(fast)
        self._alone: dict[int, str] = {}

    def of(self, ids: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> list[str]:
        """Returns the text of each id if it stood at its place among the sequence's `tokens`.

        The sequence's first token is no context of others: vLLM reports nothing for it.
        """
        unique, which = np.unique(ids, return_inverse=True)
        alone = [self._text(i) for i in unique.tolist()]
        texts = [alone[i] for i in which.tolist()]
        is_open = np.array([text.endswith(UNFINISHED) for text in alone], bool)
        for i in np.flatnonzero(is_open[which]).tolist():
            place = int(places[i])
            texts[i] = self._completed(tokens[max(1, place - _CONTEXT) : place].tolist(), int(ids[i]))
        return texts

    def _text(self, token: int) -> str:
        if token not in self._alone:
            text = self._decode([token])
            if self._marker is not None:  # decoders drop spaces where they take them for a sentence's beginning
                piece = self._fast.id_to_token(token) or ""
                num_spaces = len(piece) - len(piece.lstrip(self._marker))
                text = " " * (num_spaces - (len(text) - len(text.lstrip(" ")))) + text
            self._alone[token] = text
        return self._alone[token]

    def _completed(self, before: list[int], token: int) -> str:
        """Returns the text that the token completes after its predecessors, empty if its character stays open."""
        if not any(self._text(i).endswith(UNFINISHED) for i in before):
            return ""
        for start in range(len(before) - 1, -1, -1):
            text = self._decode([*before[start:], token])
            if not text.endswith(UNFINISHED):
                end = len(before)
                while end > start and self._text(before[end - 1]).endswith(UNFINISHED):
                    end -= 1
                told = self._decode(before[start:end]) if end > start else ""
                return text[sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(told, text, strict=False))) :]
        return ""


def _space_marker(fast: Any) -> str | None:
    """Returns the sign of a space in SentencePiece's pieces, None if the tokenizer has no such pieces."""
    before = json.loads(fast.to_str()).get("pre_tokenizer") or {}
    for one in before.get("pretokenizers", [before]):
        if one.get("type") == "Metaspace":
            return one.get("replacement", "▁")
    return None
