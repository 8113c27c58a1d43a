"""Scores rows of ids by one library: `in_process_worker.py LIBRARY MODEL FD`, where FD is a pipe's file descriptor.

It sends "ready" when the model is loaded, answers `(way, rows)` with `(seconds, scores)`, and ends when it receives
None. It runs in the environment of the library.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import numpy as np

Rows = list[np.ndarray]
Score = Callable[[str, Rows], list[float]]
"""Scores rows of ids, in one of the library's ways."""

BATCH = 16
"""Rows that transformers pads into one rectangle, as many as the servers join."""


def guerdon(model: str) -> Score:
    from guerdon.assembly import build_scorer
    from guerdon.core import Sequence
    from guerdon.settings.config import ModelConfig

    engine = build_scorer(ModelConfig(model=model, dtype="float32"))
    return lambda _, rows: [score.reward for score in engine.score([Sequence(row) for row in rows])]


def transformers(model: str) -> Score:
    from scorer import Scorer

    scorer = Scorer(model, BATCH)

    def score(way: str, rows: Rows) -> list[float]:
        if way == "one by one":
            return [scorer.alone(row) for row in rows]
        order = sorted(range(len(rows)), key=lambda i: -len(rows[i])) if way == "sorted" else list(range(len(rows)))
        found = scorer.score([rows[i].tolist() for i in order])
        return [score for _, score in sorted(zip(order, found, strict=True))]

    return score


def openvino(model: str) -> Score:
    """Compiles twice, as OpenVINO advises: all cores for one request at a time, or for several queued ones."""
    import openvino as ov
    from optimum.intel import OVModelForSequenceClassification

    exported = OVModelForSequenceClassification.from_pretrained(model, export=True, compile=False).model
    alone, queued = (
        ov.Core().compile_model(exported, "CPU", {"INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": hint})
        for hint in ("LATENCY", "THROUGHPUT")
    )
    request, queue = alone.create_infer_request(), ov.AsyncInferQueue(queued)

    def score(way: str, rows: Rows) -> list[float]:
        if way == "one by one":
            return [float(request.infer(_inputs(row))["logits"][0, 0]) for row in rows]
        found = [0.0] * len(rows)

        def keep(answer: Any, i: int) -> None:
            found[i] = float(answer.get_tensor("logits").data[0, 0])

        queue.set_callback(keep)
        for i in sorted(range(len(rows)), key=lambda i: -len(rows[i])):
            queue.start_async(_inputs(rows[i]), i)
        queue.wait_all()
        return found

    return score


def onnxruntime(model: str) -> Score:
    """Exports the model of one row without padding: the mask is then causal alone."""
    import onnxruntime as ort
    import torch
    from scorer import Scorer

    class Alone(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = Scorer(model).model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids).logits

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.onnx"
        example, sizes = torch.arange(3, 99)[None], ({1: torch.export.Dim.DYNAMIC},)
        torch.onnx.export(
            Alone(), (example,), path, dynamo=True, dynamic_shapes=sizes, input_names=["ids"], output_names=["logits"]
        )
        session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    return lambda _, rows: [float(session.run(["logits"], {"ids": row[None]})[0][0, 0]) for row in rows]


def _inputs(row: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": row[None], "attention_mask": np.ones_like(row[None])}


LIBRARIES = {f.__name__: f for f in (guerdon, transformers, openvino, onnxruntime)}


def main() -> None:
    library, model, number = sys.argv[1:]
    asked = Connection(int(number))
    score = LIBRARIES[library](model)
    for way in ("one by one", "queued"):
        score(way, [np.arange(3, 99)] * 4)
    asked.send("ready")
    while (job := asked.recv()) is not None:
        started = time.perf_counter()
        scores = score(*job)
        asked.send((time.perf_counter() - started, scores))


if __name__ == "__main__":
    main()
