"""Requests as tensors, replies as scores, statuses as errors of the class that the server raised."""

import enum
from dataclasses import replace
from decimal import Decimal
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch

from guerdon import errors
from guerdon.client.calls import ModelSignature, build, estimate_cost, make_request, parse
from guerdon.client.endpoints import Endpoint
from guerdon.client.http_transport import HttpExchange, HttpReply
from guerdon.client.retry import Describe
from guerdon.client.statuses import error_of
from guerdon.wire.tensors import InferReply, Tensor

NEMO = ModelSignature(
    "reward_model",
    ("1",),
    "python",
    {"sentences": "BYTES", "tokens": "INT64", "sequence_lengths": "INT64"},
    {"rewards": "FP32"},
)
FULL = ModelSignature(
    "reward_model",
    ("1",),
    "guerdon",
    {**NEMO.inputs, "messages": "BYTES", "group_ids": "INT64", "prompt_lengths": "INT32", "step_positions": "INT64"},
    dict.fromkeys(("rewards", "attributes", "values", "step_rewards", "exceeded"), "FP32") | {"errors": "BYTES"},
)


ENDLESS: list[Any] = []
ENDLESS.append(ENDLESS)


def reply(**outputs: np.ndarray | list[bytes]) -> InferReply:
    tensors = [
        Tensor(name, "BYTES" if isinstance(data, list) else "FP32", (len(data), 1), data)
        for name, data in outputs.items()
    ]
    return InferReply("reward_model", "1", tensors, parameters={"weights_version": "3"})


def test_tokens_are_padded_right_with_zeros_beside_their_lengths() -> None:
    sent = build(make_request(tokens=[[5, 6, 7], np.array([8])]), NEMO)
    assert list(sent.inputs) == ["tokens", "sequence_lengths"]
    np.testing.assert_array_equal(sent.inputs["tokens"].data, [[5, 6, 7], [8, 0, 0]])
    np.testing.assert_array_equal(sent.inputs["sequence_lengths"].data, [[3], [1]])
    assert sent.inputs["tokens"].data.dtype == np.int64
    assert sent.outputs == {"rewards": True}
    assert sent.parameters == {}


def test_hints_go_only_to_a_model_that_lists_them() -> None:
    request = make_request(texts=["ab", "ac"], groups=[4, 4], prompt_lengths=[1, 1])
    assert list(build(request, NEMO).inputs) == ["sentences"]
    sent = build(request, FULL)
    assert list(sent.inputs) == ["sentences", "group_ids", "prompt_lengths"]
    np.testing.assert_array_equal(sent.inputs["group_ids"].data, [[4], [4]])
    assert sent.inputs["prompt_lengths"].data.dtype == np.int32
    assert list(sent.outputs or ()) == ["rewards", "attributes", "values", "step_rewards", "errors"]


def test_prompts_and_labels_go_to_functions_that_read_them() -> None:
    labels: list[object] = ["42", {"answer": np.int64(3)}, None]
    request = make_request(texts=["a", "b", "c"], prompts=["ü", "q", ""], labels=labels)
    assert list(build(request, FULL).inputs) == ["sentences"]
    told = replace(FULL, inputs={**FULL.inputs, "prompts": "BYTES", "labels": "BYTES"})
    sent = build(request, told).inputs
    assert list(sent) == ["sentences", "prompts", "labels"]
    assert (sent["prompts"].data, sent["prompts"].shape) == (["ü".encode(), b"q", b""], (3, 1))
    assert (sent["labels"].data, sent["labels"].shape) == ([b'"42"', b'{"answer":3}', b"null"], (3, 1))
    with pytest.raises(errors.InvalidRequest, match=r"labels\[1\] cannot be written as JSON"):
        build(make_request(texts=["a", "b"], labels=[1, object()]), told)
    with pytest.raises(errors.InvalidRequest, match=r"prompts\[1\] cannot be written as UTF-8"):
        build(make_request(texts=["a", "b"], prompts=["a", "\ud800"]), told)


LABELLED = replace(FULL, inputs={**FULL.inputs, "labels": "BYTES"})


class Word(str, enum.Enum):  # noqa: UP042 - whose str() is 'Word.A'
    """A string that prints as something else."""

    A = "a"


@pytest.mark.parametrize(
    ("label", "text"),
    [
        (np.array([{"stdin": "1", "n": np.array([1, 2])}], dtype=object), '[{"stdin":"1","n":[1,2]}]'),
        (np.array(["ü", None], dtype=object), '["ü",null]'),
        (np.array([["a"], ["b"]]), '[["a"],["b"]]'),
        ({"x": np.array([0.1, 2], np.float32)}, '{"x":[0.1,2.0]}'),
        (np.array(3.5), "3.5"),
        (np.float32(0.1), "0.1"),
        (np.float16(0.1), "0.1"),
        (np.uint64(2**64 - 1), "18446744073709551615"),
        (np.bool_(True), "true"),
        ({np.str_("k"): (1, [np.int8(2)])}, '{"k":[1,[2]]}'),
        (Word.A, '"a"'),
        (2**70, "1180591620717411303424"),
        (torch.tensor([1.5, 2.0]), "[1.5,2.0]"),
        (pd.Series(["a", "b"]), '["a","b"]'),
        (pa.scalar([{"a": 1}]), '[{"a":1}]'),
        (None, "null"),
        (float("nan"), "null"),
        (np.float32("nan"), "null"),
        (torch.tensor(float("nan")), "null"),
        (pd.NA, "null"),
        (pd.NaT, "null"),
        ("null", '"null"'),
    ],
)
def test_a_label_is_written_whatever_type_a_data_frame_gives_it(label: object, text: str) -> None:
    sent = build(make_request(texts=["a", "b"], labels=[label, "b"]), LABELLED).inputs["labels"]
    assert sent.data == [text.encode(), b'"b"']


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ({"a": [1, float("nan")]}, r"\['a'\]\[1\] .*: it is nan"),
        (np.array([np.nan, 1.0]), r"\[0\] .*: it is nan"),
        ([pd.NA], r"\[0\] .*NAType"),
        (float("inf"), ".*: it is inf"),
        ({1: 2}, ".*: its key 1 is no string"),
        ({"a": {2}}, r"\['a'\] .*builtins.set; send a string or a number"),
        (b"x", ".*builtins.bytes"),
        (Decimal("0.1"), ".*decimal.Decimal"),
        (pd.Timestamp("2020-01-01"), ".*Timestamp"),
        (np.timedelta64(3, "s"), ".*numpy.timedelta64"),
        (1j, ".*builtins.complex"),
        ({"a": "\ud800"}, ".*not valid UTF-8"),
        (ENDLESS, ".*nested too deep"),
    ],
)
def test_a_label_that_is_no_json_is_refused_by_row_and_part(label: object, why: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=rf"^labels\[1\]{why}"):
        build(make_request(texts=["a", "b"], labels=["a", label]), LABELLED)


def test_inputs_that_matter_are_never_left_out() -> None:
    chat = make_request(messages=[[{"role": "user", "content": "hi"}]])
    assert build(chat, FULL).inputs["messages"].data == [b'[{"role":"user","content":"hi"}]']
    with pytest.raises(errors.InvalidRequest, match=r"takes no input 'messages'.*chat template"):
        build(chat, NEMO)
    steps = make_request(tokens=[[1, 2, 3], [1, 2]], steps=[[0, 2], [1]])
    np.testing.assert_array_equal(build(steps, FULL).inputs["step_positions"].data, [[0, 2], [1, -1]])
    with pytest.raises(errors.InvalidRequest, match="takes no input 'step_positions'"):
        build(steps, NEMO)


def test_time_and_priority_are_sent_as_triton_counts_them() -> None:
    sent = build(make_request(texts=["a"], priority=3), NEMO, timeout_s=1.5)
    assert sent.parameters == {"priority": 97, "timeout": 1_500_000}
    assert build(make_request(texts=["a"], priority=10_000), NEMO).parameters == {"priority": 1}


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({}, "not none"),
        ({"texts": ["a"], "tokens": [[1]]}, "not texts and tokens"),
        ({"texts": "abc"}, "texts must be a list .* not a string"),
        ({"texts": []}, "not empty"),
        ({"texts": (text for text in "ab")}, "texts must be a list .* not a generator"),
        ({"texts": ["a", 3]}, r"texts\[1\] is an int; each sample must be a string"),
        ({"messages": ["hi"]}, r"messages\[0\] is a str"),
        ({"messages": [{"role": "user", "content": "hi"}]}, r"messages is one sample, .* write messages=\[\[...\]\]"),
        ({"messages": [[{"role": "user", "content": "hi"}], [["hi"]]]}, r"messages\[1\]\[0\] is a list, not an object"),
        ({"messages": [[{"role": "user", "content": "hi"}], 3]}, r"messages\[1\] is an int"),
        ({"tokens": [1, 2, 3]}, r"tokens is one sample, .* write tokens=\[\[...\]\]"),
        ({"tokens": np.array([1, 2, 3])}, r"tokens is one sample"),
        ({"tokens": 3}, "tokens must be a list .* not an int"),
        ({"tokens": {"input_ids": [[1]]}}, "tokens must be a list .* not a dict"),
        ({"texts": ["a", "b"], "groups": 1}, "groups is an int for 2 samples"),
        ({"texts": ["a", "b"], "groups": ["a", "b"]}, "groups must be a flat list of integers"),
        ({"tokens": [[1, 2]], "prompt_lengths": [1.5]}, "prompt_lengths must be a flat list of integers"),
        ({"messages": [[{"role": "user", "content": object()}]]}, r"messages\[0\]\[0\]\['content'\] cannot be written"),
        ({"tokens": [[1], [2.5]]}, r"tokens\[1\] must be a flat list of integers"),
        ({"tokens": [[1], [[2]]]}, r"tokens\[1\] must be a flat list of integers"),
        ({"tokens": [[1], [[2], [3, 4]]]}, r"tokens\[1\] cannot be read as numbers"),
        ({"texts": ["a", "b"], "groups": [1]}, "groups has 1 entries for 2 samples"),
        ({"tokens": [[1, 2]], "steps": [[0], [1]]}, "steps has 2 entries for 1 samples"),
        ({"texts": ["a", "b"], "labels": [1]}, "labels has 1 entries for 2 samples"),
        ({"texts": ["a", "b"], "prompts": "ab"}, "prompts is a string for 2 samples"),
        ({"texts": ["a", "b"], "prompts": ["a", None]}, r"prompts\[1\] is a NoneType"),
    ],
)
def test_a_malformed_call_says_which_argument_and_row(samples: dict, message: str) -> None:
    with pytest.raises(errors.InvalidRequest, match=message):
        build(make_request(**samples), FULL)


def test_cost_is_tokens_or_a_quarter_of_the_characters() -> None:
    assert estimate_cost(make_request(tokens=[[1, 2, 3], [4]])) == 4
    assert estimate_cost(make_request(texts=["x" * 400, ""])) == 102
    assert estimate_cost(make_request(messages=[[{"role": "user", "content": "x" * 40}] * 2])) == 22


def test_a_failed_sample_is_nan_with_its_error_and_never_zero() -> None:
    request = make_request(tokens=[[1], [2], [3]])
    rewards = np.array([[1.5], [0.0], [np.inf]], np.float32)
    scores = parse(reply(rewards=rewards, errors=[b"", b"too long", b""]), request)
    np.testing.assert_array_equal(scores.rewards, np.array([1.5, np.nan, np.nan], np.float32))
    assert scores.errors == [None, "too long", "the server gave no finite reward"]
    assert scores.weights_version == "3"
    assert [len(scores), next(iter(scores))] == [3, 1.5]
    with pytest.raises(errors.SampleFailed, match="2 of 3 samples failed; row 1: too long"):
        scores.raise_for_failed()
    assert parse(reply(rewards=rewards[:1]), make_request(tokens=[[1]])).raise_for_failed().errors == [None]


def test_values_and_steps_come_without_their_padding() -> None:
    request = make_request(tokens=[[1, 2, 3], [4]], steps=[[0, 2], [0]])
    tables = {
        "rewards": np.ones((2, 1), np.float32),
        "values": np.array([[1, 2, 3], [4, 0, 0]], np.float32),
        "step_rewards": np.array([[1, 3], [4, np.nan]], np.float32),
    }
    scores = parse(reply(**tables), request)
    assert [row.tolist() for row in scores.values or []] == [[1, 2, 3], [4]]
    assert [row.tolist() for row in scores.steps or []] == [[1, 3], [4]]
    assert scores.attributes is None


def test_values_of_a_text_are_cut_to_the_length_that_the_server_tells() -> None:
    request = make_request(texts=["a", "b"])
    tables = {"rewards": np.ones((2, 1), np.float32), "values": np.array([[1, 2, 3], [4, 0, 0]], np.float32)}
    assert [row.tolist() for row in parse(reply(**tables), request).values or []] == [[1, 2, 3], [4, 0, 0]]
    lengths = np.array([[3], [1]], np.int64)
    assert [row.tolist() for row in parse(reply(**tables, sequence_lengths=lengths), request).values or []] == [
        [1, 2, 3],
        [4],
    ]


def test_rewards_of_several_columns_are_attributes_and_their_mean() -> None:
    scores = parse(reply(rewards=np.array([[1, 2], [3, 5]], np.float32)), make_request(texts=["a", "b"]))
    np.testing.assert_array_equal(scores.rewards, np.array([1.5, 4], np.float32))
    np.testing.assert_array_equal(scores.attributes, np.array([[1, 2], [3, 5]], np.float32))


def test_attributes_are_named_if_the_server_names_each() -> None:
    rows, request = np.array([[1, 2]], np.float32), make_request(texts=["a"])
    named = reply(rewards=np.ones((1, 1), np.float32), attributes=rows)
    named.parameters["attribute_names"] = "helpful,brevity"
    assert parse(named, request).attribute_names == ("helpful", "brevity")
    named.parameters["attribute_names"] = "helpful"
    assert parse(named, request).attribute_names == ()
    assert parse(reply(rewards=rows), request).attribute_names == ()
    alone = reply(rewards=np.ones((1, 1), np.float32))
    alone.parameters["attribute_names"] = "helpful"
    assert parse(alone, request).attribute_names == ()


def test_a_reply_of_another_length_is_the_servers_fault() -> None:
    with pytest.raises(errors.ServerFault, match="2 rewards for 1 samples"):
        parse(reply(rewards=np.ones((2, 1), np.float32)), make_request(texts=["a"]))


def test_metadata_of_something_else_is_refused() -> None:
    with pytest.raises(errors.ServerFault, match="not the open inference protocol"):
        ModelSignature.from_metadata({"name": "x"})


BY_STATUS = (
    errors.InvalidRequest("x"),
    errors.RouteNotFound("x"),
    errors.MethodNotAllowed("x"),
    errors.PayloadTooLarge("x"),
    errors.ServerFault("x"),
    errors.Unsupported("x"),
    errors.Unavailable("x"),
    errors.Overloaded("x", 2.5),
    errors.DeadlineExceeded("x"),
)
BY_KIND = (
    *BY_STATUS,
    errors.UnknownModel("x"),
    errors.SampleFailed("x"),
    errors.TrainFailed("x"),
    errors.Offloaded("x"),
    errors.StorageFailed("x"),
    errors.Cancelled("x"),
)


@pytest.mark.parametrize("error", BY_STATUS, ids=lambda e: type(e).__name__)
def test_the_client_raises_the_class_that_the_server_raised(error: errors.GuerdonError) -> None:
    seen = error_of(error.http, "x", error.retry_after_s)
    assert type(seen) is type(error)
    assert seen.retry_after_s == error.retry_after_s
    if type(error) not in (errors.RouteNotFound, errors.MethodNotAllowed):  # HTTP's own
        assert type(error_of(error.grpc, "x", error.retry_after_s)) is type(error)


@pytest.mark.parametrize("error", BY_KIND, ids=lambda e: type(e).__name__)
def test_the_kind_distinguishes_errors_of_one_status(error: errors.GuerdonError) -> None:
    for status in (error.http, error.grpc):
        seen = error_of(status, "x", error.retry_after_s, type(error).__name__)
        assert type(seen) is type(error)
        assert (str(seen), seen.retry_after_s) == ("x", error.retry_after_s)


@pytest.mark.parametrize("kind", ["StartError", "annotations", "Nonsense", "", b"Offloaded", None])
def test_a_kind_that_is_none_leaves_it_to_the_status(kind: str | bytes | None) -> None:
    assert type(error_of(503, "x", None, kind)) is errors.Unavailable


def test_statuses_that_others_send() -> None:
    assert type(error_of("NOT_FOUND", "x")) is errors.UnknownModel
    assert type(error_of(429, "x")) is errors.Overloaded
    assert type(error_of(502, "x")) is errors.Unavailable
    assert type(error_of(401, "x")) is errors.Unauthenticated
    assert type(error_of(507, "x")) is errors.StorageFailed
    assert type(error_of(599, "x")) is errors.ServerFault


@pytest.mark.parametrize(
    ("body", "headers", "raised"),
    [
        (b"Internal Server Error", {"x-request-id": "7"}, errors.Unavailable),
        (b"Internal Server Error", {"server": "uvicorn"}, errors.Unavailable),
        (b"Internal Server Error", {}, errors.ServerFault),
        (b"a bug", {"server": "uvicorn"}, errors.ServerFault),
        (b'{"error": "a bug"}', {"x-request-id": "7"}, errors.ServerFault),
        (b"<html>500 Internal Server Error</html>", {}, errors.ServerFault),
    ],
)
def test_a_500_without_json_is_retried_only_from_ray(body: bytes, headers: dict[str, str], raised: type) -> None:
    exchange = HttpExchange(Describe(Endpoint("http://proxy"), "m", 1.0))
    with pytest.raises(errors.GuerdonError) as told:
        exchange.result(HttpReply(500, headers, body))
    assert type(told.value) is raised
    assert told.value.retryable is (raised is errors.Unavailable)
