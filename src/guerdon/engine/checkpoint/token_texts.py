"""Texts of single tokens, characters of several tokens whole: as pieces of a text, and as vLLM writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy as np

_UNFINISHED = "\ufffd"
"""A decoder's output for a character with missing bytes."""

_MOST_OF_A_CHARACTER = 4
"""Tokens of one character: each has at least one byte of it."""
_LONGEST_SILENCE = 32
"""Tokens without text after which the context before them is dropped."""


def split_text(decode: Callable[[list[int]], str], ids: list[int]) -> tuple[list[str], list[bool]]:
    """Returns the text that each token adds to those before it, that of a character at its last token.

    And whether the token ends within a character.
    """
    pieces: list[str] = []
    opens: list[bool] = []
    start = read = 0  # the span between them is already in `pieces`, but a decoder needs it as context
    context, waiting = "", 0  # and tokens of a character that is not complete
    for i in range(len(ids)):
        text = decode(ids[start : i + 1])
        known = text.rstrip(_UNFINISHED)  # a token may end one character and begin the next
        is_cut_off = len(known) <= len(context) and waiting + 1 == _MOST_OF_A_CHARACTER
        if is_cut_off or i + 1 == len(ids):
            known = text
        pieces.append(known[len(context) :])
        opens.append(known != text)
        context += pieces[-1]
        waiting = 0 if pieces[-1] or known == text else waiting + 1
        if known == text and (pieces[-1] or i + 1 - start > _LONGEST_SILENCE):
            start, read = read, i + 1
            context = decode(ids[start:read])
    return pieces, opens


class TokenTexts:
    """The texts of one tokenizer's tokens; thread-safe.

    vLLM's rule (`vllm/v1/engine/logprobs.py`): a token has its text alone. If that ends within a character, it has what
    it completes of at most four tokens before it, and nothing if it completes none; those before it have nothing, too.
    """

    def __init__(self, decode: Callable[[list[int]], str], fast: Any) -> None:
        """`fast` is the tokenizer of `tokenizers`, None if there is none."""
        self._decode = decode
        self._fast = fast
        before = {} if fast is None else json.loads(fast.to_str()).get("pre_tokenizer") or {}
        steps = [one for one in before.get("pretokenizers", [before]) if one.get("type") == "Metaspace"]
        self._marker = steps[0].get("replacement", "▁") if steps else None  # the sign of a space in its pieces
        self._alone: dict[int, str] = {}

    def of(self, ids: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> list[str]:
        """Returns the text of each id if it stood at its place among the sequence's `tokens`.

        The sequence's first token is no context of others: vLLM reports nothing for it.
        """
        unique, which = np.unique(ids, return_inverse=True)
        alone = [self._text(i) for i in unique.tolist()]
        texts = [alone[i] for i in which.tolist()]
        is_open = np.array([text.endswith(_UNFINISHED) for text in alone], bool)
        for i in np.flatnonzero(is_open[which]).tolist():
            place = int(places[i])
            texts[i] = self._completed(tokens[max(1, place - _MOST_OF_A_CHARACTER) : place].tolist(), int(ids[i]))
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
        if not any(self._text(i).endswith(_UNFINISHED) for i in before):
            return ""
        for start in range(len(before) - 1, -1, -1):
            text = self._decode([*before[start:], token])
            if not text.endswith(_UNFINISHED):
                end = len(before)
                while end > start and self._text(before[end - 1]).endswith(_UNFINISHED):
                    end -= 1
                told = self._decode(before[start:end]) if end > start else ""
                return text[sum(1 for _ in takewhile(lambda two: two[0] == two[1], zip(told, text, strict=False))) :]
        return ""
