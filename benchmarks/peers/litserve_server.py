"""LitServe over {"input_ids": [[...], ...]}; a batch joins several requests, `--batch 1` takes one at a time."""

from __future__ import annotations

import argparse

import litserve
from scorer import Scorer


class RewardAPI(litserve.LitAPI):
    def __init__(self, model: str, batch: int) -> None:
        super().__init__(max_batch_size=batch, batch_timeout=0.005 if batch > 1 else 0.0)
        self.folder, self.joins = model, batch > 1

    def setup(self, device: str) -> None:
        self.scorer = None if self.folder == "null" else Scorer(self.folder)

    def decode_request(self, request: dict) -> list[list[int]]:
        return request["input_ids"]

    def predict(self, asked: list) -> list:
        requests = asked if self.joins else [asked]
        rows = [row for request in requests for row in request]
        rewards = iter([0.0] * len(rows) if self.scorer is None else self.scorer.score(rows))
        answers = [[next(rewards) for _ in request] for request in requests]
        return answers if self.joins else answers[0]

    def encode_response(self, rewards: list[float]) -> dict:
        return {"scores": rewards}


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True, help="folder, or `null`")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    server = litserve.LitServer(RewardAPI(args.model, args.batch), accelerator="auto", timeout=600)
    server.run(host="127.0.0.1", port=args.port, generate_client_file=False, log_level="warning")
