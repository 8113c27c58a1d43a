"""Asks a judge in words about samples: calls its server, repeated if that is busy, and makes numbers of its answers."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import random
import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from urllib.parse import urlsplit

import httpx

from guerdon.core import Score
from guerdon.errors import NoVerdict, SampleFailed
from guerdon.kinds.chat_judge import read_key
from guerdon.server.chat_judge.answer_cache import AnswerCache, Flight, Spent
from guerdon.server.chat_judge.parsing import AnswerParser, Unreadable
from guerdon.server.metrics import Metrics
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.wire.chat_completions import ChatAnswer, read_answer, read_error, write_request
from guerdon.wire.inflate import ENCODINGS, Inflater

log = logging.getLogger(__name__)

MOST_BYTES = 16 << 20
"""A longer answer is not read to its end."""
_REPEATED = {408, 409, 429}
_FIRST_WAIT_S = 0.5
_LONGEST_WAIT_S = 30.0


class _Failed(Exception):
    """A call that had no answer; `outcome` is its label in the metrics."""

    def __init__(self, text: str, outcome: str, is_final: bool = False, retry_after_s: float = 0.0) -> None:
        super().__init__(text)
        self.outcome, self.is_final, self.retry_after_s = outcome, is_final, retry_after_s


class ChatCaller:
    """Asks one judge's server. Belongs to one asyncio loop."""

    def __init__(self, config: ChatJudgeConfig, key: str, metrics: Metrics) -> None:
        self._config, self._metrics, self._name = config, metrics, config.name
        self._url = config.url.rstrip("/") + "/chat/completions"
        self._where = urlsplit(config.url).netloc
        self._key, self._is_well, self._num_calls = key, True, 0
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=config.concurrency)
        headers = {"Content-Type": "application/json", "Accept-Encoding": ", ".join(ENCODINGS)}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._client = httpx.AsyncClient(headers=headers, limits=limits, timeout=None)  # noqa: S113 - `_call` has one
        for library in ("httpx", "httpcore"):  # a line for each call
            logging.getLogger(library).setLevel(logging.WARNING)

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()

    async def call(self, body: bytes, flight: Flight) -> ChatAnswer:
        """Returns the answer to a request's body, repeating the call as the settings say while anybody waits for it.

        Raises SampleFailed with the server's last message.
        """
        wait_s, num_calls = _FIRST_WAIT_S, 0
        while True:
            num_calls += 1
            flight.is_calling = True
            started, outcome = time.monotonic(), "abandoned"
            self._count(1)
            try:
                answer = await self._call(body)
                outcome = answer.outcome
                self._note(None)
                return answer
            except _Failed as e:
                failed, outcome = e, e.outcome
            finally:
                self._count(-1)
                self._metrics.add("guerdon_judge_calls", 1, self._name, outcome)
                self._metrics.observe("guerdon_judge_call_seconds", time.monotonic() - started, self._name)
            flight.is_calling = False
            self._note(failed)
            if failed.is_final:
                raise SampleFailed(f"{self._name}: {failed}")
            if num_calls > self._config.call_retries or not flight.is_wanted:
                raise SampleFailed(f"{self._name}: {failed} ({num_calls} calls)")
            await asyncio.sleep(max(failed.retry_after_s, wait_s * random.uniform(0.5, 1.0)))
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _call(self, body: bytes) -> ChatAnswer:
        try:
            async with asyncio.timeout(self._config.timeout_s):
                async with self._client.stream("POST", self._url, content=body) as reply:
                    data = await self._read(reply)
        except TimeoutError:
            raise _Failed(f"{self._where} did not answer within {self._config.timeout_s:g} s", "timeout") from None
        except httpx.HTTPError as e:
            raise _Failed(f"{self._where} cannot be reached: {str(e) or type(e).__name__}", "unreachable") from None
        if reply.status_code != 200:
            is_final = reply.status_code not in _REPEATED and reply.status_code < 500
            said = read_error(bytes(data)).replace(self._key, "[key]") if self._key else read_error(bytes(data))
            text = f"{self._where} answered with status {reply.status_code}: {said}"
            raise _Failed(text, f"status_{reply.status_code}", is_final, _retry_after_s(reply.headers))
        try:
            return read_answer(bytes(data))
        except ValueError as e:
            raise _Failed(f"{self._where} answered with status 200, but {e}", "malformed") from None

    async def _read(self, reply: httpx.Response) -> bytearray:
        """Returns the decompressed body; in pieces, since httpx decompresses whatever has come at once."""
        data, encoding = bytearray(), reply.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", *ENCODINGS):
            raise _Failed(f"{self._where} answered in the encoding {encoding[:40]!r}, not asked for", "malformed", True)
        inflater = None if encoding == "identity" else Inflater()
        try:
            async for part in reply.aiter_raw():
                for piece in (part,) if inflater is None else inflater.pieces(part):
                    data += piece
                    if len(data) > MOST_BYTES:
                        raise _Failed(f"{self._where} answered more than {MOST_BYTES >> 20} MiB", "malformed", True)
            if inflater is not None:
                inflater.finish()
        except ValueError as e:
            raise _Failed(f"{self._where} answered what cannot be decompressed: {e}", "malformed") from None
        return data

    def _count(self, change: int) -> None:
        self._num_calls += change
        self._metrics.set("guerdon_judge_calls_in_progress", self._num_calls, self._name)

    def _note(self, failed: _Failed | None) -> None:
        """Logs when calls begin to fail, and when they succeed again; without texts, which may quote a sample."""
        if failed is not None and self._is_well:
            log.warning("%s: calls to %s fail: %s", self._name, self._where, failed.outcome)
        elif failed is None and not self._is_well:
            log.info("%s: %s answers again", self._name, self._where)
        self._is_well = failed is None


def _retry_after_s(headers: Mapping[str, str]) -> float:
    """Returns the seconds that a Retry-After header asks for; 0 without one, or if it cannot be read.

    A date counts from the reply's own Date, because the two clocks may differ.
    """
    given = headers.get("retry-after", "").strip()
    if given.isascii() and given.isdecimal():
        return float(given)
    try:
        until, now = (parsedate_to_datetime(text) for text in (given, headers.get("date", "")))
        return max(0.0, (until - now).total_seconds())
    except (TypeError, ValueError):
        return 0.0


class Asker:
    """Asks one judge about samples. Belongs to one asyncio loop."""

    def __init__(self, config: ChatJudgeConfig, cache: AnswerCache, metrics: Metrics) -> None:
        self.config = config
        self._cache, self._metrics, self._name = cache, metrics, config.name
        self._caller = ChatCaller(config, read_key(config), metrics)
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
        """Returns the mean of the values of the answers to a question, messages as JSON.

        Raises SampleFailed if one has none, StorageFailed.
        """
        body = write_request(self.config.model, question, self._more)
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
        budget, spent = self.config.budget, self._cache.spent.get(self._name, Spent())
        limited = (
            ("calls", spent.calls + self._num_calling, budget.calls),
            ("tokens", spent.prompt_tokens + spent.completion_tokens, budget.tokens),
            ("cost", self.config.cost(spent.prompt_tokens, spent.completion_tokens), budget.cost),
        )
        shares = [0.0]
        for what, used, most in limited:
            if most is None:
                continue
            shares.append(used / most)
            self._metrics.set("guerdon_judge_budget_used", max(shares), self._name)
            if used >= most:
                raise SampleFailed(
                    f"{self._name}: its budget is spent: {what} {used:,.10g} of {most:,.10g} since the folder "
                    f"{self.config.cache} was begun; raise budget.{what}, or leave the judge out"
                )

    def _count(self, answer: ChatAnswer) -> None:
        self._metrics.add("guerdon_judge_prompt_tokens", answer.prompt_tokens, self._name)
        self._metrics.add("guerdon_judge_completion_tokens", answer.completion_tokens, self._name)
        if cost := self.config.cost(answer.prompt_tokens, answer.completion_tokens):
            self._metrics.add("guerdon_judge_cost", cost, self._name)
