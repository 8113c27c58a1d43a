"""vLLM's own request classes, and its reply classes on what comes back: `drive_vllm.py URL MODEL SAMPLES`.

Prints {form: [...]} with the rewards by each form of asking, and under "errors" what wrong requests were told.
"""

from __future__ import annotations

import base64
import json
import struct
import sys
from typing import Any

import httpx
from vllm.entrypoints.pooling.classify.protocol import ClassificationCompletionRequest, ClassificationResponse
from vllm.entrypoints.pooling.pooling.protocol import PoolingCompletionRequest, PoolingResponse
from vllm.entrypoints.pooling.scoring.protocol import ScoreQueriesDocumentsRequest, ScoreResponse, ScoreTextRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse, ModelList


def main(url: str, model: str, samples: list[dict[str, Any]]) -> dict[str, Any]:
    texts = [s["prompt"] + s["response"] for s in samples]
    pairs = {"text_1": [s["prompt"] for s in samples], "text_2": [s["response"] for s in samples]}
    raw = {"model": model, "use_activation": False}
    plain = {**raw, "add_special_tokens": False}
    http = httpx.Client(base_url=url, timeout=120)

    def ask(path: str, request: Any, reply: Any, *, whole: bool = True) -> Any:
        # As a client that writes every field with its default, and as one that writes what it has set.
        body = json.loads(request.model_dump_json(exclude_unset=not whole))
        answer = http.post(path, json=body)
        answer.raise_for_status()
        return reply.model_validate(answer.json())

    def classes(replied: ClassificationResponse) -> list[float]:
        assert [entry.index for entry in replied.data] == list(range(len(replied.data)))
        assert all(entry.num_classes == len(entry.probs) for entry in replied.data)
        return [entry.probs[-1] for entry in replied.data]

    def told(path: str, body: Any) -> list[Any]:
        answer = http.post(path, json=body)
        error = ErrorResponse.model_validate(answer.json()).error
        return [answer.status_code, error.code, error.type, error.message]

    listed = ModelList.model_validate(http.get("/v1/models").raise_for_status().json())
    assert http.get("/health").status_code == 200
    classify, pooling = ClassificationCompletionRequest, PoolingCompletionRequest
    coded = ask("/pooling", pooling(input=texts, task="classify", encoding_format="base64", **plain), PoolingResponse)
    return {
        "models": [entry.id for entry in listed.data],
        "classify": classes(ask("/classify", classify(input=texts, **plain), ClassificationResponse)),
        "classify, few fields": classes(
            ask("/classify", classify(input=texts, **raw), ClassificationResponse, whole=False)
        ),
        "classify, one by one": [
            classes(ask("/classify", classify(input=text, **plain), ClassificationResponse))[0] for text in texts
        ],
        "pooling": [
            entry.data[0]
            for entry in ask("/pooling", pooling(input=texts, task="classify", **plain), PoolingResponse).data
        ],
        "pooling, base64": [struct.unpack("<f", base64.b64decode(entry.data))[0] for entry in coded.data],
        "score": [entry.score for entry in ask("/score", ScoreTextRequest(**pairs, **raw), ScoreResponse).data],
        "score, documents": [
            entry.score
            for entry in ask(
                "/v1/score",
                ScoreQueriesDocumentsRequest(queries=pairs["text_1"], documents=pairs["text_2"], **raw),
                ScoreResponse,
            ).data
        ],
        "activated": classes(ask("/classify", classify(model=model, input=texts, use_activation=True,
                                                       add_special_tokens=False), ClassificationResponse)),
        "errors": {
            "unknown model": told("/classify", {"model": "nobody", "input": "a"}),
            "no samples": told("/classify", {"model": model, "input": []}),
            "a number": told("/classify", {"model": model, "input": 5}),
            "no input": told("/pooling", {"model": model}),
            "unknown task": told("/pooling", {"model": model, "input": "a", "task": "embed"}),
            "too long": told("/classify", {"model": model, "input": "word " * 20_000}),
        },
    }  # fmt: skip


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        print(json.dumps(main(sys.argv[1], sys.argv[2], json.load(file))))
