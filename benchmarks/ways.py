"""The protocols that carry the same request: how to write it, send it, and read the answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc.aio
import numpy as np

import load
from guerdon.wire import kserve, kserve_grpc
from guerdon.wire.tensors import InferRequest, Tensor

INFER = "/v2/models/reward_model/infer"


@dataclass(frozen=True)
class Way:
    """A protocol: writes the bytes of a request for rows or their texts, and reads scores from an answer's bytes."""

    name: str
    write: Callable[[list[np.ndarray], list[str]], bytes]
    read: Callable[[load.Answer], np.ndarray]


def tensors(rows: list[np.ndarray]) -> dict[str, Tensor]:
    """Returns the rows in one padded tensor, and their lengths."""
    tokens = np.zeros((len(rows), max(map(len, rows))), dtype=np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
    return {t.name: t for t in (Tensor.of("tokens", tokens), Tensor.of("sequence_lengths", lengths))}


def binary(rows: list[np.ndarray], _: list[str]) -> bytes:
    return load.post(INFER, *kserve.encode_request(InferRequest(tensors(rows), outputs={"rewards": True})))


def json_ids(rows: list[np.ndarray], _: list[str]) -> bytes:
    inputs = [
        {"name": t.name, "datatype": "INT64", "shape": list(t.shape), "data": t.data.tolist()}
        for t in tensors(rows).values()
    ]
    return load.post(INFER, json.dumps({"inputs": inputs}).encode())


def json_texts(_: list[np.ndarray], texts: list[str]) -> bytes:
    inputs = [{"name": "sentences", "datatype": "BYTES", "shape": [len(texts), 1], "data": texts}]
    return load.post(INFER, json.dumps({"inputs": inputs}).encode())


def message(rows: list[np.ndarray], _: list[str]) -> bytes:
    return kserve_grpc.encode_request(InferRequest(tensors(rows)), "reward_model").SerializeToString()


def of_json(answer: load.Answer) -> np.ndarray:
    return np.array(next(o["data"] for o in json.loads(answer.body)["outputs"] if o["name"] == "rewards")).reshape(-1)


def of_binary(answer: load.Answer) -> np.ndarray:
    return kserve.decode_reply(answer.body, answer.json_length).outputs[0].data.reshape(-1)


def of_message(answer: load.Answer) -> np.ndarray:
    reply = kserve_grpc.decode_reply(kserve_grpc.pb.ModelInferResponse.FromString(answer.body))
    return next(t.data for t in reply.outputs if t.name == "rewards").reshape(-1)


GRPC = Way("gRPC", message, of_message)
WAYS = [Way("HTTP, binary", binary, of_binary), Way("HTTP, JSON ids", json_ids, of_json), GRPC]
TEXTS = Way("HTTP, texts", json_texts, of_json)


def ask_grpc(
    port: int, requests: list[bytes], concurrency: int, *, count: int | None = None, seconds: float | None = None
) -> load.Result:
    """Does what `load.run` does, over one gRPC channel."""

    async def measure() -> load.Result:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            generator = _GrpcLoad(channel.unary_unary("/inference.GRPCInferenceService/ModelInfer"), requests)
            await generator.closed(concurrency, load.Extent(seconds, count))
            generator.result.seconds = generator.now_s()
            return generator.result

    return asyncio.run(measure())


class _GrpcLoad(load.LoadGenerator):
    def __init__(self, infer: Callable[[bytes], Awaitable[bytes]], requests: list[bytes]) -> None:
        super().__init__()
        self._infer, self._requests, self.result = infer, requests, load.Result()

    async def send(self, index: int, due_s: float | None) -> bool:
        sent_s = self.now_s()
        body = await self._infer(self._requests[index % len(self._requests)])
        self.result.answers.append(load.Answer(index, 200, body, None, self.now_s() - sent_s))
        return True
