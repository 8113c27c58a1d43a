"""What fuzzing and looking by hand have found, each by a name of its own; none of it may come back."""

from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tritonclient.grpc import service_pb2 as pb

from fuzz import cases
from fuzz.test_fuzz_codecs import fuzzed
from guerdon.core import Score, ScoreReply
from guerdon.errors import InvalidRequest
from guerdon.wire import bodies, kserve, kserve_grpc, score_tensors, tensors
from guerdon.wire.bodies import MAX_CONTAINERS, MAX_ROWS, MAX_VALUES
from guerdon.wire.forms import FORMS
from guerdon.wire.tensors import InferRequest, Tensor

DEEP = b"[" * 1010 + b"]" * 1010


def asking(**changes: Any) -> bytes:
    """A body of JSON with one tensor, some of whose keys are others."""
    entry = {"name": "tokens", "shape": [2], "datatype": "INT64", "data": [1, 2]} | changes
    return orjson.dumps({"inputs": [entry]}).replace(b'"@deep"', DEEP)


@pytest.mark.parametrize(
    "body",
    [
        asking(shape="@deep"),
        asking(shape=["@deep"]),
        asking(datatype="@deep"),
        asking(parameters={"binary_data_size": "@deep"}),
        asking(data="@deep"),
        b'{"inputs":[],"id":%s}' % DEEP,
        orjson.dumps({"inputs": [{"name": "tokens", "shape": [1, 1], "datatype": "INT64", "data": [1]}]})[:-1]
        + b',"parameters":{"timeout":%s}}' % DEEP,
    ],
    ids=["shape", "dimension", "datatype", "size", "data", "id", "parameter"],
)
def test_a_value_nested_a_thousand_deep_is_no_recursion_of_ours(body):
    """An error showed it by `repr`, which ends at that depth: 500."""
    with pytest.raises(InvalidRequest) as caught:
        kserve.to_request(kserve.decode(body, None), cases.PLAIN)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("key", ["model_name", "model_version", "id"])
def test_a_servers_answer_nested_a_thousand_deep_is_no_recursion_of_a_client(key):
    with pytest.raises(InvalidRequest, match=f"nested too deep|{key} is a list"):  # the second from Python 3.13 on
        kserve.decode_reply(b'{"outputs":[],"%s":%s}' % (key.encode(), DEEP), None)


def test_a_servers_parameters_that_are_no_object_are_refused():
    with pytest.raises(InvalidRequest, match="parameters is a list; send an object"):
        kserve.decode_reply(b'{"outputs":[],"parameters":[1]}', None)


@pytest.mark.parametrize("name", ["labels", "messages"])
def test_labels_and_messages_are_no_deeper_than_ranks_can_send_them(name):
    """They were taken, and could not be pickled for the other ranks."""
    value = DEEP if name == "labels" else b'[{"role":"user","content":"a","x":%s}]' % DEEP
    inputs = {name: Tensor(name, "BYTES", (1, 1), [value])}
    if name == "labels":
        inputs["sentences"] = Tensor.of_texts("sentences", ["a"])
    with pytest.raises(InvalidRequest, match="row 0 is nested deeper than 64"):
        kserve.to_request(InferRequest(inputs), cases.PLAIN)
    if name == "labels":
        body = orjson.dumps({"query": ["a"], "labels": ["@"]}).replace(b'"@"', DEEP)
        with pytest.raises(InvalidRequest, match=r"nested (too deep|deeper than 64)"):
            FORMS["/get_reward"].read(body, {})


def test_one_text_among_numbers_makes_no_table_of_texts():
    """numpy made each of the elements as wide as the longest: 100 KB of body became 4 GB."""
    body = asking(shape=[50_001], data=["x" * 20_000, *[0] * 50_000])
    code = (
        "import sys, resource; from guerdon.wire import kserve; from guerdon.errors import InvalidRequest\n"
        "limit = 1 << 30; body = sys.stdin.buffer.read(); resource.setrlimit(resource.RLIMIT_AS, (limit, limit))\n"
        "try: kserve.decode(body, None)\n"
        "except InvalidRequest as e: print(e)\n"
    )
    source = str(Path(kserve.__file__).parents[2])
    ran = subprocess.run(
        [sys.executable, "-c", code], input=body, capture_output=True, env={"PYTHONPATH": source}, check=False
    )
    assert ran.stdout == b"input 'tokens': data holds something that is not INT64\n", ran.stderr


@pytest.mark.parametrize(
    ("datatype", "data"), [("INT64", [True, 1]), ("FP32", [1.5, True]), ("FP32", ["1.5", None]), ("BOOL", [True, 0])]
)
def test_numbers_booleans_and_texts_are_not_each_other(datatype, data):
    """True beside a number was 1, and "1.5" beside null was 1.5."""
    with pytest.raises(InvalidRequest, match=f"not {datatype}"):
        tensors.from_json("x", datatype, (2,), data)


def test_whole_numbers_on_both_sides_of_2_to_the_63_stay_whole():
    """numpy made floats of them, which were refused."""
    read = tensors.from_json("x", "UINT64", (2,), [1, 2**64 - 1])
    assert read.data.tolist() == [1, 2**64 - 1]
    with pytest.raises(InvalidRequest, match="outside INT64"):
        tensors.from_json("x", "INT64", (2,), [1, 2**63])
    with pytest.raises(InvalidRequest, match="not INT64"):
        tensors.from_json("x", "INT64", (2,), [-1, 2**63])


def test_a_number_beyond_float32_is_infinite_without_a_warning(recwarn):
    assert tensors.from_json("x", "FP32", (2,), [1e300, -1e300]).data.tolist() == [np.inf, -np.inf]
    assert not recwarn


@pytest.mark.parametrize("data", [[[1, 2], [3]], [1, [2, 3]], [["a", "b"], ["c"]], ["a", ["b", "c"]]])
def test_rows_that_are_not_alike_are_refused_whatever_they_hold(data):
    """Of texts they were taken, as if they stood in one row."""
    with pytest.raises(InvalidRequest, match="rows differ in length, or are none"):
        tensors.from_json("x", "BYTES" if "a" in str(data) else "INT64", (3,), data)


def test_a_body_of_too_many_values_is_refused_before_it_is_read():
    """A body of 256 MiB of `[],` took 8 GB, and 30 seconds in which the server did nothing else."""
    for text in (b"[],", b"{},", b"0,", b'"",'):
        body = b"[%s0]" % (text * (MAX_VALUES + 1))
        with pytest.raises(InvalidRequest, match="the body has more than 4,194,304 values"):
            bodies.parse(body)
    within = b'["%s"]' % (b"a" * MAX_VALUES)
    assert len(bodies.parse(within)[0]) == MAX_VALUES
    for text in (b"[],", b"{},", b"[[[1]]],"):
        body = b"[%s0]" % (text * (MAX_CONTAINERS // text.count(text[:1]) + 1))
        with pytest.raises(InvalidRequest, match="the body has more than 524,288 lists and objects"):
            bodies.parse(body)


def test_json_within_strings_is_text():
    """Labels that are test cases, as JSON in a string, were counted value by value, and a body of them refused."""
    cases_of_one = orjson.dumps({"inputs": [[1, 2, 3]] * 250_000, "why": 'a "quote", and \\'}).decode()
    labels = [cases_of_one] * 16
    body = orjson.dumps({"query": ["a"] * 16, "labels": labels})
    assert body.count(b",") > MAX_VALUES and bodies.num_values(body) < 100
    assert bodies.parse(body)["labels"] == labels
    assert bodies.memory(body) < len(body) + 10_000  # at the gate
    told = {
        "sentences": Tensor.of_texts("sentences", ["a"] * 16),
        "labels": Tensor("labels", "BYTES", (16,), [orjson.dumps(label) for label in labels]),
    }
    assert kserve.to_request(InferRequest(told), cases.PLAIN).references == labels


@fuzzed
@given(
    st.recursive(
        st.text('",[{\\a', max_size=8) | st.integers(0, 9),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('",[{\\', max_size=3), inner, max_size=3),
        max_leaves=20,
    ),
    st.integers(1, 9),
)
def test_values_are_counted_as_they_are_wherever_a_block_ends(value, size):
    def weight(value):
        if not isinstance(value, list | dict):
            return 0
        inside = list(value.values()) if isinstance(value, dict) else value
        return (4 if isinstance(value, dict) else 2) + max(0, len(inside) - 1) + sum(map(weight, inside))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bodies, "_COUNTED_BYTES", size)
        assert bodies.num_values(orjson.dumps(value)) == weight(value)


def test_labels_together_have_no_more_values_than_a_body():
    text = b"[%s0]" % (b"0," * (MAX_VALUES // 2 + 1))
    inputs = {
        "sentences": Tensor.of_texts("sentences", ["a", "b"]),
        "labels": Tensor("labels", "BYTES", (2,), [text] * 2),
    }
    with pytest.raises(InvalidRequest, match="'labels' has more than 4,194,304 values"):
        kserve.to_request(InferRequest(inputs), cases.PLAIN)


def test_no_body_has_more_rows_than_any_server_takes():
    """Each row of four bytes became an array of a hundred."""
    ids = Tensor.of("input_ids", np.ones((MAX_ROWS + 1, 1), np.int32))
    with pytest.raises(InvalidRequest, match="'input_ids' has 1,048,577 entries"):
        kserve.to_request(InferRequest({"input_ids": ids}), cases.PLAIN)
    with pytest.raises(InvalidRequest, match="'x' has 1,048,577 entries"):
        tensors.from_raw("x", "BYTES", (MAX_ROWS + 1,), struct.pack("<I", 0) * (MAX_ROWS + 1))
    with pytest.raises(InvalidRequest, match="'x' has 1,048,577 entries"):
        tensors.from_json("x", "BYTES", (MAX_ROWS + 1,), [""] * (MAX_ROWS + 1))
    for path, name, row in (
        ("/get_reward", b"query", b'"a"'),
        ("/predict", b"inputs", b'["a"]'),
        ("/encode", b"text", b'"a"'),
        ("/encode", b"input_ids", b"[1]"),
        ("/v1/embeddings", b"input", b'"a"'),
    ):
        most = "1,048,576 entries" if b"[" not in row else "524,288 lists"
        with pytest.raises(InvalidRequest, match=f"(the body|{name.decode()}) has more than {most}"):
            FORMS[path].read(b'{"%s":[%s]}' % (name, b",".join([row] * (MAX_ROWS + 1))), {})


BIG = b"1" + b"0" * 400


@pytest.mark.parametrize("number", [BIG, b"-" + BIG, BIG * 20], ids=["large", "small", "beyond Python's limit"])
@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[{"name":"input_ids","datatype":"INT64","shape":[1,1],"data":[@]}]}',
        b'{"inputs":[{"name":"input_ids","datatype":"FP32","shape":[1,1],"data":[@]}]}',
        b'{"inputs":[{"name":"input_ids","datatype":"INT64","shape":[1,1],"data":[1]}],"parameters":{"timeout":@}}',
        b'{"inputs":[{"name":"input_ids","datatype":"INT64","shape":[1,1],"data":[1]}],"parameters":{"priority":@}}',
    ],
)
def test_a_whole_number_of_any_size_is_refused(body, number):
    """Python's integers have no bounds, and its floats do: 500."""
    with pytest.raises(InvalidRequest):
        kserve.to_request(kserve.decode(body.replace(b"@", number), None), cases.PLAIN)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/classify", b'{"input":[@]}'),
        ("/classify", b'{"input":"a","priority":@}'),
        ("/classify", b'{"input":"a","model":@}'),
        ("/get_reward", b'{"query":["a"],"labels":[%s]}' % (BIG * 20)),
        ("/get_reward", b'{"query":[@]}'),
    ],
)
def test_a_form_refuses_a_number_of_any_size(path, body):
    for number in (BIG, BIG * 20):
        with pytest.raises(InvalidRequest):
            FORMS[path].read(body.replace(b"@", number), {})


@pytest.mark.parametrize(("output", "kind"), [("values", "values"), ("step_rewards", "steps")])
def test_one_long_text_among_many_short_ones_makes_no_table_of_gigabytes(output, kind):
    """Each row is as wide as the longest text's: 200 KB of body became 34 GB of values, or of steps' rewards."""
    score = Score(0.0, **{kind: np.zeros(1, np.float32)})
    long = Score(0.0, **{kind: np.zeros(4096, np.float32)})
    reply = ScoreReply([score] * 65_535 + [long], [1] * 65_535 + [4096], "1")
    request = InferRequest({"sentences": Tensor.of_texts("sentences", ["a"])}, {output: True})
    with pytest.raises(InvalidRequest, match=f"65,536 rows, the longest of 4,096, make a table of {output}"):
        score_tensors.to_reply(reply, request, cases.EVERYTHING)


def _field(number: int, content: bytes) -> bytes:
    length, digits = len(content), bytearray()
    while length > 127:
        digits.append(length & 127 | 128)
        length >>= 7
    return bytes([number << 3 | 2, *digits, length]) + content


_INPUTS = pb.ModelInferRequest.INPUTS_FIELD_NUMBER
_RAW = pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER


def test_a_message_of_empty_parts_is_refused_before_it_is_parsed():
    """Two bytes became ninety: 256 MiB of them took 11 GB."""
    with pytest.raises(InvalidRequest, match="more than 4,096 parts"):
        kserve_grpc.parse(_field(_INPUTS, b"") * 100_000)


def test_a_large_message_has_its_bytes_in_raw_contents():
    """Typed contents of one byte a number took sixteen times as much."""
    typed = _field(_INPUTS, _field(5, _field(3, b"\1" * (33 << 20))))
    with pytest.raises(InvalidRequest, match="4 MiB beside texts and raw contents"):
        kserve_grpc.parse(typed)
    raw = kserve_grpc.parse(_field(_INPUTS, b"\x0a\1x") + _field(_RAW, bytes(33 << 20)))
    assert len(raw.raw_input_contents[0]) == 33 << 20


@pytest.mark.parametrize("tail", [b"\xff", b"\x0b", b"\x0a\xff", b"\x07", b"\xff" * 11])
@pytest.mark.parametrize("size", [0, 100_000])
def test_a_message_that_is_none_is_the_clients_mistake(tail, size):
    with pytest.raises(InvalidRequest, match="the message is no ModelInferRequest"):
        kserve_grpc.parse(_field(_RAW, bytes(size)) + tail)


def test_weight_of_a_body_is_about_what_it_takes():
    tokens = orjson.dumps({"data": list(range(10_000, 60_000))})
    assert 8 * len(tokens) < bodies.memory(tokens) < 14 * len(tokens)
    assert bodies.memory(b'"%s"' % (b"a" * 1000)) == 1002


@pytest.mark.parametrize(
    "body",
    [
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[NaN]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"FP32","data":[Infinity]}]}',
        b'{"inputs":[{"name":"x","shape":[1],"datatype":"BYTES","data":["\\ud800"]}]}',
        asking(shape=[-1]),
        asking(shape=[2**63]),
        asking(shape=[2**32, 2**32]),
        asking(shape=[2.0]),
        asking(shape=[True, 2]),
        asking(shape=[1] * 17),
        asking(shape=[2**61, 0], data=[]),
        asking(datatype="BYTES", data=[1, 2]),
    ],
    ids=["NaN", "Infinity", "surrogate", "negative", "huge", "product", "float", "boolean", "rank", "zero", "number"],
)
def test_bodies_found_by_hand_are_refused(body):
    with pytest.raises(InvalidRequest):
        kserve.to_request(kserve.decode(body, None), cases.PLAIN)


def test_of_a_key_that_stands_twice_the_last_one_counts():
    twice = b'{"inputs":[{"name":"x","name":"y","shape":[1],"datatype":"INT8","data":[1]}]}'
    assert list(kserve.decode(twice, None).inputs) == ["y"]
