"""SGLang's own request classes, and its reply classes on what comes back: `drive_sglang.py URL MODEL SAMPLES`.

Prints {form: [...]} with the rewards by each form of asking.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import httpx
import torch

# torchvision, which SGLang imports, is built for CUDA and finds its operators only beside such a torch: names suffice.
operators = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        operators.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from sglang.srt.entrypoints.openai.protocol import EmbeddingRequest, EmbeddingResponse, ModelList  # noqa: E402
from sglang.srt.managers.io_struct import EmbeddingReqInput  # noqa: E402


def main(url: str, model: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [s["prompt"] + s["response"] for s in samples]
    http = httpx.Client(base_url=url, timeout=120)

    def native(path: str, text: str | list[str]) -> Any:
        request = EmbeddingReqInput(text=text)
        body = {field.name: getattr(request, field.name) for field in dataclasses.fields(request)}
        sent = {name: value for name, value in body.items() if value is not None and _is_json(value)}
        return http.post(path, json={"model": model, **sent}).raise_for_status().json()

    def embeddings(request: EmbeddingRequest) -> list[float]:
        answer = http.post("/v1/embeddings", json=request.model_dump(exclude_unset=True)).raise_for_status()
        return [entry.embedding[-1] for entry in EmbeddingResponse.model_validate(answer.json()).data]

    ModelList.model_validate(http.get("/v1/models").raise_for_status().json())
    both, neither = http.post("/classify", json={"text": "a", "input_ids": [5]}), http.post("/encode", json={})
    return {
        "classify": [entry["embedding"][0] for entry in native("/classify", texts)],
        "classify, one by one": [native("/classify", text)["embedding"][0] for text in texts],
        "encode": [entry["embedding"][0] for entry in native("/encode", texts)],
        "embeddings": embeddings(EmbeddingRequest(model=model, input=texts)),
        "embeddings, one by one": [embeddings(EmbeddingRequest(model="default", input=text))[0] for text in texts],
        "errors": {"both": both.status_code, "neither": neither.status_code},
    }


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        print(json.dumps(main(sys.argv[1], sys.argv[2], json.load(file))))
