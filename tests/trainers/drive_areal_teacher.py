"""AReaL's engines of a teacher's rollout servers: `drive_areal_teacher.py sglang|vllm HOST:PORT ROWS`.

The engine is connected as AReaL's trainer connects it, and `compute_logp` gets a padded batch of two trajectories.
Prints {"log_probs": [...]}: of each row's tokens, 0 where the loss mask is.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from areal.api.cli_args import InferenceEngineConfig
from areal.engine.sglang_remote import RemoteSGLangEngine
from areal.engine.vllm_remote import RemotevLLMEngine

ENGINES = {"sglang": RemoteSGLangEngine, "vllm": RemotevLLMEngine}


def drive(kind: str, address: str, rows: list[dict[str, Any]]) -> list[list[float]]:
    engine = ENGINES[kind](InferenceEngineConfig(backend=f"{kind}:d1", setup_timeout=10, request_timeout=60))
    engine.initialize(addr=address)
    told = engine.compute_logp([batch_of(rows[:2]), batch_of(rows[2:])])
    engine.destroy()
    return [row.tolist() for part in told for row in part]


def batch_of(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    width = max(len(row["tokens"]) for row in rows)
    batch = {name: torch.zeros(len(rows), width, dtype=torch.int64) for name in
             ("input_ids", "attention_mask", "loss_mask")}  # fmt: skip
    for i, row in enumerate(rows):
        length = len(row["tokens"])
        batch["input_ids"][i, :length] = torch.tensor(row["tokens"])
        batch["attention_mask"][i, :length] = 1
        batch["loss_mask"][i, length - row["response_length"] : length] = 1
    return batch


if __name__ == "__main__":
    with open(sys.argv[3]) as file:
        print(json.dumps({"log_probs": drive(sys.argv[1], sys.argv[2], json.load(file))}))
