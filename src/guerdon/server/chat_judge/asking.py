"""A judge in words as a model: its info, its questions, and the reduction of its answers to a number."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
from collections.abc import Callable

import orjson

from guerdon.core import ModelInfo, Score
from guerdon.errors import InvalidRequest, NoVerdict, SampleFailed
from guerdon.judge_core import Criterion, Rubric, Sample
from guerdon.server.chat_judge.answer_cache import AnswerCache, Flight, Spent
from guerdon.server.chat_judge.calling import Caller, read_key
from guerdon.server.chat_judge.parsing import AnswerParser, Unreadable
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.wire.chat_completions import ChatAnswer, write_request

KIND = "chat_judge"

_OF_REWARD = ("model", "template", "system", "parse", "parse_retries", "samples", "temperature", "max_tokens", "extra")
"""The settings that decide about rewards."""


class ChatJudge:
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
            KIND,
            takes_messages=True,
            takes_tokens=False,
            takes_prompts=True,
            takes_labels="reference" in self.rubric.fields,
            weights_version=digest.hexdigest()[:16],
            device="remote",
            path="chat",
            why=f"{config.model} at {config.url}",
            source=config.model,
        )

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: another server's progress is unknown."""
        return False

    def render(self, subject: Sample) -> list[str | InvalidRequest]:
        """Returns the question about a sample."""
        return [*self.rubric.render(subject)]


class Asker:
    """Asks one judge about samples. Belongs to one asyncio loop."""

    def __init__(self, config: ChatJudgeConfig, cache: AnswerCache, metrics: Metrics) -> None:
        self.config = config
        self._cache, self._metrics, self._name = cache, metrics, config.name
        self._caller = Caller(config, read_key(config), metrics)
        self._parser = AnswerParser(config.parse)
        self._slots = asyncio.Semaphore(config.concurrency)
        self._num_calling = 0
        self._more = dict(config.extra or {})
        for name in ("temperature", "max_tokens"):
            if (value := getattr(config, name)) is not None:
                self._more[name] = value

    async def close(self) -> None:
        """Closes the connections."""
        await self._caller.close()

    async def score(self, question: str) -> Score:
        """Returns the mean of the answers' values; raises SampleFailed if one has none, StorageFailed."""
        body = write_request(self.config.model, question, self.config.system, self._more)
        try:
            async with asyncio.TaskGroup() as group:
                values = [group.create_task(self._value(body, k)) for k in range(self.config.samples)]
        except BaseExceptionGroup as e:
            raise e.exceptions[0] from None
        return Score(sum(value.result() for value in values) / len(values))

    async def _value(self, body: bytes, sample: int) -> float:
        """Returns the value of the first readable answer among the tries."""
        num_tries = 1 + self.config.parse_retries
        why = ""
        for i in range(num_tries):
            try:
                return self._parser.read(await self._answer(body, f"{sample}.{i}"))
            except Unreadable as e:
                why = str(e)
                self._metrics.add("guerdon_judge_parse_failures", 1, self._name)
        raise NoVerdict(f"{self._name}: none of {num_tries} answers can be read; of the last, {why}")

    async def _answer(self, body: bytes, number: str) -> ChatAnswer:
        """Returns the answer of that number to the question, kept or asked for."""
        key = hashlib.sha256(body + b"\n" + number.encode()).digest()

        async def fetch(flight: Flight) -> ChatAnswer:
            async with self._slots:
                self._check_budget()
                self._num_calling += 1
                try:
                    answer = await self._caller.call(body, flight)
                finally:
                    self._num_calling -= 1
            self._count(answer)
            return answer

        answer, was_kept = await self._cache.get(key, self._name, fetch)
        if was_kept:
            self._metrics.add("guerdon_judge_kept_answers", 1, self._name)
        return answer

    def _check_budget(self) -> None:
        """Raises SampleFailed if the budget does not allow one more call."""
        shares = [0.0]
        for what, used, most in self._used():
            shares.append(used / most)
            self._metrics.set("guerdon_judge_budget_used", max(shares), self._name)
            if used >= most:
                raise SampleFailed(
                    f"{self._name}: its budget is spent: {what} {used:,.10g} of {most:,.10g} since the folder "
                    f"{self.config.cache} was begun; raise budget.{what}, or leave the judge out"
                )

    def _used(self) -> list[tuple[str, float, float]]:
        """Returns the used budget and the total."""
        budget, spent = self.config.budget, self._cache.spent.get(self._name, Spent())
        all_of_it = (
            ("calls", spent.calls + self._num_calling, budget.calls),
            ("tokens", spent.prompt_tokens + spent.completion_tokens, budget.tokens),
            ("cost", self.config.cost(spent.prompt_tokens, spent.completion_tokens), budget.cost),
        )
        return [(what, used, most) for what, used, most in all_of_it if most is not None]

    def _count(self, answer: ChatAnswer) -> None:
        self._metrics.add("guerdon_judge_prompt_tokens", answer.prompt_tokens, self._name)
        self._metrics.add("guerdon_judge_completion_tokens", answer.completion_tokens, self._name)
        if cost := self.config.cost(answer.prompt_tokens, answer.completion_tokens):
            self._metrics.add("guerdon_judge_cost", cost, self._name)
