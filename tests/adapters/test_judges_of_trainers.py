"""A judge as the reward of trainers: the criteria arrive beside the reward, by the adapters of reward models."""

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import judged
import zoo
from guerdon import RewardClient
from guerdon.adapters.trl import reward_function
from guerdon.adapters.verl import compute_score, compute_score_async
from guerdon.errors import SampleFailed
from guerdon.settings.config import JudgeConfig
from served import Serve

COMPONENTS = (*judged.CRITERIA, "other_mass", "label_entropy")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> str:
    folder = tmp_path_factory.mktemp("judge")
    model = str(zoo.tokenizer(zoo.language_model("llama", folder / "judge")))
    rubric = judged.write(folder)
    models: list[Any] = [
        JudgeConfig(model=model, name=name, rubric=rubric, max_other_mass=bound)
        for name, bound in (("judge", 1.0), ("strict", 1e-6))
    ]
    return serve(*models).http_url


def test_trls_grpo_learns_from_a_judge(url: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    from datasets import Dataset

    policy = zoo.tokenizer(zoo.language_model("llama", tmp_path / "policy"))
    seen: list[tuple[list[str], list[str]]] = []

    def record(prompts: list[str], completions: list[str], **_: Any) -> list[None]:
        seen.append((prompts, completions))
        return [None] * len(prompts)

    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=[reward_function(url, "judge"), record],
        args=trl.GRPOConfig(
            output_dir=str(tmp_path), max_steps=1, num_generations=4, per_device_train_batch_size=4,
            max_completion_length=8, gradient_checkpointing=False, bf16=False, use_cpu=True, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, seed=1,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in judged.PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
    )  # fmt: skip
    trainer.train()
    ((prompts, completions),) = seen
    texts = [prompt + completion for prompt, completion in zip(prompts, completions, strict=True)]
    with RewardClient(url, "judge") as client:
        scores = client.score(texts=texts, prompts=prompts).raise_for_failed()
    (line,) = [line for line in trainer.state.log_history if "reward" in line]
    assert line["reward"] == pytest.approx(scores.rewards.mean(), rel=1e-5)
    assert scores.attributes is not None
    for name, values in zip(COMPONENTS, scores.attributes.T, strict=True):
        assert line[f"judge/{name}"] == pytest.approx(values.mean(), rel=1e-4)
    assert np.abs(np.array(trainer._logs["advantages"])).max() > 0.1


def test_verls_functions_give_a_judges_criteria(url: str) -> None:
    with RewardClient(url, "judge") as client:
        wanted = client.score(texts=judged.TEXTS, prompts=judged.PROMPTS).raise_for_failed()
    for i, (prompt, response) in enumerate(zip(judged.PROMPTS, judged.RESPONSES, strict=True)):
        told = compute_score("d", response, None, {"prompt": prompt}, url=url, model="judge")
        assert told == asyncio.run(compute_score_async("d", response, None, {"prompt": prompt}, url=url, model="judge"))
        assert told["score"] == pytest.approx(wanted.rewards[i], abs=1e-6)
        assert wanted.attributes is not None
        assert [told[name] for name in COMPONENTS] == pytest.approx(wanted.attributes[i].tolist(), abs=1e-6)
    with pytest.raises(SampleFailed, match="no labels"):
        compute_score("d", "4", None, {"prompt": "2+2?"}, url=url, model="strict")
