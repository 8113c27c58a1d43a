"""Samples responses from policies and compares them by the judge and the reward model."""

import math
import textwrap
from pathlib import Path

import torch
from reviews import Judge
from transformers import AutoModelForCausalLM, AutoTokenizer

from guerdon import RewardClient

MAX_NEW_TOKENS = 24
TEMPERATURE = 0.7
RESPONSES = 4  # per prompt


def respond(policy: Path, prompts: list[str], seed: int) -> list[str]:
    """Samples RESPONSES to each prompt with transformers."""
    tokenizer = AutoTokenizer.from_pretrained(policy)
    model = AutoModelForCausalLM.from_pretrained(policy).eval()
    batch = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    torch.manual_seed(seed)
    ids = model.generate(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, max_new_tokens=MAX_NEW_TOKENS,
        do_sample=True, temperature=TEMPERATURE, top_k=0, num_return_sequences=RESPONSES,
    )  # fmt: skip
    return tokenizer.batch_decode(ids[:, batch.input_ids.shape[1] :], skip_special_tokens=True)


def compare(policies: dict[str, Path], prompts: list[str], judge: Judge, url: str, seed: int) -> dict[str, float]:
    """Prints the figures of each policy with some responses; returns the figures, such as `judge_before`."""
    figures, written = {}, {}
    with RewardClient(url) as client:
        for when, policy in policies.items():
            written[when] = respond(policy, prompts, seed)
            asked = [prompt for prompt in prompts for _ in range(RESPONSES)]
            rewards = client.score(texts=[a + b for a, b in zip(asked, written[when], strict=True)]).rewards
            positive = [judge.positive(response) for response in written[when]]
            figures[f"judge_{when}"] = sum(p > 0.5 for p in positive) / len(positive)
            figures[f"judge_probability_{when}"] = sum(positive) / len(positive)
            figures[f"reward_{when}"] = math.fsum(rewards) / len(rewards)
    for i, prompt in enumerate(prompts[:6]):
        print(f"\n  {prompt} ...")
        for when in policies:
            response = " ".join(written[when][i * RESPONSES].split()) or "(nothing)"
            print(textwrap.fill(response, 110, initial_indent=f"    {when:8}", subsequent_indent=" " * 12))
    print()
    for name, what in (
        ("judge", "share of responses that the judge calls positive"),
        ("judge_probability", "mean probability of positive by the judge"),
        ("reward", "mean reward by the reward model"),
    ):
        before, after = (figures[f"{name}_{when}"] for when in policies)
        print(f"  {before:6.3f} -> {after:6.3f}  {what}")
    return figures
