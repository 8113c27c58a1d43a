"""Prompts: read, tokenised, checked against the longest allowed, and assigned to steps."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from guerdon.actor.prompt_sources import bad_row, check_num_prompts, read_prompts
from guerdon.actor.rollouts import Prompt
from guerdon.core import Message
from guerdon.durable import write_new
from guerdon.endings import Ending, find_ending
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.settings.actors import DataConfig, RemoteRewardConfig

log = logging.getLogger(__name__)

SKIPPED = "skipped_prompts.jsonl"
"""The file in output_dir that lists each prompt that was too long."""

_CHUNK = 1024
"""Prompts that are tokenised together."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A prompt that was too long: its `row` in `source`, counted from 0, and its length in tokens."""

    source: str
    row: int
    num_tokens: int


class Prompts:
    """The prompts to train on and those to validate on.

    A step's prompts depend on its number, the seed and the data only, so that a resumed run continues with the prompts
    that it would have had. `skipped` lists prompts that were too long.
    """

    def __init__(
        self,
        config: DataConfig,
        tokenizer: Any,
        *,
        prompts_per_step: int,
        max_prompt_length: int | None,
        seed: int,
        output_dir: Path,
    ) -> None:
        """Reads and tokenises everything; raises ConfigError that names the row which is wrong.

        `tokenizer` is the policy's, of transformers; `max_prompt_length` the longest prompt in tokens that fits the
        policy, None if unlimited. Prompts that are too long are listed in a file in `output_dir`.
        """
        self._prompts_per_step = prompts_per_step
        self._seed = seed
        self._shuffle = config.shuffle
        self._order: tuple[int, np.ndarray] | None = None
        limit = config.max_prompt_length
        if limit is None:
            limit = max_prompt_length
        elif max_prompt_length is not None and limit > max_prompt_length:
            raise ConfigError(
                f"data.max_prompt_length is {limit}, and the policy has room for {max_prompt_length} tokens beside "
                "rollouts.max_new_tokens",
                "lower one of the two",
            )
        self.skipped: list[Skipped] = []
        reader = _Reader(config, tokenizer, limit, self.skipped)
        prompts = reader.read(config.prompts, config.split)
        if config.validation is not None:
            split = config.validation_split or config.split
            self.validation = reader.read(config.validation, split)[: config.num_validation]
        else:
            first = max(0, len(prompts) - config.num_validation)
            prompts, self.validation = prompts[:first], prompts[first:]
        self.training = prompts
        self._report_skipped(config, limit, output_dir / SKIPPED)
        check_num_prompts(config, len(prompts), len(self.validation), len(self.skipped))

    @property
    def ending(self) -> Ending | None:
        """How the policy's chat template ends an answer; None if no prompt is a conversation, or it cannot be found."""
        return next((p.ending for p in (*self.training, *self.validation) if p.ending is not None), None)

    @property
    def digest(self) -> str:
        """12 hex digits that change with the prompts, their tokens and their order."""
        digest = hashlib.blake2b(digest_size=6)
        for prompts in (self.training, self.validation):
            for prompt in prompts:
                digest.update(len(prompt.tokens).to_bytes(8, "little"))
                digest.update(prompt.tokens.tobytes())
            digest.update(b";")
        return digest.hexdigest()

    def epoch(self, step: int) -> float:
        """Returns how many epochs are done after that step."""
        return step * self._prompts_per_step / len(self.training)

    def batch(self, step: int) -> list[Prompt]:
        """Returns the prompts of a step, counted from 1; an epoch's last step is filled up from the next epoch."""
        first = (step - 1) * self._prompts_per_step
        places = (divmod(i, len(self.training)) for i in range(first, first + self._prompts_per_step))
        return [self.training[self._permutation(epoch)[place]] for epoch, place in places]

    def _permutation(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            order = np.arange(len(self.training))
            if self._shuffle:
                np.random.Generator(np.random.Philox(seed=[self._seed, epoch])).shuffle(order)
            self._order = (epoch, order)
        return self._order[1]

    def _report_skipped(self, config: DataConfig, limit: int | None, path: Path) -> None:
        """Writes a line for each prompt that was too long, and logs or raises; removes the file of an earlier start."""
        path.unlink(missing_ok=True)
        if not self.skipped:
            return
        write_new(path, b"".join(orjson.dumps(one, option=orjson.OPT_APPEND_NEWLINE) for one in self.skipped))
        first = ", ".join(f"row {s.row} ({s.num_tokens})" for s in self.skipped[:5])
        more = ", ..." if len(self.skipped) > 5 else ""
        text = f"{len(self.skipped)} prompts are longer than {limit} tokens: {first}{more} of {self.skipped[0].source}"
        if config.long_prompts == "error":
            raise ConfigError(text, "shorten them, raise data.max_prompt_length, or set data.long_prompts to skip")
        log.warning("%s; they are skipped, and listed in %s", text, SKIPPED)


def check_sendable(prompts: Prompts, where: str, remote: RemoteRewardConfig, max_new_tokens: int) -> None:
    """Logs the form of the samples for the servers of section `where`; raises ConfigError if these prompts do not have
    it.
    """
    everyone = [*prompts.training, *prompts.validation]
    plain = next((prompt for prompt in everyone if prompt.messages is None), None)
    if remote.send == "messages" and plain is not None:
        raise ConfigError(
            f"{where}.send is messages, and the prompt of row {plain.id} is plain text",
            "send text or tokens, or set data.template",
        )
    ending = prompts.ending
    longest = max(len(prompt.tokens) for prompt in everyone) + max_new_tokens + len(ending.tokens if ending else ())
    if remote.pad_to_length is not None and longest > remote.pad_to_length:
        raise ConfigError(
            f"{where}.pad_to_length is {remote.pad_to_length}, and prompt and response may have {longest} tokens",
            "raise it, or lower data.max_prompt_length or rollouts.max_new_tokens",
        )
    if remote.send == "messages":
        log.info("the reward model gets messages, which its own chat template formats")
        return
    what = {"tokens": "the policy's token ids", "text": "the text of prompt and response"}[remote.send]
    if remote.suffix:
        log.info("the reward model gets %s, and %r after a response that ended by EOS", what, remote.suffix)
    elif ending is None:
        log.info("the reward model gets %s, with nothing added", what)
    else:
        log.info(
            "the reward model gets %s; each answer, even a truncated one, ends as its template has it: %r",
            what,
            ending.text,
        )
        if ending.differs:
            log.warning(
                "the chat template changes some answers: %s; with %s.send: messages the reward model applies its own "
                "template",
                ending.differs,
                where,
            )


def sent_ending(ending: Ending | None, remote: RemoteRewardConfig) -> str:
    """Returns the chat template's ending if it is added to answers that are sent, else an empty string."""
    return "" if ending is None or remote.send == "messages" or remote.suffix else ending.text


class _Reader:
    """Turns rows of a source into prompts."""

    def __init__(self, config: DataConfig, tokenizer: Any, limit: int | None, skipped: list[Skipped]) -> None:
        if tokenizer is None:
            raise ConfigError(
                "the policy has no tokenizer, and prompts are texts",
                "copy the tokenizer's files into the folder of policy.model",
            )
        self._config = config
        self._encoder = TextEncoder(tokenizer)
        # As users of `generate` give it. What the tokenizer adds behind a text is left out: a prompt that ends with EOS
        # asks for nothing.
        added = tokenizer("").input_ids[:1]
        self._bos: list[int] = added if added == [tokenizer.bos_token_id] else []
        self._limit = limit
        self._skipped = skipped
        self._tokenizer = tokenizer
        self._ending: Ending | InvalidRequest | None = None
        self._is_bare_told = False

    def read(self, source: str, split: str) -> list[Prompt]:
        """Returns the source's prompts in their order, without too long ones."""
        prompts: list[Prompt] = []
        chunk: list[tuple[int, str | list[Message]]] = []
        for value in read_prompts(source, split, self._config.field, is_chat=self._config.template):
            chunk.append(value)
            if len(chunk) == _CHUNK:
                prompts += self._tokenise(chunk, source)
                chunk = []
        return prompts + self._tokenise(chunk, source)

    def _tokenise(self, chunk: Sequence[tuple[int, str | list[Message]]], source: str) -> list[Prompt]:
        conversations = {row: value for row, value in chunk if isinstance(value, list)}
        texts: dict[int, str | InvalidRequest] = {row: value for row, value in chunk if isinstance(value, str)}
        if conversations and not self._encoder.takes_messages:
            raise ConfigError(
                f"{source}, row {next(iter(conversations))} (from 0) is a conversation, and the policy's tokenizer has "
                "no chat template",
                "give prompts as text without data.template, or put a chat template into the folder of policy.model",
            )
        if texts and self._encoder.takes_messages and not self._is_bare_told:
            self._is_bare_told = True
            log.warning(
                "prompts are used as they are, although the policy's tokenizer has a chat template: set data.template "
                "if the policy is a chat model"
            )
        texts |= zip(conversations, self._encoder.render_prompts(list(conversations.values())), strict=True)
        for row, text in texts.items():
            if isinstance(text, InvalidRequest):
                raise bad_row(source, row, str(text))
        plain = [str(texts[row]) for row, _ in chunk]
        ending = self._ending_of(conversations)
        prompts = []
        for (row, _), text, ids in zip(chunk, plain, self._encoder.encode(plain), strict=True):
            if isinstance(ids, InvalidRequest):
                raise bad_row(source, row, str(ids))
            messages = conversations.get(row)
            if messages is None and self._bos and ids[:1].tolist() != self._bos:
                ids = np.concatenate([np.array(self._bos, dtype=np.int64), ids])
            if not len(ids):
                raise bad_row(source, row, "the prompt is empty")
            own_ending = None if messages is None else ending
            # An answer of max_new_tokens with its ending must fit a reward model of the same length.
            reserved = 0 if own_ending is None or self._config.max_prompt_length else len(own_ending.tokens)
            if self._limit is not None and len(ids) > self._limit - reserved:
                self._skipped.append(Skipped(source, row, len(ids)))
            else:
                conversation = None if messages is None else tuple(messages)
                prompts.append(Prompt(row, ids, text, conversation, own_ending))
        return prompts

    def _ending_of(self, conversations: dict[int, list[Message]]) -> Ending | None:
        """Returns how the template ends answers; found once, with the first conversation."""
        if self._ending is None and conversations:
            self._ending = find_ending(self._encoder, self._tokenizer, next(iter(conversations.values())))
            if isinstance(self._ending, InvalidRequest):
                log.warning("cannot find how the chat template ends an answer; nothing is added: %s", self._ending)
        return None if isinstance(self._ending, InvalidRequest) else self._ending
