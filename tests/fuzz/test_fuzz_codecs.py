"""The codecs against whatever may come: any bytes, damaged requests, and valid ones by every way that they can take.

`make fuzz` runs the same with many more inputs (`GUERDON_FUZZ_EXAMPLES`).
"""

from __future__ import annotations

import os
from random import Random
from typing import Any

import msgspec
import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuzz import cases
from guerdon.core import ModelInfo
from guerdon.critic_core import OperationInfo
from guerdon.errors import GuerdonError
from guerdon.wire import kserve, kserve_grpc
from guerdon.wire.forms import ALL_FORMS
from guerdon.wire.tensors import DTYPES, InferReply, InferRequest, Tensor
from tiers import slow_but

EXAMPLES = int(os.environ.get("GUERDON_FUZZ_EXAMPLES", "60"))
fuzzed = settings(
    max_examples=EXAMPLES, deadline=5000, database=None, suppress_health_check=list(HealthCheck), print_blob=True
)

infos = st.sampled_from(cases.INFOS)
keys = st.sampled_from(["name", "inputs", "outputs", "parameters", "data", "shape", "datatype", "id"]) | st.text()
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys, inner, max_size=4),
    max_leaves=12,
)
shapes = st.lists(st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**61, 2**63, 1.0, True, None]), max_size=3)
entries = st.fixed_dictionaries(
    {"name": st.sampled_from(["tokens", "sequence_lengths", "sentences", "input_ids", "labels", "mask"]) | values},
    optional={
        "datatype": st.sampled_from(["BYTES", *DTYPES, "INT65"]) | values,
        "shape": shapes | values,
        "data": values,
        "parameters": st.fixed_dictionaries({}, optional={"binary_data_size": st.integers(-1, 40) | values}) | values,
    },
)
headers = st.fixed_dictionaries(
    {"inputs": st.lists(entries, max_size=3) | values},
    optional={
        "id": values,
        "parameters": st.dictionaries(st.sampled_from(["timeout", "priority", "train_id"]), values) | values,
        "outputs": st.lists(st.fixed_dictionaries({"name": st.sampled_from(["rewards", "errors"]) | values})) | values,
    },
)


def written(value: Any) -> bytes:
    """The value as JSON; of whole numbers beyond 64 bits orjson knows nothing."""
    return orjson.dumps(value)


@fuzzed
@given(st.binary(max_size=200), st.none() | st.integers(0, 210), infos)
def test_any_bytes_are_read_or_refused(data, length, info):
    cases.binary(data, length, info)
    cases.grpc(data, info)
    cases.answer(data, length)


@fuzzed
@given(headers, st.binary(max_size=60), infos)
def test_any_json_with_any_bytes_behind_it_is_read_or_refused(header, blob, info):
    text = written(header)
    cases.binary(text + blob, len(text), info)
    cases.binary(text, None, info)


@fuzzed
@given(st.sampled_from(sorted(ALL_FORMS)), values | st.dictionaries(st.sampled_from(cases._KEYS), values, max_size=5))
def test_any_json_is_read_or_refused_by_every_form(path, body):
    cases.form(path, written(body), {})


@pytest.mark.parametrize("path", slow_but([*ALL_FORMS][::7], ALL_FORMS))
def test_a_value_of_any_type_in_any_place_is_read_or_refused_by_every_form(path):
    known = {field.encode_name for body in ALL_FORMS[path].bodies for field in msgspec.structs.fields(body)}
    for other, example in cases.FORM_BODIES:
        if other == path:
            whole = dict.fromkeys(known - example.keys()) | example
            for odd in (None, True, -1, 0.5, "x", [], [[1]], {}):
                for body in cases.all_changed(whole, odd):
                    cases.form(path, written(body), {})


@pytest.mark.parametrize("kind", cases.KINDS)
@settings(fuzzed, max_examples=4 * EXAMPLES)
@given(seed=st.integers(0, 2**64))
def test_damaged_requests_are_read_or_refused(kind, seed):
    cases.inputs(kind, Random(seed)).try_it()


@pytest.mark.parametrize("kind", cases.KINDS)
def test_some_inputs_of_every_kind_are_valid_and_others_are_not(kind):
    accepted = [cases.inputs(kind, Random(seed)).try_it() for seed in range(200)]
    assert 10 < sum(accepted) < 190


@st.composite
def tensors(draw: st.DrawFn, name: str) -> Tensor:
    """A small tensor of any datatype that protobuf has typed contents for, too."""
    datatype = draw(st.sampled_from(["BYTES", *(d for d in DTYPES if d not in ("FP16", "BF16"))]))
    shape = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))
    count = int(np.prod(shape, dtype=np.int64))
    if datatype == "BYTES":
        texts = draw(st.lists(st.text(max_size=4), min_size=count, max_size=count))
        return Tensor(name, datatype, shape, [text.encode() for text in texts])
    raw = draw(st.binary(min_size=8 * count, max_size=8 * count))
    dtype = DTYPES[datatype]
    array = np.frombuffer(raw, "u1")[:count] % 2 if dtype.kind == "b" else np.frombuffer(raw, dtype)[:count]
    return Tensor(name, datatype, shape, array.astype(dtype).reshape(shape))


@st.composite
def any_requests(draw: st.DrawFn) -> InferRequest:
    """A request of tensors that need not mean anything."""
    names = draw(st.lists(st.text(min_size=1, max_size=3), max_size=3, unique=True))
    outputs = draw(st.none() | st.dictionaries(st.text(max_size=3), st.booleans(), min_size=1, max_size=2))
    parameters = draw(
        st.dictionaries(st.text(max_size=3), st.integers(0, 2**62) | st.booleans() | st.text(), max_size=2)
    )
    parameters.pop("binary_data_output", None)
    return InferRequest({name: draw(tensors(name)) for name in names}, outputs, draw(st.text(max_size=3)), parameters)


def same(a: Tensor, b: Tensor, *, by_json: bool = False) -> bool:
    """Whether they hold the same; what is not finite is NaN after JSON."""
    if (a.name, a.datatype, a.shape) != (b.name, b.datatype, b.shape) or isinstance(a.data, list):
        return (a.name, a.datatype, a.shape, a.data) == (b.name, b.datatype, b.shape, b.data)
    expected = np.where(np.isfinite(a.data), a.data, np.nan) if by_json and a.data.dtype.kind == "f" else a.data
    return a.data.dtype == b.data.dtype and np.array_equal(expected, b.data, equal_nan=a.data.dtype.kind == "f")


@fuzzed
@given(any_requests())
def test_what_is_written_is_read_the_same_by_every_way(request):
    body, length = kserve.encode_request(request)
    typed = cases.as_typed(request)
    ways = [
        (kserve.decode(body, length), False),
        (kserve.decode(orjson.dumps(cases.as_json(request)), None), True),
        (kserve_grpc.decode(kserve_grpc.parse(typed.SerializeToString())), False),
    ]
    if request.inputs:
        raw = kserve_grpc.encode_request(request, "m").SerializeToString()
        ways.append((kserve_grpc.decode(kserve_grpc.parse(raw)), False))
    for read, by_json in ways:
        assert read.id == request.id
        assert list(read.inputs) == list(request.inputs)
        for name, tensor in request.inputs.items():
            assert same(tensor, read.inputs[name], by_json=by_json), (name, tensor, read.inputs[name])
    assert ways[0][0].outputs == ways[1][0].outputs == request.outputs
    assert {*(ways[2][0].outputs or ())} == {*(request.outputs or ())}
    assert ways[0][0].parameters == request.parameters | (
        {"binary_data_output": False} if request.outputs is None else {}
    )
    assert ways[2][0].parameters == request.parameters


@fuzzed
@given(st.lists(st.sampled_from("abc"), unique=True).flatmap(lambda names: st.tuples(*map(tensors, names))))
def test_answers_are_read_as_they_were_written(outputs):
    reply = InferReply("m", "1", list(outputs), "7", {"weights_version": "3"})
    for request in (InferRequest({}, binary_default=True), InferRequest({})):
        read = kserve.decode_reply(*cases.whole(reply, request))
        assert (read.model_name, read.model_version, read.id, read.parameters) == ("m", "1", "7", reply.parameters)
        for tensor, back in zip(outputs, read.outputs, strict=True):
            assert same(tensor, back, by_json=not request.binary_default)
    for tensor, back in zip(outputs, kserve_grpc.decode_reply(kserve_grpc.encode(reply)).outputs, strict=True):
        assert same(tensor, back)


@st.composite
def asked(draw: st.DrawFn) -> tuple[InferRequest, ModelInfo | OperationInfo]:
    """A valid request of the model with all outputs, or one whose tensors do not quite fit each other."""
    request, info = cases.requests()[draw(st.integers(0, 6))]
    for name in draw(st.lists(st.sampled_from(sorted(request.inputs)), max_size=2)):
        tensor = request.inputs.get(name)
        if tensor is None or isinstance(tensor.data, list):
            continue
        change = draw(st.sampled_from(["drop", "narrow", "wide", "negative", "type", "flat"]))
        data = tensor.data
        if change == "drop":
            del request.inputs[name]
            continue
        if change == "narrow":
            data = data[:1]
        elif change == "wide":
            data = np.concatenate([data, data], axis=-1)
        elif change == "negative":
            data = -data - 1
        elif change == "flat":
            data = data.ravel()
        else:
            data = data.astype(draw(st.sampled_from([np.int32, np.int64, np.float32, np.int8, np.float64])))
        request.inputs[name] = Tensor.of(name, data)
    return request, info


def outcome(read: InferRequest, info: ModelInfo | OperationInfo) -> str:
    """What is asked of the service, or how it is refused."""
    try:
        return repr(_plain(kserve.to_request(read, info)))
    except GuerdonError as e:
        return f"{type(e).__name__}: {e}"


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tolist()
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return {name: _plain(getattr(value, name)) for name in value.__slots__} if hasattr(value, "__slots__") else value


@fuzzed
@given(asked())
def test_the_same_request_asks_the_same_by_every_way(pair):
    request, info = pair
    body, length = kserve.encode_request(request)
    by_binary = outcome(kserve.decode(body, length), info)
    assert outcome(kserve.decode(orjson.dumps(cases.as_json(request)), None), info) == by_binary
    for message in (kserve_grpc.encode_request(request, "m"), cases.as_typed(request)):
        assert outcome(kserve_grpc.decode(kserve_grpc.parse(message.SerializeToString())), info) == by_binary
