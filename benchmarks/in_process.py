"""Sequences/s without a server, printed: `engine` (guerdon's) or `transformers` (one sequence at a time)."""

from __future__ import annotations

import argparse
import time
from importlib.resources import files
from pathlib import Path

import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerFast

from guerdon.assembly import build_scorer
from guerdon.config import ModelConfig
from guerdon.core import Sequence
from workload import MAX_LENGTH, read_groups

parser = argparse.ArgumentParser()
parser.add_argument("what", choices=["engine", "transformers"])
parser.add_argument("folder", type=Path)
parser.add_argument("prompts", type=int)
parser.add_argument("--data", type=Path, default=Path(str(files("guerdon.demo") / "heldout.jsonl")))
args = parser.parse_args()
folder = str(args.folder / "model")
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
texts = [text for group in read_groups(args.data, args.prompts) for text in group]
rows = [torch.tensor(tokenizer(text)["input_ids"][:MAX_LENGTH]) for text in texts]
if args.what == "engine":
    engine = build_scorer(ModelConfig(model=folder))
    sequences = [Sequence(row.numpy()) for row in rows]
    run = lambda count: engine.score(sequences[:count])  # noqa: E731
else:
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    run = lambda count: [model(input_ids=row[None]) for row in rows[:count]]  # noqa: E731
with torch.inference_mode():
    run(8)
    started = time.perf_counter()
    run(len(rows))
    print(len(rows) / (time.perf_counter() - started))
