import base64
import math
import time
from dataclasses import replace

import numpy as np
import pytest

from guerdon.core import Score, Truncation
from guerdon.errors import InvalidRequest
from guerdon.wire.forms.form import MAX_JOINED
from wire.asking import CRITIC, MANY, RM, SUM, ask, reply

VALUES = replace(RM, outputs=("rewards", "values"))
PRM = replace(RM, outputs=("rewards", "step_rewards"))
TEXTS = ["text", "and more"]


def sigmoid(x: float) -> float:
    """As a client parses the float32 number that was written."""
    return float(str(np.float32(1 / (1 + math.exp(-x)))))


@pytest.mark.parametrize("path", ["/classify", "/pooling"])
def test_each_kind_of_input(path):
    assert ask(path, {"input": "ü"}).request.texts == ["ü"]
    assert ask(path, {"input": TEXTS}).request.texts == TEXTS
    one = ask(path, {"input": [5, 6, 7]}).request.tokens
    several = ask(path, {"input": [[5, 6], [2**31]]}).request.tokens
    assert [row.tolist() for row in one] == [[5, 6, 7]]
    assert [row.tolist() for row in several] == [[5, 6], [2**31]]
    assert all(row.dtype == np.int64 for row in one + several)


def test_messages_are_one_sample_whose_parts_are_read_where_it_is_scored():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "4", "name": "me"}]
    request = ask("/classify", {"messages": conversation}).request
    assert request.messages == [conversation]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert ask("/classify", {"messages": [call]}).request.messages == [[call]]
    del call["content"]
    assert ask("/classify", {"messages": [call]}).request.messages == [[call]]
    other = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "5"}]
    third = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "5"}]
    groups = [ask("/classify", {"messages": m}).request.groups.tolist() for m in (conversation, other, third)]
    assert groups[0] == groups[1] != groups[2]


def test_a_full_body_of_vllms_client_asks_what_it_says():
    full = {
        "add_special_tokens": True,
        "use_activation": False,
        "input": ["a", "b"],
        "model": "m",
        "user": None,
        "truncate_prompt_tokens": None,
        "padding": None,
        "truncation_side": None,
        "request_id": "a135",
        "priority": 3,
        "mm_processor_kwargs": None,
        "cache_salt": None,
        "no key of anyone's": [],
    }
    read = ask("/classify", full)
    assert (read.model, read.request.add_special_tokens, read.request.truncation) == ("m", True, None)
    assert read.request.priority == -3, "vLLM's lower numbers go first, ours last"
    assert reply("/classify", full, Score(1.5), Score(2.0))["id"] == "classify-a135"


def test_what_is_not_asked_for_is_not_applied():
    request = ask("/classify", {"input": "a"}).request
    assert (request.add_special_tokens, request.truncation, request.priority) == (None, None, 0)
    assert reply("/classify", {"input": "a"}, Score(-3.0))["data"][0]["probs"] == [-3.0]
    assert not ask("/classify", {"input": [5], "add_special_tokens": True}).request.add_special_tokens


@pytest.mark.parametrize(
    ("options", "truncation"),
    [
        ({"truncate_prompt_tokens": 4}, Truncation(4, "right")),
        ({"truncate_prompt_tokens": 4, "truncation_side": "left"}, Truncation(4, "left")),
        ({"truncate_prompt_tokens": -1, "truncation_side": None}, Truncation(None, "right")),
        ({"truncation_side": "left"}, None),
    ],
)
def test_truncation(options, truncation):
    for path, body in (("/classify", {"input": "a"}), ("/score", {"text_1": "a", "text_2": "b"})):
        assert ask(path, body | options).request.truncation == truncation


def test_classify_answers_as_vllm_does():
    before = int(time.time())
    found = reply("/classify", {"input": TEXTS}, Score(0.1), Score(-2.0))
    assert before <= found.pop("created") <= time.time()
    assert found.pop("id").startswith("classify-")
    assert found == {
        "object": "list",
        "model": "rm",
        "data": [
            {"index": 0, "label": "LABEL_0", "probs": [0.1], "num_classes": 1},
            {"index": 1, "label": "LABEL_0", "probs": [-2.0], "num_classes": 1},
        ],
        "usage": {
            "prompt_tokens": 7,
            "total_tokens": 7,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


def test_several_attributes_are_several_labels_and_a_sum_is_one_number():
    score = Score(0.5, attributes=np.array([0.25, 2.0, -1.0], np.float32))
    assert reply("/classify", {"input": "a"}, score, info=MANY)["data"] == [
        {"index": 0, "label": "brief", "probs": [0.25, 2.0, -1.0], "num_classes": 3, "reward": 0.5}
    ]
    assert reply("/pooling", {"input": "a"}, score, info=MANY)["data"] == [
        {"index": 0, "object": "pooling", "data": [0.25, 2.0, -1.0], "reward": 0.5}
    ]
    components = {"components": {"helpful": 0.25, "brief": 2.0}}
    score.attributes = score.attributes[:2]
    assert reply("/classify", {"input": "a"}, score, info=SUM)["data"] == [
        {"index": 0, "label": "LABEL_0", "probs": [0.5], "num_classes": 1, **components}
    ]
    pair = {"text_1": "a", "text_2": "b"}
    assert reply("/score", pair, score, info=SUM)["data"] == [
        {"index": 0, "object": "score", "score": 0.5, **components}
    ]


@pytest.mark.parametrize("key", ["use_activation", "activation", "softmax"])
def test_an_activation_is_sigmoid_for_one_label_and_softmax_for_several(key):
    body = {"input": "a", key: True}
    assert reply("/classify", body, Score(2.0))["data"][0]["probs"] == [sigmoid(2.0)]
    assert reply("/classify", body | {key: False}, Score(2.0))["data"][0]["probs"] == [2.0]
    assert reply("/classify", {"input": "a"}, Score(2.0), **{key: "true"})["data"][0]["probs"] == [sigmoid(2.0)]
    score = Score(0.5, attributes=np.array([1000.0, 1000.0, -1000.0], np.float32))
    assert reply("/pooling", body, score, info=MANY)["data"][0]["data"] == [0.5, 0.5, 0.0]
    pair = {"text_1": "a", "text_2": "b", key: True}
    assert reply("/score", pair, Score(2.0))["data"][0]["score"] == sigmoid(2.0)


def test_an_activation_is_what_the_checkpoint_was_trained_by():
    score = Score(0.5, attributes=np.array([2.0, -1.0, 0.0], np.float32))
    for activation, probs in (("sigmoid", [sigmoid(2.0), sigmoid(-1.0), 0.5]), ("none", [2.0, -1.0, 0.0])):
        info = replace(MANY, activation=activation)
        assert reply("/classify", {"input": "a", "use_activation": True}, score, info=info)["data"][0]["probs"] == probs
    for path, body, key in (
        ("/score", {"text_1": "a", "text_2": "b"}, "data"),
        ("/rerank", {"query": "a", "documents": ["b"]}, "results"),
    ):
        told = reply(path, body | {"use_activation": True}, Score(2.0), info=replace(RM, activation="none"))[key][0]
        assert told.get("score", told.get("relevance_score")) == 2.0


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/score", {"text_1": "a", "text_2": "b", "use_activation": True}),
        ("/rerank", {"query": "a", "documents": ["b"], "use_activation": True}),
        ("/rerank", {"query": "a", "texts": ["b"], "raw_scores": False}),
    ],
)
def test_an_activation_without_a_meaning_is_refused(path, body):
    several = Score(0.5, attributes=np.array([2.0, -1.0, 0.0], np.float32))
    with pytest.raises(InvalidRequest, match="is a weighted sum of"):
        reply(path, body, several, info=MANY)
    if "raw_scores" not in body:
        with pytest.raises(InvalidRequest, match=r"is Tanh by its config\.json"):
            reply(path, body, Score(2.0), info=replace(RM, activation="Tanh"))


def test_pooling_by_token_and_by_step():
    values = Score(0.5, values=np.array([0.5, -2.0], np.float32))
    steps = Score(0.25, steps=np.array([0.25, 1.0], np.float32))
    for task in ({}, {"task": None}, {"task": "token_classify"}):
        body = {"input": [5, 6], **task}
        assert reply("/pooling", body, values, info=VALUES)["data"][0]["data"] == [[0.5], [-2.0]]
        assert reply("/pooling", body, steps, info=PRM)["data"][0]["data"] == [[0.75, 0.25], [0.0, 1.0]]
    body = {"input": [5, 6], "use_activation": True}
    assert reply("/pooling", body, values, info=VALUES)["data"][0]["data"] == [[sigmoid(0.5)], [sigmoid(-2)]]
    assert reply("/pooling", body, steps, info=PRM)["data"][0]["data"] == [[0.75, 0.25], [0.0, 1.0]]
    for info, score in ((VALUES, values), (PRM, steps)):
        body = {"input": [5, 6], "task": "classify"}
        assert reply("/pooling", body, score, info=info)["data"][0]["data"] == [score.reward]
    raw = {"use_activation": False}
    assert reply("/pooling", {"input": [5], **raw}, values, info=VALUES)["data"][0]["data"] == [[0.5], [-2.0]]


def test_what_a_model_has_no_answer_to_is_refused_before_it_is_asked():
    raw = {"input": [5, 6], "use_activation": False}
    with pytest.raises(InvalidRequest, match="use_activation"):
        ask("/pooling", raw).check(PRM)
    ask("/pooling", raw | {"task": "classify"}).check(PRM)
    ask("/pooling", raw).check(VALUES)
    by_token = ask("/pooling", {"input": "a", "task": "token_classify"})
    with pytest.raises(InvalidRequest, match="rm gives no numbers for single tokens; send the task classify"):
        by_token.check(RM)
    by_token.check(VALUES)
    by_token.check(CRITIC)
    ask("/pooling", {"input": "a"}).check(CRITIC)
    with pytest.raises(InvalidRequest, match="no rewards"):
        ask("/pooling", {"input": "a", "task": "classify"}).check(CRITIC)


def test_a_critics_values_alone_are_answered_by_token_only():
    score = Score(float("nan"), values=np.array([0.5], np.float32))
    assert reply("/pooling", {"input": [5]}, score, info=CRITIC)["data"][0]["data"] == [[0.5]]
    assert not ask("/pooling", {"input": [5], "task": "token_classify"}).request.wants_rewards
    assert ask("/pooling", {"input": [5]}).request.wants_rewards


@pytest.mark.parametrize(
    ("order", "dtype"), [({}, "<f4"), ({"endianness": "native"}, "<f4"), ({"endianness": "big"}, ">f4")]
)
def test_pooling_in_base64(order, dtype):
    body = {"input": "a", "encoding_format": "base64", "embed_dtype": "float32", **order}
    data = reply("/pooling", body, Score(0.1))["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(data), dtype) == np.float32(0.1)
    score = Score(0.5, values=np.array([0.5, -2.0], np.float32))
    data = reply("/pooling", body, score, info=VALUES)["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(data), dtype).tolist() == [0.5, -2.0]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_score_joins_pairs(path, names):
    def request(first, second):
        return ask(path, dict(zip(names, (first, second), strict=True))).request

    one_to_many = request("q", ["a", "b"])
    assert one_to_many.texts == ["qa", "qb"]
    assert one_to_many.prompts == ["q", "q"]
    assert len(set(one_to_many.groups.tolist())) == 1
    assert request(["q"], ["a", "b"]).texts == ["qa", "qb"]
    assert request(["q", "r"], ["a", "b"]).texts == ["qa", "rb"]
    assert request("q", "a").texts == ["qa"]
    parts = {"content": [{"type": "text", "text": "q"}, {"type": "text", "text": "r"}]}
    assert request(parts, [{"content": ["a"]}]).texts == ["q\nra"]


def test_a_prompt_that_many_responses_would_make_too_much_of_is_refused_at_once():
    """A hundred kilobytes that would make a gigabyte."""
    body = {"text_1": "p" * 60_000, "text_2": ["a"] * 16_000}
    started = time.thread_time()
    with pytest.raises(InvalidRequest, match="makes 960,016,000 characters, at most 16,777,216 are accepted"):
        ask("/score", body)
    assert time.thread_time() - started < 0.1
    most = MAX_JOINED // 60_001
    assert len(ask("/score", body | {"text_2": ["a"] * most}).request) == most
    one_each = {"text_1": ["p" * (MAX_JOINED // 2)] * 3, "text_2": ["a"] * 3}
    assert len(ask("/score", one_each).request) == 3, "no larger than what was sent"


def test_score_answers_as_vllm_does():
    found = reply("/score", {"text_1": "q", "text_2": TEXTS, "request_id": "x"}, Score(1.0), Score(0.1))
    assert found["id"] == "score-x"
    assert found["data"] == [
        {"index": 0, "object": "score", "score": 1.0},
        {"index": 1, "object": "score", "score": 0.1},
    ]


ANY = [
    ({"input": "a", "use_activation": "false"}, "use_activation is a string; send true or false"),
    ({"input": "a", "use_activation": 1}, "use_activation is 1"),
    ({"input": "a", "add_special_tokens": 0}, "add_special_tokens is 0"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; send 1 or more, or -1"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
    ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens is a string"),
    ({"input": "a", "truncate_prompt_tokens": True}, "truncate_prompt_tokens is a boolean"),
    ({"input": "a", "truncate_prompt_tokens": 2.5}, "truncate_prompt_tokens is 2.5"),
    ({"input": "a", "truncation_side": "middle"}, "truncation_side is 'middle'; send left or right"),
    ({"input": "a", "truncation_side": ["left"]}, "truncation_side is a list"),
    ({"input": "a", "padding": "max_length"}, "padding is 'max_length'; send do_not_pad"),
    ({"input": "a", "priority": "high"}, "priority is a string"),
    ({"input": "a", "request_id": 5}, "request_id is 5; send a string"),
]
INPUTS = [
    ({}, "neither input nor messages"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input and messages; send one of them"),
    ({"input": None}, "input is null; send a string"),
    ({"input": 5}, "input is 5"),
    ({"input": True}, "input is a boolean"),
    ({"input": {}}, "input is an object"),
    ({"input": []}, "input is an empty list; send a string, a list of strings, a list of token"),
    ({"input": [None]}, "input[0] is null"),
    ({"input": [True]}, "input[0] is a boolean"),
    ({"input": [{}]}, "input[0] is an object"),
    ({"input": ["a", 5]}, "input[1] is a number, input[0] a string"),
    ({"input": ["a", None]}, "input[1] is null"),
    ({"input": [5, "6"]}, "input[1] is a string, input[0] a number"),
    ({"input": [5, True]}, "input[1] is a boolean"),
    ({"input": [5, 6.0]}, "input[1] is 6.0"),
    ({"input": [5, [6]]}, "input[1] is a list"),
    ({"input": [2**63]}, "input[0] is 9223372036854775808; send"),
    ({"input": [[5], 6]}, "input[1] is a number, input[0] a list"),
    ({"input": [[5], "a"]}, "input[1] is a string"),
    ({"input": [[5], [6, "7"]]}, "input[1][1] is a string"),
    ({"input": [["a"]]}, "input[0][0] is a string"),
    ({"input": [[[5]]]}, "input[0][0] is a list"),
    ({"input": [[5], [False]]}, "input[1][0] is a boolean"),
    ({"messages": []}, "messages is an empty list"),
    ({"messages": "a"}, "messages is a string"),
    ({"messages": ["a"]}, "messages[0] is a string; send an object with role and content"),
    ({"messages": [{"role": "user", "content": "a"}, {"content": "a"}]}, "messages[1].role is null"),
    ({"messages": [{"role": "user", "content": "a"}], "add_special_tokens": True}, "add_special_tokens is true beside"),
    ({"messages": [{"role": "user", "content": "a"}], "add_generation_prompt": True}, "add_generation_prompt is not"),
    ({"messages": [{"role": "user", "content": "a"}], "continue_final_message": True}, "continue_final_message is not"),
    ({"messages": [{"role": "user", "content": "a"}], "chat_template": "{{}}"}, "chat_template is not supported"),
    ({"input": "a", "normalize": True}, "normalize is not supported"),
    ({"input": "a", "dimensions": 4}, "dimensions is not supported"),
]
TASKS = [
    ({"input": "a", "task": "encode"}, "task is 'encode'; send classify or token_classify"),
    ({"input": "a", "task": 5}, "task is 5"),
    ({"input": "a", "encoding_format": "bytes"}, "encoding_format is 'bytes'; send base64 or float"),
    ({"input": "a", "embed_dtype": "bfloat16"}, "embed_dtype is 'bfloat16'; send float32"),
    ({"input": "a", "endianness": "middle"}, "endianness is 'middle'"),
]
PAIRS = [
    ({}, "none of these pairs; send one of text_1 and text_2, queries and documents"),
    ({"text_1": "a"}, "none of these pairs"),
    ({"text_1": "a", "text_2": None}, "none of these pairs"),
    ({"query": "a", "documents": ["b"]}, "none of these pairs"),
    ({"text_1": "a", "text_2": "b", "data_1": "a", "data_2": "b"}, "several of these pairs"),
    ({"text_1": ["a", "b"], "text_2": ["c", "d", "e"]}, "text_1 has 2 entries, text_2 3"),
    ({"text_1": ["a", "b"], "text_2": "c"}, "text_1 has 2 entries, text_2 1"),
    ({"text_1": "a", "text_2": []}, "text_2 is an empty list"),
    ({"text_1": 5, "text_2": "a"}, "text_1 is 5"),
    ({"text_1": "a", "text_2": ["b", 5]}, "text_2[1] is 5"),
    ({"text_1": "a", "text_2": [5, 6]}, "text_2[0] is 5"),
    ({"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, ".content[0].type is 'image_url'; send text"),
    ({"text_1": "a", "text_2": {"content": "b"}}, "text_2.content is a string; send a list"),
    ({"text_1": "a", "text_2": "b", "instruction": "be kind"}, "instruction is not supported"),
    ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5}, "max_tokens_per_doc is not supported"),
]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [("/classify", *case) for case in ANY + INPUTS]
    + [("/pooling", *case) for case in ANY + INPUTS + TASKS]
    + [("/score", *case) for case in PAIRS],
)
def test_what_is_wrong_is_named_with_its_place(path, body, message):
    with pytest.raises(InvalidRequest) as e:
        ask(path, body)
    assert message in str(e.value)
