"""Prints the seconds of a critic's train step in this process: `padded` (plain transformers) or `guerdon`.

A step is one global batch: forward, clipped value loss, backward, gradient clipping, AdamW.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification

from guerdon.critic_core import TrainRequest
from guerdon.settings.config import CriticConfig

KEEPS_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str((1 << 31) - 1)}
"""The environment that makes a process keep freed memory, as guerdon's do by themselves."""
MICRO_BATCH = 16
LEARNING_RATE = 9e-6


def padded(folder: str, batch: dict[str, np.ndarray]) -> Callable[[int], None]:
    """Takes the usual step: micro-batches in order of arrival, right-padded to their longest row, SDPA attention."""
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    trunk, head = model.base_model, model.score
    trunk.config.use_cache = False
    parameters = [*trunk.parameters(), *head.parameters()]
    optimiser = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.01)
    tokens, returns, previous, mask = (torch.from_numpy(batch[k]) for k in ("tokens", "returns", "prev_values", "mask"))
    lengths = batch["lengths"]

    def step(count: int) -> None:
        total = mask[:count].sum()
        for start in range(0, count, MICRO_BATCH):
            rows = slice(start, start + MICRO_BATCH)
            width = int(lengths[rows].max())
            attended = (torch.arange(width) < torch.from_numpy(lengths[rows])[:, None]).long()
            hidden = trunk(input_ids=tokens[rows, :width], attention_mask=attended).last_hidden_state
            v = head(hidden)[:, :-1, 0]
            before, target, m = (x[rows, : width - 1] for x in (previous, returns, mask))
            clipped = before + (v - before).clamp(-0.2, 0.2)
            loss = 0.5 * (m * torch.maximum((v - target) ** 2, (clipped - target) ** 2)).sum() / total
            loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        optimiser.zero_grad()

    return step


def guerdon(folder: str, batch: dict[str, np.ndarray]) -> Callable[[int], None]:
    """Takes steps of guerdon's trainer, without its server."""
    from guerdon.assembly import build_trainer

    config = CriticConfig(model=folder, global_batch_size=len(batch["tokens"]), learning_rate=LEARNING_RATE)
    trainer = build_trainer(config)
    inputs = {k: batch[k] for k in ("tokens", "returns", "prev_values", "mask")}
    return lambda count: trainer.train(TrainRequest("", **{k: x[:count] for k, x in inputs.items()}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("form", choices=["padded", "guerdon"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("batch", type=Path)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    batch = dict(np.load(args.batch))
    step = {"padded": padded, "guerdon": guerdon}[args.form](str(args.folder), batch)
    step(MICRO_BATCH)  # to warm up
    for _ in range(args.steps):
        started = time.perf_counter()
        step(len(batch["tokens"]))
        print(time.perf_counter() - started)


if __name__ == "__main__":
    main()
