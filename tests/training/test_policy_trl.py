"""Two optimiser steps of RLOO: TRL's own trainer makes them, and ours from its rollouts and rewards."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies import build
from transformers import AutoModelForCausalLM

import zoo
from guerdon.training.algorithms.advantages import estimate_advantages
from guerdon.training.algorithms.kl import kl_per_sequence, kl_per_token, penalised_rewards
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, reinforce_loss
from guerdon.training.policy_trainer import PolicyTrainer

pytestmark = pytest.mark.slow
BETA, NUM_ROLLOUTS, NUM_STEPS, LR = 0.3, 4, 2, 3e-3
PROMPTS = ["the thing in there", "on and on", "a ring", "he is in the inn"]


def steps_of_trl(
    folder: Path, where: Path
) -> tuple[Any, list[dict[str, torch.Tensor]], list[list[float]], list[float]]:
    """The trained model, and of each step the rollouts as tensors, their rewards, and the gradient's norm."""
    trl = pytest.importorskip("trl")
    from datasets import Dataset
    from transformers import AutoTokenizer

    batches, rewards = [], []

    def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
        rewards.append([len(set(ids)) / 8 - (sum(ids) % 7) / 3 for ids in completion_ids])
        return rewards[-1]

    class Recording(trl.RLOOTrainer):  # type: ignore[misc,name-defined]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            made = super()._generate_and_score_completions(inputs)
            batches.append({name: made[name].clone() for name in made if name.startswith(("prompt_", "completion_"))})
            return made

    trainer = Recording(
        model=str(folder),
        reward_funcs=reward,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        processing_class=AutoTokenizer.from_pretrained(folder, padding_side="left"),
        args=trl.RLOOConfig(
            output_dir=str(where),
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            logging_steps=1,
            max_steps=NUM_STEPS,
            per_device_train_batch_size=NUM_ROLLOUTS * 2,
            num_generations=NUM_ROLLOUTS,
            max_completion_length=12,
            beta=BETA,
            learning_rate=LR,
            lr_scheduler_type="constant",
            adam_beta2=0.98,
            # TRL decays neither biases nor norms.
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32"},
        ),
    )
    trainer.train()
    norms = [entry["grad_norm"] for entry in trainer.state.log_history if "grad_norm" in entry]
    return trainer.model, batches, rewards, norms


def step_of_ours(trainer: PolicyTrainer, batch: dict[str, torch.Tensor], rewards: list[float]) -> float:
    """What the loop does with one rollout; the gradient's norm."""
    rows, starts = [], []
    for i in range(len(rewards)):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i].bool()]
        rows.append(torch.cat([prompt, batch["completion_ids"][i][batch["completion_mask"][i].bool()]]).numpy())
        starts.append(len(prompt))
    prompt_lengths = np.array(starts)
    logprobs = trainer.logprobs(rows, prompt_lengths).logprobs
    reference = trainer.reference_logprobs(rows, prompt_lengths)
    lengths = torch.tensor([len(row) for row in rows]) - torch.tensor(starts)
    mask = (torch.arange(logprobs.shape[1]) < lengths[:, None]).float()
    kl = kl_per_sequence(kl_per_token(logprobs, reference, mask, "k1"), mask)
    assert (kl.abs().max() > 0.1) == (trainer.step_count > 0)
    groups = torch.arange(len(rows)) // NUM_ROLLOUTS
    penalised = penalised_rewards(torch.tensor(rewards), kl, BETA)
    advantages, _ = estimate_advantages("rloo", penalised, groups, mask)
    # TRL's ratio is that of whole responses, whose gradient is that of their tokens' sum.
    aggregation = Aggregation("seq-mean-token-sum", GlobalCounts.of(mask))
    report = trainer.step(
        rows, prompt_lengths, lambda own, _, at: reinforce_loss(own, advantages[at], mask[at], aggregation)
    )
    assert not report.skipped and report.grad_norm > 1.0  # so it was clipped
    return report.grad_norm


def model_that_ends(name: str, folder: Path) -> Path:
    """A language model and its tokenizer; EOS comes often enough that responses differ in length."""
    zoo.tokenizer(zoo.language_model(name, folder), chat_template=None)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.get_output_embeddings().weight[zoo.EOS] *= 8
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2"])
def test_the_steps_of_rloo_are_those_of_trl(name: str, tmp_path: Path) -> None:
    folder = model_that_ends(name, tmp_path / "model")
    model, batches, rewards, norms = steps_of_trl(folder, tmp_path / "trl")
    assert len(batches) == len(rewards) == NUM_STEPS
    trainer = build(folder, learning_rate=LR, weight_decay=0.0)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    # What AdamW and clipping make of a gradient does not tell its scale; its norm does.
    own_norms = [step_of_ours(trainer, batch, own) for batch, own in zip(batches, rewards, strict=True)]
    assert own_norms == pytest.approx(norms, rel=1e-3)
    lengths = [batch["completion_mask"].sum(1) for batch in batches]
    assert all(len(set(some.tolist())) > 2 for some in lengths)
    wanted = dict(model.named_parameters())
    for parameter, got in trainer.model.named_parameters():
        moved = wanted[parameter] - before[parameter]
        assert moved.norm() > 0
        # AdamW's first steps are as large for a gradient of rounding noise as for any other.
        assert (got - wanted[parameter]).norm() <= 1e-2 * moved.norm(), parameter
