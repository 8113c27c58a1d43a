"""Cuts long texts into parts that give the same tokens, tokenised one by one, as the whole text.

A cut is before a single space between two letters or digits. What a tokenizer does on one side of it does not depend on
the other side if all its steps are known to be local: the normalizer looks at no more than a character and its marks,
the pre-tokenizer never joins a word to the space after it, and no token spans a word and the space after it. Texts are
not cut for tokenizers that are not known to be local.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

PIECE = 1 << 16
"""Approximate characters tokenised at once: a tokenizer needs up to 155 bytes of memory for each byte of text."""

_BEYOND = re.compile("[^ Ġ▁][ Ġ▁]")
"""A token that spans a word and the space after it, in byte-level and SentencePiece vocabularies."""

_LOCAL_NORMALIZERS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled"}
_LOCAL_REPLACEMENTS = ({"String": " "}, {"Regex": " {2,}"}, {"Regex": r"\s{2,}|[\n\r\t]"}, {"Regex": r"[\n\r\t]"})
_LOCAL_PATTERNS = {
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t|'re|'ve|'m|'ll|'d)"),
    *(r" ?\p{L}+", r" ?\p{N}+", r" ?[^\s\p{L}\p{N}]+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"\p{N}", r"\p{N}{1,3}"),
    *(r" ?[^\s\p{L}\p{N}]+[\r\n]*", r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+"),
    *(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*"),
}
"""Alternatives of known patterns: none matches a space after anything else, or looks behind."""
_DROPPING = {"BertPreTokenizer", "Whitespace", "WhitespaceSplit"}


class Uncut(Exception):
    """A text has too many characters in a row without a place to cut."""


class Cuts:
    """Cuts texts for one tokenizer.

    `drops_space` says whether parts after the first one lose their leading space, because the tokenizer prepends one.
    """

    def __init__(self, drops_space: bool) -> None:
        self._drops_space = drops_space

    @classmethod
    def of(cls, tokenizer: Any) -> Cuts | None:
        """Returns the cuts for a `tokenizers.Tokenizer`, None if its steps are not known to be local."""
        normalizers, pre_tokenizers = _steps(tokenizer.normalizer), _steps(tokenizer.pre_tokenizer)
        if normalizers is None or pre_tokenizers is None:
            return None
        has_spaces = not any(step.get("pattern") == {"String": " "} for step in normalizers)
        # BertNormalizer writes spaces of its own around Chinese characters.
        strips = any(step["type"] == "BertNormalizer" for step in normalizers)
        splits = any(_splits(step, has_spaces) for step in pre_tokenizers)
        contents = [token.content for token in tokenizer.get_added_tokens_decoder().values()]
        tokens = contents if splits else tokenizer.get_vocab()
        is_local = (
            all(_is_local_normalizer(step, pre_tokenizers, has_spaces) for step in normalizers)
            and all(_is_local_pre_tokenizer(step, has_spaces) for step in pre_tokenizers)
            and _is_local_model(tokenizer.model, splits)
            and (splits or (not has_spaces and tokenizer.token_to_id("▁") is not None))
            and not any(strips and text != text.strip() for text in contents)
            and not any(text[:1].isalnum() or text[-1:].isalnum() for text in contents)
            and not any(_BEYOND.search(token) for token in tokens)
        )
        return cls(any(step["type"] == "Prepend" for step in normalizers)) if is_local else None

    def parts(self, text: str, most: int, *, from_end: bool = False) -> Iterator[str]:
        """Yields the text in parts of about `PIECE` characters, the last one first if `from_end`.

        Raises Uncut if a part would have more than `most` characters.
        """
        start, end = 0, len(text)
        while end - start > PIECE:
            # The nearest place between two words, towards the end that is left.
            cut, find = (end - PIECE, text.rfind) if from_end else (start + PIECE - 1, text.find)
            while (cut := find(" ", *((start + 1, cut) if from_end else (cut + 1, end)))) >= 0:
                if 0 < cut < len(text) - 1 and _is_plain(text[cut - 1]) and _is_plain(text[cut + 1]):
                    break
            else:
                cut = start if from_end else end
            begin, stop = (cut, end) if from_end else (start, cut)
            if stop - begin > most:
                raise Uncut
            yield self._part(text, begin, stop)
            start, end = (start, cut) if from_end else (cut, end)
        if start < end:
            yield self._part(text, start, end)

    def _part(self, text: str, start: int, end: int) -> str:
        return text[start + (self._drops_space and start > 0) : end]


def _is_plain(character: str) -> bool:
    """Excludes characters that normalizers decompose, because some of these contain a space."""
    return character.isalnum() and unicodedata.is_normalized("NFKC", character)


def _steps(component: Any) -> list[dict[str, Any]] | None:
    """Returns the steps of a normalizer or pre-tokenizer, None if it is written in Python."""
    if component is None:
        return []
    try:
        state = json.loads(component.__getstate__())
    except Exception:  # tokenizers raises Exception itself
        return None
    return _flat(state)


def _flat(state: dict[str, Any]) -> list[dict[str, Any]]:
    if state["type"] != "Sequence":
        return [state]
    steps = state.get("normalizers") or state.get("pretokenizers") or []
    return [inner for step in steps for inner in _flat(step)]


def _is_local_normalizer(step: dict[str, Any], pre_tokenizers: list[dict[str, Any]], has_spaces: bool) -> bool:
    writes_spaces = any(s["type"] == "Metaspace" and s["prepend_scheme"] == "always" for s in pre_tokenizers)
    match step["type"]:
        case "Replace":
            return step["pattern"] in _LOCAL_REPLACEMENTS and step["content"] in (" ", "▁")
        case "Prepend":
            return step["prepend"] == "▁" and (writes_spaces or not has_spaces)
        case "Strip":
            drops_spaces = any(s["type"] in _DROPPING for s in pre_tokenizers)
            return writes_spaces or drops_spaces or not step["strip_left"]
    return step["type"] in _LOCAL_NORMALIZERS


def _is_local_pre_tokenizer(step: dict[str, Any], has_spaces: bool) -> bool:
    match step["type"]:
        case "Split" if step["pattern"] == {"String": " "}:
            return not has_spaces or (step["behavior"] == "Isolated" and not step["invert"])
        case "Split":
            # Do not split inside parentheses: they are one alternative.
            alternatives = re.split(r"\|(?![^()]*\))", step["pattern"].get("Regex", ""))
            is_isolated = step["behavior"] == "Isolated" and not step["invert"]
            return has_spaces and is_isolated and set(alternatives) <= _LOCAL_PATTERNS
        case "Metaspace":
            return step["replacement"] == "▁"
        case "Digits":
            return True
        case "Punctuation":
            return has_spaces and step["behavior"] == "Isolated"
    return has_spaces and (step["type"] == "ByteLevel" or step["type"] in _DROPPING)


def _splits(step: dict[str, Any], has_spaces: bool) -> bool:
    """Whether a word always ends before the space after it."""
    if step["type"] == "Metaspace":
        return step["split"]
    return has_spaces and (
        step["type"] in _DROPPING or step["type"] == "Split" or (step["type"] == "ByteLevel" and step["use_regex"])
    )


def _is_local_model(model: Any, splits: bool) -> bool:
    kind = type(model).__name__
    if kind == "BPE":
        is_plain = not (model.dropout or model.continuing_subword_prefix or model.end_of_word_suffix)
        return is_plain and (splits or not model.ignore_merges)  # ignore_merges looks up the whole text
    return splits and kind in ("Unigram", "WordPiece", "WordLevel")
