import numpy as np
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2 as pb

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire.kserve_grpc import (
    MAX_PARTS,
    MAX_PARTS_BYTES,
    MAX_TEXTS,
    decode,
    decode_reply,
    encode,
    encode_request,
    parse,
)
from guerdon.wire.tensors import InferReply, InferRequest, Tensor


def typed(name: str, datatype: str, shape: list[int], **contents) -> pb.ModelInferRequest:
    message = pb.ModelInferRequest(model_name="m")
    message.inputs.add(name=name, datatype=datatype, shape=shape, contents=pb.InferTensorContents(**contents))
    return message


@pytest.mark.parametrize(
    ("datatype", "contents", "values"),
    [
        ("INT32", {"int_contents": [1, -2]}, [1, -2]),
        ("INT8", {"int_contents": [1, -2]}, [1, -2]),
        ("INT64", {"int64_contents": [1, 2**40]}, [1, 2**40]),
        ("UINT16", {"uint_contents": [1, 2]}, [1, 2]),
        ("UINT64", {"uint64_contents": [1, 2**63]}, [1, 2**63]),
        ("FP32", {"fp32_contents": [0.5, 2]}, [0.5, 2]),
        ("FP64", {"fp64_contents": [0.5, 2]}, [0.5, 2]),
        ("BOOL", {"bool_contents": [True, False]}, [True, False]),
        ("BYTES", {"bytes_contents": [b"a", b""]}, [b"a", b""]),
    ],
)
def test_typed_contents_are_read(datatype, contents, values):
    tensor = decode(typed("x", datatype, [2], **contents)).inputs["x"]
    assert list(tensor.data) == values
    assert tensor.datatype == datatype


def test_requests_and_replies_survive_the_round_trip():
    sent = InferRequest(
        {"tokens": Tensor.of("tokens", np.arange(6).reshape(2, 3)), "sentences": Tensor.of_texts("sentences", ["ü"])},
        {"rewards": True},
        "8",
        {"priority": 3, "name": "x", "flag": True, "ratio": 0.5},
    )
    message = encode_request(sent, "m", "1")
    assert (message.model_name, message.model_version) == ("m", "1")
    read = decode(pb.ModelInferRequest.FromString(message.SerializeToString()))
    assert (read.id, read.outputs, read.parameters) == (sent.id, sent.outputs, sent.parameters)
    assert read.inputs["tokens"].data.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert read.inputs["sentences"].data == ["ü".encode()]

    reply = InferReply("m", "1", [Tensor.of("rewards", np.float32([[1.5]]))], "8", {"weights_version": "2"})
    answer = encode(reply)
    assert tritonclient.grpc.InferResult(answer).as_numpy("rewards").tolist() == [[1.5]]
    back = decode_reply(answer)
    assert (back.model_name, back.id, back.parameters) == ("m", "8", {"weights_version": "2"})
    assert back.outputs[0].data.tolist() == [[1.5]]


def test_a_request_may_have_no_tensors():
    request = decode(pb.ModelInferRequest(model_name="critic_state", id="3"))
    assert (request.inputs, request.outputs, request.id) == ({}, None, "3")


def test_malformed_messages_are_refused():
    with pytest.raises(InvalidRequest, match="takes 3 elements, but 2 came"):
        decode(typed("x", "INT64", [3], int64_contents=[1, 2]))
    with pytest.raises(InvalidRequest, match="takes 3 elements, but 1 came"):
        decode(typed("x", "BYTES", [3], bytes_contents=[b"a"]))
    with pytest.raises(InvalidRequest, match="outside INT8"):
        decode(typed("x", "INT8", [1], int_contents=[300]))
    with pytest.raises(InvalidRequest, match="'FP16' has no typed contents"):
        decode(typed("x", "FP16", [1]))
    with pytest.raises(InvalidRequest, match=r"shape is \[-1\]"):
        decode(typed("x", "INT64", [-1], int64_contents=[1]))
    with pytest.raises(InvalidRequest, match="needs a name"):
        decode(typed("", "INT64", [1], int64_contents=[1]))
    twice = typed("x", "INT64", [1], int64_contents=[1])
    twice.inputs.append(twice.inputs[0])
    with pytest.raises(InvalidRequest, match="given twice"):
        decode(twice)
    twice.raw_input_contents.append(b"12345678")
    with pytest.raises(InvalidRequest, match="2 inputs, but 1 raw_input_contents"):
        decode(twice)
    shared = typed("x", "INT64", [1])
    shared.inputs[0].parameters["shared_memory_region"].string_param = "r"
    with pytest.raises(Unsupported, match="shared memory"):
        decode(shared)


def nested(count: int, **contents) -> pb.ModelInferRequest:
    """A message of one input, of whose parts there are so many."""
    message = typed("x", "INT64", [1] if contents else [1] * count, **contents)
    message.inputs[0].parameters["key"].string_param = "x" * 70_000  # long enough to be looked at
    return message


@pytest.mark.parametrize(
    ("message", "is_read"),
    [
        (nested(0, bytes_contents=[b""] * MAX_TEXTS), True),
        (nested(0, bytes_contents=[b"x" * (8 << 20)]), True),
        (nested(0, bytes_contents=[b""] * (MAX_TEXTS + 1)), False),
        (nested(0, int64_contents=[1] * 4_000_000), True),
        (nested(0, int64_contents=[1] * (MAX_PARTS_BYTES + 1)), False),
        (nested(0, bool_contents=[True] * (MAX_PARTS_BYTES + 1)), False),
        (nested(MAX_PARTS_BYTES + 1), False),
    ],
)
def test_parts_of_tensors_count_as_those_of_the_message(message: pb.ModelInferRequest, is_read: bool) -> None:
    """Parsing 32 MiB of them took seconds, in which nothing else ran."""
    data = message.SerializeToString()
    if is_read:
        assert parse(data) == message
    else:
        with pytest.raises(InvalidRequest, match="send tensors in raw_input_contents"):
            parse(data)


def test_parameters_of_tensors_are_few() -> None:
    message = typed("x", "INT64", [1])
    for i in range(MAX_PARTS):
        message.inputs[0].parameters[f"a long name of the key {i}"].int64_param = i
    with pytest.raises(InvalidRequest, match="more than 4,096 parts"):
        parse(message.SerializeToString())
