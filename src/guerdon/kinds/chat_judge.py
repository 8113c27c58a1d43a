"""Judges in words: models of other servers that are asked about samples by chat completions."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from guerdon.core import Message, ModelInfo, Score, ScoreReply, ScoreRequest, Sequence, Truncation
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest
from guerdon.judge_core import Criterion, Pair, Rubric, Sample
from guerdon.kinds.judges import make_reply, read_questions
from guerdon.kinds.kind import Asks, Kind, Numbers, SampleReader
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.wire.chat_completions import write_messages

_OF_REWARD = ("model", "template", "system", "parse", "parse_retries", "samples", "temperature", "max_tokens", "extra")
_OF_CRITERIA = ("criteria", "sample_criteria", "reduce", "compare")
"""The settings that decide about rewards; of the second, those that are set."""


class ChatJudgeKind(Kind):
    """A model of another server, asked in words about every sample."""

    names = ("chat_judge",)
    settings = ChatJudgeConfig
    is_remote = True
    device = "other servers"

    def load(self, config: ChatJudgeConfig, ranks: Any) -> ServedChatJudge:
        """Returns what the judge is to clients; raises ConfigError if the API key is missing."""
        return ServedChatJudge(config)

    async def read(self, reading: SampleReader, served: Any, request: ScoreRequest, cut: Truncation | None) -> Asks:
        """Returns a sequence for each question of the plan."""
        plan, owners, rows = await read_questions(reading, served, request)
        asked = Asks(served, [], [], plan)
        for owner, row in zip(owners, rows, strict=True):
            group = None if request.groups is None else int(request.groups[owner])
            asked.sequences.append(
                Sequence(np.empty(0, np.int64), "" if isinstance(row, InvalidRequest) else row, group)
            )
            asked.errors.append(row if isinstance(row, InvalidRequest) else None)
        return asked

    def finish(self, asked: Asks, reply: ScoreReply, metrics: Numbers) -> ScoreReply:
        """Returns the samples' scores, made of the numbers in the answers."""
        judge: Any = asked.served
        answers: list[np.ndarray | GuerdonError] = []
        for part in judge.rubric.parts(asked.plan.subjects):
            told = reply.results[part]
            values = [one.reward for one in told if isinstance(one, Score)]
            error = next((one for one in told if isinstance(one, GuerdonError)), None)
            answers.append(error or np.array([values, values, [0.0] * len(values), [0.0] * len(values)]))
        return make_reply(judge, asked.plan, answers, reply, metrics)

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
        alone = () if config.sample_criteria != "ignore" else (Criterion("", ""),)
        self.rubric = rubric = Rubric(
            config.question,
            (),
            (),
            config.asked() or alone,
            config.system,
            compare=config.comparing(),
            own=config.sample_criteria,
            reduce=config.reduce,
        )
        given = dataclasses.asdict(config)
        is_set = [name for name in _OF_CRITERIA if given[name] != getattr(ChatJudgeConfig(), name)]
        settings = {name: given[name] for name in (*_OF_REWARD, *is_set)}
        digest = hashlib.sha256(orjson.dumps(settings, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))
        self.info = ModelInfo(
            config.name,
            "chat_judge",
            **rubric.facts(),
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

    def render(self, subject: Sample | Pair) -> list[str | InvalidRequest]:
        """Returns the messages that ask each criterion, as JSON."""
        system = [{"role": "system", "content": self.rubric.system}] if self.rubric.system else []
        made: list[str | InvalidRequest] = []
        for question in self.rubric.render(subject):
            asked: list[Message] = [{"role": "user", "content": question}]
            if self.config.parse.preset == "genrm" and isinstance(subject, Pair):
                asked = as_roles(subject, question)
                if not (subject.a.history or subject.b.history):
                    made.append(InvalidRequest(f"{self.info.name} reads a conversation: send `prompts`, or messages"))
                    continue
            try:
                made.append(write_messages([*system, *asked]))
            except ValueError as e:
                made.append(InvalidRequest(f"{self.info.name} cannot be asked about this sample: {e}"))
        return made


def as_roles(pair: Pair, principle: str) -> list[Message]:
    """Returns the conversation, the principle if there is one, and both responses, each in a role of its own."""
    roles = {"principle": principle, "response_1": pair.a.response, "response_2": pair.b.response}
    history = pair.a.history or pair.b.history  # a reference is a response alone
    after = [{"role": role, "content": text} for role, text in roles.items() if role != "principle" or text]
    return [*({"role": one["role"], "content": one["content"]} for one in history), *after]


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
