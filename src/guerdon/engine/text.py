"""Text and chat messages to token ids, by the checkpoint's own tokenizer and template."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence as ListLike
from pathlib import Path
from typing import Any, Literal

import numpy as np

from guerdon.core import Message, Truncation
from guerdon.errors import CheckpointError, InvalidRequest
from guerdon.messages import plain
from guerdon.vocabulary import identity

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "spm.model",
    "vocab.json",
    "vocab.txt",
)


_UNFINISHED = "\ufffd"
"""What a decoder has in place of a character of which bytes are missing."""

_MOST_OF_A_CHARACTER = 4
"""Tokens: each has a byte of it at least."""

_LONGEST_SILENCE = 32
"""Tokens that may say nothing before what came before them is forgotten."""


def load_tokenizer(folder: Path) -> Any:
    """The folder's tokenizer as transformers reads it, None where it has none; CheckpointError where it cannot be."""
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    # Whatever a broken file makes of tokenizers (bare Exception), json, sentencepiece or transformers.
    except Exception as e:
        reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
        raise CheckpointError(
            f"the tokenizer in {folder} cannot be read: {reason}",
            "copy its files again, or remove them to work with token ids only",
        ) from e


class TextEncoder:
    """A tokenizer that adds nothing of its own; every method may be called from several threads at once."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self._lock = threading.Lock()
        if self._fast is not None:
            # Set once and never again: changing these while another thread encodes is what fast tokenizers refuse.
            self._fast.no_truncation()
            self._fast.no_padding()
        self._adds_bos = self._finds_bos()

    def vocabulary(self) -> str:
        """12 hex digits that change with the tokens and their ids."""
        tokens = sorted(self._tokenizer.get_vocab().items())
        return hashlib.blake2b(repr(tokens).encode(errors="backslashreplace"), digest_size=6).hexdigest()

    def identity(self) -> str:
        """Returns what ids mean to the tokenizer, as `guerdon.vocabulary` compares it."""
        return identity(self._tokenizer)

    @classmethod
    def load(cls, folder: Path) -> TextEncoder | None:
        """The folder's tokenizer, None where it has none; raises CheckpointError where it cannot be read."""
        tokenizer = load_tokenizer(folder)
        return None if tokenizer is None else cls(tokenizer)

    @property
    def takes_messages(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, None where the tokenizer names none."""
        return self._tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        """The padding token, None where the tokenizer names none."""
        return self._tokenizer.pad_token_id

    def has_token(self, text: str) -> bool:
        """Whether `text` is one token of the vocabulary by itself."""
        return text in self._tokenizer.get_vocab()

    def separator_ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a step separator standing by itself, as TRL's PRM trainer appends them to each step."""
        return tuple(self._ids([text])[0])

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]:
        """Token ids of each text as it is, int64 `[T]`: no BOS or EOS is added, special tokens in the text count.

        With `add_special_tokens` the tokenizer adds what it is configured to, save a second BOS before one that the
        text has; `truncation`, which is for these alone, leaves room for it, as transformers does. A text that is not
        valid Unicode has the error in its place, and so has one where there is no room for what is added.
        """
        made: list[Any] = [_not_unicode(text) for text in texts]
        fine = [i for i, error in enumerate(made) if error is None]
        read = [texts[i] for i in fine]
        rows = self._surrounded(read, truncation) if add_special_tokens else self._ids(read)
        for i, ids in zip(fine, rows, strict=True):
            made[i] = ids if isinstance(ids, InvalidRequest) else np.array(ids, dtype=np.int64)
        return made

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray | InvalidRequest]:
        """Token ids of each conversation through the chat template, int64 `[T]`.

        What the template writes is all there is: BOS appears if and as often as the template says so. A
        conversation that is malformed, or that the template refuses, has the error in its place.
        """
        made: list[Any] = [self._render(conversation) for conversation in conversations]
        texts = [i for i, text in enumerate(made) if isinstance(text, str)]
        for i, ids in zip(texts, self.encode([made[i] for i in texts]), strict=True):
            made[i] = ids
        return made

    def render_prompts(self, conversations: list[list[Message]]) -> list[str | InvalidRequest]:
        """What the chat template makes of each conversation that an assistant is to answer.

        One that ends with an assistant's message asks for the rest of it. A conversation that is malformed, or that
        the template refuses, has the error in its place.
        """
        return [self._render(conversation, is_prompt=True) for conversation in conversations]

    def render(self, conversation: list[Message]) -> str | InvalidRequest:
        """Returns what the chat template makes of a whole conversation, or the error if it refuses it."""
        return self._render(conversation)

    def pieces(self, tokens: np.ndarray) -> list[str]:
        """The text that each token adds to those before it, special tokens included.

        Of a character that several tokens make up, the last one has it, and those before it nothing.
        """
        ids, pieces = tokens.tolist(), []
        start = read = 0  # what lies between them was told already: a decoder begins with the next one otherwise
        told = ""
        for i in range(len(ids)):
            text = self._text(ids[start : i + 1])
            waits = text.endswith(_UNFINISHED) and i + 1 - read < _MOST_OF_A_CHARACTER and i + 1 < len(ids)
            pieces.append("" if waits else text[len(told) :])
            if not waits and (pieces[-1] or i + 1 - start > _LONGEST_SILENCE):
                start, read = read, i + 1
                told = self._text(ids[start:read])
        return pieces

    def _text(self, ids: list[int]) -> str:
        if self._fast is not None:
            return self._fast.decode(ids, skip_special_tokens=False)
        with self._lock:
            return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _ids(self, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        if self._fast is not None:
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=add_special_tokens)
            return [encoding.ids for encoding in encodings]
        with self._lock:
            return [self._tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    def _surrounded(self, texts: list[str], truncation: Truncation | None) -> ListLike[list[int] | InvalidRequest]:
        """The ids of each text and the special tokens around it, together at most `truncation.max_tokens`."""
        if truncation is None or truncation.max_tokens is None:
            rows = self._ids(texts, add_special_tokens=True)
        else:
            bound, added = truncation.max_tokens, (self._fast or self._tokenizer).num_special_tokens_to_add(False)
            if bound < added:
                refusal = f"truncation to {bound} tokens leaves no room for the {added} special tokens that are added"
                return [InvalidRequest(refusal) for _ in texts]
            rows = [self._cut(text, bound, bound - added, truncation.side) for text in texts]
        bos = self._tokenizer.bos_token_id
        return [ids[1:] if self._adds_bos and ids[:2] == [bos, bos] else ids for ids in rows]

    def _finds_bos(self) -> bool:
        """Whether a BOS before the text is among the special tokens that the tokenizer adds."""
        bos = self._tokenizer.bos_token_id
        return bos is not None and self._ids(["a"], add_special_tokens=True)[0][:1] == [bos]

    def _cut(self, text: str, bound: int, room: int, side: Literal["left", "right"]) -> list[int]:
        """At most `bound` ids, of which `room` are the text's own."""
        if self._fast is None:
            with self._lock:
                self._tokenizer.truncation_side = side
                return self._tokenizer.encode(text, truncation=True, max_length=bound)
        # Not by the tokenizer's own truncation, a setting that other threads may not see changed.
        encoding = self._fast.encode(text, add_special_tokens=False)
        encoding.truncate(room, direction=side)
        return self._fast.post_process(encoding, add_special_tokens=True).ids

    def _render(self, conversation: list[Message], is_prompt: bool = False) -> str | InvalidRequest:
        import jinja2

        try:
            conversation = plain(conversation)
            if is_prompt and not self.takes_messages:
                raise InvalidRequest("the tokenizer has no chat template")
            continues = is_prompt and conversation[-1]["role"] == "assistant"
            return self._tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=is_prompt and not continues,
                continue_final_message=continues,
            )
        except InvalidRequest as e:
            return e
        # A template is a program over the user's data: what it trips over is the data's shape.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError, RecursionError) as e:
            return InvalidRequest(f"the chat template refuses the messages: {e}")


def _not_unicode(text: str) -> InvalidRequest | None:
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return InvalidRequest(
            f"the text is not valid Unicode (a lone surrogate at character {e.start}); send proper text"
        )
    return None
