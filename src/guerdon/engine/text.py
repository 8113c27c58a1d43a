"""Text and chat messages to token ids, by the checkpoint's own tokenizer and template."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np

from guerdon.core import Message
from guerdon.errors import CheckpointError, InvalidRequest

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

    @classmethod
    def load(cls, folder: Path) -> TextEncoder | None:
        """The folder's tokenizer, None where it has none; raises CheckpointError where it cannot be read."""
        if not any((folder / name).is_file() for name in TOKENIZER_FILES):
            return None
        from transformers import AutoTokenizer

        try:
            return cls(AutoTokenizer.from_pretrained(folder, trust_remote_code=False))
        # Whatever a broken file makes of tokenizers (bare Exception), json, sentencepiece or transformers.
        except Exception as e:
            reason = str(e).strip().splitlines()[0] if str(e).strip() else type(e).__name__
            raise CheckpointError(
                f"the tokenizer in {folder} cannot be read: {reason}",
                "copy its files again, or remove them to serve token ids only",
            ) from e

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
        return tuple(self.encode([text])[0].tolist())

    def encode(self, texts: list[str], where: str = "sentences") -> list[np.ndarray]:
        """Token ids of each text as it is, int64 `[T]`: no BOS or EOS is added, special tokens in the text count.

        Raises InvalidRequest naming the row of a text that is not valid Unicode.
        """
        for row, text in enumerate(texts):
            try:
                text.encode()
            except UnicodeEncodeError as e:
                raise InvalidRequest(
                    f"{where}, row {row}: not valid Unicode (a lone surrogate at character {e.start}); send proper text"
                ) from e
        if self._fast is not None:
            encodings = self._fast.encode_batch_fast(texts, add_special_tokens=False)
            return [np.array(encoding.ids, dtype=np.int64) for encoding in encodings]
        with self._lock:
            return [np.array(self._tokenizer.encode(t, add_special_tokens=False), dtype=np.int64) for t in texts]

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray]:
        """Token ids of each conversation through the chat template, int64 `[T]`.

        What the template writes is all there is: BOS appears if and as often as the template says so. Raises
        InvalidRequest naming the row that is malformed or that the template refuses.
        """
        if not self.takes_messages:
            raise InvalidRequest("this model has no chat template; send sentences or tokens instead of messages")
        return self.encode([self._render(c, row) for row, c in enumerate(conversations)], where="messages")

    def _render(self, conversation: list[Message], row: int) -> str:
        import jinja2

        _check(conversation, row)
        try:
            return self._tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=False)
        # A template is a program over the user's data: what it trips over is the data's shape.
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as e:
            raise InvalidRequest(f"messages, row {row}: the chat template refuses it: {e}") from e


def _check(conversation: list[Message], row: int) -> None:
    if not isinstance(conversation, list) or not conversation:
        raise InvalidRequest(f"messages, row {row}: must be a non-empty list of messages with role and content")
    for i, message in enumerate(conversation):
        if not isinstance(message, dict):
            raise InvalidRequest(
                f"messages, row {row}: message {i} is a {type(message).__name__}, not an object with role and content"
            )
        if not isinstance(message.get("role"), str):
            raise InvalidRequest(f"messages, row {row}: message {i} needs a role, such as user or assistant")
        if not isinstance(message.get("content"), str | list | None) or "content" not in message:
            raise InvalidRequest(f"messages, row {row}: message {i} needs a content that is text")
