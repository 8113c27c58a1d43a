"""Log-probs, and the gradients of every loss, against plain padded transformers with the formulas written out."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from policies import PlainPolicy, at_responses, build, caught_gradients, rollouts

import zoo
from guerdon.engine import logprobs
from guerdon.training.algorithms.advantages import estimate_advantages
from guerdon.training.algorithms.losses import Aggregation, GlobalCounts, ppo_loss, reinforce_loss
from guerdon.training.policy_trainer import Loss, PolicyTrainer
from tiers import of_each_kind, slow_but

LOSSES = ("reinforce", "rloo", "grpo", "ppo")
ROWS, PROMPTS, GROUPS = rollouts()
NOISE = np.random.default_rng(5)
REWARDS = NOISE.standard_normal(len(ROWS)).astype(np.float32)
WIDTH = max(len(row) - start for row, start in zip(ROWS, PROMPTS, strict=True))
TOKEN_ADVANTAGES = NOISE.standard_normal((len(ROWS), WIDTH)).astype(np.float32)
DRIFT = (0.3 * NOISE.standard_normal((len(ROWS), WIDTH))).astype(np.float32)
"""The policy's log-probs minus the old ones: some ratios are clipped, some are not."""


# ------------------------------------------------------------------------------------------- the formulas, by hand


def baselines(name: str) -> np.ndarray:
    """The advantage of each row, by loops over its group."""
    made = []
    for i, group in enumerate(GROUPS):
        others = [REWARDS[j] for j in np.flatnonzero(group == GROUPS) if j != i]
        members = REWARDS[group == GROUPS]
        made.append(
            {
                "reinforce": REWARDS[i],
                "rloo": REWARDS[i] - np.mean(others),
                "grpo": (REWARDS[i] - members.mean()) / (members.std(ddof=1) + 1e-4),
            }[name]
        )
    return np.array(made)


def plain_loss(name: str, plain: PlainPolicy, temperature: float) -> torch.Tensor:
    """The loss of the whole batch over `[B,S-1]`, each token's term by itself."""
    logprobs, _, mask = plain.logprobs(ROWS, PROMPTS, temperature)
    total, count = torch.zeros((), dtype=plain.dtype), mask.sum()
    rows = zip(ROWS, PROMPTS, strict=True)
    for i, (row, start) in enumerate(rows):
        own = logprobs[i, start - 1 : len(row) - 1]
        if name == "ppo":
            advantages = torch.from_numpy(TOKEN_ADVANTAGES[i, : len(own)]).to(plain.dtype)
            ratio = torch.exp(own - own.detach() + torch.from_numpy(DRIFT[i, : len(own)]).to(plain.dtype))
            terms = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(0.8, 1.3))
        else:
            terms = -own * float(baselines(name)[i])
        total = total + (terms.mean() / len(ROWS) if name == "grpo" else terms.sum() / count)
    return total


def own_loss(name: str, trainer: PolicyTrainer, temperature: float) -> Loss:
    """The same by the functions that the loops call."""
    own = trainer.logprobs(ROWS, PROMPTS, temperature).logprobs
    old = own - torch.from_numpy(DRIFT)
    lengths = torch.tensor([len(row) for row in ROWS]) - torch.from_numpy(PROMPTS)
    mask = (torch.arange(WIDTH) < lengths[:, None]).float()
    aggregation = Aggregation("seq-mean-token-mean" if name == "grpo" else "token-mean", GlobalCounts.of(mask))
    estimator = {"reinforce": "none"}.get(name, name)
    if name == "ppo":
        advantages = torch.from_numpy(TOKEN_ADVANTAGES)
    else:
        groups = torch.from_numpy(GROUPS)
        advantages, _ = estimate_advantages(estimator, torch.from_numpy(REWARDS), groups, mask)

    def loss(logprobs: torch.Tensor, _: Any, members: np.ndarray) -> Any:
        if name != "ppo":
            return reinforce_loss(logprobs, advantages[members], mask[members], aggregation)
        some = (old[members], advantages[members], mask[members])
        return ppo_loss(logprobs, *some, aggregation, clip_low=0.2, clip_high=0.3)

    return loss


class Pairs:
    """Policies by architecture, each with its plain model: made once, as they were made for each test."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._made: dict[str, tuple[PolicyTrainer, PlainPolicy]] = {}

    def __call__(self, name: str) -> tuple[PolicyTrainer, PlainPolicy]:
        if name not in self._made:
            folder = zoo.language_model(name, self._folder / name)
            self._made[name] = build(folder, keeps_reference=False), PlainPolicy(folder)
        trainer, plain = self._made[name]
        named = dict(trainer.model.named_parameters())
        with torch.no_grad():
            for parameter_name, parameter in plain.model.named_parameters():
                named[parameter_name].copy_(parameter)
        return trainer, plain


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Pairs:
    return Pairs(tmp_path_factory.mktemp("models"))


def assert_same_gradients(trainer: PolicyTrainer, plain: PlainPolicy, name: str, temperature: float) -> None:
    caught = caught_gradients(trainer)
    report = trainer.step(ROWS, PROMPTS, own_loss(name, trainer, temperature), temperature=temperature)
    loss = plain_loss(name, plain, temperature)
    want = plain.gradients(loss)
    assert report.stats.loss == pytest.approx(loss.item(), rel=1e-5, abs=1e-6)
    norm = torch.stack([g.norm() for g in want.values()]).norm().item()
    assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    if name == "ppo":
        assert 0.02 < report.stats.clip_fraction < 0.5
    assert_close(caught, want)


def assert_close(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    """Asserts equality within 1e-5 of each tensor's norm."""
    assert got.keys() == want.keys()
    # A key's bias moves all logits of a query alike: its true gradient is 0, and what is there is rounding.
    least = 1e-2 * max(gradient.norm().item() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).norm().item() <= 1e-5 * max(gradient.norm().item(), least), name


# ------------------------------------------------------------------------------------------- tests


@pytest.mark.parametrize("name", of_each_kind([*zoo.DECODERS, *zoo.LANGUAGE_MODELS]))
def test_every_architecture_has_the_log_probs_of_plain_transformers(name: str, pairs: Pairs) -> None:
    trainer, plain = pairs(name)
    assert trainer.engine.path == zoo.PATHS[name], trainer.engine.info.why
    for temperature in (1.0, 0.7):
        with torch.no_grad():
            logprobs, entropies, _ = plain.logprobs(ROWS, PROMPTS, temperature)
        got = trainer.logprobs(ROWS, PROMPTS, temperature, with_entropies=True)
        for table, want in ((got.logprobs, logprobs), (got.entropies, entropies)):
            assert table.dtype == torch.float32
            torch.testing.assert_close(table, at_responses(want, ROWS, PROMPTS), rtol=1e-5, atol=1e-5)
    assert torch.equal(trainer.logprobs(ROWS, PROMPTS, temperature).logprobs, got.logprobs)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize(
    "name", slow_but(("llama", "gpt2"), ("llama", "gpt2", "gemma2", "qwen3", "opt", "mixtral", "mamba"))
)
def test_gradients_equal_those_of_plain_padded_transformers(name: str, loss: str, pairs: Pairs) -> None:
    assert_same_gradients(*pairs(name), loss, 1.0)


@pytest.mark.parametrize(
    "name", slow_but(("gemma3", "llama4"), [*zoo.LANGUAGE_MODELS, "phi3", "gpt-neox", "gemma3", "llama4", "gpt-oss"])
)
def test_gradients_of_other_heads_and_attentions_equal_those_of_plain_transformers(name: str, pairs: Pairs) -> None:
    assert_same_gradients(*pairs(name), "rloo", 1.0)


@pytest.mark.parametrize("temperature", [0.6, 1.7])
@pytest.mark.parametrize("loss", ["rloo", "ppo"])
def test_gradients_at_another_temperature(loss: str, temperature: float, pairs: Pairs) -> None:
    assert_same_gradients(*pairs("gemma2"), loss, temperature)


@pytest.mark.parametrize("path", ["packed+shared", "packed", "padded", "single"])
def test_gradients_by_every_path(path: str, pairs: Pairs) -> None:
    trainer, plain = pairs("qwen2")
    before = trainer.engine.path
    try:
        trainer.engine.path = path
        trainer.engine.use(path)
        assert_same_gradients(trainer, plain, "rloo", 1.0)
    finally:
        trainer.engine.path = before
        trainer.engine.use(before)


@pytest.mark.parametrize("settings", [{"activation_checkpointing": True}, {"max_batch_tokens": 30}], ids=str)
def test_gradients_with_settings_that_must_not_matter(settings: dict[str, Any], pairs: Pairs, tmp_path: Path) -> None:
    trainer = build(zoo.language_model("llama", tmp_path), keeps_reference=False, **settings)
    assert_same_gradients(trainer, pairs("llama")[1], "rloo", 1.0)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_logits_in_parts_are_the_same_and_computed_again(
    name: str, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, plain = pairs(name)
    want = trainer.logprobs(ROWS, PROMPTS, 0.7, with_entropies=True)
    sizes: list[int] = []
    head = trainer.engine.head
    monkeypatch.setattr(trainer.engine, "head", lambda hidden: (sizes.append(len(hidden)), head(hidden))[1])
    monkeypatch.setattr(logprobs, "TABLE", 7 * zoo.VOCAB_SIZE)
    got = trainer.logprobs(ROWS, PROMPTS, 0.7, with_entropies=True)
    torch.testing.assert_close(got.logprobs, want.logprobs, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.entropies, want.entropies, rtol=1e-6, atol=1e-6)
    # No more tokens at once than the table holds, each once forward, and twice for a gradient.
    num_tokens = sum(map(len, ROWS)) - PROMPTS.sum()
    assert max(sizes) == 7 and sum(sizes) == num_tokens
    sizes.clear()
    assert_same_gradients(trainer, plain, "ppo", 0.7)
    assert max(sizes) == 7 and sum(sizes) == 3 * num_tokens  # once more for the old log-probs


def test_activations_computed_twice_are_computed_twice(tmp_path: Path) -> None:
    trainer = build(zoo.language_model("llama", tmp_path), keeps_reference=False, activation_checkpointing=True)
    calls: list[int] = []
    trainer.engine.trunk.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    loss = own_loss("rloo", trainer, 1.0)
    calls.clear()
    report = trainer.step(ROWS, PROMPTS, loss)
    assert len(calls) == 2 * report.num_micro_batches


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_that_depends_on_the_length_has_that_of_the_whole_row(kind: str, tmp_path: Path) -> None:
    """The last token of some rows is the first beyond the length at which the frequencies change."""
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0}
    if kind == "longrope":
        rope |= {"long_factor": [4.0] * 4, "short_factor": [1.0] * 4, "original_max_position_embeddings": 48}
        folder = zoo.language_model("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=48)
    else:
        rope |= {"factor": 2.0}
        folder = zoo.language_model("llama", tmp_path, rope_parameters=rope, max_position_embeddings=48)
    rows = [row[:49] for row in ROWS if len(row) > 49] + [row[:48] for row in ROWS if len(row) > 48]
    prompts = np.full(len(rows), 40)
    got = build(folder, keeps_reference=False, max_length=256).logprobs(rows, prompts).logprobs
    for i, row in enumerate(rows):
        with torch.no_grad():  # a model of its own for each: a dynamic embedding remembers the longest row
            want, _, _ = PlainPolicy(folder).logprobs([row], prompts[:1])
        torch.testing.assert_close(got[i, : len(row) - 40], want[0, 39:], rtol=1e-5, atol=1e-5)


def test_gradients_of_the_entropy(pairs: Pairs) -> None:
    trainer, plain = pairs("llama")
    lengths = torch.tensor([len(row) for row in ROWS]) - torch.from_numpy(PROMPTS)
    mask = (torch.arange(WIDTH) < lengths[:, None]).float()
    aggregation, zeros = Aggregation("token-mean", GlobalCounts.of(mask)), torch.zeros_like(mask)

    def loss(logprobs: torch.Tensor, entropies: torch.Tensor | None, members: np.ndarray) -> Any:
        some = (logprobs, zeros[members], mask[members], aggregation)
        return reinforce_loss(*some, entropies=entropies, entropy_coefficient=0.5)

    caught = caught_gradients(trainer)
    report = trainer.step(ROWS, PROMPTS, loss, temperature=0.8, with_entropies=True)
    _, entropies, plain_mask = plain.logprobs(ROWS, PROMPTS, 0.8)
    mean = (entropies * plain_mask).sum() / plain_mask.sum()
    want = plain.gradients(-0.5 * mean)
    assert report.stats.loss == pytest.approx(-0.5 * mean.item(), rel=1e-5)
    assert_close(caught, want)
