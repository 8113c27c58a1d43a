"""KServe v2 over gRPC: the same requests and replies as over HTTP, from and to their protobuf messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tritonclient.grpc import service_pb2 as pb

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire import tensors
from guerdon.wire.kserve import InferReply, InferRequest
from guerdon.wire.tensors import Tensor

_CONTENTS = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}


def decode(message: pb.ModelInferRequest) -> InferRequest:
    """The request in `message`, with raw or typed contents; raises InvalidRequest saying what is malformed."""
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
        shape = tensors.check_shape(name, list(entry.shape))
        if raw:
            inputs[name] = tensors.from_raw(name, entry.datatype, shape, raw[i])
        else:
            inputs[name] = _from_contents(name, entry.datatype, shape, entry.contents)
    return InferRequest(
        inputs=inputs,
        outputs={output.name: True for output in message.outputs} or None,
        id=message.id,
        parameters=_parameters(message.parameters),
        binary_default=True,
    )


def encode(reply: InferReply) -> pb.ModelInferResponse:
    """The message of `reply`, its tensors as raw contents, which is all that clients read."""
    message = pb.ModelInferResponse(model_name=reply.model_name, model_version=reply.model_version, id=reply.id)
    for tensor in reply.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(tensors.to_raw(tensor))
    _set_parameters(message.parameters, reply.parameters)
    return message


def encode_request(request: InferRequest, model_name: str, model_version: str = "") -> pb.ModelInferRequest:
    """The message of `request`, its tensors as raw contents."""
    message = pb.ModelInferRequest(model_name=model_name, model_version=model_version, id=request.id)
    for tensor in request.inputs.values():
        message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_input_contents.append(tensors.to_raw(tensor))
    for name in request.outputs or ():
        message.outputs.add(name=name)
    _set_parameters(message.parameters, request.parameters)
    return message


def decode_reply(message: pb.ModelInferResponse) -> InferReply:
    """The reply in `message`; raises InvalidRequest where its tensors are malformed."""
    if len(message.raw_output_contents) != len(message.outputs):
        raise InvalidRequest(
            f"{len(message.outputs)} outputs, but {len(message.raw_output_contents)} raw_output_contents"
        )
    outputs = [
        tensors.from_raw(entry.name, entry.datatype, tuple(entry.shape), raw)
        for entry, raw in zip(message.outputs, message.raw_output_contents, strict=True)
    ]
    return InferReply(message.model_name, message.model_version, outputs, message.id, _parameters(message.parameters))


def _from_contents(name: str, datatype: str, shape: tuple[int, ...], contents: pb.InferTensorContents) -> Tensor:
    field = _CONTENTS.get(datatype)
    if field is None:
        raise InvalidRequest(f"input '{name}': datatype {datatype!r} has no typed contents; send raw_input_contents")
    elements = getattr(contents, field)
    if datatype != "BYTES":
        widest = {"b": np.bool_, "i": np.int64, "u": np.uint64, "f": np.float64}[tensors.DTYPES[datatype].kind]
        return tensors.from_json(name, datatype, shape, np.array(elements, widest))
    if len(elements) != math.prod(shape):
        raise InvalidRequest(tensors.count_differs(name, shape, len(elements)))
    return Tensor(name, datatype, shape, list(elements))


def _parameters(entries: Any) -> dict[str, Any]:
    return {
        key: getattr(value, value.WhichOneof("parameter_choice") or "string_param") for key, value in entries.items()
    }


def _set_parameters(entries: Any, parameters: dict[str, Any]) -> None:
    for key, value in parameters.items():
        kind = {bool: "bool_param", int: "int64_param", float: "double_param"}.get(type(value), "string_param")
        setattr(entries[key], kind, value)
