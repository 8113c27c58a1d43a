"""The forms of trainers, as OpenRLHF and slime send and read them."""

import numpy as np
import pytest

from guerdon.core import Score
from guerdon.errors import InvalidRequest
from wire.asking import RM, SUM, ask, reply, reply_bytes

# Bodies as these versions of OpenRLHF send them, with more and more about each sample.
OPENRLHF = {
    "0.5.0": {"query": ["Q a", "Q b", "R c"]},
    "0.5.8": {"query": ["Q a", "Q b", "R c"], "prompts": ["Q", "Q", "R"]},
    "0.6.0": {"query": ["Q a", "Q b", "R c"], "prompts": ["Q", "Q", "R"], "labels": ["1", None, {"k": 2}]},
}


@pytest.mark.parametrize("version", OPENRLHF)
def test_openrlhf_of_any_version(version):
    body = OPENRLHF[version]
    asked = ask("/get_reward", body)
    request = asked.request
    assert (asked.model, request.texts) == ("", body["query"])
    assert (request.prompts, request.references) == (body.get("prompts"), body.get("labels"))
    assert not request.add_special_tokens
    assert request.truncation is None
    if "prompts" in body:
        assert request.groups[0] == request.groups[1] != request.groups[2]
        alone = ask("/get_reward", {"query": ["Q d"], "prompts": ["Q"]})
        assert alone.request.groups[0] == request.groups[0], "a prompt's rollouts share also across requests"
    else:
        assert request.groups is None
    numbers = "[0.1,-2.0,3.3333333]"
    written = reply_bytes("/get_reward", body, *map(Score, (0.1, -2, 10 / 3))).decode()
    assert written == f'{{"rewards":{numbers},"scores":{numbers},"extra_logs":{{}}}}'


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
    assert ask("/get_reward", body).request is None
    for info in (RM, SUM):
        assert reply("/get_reward", body, info=info) == {"rewards": [], "scores": [], "extra_logs": {}}


@pytest.mark.parametrize("label", ["3", ["3"], 3])
def test_openrlhf_one_sample_without_lists(label):
    request = ask("/get_reward", {"query": "Q a", "prompts": "Q", "labels": label}).request
    assert (request.texts, request.prompts) == (["Q a"], ["Q"])
    assert request.references == [label if isinstance(label, int) else "3"]
    assert reply("/get_reward", {"query": "Q a", "prompts": "Q", "labels": label}, Score(0.5))["rewards"] == [0.5]
    assert ask("/get_reward", {"query": "Q a", "labels": None}).request.references is None


def scored(reward: float, *components: float) -> Score:
    return Score(reward, np.array(components, np.float32))


def test_openrlhfs_logs_are_the_components_unless_switched_off():
    body, scores = {"query": ["a", "b"]}, (scored(1.5, 0.5, 1), scored(2, 0.1, 2))
    logs = {"helpful": [0.5, 0.1], "brief": [1, 2]}
    found = reply("/get_reward", body, *scores, info=SUM)
    assert found == {"rewards": [1.5, 2], "scores": [1.5, 2], "extra_logs": logs}
    assert reply("/get_reward", body, *scores, info=SUM, extra_logs="false")["extra_logs"] == {}


def test_slime_with_text_and_with_messages():
    request = ask("/reward", {"prompt": "Q", "response": " a", "label": "3"}).request
    assert (request.texts, request.prompts, request.references) == (["Q a"], ["Q"], ["3"])
    messages = [{"role": "user", "content": "Q"}]
    request = ask("/reward", {"prompt": messages, "response": "a"}).request
    assert request.messages == [[*messages, {"role": "assistant", "content": "a"}]]
    assert (request.texts, request.prompts, request.references) == (None, None, None)
    again = ask("/reward", {"prompt": messages, "response": "b", "label": None}).request
    assert again.groups == request.groups
    assert again.references == [None]


def test_slimes_prompt_may_begin_the_response():
    prompt = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "a"}]
    request = ask("/reward", {"prompt": prompt, "response": "b"}).request
    assert request.messages == [[prompt[0], {"role": "assistant", "content": "ab"}]]


@pytest.mark.parametrize(
    ("query", "info", "score", "expected"),
    [
        ({}, RM, Score(0.1), 0.1),
        ({}, SUM, scored(1.5, 0.5, 1), 1.5),
        ({"key": ""}, SUM, scored(1.5, 0.5, 1), 1.5),
        ({"key": "score"}, RM, Score(0.5), {"score": 0.5}),
        ({"key": "score"}, SUM, scored(1.5, 0.5, 1), {"score": 1.5, "components": {"helpful": 0.5, "brief": 1}}),
    ],
)
def test_slimes_reward_key(query, info, score, expected):
    assert reply("/reward", {"prompt": "Q", "response": " a"}, score, info=info, **query) == expected


def test_slimes_conversations_are_read_where_they_are_scored():
    """One rule reads parts and missing contents for every form."""
    parts = [{"type": "text", "text": "Q"}, {"type": "text", "text": "R"}]
    call = {"role": "assistant", "tool_calls": [{"function": {"name": "add"}}]}
    prompt = [{"role": "user", "content": parts}, call, {"role": "tool", "content": "4"}]
    request = ask("/reward", {"prompt": prompt, "response": "a"}).request
    assert request.messages == [[*prompt, {"role": "assistant", "content": "a"}]]
    lines = [{"role": "user", "content": "Q\nR"}, *prompt[1:]]
    of_lines = ask("/reward", {"prompt": lines, "response": "b"}).request
    assert of_lines.groups.tolist() == request.groups.tolist()
    of_vllm = ask("/classify", {"messages": request.messages[0]}).request
    assert of_vllm.groups.tolist() == request.groups.tolist()
    for content in (None, 3, [{"type": "image_url"}], {"a": 1}):
        wrong = ask("/reward", {"prompt": [{"role": "user", "content": content}], "response": "a"}).request
        assert wrong.messages[0][0]["content"] == content
        assert wrong.groups is None


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/get_reward", {}, "the body has no 'query'; send an object such as"),
        ("/get_reward", {"queries": ["a"]}, "the body has no 'query'"),
        ("/get_reward", {"prompt": "Q", "response": "a"}, "the body has no 'query'"),
        ("/get_reward", {"query": None}, "query is null; send a string, or a list of strings"),
        ("/get_reward", {"query": {"a": 1}}, "query is an object; send a string, or a list"),
        ("/get_reward", {"query": ["a", 3]}, "query[1] is 3; send a string"),
        ("/get_reward", {"query": ["a", ["b"]]}, "query[1] is a list; send a string"),
        ("/get_reward", {"query": ["a"], "prompts": [None]}, "prompts[0] is null; send a string"),
        ("/get_reward", {"query": ["a"], "prompts": 7}, "prompts is 7; send a string, or a list of strings"),
        ("/get_reward", {"query": ["a", "b"], "prompts": ["Q"]}, "prompts has 1 entries, query 2; send one a text"),
        ("/get_reward", {"query": ["a"], "labels": ["1", "2"]}, "labels has 2 entries, query 1; send one a text"),
        ("/get_reward", {"query": ["a"], "labels": "1"}, "labels is a string; send a list with one label a text"),
        ("/reward", {"response": "a"}, "the body has no 'prompt'; send an object such as"),
        ("/reward", {"prompt": "Q"}, "the body has no 'response'"),
        ("/reward", {"query": ["a"]}, "the body has no 'prompt'"),
        ("/reward", {"prompt": "Q", "response": None}, "response is null; send a string"),
        ("/reward", {"prompt": None, "response": "a"}, "prompt is null; send a string, or a list of objects"),
        ("/reward", {"prompt": [], "response": "a"}, "prompt is an empty list; send a string, or a list of objects"),
        ("/reward", {"prompt": ["Q"], "response": "a"}, "prompt[0] is a string; send an object with role and"),
        ("/reward", {"prompt": [{"content": "Q"}], "response": "a"}, "prompt[0].role is null; send a string, such as"),
    ],
)
def test_what_is_wrong_is_named(path, body, text):
    with pytest.raises(InvalidRequest) as e:
        ask(path, body)
    assert str(e.value).startswith(text)
