from __future__ import annotations

import json

import numpy as np
import pytest

from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.wire import bodies, forms, pooling
from guerdon.wire.trainers import FORMS

PLAIN = ModelInfo("rm", "test")
SUM = ModelInfo("both", "sum", outputs=("rewards", "attributes"), attribute_names=("kind", "short"))
CRITIC = ModelInfo("critic_infer", "test", outputs=("values",))

# Bodies as these versions of OpenRLHF send them; what they tell of a sample grew over time.
OPENRLHF = {
    "0.5.0": {"query": ["Q a", "Q b", "R c"]},
    "0.5.8": {"query": ["Q a", "Q b", "R c"], "prompts": ["Q", "Q", "R"]},
    "0.6.0": {"query": ["Q a", "Q b", "R c"], "prompts": ["Q", "Q", "R"], "labels": ["1", None, {"k": 2}]},
}


def read(path: str, body, **query: str) -> forms.Asked:
    return FORMS[path].read(body, query)


def answer(asked: forms.Asked, info: ModelInfo, *rewards: float, attributes=None) -> str:
    """The body that these rewards are told by."""
    rows = attributes or [None] * len(rewards)
    results = [Score(r, None if a is None else np.array(a, np.float32)) for r, a in zip(rewards, rows, strict=True)]
    return bodies.write(asked.answer(ScoreReply(results, [1] * len(results), "v"), info)).decode()


@pytest.mark.parametrize("version", OPENRLHF)
def test_openrlhf_of_any_version(version):
    body = OPENRLHF[version]
    asked = read("/get_reward", body)
    request = asked.request
    assert (asked.model, request.texts) == ("", body["query"])
    assert (request.prompts, request.labels) == (body.get("prompts"), body.get("labels"))
    assert not request.add_special_tokens
    assert request.truncation is None
    if "prompts" in body:
        assert request.groups[0] == request.groups[1] != request.groups[2]
        alone = read("/get_reward", {"query": ["Q d"], "prompts": ["Q"]})
        assert alone.request.groups[0] == request.groups[0], "a prompt's rollouts share also across requests"
    else:
        assert request.groups is None
    told = "[0.1,-2.0,3.3333333]"
    assert answer(asked, PLAIN, 0.1, -2, 10 / 3) == f'{{"rewards":{told},"scores":{told},"extra_logs":{{}}}}'


@pytest.mark.parametrize(
    "body",
    [
        {"query": []},
        {"query": [], "prompts": [], "labels": []},
        {"query": [], "prompts": None, "labels": None},
        {"query": [], "prompts": ["Q"], "labels": ["1"]},
        {"query": [], "labels": "1"},
    ],
)
def test_openrlhfs_empty_lists(body):
    for info in (PLAIN, SUM):
        asked = read("/get_reward", body)
        assert asked.request is None
        assert json.loads(answer(asked, info)) == {"rewards": [], "scores": [], "extra_logs": {}}


def test_openrlhf_one_sample_without_lists():
    for label in ("3", ["3"], 3):
        asked = read("/get_reward", {"query": "Q a", "prompts": "Q", "labels": label})
        assert (asked.request.texts, asked.request.prompts) == (["Q a"], ["Q"])
        assert asked.request.labels == [label if isinstance(label, int) else "3"]
        assert json.loads(answer(asked, PLAIN, 0.5))["rewards"] == [0.5]
    assert read("/get_reward", {"query": "Q a", "labels": None}).request.labels is None


def test_openrlhfs_logs_are_the_components_unless_switched_off():
    body = {"query": ["a", "b"]}
    told = json.loads(answer(read("/get_reward", body), SUM, 1.5, 2, attributes=[[0.5, 1], [0.1, 2]]))
    assert told == {"rewards": [1.5, 2], "scores": [1.5, 2], "extra_logs": {"kind": [0.5, 0.1], "short": [1, 2]}}
    bare = read("/get_reward", body, extra_logs="false")
    assert json.loads(answer(bare, SUM, 1.5, 2, attributes=[[0.5, 1], [0.1, 2]]))["extra_logs"] == {}


def test_slime_with_text_and_with_messages():
    asked = read("/reward", {"prompt": "Q", "response": " a", "label": "3"})
    assert (asked.request.texts, asked.request.prompts, asked.request.labels) == (["Q a"], ["Q"], ["3"])
    assert answer(asked, PLAIN, 0.1) == "0.1"
    assert answer(asked, PLAIN, 1 / 3) == "0.33333334"
    messages = [{"role": "user", "content": "Q"}]
    asked = read("/reward", {"prompt": messages, "response": "a"})
    assert asked.request.messages == [[*messages, {"role": "assistant", "content": "a"}]]
    assert (asked.request.texts, asked.request.prompts, asked.request.labels) == (None, None, None)
    assert len(messages) == 1
    again = read("/reward", {"prompt": messages, "response": "b", "label": None}).request
    assert again.groups == asked.request.groups
    assert again.labels == [None]


def test_slime_with_an_answer_that_its_prompt_begins():
    prompt = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]
    asked = read("/reward", {"prompt": prompt, "response": "b"})
    assert asked.request.messages == [[prompt[0], {"role": "assistant", "content": "ab"}]]
    assert prompt[1]["content"] == "a"


def test_slimes_reward_key():
    body = {"prompt": "Q", "response": " a", "label": None}
    assert json.loads(answer(read("/reward", body, key="score"), PLAIN, 0.5)) == {"score": 0.5}
    told = json.loads(answer(read("/reward", body, key="score"), SUM, 1.5, attributes=[[0.5, 1]]))
    assert told == {"score": 1.5, "components": {"kind": 0.5, "short": 1}}
    assert answer(read("/reward", body), SUM, 1.5, attributes=[[0.5, 1]]) == "1.5"
    assert answer(read("/reward", body, key=""), SUM, 1.5, attributes=[[0.5, 1]]) == "1.5"
    with pytest.raises(InvalidRequest, match="key=components, where a sum's parts stand; name another key"):
        read("/reward", body, key="components")


def test_slimes_conversations_are_read_where_they_are_scored():
    """Parts, missing contents and what is none at all are for the one rule that judges them for every form."""
    parts = [{"type": "text", "text": "Q"}, {"type": "text", "text": "R"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    prompt = [{"role": "user", "content": parts}, call, {"role": "tool", "content": "4"}]
    request = read("/reward", {"prompt": prompt, "response": "a"}).request
    assert request.messages == [[*prompt, {"role": "assistant", "content": "a"}]]
    lines = [{"role": "user", "content": "Q\nR"}, *prompt[1:]]
    of_lines = read("/reward", {"prompt": lines, "response": "b"}).request
    assert of_lines.groups.tolist() == request.groups.tolist()
    of_vllm = pooling.FORMS["/classify"].read({"messages": request.messages[0]}, {}).request
    assert of_vllm.groups.tolist() == request.groups.tolist()
    for content in (None, 3, [{"type": "image_url"}], {"a": 1}):
        wrong = read("/reward", {"prompt": [{"role": "user", "content": content}], "response": "a"}).request
        assert wrong.messages[0][0]["content"] == content
        assert wrong.groups is None


BODIES = {"/get_reward": {"query": ["Q a"]}, "/reward": {"prompt": "Q", "response": " a"}}


@pytest.mark.parametrize("path", FORMS)
def test_a_model_may_be_named(path):
    assert read(path, BODIES[path] | {"model": "./my-rm"}).model == "./my-rm"
    for nothing in (None, ""):
        assert read(path, BODIES[path] | {"model": nothing}).model == ""
    with pytest.raises(InvalidRequest, match=r"^model is a number; send a model's name, or leave it out$"):
        read(path, BODIES[path] | {"model": 0})
    assert read(path, BODIES[path] | {"extra": 1, "user": None}).request is not None


@pytest.mark.parametrize("path", FORMS)
def test_a_failed_sample_fails_the_request(path):
    asked = read(path, BODIES[path])
    failed = ScoreReply([SampleFailed("the reward is not finite")], [1], "v")
    with pytest.raises(SampleFailed, match=r"^row 0: the reward is not finite$"):
        asked.answer(failed, PLAIN)
    for reward in (float("nan"), float("inf"), 1e39):
        with pytest.raises(SampleFailed, match="not a finite number of float32"):
            answer(asked, PLAIN, reward)
    with pytest.raises(InvalidRequest, match=r"^critic_infer gives values and no rewards; name another model$"):
        asked.check(CRITIC)
    asked.check(PLAIN)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/get_reward", [], "the body is a list; send an object such as"),
        ("/get_reward", "x", "the body is a string; send"),
        ("/get_reward", {}, "the body has no 'query'; send an object such as"),
        ("/get_reward", {"queries": ["a"]}, "the body has no 'query'"),
        ("/get_reward", {"prompt": "Q", "response": "a"}, "the body has no 'query'"),
        ("/get_reward", {"query": None}, "query is null; send a string, or a list of strings"),
        ("/get_reward", {"query": {"a": 1}}, "query is an object; send a string, or a list"),
        ("/get_reward", {"query": ["a", 3]}, "query[1] is a number; send a list of strings"),
        ("/get_reward", {"query": ["a", ["b"]]}, "query[1] is a list; send a list of strings"),
        ("/get_reward", {"query": ["a"], "prompts": [None]}, "prompts[0] is null; send a list of strings"),
        ("/get_reward", {"query": ["a"], "prompts": 7}, "prompts is a number; send a string, or a list of strings"),
        ("/get_reward", {"query": ["a", "b"], "prompts": ["Q"]}, "prompts has 1 entries, query 2; send one a text"),
        ("/get_reward", {"query": ["a"], "labels": ["1", "2"]}, "labels has 2 entries, query 1; send one a text"),
        ("/get_reward", {"query": ["a"], "labels": "1"}, "labels is a string; send a list with one label a text"),
        ("/reward", 0.5, "the body is a number; send an object such as"),
        ("/reward", {"response": "a"}, "the body has no 'prompt'; send an object such as"),
        ("/reward", {"prompt": "Q"}, "the body has no 'response'"),
        ("/reward", {"query": ["a"]}, "the body has no 'prompt'"),
        ("/reward", {"prompt": "Q", "response": None}, "response is null; send a string"),
        ("/reward", {"prompt": None, "response": "a"}, "prompt is null; send a string, or a list of messages"),
        ("/reward", {"prompt": [], "response": "a"}, "prompt is an empty list; send a list of objects with role"),
        ("/reward", {"prompt": ["Q"], "response": "a"}, "prompt[0] is a string; send an object with role and"),
        ("/reward", {"prompt": [{"content": "Q"}], "response": "a"}, "prompt[0].role is null; send a string, such as"),
    ],
)
def test_what_is_wrong_is_named(path, body, text):
    with pytest.raises(InvalidRequest) as e:
        read(path, body)
    assert str(e.value).startswith(text)


def test_a_switch_in_the_url_that_is_neither_true_nor_false():
    with pytest.raises(InvalidRequest, match="the URL has extra_logs=0; write extra_logs=true or extra_logs=false"):
        read("/get_reward", {"query": ["a"]}, extra_logs="0")
