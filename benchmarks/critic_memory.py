"""Measures the memory of a critic, at rest and in a train step, by the settings that change it.

  python benchmarks/critic_memory.py                       prints a table, and writes it under --out

The critic is a random Llama (512 x 8, vocabulary 8192). "At rest" are the bytes of all tensors that live once it is
built: weights, float32 masters and AdamW's moments. "In a step" is the peak of PyTorch's allocator over that: gradients
and activations of 16 rows of 256 tokens, four responses to each prompt, at 1,280 tokens a forward.
"""

from __future__ import annotations

import argparse
import gc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForSequenceClassification

from activations import PROMPT, RESPONSE, VOCAB_SIZE, peak, rows
from guerdon.assembly import build_trainer
from guerdon.critic_core import TrainRequest
from guerdon.settings.config import CriticConfig
from report import machine

SHAPE = {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "intermediate_size": 1408}
BUDGET, GROUPS = 1280, 4
SETTINGS: dict[str, dict[str, Any]] = {
    "`--dtype float32`": {"dtype": "float32"},
    "`--dtype bfloat16`": {},
    "`--optimizer adamw_8bit`": {"optimizer": "adamw_8bit"},
    "`--frozen '.*\\.self_attn\\..*'`": {"frozen": r".*\.self_attn\..*"},
    "`--lora 16`": {"lora": 16},
    "`--activation-checkpointing`": {"activation_checkpointing": True},
    "`--lora 16 --activation-checkpointing`": {"lora": 16, "activation_checkpointing": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-critic-memory"), help="folder of model and results")
    args = parser.parse_args()
    folder = args.out / "model"
    made = LlamaForSequenceClassification(LlamaConfig(**SHAPE, vocab_size=VOCAB_SIZE, pad_token_id=0, num_labels=1))
    num_weights = made.num_parameters()
    made.save_pretrained(folder)
    del made
    lines = [f"{' · '.join(machine().values())}. {num_weights / 1e6:.1f} million weights; MiB.", ""]
    lines += ["| setting | at rest | bytes a weight | in a step | together |", "| --- | --- | --- | --- | --- |"]
    for name, settings in SETTINGS.items():
        at_rest, step = measure(folder, settings)
        cells = [f"{x / 2**20:,.0f}" for x in (at_rest, step, at_rest + step)]
        lines.append(f"| {name} | {cells[0]} | {at_rest / num_weights:.1f} | {cells[1]} | {cells[2]} |")
    text = "\n".join(lines)
    (args.out / "critic_memory.md").write_text(text + "\n")
    print(text)


def measure(folder: Path, settings: dict[str, Any]) -> tuple[int, int]:
    """Returns the bytes at rest, and the highest of a step over them."""
    before = tensor_bytes()
    config = CriticConfig(model=str(folder), max_batch_tokens=BUDGET, **{"dtype": "bfloat16", **settings})
    trainer = build_trainer(config)
    at_rest = tensor_bytes() - before
    tokens = rows(GROUPS)
    mask = np.zeros((len(tokens), PROMPT + RESPONSE - 1), np.float32)
    mask[:, PROMPT - 1 :] = 1
    return at_rest, peak(lambda: trainer.train(TrainRequest("", tokens, mask, np.zeros_like(mask), mask)))


def tensor_bytes() -> int:
    """Returns the bytes of all tensors that live, each storage once."""
    gc.collect()
    storages = [x.untyped_storage() for x in gc.get_objects() if isinstance(x, torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


if __name__ == "__main__":
    main()
