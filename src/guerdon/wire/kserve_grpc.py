"""KServe v2 over gRPC: the same requests and replies as over HTTP, from and to their protobuf messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire import tensors
from guerdon.wire.bodies import check_count, shown, to_array
from guerdon.wire.tensors import MAX_DIMENSION, MAX_RANK, InferReply, InferRequest, Tensor

MAX_PARTS, MAX_TEXTS = 4096, 1 << 16
MAX_PARTS_BYTES = 4 << 20
"""Most parts of a message with those of its tensors, most texts beside them, and most bytes of the parts: parsing them
holds the GIL for 0.1 s. Raw contents do not count, nor the texts' bytes.
"""

_SMALL_BYTES = 65_536
_PART_FACTOR = 24
_TEXT_BYTES = 100
_FIXED_BYTES = {1: 8, 5: 4}
_TENSOR = pb.ModelInferRequest.InferInputTensor
_RAW = (pb.ModelInferRequest.RAW_INPUT_CONTENTS_FIELD_NUMBER,)
_TEXTS = (
    pb.ModelInferRequest.INPUTS_FIELD_NUMBER,
    _TENSOR.CONTENTS_FIELD_NUMBER,
    pb.InferTensorContents.BYTES_CONTENTS_FIELD_NUMBER,
)
_WALKED = {_TEXTS[:1], _TEXTS[:2], (pb.ModelInferRequest.OUTPUTS_FIELD_NUMBER,)}
"""The paths of the messages whose parts count one by one."""

_CONTENTS = {
    "BOOL": "bool_contents",
    **dict.fromkeys(("INT8", "INT16", "INT32"), "int_contents"),
    "INT64": "int64_contents",
    **dict.fromkeys(("UINT8", "UINT16", "UINT32"), "uint_contents"),
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def parse(data: bytes) -> pb.ModelInferRequest:
    """Returns the message in `data`; raises InvalidRequest, also if it has more parts than a request needs."""
    memory(data)
    try:
        return pb.ModelInferRequest.FromString(data)
    except DecodeError as e:
        raise InvalidRequest(f"the message is no ModelInferRequest: {e}") from e


def memory(data: bytes) -> int:
    """Estimates the bytes of memory of the parsed message; raises InvalidRequest as `parse` does."""
    if len(data) <= _SMALL_BYTES:
        return len(data)
    parts = _Parts()
    parts.walk(memoryview(data), ())
    return len(data) + _PART_FACTOR * parts.num_bytes + _TEXT_BYTES * parts.num_texts


def decode(message: pb.ModelInferRequest) -> InferRequest:
    """Returns the request in `message`, with raw or typed contents; raises InvalidRequest, Unsupported."""
    raw = message.raw_input_contents
    if raw and len(raw) != len(message.inputs):
        raise InvalidRequest(f"{len(message.inputs)} inputs, but {len(raw)} raw_input_contents")
    inputs: dict[str, Tensor] = {}
    for i, entry in enumerate(message.inputs):
        name = entry.name
        if not name or name in inputs:
            raise InvalidRequest(f"input '{name}' is given twice" if name else "every input needs a name")
        if "shared_memory_region" in entry.parameters:
            raise Unsupported(f"input '{name}': shared memory is not offered; send the tensor itself")
        shape = tuple(entry.shape[: MAX_RANK + 1])
        if len(shape) > MAX_RANK or not all(0 <= dim < MAX_DIMENSION for dim in shape):
            raise InvalidRequest(
                f"input '{name}': shape is {shown(list(shape))}; it must be at most {MAX_RANK} whole numbers from 0 up"
            )
        if raw:
            inputs[name] = tensors.from_raw(name, entry.datatype, shape, raw[i])
        else:
            inputs[name] = _from_contents(name, entry.datatype, shape, entry.contents)
    for output in message.outputs:
        tensors.check_output(output.name, output.parameters)
    return InferRequest(
        inputs=inputs,
        outputs={output.name: True for output in message.outputs} or None,
        id=message.id,
        parameters=read_parameters(message.parameters),
        binary_default=True,
    )


def encode(reply: InferReply) -> pb.ModelInferResponse:
    """Returns the message of `reply`, with raw contents, which is all that clients read."""
    message = pb.ModelInferResponse(model_name=reply.model_name, model_version=reply.model_version, id=reply.id)
    for tensor in reply.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(bytes(tensors.to_raw(tensor)))
    _set_parameters(message.parameters, reply.parameters)
    return message


def encode_request(request: InferRequest, model_name: str, model_version: str = "") -> pb.ModelInferRequest:
    """Returns the message of `request`, with raw contents."""
    message = pb.ModelInferRequest(model_name=model_name, model_version=model_version, id=request.id)
    for tensor in request.inputs.values():
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(bytes(tensors.to_raw(tensor)))
    for name in request.outputs or ():
        message.outputs.add(name=name)
    _set_parameters(message.parameters, request.parameters)
    return message


def decode_reply(message: pb.ModelInferResponse) -> InferReply:
    """Returns the reply in `message`; raises InvalidRequest if its tensors are malformed."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise InvalidRequest(
            f"{len(message.outputs)} outputs, but {len(message.raw_output_contents)} raw_output_contents"
        )
    outputs = [
        tensors.from_raw(entry.name, entry.datatype, tuple(entry.shape), raw)
        for entry, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    parameters = read_parameters(message.parameters)
    return InferReply(message.model_name, message.model_version, outputs, message.id, parameters)


class _Parts:
    """Counts a message's parts."""

    def __init__(self) -> None:
        self.num_parts = self.num_texts = self.num_bytes = 0

    def walk(self, data: memoryview, path: tuple[int, ...]) -> None:
        """Counts the parts of the message at the path; raises InvalidRequest if they are too many."""
        position = 0
        while position < len(data):
            tag, position = _varint(data, position)
            start, kind, number = position, tag & 7, (*path, tag >> 3)
            if kind == 0:
                _, position = _varint(data, position)
            elif kind in _FIXED_BYTES:
                position += _FIXED_BYTES[kind]
            elif kind == 2:
                length, start = _varint(data, position)
                position = start + length
            else:
                raise InvalidRequest(f"the message is no ModelInferRequest: a part of the kind {kind}")
            if kind == 2 and number in _WALKED:
                self.walk(data[start:position], number)
            elif number not in (_RAW, _TEXTS):
                self.num_bytes += position - start
            if number == _TEXTS:
                self.num_texts += 1
            else:
                self.num_parts += 1
            if self.num_parts > MAX_PARTS or self.num_texts > MAX_TEXTS or self.num_bytes > MAX_PARTS_BYTES:
                raise InvalidRequest(
                    f"the message has more than {MAX_PARTS:,} parts, {MAX_TEXTS:,} texts, or "
                    f"{MAX_PARTS_BYTES >> 20} MiB beside texts and raw contents; send tensors in raw_input_contents"
                )


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    """The number that begins at the position, and its end."""
    value = 0
    for i, byte in enumerate(data[position : position + 10]):
        value |= (byte & 0x7F) << (7 * i)
        if byte < 0x80:
            return value, position + i + 1
    raise InvalidRequest("the message is no ModelInferRequest: it is cut off")


def _from_contents(name: str, datatype: str, shape: tuple[int, ...], contents: pb.InferTensorContents) -> Tensor:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequest(
            f"input '{name}': datatype {shown(datatype)} has no typed contents; send raw_input_contents"
        )
    elements = getattr(contents, field)
    if datatype != "BYTES":
        widest = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}[tensors.DTYPES[datatype].kind]
        return tensors.from_numbers(name, datatype, shape, to_array(elements, widest))
    if len(elements) != math.prod(shape):
        raise InvalidRequest(tensors.count_differs(name, shape, len(elements)))
    check_count(len(elements), f"input '{name}'")
    return Tensor(name, datatype, shape, list(elements))


def read_parameters(entries: Any) -> dict[str, Any]:
    """Returns the parameters of a message as plain values; one without a value is an empty text."""
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in entries.items()
    }


def _set_parameters(entries: Any, parameters: dict[str, Any]) -> None:
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
        setattr(entries[key], kind, value)
