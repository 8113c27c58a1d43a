"""Turns text and chat messages into token ids, with the checkpoint's own tokenizer and chat template."""

from __future__ import annotations

import dataclasses
import hashlib
import threading
from collections.abc import Generator, Iterator, Mapping
from collections.abc import Sequence as ListLike
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from tokenizers import Tokenizer, processors

from guerdon.core import Message, Sequence, Truncation
from guerdon.endings import Ending, find_ending
from guerdon.engine.checkpoint import cuts
from guerdon.engine.checkpoint.pair_template import PairTemplate, RowT, no_room, truncated
from guerdon.engine.checkpoint.template_check import reads
from guerdon.engine.checkpoint.token_texts import TokenTexts, split_text
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.memory import trim
from guerdon.messages import plain
from guerdon.settings.config import RenderingConfig
from guerdon.vocabulary import identity

T = TypeVar("T")

Steps = Generator[None, None, list[np.ndarray | InvalidRequest]]
PairSteps = Generator[None, None, list[Sequence | InvalidRequest]]

_MOST_TEXTS = 1024
"""Texts that are tokenised at once: while they are handed over and taken back no other thread runs."""

_MOST_AT_ONCE = 1 << 20
"""Most characters of a text that cannot be cut, unless the model accepts more tokens."""
_MOST_A_TOKEN = 16
"""Characters for each token that the model accepts."""
_RENDERING = 1024
"""Cost of rendering a conversation, in characters to tokenise."""
_TRIMMED = 16 * cuts.PIECE
"""After longer texts, in characters, free memory is returned to the kernel, which blocks concurrent allocations."""

_AS_STORED = RenderingConfig()
_REFERENCE = "{reference}"
_TRIED: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!", "reference": ""}]

_NO_VARIABLES: Mapping[str, Any] = MappingProxyType({})

_TAIL = 16
"""Tokens before a text that decide how it begins."""
_CONTEXTS = ("\n", "a")
"""What a text may follow, so that its tokenizer writes no blank before it."""


class TextEncoder:
    """A tokenizer that adds nothing by default; thread-safe."""

    def __init__(self, tokenizer: Any, proofs: tuple[str, ...] = (), rendering: RenderingConfig = _AS_STORED) -> None:
        """`proofs` are those of `load_tokenizer`."""
        self._tokenizer, self.proofs, self._rendering = tokenizer, proofs, rendering
        self._fast = tokenizer.backend_tokenizer if tokenizer.is_fast else None
        self.takes_reference = any(_REFERENCE in turn.content for turn in rendering.turns) or reads(
            self.chat_template, "reference"
        )
        """Whether a turn or the template writes a sample's label."""
        self._lock = threading.Lock()
        self._texts: dict[int, str] = {}
        self._told: TokenTexts | None = None
        self._untrimmed: Tokenizer | None = None
        if self._fast is not None:
            # Set once: fast tokenizers raise if these change while another thread encodes.
            self._fast.no_truncation()
            self._fast.no_padding()
        bos = tokenizer.bos_token_id
        self._adds_bos = bos is not None and self._ids(["a"], add_special_tokens=True)[0][:1] == [bos]
        around = []
        for probe in ("a", "b c d"):
            (own,), (row,) = self._ids([probe]), self._ids([probe], add_special_tokens=True)
            starts = [i for i in range(len(row) - len(own) + 1) if row[i : i + len(own)] == own]
            around.append((row[: starts[0]], row[starts[0] + len(own) :]) if len(starts) == 1 else None)
        # The special tokens before and after a text, None if the tokenizer adds them elsewhere.
        self._around = around[0] if around[0] == around[1] else None
        self._cuts = None if self._fast is None else cuts.Cuts.of(self._fast)
        self._plain_pair, self._pair = (
            PairTemplate.of(tokenizer, lambda text: self._ids([text])[0], add_special_tokens=adds)
            for adds in (False, True)
        )
        self._start = self._text([*self._pair.before[:1]]) if self._pair is not None else ""

    def all_tokens_digest(self) -> str:
        """Returns 12 hex digits that change with the tokens and their ids."""
        tokens = sorted(self._tokenizer.get_vocab().items())
        return hashlib.blake2b(repr(tokens).encode(errors="backslashreplace"), digest_size=6).hexdigest()

    def identity(self) -> str:
        """Returns what ids mean to the tokenizer, as `guerdon.vocabulary` compares it."""
        return identity(self._tokenizer)

    def ending(self) -> Ending | InvalidRequest:
        """Returns how the chat template writes an answer; an error if there is none, or if it cannot be found."""
        return find_ending(self, self._tokenizer)

    def reported_ending(self) -> str:
        """Returns the ending as `ModelInfo` states it."""
        found = self.ending()
        return "" if isinstance(found, InvalidRequest) else found.to_json()

    @classmethod
    def load(cls, folder: Path, *, warns: bool = True, rendering: RenderingConfig = _AS_STORED) -> TextEncoder | None:
        """Returns the folder's tokenizer, None if there is none; warns and raises as `load_tokenizer`.

        Raises ConfigError if conversations cannot be rendered as `rendering` says.
        """
        path = rendering.chat_template
        try:
            template = None if path is None else Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"chat_template {path} cannot be read: {e}", "name a file with a Jinja template") from e
        tokenizer, proofs = load_tokenizer(folder, warns=warns, chat_template=template)
        made = None if tokenizer is None else cls(tokenizer, proofs, rendering)
        if any(getattr(rendering, name) != value for name, value in dataclasses.asdict(_AS_STORED).items()):
            if made is None or not made.takes_messages:
                advice = "give `chat_template`, or leave out system, turns and generation_prompt"
                raise ConfigError(f"{folder} has no chat template to render conversations by", advice)
            if isinstance(refusal := made.render(_TRIED), InvalidRequest):
                raise ConfigError(f"conversations cannot be rendered as the settings say: {refusal}", "correct them")
        return made

    @property
    def takes_messages(self) -> bool:
        """Whether the checkpoint has a chat template."""
        return bool(self._tokenizer.chat_template)

    @property
    def chat_template(self) -> str:
        """The source of the chat template, empty if there is none."""
        return self._tokenizer.get_chat_template() if self.takes_messages else ""

    @property
    def eos_token_id(self) -> int | None:
        """The end-of-sequence token, None if the tokenizer names none."""
        return self._tokenizer.eos_token_id

    @property
    def pad_token_id(self) -> int | None:
        """The padding token, None if the tokenizer names none."""
        return self._tokenizer.pad_token_id

    def has_special_tokens(self, text: str) -> bool:
        """Whether a text begins with the special token that stands before a pair, so that it gets no further ones."""
        return bool(self._start) and text.startswith(self._start)

    def has_token(self, text: str) -> bool:
        """Whether `text` is a single token of the vocabulary."""
        return text in self._tokenizer.get_vocab()

    def is_added(self, token: int) -> bool:
        """Whether the token is cut out of a text first, so that it never merges with what stands before it."""
        return token in self._tokenizer.added_tokens_decoder

    def separator_ids(self, text: str) -> tuple[int, ...]:
        """Returns the tokens of a step separator alone, as TRL's PRM trainer appends them to each step."""
        return tuple(self._ids([text])[0])

    def encode(
        self, texts: list[str], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[np.ndarray | InvalidRequest]:
        """Returns the token ids of each text, int64 `[T]`: adds no BOS or EOS, and parses special tokens in the text.

        With `add_special_tokens` the tokenizer adds what it is configured to, except a second BOS if the text has one;
        `truncation` leaves room for them, as transformers does. A text gets an error in its place if it is not valid
        Unicode, leaves no room for special tokens, or is too long to be tokenised.
        """
        return _finish(self.encode_in_steps(texts, add_special_tokens, truncation))

    def encode_messages(self, conversations: list[list[Message]]) -> list[np.ndarray | InvalidRequest]:
        """Returns the token ids of each conversation, rendered by the chat template, int64 `[T]`.

        Nothing is added to the template's output, not even a BOS. A conversation gets an error in its place if it is
        malformed or the template refuses it.
        """
        return _finish(self.encode_messages_in_steps(conversations))

    def encode_in_steps(
        self,
        texts: list[str],
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
        max_tokens: int | None = None,
        *,
        is_whole: bool = False,
        cuts_short: bool = True,
    ) -> Steps:
        """Does what `encode` does, as a generator that tokenises about `cuts.PIECE` characters between two yields.

        It stops reading a text when `truncation` drops the rest, or when the text has more than `max_tokens` tokens.
        If `is_whole`, all texts after one that gets an error get the same error, unread. Without `cuts_short` it
        truncates only texts that are tokenised in parts.
        """
        made: list[np.ndarray | InvalidRequest] = []
        for group in _groups(texts):
            if made:
                yield
            if len(group[0]) > cuts.PIECE:
                made.append((yield from self._long(group[0], add_special_tokens, truncation, max_tokens)))
            else:
                made += self._short(group, add_special_tokens, truncation if cuts_short else None)
            error = next((row for row in made[-len(group) :] if isinstance(row, InvalidRequest)), None)
            if is_whole and error is not None:
                return made + [error] * (len(texts) - len(made))
        return made

    def encode_pairs(
        self, pairs: ListLike[tuple[str, str]], add_special_tokens: bool = False, truncation: Truncation | None = None
    ) -> list[Sequence | InvalidRequest]:
        """Returns the token ids of each pair of texts, which are tokenised apart, as transformers' tokenizer does.

        With `add_special_tokens` they stand where the tokenizer's own pair template has them. If the second text is
        empty, the first is a text by itself. `truncation` cuts the longer text first. A pair gets an error in its place
        if one of its texts does, or if nothing of the second is left.
        """
        return _finish(self.encode_pairs_in_steps(pairs, add_special_tokens, truncation))

    def encode_pairs_in_steps(
        self,
        pairs: ListLike[tuple[str, str]],
        add_special_tokens: bool = False,
        truncation: Truncation | None = None,
        max_tokens: int | None = None,
        *,
        is_whole: bool = False,
    ) -> PairSteps:
        """Does what `encode_pairs` does, in steps as `encode_in_steps`; equal texts are tokenised once."""
        template = self._pair if add_special_tokens else self._plain_pair or PairTemplate()
        if template is None:
            refusal = "the tokenizer has no template for pairs that could be used; send the text as one"
            return [InvalidRequest(refusal) for _ in pairs]
        of_long = None
        if truncation is not None and truncation.max_tokens is not None:
            # Enough to know that it is too long.
            of_long = Truncation(max(truncation.max_tokens - template.num_added, 0) + 1, truncation.side)
        lone = list(dict.fromkeys(first for first, second in pairs if not second))
        texts = list(dict.fromkeys(text for pair in pairs if pair[1] for text in pair))
        rows = yield from self.encode_in_steps(lone, add_special_tokens, truncation, max_tokens, is_whole=is_whole)
        alone = dict(zip(lone, rows, strict=True))
        most = max_tokens if of_long is None else None
        rows = yield from self.encode_in_steps(texts, False, of_long, most, is_whole=is_whole, cuts_short=False)
        ids = dict(zip(texts, rows, strict=True))
        made: list[Sequence | InvalidRequest] = []
        bos = self._tokenizer.bos_token_id
        for first, second in pairs:
            if second:
                made.append(template.join(ids[first], ids[second], truncation, bos))
            else:
                made.append(row if isinstance(row := alone[first], InvalidRequest) else Sequence(row))
        return made

    def encode_messages_in_steps(
        self,
        conversations: list[list[Message]],
        truncation: Truncation | None = None,
        max_tokens: int | None = None,
        *,
        is_whole: bool = False,
    ) -> Steps:
        """Does what `encode_messages` does, in steps as `encode_in_steps`."""
        made: list[Any] = []
        rendered = 0
        for conversation in conversations:
            if rendered > cuts.PIECE:
                rendered = 0
                yield
            made.append(self._render(conversation))
            rendered += _RENDERING + len(made[-1]) if isinstance(made[-1], str) else _RENDERING
        places = [i for i, text in enumerate(made) if isinstance(text, str)]
        rows = yield from self.encode_in_steps(
            [made[i] for i in places], False, truncation, max_tokens, is_whole=is_whole
        )
        for i, ids in zip(places, rows, strict=True):
            made[i] = ids
        return made

    def render_prompts(
        self, conversations: list[list[Message]], variables: Mapping[str, Any] = _NO_VARIABLES
    ) -> list[str | InvalidRequest]:
        """Returns each conversation as a prompt for the assistant's answer, rendered by the chat template.

        If the last message is the assistant's, the prompt asks to continue it. `variables` are the template's. A
        conversation gets an error in its place if it is malformed or the template refuses it.
        """
        return [self._render(conversation, is_prompt=True, variables=variables) for conversation in conversations]

    def render(self, conversation: list[Message]) -> str | InvalidRequest:
        """Returns the whole conversation rendered by the chat template, or the error if the template refuses it."""
        return self._render(conversation)

    def render_as(self, conversation: list[Message], *, adds_prompt: bool, continues: bool) -> str | InvalidRequest:
        """Returns the conversation as a prompt if `adds_prompt`, open-ended if it `continues`, else whole."""
        return self._render(conversation, is_prompt=adds_prompt or continues, continues=continues)

    def spans(self, text: str, add_special_tokens: bool) -> list[tuple[Any, ...]] | InvalidRequest:
        """Returns each token's id, its text, whether the tokenizer has added it, and its offsets.

        A place is the characters' start and end, None of tokens that were added.
        """
        if self._fast is None:
            return InvalidRequest("the tokenizer has no offsets of tokens; request ids alone")
        if (error := _not_unicode(text)) is not None:
            return error
        (made,) = self._fast.encode_batch([text], add_special_tokens=add_special_tokens)
        first = len(made.ids) - len(self._without_second_bos(made.ids)) if add_special_tokens else 0
        return [
            (i, token, True, None, None) if added else (i, text[start:stop], False, start, stop)
            for i, token, added, (start, stop) in list(
                zip(made.ids, made.tokens, made.special_tokens_mask, made.offsets, strict=True)
            )[first:]
        ]

    def spell(self, text: str) -> tuple[np.ndarray, np.ndarray] | InvalidRequest:
        """Returns the text's ids, and where each token ends, both int64 `[T]`.

        Ends count half characters, so that an odd one lies within a character that has several tokens.
        """
        if self._fast is None:
            return InvalidRequest("the tokenizer has no offsets of tokens, by which they could be aligned")
        if (error := _not_unicode(text)) is not None:
            return error
        if self._untrimmed is None:
            self._untrimmed = Tokenizer.from_str(self._fast.to_str())
            # Byte-level tokenizers' own leaves blanks out of offsets.
            self._untrimmed.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
        made = self._untrimmed.encode(text, add_special_tokens=False)
        offsets = np.array(made.offsets, np.int64).reshape(-1, 2)
        after = np.append(offsets[1:, 0], len(text))
        ends = 2 * np.minimum(offsets[:, 1], after) + (offsets[:, 1] > after)
        return np.array(made.ids, np.int64), np.maximum.accumulate(ends)

    def spell_after(self, before: np.ndarray, text: str) -> tuple[np.ndarray, np.ndarray] | InvalidRequest:
        """As `spell`, for a text that follows these ids: without the blank that some tokenizers write before a text."""
        if self._text(self._ids(["a"])[0] * 2) != "aa":
            known = before[before < self.num_ids]  # others are refused with the sample
            for context in (self.decode(known[-_TAIL:]), *_CONTEXTS):
                if isinstance(spelled := self.spell(context + text), InvalidRequest):
                    return spelled
                ids, ends = spelled
                if (seam := 2 * len(context)) in ends:  # no token lies over it
                    first = int(np.searchsorted(ends, seam)) + 1
                    return ids[first:], ends[first:] - seam
        return self.spell(text)

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The tokens by which an answer ends: the first that the chat template writes after it, and the EOS."""
        ending = self.ending() if self.takes_messages else None
        found = [*ending.tokens[:1]] if isinstance(ending, Ending) else []
        return (*found, *(token for token in (self.eos_token_id,) if token is not None and token not in found))

    @cached_property
    def num_ids(self) -> int:
        """The largest id plus 1."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def special_ids(self) -> frozenset[int]:
        """The ids of special tokens, such as the EOS."""
        added = self._tokenizer.added_tokens_decoder.items()
        return frozenset([*self._tokenizer.all_special_ids, *(token for token, one in added if one.special)])

    @cached_property
    def added_texts(self) -> frozenset[str]:
        """The texts of added tokens, which are split off before the model's own tokenisation."""
        return frozenset(self._tokenizer.get_added_vocab())

    @property
    def unk_token_id(self) -> int | None:
        """The id of the unknown token, None if there is none."""
        return self._tokenizer.unk_token_id

    def names_of(self, tokens: np.ndarray) -> list[str]:
        """Returns each token as the vocabulary has it."""
        with self._lock:
            names: list[str] = self._tokenizer.convert_ids_to_tokens(tokens.tolist())
        return names

    def pieces(self, tokens: np.ndarray) -> list[str]:
        """Returns the text that each token adds to those before it, special tokens included.

        If several tokens make up one character, the last one has it and the others are empty.
        """
        return self.split(tokens)[0]

    def split(self, tokens: np.ndarray) -> tuple[list[str], list[bool]]:
        """Returns `pieces`, and of each token whether it ends within a character."""
        return split_text(self._text, tokens.tolist())

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of the whole sequence, special tokens included."""
        return self._text(tokens.tolist())

    def texts_of(self, ids: np.ndarray) -> list[str]:
        """Returns the text of each id by itself, special tokens included."""
        known = self._texts
        for i in {*ids.tolist()} - known.keys():
            known[i] = self._text([i])
        return [known[i] for i in ids.tolist()]

    def all_texts(self) -> list[str]:
        """Returns the text of each id of the vocabulary by itself, special tokens included."""
        return [self._text([i]) for i in range(len(self._tokenizer))]

    def texts_among(self, ids: np.ndarray, places: np.ndarray, tokens: np.ndarray) -> list[str]:
        """Returns the text of each id at its place among the sequence's `tokens`, by vLLM's rule (see `TokenTexts`)."""
        self._told = self._told or TokenTexts(self._text, self._fast)
        return self._told.of(ids, places, tokens)

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

    def _short(
        self, texts: list[str], add_special_tokens: bool, truncation: Truncation | None
    ) -> list[np.ndarray | InvalidRequest]:
        made: list[Any] = [_not_unicode(text) for text in texts]
        fine = [i for i, error in enumerate(made) if error is None]
        read = [texts[i] for i in fine]
        if add_special_tokens:
            rows = self._surrounded(read, truncation)
        else:
            rows = [truncated(ids, truncation) for ids in self._ids(read)]
        for i, ids in zip(fine, rows, strict=True):
            made[i] = ids if isinstance(ids, InvalidRequest) else np.array(ids, dtype=np.int64)
        return made

    def _long(
        self, text: str, add_special_tokens: bool, truncation: Truncation | None, max_tokens: int | None
    ) -> Generator[None, None, np.ndarray | InvalidRequest]:
        """Returns one row of `encode_in_steps`."""
        if (error := _not_unicode(text)) is not None:
            return error
        most = max(_MOST_AT_ONCE, _MOST_A_TOKEN * (max_tokens or 0))
        around = self._around if add_special_tokens else ([], [])
        try:
            if self._cuts is None or around is None:
                if len(text) > most:
                    raise cuts.Uncut
                (row,) = self._short([text], add_special_tokens, truncation)
                return row
            return (yield from self._in_parts(text, most, around, truncation, max_tokens))
        except cuts.Uncut:
            return InvalidRequest(
                f"the text has {len(text)} characters, and more than {most} of them in a row that its tokenizer can "
                "only read at once; send a shorter text, or token ids"
            )
        finally:
            if len(text) > _TRIMMED:
                trim()

    def _in_parts(
        self,
        text: str,
        most: int,
        around: tuple[list[int], list[int]],
        truncation: Truncation | None,
        max_tokens: int | None,
    ) -> Generator[None, None, np.ndarray | InvalidRequest]:
        """Returns one row of `encode_in_steps` for a text that can be cut, with the tokens `around` it."""
        assert self._cuts is not None
        enough, num_added = max_tokens, len(around[0]) + len(around[1])
        if truncation is not None and truncation.max_tokens is not None:
            enough = truncation.max_tokens - num_added
            if enough < 1:
                return no_room(truncation.max_tokens, num_added)
            truncation = Truncation(enough, truncation.side)
        from_end = truncation is not None and truncation.side == "left"
        parts: list[np.ndarray] = []
        for part in self._cuts.parts(text, most, from_end=from_end):
            if parts:
                yield
            parts.append(np.array(self._ids([part])[0], dtype=np.int64))
            if enough is not None and sum(map(len, parts)) > enough:
                if truncation is None:
                    return InvalidRequest(f"the sample has more than {enough} tokens, the most that fit; shorten it")
                break
        ids = truncated(np.concatenate(parts[::-1] if from_end else parts), truncation)
        row = np.concatenate([np.array(around[0], np.int64), ids, np.array(around[1], np.int64)])
        return self._without_second_bos(row) if num_added else row

    def _surrounded(self, texts: list[str], truncation: Truncation | None) -> ListLike[list[int] | InvalidRequest]:
        """Returns the ids of each text and the special tokens around it, together at most `truncation.max_tokens`."""
        if truncation is None or truncation.max_tokens is None:
            return [self._without_second_bos(row) for row in self._ids(texts, add_special_tokens=True)]
        bound, added = truncation.max_tokens, (self._fast or self._tokenizer).num_special_tokens_to_add(False)
        rows: list[list[int] | InvalidRequest] = []
        for text in texts:
            if bound < added + (1 if text else 0):
                rows.append(no_room(bound, added))
                continue
            if self._fast is None:
                with self._lock:
                    self._tokenizer.truncation_side = truncation.side
                    ids = self._tokenizer.encode(text, truncation=True, max_length=bound)
            else:
                # Not with the tokenizer's own truncation: that is a setting that other threads share.
                encoding = self._fast.encode(text, add_special_tokens=False)
                encoding.truncate(bound - added, direction=truncation.side)
                ids = self._fast.post_process(encoding, add_special_tokens=True).ids
            rows.append(self._without_second_bos(ids))
        return rows

    def _without_second_bos(self, ids: RowT) -> RowT:
        bos = self._tokenizer.bos_token_id
        return ids[1:] if self._adds_bos and [*ids[:2]] == [bos, bos] else ids

    def _render(
        self,
        conversation: list[Message],
        is_prompt: bool = False,
        variables: Mapping[str, Any] = _NO_VARIABLES,
        continues: bool | None = None,
    ) -> str | InvalidRequest:
        import jinja2

        try:
            conversation = plain(conversation)
            wanted, said = self._rendering, conversation[-1].get("reference")
            if wanted.system is not None and conversation[0]["role"] != "system":
                conversation = [{"role": "system", "content": wanted.system}, *conversation]
            if not is_prompt and self.takes_reference and not isinstance(said, str):
                raise InvalidRequest(
                    "the conversation is rendered with a reference, and this sample's label was not sent: send "
                    "`labels` beside the messages"
                )
            for turn in () if is_prompt else wanted.turns:
                conversation.append({"role": turn.role, "content": turn.content.replace(_REFERENCE, said or "")})
            if is_prompt and not self.takes_messages:
                raise InvalidRequest("the tokenizer has no chat template")
            if continues is None:
                continues = is_prompt and conversation[-1]["role"] == "assistant"
            return self._tokenizer.apply_chat_template(
                conversation,
                tokenize=False,
                add_generation_prompt=(is_prompt or wanted.generation_prompt) and not continues,
                continue_final_message=continues,
                **variables,
            )
        except InvalidRequest as e:
            return e
        # A template is a program over the user's data: these are data of an unexpected shape.
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


def _groups(texts: list[str]) -> Iterator[list[str]]:
    """Yields texts to tokenise at once: a long one alone, else some that have at most `cuts.PIECE` characters."""
    group: list[str] = []
    size = 0
    for text in texts:
        if group and (size + len(text) > cuts.PIECE or len(group) == _MOST_TEXTS):
            yield group
            group, size = [], 0
        group.append(text)
        size += len(text)
    if group:
        yield group


def _finish(steps: Generator[None, None, list[T]]) -> list[T]:
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return e.value
