"""KServe v2 (the open inference protocol) over HTTP: its JSON, and the binary tensors that may follow it."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from guerdon.errors import InvalidRequest, Unsupported
from guerdon.wire import bodies, tensors
from guerdon.wire.tensors import Tensor


@dataclass(slots=True, eq=False)
class InferRequest:
    """One inference request in the protocol's own terms.

    `outputs` maps each requested output to whether it is wanted in binary form; None asks for the model's usual
    ones in the form `binary_default`. A request whose whole body is one raw tensor has an input of empty name.
    """

    inputs: dict[str, Tensor]
    outputs: dict[str, bool] | None = None
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)
    binary_default: bool = False


@dataclass(slots=True, eq=False)
class InferReply:
    """One inference reply in the protocol's own terms."""

    model_name: str
    model_version: str
    outputs: list[Tensor]
    id: str = ""
    parameters: dict[str, Any] = field(default_factory=dict)


def decode(body: bytes, header_length: int | None) -> InferRequest:
    """The request in `body`, whose first `header_length` bytes are its JSON (None: all of it; 0: one raw text).

    Raises InvalidRequest saying what is malformed, Unsupported for shared memory.
    """
    if header_length == 0:
        return InferRequest({"": Tensor("", "BYTES", (1, 1), [body])}, binary_default=True)
    header, binary = _split(body, header_length)
    parameters = header.get("parameters") or {}
    inputs, requested = header.get("inputs") or [], header.get("outputs")
    if not isinstance(parameters, dict):
        raise InvalidRequest("parameters must be an object")
    if not isinstance(inputs, list):
        raise InvalidRequest("inputs must be a list of tensors")
    binary_default = bool(parameters.get("binary_data_output", False))
    outputs = _requested(requested, binary_default) if requested else None
    return InferRequest(_inputs(inputs, binary), outputs, _name(header, "id"), parameters, binary_default)


def encode(reply: InferReply, request: InferRequest) -> tuple[bytes, int | None]:
    """The body that answers `request`, and its JSON's length where binary tensors follow it, else None.

    Values that are not finite are null in JSON's form. Raises InvalidRequest where an output has too many for that.
    """
    requested, default = request.outputs, request.binary_default
    binary = [default if requested is None else requested.get(tensor.name, default) for tensor in reply.outputs]
    outputs, blobs = [], []
    for tensor, is_binary in zip(reply.outputs, binary, strict=True):
        entry: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if is_binary:
            blobs.append(tensors.to_raw(tensor))
            entry["parameters"] = {"binary_data_size": len(blobs[-1])}
        else:
            entry["data"] = _json_data(tensor)
        outputs.append(entry)
    header = _header(
        reply.id, reply.parameters, outputs, model_name=reply.model_name, model_version=reply.model_version
    )
    return (b"".join((header, *blobs)), len(header)) if blobs else (header, None)


def encode_request(request: InferRequest) -> tuple[bytes, int]:
    """The body of a request with every input in binary form, and its JSON's length."""
    blobs = [tensors.to_raw(tensor) for tensor in request.inputs.values()]
    inputs = [
        {"name": t.name, "datatype": t.datatype, "shape": t.shape, "parameters": {"binary_data_size": len(blob)}}
        for t, blob in zip(request.inputs.values(), blobs, strict=True)
    ]
    if request.outputs is None:
        parameters = {**request.parameters, "binary_data_output": request.binary_default}
        header = _header(request.id, parameters, None, inputs=inputs)
    else:
        outputs = [{"name": name, "parameters": {"binary_data": form}} for name, form in request.outputs.items()]
        header = _header(request.id, request.parameters, outputs, inputs=inputs)
    return b"".join((header, *blobs)), len(header)


def decode_reply(body: bytes, header_length: int | None) -> InferReply:
    """The reply in `body`; raises InvalidRequest where it is not one of this protocol."""
    header, binary = _split(body, header_length)
    outputs = header.get("outputs")
    if not isinstance(outputs, list):
        raise InvalidRequest("the reply has no outputs")
    parameters = header.get("parameters") or {}
    if not isinstance(parameters, dict):
        raise InvalidRequest("the reply's parameters are no object")
    return InferReply(
        model_name=_name(header, "model_name"),
        model_version=_name(header, "model_version"),
        outputs=list(_inputs(outputs, binary).values()),
        id=_name(header, "id"),
        parameters=parameters,
    )


def timeout_s(parameters: dict[str, Any]) -> float | None:
    """The seconds that the request allows by its parameter `timeout`, in microseconds; None where it sets no limit."""
    timeout_us = count(parameters, "timeout")
    return timeout_us / 1e6 if timeout_us else None


def count(parameters: dict[str, Any], name: str) -> int:
    """The parameter as a number from 0 up, 0 where it is not given; raises InvalidRequest where it is not one."""
    value = parameters.get(name, 0)
    if type(value) is not int or value < 0:
        raise InvalidRequest(f"parameter '{name}' is {bodies.shown(value)}; it must be an integer from 0 up")
    return value


def check_output(name: str, parameters: Container[str]) -> None:
    """Raises Unsupported if the output is requested in a form that is not offered."""
    if "shared_memory_region" in parameters:
        raise Unsupported(f"output '{name}': shared memory is not offered; leave the parameter out")
    if "classification" in parameters:
        raise Unsupported(
            f"output '{name}': classification (class_count) is not offered; ask for the numbers themselves"
        )


def parse_object(text: bytes | memoryview) -> dict[str, Any]:
    """The JSON object in `text`; raises InvalidRequest where it is none."""
    value = bodies.parse(text, f"the body, or the part before its binary tensors ({len(text)} bytes),")
    if not isinstance(value, dict):
        raise InvalidRequest(f"the body must be a JSON object, not {type(value).__name__}")
    return value


def _split(body: bytes, header_length: int | None) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(body)
    if header_length is None:
        header_length = len(body)
    elif not 0 < header_length <= len(body):
        raise InvalidRequest(f"Inference-Header-Content-Length is {header_length}, but the body has {len(body)} bytes")
    return parse_object(view[:header_length]), view[header_length:]


def _name(header: dict[str, Any], key: str) -> str:
    value = header.get(key)
    if value is not None and type(value) not in (str, int):
        raise InvalidRequest(f"{key} is {bodies.kind_of(value)}; send a string, or leave it out")
    return "" if value is None else str(value)


def _inputs(entries: list[Any], binary: memoryview) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    offset = 0
    for entry in entries:
        name = entry.get("name") if isinstance(entry, dict) else None
        if not isinstance(name, str) or not name:
            raise InvalidRequest("every tensor must be an object with a name")
        if name in found:
            raise InvalidRequest(f"input '{name}' is given twice")
        shape, datatype = tensors.check_shape(name, entry.get("shape")), entry.get("datatype")
        parameters = entry.get("parameters") or {}
        if not isinstance(parameters, dict):
            raise InvalidRequest(f"input '{name}': parameters must be an object")
        size = parameters.get("binary_data_size")
        if size is None:
            if "shared_memory_region" in parameters:
                raise Unsupported(f"input '{name}': shared memory is not offered; send the tensor itself")
            if "data" not in entry:
                raise InvalidRequest(f"input '{name}' has neither data nor binary_data_size")
            found[name] = tensors.from_json(name, datatype, shape, entry["data"])
            continue
        if type(size) is not int or not 0 <= size <= len(binary) - offset:
            raise InvalidRequest(
                f"input '{name}': binary_data_size is {bodies.shown(size)}, but {len(binary) - offset} bytes are left "
                "after the JSON and the tensors before; check Inference-Header-Content-Length"
            )
        found[name] = tensors.from_raw(name, datatype, shape, binary[offset : offset + size])
        offset += size
    if offset != len(binary):
        raise InvalidRequest(
            f"{len(binary) - offset} bytes follow the last tensor; check binary_data_size and "
            "Inference-Header-Content-Length"
        )
    return found


def _requested(entries: Any, binary_default: bool) -> dict[str, bool]:
    requested: dict[str, bool] = {}
    for entry in entries if isinstance(entries, list) else [None]:
        name = entry.get("name") if isinstance(entry, dict) else None
        parameters = (entry.get("parameters") or {}) if isinstance(entry, dict) else None
        if not isinstance(name, str) or not isinstance(parameters, dict):
            raise InvalidRequest("outputs must be a list of objects with a name")
        check_output(name, parameters)
        requested[name] = bool(parameters.get("binary_data", binary_default))
    return requested


def _header(id: str, parameters: dict[str, Any], outputs: list[Any] | None, **first: Any) -> bytes:  # noqa: A002
    header = {"id": id, **first} if id else first
    if parameters:
        header["parameters"] = parameters
    if outputs is not None:
        header["outputs"] = outputs
    return bodies.write(header)


def _json_data(tensor: Tensor) -> list[str] | np.ndarray:
    """The elements as `bodies.write` takes them: numbers in the fewest digits that tell them from their neighbours."""
    if isinstance(tensor.data, list):
        return [element.decode("utf-8", "replace") for element in tensor.data]
    if tensor.data.size > bodies.MAX_VALUES:
        raise InvalidRequest(
            f"output '{tensor.name}' has {tensor.data.size:,} numbers, and JSON takes at most {bodies.MAX_VALUES:,}; "
            "ask for it in binary form (binary_data), or send fewer samples"
        )
    return np.ravel(tensor.data)
