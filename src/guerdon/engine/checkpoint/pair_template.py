"""What truncation leaves of texts, and how a tokenizer puts two of them into one sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from guerdon.core import Sequence, Truncation
from guerdon.errors import InvalidRequest

RowT = TypeVar("RowT", list[int], np.ndarray)

_PROBES = (("a", "b c d"), ("b c d", "a"))


@dataclass(frozen=True)
class PairTemplate:
    """The special tokens `before`, `between` and `after` two texts.

    Token types are 0 up to `num_first` tokens after the first text, and 1 from there on; None if all are 0.
    """

    before: tuple[int, ...] = ()
    between: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    num_first: int | None = None

    @classmethod
    def of(cls, tokenizer: Any, encode: Callable[[str], list[int]], *, add_special_tokens: bool) -> PairTemplate | None:
        """Returns what transformers' tokenizer does with two probes; None if it treats them differently or refuses.

        `encode` returns the ids of a text without special tokens. Not thread-safe.
        """
        found = set()
        for first, second in _PROBES:
            try:
                if tokenizer.is_fast:  # asks the pipeline, which a call of some classes would change
                    backend, has_types = tokenizer.backend_tokenizer, "token_type_ids" in tokenizer.model_input_names
                    (made,) = backend.encode_batch([(first, second)], add_special_tokens=add_special_tokens)
                    row, types = made.ids, made.type_ids if has_types else None
                else:
                    made = tokenizer(first, second, add_special_tokens=add_special_tokens)
                    row, types = made["input_ids"], made.get("token_type_ids")
            except (TypeError, ValueError, NotImplementedError):  # it takes no pairs
                return None
            found.add(cls._read(row, types, encode(first), encode(second)))
        return found.pop() if len(found) == 1 else None

    @classmethod
    def _read(cls, row: list[int], types: list[int] | None, first: list[int], second: list[int]) -> PairTemplate | None:
        starts = [i for i in range(len(row)) if row[i : i + len(first)] == first]
        ends = [i for i in range(len(row), 0, -1) if row[:i][-len(second) :] == second]
        if not (first and second and starts and ends):
            return None
        stop, start = starts[0] + len(first), ends[0] - len(second)
        if stop > start:
            return None
        template = (tuple(row[: starts[0]]), tuple(row[stop:start]), tuple(row[ends[0] :]))
        if types is None or 1 not in types:
            return cls(*template)
        change = types.index(1)
        is_known = stop <= change <= start and set(types[:change]) <= {0} and set(types[change:]) == {1}
        return cls(*template, change - stop) if is_known else None

    @property
    def num_added(self) -> int:
        """The number of special tokens."""
        return len(self.before) + len(self.between) + len(self.after)

    def join(
        self,
        first: np.ndarray | InvalidRequest,
        second: np.ndarray | InvalidRequest,
        truncation: Truncation | None,
        bos: int | None,
    ) -> Sequence | InvalidRequest:
        """Returns the sequence of two texts' ids, int64 `[T]`, the longer one truncated first, or the first error.

        The error of a text, or of a truncation that leaves nothing of the second. A second `bos` is left out.
        """
        if isinstance(first, InvalidRequest):
            return first
        if isinstance(second, InvalidRequest):
            return second
        if truncation is not None and truncation.max_tokens is not None:
            room = truncation.max_tokens - self.num_added
            if room < 0:
                return no_room(truncation.max_tokens, self.num_added)
            num_first, num_second = longest_first(len(first), len(second), room)
            if len(second) and not num_second:
                return InvalidRequest(
                    f"truncation to {truncation.max_tokens} tokens leaves nothing of the response, which is the second "
                    "text of the pair; allow more tokens"
                )
            first = truncated(first, Truncation(num_first, truncation.side))
            second = truncated(second, Truncation(num_second, truncation.side))
        if bos is not None and [*self.before[-1:], *first[:1]] == [bos, bos]:
            first = first[1:]
        parts = (self.before, first, self.between, second, self.after)
        row = np.concatenate([np.asarray(part, np.int64) for part in parts])
        start = None if self.num_first is None else len(self.before) + len(first) + self.num_first
        return Sequence(row, second_start=start)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Returns how many tokens of both texts stay if `room` are left: the longer one is cut first.

    As in the library tokenizers, an odd token goes to the text that was longer, or else to the second.
    """
    shorter = min(first, second, room // 2)
    longer = min(max(first, second), room - shorter)
    return (longer, shorter) if first > second else (shorter, longer)


def truncated(ids: RowT, truncation: Truncation | None) -> RowT:
    """Returns what truncation leaves of the ids of one text."""
    surplus = 0 if truncation is None or truncation.max_tokens is None else len(ids) - truncation.max_tokens
    if truncation is None or surplus <= 0:
        return ids
    return ids[surplus:] if truncation.side == "left" else ids[: truncation.max_tokens]


def no_room(bound: int, added: int) -> InvalidRequest:
    """Returns the error if at most `bound` tokens may stay, and `added` special ones leave nothing of the text."""
    return InvalidRequest(
        f"truncation to {bound} tokens leaves nothing of the text beside the {added} special tokens that are added; "
        "allow more tokens"
    )
