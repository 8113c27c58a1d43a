"""Makes what the demo needs, in one folder: the reward model, the policy, and prompts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tqdm import tqdm

from demo import policy, reward_model
from demo.story import PlainStory

REWARD_MODEL, POLICY = "reward_model", "policy"
PROMPTS, VALIDATION, HELD_OUT = "prompts.jsonl", "validation.jsonl", "heldout.jsonl"

NUM_PROMPTS = 2000
NUM_REPEATS = 4
"""Copies of each held-out prompt in validation.jsonl: they average out the noise of single responses."""

SEED = reward_model.RewardModelRecipe.seed


def make(folder: Path, seed: int = SEED, *, progress: bool = True) -> None:
    """Makes `reward_model/`, `policy/` and the prompts by the seed, on one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    make_reward_model(folder, seed, progress=progress)
    make_policy(folder, seed, progress=progress)
    make_prompts(folder, seed)


def make_reward_model(folder: Path, seed: int = SEED, *, progress: bool = True) -> None:
    """Trains the reward model and saves it as `reward_model/`."""
    recipe = reward_model.RewardModelRecipe(seed=seed)
    _train(folder / REWARD_MODEL, recipe.num_steps, progress, lambda to, on: reward_model.make(to, recipe, on))


def make_policy(folder: Path, seed: int = SEED, *, progress: bool = True) -> None:
    """Trains the policy with the tokenizer of `reward_model/` and saves it as `policy/`."""
    from transformers import AutoTokenizer

    recipe = policy.PolicyRecipe(seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / REWARD_MODEL)
    _train(folder / POLICY, recipe.num_steps, progress, lambda to, on: policy.make(to, tokenizer, recipe, on))


def make_prompts(folder: Path, seed: int = SEED) -> None:
    """Writes the training prompts, and the held-out prompts for validation and measurement.

    The held-out prompts ask about the same topics in other words; they are the same for every seed.
    """
    story = PlainStory(random.Random(f"prompts {seed}"))
    lines = [json.dumps({"prompt": story.ask()}) + "\n" for _ in range(NUM_PROMPTS)]
    (folder / PROMPTS).write_text("".join(lines), encoding="utf-8")
    held_out = Path(__file__).with_name("heldout.jsonl").read_text(encoding="utf-8")
    (folder / HELD_OUT).write_text(held_out, encoding="utf-8")
    prompts = [json.dumps({"prompt": json.loads(line)["prompt"]}) + "\n" for line in held_out.splitlines()]
    (folder / VALIDATION).write_text("".join(prompts * NUM_REPEATS), encoding="utf-8")


def _train(folder: Path, num_steps: int, progress: bool, make: Callable[[Path, Any], None]) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough
    started, num_threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # models this small lose more by synchronising threads than they gain
    with tqdm(total=num_steps, unit="step", desc="  training", disable=not progress) as bar:

        def on_step(_step: int, loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()

        make(folder, on_step)
    torch.set_num_threads(num_threads)
    print(f"  saved in {folder} after {time.monotonic() - started:.1f} s")
