"""UniRL's and SkyPilot's forms: texts are read, media refused by name, and failed samples have no number."""

from typing import Any

import numpy as np
import pytest

from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.judge_core import GroupKey
from guerdon.wire import bodies
from guerdon.wire.forms import ALL_FORMS
from guerdon.wire.forms.form import FormRequest

MODEL = ModelInfo("helpful", "reward", takes_messages=True)
SUM = ModelInfo("total", "sum", attribute_names=("helpful", "brief"), takes_messages=True, has_components=True)


def read(path: str, body: Any) -> FormRequest:
    return ALL_FORMS[path].read(bodies.write(body), {})


def told(asked: FormRequest, results: list[Any], info: ModelInfo) -> Any:
    asked.check(info)
    return bodies.parse(bodies.write(asked.to_reply(ScoreReply(results, [1] * len(results), "1"), info)))


def asked(*turns: str, rewards: tuple[str, ...] = ("helpful",), **more: Any) -> dict[str, Any]:
    return {"history": [{"text": text} for text in turns], "required_rewards": [*rewards], **more}


def test_turns_are_a_conversation_that_ends_with_the_response() -> None:
    made = read(
        "/score", {"requests": [asked("2+2?", "4", metadata={"answer": "4"}), asked("a", "b", "c"), asked("x")]}
    )
    assert made.model == "helpful" and made.request is not None and made.request.messages is not None
    assert [[(m["role"], m["content"]) for m in one] for one in made.request.messages] == [
        [("user", "2+2?"), ("assistant", "4")],
        [("assistant", "a"), ("user", "b"), ("assistant", "c")],
        [("assistant", "x")],
    ]
    assert made.request.references == ["4", None, None] and not made.request.is_whole
    results = [Score(0.5), SampleFailed("too long"), Score(-1.0)]
    assert told(made, results, MODEL) == {
        "results": [{"helpful": {"reward": 0.5}}, {}, {"helpful": {"reward": -1.0}}],
        "errors": [{}, {"helpful": "too long"}, {}],
    }


def test_a_sum_gives_its_components_by_their_names() -> None:
    body = {"model": "total", "requests": [asked("a", rewards=("helpful", "total")), asked("b", rewards=("brief",))]}
    results = [Score(3.0, np.array([1, 2], np.float32)), Score(4.0, np.array([1.5, 2.5], np.float32))]
    whole = {"helpful": 1.0, "brief": 2.0, "reward": 3.0}
    assert told(read("/score", body), results, SUM) == {
        "results": [{"helpful": {"reward": 1.0}, "total": whole}, {"brief": {"reward": 2.5}}],
        "errors": [{}, {}],
    }
    named = ModelInfo("judge", "judge", attribute_names=("reward",), takes_messages=True, has_components=True)
    alone = read("/score", {"requests": [asked("a", rewards=("judge",))]})
    assert told(alone, [Score(3.0, np.array([1], np.float32))], named)["results"] == [{"judge": {"reward": 3.0}}]
    other = read("/score", {"requests": [asked("a", rewards=("helpful", "clip"))]})
    with pytest.raises(InvalidRequest, match="required_rewards has 'clip', and total gives total, helpful, brief"):
        other.check(SUM)


def test_an_empty_batch_has_empty_answers() -> None:
    made = read("/score", {"requests": []})
    assert made.request is None and told(made, [], MODEL) == {"results": [], "errors": []}
    made = read("/batch_reward", {"items": []})
    assert made.request is None and told(made, [], MODEL) == {"rewards": [], "mean_reward": 0.0}


@pytest.mark.parametrize("name", ["image_b64", "video_b64", "video_path"])
def test_media_are_refused_by_name(name: str) -> None:
    body = {"requests": [{"history": [{"text": "a", name: "AAAA"}], "required_rewards": ["clip"]}]}
    with pytest.raises(InvalidRequest, match=f"{name} is not supported: models here read texts"):
        read("/score", body)
    body["requests"][0]["history"][0][name] = None  # type: ignore[index]
    read("/score", body)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"requests": [{"history": [], "required_rewards": ["a"]}]}, "history"),
        ("/score", {"requests": [asked("a", rewards=())]}, "required_rewards"),
        ("/score", {"requests": [], "text_1": "a"}, "vLLM's form and of UniRL's"),
        ("/batch_reward", {"items": [{"prompt": "a"}]}, "response"),
    ],
)
def test_what_is_missing_is_named(path: str, body: Any, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read(path, body)


@pytest.mark.parametrize("body", [{"requests": [asked("a", "b")]}, {"items": [{"prompt": "a", "response": "b"}]}])
def test_samples_in_single_calls_may_be_a_group(body: dict[str, Any]) -> None:
    made = read("/score" if "requests" in body else "/batch_reward", {**body, "group": 7, "group_size": 2})
    assert made.request is not None and made.request.cohort == GroupKey("7", 2)


def test_items_are_pairs_with_labels() -> None:
    made = read(
        "/batch_reward",
        {"items": [{"prompt": "a ", "response": "b", "ground_truth": "4"}, {"prompt": "c", "response": ""}]},
    )
    assert made.request is not None
    assert (made.request.texts, made.request.prompts) == (["a b", "c"], ["a ", "c"])
    assert made.request.references == ["4", None]
    reply = told(made, [Score(1.0), Score(0.0)], MODEL)
    assert reply == {"rewards": [{"reward": 1.0}, {"reward": 0.0}], "mean_reward": 0.5}
    with pytest.raises(SampleFailed, match="row 1: no verdict"):
        told(made, [Score(1.0), SampleFailed("no verdict")], MODEL)
