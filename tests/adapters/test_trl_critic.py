"""TRL's real GRPOTrainer with a served critic: its values, updates and advantages are plain torch's."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import chats
import served
import zoo
from guerdon import CriticClient, Gae
from guerdon.adapters.trl_critic import CriticCallback as ServedCritic
from guerdon.adapters.trl_critic import use_critic
from guerdon.critic_core import TrainRequest
from guerdon.errors import ConfigError, InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig
from training.plain import PlainCritic

GENERATIONS, BATCH, SIZE = 2, 4, 2
PROMPTS = ["What is 2+2?", "Name a colour."]
RULE = Gae(gamma=0.9, lam_critic=0.8, lam_policy=0.5)
PASSES = 2


def wordy(completion_ids: list[list[int]], **_: Any) -> list[float | None]:
    """Rewards by the ids of the completion; none for every fourth."""
    return [None if i % 4 == 3 else float(sum(ids) % 7 - 3) for i, ids in enumerate(completion_ids)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    model = str(served.reward_model(tmp_path / "rm"))
    config = CriticConfig(model=model, checkpoint_dir=str(tmp_path / "critic"), global_batch_size=SIZE)
    with served.running(critic=config) as running:
        yield running


def make(folder: Path, steps: int = 2, **settings: Any) -> Any:
    policy = folder / "policy"
    if not policy.exists():
        zoo.tokenizer(zoo.language_model("llama", policy))
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(policy, dtype=torch.float32),
        reward_funcs=wordy,
        args=GRPOConfig(
            output_dir=str(folder / "out"), max_steps=steps, num_generations=GENERATIONS,
            per_device_train_batch_size=BATCH, max_completion_length=8, gradient_checkpointing=False, bf16=False,
            use_cpu=True, logging_steps=1, report_to="none", disable_tqdm=True, seed=1,
            **{"save_strategy": "no", **settings},
        ),
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(policy, padding_side="left"),
    )  # fmt: skip


def record(trainer: Any, masks_a_tool: bool = False) -> list[dict[str, Any]]:
    """Keeps every batch that the trainer makes, with its rewards, and may say that each fourth token is a tool's."""
    batches: list[dict[str, Any]] = []
    make_batch, calculate = trainer._generate_and_score_completions, trainer._calculate_rewards

    def make_and_keep(inputs: Any) -> Any:
        batch = make_batch(inputs)
        if masks_a_tool:
            batch["tool_mask"] = batch["completion_mask"].clone()
            batch["tool_mask"][:, 3::4] = 0
        batches[-1].update(batch)
        return batch

    def calculate_and_keep(*args: Any) -> torch.Tensor:
        rewards = calculate(*args)
        batches.append({"rewards": rewards[:, 0].clone()})
        return rewards

    trainer._generate_and_score_completions, trainer._calculate_rewards = make_and_keep, calculate_and_keep
    return batches


def by_hand(batch: dict[str, Any], plain: PlainCritic) -> tuple[torch.Tensor, TrainRequest]:
    """The advantages of a batch, not whitened, and what the critic should learn, by loops over single tokens."""
    width = batch["prompt_ids"].shape[1] + batch["completion_ids"].shape[1]
    count = len(batch["rewards"])
    tokens = np.zeros((count, width), np.int64)
    tables = {name: np.zeros((count, width - 1), np.float32) for name in ("returns", "prev_values", "mask")}
    advantages = torch.zeros(batch["completion_ids"].shape)
    for i in range(count):
        prompt = batch["prompt_ids"][i][batch["prompt_mask"][i] == 1].tolist()
        completion = batch["completion_ids"][i][batch["completion_mask"][i] == 1].tolist()
        row = prompt + completion
        tokens[i, : len(row)] = row
        with torch.no_grad():
            values = plain.values(np.array(row)).tolist()
        counts = batch.get("tool_mask", batch["completion_mask"])[i].tolist()
        next_value = next_policy = next_critic = 0.0
        reward = float(batch["rewards"][i])
        if np.isnan(reward):
            continue
        for j in reversed(range(len(completion))):
            before = len(prompt) + j - 1
            if not counts[j]:
                continue
            delta = reward + RULE.gamma * next_value - values[before]
            next_policy = delta + RULE.gamma * RULE.lam_policy * next_policy
            next_critic = delta + RULE.gamma * RULE.lam_critic * next_critic
            advantages[i, j] = next_policy
            tables["returns"][i, before] = next_critic + values[before]
            tables["prev_values"][i, before], tables["mask"][i, before] = values[before], 1.0
            next_value, reward = values[before], 0.0
    return advantages, TrainRequest("", tokens, **tables)


@pytest.mark.parametrize("with_tools", [False, True], ids=["text", "tools"])
def test_advantages_and_updates_are_plain_torchs(server: RunningServer, tmp_path: Path, with_tools: bool) -> None:
    """The second step's advantages are those of the critic that plain torch has trained on the first's."""
    trainer = make(tmp_path)
    if with_tools:
        record(trainer, masks_a_tool=True)
    use_critic(trainer, server.http_url, gae=RULE, updates=PASSES, whiten=False)
    batches = record(trainer)
    trainer.train()
    plain = PlainCritic(tmp_path / "rm", lr=9e-6)
    assert len(batches) == 2
    for batch, line in zip(batches, trainer.state.log_history, strict=False):
        advantages, request = by_hand(batch, plain)
        assert advantages.abs().max() > 0.5 and torch.isnan(batch["rewards"]).sum() == 1
        np.testing.assert_allclose(batch["advantages"], advantages, rtol=1e-5, atol=1e-5)
        first = plain.train(request, SIZE)[0]
        plain.train(request, SIZE)
        sizes = [request.mask[start : start + SIZE].sum() for start in range(0, BATCH, SIZE)]
        assert line["critic/loss"] == pytest.approx(np.average(first, weights=sizes), rel=1e-5)
        assert np.isfinite(line["critic/explained_variance"])
    rows = [row[:20] for row in zoo.rows()]
    with CriticClient(server.http_url) as client, torch.no_grad():
        assert client.state().step == 2 * PASSES * 2
        for row, values in zip(rows, client.infer(tokens=rows).values, strict=True):
            np.testing.assert_allclose(values, plain.values(row), rtol=1e-5, atol=1e-5)


def test_a_resumed_run_goes_on_with_the_critic_of_its_checkpoint(server: RunningServer, tmp_path: Path) -> None:
    """The third step is made twice, and is in the critic once."""
    probes, seen = zoo.rows(), []
    with CriticClient(server.http_url) as client:
        for resumed in (None, str(tmp_path / "out/checkpoint-2")):
            trainer = make(tmp_path, steps=3, save_strategy="steps", save_steps=2)
            use_critic(trainer, server.http_url, updates=PASSES)
            make_batch = trainer._generate_and_score_completions

            def probe_and_make(inputs: Any, make_batch: Any = make_batch) -> Any:
                seen.append(client.infer(tokens=probes).values)
                return make_batch(inputs)

            trainer._generate_and_score_completions = probe_and_make
            trainer.train(resume_from_checkpoint=resumed)
            assert client.state().step == 3 * PASSES * BATCH / SIZE
    before_third, after_resume = seen[2], seen[3]
    assert len(seen) == 4 and not np.array_equal(seen[1][0], before_third[0])
    assert all(np.array_equal(a, b) for a, b in zip(before_third, after_resume, strict=True))

    (tmp_path / "out/checkpoint-2/served_critic.json").unlink()
    with pytest.raises(ConfigError, match=r"has no .*checkpoint-2/served_critic\.json"):
        trainer.train(resume_from_checkpoint=resumed)


@pytest.mark.slow
def test_a_run_that_begins_anew_is_refused_by_a_critic_that_knows_its_steps(
    server: RunningServer, tmp_path: Path
) -> None:
    trainer = make(tmp_path, steps=1)
    use_critic(trainer, server.http_url)
    trainer.train()
    another = make(tmp_path, steps=1, learning_rate=1.0, temperature=0.2)
    use_critic(another, server.http_url)
    with pytest.raises(InvalidRequest, match=r"out:0\.0' was used for another request"):
        another.train()
    another = make(tmp_path, steps=1, temperature=0.2, run_name="second")
    use_critic(another, server.http_url)
    another.train()
    with CriticClient(server.http_url) as client:
        assert client.state().step == 2 * BATCH / SIZE


def test_white_advantages_have_no_mean_and_evaluation_trains_nothing(server: RunningServer, tmp_path: Path) -> None:
    trainer = make(tmp_path, per_device_eval_batch_size=BATCH)
    use_critic(trainer, server.http_url)
    batches = record(trainer)
    logged = trainer.evaluate(trainer.train_dataset)
    (batch,) = batches
    counted = batch["completion_mask"].bool() & ~batch["rewards"].isnan()[:, None]
    advantages = batch["advantages"]
    assert (advantages[~counted] == 0).all()
    np.testing.assert_allclose(advantages[counted].mean(), 0, atol=1e-6)
    np.testing.assert_allclose(advantages[counted].std(unbiased=False), 1, rtol=1e-5)
    assert logged["eval_critic/loss"] > 0
    with CriticClient(server.http_url) as client:
        assert client.state().step == 0


@pytest.mark.slow
def test_a_batch_without_rewards_teaches_nothing(server: RunningServer, tmp_path: Path) -> None:
    trainer = make(tmp_path, steps=1)
    use_critic(trainer, server.http_url)
    trainer.reward_funcs = [lambda completions, **_: [None] * len(completions)]
    batches = record(trainer)
    trainer.train()
    assert (batches[0]["advantages"] == 0).all()
    with CriticClient(server.http_url) as client:
        assert client.state().step == 0


def test_trainers_and_servers_that_do_not_fit_are_refused(server: RunningServer, tmp_path: Path) -> None:
    other = make(tmp_path)
    args = RLOOConfig(
        output_dir=str(tmp_path), num_generations=2, per_device_train_batch_size=2, use_cpu=True, bf16=False
    )
    rloo = RLOOTrainer(model=other.model, reward_funcs=wordy, args=args, train_dataset=other.train_dataset)
    with pytest.raises(InvalidRequest, match="RLOOTrainer has no advantages of tokens: use a GRPOTrainer"):
        use_critic(rloo, server.http_url)
    with served.running(critic=CriticConfig(model=str(tmp_path / "rm"))) as forgetful:
        saving = make(tmp_path, save_strategy="steps")
        with pytest.raises(ConfigError, match=r"the trainer saves checkpoints, and the critic at http.* keeps none"):
            use_critic(saving, forgetful.http_url)
        other.processing_class = AutoTokenizer.from_pretrained(chats.save("chatml", tmp_path / "other"))
        with pytest.raises(ConfigError, match="the tokenizer is not that of the critic, which is sent token ids"):
            use_critic(other, forgetful.http_url)
    assert not any(isinstance(c, ServedCritic) for c in saving.callback_handler.callbacks)
