from __future__ import annotations

import base64
import math
import time
from dataclasses import replace

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from guerdon import errors
from guerdon.core import ModelInfo, Score, ScoreReply, Truncation
from guerdon.errors import InvalidRequest, SampleFailed, UnknownModel
from guerdon.server.front.http_exchanges import FORMS
from guerdon.wire import bodies, openai, samples
from guerdon.wire.bodies import MAX_DEPTH

RM = ModelInfo("rm", "sequence-classification", source="org/rm", max_length=512)
MANY = replace(RM, outputs=("rewards", "attributes"), attribute_names=("helpful", "brief", "kind"))
SUM = replace(RM, kind="sum", outputs=("rewards", "attributes"), attribute_names=("helpful", "brief"))
VALUES = replace(RM, outputs=("rewards", "values"))
PRM = replace(RM, outputs=("rewards", "step_rewards"))
TOLD = ["text", "and more"]


def replied(*results) -> ScoreReply:
    return ScoreReply(list(results), [3] * len(results), "v7", 0.25, 0.5)


def asked(path: str, body, **query):
    return FORMS[path].read(bodies.parse(orjson.dumps(body)), query)


def answered(path: str, body, *results, info: ModelInfo = RM, **query):
    """The answer to what the model gave, as a client parses it."""
    return orjson.loads(bodies.write(asked(path, body, **query).answer(replied(*results), info)))


def sigmoid(x: float) -> float:
    """As a client parses the float32 number that was written."""
    return float(str(np.float32(1 / (1 + math.exp(-x)))))


@pytest.mark.parametrize("path", ["/classify", "/pooling"])
def test_each_kind_of_input(path):
    assert asked(path, {"input": "ü"}).request.texts == ["ü"]
    assert asked(path, {"input": TOLD}).request.texts == TOLD
    one = asked(path, {"input": [5, 6, 7]}).request.tokens
    several = asked(path, {"input": [[5, 6], [2**31]]}).request.tokens
    assert [row.tolist() for row in one] == [[5, 6, 7]]
    assert [row.tolist() for row in several] == [[5, 6], [2**31]]
    assert all(row.dtype == np.int64 for row in one + several)


def test_messages_are_one_sample_whose_parts_are_read_where_it_is_scored():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": "4", "name": "me"}]
    request = asked("/classify", {"messages": conversation}).request
    assert request.messages == [conversation]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "add"}}]}
    assert asked("/classify", {"messages": [call]}).request.messages == [[call]]
    del call["content"]
    assert asked("/classify", {"messages": [call]}).request.messages == [[call]]
    other = [{"role": "user", "content": "a\nb"}, {"role": "assistant", "content": "5"}]
    third = [{"role": "user", "content": "c"}, {"role": "assistant", "content": "5"}]
    groups = [asked("/classify", {"messages": m}).request.groups.tolist() for m in (conversation, other, third)]
    assert groups[0] == groups[1] != groups[2]


def nested(depth: int) -> list:
    """So many lists in each other."""
    return [nested(depth - 1)] if depth > 1 else []


DEEP = nested(500)


def test_messages_may_have_keys_of_their_own_and_labels_any_depth_that_all_can_handle():
    message = {"role": "user", "content": "a", "tool_calls": nested(MAX_DEPTH - 2)}
    assert FORMS["/classify"].read({"messages": [message]}, {}).request.messages == [[message]]
    asked = {"prompt": [message], "response": "b", "label": nested(MAX_DEPTH - 1)}
    assert FORMS["/reward"].read(asked, {}).request.labels == [asked["label"]]
    for deeper in ({"label": nested(MAX_DEPTH)}, {"prompt": [message | {"tool_calls": nested(MAX_DEPTH)}]}):
        with pytest.raises(InvalidRequest, match="nested deeper than 64"):
            FORMS["/reward"].read(asked | deeper, {})


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
    read = asked("/classify", full)
    assert (read.model, read.request.add_special_tokens, read.request.truncation) == ("m", True, None)
    assert read.request.priority == -3, "vLLM's lower numbers go first, ours last"
    reply = orjson.loads(bodies.write(read.answer(replied(Score(1.5), Score(2.0)), RM)))
    assert reply["id"] == "classify-a135"


def test_what_is_not_asked_for_is_not_applied():
    request = asked("/classify", {"input": "a"}).request
    assert (request.add_special_tokens, request.truncation, request.priority) == (False, None, 0)
    assert answered("/classify", {"input": "a"}, Score(-3.0))["data"][0]["probs"] == [-3.0]
    assert not asked("/classify", {"input": [5], "add_special_tokens": True}).request.add_special_tokens


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
        assert asked(path, body | options).request.truncation == truncation


def test_classify_answers_as_vllm_does():
    before = int(time.time())
    reply = answered("/classify", {"input": TOLD}, Score(0.1), Score(-2.0))
    assert before <= reply.pop("created") <= time.time()
    assert reply.pop("id").startswith("classify-")
    assert reply == {
        "object": "list",
        "model": "rm",
        "data": [
            {"index": 0, "label": "LABEL_0", "probs": [0.1], "num_classes": 1},
            {"index": 1, "label": "LABEL_0", "probs": [-2.0], "num_classes": 1},
        ],
        "usage": {
            "prompt_tokens": 6,
            "total_tokens": 6,
            "completion_tokens": 0,
            "prompt_tokens_details": None,
            "completion_tokens_details": None,
        },
    }


def test_numbers_are_float32_in_their_fewest_digits():
    third = 1 / 3
    written = bodies.write(asked("/classify", {"input": "a"}).answer(replied(Score(third)), RM))
    assert b'"probs":[0.33333334]' in written
    with pytest.raises(SampleFailed):
        answered("/classify", {"input": "a"}, Score(1e39))


def test_several_attributes_are_several_labels_and_a_sum_is_one_number():
    score = Score(0.5, attributes=np.array([0.25, 2.0, -1.0], np.float32))
    assert answered("/classify", {"input": "a"}, score, info=MANY)["data"] == [
        {"index": 0, "label": "brief", "probs": [0.25, 2.0, -1.0], "num_classes": 3, "reward": 0.5}
    ]
    assert answered("/pooling", {"input": "a"}, score, info=MANY)["data"] == [
        {"index": 0, "object": "pooling", "data": [0.25, 2.0, -1.0], "reward": 0.5}
    ]
    components = {"components": {"helpful": 0.25, "brief": 2.0}}
    score.attributes = score.attributes[:2]
    assert answered("/classify", {"input": "a"}, score, info=SUM)["data"] == [
        {"index": 0, "label": "LABEL_0", "probs": [0.5], "num_classes": 1, **components}
    ]
    pair = {"text_1": "a", "text_2": "b"}
    assert answered("/score", pair, score, info=SUM)["data"] == [
        {"index": 0, "object": "score", "score": 0.5, **components}
    ]


@pytest.mark.parametrize("key", ["use_activation", "activation", "softmax"])
def test_an_activation_is_sigmoid_for_one_label_and_softmax_for_several(key):
    body = {"input": "a", key: True}
    assert answered("/classify", body, Score(2.0))["data"][0]["probs"] == [sigmoid(2.0)]
    assert answered("/classify", body | {key: False}, Score(2.0))["data"][0]["probs"] == [2.0]
    assert answered("/classify", {"input": "a"}, Score(2.0), **{key: "true"})["data"][0]["probs"] == [sigmoid(2.0)]
    score = Score(0.5, attributes=np.array([1000.0, 1000.0, -1000.0], np.float32))
    assert answered("/pooling", body, score, info=MANY)["data"][0]["data"] == [0.5, 0.5, 0.0]
    pair = {"text_1": "a", "text_2": "b", key: True}
    assert answered("/score", pair, Score(2.0))["data"][0]["score"] == sigmoid(2.0)


def test_pooling_by_token_and_by_step():
    values = Score(0.5, values=np.array([0.5, -2.0], np.float32))
    steps = Score(0.25, steps=np.array([0.25, 1.0], np.float32))
    for task in ({}, {"task": None}, {"task": "token_classify"}):
        body = {"input": [5, 6], **task}
        assert answered("/pooling", body, values, info=VALUES)["data"][0]["data"] == [[0.5], [-2.0]]
        assert answered("/pooling", body, steps, info=PRM)["data"][0]["data"] == [[0.75, 0.25], [0.0, 1.0]]
    body = {"input": [5, 6], "use_activation": True}
    assert answered("/pooling", body, values, info=VALUES)["data"][0]["data"] == [[sigmoid(0.5)], [sigmoid(-2)]]
    assert answered("/pooling", body, steps, info=PRM)["data"][0]["data"] == [[0.75, 0.25], [0.0, 1.0]]
    for info, score in ((VALUES, values), (PRM, steps)):
        body = {"input": [5, 6], "task": "classify"}
        assert answered("/pooling", body, score, info=info)["data"][0]["data"] == [score.reward]
    raw = {"use_activation": False}
    assert answered("/pooling", {"input": [5], **raw}, values, info=VALUES)["data"][0]["data"] == [[0.5], [-2.0]]


def test_what_a_model_has_no_answer_to_is_refused_before_it_is_asked():
    raw = {"input": [5, 6], "use_activation": False}
    with pytest.raises(InvalidRequest, match="use_activation"):
        asked("/pooling", raw).check(PRM)
    asked("/pooling", raw | {"task": "classify"}).check(PRM)
    asked("/pooling", raw).check(VALUES)
    by_token = asked("/pooling", {"input": "a", "task": "token_classify"})
    with pytest.raises(InvalidRequest, match="rm gives no numbers for single tokens; send the task classify"):
        by_token.check(RM)
    by_token.check(VALUES)
    critic = replace(RM, outputs=("values",))
    by_token.check(critic)
    asked("/pooling", {"input": "a"}).check(critic)
    with pytest.raises(InvalidRequest, match="no rewards"):
        asked("/pooling", {"input": "a", "task": "classify"}).check(critic)
    for path, body in ONE.items():
        if path != "/pooling":
            with pytest.raises(InvalidRequest, match="rm gives values and no rewards; name another model"):
                asked(path, body).check(critic)
        asked(path, body).check(RM)


def test_a_critics_values_alone_are_answered_by_token_only():
    critic = replace(RM, outputs=("values",))
    score = Score(float("nan"), values=np.array([0.5], np.float32))
    assert answered("/pooling", {"input": [5]}, score, info=critic)["data"][0]["data"] == [[0.5]]
    assert not asked("/pooling", {"input": [5], "task": "token_classify"}).request.wants_rewards
    assert asked("/pooling", {"input": [5]}).request.wants_rewards


@pytest.mark.parametrize(
    ("order", "dtype"), [({}, "<f4"), ({"endianness": "native"}, "<f4"), ({"endianness": "big"}, ">f4")]
)
def test_pooling_in_base64(order, dtype):
    body = {"input": "a", "encoding_format": "base64", "embed_dtype": "float32", **order}
    data = answered("/pooling", body, Score(0.1))["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(data), dtype) == np.float32(0.1)
    score = Score(0.5, values=np.array([0.5, -2.0], np.float32))
    data = answered("/pooling", body, score, info=VALUES)["data"][0]["data"]
    assert np.frombuffer(base64.b64decode(data), dtype).tolist() == [0.5, -2.0]


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
@pytest.mark.parametrize(
    "names", [("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2")]
)
def test_score_joins_pairs(path, names):
    def request(first, second):
        return asked(path, dict(zip(names, (first, second), strict=True))).request

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
    with pytest.raises(InvalidRequest, match="makes 960,016,000 characters, at most 16,777,216 are taken; send fewer"):
        FORMS["/score"].read(body, {})
    assert time.thread_time() - started < 0.1
    most = samples.MAX_JOINED // 60_001
    assert len(FORMS["/score"].read(body | {"text_2": ["a"] * most}, {}).request) == most
    one_each = {"text_1": ["p" * (samples.MAX_JOINED // 2)] * 3, "text_2": ["a"] * 3}
    assert len(FORMS["/score"].read(one_each, {}).request) == 3, "no larger than what was sent"


def test_score_answers_as_vllm_does():
    reply = answered("/score", {"text_1": "q", "text_2": TOLD, "request_id": "x"}, Score(1.0), Score(0.1))
    assert reply["id"] == "score-x"
    assert reply["data"] == [
        {"index": 0, "object": "score", "score": 1.0},
        {"index": 1, "object": "score", "score": 0.1},
    ]


@pytest.mark.parametrize("path", ["/classify", "/pooling", "/score"])
def test_a_failed_sample_fails_the_request_and_names_its_row(path):
    body = {"text_1": "q", "text_2": TOLD} if path == "/score" else {"input": TOLD}
    with pytest.raises(SampleFailed, match="row 1: not finite"):
        answered(path, body, Score(1.0), SampleFailed("not finite"))


ANY = [
    ([], "the body is a list; send an object such as"),
    (None, "the body is null"),
    ({"input": "a", "model": 5}, "model is a number"),
    ({"input": "a", "use_activation": "false"}, "use_activation is a string; send true or false"),
    ({"input": "a", "use_activation": 1}, "use_activation is a number"),
    ({"input": "a", "add_special_tokens": 0}, "add_special_tokens is a number"),
    ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens is 0; send 1 or more, or -1"),
    ({"input": "a", "truncate_prompt_tokens": -2}, "truncate_prompt_tokens is -2"),
    ({"input": "a", "truncate_prompt_tokens": "5"}, "truncate_prompt_tokens is a string"),
    ({"input": "a", "truncate_prompt_tokens": True}, "truncate_prompt_tokens is a boolean"),
    ({"input": "a", "truncate_prompt_tokens": 2.5}, "truncate_prompt_tokens is 2.5"),
    ({"input": "a", "truncation_side": "middle"}, "truncation_side is 'middle'; send left or right"),
    ({"input": "a", "truncation_side": ["left"]}, "truncation_side is a list"),
    ({"input": "a", "padding": "max_length"}, "padding is 'max_length'; send do_not_pad"),
    ({"input": "a", "priority": "high"}, "priority is a string"),
    ({"input": "a", "request_id": 5}, "request_id is no string"),
]
INPUTS = [
    ({}, "neither input nor messages"),
    ({"input": "a", "messages": [{"role": "user", "content": "a"}]}, "input and messages; send one of them"),
    ({"input": None}, "input is null; send a string"),
    ({"input": 5}, "input is a number"),
    ({"input": True}, "input is a boolean"),
    ({"input": {}}, "input is an object"),
    ({"input": []}, "input is an empty list; send a string, a list of strings, a list of token"),
    ({"input": [None]}, "input[0] is null"),
    ({"input": [True]}, "input[0] is a boolean"),
    ({"input": [{}]}, "input[0] is an object"),
    ({"input": ["a", 5]}, "input[1] is a number; send a list of strings only"),
    ({"input": ["a", None]}, "input[1] is null"),
    ({"input": [5, "6"]}, "input[1] is a string; token ids are whole numbers"),
    ({"input": [5, True]}, "input[1] is a boolean"),
    ({"input": [5, 6.0]}, "input[1] is 6.0"),
    ({"input": [5, [6]]}, "input[1] is a list"),
    ({"input": [2**63]}, "input has the id 9223372036854775808"),
    ({"input": [[5], 6]}, "input[1] is a number; send a list of lists"),
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
    ({"input": "a", "task": 5}, "task is a number"),
    ({"input": "a", "encoding_format": "bytes"}, "encoding_format is 'bytes'; send float or base64"),
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
    ({"text_1": 5, "text_2": "a"}, "text_1 is a number"),
    ({"text_1": "a", "text_2": ["b", 5]}, "text_2[1] is a number"),
    ({"text_1": "a", "text_2": [5, 6]}, "text_2[0] is a number"),
    ({"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "text_2.content[0] is no text"),
    ({"text_1": "a", "text_2": {"content": "b"}}, "text_2 is an object"),
    ({"text_1": "a", "text_2": "b", "instruction": "be kind"}, "instruction is not supported"),
    ({"text_1": "a", "text_2": "b", "max_tokens_per_doc": 5}, "max_tokens_per_doc is not supported"),
]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [("/classify", *case) for case in ANY + INPUTS]
    + [("/pooling", *case) for case in ANY + INPUTS + TASKS]
    + [("/score", *case) for case in PAIRS],
)
def test_what_is_wrong_is_told_with_its_place(path, body, message):
    with pytest.raises(InvalidRequest) as told:
        asked(path, body)
    assert message in str(told.value)


ONE = {
    "/get_reward": {"query": ["a"]},
    "/reward": {"prompt": "a", "response": "b"},
    "/classify": {"input": "a"},
    "/pooling": {"input": "a"},
    "/score": {"text_1": "a", "text_2": "b"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/encode": {"text": "a"},
    "/v1/embeddings": {"input": "a"},
    "/predict": {"inputs": "a"},
}
"""The shortest body of each form."""


@pytest.mark.parametrize("path", FORMS)
def test_what_a_form_does_not_know_in_its_url_is_refused(path):
    assert asked(path, ONE[path], model="rm").request is not None
    with pytest.raises(InvalidRequest, match=r"^the URL has the unknown key 'modle'; this path takes model"):
        asked(path, ONE[path], modle="rm")


def test_each_form_knows_its_own_keys_in_the_url():
    with pytest.raises(InvalidRequest, match=r"takes model, extra_logs$"):
        asked("/get_reward", ONE["/get_reward"], extra_log="false")
    with pytest.raises(InvalidRequest, match=r"'use_activation'; this path takes model, add_special_tokens$"):
        asked("/classify", {"text": "a"}, use_activation="true")
    with pytest.raises(InvalidRequest, match=r"takes model, add_special_tokens, use_activation, softmax, activation$"):
        asked("/classify", {"input": "a"}, raw_scores="false")
    told = {"add_special_tokens": "true", "raw_scores": "true", "truncate": "true"}
    assert asked("/predict", ONE["/predict"], **told).request.truncation is not None


@pytest.mark.parametrize("path", FORMS)
def test_no_key_of_any_form_may_hold_too_much_nesting(path):
    """More than orjson writes, though it reads it."""
    keys = {"x", "user", "model", "label", "labels", "prompts", "parameters", "rid", "request_id", *SAMPLES, *OPTIONS}
    for key in keys | {*ONE[path]}:
        for value in (DEEP, {"x": DEEP}, [{"role": "user", "content": DEEP}]):
            try:
                read = FORMS[path].read(ONE[path] | {key: value}, {})
            except InvalidRequest:
                continue
            assert bodies.write(read.answer(replied(Score(0.5)), RM))


def test_what_is_wrong_in_the_url():
    with pytest.raises(InvalidRequest, match="the URL has use_activation=yes; write use_activation=true or"):
        asked("/classify", {"input": "a"}, use_activation="yes")
    assert asked("/classify", {"input": "a"}, add_special_tokens="true").request.add_special_tokens
    body = {"input": "a", "add_special_tokens": False}
    assert not asked("/classify", body, add_special_tokens="true").request.add_special_tokens


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (InvalidRequest("x"), 400, "BadRequestError"),
        (UnknownModel("x"), 404, "NotFoundError"),
        (errors.PayloadTooLarge("x"), 413, "Request Entity Too Large"),
        (SampleFailed("x"), 500, "InternalServerError"),
        (errors.ServerFault("x"), 500, "InternalServerError"),
        (errors.Overloaded("x", 1.0), 503, "Service Unavailable"),
        (errors.DeadlineExceeded("x"), 504, "Gateway Timeout"),
        (errors.StorageFailed("x"), 507, "StorageFailed"),
    ],
)
def test_errors_are_told_as_vllm_tells_them(error, status, kind):
    for path in ("/classify", "/pooling", "/score", "/v1/score"):
        told = {"error": {"message": "x", "type": kind, "param": None, "code": status}}
        assert FORMS[path].told(error) == (status, told)


def test_the_list_of_models():
    listed = openai.models([RM, ModelInfo("callable", "function")], 17)
    assert {m["created"] for m in listed["data"]} == {17}
    assert listed["object"] == "list"
    assert [(m["id"], m["root"], m["max_model_len"], m["object"]) for m in listed["data"]] == [
        ("rm", "org/rm", 512, "model"),
        ("callable", "callable", None, "model"),
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda children: st.lists(children, max_size=3) | st.dictionaries(st.sampled_from(["role", "content"]), children),
    max_leaves=5,
)
TEXTS = st.just("a") | st.lists(st.just("a"), min_size=1, max_size=2)
SAMPLES = ["input", "messages", "text", "input_ids", "inputs", "text_1", "text_2"]
OPTIONS = [
    *("rid", "request_id", "parameters", "truncate_prompt_tokens", "truncation_side", "truncate", "use_activation"),
    *("raw_scores", "priority", "task", "encoding_format", "add_special_tokens", "model"),
]


@pytest.mark.parametrize("path", FORMS)
@settings(max_examples=60)
@given(
    told=st.dictionaries(st.sampled_from(SAMPLES), TEXTS | JSON, max_size=3),
    options=st.dictionaries(st.sampled_from(OPTIONS), JSON, max_size=1),
)
def test_no_body_does_worse_than_be_refused(path, told, options):
    try:
        read = FORMS[path].read(told | options, {})
    except InvalidRequest:
        return
    assert read.request is not None
    scores = [Score(0.5)] * len(read.request)
    assert scores
    assert bodies.write(read.answer(replied(*scores), RM))


@pytest.mark.parametrize("path", ["/classify", "/pooling", "/score", "/v1/embeddings", "/encode", "/predict"])
@settings(max_examples=60)
@given(reward=st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_every_form_tells_the_same_number(path, reward):
    body = {"/score": {"text_1": "a", "text_2": "b"}, "/encode": {"text": "a"}, "/predict": {"inputs": "a"}}
    told = answered(path, body.get(path, {"input": "a"}), Score(reward))
    row = told[0] if isinstance(told, list) else told.get("data", [told])[0]
    found = next(row[name] for name in ("probs", "data", "score", "embedding") if name in row)
    assert np.float32(found if path in ("/score", "/predict") else found[0]) == np.float32(reward)
