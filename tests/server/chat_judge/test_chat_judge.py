"""The parts of a judge in words: settings, reading of answers, and the answers on the disk."""

import asyncio
import dataclasses
import logging
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from guerdon.errors import ConfigError, SampleFailed, StartError, StorageFailed
from guerdon.kinds.chat_judge import ServedChatJudge
from guerdon.server.chat_judge.answer_cache import FILE, AnswerCache, Flight
from guerdon.server.chat_judge.calling import _retry_after_s
from guerdon.server.chat_judge.parsing import AnswerParser, Unreadable
from guerdon.settings.chat_judges import BudgetConfig, ChatJudgeConfig, ParseConfig
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig, ServerConfig
from guerdon.settings.fields import check_settings, from_mapping
from guerdon.wire.chat_completions import ChatAnswer, read_answer, read_error, write_request

PLAIN: dict[str, Any] = {"url": "http://127.0.0.1:1/v1", "model": "m", "template": "{response}", "cache": "answers"}

# ------------------------------------------------------------------------------------------------------ settings


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"url": ""}, "url is ''"),
        ({"url": "127.0.0.1:8000/v1"}, "url is '127"),
        ({"url": "ftp://host/v1"}, "url is 'ftp"),
        ({"url": "http://host/v1?key=1"}, "url is 'http"),
        ({"url": "http://me:secret@host/v1"}, "has a user's name or password"),
        ({"template": ""}, "template is not given"),
        ({"template": "{prompt}"}, r"template has no \{response\}"),
        ({"template": "{response} {criterion}"}, r"template has \{criterion\}, and there are no criteria"),
        ({"template": "{response"}, "template has (the unknown field|a stray brace)"),
        ({"cache": ""}, "cache is not given"),
        ({"api_key_env": "A", "api_key_file": "b"}, "api_key_env and api_key_file are both given"),
        ({"extra": {"messages": []}}, "extra has messages"),
        ({"budget": {"cost": 5}}, "budget.cost is 5, and a price is missing"),
        ({"budget": {"tokens": 0}}, "budget.tokens is 0"),
        ({"samples": 0}, "samples is 0"),
        ({"timeout": 5}, "unknown setting models\\[0\\].timeout"),
        ({"parse": {"regex": "(a)", "json": "b"}}, "models\\[0\\].parse.regex and json are both given"),
        ({"parse": {"regex": "a"}}, "regex has 0 groups"),
        ({"parse": {"regex": "(a"}}, "which is no regular expression"),
        ({"parse": {"values": {}}}, "values is empty"),
        ({"parse": {"values": {"a": 1.0, "b": 1.0}}}, "all values are the same"),
        ({"parse": {"values": {"A": 1, "a ": 2}}}, "values has a verdict twice"),
        ({"parse": {"values": {True: 1}}}, "values has the key True"),
        ({"parse": {"values": {"a": "b"}}}, "values.a is 'b'"),
        ({"parse": {"values": {"a": float("inf")}}}, "values is .*inf"),
        ({"parse": {"values": {"a": 1}, "lowest": 0}}, "values is given, and bounds too"),
        ({"parse": {"lowest": 2, "highest": 1}}, "lowest is above highest"),
    ],
)
def test_mistakes_in_settings_are_named(change: dict[str, Any], message: str) -> None:
    data = {"models": [{"kind": "chat_judge", **PLAIN, **change}]}
    with pytest.raises(ConfigError, match=message):
        check_settings(from_mapping(ServerConfig, data))


def test_a_judge_in_a_sum_becomes_a_model() -> None:
    judge = {"name": "careful", "parse": {"values": {"yes": 1}}, **PLAIN}
    data = {
        "models": [{"model": "m:f", "name": "f"}],
        "rewards": [{"name": "total", "components": [{"model": "f"}, {"judge": judge, "weight": 0.5}]}],
    }
    config = from_mapping(ServerConfig, data)
    check_settings(config)
    assert [model.name for model in config.models] == ["f", "careful"]
    assert [(part.model, part.weight) for part in config.rewards[0].components] == [("f", 1.0), ("careful", 0.5)]
    again = dataclasses.replace(config, port=1)  # as flags do
    assert [model.name for model in again.models] == ["f", "careful"]
    both = RewardConfig(name="total", components=[ComponentConfig("f", judge=ChatJudgeConfig(**PLAIN))])
    with pytest.raises(ConfigError, match="has a model and a judge"):
        check_settings(ServerConfig(models=[ModelConfig(model="m:f", name="f")], rewards=[both]))


def test_the_pages_settings_are_right() -> None:
    """Also the budget, which goes into the first of them."""
    page = (Path(__file__).parents[3] / "docs/chat_judge.md").read_text(encoding="utf-8")
    first, inline, budget = (yaml.safe_load(block) for block in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL))
    first["models"][0] |= budget
    for data in (first, inline):
        check_settings(config := from_mapping(ServerConfig, data))
        assert "careful" in [model.name for model in config.models]


def test_a_missing_key_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(ConfigError, match="NO_SUCH_KEY is not set"):
        ServedChatJudge(ChatJudgeConfig(**PLAIN, api_key_env="NO_SUCH_KEY"))
    with pytest.raises(ConfigError, match="cannot read the API key"):
        ServedChatJudge(ChatJudgeConfig(**PLAIN, api_key_file=str(tmp_path / "none")))
    (tmp_path / "key").write_text("two\nlines")
    with pytest.raises(ConfigError, match="has characters that no key has"):
        ServedChatJudge(ChatJudgeConfig(**PLAIN, api_key_file=str(tmp_path / "key")))


def test_the_version_follows_what_decides_about_rewards() -> None:
    def version(**change: Any) -> str:
        return ServedChatJudge(ChatJudgeConfig(**{**PLAIN, **change})).info.weights_version

    assert version() == version(url="http://elsewhere/v1", concurrency=3, cache="other", name="other")
    changes: list[dict[str, Any]] = [
        {"model": "n"}, {"template": "{response}."}, {"system": "s"}, {"samples": 2}, {"temperature": 0.0},
        {"parse": ParseConfig(values={"a": 1.0})}, {"extra": {"seed": 1}},
    ]  # fmt: skip
    assert len({version(), *(version(**change) for change in changes)}) == len(changes) + 1


# ------------------------------------------------------------------------------------------------------- reading


def read(text: str, **parse: Any) -> float:
    return AnswerParser(ParseConfig(**parse)).read(ChatAnswer(text, "stop"))


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        ({}, " 7\n", 7.0),
        ({}, "-1.5e1", -15.0),
        ({"regex": r"Score: (\S+)"}, "Score: 1? No.\nScore: 2", 2.0),
        ({"regex": r"(?i)verdict: *(\w+)", "values": {"Good": 1, "bad": -1}}, "VERDICT: good", 1.0),
        ({"values": {"yes": 1, "no": 0}}, " Yes ", 1.0),
        ({"json": "score"}, 'Well. {"score": 3, "why": "x"}', 3.0),
        ({"json": "score"}, '{"score": 1} then ```json\n{"why": {"score": 9}, "score": 2.5}\n```', 2.5),
        ({"json": "score"}, '{a, b} {"score": "4"}', 4.0),
        ({"json": "ok", "values": {"true": 1, "false": 0}}, '{"ok": true}', 1.0),
        ({"lowest": 0, "highest": 1}, "1", 1.0),
    ],
)
def test_a_number_is_read(parse: dict[str, Any], text: str, value: float) -> None:
    assert read(text, **parse) == value


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        ({}, "", "no number"),
        ({}, "seven", "no number"),
        ({}, "7 of 10", "no number"),
        ({}, "nan", "no number"),
        ({}, "inf", "no number"),
        ({}, "1e999", "no finite number"),
        ({}, "٣", "no number"),
        ({"regex": r"Score: (\d+)"}, "Score: high", "matches nothing"),
        ({"regex": r"Score:(x)?"}, "Score:", "matches nothing"),
        ({"values": {"yes": 1}}, "Yes.", "none of yes"),
        ({"json": "score"}, "[1, 2]", "no JSON object"),
        ({"json": "score"}, '{"score": 1', "in malformed JSON"),
        ({"json": "score"}, '{"other": 1}', "no JSON object"),
        ({"json": "score"}, '{"score": null}', "is a NoneType"),
        ({"json": "score"}, '{"score": true}', "no number"),
        ({"json": "score"}, '{"score": NaN}', "no finite number"),
        ({"json": "score"}, '{"score": 1' + "0" * 400 + "}", "no finite number"),
        ({"lowest": 0}, "-1", "out of its bounds, 0 to any"),
        ({"highest": 10}, "11", "out of its bounds, any to 10"),
    ],
)
def test_what_has_no_verdict_is_never_a_number(parse: dict[str, Any], text: str, message: str) -> None:
    with pytest.raises(Unreadable, match=message) as caught:
        read(text, **parse)
    assert text[-20:].encode("unicode_escape").decode() in str(caught.value).encode("unicode_escape").decode()


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (ChatAnswer("5", "length"), "cut at its longest"),
        (ChatAnswer("5", "content_filter"), "refused"),
        (ChatAnswer("5", "stop", "I will not."), "refused: 'I will not.'"),
    ],
)
def test_refusals_and_cut_answers_have_no_number(answer: ChatAnswer, message: str) -> None:
    with pytest.raises(Unreadable, match=message):
        AnswerParser(ParseConfig()).read(answer)


@pytest.mark.parametrize("body", [b"", b"<html>", b"{}", b'{"choices": []}', b'{"choices": [{"message": 1}]}', b"\xff"])
def test_what_is_no_completion_is_no_answer(body: bytes) -> None:
    with pytest.raises(ValueError, match=r"it (is no chat completion|has no choices)"):
        read_answer(body)


def test_retry_after_is_seconds_or_a_date_by_the_servers_own_clock() -> None:
    def wait_s(given: str, **more: str) -> float:
        return _retry_after_s({"retry-after": given, **more})

    assert [wait_s(given) for given in ("7", "", "soon", "-1", "٣")] == [7, 0, 0, 0, 0]
    dates = ["Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:28:30 GMT"]
    assert (wait_s(dates[1], date=dates[0]), wait_s(dates[0], date=dates[1]), wait_s(dates[1])) == (30, 0, 0)


def test_errors_are_shown_wherever_servers_put_them() -> None:
    for body in (b'{"error": {"message": "bad"}}', b'{"message": "bad"}', b'{"detail": "bad"}', b'"bad"', b"bad"):
        assert read_error(body) == "bad"
    assert write_request("m", "[]", {"b": 1, "a": 2}) == write_request("m", "[]", {"a": 2, "b": 1})


# -------------------------------------------------------------------------------------------------- on the disk


ANSWERS = [ChatAnswer(f"answer {i} — é\n", "stop", "", 10 + i, i) for i in range(3)]
KEYS = [bytes([i]) * 32 for i in range(3)]


async def put(cache: AnswerCache, key: bytes, answer: ChatAnswer, judge: str = "j") -> bool:
    """Returns whether it was kept already."""

    async def fetch(flight: Flight) -> ChatAnswer:
        return answer

    found, was_kept = await cache.get(key, judge, fetch)
    assert found == answer
    return was_kept


def filled(folder: Path) -> bytes:
    async def fill() -> None:
        cache = AnswerCache(folder)
        for key, answer in zip(KEYS, ANSWERS, strict=True):
            assert not await put(cache, key, answer)
        cache.close()

    asyncio.run(fill())
    return (folder / FILE).read_bytes()


def test_a_file_torn_at_any_byte_keeps_all_answers_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = filled(tmp_path)
    monkeypatch.setattr(os, "fsync", lambda file: None)  # 600 starts take seconds otherwise
    ends = [0] + [i + 1 for i, byte in enumerate(data) if byte == 10]
    assert len(ends) == 4

    async def check() -> None:
        for size in range(len(data) + 1):
            (tmp_path / FILE).write_bytes(data[:size])
            num_whole = sum(end <= size for end in ends[1:])
            cache = AnswerCache(tmp_path)
            assert len(cache) == num_whole
            assert sum(spent.calls for spent in cache.spent.values()) == num_whole
            cache.close()
            assert (tmp_path / FILE).stat().st_size == ends[num_whole]
        cache = AnswerCache(tmp_path)
        assert [await put(cache, *one) for one in zip(KEYS, ANSWERS, strict=True)] == [True] * 3
        cache.close()

    asyncio.run(check())


def test_after_a_torn_line_new_answers_are_whole(tmp_path: Path) -> None:
    data = filled(tmp_path)
    (tmp_path / FILE).write_bytes(data[:-7])

    async def check(was_kept: list[bool]) -> None:
        cache = AnswerCache(tmp_path)
        assert [await put(cache, *one) for one in zip(KEYS, ANSWERS, strict=True)] == was_kept
        cache.close()

    asyncio.run(check([True, True, False]))
    asyncio.run(check([True, True, True]))


def test_a_damaged_line_is_told_and_asked_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = bytearray(filled(tmp_path))
    data[data.index(b"answer 1")] ^= 1
    (tmp_path / FILE).write_bytes(data)

    async def check() -> None:
        cache = AnswerCache(tmp_path)
        assert "1 of its lines are damaged" in caplog.text
        assert [await put(cache, *one) for one in zip(KEYS, ANSWERS, strict=True)] == [True, False, True]
        with (tmp_path / FILE).open("r+b") as file:  # while it is open
            file.seek(data.index(b"answer 2"))
            file.write(b"A")
        assert not await put(cache, KEYS[2], ANSWERS[2])
        assert "is damaged; its question is repeated" in caplog.text
        cache.close()

    with caplog.at_level(logging.ERROR):
        asyncio.run(check())


def test_a_folder_belongs_to_one_server(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path)
    with pytest.raises(StartError, match="another server keeps its judges' answers"):
        AnswerCache(tmp_path)
    cache.close()
    AnswerCache(tmp_path).close()
    (tmp_path / "file").write_text("")
    with pytest.raises(StartError, match="cannot keep answers"):
        AnswerCache(tmp_path / "file" / "folder")


def test_answers_that_the_disk_refuses_are_not_used_and_nothing_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it takes them: then they are kept, and were paid for once."""
    num_asked, is_full = [0], [True]
    write = os.pwrite

    def pwrite(file: int, data: bytes, at: int) -> int:
        if is_full[0]:
            write(file, data[:9], at)
            raise OSError(28, "No space left on device")
        return write(file, data, at)

    async def fetch(flight: Flight) -> ChatAnswer:
        num_asked[0] += 1
        return ANSWERS[0]

    async def check() -> None:
        cache = AnswerCache(tmp_path)
        monkeypatch.setattr(os, "pwrite", pwrite)
        for key in (KEYS[0], KEYS[0], KEYS[1]):
            with pytest.raises(StorageFailed, match="No space left"):
                await cache.get(key, "j", fetch)
        assert num_asked == [1]
        is_full[0] = False
        assert await cache.get(KEYS[0], "j", fetch) == (ANSWERS[0], False)
        await cache.get(KEYS[1], "j", fetch)
        assert num_asked == [2]
        cache.close()
        cache = AnswerCache(tmp_path)
        assert len(cache) == 2
        cache.close()

    asyncio.run(check())


def test_many_answers_at_once_share_their_fsyncs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_syncs, fsync = [0], os.fsync

    def counted(file: int) -> None:
        num_syncs[0] += 1
        fsync(file)

    async def check() -> None:
        cache = AnswerCache(tmp_path)
        monkeypatch.setattr(os, "fsync", counted)
        await asyncio.gather(*(put(cache, i.to_bytes(32, "big"), ANSWERS[0]) for i in range(100)))
        cache.close()

    asyncio.run(check())
    assert num_syncs[0] <= 3


def test_a_question_in_the_air_is_asked_once_and_ends_if_nobody_waits(tmp_path: Path) -> None:
    """But not once it is being called: that answer is paid for, and kept."""
    num_asked, gate, flights = [0], asyncio.Event(), []

    async def fetch(flight: Flight) -> ChatAnswer:
        num_asked[0] += 1
        flights.append(flight)
        await gate.wait()
        return ANSWERS[0]

    async def check() -> None:
        cache = AnswerCache(tmp_path)

        async def ask(count: int) -> list[asyncio.Task[Any]]:
            tasks = [asyncio.create_task(cache.get(KEYS[0], "j", fetch)) for _ in range(count)]
            await asyncio.sleep(0.01)
            return tasks

        first, second = await ask(2)
        assert num_asked == [1]
        first.cancel()
        await asyncio.sleep(0.01)
        second.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert flights[0].task.cancelled() or flights[0].task.cancelling()
        (third,) = await ask(1)
        assert num_asked == [2]
        flights[1].is_calling = True
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)
        gate.set()
        await cache.finish()
        assert await put(cache, KEYS[0], ANSWERS[0])
        cache.close()

    asyncio.run(check())


async def _fails(flight: Flight) -> ChatAnswer:
    raise SampleFailed("no answer")


def test_a_question_without_an_answer_is_asked_again(tmp_path: Path) -> None:
    async def check() -> None:
        cache = AnswerCache(tmp_path)
        with pytest.raises(SampleFailed):
            await cache.get(KEYS[0], "j", _fails)
        assert not await put(cache, KEYS[0], ANSWERS[0])
        cache.close()

    asyncio.run(check())


def test_budgets_count_what_the_folder_has(tmp_path: Path) -> None:
    filled(tmp_path)
    cache = AnswerCache(tmp_path)
    assert (cache.spent["j"].calls, cache.spent["j"].prompt_tokens, cache.spent["j"].completion_tokens) == (3, 33, 3)
    cache.close()
    config = ChatJudgeConfig(**PLAIN, prompt_price=2.0, completion_price=10.0, budget=BudgetConfig(cost=1.0))
    assert config.cost(1_000_000, 100_000) == 3.0
