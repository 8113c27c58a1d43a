"""Answers of KServe v2 over HTTP, made while they are sent."""

from __future__ import annotations

from itertools import chain

from guerdon.wire import bodies, tensors
from guerdon.wire.bodies import InPieces
from guerdon.wire.kserve import ReplyBody, TensorBody, write_binary
from guerdon.wire.tensors import InferReply, InferRequest


def encode(reply: InferReply, request: InferRequest) -> InPieces:
    """Returns the body that answers `request`.

    Non-finite values are null in JSON. Raises InvalidRequest if an output has too many values for JSON.
    """
    requested, default = request.outputs, request.binary_default
    outputs: list[TensorBody] = []
    blobs: list[bytes | memoryview] = []
    for tensor in reply.outputs:
        if default if requested is None else requested.get(tensor.name, default):
            outputs.append(write_binary(tensor, blobs))
        else:
            outputs.append(TensorBody(tensor.name, tensor.datatype, list(tensor.shape), data=tensors.to_json(tensor)))
    head = ReplyBody(outputs, reply.model_name, reply.model_version, reply.parameters or None, reply.id)
    pieces = bodies.write_in_pieces(head)
    if not blobs:
        return InPieces(pieces)
    first = next(pieces)
    json_length = len(first) + sum(map(len, pieces))
    # A long head is made twice, so that it is never there as a whole.
    start = [first] if json_length == len(first) else bodies.write_in_pieces(head)
    binary = (blob[some] for blob in blobs for some in bodies.slices(len(blob)))
    return InPieces(chain(start, binary), json_length + sum(map(len, blobs)), json_length)
