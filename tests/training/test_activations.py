"""A training step's memory depends on the token budget, not on the number of sequences."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import critics
import numpy as np
import policies
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import zoo
from guerdon.critic_core import TrainRequest
from guerdon.engine import logprobs
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, reinforce_loss
from tiers import slow_but

PROMPT, RESPONSE, PER_PROMPT = 24, 40, 4
GROUP = PROMPT + PER_PROMPT * RESPONSE


def peak(run: Callable[[], Any]) -> int:
    """The most bytes of tensors that were there at once beyond those before, as PyTorch's allocator counts them."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    events = [e for e in made.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(itertools.accumulate(e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())))


def rows(groups: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)

    def ids(count: int) -> np.ndarray:
        return random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, count)

    prompts = [ids(PROMPT) for _ in range(groups)]
    return [np.concatenate([prompt, ids(RESPONSE)]) for prompt in prompts for _ in range(PER_PROMPT)]


def critic_peak(folder: Path, groups: int, budget: int) -> int:
    tokens = np.stack(rows(groups))
    trainer = critics.build(folder, global_batch_size=len(tokens), max_batch_tokens=budget)
    mask = np.zeros((len(tokens), tokens.shape[1] - 1), np.float32)
    mask[:, PROMPT - 1 :] = 1
    request = TrainRequest("", tokens, returns=mask, prev_values=np.zeros_like(mask), mask=mask)
    return peak(lambda: trainer.train(request))


def policy_peak(folder: Path, groups: int, budget: int) -> int:
    trainer = policies.build(folder, max_batch_tokens=budget, keeps_reference=False)
    made = rows(groups)
    mask = torch.ones(len(made), RESPONSE)
    aggregation = Aggregation("token-mean", GlobalCounts.of(mask))

    def loss(logprobs: torch.Tensor, _: Any, members: np.ndarray) -> Any:
        return reinforce_loss(logprobs, mask[members], mask[members], aggregation)

    return peak(lambda: trainer.step(made, np.full(len(made), PROMPT), loss))


@pytest.mark.parametrize("measured", slow_but((), [critic_peak, policy_peak]))
def test_what_a_step_holds_goes_by_the_token_budget(measured: Callable[[Path, int, int], int], tmp_path: Path) -> None:
    make = zoo.checkpoint if measured is critic_peak else zoo.language_model
    folder = make("llama", tmp_path)
    few, many = measured(folder, 4, 2 * GROUP), measured(folder, 16, 2 * GROUP)
    assert many < 1.05 * few
    # Twice and four times the budget: what does not grow with it (gradients) is less than a tenth.
    assert 1.8 * few < measured(folder, 16, 4 * GROUP) < 2.1 * few
    assert 3.4 * few < measured(folder, 16, 8 * GROUP) < 4.2 * few


@pytest.mark.slow
def test_logits_beyond_the_table_are_not_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The table bounds them, however many tokens a budget lets in."""
    folder = zoo.language_model("llama", tmp_path, vocab_size=16 * zoo.VOCAB_SIZE)
    whole = policy_peak(folder, 8, 8 * GROUP)
    monkeypatch.setattr(logprobs, "TABLE", RESPONSE * 16 * zoo.VOCAB_SIZE)
    logits = 4 * 16 * zoo.VOCAB_SIZE * RESPONSE * PER_PROMPT * 8
    assert whole > 2 * logits
    assert policy_peak(folder, 8, 8 * GROUP) < whole - 1.5 * logits
