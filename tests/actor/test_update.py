"""The policy's loss in micro-batches, and its updates by a real trainer."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import zoo
from actor.rollouts import rollout
from guerdon.actor.experience import Experience, measure
from guerdon.actor.rollouts import Rollout
from guerdon.actor.update import PolicyLoss, update
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.settings.actors import AlgorithmConfig, PolicyConfig, RolloutConfig
from guerdon.training.algorithms.losses import AGGREGATIONS, Aggregation, GlobalCounts, PolicyLossStats
from guerdon.training.policy_trainer import PolicyTrainer

LENGTHS = (3, 1, 5, 2, 4)
ADVANTAGES = (1.0, -2.0, 0.5, 3.0, -1.0)
SAMPLING = RolloutConfig(max_new_tokens=8, temperature=0.7)


def table_of(seed: int, scale: float = 1.0) -> Tensor:
    return torch.randn(len(LENGTHS), max(LENGTHS), generator=torch.Generator().manual_seed(seed)) * scale


def experience_of() -> Experience:
    """Five ragged responses with old, reference and engine log-probs that all differ; behind them stands NaN."""
    rollouts = [
        rollout([5], [7] * n, index=i, reward=0.0, logprobs=[-1.5 - 0.1 * t for t in range(n)])
        for i, n in enumerate(LENGTHS)
    ]
    behind = torch.arange(max(LENGTHS)) >= torch.tensor(LENGTHS)[:, None]
    old, ref, entropies = (table_of(seed, 0.3).masked_fill(behind, math.nan) - 1.5 for seed in range(3))
    return Experience.of(rollouts, old, ref, entropies, "k3")


def loss_of(experience: Experience, config: AlgorithmConfig, batch: list[int], **more: Any) -> PolicyLoss:
    members = np.array(batch)
    aggregation = Aggregation(config.loss_aggregation, GlobalCounts.of(experience.mask[batch]), 8)
    advantages = torch.tensor(ADVANTAGES)[:, None] * experience.mask
    settings = {"weights": None, "is_on_policy": False, "kl_coefficient": 0.0, **more}
    return PolicyLoss.of(experience, advantages, batch=members, aggregation=aggregation, config=config, **settings)


@pytest.mark.parametrize("region", [None, [0.6, 1.4]])
@pytest.mark.parametrize("on_policy", [True, False])
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_micro_batches_of_any_width_and_order_add_up(
    aggregation: str, on_policy: bool, region: list[float] | None
) -> None:
    config = AlgorithmConfig(
        loss_aggregation=aggregation,  # type: ignore[arg-type]
        entropy_coefficient=0.1,
        kl_estimator="k3",
        trust_region=region,
    )
    experience = experience_of()
    batch = [0, 2, 3, 4]
    more = {"weights": experience.mask * 0.5, "is_on_policy": on_policy, "kl_coefficient": 0.2}
    loss = loss_of(experience, config, batch, **more)

    def run(*parts: list[int]) -> tuple[Tensor, Tensor, PolicyLossStats]:
        logprobs, entropies = table_of(7, 0.3)[batch] - 1.5, table_of(8)[batch]
        logprobs.requires_grad_(), entropies.requires_grad_()
        total, sums = torch.zeros(()), PolicyLossStats()
        for part in parts:
            width = max(LENGTHS[batch[i]] for i in part)
            share, stats = loss(logprobs[part, :width], entropies[part, :width], np.array(part))
            total, sums = total + share, sums + stats
        total.backward()
        assert logprobs.grad is not None and entropies.grad is not None
        return total.detach(), torch.cat([logprobs.grad, entropies.grad]), sums

    whole, gradient, stats = run([0, 1, 2, 3])
    parts, same, sums = run([3, 0], [2], [1])
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(same, gradient)
    assert gradient.abs().sum() > 0 and stats.loss == pytest.approx(whole.item(), rel=1e-6)
    assert sums.loss == pytest.approx(stats.loss, rel=1e-5) and sums.sum_mask == stats.sum_mask == 14
    assert sums.sum_outside == stats.sum_outside == (0 if region is None else 4)


def test_the_first_update_is_reinforce_and_a_later_one_is_clipped() -> None:
    experience = experience_of()
    old = experience.logprobs.nan_to_num()
    for aggregation in AGGREGATIONS:
        config = AlgorithmConfig(loss_aggregation=aggregation, clip_low=0.1, clip_high=0.3)  # type: ignore[arg-type]
        gradients = []
        for on_policy in (True, False):
            logprobs = old.clone().requires_grad_()
            loss_of(experience, config, [*range(5)], is_on_policy=on_policy)(logprobs, None, np.arange(5))[0].backward()
            gradients.append(logprobs.grad)
        torch.testing.assert_close(*gradients)
    logprobs = (old + 0.5).requires_grad_()
    loss, stats = loss_of(experience, AlgorithmConfig(clip_high=0.3), [*range(5)])(logprobs, None, np.arange(5))
    loss.backward()
    gain = math.exp(0.5)
    # Where the advantage is positive the ratio counts as 1.3 at most; where it is negative it counts in full.
    terms = [n * (-a * (1.3 if a > 0 else gain)) for n, a in zip(LENGTHS, ADVANTAGES, strict=True)]
    assert loss.item() == pytest.approx(sum(terms) / sum(LENGTHS), rel=1e-5)
    assert stats.clip_fraction == pytest.approx(10 / 15) and stats.mean_ratio == pytest.approx(gain, rel=1e-5)
    assert logprobs.grad is not None and [row.any().item() for row in logprobs.grad] == [a < 0 for a in ADVANTAGES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("policy")))


def trainer_of(folder: Path, **settings: Any) -> PolicyTrainer:
    config = PolicyConfig(model=str(folder), **{"learning_rate": 1e-3, "total_steps": 100, **settings})
    return PolicyTrainer(load_policy(config), config)


def some_rollouts() -> list[Rollout]:
    rng = np.random.default_rng(0)
    made = []
    for group in range(3):
        prompt = rng.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, 5 + group).tolist()
        for index in range(4):
            response = rng.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, rng.integers(1, 9)).tolist()
            made.append(rollout(prompt, response, group=group, index=index, reward=float(index % 2)))
    return made


def test_measuring_is_at_the_sampling_temperature_and_the_reference_is_the_start(folder: Path) -> None:
    metrics: dict[str, float] = {}
    rollouts = some_rollouts()
    experience = measure(trainer_of(folder), rollouts, 0.7, "k1", metrics)
    model = zoo.AutoModelForCausalLM.from_pretrained(folder).eval()
    for i, made in enumerate(rollouts):
        with torch.no_grad():
            logits = model(torch.from_numpy(made.tokens)[None]).logits[0] / 0.7
        own = torch.log_softmax(logits, -1)[torch.arange(len(made.tokens) - 1), made.tokens[1:]]
        got = experience.logprobs[i, : made.response_length]
        torch.testing.assert_close(got, own[made.prompt_length - 1 :], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(experience.logprobs, experience.ref_logprobs, atol=1e-5, rtol=0)
    assert metrics["kl"] == pytest.approx(0, abs=1e-4) and 0 < metrics["entropy"] < math.log(zoo.VOCAB_SIZE)


@pytest.mark.parametrize(("epochs", "size", "steps"), [(1, 64, 1), (2, 5, 6)])
def test_an_update_makes_good_responses_more_likely(folder: Path, epochs: int, size: int, steps: int) -> None:
    policy, rollouts = trainer_of(folder), some_rollouts()
    config = AlgorithmConfig(epochs=epochs, global_batch_size=size, entropy_coefficient=0.01)
    before = measure(policy, rollouts, 0.7, "k1", {})
    advantages = torch.tensor([1.0 if r.reward else -1.0 for r in rollouts])[:, None] * before.mask
    metrics: dict[str, float] = {}
    update(policy, before, advantages, config, SAMPLING, metrics)
    after = measure(policy, rollouts, 0.7, "k1", {})
    gains = ((after.logprobs - before.logprobs) * advantages).sum(-1)
    assert policy.step_count == steps and metrics["skipped_steps"] == 0
    assert gains.mean() > 0 and (gains > 0).float().mean() > 0.8
    torch.testing.assert_close(after.ref_logprobs, before.ref_logprobs)
    assert ("ratio" in metrics) == ("clip_fraction" in metrics) == (steps > 1)
    assert "importance_weight" not in metrics and metrics["grad_norm"] > 0


def test_each_update_is_the_clipped_loss_of_its_batch_at_the_sampling_temperature(folder: Path) -> None:
    config = AlgorithmConfig(global_batch_size=5, epochs=2, clip_low=0.01, clip_high=0.02)
    rollouts, ours, plain = some_rollouts(), trainer_of(folder), trainer_of(folder)
    experience = measure(ours, rollouts, SAMPLING.temperature, "k1", {})
    advantages = torch.linspace(-1, 2, len(rollouts))[:, None] * experience.mask
    metrics: dict[str, float] = {}
    update(ours, experience, advantages, config, SAMPLING, metrics)
    losses = []
    for batch in [range(4), range(4, 8), range(8, 12)] * 2:
        at = torch.tensor(batch)
        total = experience.mask[at].sum()

        def loss(
            logprobs: Tensor, _: object, members: np.ndarray, at: Tensor = at, total: Tensor = total
        ) -> tuple[Tensor, PolicyLossStats]:
            rows = at[members]
            cut = (rows, slice(None, logprobs.shape[1]))
            ratio = (logprobs - experience.logprobs[cut]).exp()
            worst = torch.maximum(-advantages[cut] * ratio, -advantages[cut] * ratio.clamp(0.99, 1.02))
            share = (worst * experience.mask[cut]).sum() / total
            return share, PolicyLossStats(sum_mask=1.0, loss=share.item())

        rows, lengths = [rollouts[i].tokens for i in batch], experience.prompt_lengths[list(batch)]
        losses.append(plain.step(rows, lengths, loss, temperature=0.7).stats.loss)
    for (name, weight), own in zip(ours.model.named_parameters(), plain.model.parameters(), strict=True):
        assert (weight - own).norm() <= 1e-5 * own.norm(), name
    assert metrics["loss"] == pytest.approx(np.mean(losses), abs=1e-5) and metrics["clip_fraction"] > 0.1


def test_engine_and_trainer_that_differ_are_weighed(folder: Path) -> None:
    policy, rollouts = trainer_of(folder, learning_rate=0.0), some_rollouts()
    for made in rollouts:  # which the engine says were less likely than the trainer does, by a factor of e or more
        made.logprobs = np.full(made.response_length, -30, np.float32)
    experience = measure(policy, rollouts, 0.7, "k1", {})
    for config, sampling, weight in (
        (AlgorithmConfig(importance_cap=1.5), SAMPLING, 1.5),
        (AlgorithmConfig(), RolloutConfig(max_new_tokens=8, temperature=0.7, engine="vllm"), 2.0),
    ):
        metrics: dict[str, float] = {}
        update(policy, experience, experience.mask, config, sampling, metrics)
        assert metrics["importance_weight"] == pytest.approx(weight)


def test_tokens_far_from_how_they_were_sampled_do_not_move_the_policy(folder: Path) -> None:
    rollouts, weights = some_rollouts(), []
    for made in rollouts:
        made.logprobs = np.full(made.response_length, -30, np.float32)  # so that each ratio is above 4
    for region in (None, [0.2, 4.0]):
        policy, metrics = trainer_of(folder, weight_decay=0.0), dict[str, float]()
        experience = measure(policy, rollouts, 0.7, "k1", {})
        config = AlgorithmConfig(epochs=2, trust_region=region)
        update(policy, experience, experience.mask, config, SAMPLING, metrics)
        weights.append([weight.detach().clone() for weight in policy.model.parameters()])
        assert metrics.get("outside_trust_region") == (None if region is None else 1.0)
    begun = list(trainer_of(folder).model.parameters())
    assert all(map(torch.equal, weights[1], begun)) and not any(map(torch.equal, weights[0], begun))
