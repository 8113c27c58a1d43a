"""KServe v2 (the open inference protocol) over HTTP: its JSON, and the binary tensors that may follow it."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import UNSET, Meta

from guerdon.core import ScoreReply, ScoreRequest
from guerdon.critic_core import CheckpointInfo, ControlRequest, CriticState, OperationInfo, TrainReport, TrainRequest
from guerdon.errors import GuerdonError, InvalidRequest, Unsupported
from guerdon.wire import bodies, critic_tensors, score_tensors, tensors, unknown_keys
from guerdon.wire.schema import ALL_PARAMETERS, Info
from guerdon.wire.tensors import DTYPES, MAX_DIMENSION, MAX_RANK, InferReply, InferRequest, Tensor

Head = TypeVar("Head", bound="RequestBody | ReplyBody")

ServedRequest = ScoreRequest | TrainRequest | ControlRequest
"""A model takes a ScoreRequest; a critic's operations take the others, to train, validate or control it."""

ServedReply = ScoreReply | TrainReport | CheckpointInfo | CriticState | None
"""A TrainReport answers train and validate, a CheckpointInfo save and load, a CriticState state."""

_DATATYPES = {"enum": ["BYTES", *DTYPES]}
_BINARY_DATA = {"properties": {"binary_data": {"type": "boolean"}}}

Dimension = Annotated[int, Meta(ge=0, le=MAX_DIMENSION - 1)]
Shape = Annotated[list[Dimension], Meta(max_length=MAX_RANK, description=f"a list of at most {MAX_RANK} whole numbers")]
Size = Annotated[int, Meta(ge=0, description="the tensor's bytes, after the JSON")]


class TensorParameters(msgspec.Struct, omit_defaults=True):
    binary_data_size: Size | None = None
    shared_memory_region: Any = UNSET


class TensorBody(msgspec.Struct, omit_defaults=True):
    """A tensor; its elements are `data`, flat or nested in row order, or bytes after the JSON."""

    name: Annotated[str, Meta(min_length=1, description="a name")]
    datatype: Annotated[str, Meta(extra_json_schema=_DATATYPES)]
    shape: Shape
    parameters: TensorParameters | None = None
    data: Annotated[Any, Meta(extra_json_schema={"type": ["array", "string", "number", "boolean", "null"]})] = UNSET


class OutputBody(msgspec.Struct, omit_defaults=True):
    name: str
    parameters: Annotated[dict[str, Any] | None, Meta(extra_json_schema=_BINARY_DATA)] = None


class RequestBody(msgspec.Struct, omit_defaults=True):
    example = '{"inputs": [...]}'
    inputs: list[TensorBody] | None = None
    outputs: list[OutputBody] | None = None
    parameters: Annotated[dict[str, Any] | None, Meta(extra_json_schema=ALL_PARAMETERS)] = None
    id: str | int | None = ""


class ReplyBody(msgspec.Struct, omit_defaults=True):
    outputs: list[TensorBody]
    model_name: str | int | None = ""
    model_version: str | int | None = ""
    parameters: dict[str, Any] | None = None
    id: str | int | None = ""


class ErrorBody(msgspec.Struct):
    """An error as the protocol has it: typed clients, such as Triton's in Java, refuse any other key."""

    error: str


def read(body: bodies.Octets, header_length: int | None, info: Info) -> tuple[InferRequest, ServedRequest]:
    """Returns the tensors in `body`, and the request that they carry; raises InvalidRequest, Unsupported."""
    request = decode(body, header_length)
    return request, _codec(info).to_request(request, info)


def to_request(request: InferRequest, info: Info) -> ServedRequest:
    """Returns the request that the tensors carry for the model or operation; raises InvalidRequest."""
    return _codec(info).to_request(request, info)


def to_reply(reply: ServedReply, request: InferRequest, info: Info) -> InferReply:
    """Returns the tensors that answer `request`; raises a failed row's error unless the request asked for errors."""
    return _codec(info).to_reply(reply, request, info)


def _codec(info: Info) -> Any:
    return critic_tensors if isinstance(info, OperationInfo) else score_tensors


def to_error(error: GuerdonError) -> tuple[int, ErrorBody]:
    """Returns the status and the body by which KServe's routes and the trainers' forms report the error."""
    return error.http, ErrorBody(bodies.cut(str(error)))


def decode(body: bodies.Octets, header_length: int | None) -> InferRequest:
    """Returns the request in `body`, whose first `header_length` bytes are JSON (None: all of it; 0: one raw text).

    Raises InvalidRequest, which names the malformed part, and Unsupported for shared memory.
    """
    if header_length == 0:
        return InferRequest({"": Tensor("", "BYTES", (1, 1), [bytes(body)])}, binary_default=True)
    head, binary = _split(body, header_length, unknown_keys.read, RequestBody)
    parameters = head.parameters or {}
    binary_default = bodies.is_true(parameters, "binary_data_output", False, "parameters")
    outputs: dict[str, bool] = {}
    for i, output in enumerate(head.outputs or ()):
        asked = output.parameters or {}
        if len(asked) > ("binary_data" in asked):
            tensors.check_output(output.name, asked)
        outputs[output.name] = bodies.is_true(asked, "binary_data", binary_default, f"outputs[{i}].parameters")
    inputs = _read_tensors(head.inputs or [], binary)
    return InferRequest(inputs, outputs or None, _text(head.id), parameters, binary_default)


def encode_request(request: InferRequest) -> tuple[bytes, int]:
    """Returns the body of a request with every input in binary form, and its JSON's length."""
    blobs: list[bytes | memoryview] = []
    inputs = [write_binary(tensor, blobs) for tensor in request.inputs.values()]
    outputs, parameters = None, request.parameters
    if request.outputs is None:
        parameters = {**parameters, "binary_data_output": request.binary_default}
    else:
        outputs = [OutputBody(name, {"binary_data": form}) for name, form in request.outputs.items()]
    head = bodies.write(RequestBody(inputs, outputs, parameters or None, request.id))
    return b"".join((head, *blobs)), len(head)


def decode_reply(body: bytes, header_length: int | None) -> InferReply:
    """Returns the reply in `body`; raises InvalidRequest."""
    head, binary = _split(body, header_length, bodies.read, ReplyBody)
    outputs = list(_read_tensors(head.outputs, binary).values())
    return InferReply(_text(head.model_name), _text(head.model_version), outputs, _text(head.id), head.parameters or {})


def _split(body: bodies.Octets, header_length: int | None, read: Any, kind: type[Head]) -> tuple[Head, memoryview]:
    """Returns the JSON, and the bytes after it."""
    if header_length is None:
        header_length = len(body)
    elif not 0 < header_length <= len(body):
        raise InvalidRequest(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes")
    view = memoryview(body)
    what = "the body" if header_length == len(body) else f"the part before its binary tensors ({header_length} bytes)"
    return read(view[:header_length], kind, what), view[header_length:]


def _read_tensors(entries: list[TensorBody], binary: memoryview) -> dict[str, Tensor]:
    found, offset = dict[str, Tensor](), 0
    for entry in entries:
        name, shape = entry.name, tuple(entry.shape)
        if name in found:
            raise InvalidRequest(f"input '{name}' is given twice")
        size = entry.parameters.binary_data_size if entry.parameters else None
        if size is None:
            if entry.parameters and entry.parameters.shared_memory_region is not UNSET:
                raise Unsupported(f"input '{name}': shared memory is not offered; send the tensor itself")
            if entry.data is UNSET:
                raise InvalidRequest(f"input '{name}' has neither data nor binary_data_size")
            found[name] = tensors.from_json(name, entry.datatype, shape, entry.data)
            continue
        if size > len(binary) - offset:
            raise InvalidRequest(
                f"input '{name}': binary_data_size is {size}, but {len(binary) - offset} bytes are left "
                "after the JSON and the tensors before; check Inference-Header-Content-Length"
            )
        found[name] = tensors.from_raw(name, entry.datatype, shape, binary[offset : offset + size])
        offset += size
    if offset != len(binary):
        raise InvalidRequest(
            f"{len(binary) - offset} bytes follow the last tensor; check binary_data_size and "
            "Inference-Header-Content-Length"
        )
    return found


def write_binary(tensor: Tensor, blobs: list[bytes | memoryview]) -> TensorBody:
    """Returns the tensor's entry in binary form; appends its bytes to `blobs`."""
    blobs.append(tensors.to_raw(tensor))
    return TensorBody(tensor.name, tensor.datatype, list(tensor.shape), TensorParameters(len(blobs[-1])))


def _text(value: str | int | None) -> str:
    return "" if value is None else str(value)
