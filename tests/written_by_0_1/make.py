"""Writes this folder: a tiny model, and what the critic of guerdon 0.1 (commit 40c2f04) left after four trains.

Run it with that commit's sources: `PYTHONPATH=<worktree of 40c2f04>/src python tests/written_by_0_1/make.py`.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np

from guerdon.assembly import build_service
from guerdon.core import ScoreRequest
from guerdon.critic_core import ControlRequest, Operation, TrainRequest
from guerdon.settings.config import CriticConfig, ServerConfig

HERE = Path(__file__).parent
MODEL, CRITIC = HERE / "model", HERE / "critic"
VOCAB = 16
PROBE = np.arange(1, 9)
SETTINGS = {"global_batch_size": 2, "learning_rate": 1e-2, "dtype": "float32", "device": "cpu"}


def request(number: int) -> TrainRequest:
    """The train request of that number."""
    numbers = np.random.default_rng(number)
    tokens = numbers.integers(1, VOCAB, (2, 6))
    returns, before = numbers.normal(size=(2, 2, 5)).astype(np.float32)
    return TrainRequest(f"train-{number}", tokens, returns, before, np.ones((2, 5), np.float32))


async def main() -> None:
    """Trains twice, saves, trains twice more."""
    import torch  # only here: tests in processes of their own import this module
    from transformers import LlamaConfig, LlamaForSequenceClassification

    for folder in (MODEL, CRITIC):
        shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=8,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        num_labels=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    LlamaForSequenceClassification(config).save_pretrained(MODEL)
    critic = CriticConfig(model=str(MODEL), checkpoint_dir=str(CRITIC), **SETTINGS)
    service = build_service(ServerConfig(critic=critic))
    service.start()
    try:
        for number in range(4):
            if number == 2:
                await service.call("critic_save", ControlRequest(Operation.SAVE))
            report = await service.call("critic_train", request(number))
        reply = await service.score("critic_infer", ScoreRequest(tokens=[PROBE]))
    finally:
        await asyncio.to_thread(service.stop)
    told = {"step": report.step, "loss": report.loss, "values": reply.results[0].values.tolist()}
    (HERE / "then.json").write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    asyncio.run(main())
