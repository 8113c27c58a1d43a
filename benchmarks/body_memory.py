"""Measures how much memory one byte of a request's body takes: at the peak of decoding, and while it waits.

  PYTHONPATH=src python benchmarks/body_memory.py        prints a table; Linux only

Each kind of body is decoded in a process of its own, whose resident memory is measured.
"""

from __future__ import annotations

import contextlib
import gc
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from tritonclient.grpc import service_pb2 as pb

from guerdon.core import ModelInfo
from guerdon.errors import InvalidRequest
from guerdon.wire import bodies, kserve, kserve_grpc
from guerdon.wire.forms import FORMS
from guerdon.wire.tensors import InferRequest, Tensor

MODEL = ModelInfo("model", "reward")
TOKENS = np.random.default_rng(0).integers(10_000, 60_000, (2000, 1000))
ROWS = 500_000


def main() -> None:
    if len(sys.argv) > 1:
        print(*measured(sys.argv[1]))
        return
    print("| body | MiB | peak | kept | counted |\n| --- | --- | --- | --- | --- |")
    for kind in KINDS:
        told = subprocess.run([sys.executable, __file__, kind], check=True, capture_output=True, text=True)
        print("| " + " | ".join([kind, *told.stdout.split()]) + " |", flush=True)


def measured(kind: str) -> tuple[str, ...]:
    """Returns the body's size in MiB, and as multiples of it: the peak, what is kept, and what admission counts."""
    make, read = KINDS[kind]
    body, json_length = make()
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident now
    before, _ = resident()
    kept = None
    with contextlib.suppress(InvalidRequest):
        kept = read(body, json_length)
    now, peak = resident()
    weight = bodies.memory(memoryview(body)[:json_length]) + len(body) - (json_length or len(body))
    counted = kserve_grpc.memory(body) if read is read_grpc else weight
    del kept
    return (f"{len(body) / 2**20:.0f}", *(f"{x / len(body):.1f}" for x in (peak - before, now - before, counted)))


def resident() -> tuple[int, int]:
    """Returns the resident memory of this process and its peak, in bytes."""
    told = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return tuple(int(told[name].split()[0]) << 10 for name in ("VmRSS", "VmHWM"))  # type: ignore[return-value]


def read_kserve(body: bytes, json_length: int | None) -> Any:
    return kserve.read(body, json_length, MODEL)


def read_form(body: bytes, _: int | None) -> Any:
    return FORMS["/pooling"].read(body, {})


def read_grpc(body: bytes, _: int | None) -> Any:
    return kserve.to_request(kserve_grpc.decode(kserve_grpc.parse(body)), MODEL)


def request(*inputs: Tensor, binary: bool) -> tuple[bytes, int | None]:
    if binary:
        return kserve.encode_request(InferRequest({tensor.name: tensor for tensor in inputs}))
    told = [
        {
            "name": tensor.name,
            "shape": list(tensor.shape),
            "datatype": tensor.datatype,
            "data": [x.decode() for x in tensor.data]
            if isinstance(tensor.data, list)
            else tensor.data.ravel().tolist(),
        }
        for tensor in inputs
    ]
    return orjson.dumps({"inputs": told}), None


def ids() -> tuple[Tensor, Tensor]:
    return Tensor.of("tokens", TOKENS), Tensor.of("sequence_lengths", np.full((len(TOKENS), 1), TOKENS.shape[1]))


def texts() -> Tensor:
    return Tensor.of_texts("sentences", [f"{i % 100:02}" for i in range(ROWS)])


def typed() -> tuple[bytes, None]:
    message = pb.ModelInferRequest(model_name="model")
    for tensor in ids():
        added = message.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        added.contents.int64_contents.extend(np.ravel(tensor.data).tolist())
    return message.SerializeToString(), None


KINDS: dict[str, tuple[Callable[[], tuple[bytes, int | None]], Callable[[bytes, int | None], Any]]] = {
    "token ids in binary form": (lambda: request(*ids(), binary=True), read_kserve),
    "token ids as JSON": (lambda: request(*ids(), binary=False), read_kserve),
    "texts of two characters, binary": (lambda: request(texts(), binary=True), read_kserve),
    "texts of two characters, JSON": (lambda: request(texts(), binary=False), read_kserve),
    "one token a row, INT32, binary": (
        lambda: request(Tensor.of("input_ids", np.full((ROWS, 1), 7, np.int32)), binary=True),
        read_kserve,
    ),
    "one token a row, lists of lists": (lambda: (orjson.dumps({"input": [[7]] * ROWS}), None), read_form),
    "lists of nothing": (lambda: (b'{"input":[' + b"[]," * (4 * ROWS) + b"[]]}", None), read_form),
    "objects of nothing": (lambda: (b'{"input":[' + b"{}," * (4 * ROWS) + b"{}]}", None), read_form),
    "gRPC, typed contents": (typed, read_grpc),
}


if __name__ == "__main__":
    main()
