"""Every server that is measured, in every form that it is measured in: how it starts, is asked, and answers."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from guerdon.wire import kserve
from guerdon.wire.kserve import InferRequest
from guerdon.wire.tensors import Tensor
from load import Answer, post
from workload import MAX_LENGTH, Group

HERE = Path(__file__).parent
REQUIREMENTS = {
    "pytriton": ["nvidia-pytriton==0.7.0", "transformers"],
    "litserve": ["litserve", "transformers"],
    "infinity": ["infinity-emb[torch,server]", "typer==0.12.5", "click==8.1.8", "transformers==4.57.*"],
    "ray": ["ray[serve]", "transformers"],
}
"""What each peer's own environment holds besides torch."""

NULL_ROW = np.arange(3, 515)


@dataclass(frozen=True)
class Form:
    """One row of the table. `server` names the environment and the way it is started in `COMMANDS`."""

    name: str
    server: str
    write: Callable[[list[np.ndarray], list[str]], bytes]
    read: Callable[[Answer], list[float]]
    by_prompt: bool

    def requests(self, groups: list[Group]) -> tuple[list[bytes], list[np.ndarray]]:
        """The requests and the reference scores that each should be answered with."""
        requests, wanted = [], []
        for g in groups:
            cuts = [range(len(g.rows))] if self.by_prompt else [[i] for i in range(len(g.rows))]
            for cut in cuts:
                requests.append(self.write([g.rows[i] for i in cut], [g.texts[i] for i in cut]))
                wanted.append(g.reference[list(cut)])
        return requests, wanted


def tensors(width: int | None = None) -> Callable[[list[np.ndarray], list[str]], bytes]:
    """KServe v2 in binary, rows padded to `width` (None: to the request's longest)."""

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


def read_scores(answer: Answer) -> list[float]:
    return json.loads(answer.body)["scores"]


def read_labels(answer: Answer) -> list[float]:
    # It answers with the softmax of (x, -x), from which x comes back.
    first = [next(x["score"] for x in row if x["label"] == "LABEL_0") for row in json.loads(answer.body)["data"]]
    return [0.5 * math.log(p / (1 - p)) for p in first]


PADDED_TO_MAXIMUM = "PyTriton, all padded to the maximum (NeMo-Aligner's default)"
FORMS = [
    Form("guerdon, a request a prompt", "guerdon", tensors(), read_tensors, True),
    Form("guerdon, a request a sequence", "guerdon", tensors(), read_tensors, False),
    Form(PADDED_TO_MAXIMUM, "pytriton", tensors(MAX_LENGTH), read_tensors, True),
    Form("PyTriton, a request a prompt, padded to its longest", "pytriton", tensors(), read_tensors, True),
    Form("PyTriton, a request a sequence", "pytriton", tensors(), read_tensors, False),
    Form("LitServe, a request a prompt, one at a time", "litserve-1", ids("/predict"), read_scores, True),
    Form("LitServe, a request a sequence, joined", "litserve", ids("/predict"), read_scores, False),
    Form("LitServe, a request a sequence, one at a time", "litserve-1", ids("/predict"), read_scores, False),
    Form("infinity, a request a prompt", "infinity", texts, read_labels, True),
    Form("infinity, a request a sequence", "infinity", texts, read_labels, False),
    Form("Ray Serve, a request a prompt", "ray", ids("/"), read_scores, True),
    Form("Ray Serve, a request a sequence", "ray", ids("/"), read_scores, False),
]
NULL_FORMS = [form for form in FORMS if not form.by_prompt and form.server != "infinity"]
"""infinity cannot serve a function; its own overhead is not measured."""


def command(server: str, environments: Path, folder: Path, port: int, *, null: bool) -> list[str]:
    """The command that starts a server on `folder/model`, or on a model that computes nothing."""
    model = "null" if null else str(folder / "model")
    if server == "guerdon":
        model = "null_scorer:score" if null else model
        return [sys.executable, "-m", "guerdon", "serve", model, "--port", str(port), "--no-grpc"]
    name, _, batch = server.partition("-")
    python = environments / name / "bin" / "python"
    if name == "infinity":
        return [
            str(python.parent / "infinity_emb"), "v2", "--host", "127.0.0.1", "--port", str(port),
            "--model-id", str(folder / "model2"), "--served-model-name", "m", "--engine", "torch", "--device", "cpu",
            "--dtype", "float32", "--batch-size", "16", "--no-bettertransformer", "--no-compile",
            "--no-model-warmup", "--log-level", "warning",
        ]  # fmt: skip
    more = ["--batch", batch] if batch else []
    return [str(python), str(HERE / "peers" / f"{name}_server.py"), "--model", model, "--port", str(port), *more]
