"""Trains a reward model on pairs of answers: a language model's trunk, a new head, the Bradley-Terry loss."""

import random
import time
from pathlib import Path

import torch
from command import run
from pairs import read_rows
from tqdm import tqdm
from transformers import AutoModelForSequenceClassification, AutoTokenizer

PAIRS = 8  # per batch
WARMUP = 10  # batches
HAS_BFLOAT16 = any(torch.cpu.get_capabilities().get(units) for units in ("avx512_bf16", "amx_bf16"))
"""Whether products in bfloat16 are fast on this processor; the weights stay float32."""


def make_batches(pairs: list[dict], seed: int) -> list[list[dict]]:
    """Returns batches of prompts of similar lengths, which need little padding, in random order."""
    draw = random.Random(seed)
    pairs = sorted(draw.sample(pairs, len(pairs)), key=lambda pair: len(pair["prompt"]) // 20)
    batches = [pairs[i : i + PAIRS] for i in range(0, len(pairs), PAIRS)]
    return draw.sample(batches, len(batches))


def encode(tokenizer, batch: list[dict]) -> dict[str, torch.Tensor]:
    """Returns the tokens of all chosen answers, then of all rejected ones, through the chat template."""
    answers = [(pair["prompt"], pair[key]) for key in ("chosen", "rejected") for pair in batch]
    chats = [[{"role": "user", "content": p}, {"role": "assistant", "content": a}] for p, a in answers]
    return tokenizer.apply_chat_template(chats, tokenize=True, padding=True, return_dict=True, return_tensors="pt")


def train(trunk: Path, pairs: Path, out: Path, minutes: float, learning_rate: float, seed: int) -> None:
    """Trains for at most so many minutes and two epochs; the learning rate falls to 0 at the end."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(trunk, padding_side="right")
    model = AutoModelForSequenceClassification.from_pretrained(trunk, num_labels=1, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), learning_rate, weight_decay=0.01)
    rows = read_rows(pairs)
    batches, start = make_batches(rows, seed) + make_batches(rows, seed + 1), time.monotonic()
    bar = tqdm(batches, desc=f"  {out.name}", unit="batch")
    for i, batch in enumerate(bar):
        if (done := max(i / len(batches), (time.monotonic() - start) / 60 / minutes)) >= 1:
            break
        optimizer.param_groups[0]["lr"] = learning_rate * min(1, (i + 1) / WARMUP) * (1 - done)
        with torch.autocast("cpu", torch.bfloat16, enabled=HAS_BFLOAT16):
            chosen, rejected = model(**encode(tokenizer, batch)).logits[:, 0].float().chunk(2)
        loss = -torch.nn.functional.logsigmoid(chosen - rejected).mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        bar.set_postfix_str(f"loss {loss.item():.2f}", refresh=False)
    model.eval().save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    run(train)
