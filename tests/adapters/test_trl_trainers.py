"""TRL's real trainers with a served reward: what they log and learn from is what the server gave."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import served
import zoo
from guerdon import RewardClient
from guerdon.adapters.trl import async_reward_function, reward_function
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig
from served import Serve

STEPS, GENERATIONS = 2, 4
PROMPTS = ["What is 2+2?", "Name a colour.", "Who wrote Faust?", "Say something kind."]


def picky(texts: list[str]) -> list[float]:
    """A user's function that has no score for about a third of all texts."""
    return [math.nan if len(text) % 3 == 0 else float(len(text)) for text in texts]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    models = [
        ModelConfig(model=str(served.reward_model(tmp_path_factory.mktemp("rm"))), name="helpful", deterministic=True),
        ModelConfig(model="adapters.test_trl_trainers:picky", name="picky"),
    ]
    total = RewardConfig(components=[ComponentConfig(model="helpful"), ComponentConfig(model="picky", weight=0.1)])
    return serve(*models, rewards=[total]).http_url


@pytest.mark.parametrize("conversations", [False, True], ids=["plain", "conversations"])
@pytest.mark.parametrize("form", ["grpo", "rloo"])
def test_trainer_logs_the_servers_rewards_and_leaves_failed_samples_out(
    form: str, conversations: bool, url: str, tmp_path: Path
) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    policy = zoo.tokenizer(zoo.language_model("llama", tmp_path / "policy"))
    seen: list[tuple[list[Any], list[Any]]] = []

    def record(prompts: list[Any], completions: list[Any], **_: Any) -> list[None]:
        seen.append((prompts, completions))
        return [None] * len(prompts)

    model = "helpful" if conversations else "reward_model"
    make = reward_function if form == "grpo" else async_reward_function
    rows = [{"prompt": [{"role": "user", "content": text}] if conversations else text} for text in PROMPTS]
    trainer = getattr(trl, f"{form.upper()}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=[make(url, model, name="judge"), record],
        args=getattr(trl, f"{form.upper()}Config")(
            output_dir=str(tmp_path), max_steps=STEPS, num_generations=GENERATIONS,
            per_device_train_batch_size=len(PROMPTS) * GENERATIONS, max_completion_length=8,
            gradient_checkpointing=False, bf16=False, use_cpu=True, logging_steps=1, save_strategy="no",
            report_to="none", disable_tqdm=True, seed=1,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
    )  # fmt: skip
    trainer.train()
    logs = [line for line in trainer.state.log_history if "reward" in line]
    assert len(logs) == len(seen) == STEPS
    for line, (prompts, completions) in zip(logs, seen, strict=True):
        joined = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
        with RewardClient(url, model) as client:
            scores = client.score(**{"messages" if conversations else "texts": joined})
        scored = scores.rewards[np.isfinite(scores.rewards)]
        assert conversations or 0 < len(scored) < len(scores)
        assert line["reward"] == pytest.approx(scored.mean(), rel=1e-5)
        assert line["rewards/judge/mean"] == pytest.approx(scored.mean(), rel=1e-5)
        assert line["rewards/judge/std"] == pytest.approx(scored.std(ddof=1), rel=1e-4)
        if not conversations:
            assert scores.attributes is not None
            assert line["judge/picky"] == pytest.approx(np.nanmean(scores.attributes[:, 1]), rel=1e-5)
    # The last step's, one a completion.
    told, advantages = np.array(trainer._logs["rewards"]["judge"]), np.array(trainer._logs["advantages"])
    np.testing.assert_array_equal(told.astype(np.float32), scores.rewards)
    assert (advantages[np.isnan(told)] == 0).all() and np.abs(advantages).max() > 0.1
    if form == "grpo":
        groups = told.reshape(-1, GENERATIONS)
        mean, std = np.nanmean(groups, 1, keepdims=True), np.nanstd(groups, 1, ddof=1, keepdims=True)
        wanted = np.nan_to_num((groups - mean) / (std + 1e-4)).ravel()
        np.testing.assert_allclose(advantages, wanted, rtol=1e-3, atol=1e-4)
