"""What the demo needs, made into a folder: the reward model, the policy, and prompts."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from tqdm import tqdm

from guerdon.demo import policy, recipe
from guerdon.demo.story import PlainStory

REWARD_MODEL, POLICY = "reward_model", "policy"
PROMPTS, VALIDATION, HELD_OUT = "prompts.jsonl", "validation.jsonl", "heldout.jsonl"

NUM_PROMPTS = 2000
TIMES_VALIDATED = 4
"""How often validation.jsonl has each held-out prompt, so that the noise of one response matters less."""


def make(folder: Path, seed: int = recipe.Recipe.seed, *, progress: bool = True) -> None:
    """Makes all of it by the seed: `reward_model/`, `policy/`, and the prompts of `make_prompts`; on one thread."""
    folder.mkdir(parents=True, exist_ok=True)
    make_reward_model(folder, seed, progress=progress)
    make_policy(folder, seed, progress=progress)
    make_prompts(folder, seed)


def make_reward_model(folder: Path, seed: int = recipe.Recipe.seed, *, progress: bool = True) -> None:
    """Trains it and saves it as `reward_model/`."""
    chosen = recipe.Recipe(seed=seed)
    _trained(folder / REWARD_MODEL, chosen.num_steps, progress, lambda to, seen: recipe.make(to, chosen, seen))


def make_policy(folder: Path, seed: int = recipe.Recipe.seed, *, progress: bool = True) -> None:
    """Trains it with the tokenizer of `reward_model/` and saves it as `policy/`."""
    from transformers import AutoTokenizer

    chosen = policy.PolicyRecipe(seed=seed)
    tokenizer = AutoTokenizer.from_pretrained(folder / REWARD_MODEL)
    _trained(folder / POLICY, chosen.num_steps, progress, lambda to, seen: policy.make(to, tokenizer, chosen, seen))


def make_prompts(folder: Path, seed: int = recipe.Recipe.seed) -> None:
    """Writes `prompts.jsonl` to train on, and those to validate and to measure on.

    The latter ask about the same topics in other words, and are the same for every seed.
    """
    story = PlainStory(random.Random(f"prompts {seed}"))
    lines = [json.dumps({"prompt": story.ask()}) + "\n" for _ in range(NUM_PROMPTS)]
    (folder / PROMPTS).write_text("".join(lines), encoding="utf-8")
    held_out = files("guerdon.demo").joinpath("heldout.jsonl").read_text(encoding="utf-8")
    (folder / HELD_OUT).write_text(held_out, encoding="utf-8")
    prompts = [json.dumps({"prompt": json.loads(line)["prompt"]}) + "\n" for line in held_out.splitlines()]
    (folder / VALIDATION).write_text("".join(prompts * TIMES_VALIDATED), encoding="utf-8")


def _trained(folder: Path, num_steps: int, progress: bool, make: Callable[[Path, Any], None]) -> None:
    import torch
    from transformers.utils import logging

    logging.disable_progress_bar()  # one bar is enough
    started, num_threads = time.monotonic(), torch.get_num_threads()
    torch.set_num_threads(1)  # a model this small loses more between threads than it gains
    with tqdm(total=num_steps, unit="step", desc="  training", disable=not progress) as bar:

        def on_step(_step: int, loss: float) -> None:
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()

        make(folder, on_step)
    torch.set_num_threads(num_threads)
    print(f"  saved in {folder} after {time.monotonic() - started:.1f} s")
