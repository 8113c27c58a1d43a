import json

import numpy as np
import orjson
import pytest
import tritonclient.http

from fuzz.cases import whole
from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire import tensors
from guerdon.wire.kserve import decode, decode_reply, encode_request
from guerdon.wire.tensors import InferReply, InferRequest, Tensor

TOKENS = np.arange(6, dtype=np.int64).reshape(2, 3)


def client_request(*, binary: bool, **more) -> tuple[bytes, int | None]:
    entry = tritonclient.http.InferInput("tokens", [2, 3], "INT64")
    entry.set_data_from_numpy(TOKENS, binary_data=binary)
    text = tritonclient.http.InferInput("sentences", [1], "BYTES")
    text.set_data_from_numpy(np.array(["ü"], dtype=object), binary_data=binary)
    return tritonclient.http.InferenceServerClient.generate_request_body([entry, text], **more)


def wire_request(**changes) -> bytes:
    entry = {"name": "x", "shape": [2], "datatype": "INT64", "data": [1, 2]} | changes
    return orjson.dumps({"inputs": [{key: value for key, value in entry.items() if value is not ...}]})


@pytest.mark.parametrize(("id_", "read"), [(None, ""), (7, "7"), ("x", "x")])
def test_an_id_of_null_is_no_id(id_, read):
    assert decode(orjson.dumps(orjson.loads(wire_request()) | {"id": id_}), None).id == read


@pytest.mark.parametrize("binary", [True, False])
def test_reads_what_tritonclient_writes(binary):
    outputs = [tritonclient.http.InferRequestedOutput("rewards", binary_data=binary)]
    request = decode(*client_request(binary=binary, outputs=outputs, request_id="7", priority=3, timeout=50))
    assert request.id == "7"
    assert request.outputs == {"rewards": binary}
    assert request.parameters == {"priority": 3, "timeout": 50}
    assert request.inputs["tokens"].data.tolist() == TOKENS.tolist()
    assert request.inputs["sentences"].data == ["ü".encode()]


def test_without_outputs_the_parameter_gives_the_form():
    request = decode(*client_request(binary=True))
    assert request.outputs is None
    assert request.binary_default
    mixed = orjson.dumps(
        {
            "inputs": [{"name": "x", "shape": [1], "datatype": "INT8", "data": [1]}],
            "outputs": [{"name": "a"}, {"name": "b", "parameters": {"binary_data": False}}],
            "parameters": {"binary_data_output": True},
        }
    )
    assert decode(mixed, None).outputs == {"a": True, "b": False}


def test_tritonclient_reads_what_is_written():
    values = np.array([[0.5], [np.nan]], np.float32)
    outputs = [Tensor.of("rewards", values), Tensor.of_texts("errors", ["", "bad ü"])]
    reply = InferReply("m", "1", outputs, "9", {"weights_version": "3"})
    body, length = whole(reply, InferRequest({}, {"rewards": True, "errors": False}))
    read = tritonclient.http.InferenceServerClient.parse_response_body(body, header_length=length)
    assert np.array_equal(read.as_numpy("rewards"), values, equal_nan=True)
    assert read.get_output("errors")["data"] == ["", "bad ü"]
    assert read.get_response()["id"] == "9"
    assert read.get_response()["parameters"] == {"weights_version": "3"}


def test_json_replies_have_no_header_length_and_null_for_nan():
    values = np.array([[0.5], [np.nan]], np.float32)
    body, length = whole(InferReply("m", "1", [Tensor.of("rewards", values)]), InferRequest({}))
    assert length is None
    assert orjson.loads(body) == {
        "model_name": "m",
        "model_version": "1",
        "outputs": [{"name": "rewards", "datatype": "FP32", "shape": [2, 1], "data": [0.5, None]}],
    }


def test_json_has_the_fewest_digits_from_which_the_same_float32_is_read():
    bits = np.random.default_rng(0).integers(0, 1 << 32, 200_000, np.uint32)
    edges = np.float32(
        [0.1, -0.0, 16777217, 3.4028235e38, 1.1754944e-38, 1e-45, 5e-324, 2**24, 1 / 3, 9007199254740993]
    )
    values = np.concatenate([bits.view(np.float32), edges, np.nextafter(edges, np.float32(0))])
    values = values[np.isfinite(values)]
    body, _ = whole(InferReply("m", "1", [Tensor.of("values", values)]), InferRequest({}))
    for loads in (orjson.loads, json.loads):
        read = np.array(loads(body)["outputs"][0]["data"], np.float32)
        assert np.array_equal(read.view(np.uint32), values.view(np.uint32))
    short, _ = whole(InferReply("m", "1", [Tensor.of("values", np.float32([0.1, 5]))]), InferRequest({}))
    assert b"[0.1,5.0]" in short


def test_more_numbers_than_a_body_may_have_are_not_written_as_json():
    values = np.broadcast_to(np.float32(0), (1, tensors.MAX_WRITTEN + 1))
    with pytest.raises(InvalidRequest, match=r"output 'values' has 16,777,217 numbers, .*binary_data"):
        whole(InferReply("m", "1", [Tensor.of("values", values)]), InferRequest({}))


def test_requests_and_replies_survive_our_own_round_trip():
    sent = InferRequest({"tokens": Tensor.of("tokens", TOKENS)}, {"rewards": True}, "5", {"timeout": 9})
    read = decode(*encode_request(sent))
    assert (read.id, read.outputs, read.parameters) == ("5", {"rewards": True}, {"timeout": 9})
    assert read.inputs["tokens"].data.tolist() == TOKENS.tolist()
    usual = decode(*encode_request(InferRequest(sent.inputs, binary_default=True)))
    assert usual.outputs is None
    assert usual.binary_default
    for binary in (True, False):
        reply = InferReply("m", "1", [Tensor.of("rewards", np.float32([[1], [2]]))], "5", {"a": "b"})
        back = decode_reply(*whole(reply, InferRequest({}, binary_default=binary)))
        assert (back.model_name, back.id, back.parameters) == ("m", "5", {"a": "b"})
        assert back.outputs[0].data.tolist() == [[1], [2]]


def test_a_header_length_of_zero_means_one_raw_text():
    request = decode("Grüße".encode(), 0)
    assert request.inputs[""].data == ["Grüße".encode()]
    assert request.binary_default


@pytest.mark.parametrize("body", [b"{}", b'{"inputs": []}', b'{"inputs": null}'])
def test_a_request_may_have_no_tensors(body):
    request = decode(body, None)
    assert (request.inputs, request.outputs) == ({}, None)


@pytest.mark.parametrize(
    ("body", "header_length", "message"),
    [
        (b"not json", None, "not valid JSON"),
        (b"", None, "not valid JSON"),
        (b'{"inputs": "\xff"}', None, "not valid JSON"),
        (b"[]", None, "the body is a list; send an object"),
        (b'{"inputs": {"name": "tokens"}}', None, "inputs is an object; send a list"),
        (b'{"inputs": [1]}', None, r"inputs\[0\] is 1; send an object"),
        (b'{"inputs": [], "parameters": [2]}', None, "parameters is a list; send an object"),
        (wire_request(), 10, "first|before its binary|not valid JSON"),
        (wire_request(), 100_000, "Inference-Header-Content-Length is 100000"),
        (wire_request(), -1, "Inference-Header-Content-Length is -1"),
        (wire_request(name=...), None, r"inputs\[0\] has no 'name'"),
        (wire_request(data=...), None, "neither data nor binary_data_size"),
        (wire_request(shape=[3]), None, "takes 3 elements, but 2 came"),
        (wire_request(datatype="INT7"), None, "unknown datatype 'INT7'"),
        (wire_request(datatype=...), None, r"inputs\[0\] has no 'datatype'"),
        (wire_request(parameters=3), None, r"inputs\[0\].parameters is 3; send an object"),
        (wire_request(parameters={"binary_data_size": 16}), None, "binary_data_size is 16, but 0 bytes"),
        (
            wire_request(parameters={"binary_data_size": -1}),
            None,
            r"parameters.binary_data_size is -1; send the tensor's bytes",
        ),
        (wire_request(parameters={"binary_data_size": "16"}), None, "binary_data_size is a string"),
        *(
            (
                orjson.dumps(
                    orjson.loads(wire_request()) | {"outputs": [{"name": "a", "parameters": {"binary_data": flag}}]}
                ),
                None,
                rf"outputs\[0\].parameters.binary_data is {kind}; send true or false",
            )
            for flag, kind in (("false", "a string"), (1, "a number"), ([], "a list"))
        ),
        (
            orjson.dumps(orjson.loads(wire_request()) | {"parameters": {"binary_data_output": "false"}}),
            None,
            "parameters.binary_data_output is a string; send true or false",
        ),
        (wire_request() + b"12345678", len(wire_request()), "8 bytes follow"),
        (orjson.dumps({"inputs": [orjson.loads(wire_request())["inputs"][0]] * 2}), None, "given twice"),
        (
            orjson.dumps(orjson.loads(wire_request()) | {"outputs": ["a"]}),
            None,
            r"outputs\[0\] is a string; send an object",
        ),
        (b'{"a":' * 5000, None, "not valid JSON"),
        *(
            (wire_request(shape=shape), None, r"inputs\[0\].shape")
            for shape in (None, 3, "2", [-1, 2], [1.0], [True], ["1"], [2**62], [1] * 17)
        ),
    ],
)
def test_each_malformed_body_has_its_own_error(body, header_length, message):
    with pytest.raises(InvalidRequest, match=message):
        decode(body, header_length)


def test_shared_memory_is_named_as_not_offered():
    with pytest.raises(Unsupported, match="shared memory"):
        decode(wire_request(data=..., parameters={"shared_memory_region": "r"}), None)
    outputs = [{"name": "rewards", "parameters": {"shared_memory_region": "r"}}]
    with pytest.raises(Unsupported, match="shared memory"):
        decode(orjson.dumps(orjson.loads(wire_request()) | {"outputs": outputs}), None)
