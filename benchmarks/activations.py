"""Measures the peak memory of a train step, by token budget and number of sequences.

  python benchmarks/activations.py                         prints tables, and writes them under --out

A critic and a policy (random Llamas, 256 x 4, vocabulary 8192) make one optimiser step each, on four responses of 128
tokens per prompt of 128. Measured is the peak of PyTorch's allocator over its level before the step: activations,
gradients and logits, but neither weights nor the optimiser's state.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from guerdon.assembly import build_trainer
from guerdon.critic_core import TrainRequest
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.settings.actors import PolicyConfig
from guerdon.settings.config import CriticConfig
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, reinforce_loss
from guerdon.training.policy_trainer import PolicyTrainer
from report import machine

VOCAB_SIZE = 8192
SHAPE = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 704}
PROMPT, RESPONSE, PER_PROMPT = 128, 128, 4
BUDGETS, GROUPS = (1280, 2560, 5120), (8, 16, 32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/bench-activations"), help="folder of models and results")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    config = LlamaConfig(**SHAPE, vocab_size=VOCAB_SIZE, pad_token_id=0, num_labels=1)
    for name, made in (("critic", LlamaForSequenceClassification(config)), ("policy", LlamaForCausalLM(config))):
        made.save_pretrained(args.out / name)
    lines = [f"{' · '.join(machine().values())}. MiB at the highest of one step.", ""]
    for name, measure in (("critic", critic_peak), ("policy", policy_peak)):
        lines += [f"| {name}: token budget | {' | '.join(f'{PER_PROMPT * n} sequences' for n in GROUPS)} |"]
        lines += [f"| --- {'| --- ' * len(GROUPS)}|"]
        for budget in BUDGETS:
            cells = [f"{measure(args.out / name, groups, budget) / 2**20:,.0f}" for groups in GROUPS]
            lines.append(f"| {budget:,} | {' | '.join(cells)} |")
        lines.append("")
    text = "\n".join(lines)
    (args.out / "activations.md").write_text(text)
    print(text)


def peak(run: Callable[[], Any]) -> int:
    """Returns the peak of allocated bytes during the call."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    events = [e for e in made.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def rows(groups: int) -> np.ndarray:
    """Returns int64 `[B, T]`, prompt by prompt."""
    random = np.random.default_rng(0)
    prompts = random.integers(3, VOCAB_SIZE, (groups, PROMPT)).repeat(PER_PROMPT, 0)
    return np.concatenate([prompts, random.integers(3, VOCAB_SIZE, (len(prompts), RESPONSE))], 1)


def critic_peak(folder: Path, groups: int, budget: int) -> int:
    tokens = rows(groups)
    config = CriticConfig(model=str(folder), global_batch_size=len(tokens), max_batch_tokens=budget)
    trainer = build_trainer(config)
    mask = np.zeros((len(tokens), PROMPT + RESPONSE - 1), np.float32)
    mask[:, PROMPT - 1 :] = 1
    return peak(lambda: trainer.train(TrainRequest("", tokens, mask, np.zeros_like(mask), mask)))


def policy_peak(folder: Path, groups: int, budget: int) -> int:
    config = PolicyConfig(model=str(folder), max_batch_tokens=budget)
    trainer = PolicyTrainer(load_policy(config), config, keeps_reference=False)
    tokens = list(rows(groups))
    mask = torch.ones(len(tokens), RESPONSE)
    aggregation = Aggregation("token-mean", GlobalCounts.of(mask))

    def loss(logprobs: torch.Tensor, _: Any, members: np.ndarray) -> Any:
        return reinforce_loss(logprobs, mask[members], mask[members], aggregation)

    return peak(lambda: trainer.step(tokens, np.full(len(tokens), PROMPT), loss))


if __name__ == "__main__":
    main()
