"""One rule for conversations, and one score for the same words whichever way they come in."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest

import served
from guerdon import LocalRewardModel, RewardClient
from guerdon.adapters import trl, verl
from guerdon.client.score_file import score_file
from guerdon.errors import InvalidRequest
from guerdon.messages import answered, plain, response

CALL = {"type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"content": "a"}, "a"),
        ({"content": ""}, ""),
        ({"content": [{"type": "text", "text": "a"}, {"text": "b"}, "c"]}, "a\nb\nc"),
        ({"content": []}, ""),
        ({"content": None, "tool_calls": [CALL]}, ""),
        ({"tool_calls": [CALL]}, ""),
    ],
)
def test_a_content_is_one_text(message: dict[str, Any], text: str) -> None:
    given = [{"role": "user", "content": "x", "name": "me"}, {"role": "assistant", **message}]
    assert plain(given) == [given[0], {"role": "assistant", **message, "content": text}]
    assert given[1] == {"role": "assistant", **message}  # as it was
    assert response(given) == text


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ("x", "message 1 is a str, not an object"),
        ({"content": "x"}, "message 1 needs a role"),
        ({"role": "user"}, "message 1 needs a content"),
        ({"role": "user", "content": None}, "message 1 needs a content"),
        ({"role": "assistant", "tool_calls": []}, "message 1 needs a content"),
        ({"role": "user", "content": 3, "tool_calls": [CALL]}, "message 1 needs a content"),
        ({"role": "user", "content": [{"type": "text"}]}, "message 1, part 0 is no text"),
        ({"role": "user", "content": ["a", {"type": "image_url", "text": "x"}]}, "message 1, part 1 is no text"),
    ],
)
def test_what_is_wrong_is_named(message: Any, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        plain([{"role": "user", "content": "x"}, message])


@pytest.mark.parametrize("conversation", [[], None, {"role": "user", "content": "x"}, "x"])
def test_what_is_no_conversation(conversation: Any) -> None:
    with pytest.raises(InvalidRequest, match="non-empty list"):
        plain(conversation)


def test_only_an_assistant_responds() -> None:
    with pytest.raises(InvalidRequest, match="the last message is the user's"):
        response([{"role": "user", "content": "x"}])


BEGUN: list[dict[str, Any]] = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "be"}]


def test_an_answer_goes_on_with_the_assistants_message_that_was_begun() -> None:
    whole = [BEGUN[0], {"role": "assistant", "content": "begun"}]
    assert answered(BEGUN, "gun") == answered(tuple(BEGUN), "gun") == whole
    assert answered(BEGUN[:1], "begun") == whole
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert answered([{"role": "assistant", "content": parts, "name": "me"}], "c") == [
        {"role": "assistant", "content": "a\nbc", "name": "me"}
    ]
    assert BEGUN[1]["content"] == "be"


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "tool_calls": [CALL]},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "assistant", "content": [{"type": "image_url"}]},
        {"role": "tool", "content": "4"},
    ],
)
def test_an_answer_to_what_is_no_begun_text_is_a_message_of_its_own(message: dict[str, Any]) -> None:
    assert answered([message], "a") == [message, {"role": "assistant", "content": "a"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with served.plain(tmp_path_factory.mktemp("messages")) as server:
        yield server.http_url


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}, {"role": "assistant", "content": "r"}]


def by_kserve(url: str, content: Any) -> float:
    with RewardClient(url) as client:
        return float(client.score(messages=[chat(content)]).raise_for_failed().rewards[0])


def by_classify(url: str, content: Any) -> float:
    answer = httpx.post(url + "/classify", json={"messages": chat(content)}).raise_for_status()
    return float(answer.json()["data"][0]["probs"][0])


def by_reward(url: str, content: Any) -> float:
    body = {"prompt": chat(content)[:1], "response": "r"}
    return float(httpx.post(url + "/reward", json=body).raise_for_status().json())


def by_trl(url: str, content: Any) -> float:
    (reward,) = trl.reward_function(url)(prompts=[chat(content)[:1]], completions=[chat(content)[1:]])
    assert reward is not None
    return float(reward)


def test_parts_have_the_score_of_their_text_whichever_way_they_come_in(url: str) -> None:
    expected = np.float32(by_kserve(url, "x\ny"))
    assert expected != np.float32(by_kserve(url, "x"))
    for ask in (by_kserve, by_classify, by_reward, by_trl):
        parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
        assert [np.float32(ask(url, content)) for content in ("x\ny", parts)] == [expected] * 2, ask.__name__


def test_an_answer_that_was_begun_has_the_score_of_the_whole_one(url: str, tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(orjson.dumps({"prompt": BEGUN, "response": "gun"}))
    with RewardClient(url) as client:
        expected = client.score(messages=[[BEGUN[0], {"role": "assistant", "content": "begun"}]]).rewards[0]
        score_file(client, source, target, progress=False)
    by_file = orjson.loads(target.read_bytes())["rewards"][0]
    answer = httpx.post(url + "/reward", json={"prompt": BEGUN, "response": "gun"}).raise_for_status()
    by_verl = verl.compute_score("d", "gun", None, {"prompt": BEGUN}, url=url)["score"]
    assert [np.float32(x) for x in (by_file, answer.json(), by_verl)] == [expected] * 3


def test_parts_in_this_process(tmp_path: Path) -> None:
    with LocalRewardModel(served.reward_model(tmp_path), device="cpu") as model:
        one, parts = model.score(messages=[chat("x"), chat([{"type": "text", "text": "x"}])]).raise_for_failed()
    assert one == parts
