"""The training loop of both models."""

import random
from collections.abc import Callable
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerFast

BATCH_SIZE = 16


def train(
    model: PreTrainedModel,
    loss_of: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor],
    tokenizer: PreTrainedTokenizerFast,
    rows: list[dict],
    folder: Path,
    *,
    epochs: int,
    learning_rate: float,
    seed: int,
) -> None:
    """Trains a model on rows {"text", "label"} and saves it; `loss_of` takes ids and mask `[B,S]` and labels."""
    draw = random.Random(seed)
    num_steps = epochs * -(-len(rows) // BATCH_SIZE)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, learning_rate, total_steps=num_steps, pct_start=0.1)
    model.train()
    with tqdm(total=num_steps, desc=f"  {folder.name}", unit="step") as bar:
        for _ in range(epochs):
            # Batches of similar lengths need little padding.
            rows = sorted(draw.sample(rows, len(rows)), key=lambda row: len(row["text"]) // 20)
            batches = [rows[i : i + BATCH_SIZE] for i in range(0, len(rows), BATCH_SIZE)]
            for batch in draw.sample(batches, len(batches)):
                texts = [row["text"] + tokenizer.eos_token for row in batch]
                encoded = tokenizer(texts, return_tensors="pt", padding=True, padding_side="right")
                labels = torch.tensor([float(row["label"]) for row in batch])
                loss = loss_of(encoded.input_ids, encoded.attention_mask, labels)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                bar.set_postfix_str(f"loss {loss.item():.2f}", refresh=False)
                bar.update()
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
