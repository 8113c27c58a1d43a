"""Judges in words: models of other servers that are asked about samples by chat completions."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from guerdon.core import ModelInfo, ScoreRequest, Truncation
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.judge_core import Criterion, Rubric, Sample
from guerdon.kinds.judges import render_samples
from guerdon.kinds.kind import Asks, Kind, SampleReader
from guerdon.settings.chat_judges import ChatJudgeConfig

_OF_REWARD = ("model", "template", "system", "parse", "parse_retries", "samples", "temperature", "max_tokens", "extra")
"""The settings that decide about rewards."""


class ChatJudgeKind(Kind):
    """A model of another server, asked in words about every sample."""

    names = ("chat_judge",)
    settings = ChatJudgeConfig
    is_remote = True
    device = "other servers"

    def load(self, config: ChatJudgeConfig, ranks: Any) -> ServedChatJudge:
        """Returns what the judge is to clients; raises ConfigError if the API key is missing."""
        return ServedChatJudge(config)

    async def read(
        self, reading: SampleReader, served: Any, request: ScoreRequest, cut: Truncation | None, client: str
    ) -> Asks:
        """Returns the question about each sample."""
        rows = await reading.run_in_parts(
            client, range(len(request)), functools.partial(render_samples, served, request)
        )
        return await reading.make_sequences(rows, request, cut, served, client)

    def why_fixed(self, info: ModelInfo, what: str) -> str:
        """Says that another server has the model."""
        return f"{info.name} is a model of another server, and cannot be {what} here; restart with another"


class ServedChatJudge:
    """A judge in words as the catalog has it: nothing of it computes here.

    Its version is a digest of the settings that determine rewards; the served weights are unknown.
    """

    encoder = None  # to a client it reads texts, as a function does
    takes_all = False
    max_batch_tokens = 1  # a batch is one sample

    def __init__(self, config: ChatJudgeConfig) -> None:
        """Raises ConfigError if the API key is missing."""
        read_key(config)
        self.config = config
        self.rubric = Rubric(config.template, (), (), (Criterion(config.name, ""),), config.system)
        settings = {name: dataclasses.asdict(config)[name] for name in _OF_REWARD}
        digest = hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
        self.info = ModelInfo(
            config.name,
            "chat_judge",
            takes_messages=True,
            takes_tokens=False,
            takes_prompts=True,
            takes_labels="reference" in self.rubric.fields,
            weights_version=digest.hexdigest()[:16],
            device="remote",
            path="chat",
            is_checkpoint=False,
            why=f"{config.model} at {config.url}",
            source=config.model,
        )

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: another server's progress is unknown."""
        return False

    def render(self, subject: Sample) -> list[str | InvalidRequest]:
        """Returns the question about a sample."""
        return [*self.rubric.render(subject)]


def read_key(config: ChatJudgeConfig) -> str:
    """Returns the judge's API key, "" if it needs none; raises ConfigError if it is missing."""
    if config.api_key_env is not None:
        if not (key := os.environ.get(config.api_key_env, "").strip()):
            raise ConfigError(
                f"the environment variable {config.api_key_env} is not set, which {config.name} takes its API key from",
                "set it, or correct api_key_env",
            )
        return _checked(key, config.name)
    if config.api_key_file is not None:
        try:
            return _checked(Path(config.api_key_file).read_text(encoding="utf-8").strip(), config.name)
        except (OSError, UnicodeDecodeError) as e:
            why = e.strerror if isinstance(e, OSError) else "it is no text"
            raise ConfigError(
                f"cannot read the API key of {config.name}: {config.api_key_file}: {why}", "correct it"
            ) from e
    return ""


def _checked(key: str, name: str) -> str:
    if not key or not key.isascii() or not key.isprintable():
        raise ConfigError(f"the API key of {name} is empty, or has characters that no key has", "correct it")
    return key
