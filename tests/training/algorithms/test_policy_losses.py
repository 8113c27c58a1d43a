"""The policy's losses against numbers worked out by hand and against loops over sequences in float64."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from guerdon.training.algorithms.advantages import ADVANTAGE_ESTIMATORS, estimate_advantages
from guerdon.training.algorithms.kl import kl_per_sequence, kl_per_token, penalised_rewards
from guerdon.training.algorithms.losses import (
    AGGREGATIONS,
    Aggregation,
    GlobalCounts,
    PolicyLossStats,
    outside_trust_region,
    ppo_loss,
    reinforce_loss,
    truncated_importance_weights,
)

NAN, INF = math.nan, math.inf


def t(*numbers: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def token_mean(num_tokens: float) -> Aggregation:
    return Aggregation("token-mean", GlobalCounts(num_tokens, 1.0))


# -logp * A: 1, 2, 3 in the first row, -8 in the second, nothing in the third.
LOGPROBS = ((-1.0, -2.0, -3.0), (NAN, -4.0, -INF), (NAN, NAN, INF))
ADVANTAGES = ((1.0, 1.0, 1.0), (INF, -2.0, NAN), (NAN, INF, -INF))
MASK = ((1.0, 1.0, 1.0), (0.0, 1.0, 0.0), (0.0, 0.0, 0.0))


@pytest.mark.parametrize(
    ("name", "expected", "gradient"),
    [
        # (1 + 2 + 3 - 8) / 4; gradients are -A / 4
        ("token-mean", -0.5, (-0.25, 0.5)),
        # (2 - 8) / 2; -A / 3 / 2 and -A / 1 / 2
        ("seq-mean-token-mean", -3.0, (-1 / 6, 1.0)),
        # (6 - 8) / 2
        ("seq-mean-token-sum", -1.0, (-0.5, 1.0)),
        # (6 - 8) / (2 * 5)
        ("dr_grpo", -0.2, (-0.1, 0.2)),
    ],
)
def test_reinforce_under_each_aggregation(name: str, expected: float, gradient: tuple[float, float]) -> None:
    logprobs, mask = t(*LOGPROBS).requires_grad_(), t(*MASK)
    counts = GlobalCounts.of(mask)
    assert counts == GlobalCounts(4.0, 2.0)  # a row without tokens is no sequence
    loss, stats = reinforce_loss(logprobs, t(*ADVANTAGES), mask, Aggregation(name, counts, max_length=5))
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(expected, abs=1e-6)
    long, short = gradient
    torch.testing.assert_close(logprobs.grad, t((long,) * 3, (0, short, 0), (0,) * 3), atol=1e-6, rtol=0)
    assert stats.loss == pytest.approx(expected, abs=1e-6)
    assert (stats.sum_mask, stats.clip_fraction, stats.mean_ratio, stats.approx_kl, stats.mean_weight) == (
        4,
        0,
        1,
        0,
        1,
    )


def test_masks_weigh() -> None:
    # 0.5 * 1 + 2 * 3 over 2.5, over the row's own 2.5, and over one row
    for name, expected in (("token-mean", 2.6), ("seq-mean-token-mean", 2.6), ("seq-mean-token-sum", 6.5)):
        mask = t((0.5, 2))
        loss, _ = reinforce_loss(t((-1, -3)), t((1, 1)), mask, Aggregation(name, GlobalCounts.of(mask)))
        assert loss.item() == pytest.approx(expected, abs=1e-6)


# For each token: ratio, advantage; -A * ratio against -A * clamp(ratio, 0.8, 1.2)
#   0: 1.5,  1: -1.5 against -1.2, clipped, so no gradient
#   1: 1.5, -1:  1.5 against  1.2, free: gradient -A * ratio = 1.5
#   2: 0.5,  2: -1.0 against -1.6, free: gradient -1
#   3: 0.5, -2:  1.0 against  1.6, clipped
#   4: 1.0,  3: -3 both ways, gradient -3
#   5: masked out
OLD = (-1.0, -2.0, -3.0, -0.5, -1.5, NAN)
RATIOS = (1.5, 1.5, 0.5, 0.5, 1.0, 1.0)
PPO_ADVANTAGES = (1.0, -1.0, 2.0, -2.0, 3.0, INF)
PPO_MASK = (1.0, 1.0, 1.0, 1.0, 1.0, 0.0)


def ppo_tensors() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    logprobs = t(OLD) + t(RATIOS).log()
    return logprobs.requires_grad_(), t(OLD), t(PPO_ADVANTAGES), t(PPO_MASK)


def test_ppo() -> None:
    logprobs, *rest = ppo_tensors()
    loss, stats = ppo_loss(logprobs, *rest, token_mean(6.0))
    loss.backward()
    # (-1.2 + 1.5 - 1 + 1.6 - 3) / 6
    assert loss.item() == pytest.approx(-0.35, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, t((0, 0.25, -1 / 6, 0, -0.5, 0)), atol=1e-6, rtol=0)
    assert (stats.sum_mask, stats.sum_clipped, stats.clip_fraction) == (5.0, 2.0, 0.4)
    assert stats.mean_ratio == pytest.approx(1.0, abs=1e-6)
    # k3 of old against new, ratio - 1 - ln(ratio): 0.09453489 and 0.19314718 twice each, over 5
    assert stats.approx_kl == pytest.approx(0.11507283, abs=1e-6)


def test_ppo_with_bounds_of_two_widths() -> None:
    logprobs, *rest = ppo_tensors()
    loss, stats = ppo_loss(logprobs, *rest, token_mean(6.0), clip_low=0.6, clip_high=0.3)
    loss.backward()
    # 0 is held at 1.3; 3 is free above 0.4: (-1.3 + 1.5 - 1 + 1 - 3) / 6 = -2.8 / 6
    assert loss.item() == pytest.approx(-7 / 15, abs=1e-6) and stats.sum_clipped == 1.0
    torch.testing.assert_close(logprobs.grad, t((0, 0.25, -1 / 6, 1 / 6, -0.5, 0)), atol=1e-6, rtol=0)
    # (-1.5 + 1.5 - 1 + 1 - 3) / 6
    loss, stats = ppo_loss(*ppo_tensors(), token_mean(6.0), clip_low=INF, clip_high=INF)
    assert loss.item() == pytest.approx(-0.5, abs=1e-6) and stats.sum_clipped == 0.0


def test_ratios_of_far_policies_are_finite() -> None:
    logprobs = t((-1, -200)).requires_grad_()
    loss, _ = ppo_loss(logprobs, t((-200, -1)), t((1, 1)), t((1, 1)), token_mean(1.0))
    loss.backward()
    # -1.2 - exp(-20)
    assert loss.item() == pytest.approx(-1.2, abs=1e-6) and logprobs.grad is not None
    assert logprobs.grad.isfinite().all()
    loss, _ = ppo_loss(t((-1,)), t((-200,)), t((-1,)), t((1,)), token_mean(1.0))
    assert loss.item() == pytest.approx(math.exp(20), rel=1e-6)


@given(st.integers(0, 2**31), st.sampled_from(AGGREGATIONS))
def test_the_first_step_of_ppo_is_that_of_reinforce(seed: int, name: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    old, advantages = (torch.randn(3, 4, generator=generator) for _ in range(2))
    mask = (torch.rand(3, 4, generator=generator) < 0.6).float()
    aggregation = Aggregation(name, GlobalCounts.of(mask), max_length=4)
    first, second = old.clone().requires_grad_(), old.clone().requires_grad_()
    ppo_loss(first, old, advantages, mask, aggregation)[0].backward()
    reinforce_loss(second, advantages, mask, aggregation)[0].backward()
    torch.testing.assert_close(first.grad, second.grad)


def test_truncated_importance_weights() -> None:
    # exp(old - engine) = 1.5, 4, 0.25; an engine that thinks a token impossible, or certain that we do
    old = t((-1, -1, -3, -1, -INF, NAN))
    engine = t((-1 - math.log(1.5), -1 - math.log(4), -3 + math.log(4), -INF, -1, NAN))
    mask = t((1, 1, 1, 1, 1, 0))
    weights = truncated_importance_weights(old.requires_grad_(), engine, mask)
    torch.testing.assert_close(weights, t((1.5, 2, 0.25, 2, 0, 0)), atol=1e-6, rtol=0)
    assert not weights.requires_grad
    assert truncated_importance_weights(old, engine, mask, cap=3.0)[0, 1].item() == 3.0
    for cap in (0.0, -1.0, NAN):
        with pytest.raises(ValueError, match="cap must be above 0"):
            truncated_importance_weights(old, engine, mask, cap)


def test_the_trust_region_is_of_the_current_policy_against_the_engine() -> None:
    # exp(logp - engine) = 0.25, 0.15, 3.5, 4.5; then an engine that thought the token impossible, NaN, nothing
    logprobs = t((-2, -2, -1, -1, -1, NAN, NAN))
    engine = logprobs - t((math.log(0.25), math.log(0.15), math.log(3.5), math.log(4.5), INF, 0, 0))
    mask = t((1, 1, 1, 1, 1, 1, 0))
    found = outside_trust_region(logprobs.requires_grad_(), engine, mask, 0.2, 4.0)
    assert found.tolist() == [[False, True, False, True, True, True, False]]
    # Both ends belong to the region; a ratio of 0 does not reach 0, so that 0 bounds nothing.
    ends = t((math.log(0.5), math.log(2.0), -INF)), t((0, 0, 0)), t((1, 1, 1))
    assert outside_trust_region(*ends, 0.5, 2.0).tolist() == [[False, False, True]]
    assert outside_trust_region(*ends, 0.0, 2.0).tolist() == [[False, False, False]]
    for low, high in ((1.0, 4.0), (0.2, 1.0), (-0.1, 4.0), (4.0, 0.2), (NAN, 4.0), (0.2, NAN)):
        with pytest.raises(ValueError, match="must hold 1"):
            outside_trust_region(logprobs, engine, mask, low, high)


def test_tokens_outside_of_the_trust_region_have_no_gradient_but_count() -> None:
    is_outside = torch.tensor([[False, True, False, True, False, True]])
    logprobs, *rest = ppo_tensors()
    loss, stats = ppo_loss(logprobs, *rest, token_mean(6.0), is_outside=is_outside)
    loss.backward()
    # Of (-1.2 + 1.5 - 1 + 1.6 - 3) / 6 the second and the fourth term are missing; the sixth is masked anyway.
    assert loss.item() == pytest.approx(-5.2 / 6, abs=1e-6) and logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, t((0, 0, -1 / 6, 0, -0.5, 0)), atol=1e-6, rtol=0)
    assert (stats.sum_outside, stats.outside_fraction, stats.sum_mask) == (2.0, 0.4, 5.0)
    logprobs, entropies = t((-1, -3)).requires_grad_(), t((1, 3)).requires_grad_()
    loss, stats = reinforce_loss(
        *(logprobs, t((2, 1)), t((1, 1)), token_mean(2.0)),
        weights=t((0.5, 2)),
        is_outside=torch.tensor([[False, True]]),
        entropies=entropies,
        entropy_coefficient=0.25,
    )
    loss.backward()
    # (0.5 * 1 * 2 - 0.25 * 1 - 0.25 * 3) / 2: the bonus stays
    assert loss.item() == 0.0 and stats.outside_fraction == 0.5
    assert logprobs.grad is not None and logprobs.grad.tolist() == [[-0.5, 0.0]]
    assert entropies.grad is not None and entropies.grad.tolist() == [[-0.125, -0.125]]
    assert reinforce_loss(t((-1,)), t((1,)), t((1,)), token_mean(1.0))[1].outside_fraction == 0.0


def test_weights_scale_each_token_and_gradients_go_to_the_policy_alone() -> None:
    logprobs, old, advantages, mask = ppo_tensors()
    weights = t((2, 0.5, 2, 0.25, 1, INF)).requires_grad_()
    old.requires_grad_(), advantages.requires_grad_()
    loss, stats = ppo_loss(logprobs, old, advantages, mask, token_mean(5.0), weights=weights)
    loss.backward()
    # (2 * -1.2 + 0.5 * 1.5 + 2 * -1 + 0.25 * 1.6 - 3) / 5
    assert loss.item() == pytest.approx(-1.25, abs=1e-6) and stats.mean_weight == pytest.approx(1.15)
    torch.testing.assert_close(logprobs.grad, t((0, 0.15, -0.4, 0, -0.6, 0)), atol=1e-6, rtol=0)
    assert weights.grad is None and old.grad is None and advantages.grad is None
    logprobs = t((-1, -3)).requires_grad_()
    loss, _ = reinforce_loss(logprobs, t((2, 1)).requires_grad_(), t((1, 1)), token_mean(2.0), weights=t((0.5, 2)))
    loss.backward()
    # (0.5 * 1 * 2 + 2 * 3 * 1) / 2
    assert loss.item() == 3.5 and logprobs.grad is not None and logprobs.grad.tolist() == [[-0.5, -1.0]]


def test_the_entropy_bonus() -> None:
    entropies = t((1, 3, NAN)).requires_grad_()
    tensors = t((-1, -2, NAN)), t((1, 1, INF)), t((1, 1, 0))
    loss, stats = reinforce_loss(*tensors, token_mean(2.0), entropies=entropies, entropy_coefficient=0.25)
    loss.backward()
    # ((1 - 0.25 * 1) + (2 - 0.25 * 3)) / 2; weights do not touch the bonus
    assert loss.item() == stats.loss == 1.0
    assert entropies.grad is not None and entropies.grad.tolist() == [[-0.125, -0.125, 0.0]]
    loss, _ = ppo_loss(
        *(tensors[0], tensors[0], *tensors[1:]),
        token_mean(2.0),
        weights=t((2, 2, 2)),
        entropies=entropies,
        entropy_coefficient=0.25,
    )
    # ((-2 - 0.25) + (-2 - 0.75)) / 2
    assert loss.item() == -2.5
    # Without a coefficient entropies are not read.
    loss, _ = reinforce_loss(*tensors, token_mean(2.0), entropies=t((INF, 1, 1)))
    assert loss.item() == 1.5


LOSSES: dict[str, Callable[..., tuple[Tensor, PolicyLossStats]]] = {
    "reinforce": lambda logprobs, old, *rest, **extras: reinforce_loss(logprobs, *rest, **extras),
    "ppo": partial(ppo_loss, clip_low=0.1, clip_high=0.3),
}


def naive_token(loss: str, logp: Tensor, old: Tensor, a: Tensor, w: Tensor, h: Tensor) -> Tensor:
    if loss == "reinforce":
        return -w * logp * a - 0.1 * h
    ratio = torch.exp(logp - old)
    return -w * torch.min(a * ratio, a * torch.clamp(ratio, 0.9, 1.3)) - 0.1 * h


@settings(max_examples=150)
@given(
    st.integers(0, 2**31),
    st.sampled_from(AGGREGATIONS),
    st.sampled_from(sorted(LOSSES)),
    st.sampled_from([NAN, INF, -INF]),
    st.integers(0, 5),
)
def test_micro_batches_add_up_to_a_loop_over_sequences(
    seed: int, name: str, loss: str, poison: float, cut: int
) -> None:
    """Loss and gradients, with rows of any length, none included, and rubbish wherever the mask is 0."""
    generator = torch.Generator().manual_seed(seed)
    clean = [torch.randn(5, 4, generator=generator) for _ in range(5)]
    clean[3] = clean[3].abs()  # weights
    starts = torch.randint(0, 4, (5, 1), generator=generator)
    lengths = torch.randint(0, 5, (5, 1), generator=generator)
    places = torch.arange(4)
    mask = ((places >= starts) & (places < starts + lengths)).float()

    naive = [x.double() for x in clean]
    naive[0].requires_grad_(), naive[4].requires_grad_()
    rows = [[naive_token(loss, *(x[i, j] for x in naive)) for j in range(4) if mask[i, j]] for i in range(5)]
    rows = [row for row in rows if row]
    one_each = {
        "token-mean": lambda row: sum(row) / sum(map(len, rows)),
        "seq-mean-token-mean": lambda row: sum(row) / len(row) / len(rows),
        "seq-mean-token-sum": lambda row: sum(row) / len(rows),
        "dr_grpo": lambda row: sum(row) / (len(rows) * 7),
    }[name]
    expected = sum((one_each(row) for row in rows), naive[0].sum() * 0 + naive[4].sum() * 0)
    expected.backward()

    poisoned = [x.masked_fill(mask == 0, poison) for x in clean]
    poisoned[0].requires_grad_(), poisoned[4].requires_grad_()
    parts = [slice(0, cut), slice(cut, 5)]
    counts = sum((GlobalCounts.of(mask[part]) for part in parts), GlobalCounts())
    assert counts == GlobalCounts.of(mask)
    aggregation, total, stats = Aggregation(name, counts, max_length=7), 0.0, PolicyLossStats()
    for part in parts:
        logprobs, old, advantages, weights, entropies = (x[part] for x in poisoned)
        share, sums = LOSSES[loss](
            *(logprobs, old, advantages, mask[part], aggregation),
            weights=weights,
            entropies=entropies,
            entropy_coefficient=0.1,
        )
        share.backward()
        total, stats = total + share.item(), stats + sums
    assert total == pytest.approx(expected.item(), rel=1e-5, abs=1e-5)
    assert stats.loss == pytest.approx(total, abs=1e-6) and stats.sum_mask == mask.sum().item()
    assert all(math.isfinite(x) for x in (stats.clip_fraction, stats.approx_kl, stats.mean_weight))
    for ours, reference in ((poisoned[0], naive[0]), (poisoned[4], naive[4])):
        assert ours.grad is not None and reference.grad is not None
        torch.testing.assert_close(ours.grad, reference.grad.float(), rtol=1e-5, atol=1e-6)


def test_means_of_micro_batch_means_are_not_the_mean() -> None:
    # Losses 1, 2, 3 and 8: their mean is 3.5; that of the micro-batches' means is (2 + 8) / 2.
    mask, ones = t((1, 1, 1), (1, 0, 0)), torch.ones(2, 3)
    logprobs, aggregation = -t((1, 2, 3), (8, NAN, NAN)), token_mean(4.0)
    shares = [reinforce_loss(logprobs[i : i + 1], ones[:1], mask[i : i + 1], aggregation)[0].item() for i in (0, 1)]
    assert shares == [1.5, 2.0] and sum(shares) == 3.5


@pytest.mark.parametrize("name", AGGREGATIONS)
def test_a_micro_batch_without_tokens_has_loss_0_and_no_gradient(name: str) -> None:
    logprobs = torch.full((2, 3), NAN).requires_grad_()
    mask = torch.zeros(2, 3)
    for loss in LOSSES.values():
        value, stats = loss(
            *(logprobs, logprobs.detach(), logprobs.detach(), mask), Aggregation(name, GlobalCounts.of(mask), 3)
        )
        value.backward()
        assert value.item() == 0.0 and stats == PolicyLossStats() and stats.mean_ratio == 0.0
    assert logprobs.grad is not None and not logprobs.grad.any()


def learn(estimator: str, cuts: tuple[int, ...] = ()) -> tuple[float, Tensor]:
    """From rewards to the gradient of one step, over ranks that hold the rows between the cuts."""
    generator = torch.Generator().manual_seed(1)
    logprobs, reference = (-torch.rand(6, 6, generator=generator) for _ in range(2))
    mask = t(*(tuple(float(i < n) for i in range(6)) for n in (6, 2, 4, 1, 5, 3)))
    groups = torch.tensor([0, 1, 0, 1, 0, 1])
    kl = kl_per_sequence(kl_per_token(logprobs, reference, mask, "k1"), mask)
    advantages, _ = estimate_advantages(estimator, penalised_rewards(t(1, 2, 4, 5, 7, -1), kl, 0.1), groups, mask)
    logprobs.requires_grad_()
    aggregation, total = token_mean(GlobalCounts.of(mask).num_tokens), 0.0
    for start, stop in zip((0, *cuts), (*cuts, 6), strict=True):
        part = slice(start, stop)
        loss, _ = reinforce_loss(logprobs[part], advantages[part], mask[part], aggregation)
        loss.backward()
        total += loss.item()
    assert logprobs.grad is not None
    return total, logprobs.grad


@pytest.mark.parametrize("estimator", ADVANTAGE_ESTIMATORS)
def test_advantages_of_the_whole_batch_and_then_shards_equal_one_rank(estimator: str) -> None:
    loss, gradient = learn(estimator)
    sharded, sharded_gradient = learn(estimator, cuts=(1, 2, 5))
    assert sharded == pytest.approx(loss, abs=1e-6)
    torch.testing.assert_close(sharded_gradient, gradient, atol=1e-7, rtol=1e-5)


def test_a_kl_loss_is_an_aggregation_of_estimates() -> None:
    logprobs = t((-1, -1), (-1, NAN)).requires_grad_()
    mask = t((1, 1), (1, 0))
    kl = kl_per_token(logprobs, t((-2, -4), (0, INF)), mask, "k2")
    loss = Aggregation("token-mean", GlobalCounts.of(mask))(kl, mask)
    loss.backward()
    # x = 1, 3, -1: (0.5 + 4.5 + 0.5) / 3, gradients x / 3
    assert loss.item() == pytest.approx(5.5 / 3, abs=1e-6)
    torch.testing.assert_close(logprobs.grad, t((1 / 3, 1), (-1 / 3, 0)), atol=1e-6, rtol=0)


def test_counts_and_names_that_do_not_fit_are_refused() -> None:
    known = "token-mean, seq-mean-token-mean, seq-mean-token-sum, dr_grpo"
    with pytest.raises(ValueError, match=f"unknown loss aggregation 'mean'; known are {known}"):
        Aggregation("mean", GlobalCounts())
    for max_length in (None, 0, -1):
        with pytest.raises(ValueError, match=f"max_length, which must be above 0, not {max_length}"):
            Aggregation("dr_grpo", GlobalCounts(), max_length)
    with pytest.raises(ValueError, match=r"mask is \[2\]: all must be \[B, T\]"):
        GlobalCounts.of(t(1, 1))


def test_shapes_dtypes_and_settings_that_do_not_fit_are_refused() -> None:
    # B is T: one advantage a sequence would broadcast over the wrong axis.
    x, row, a = torch.ones(2, 2), torch.ones(2), token_mean(4.0)
    for call, reason in (
        (lambda: reinforce_loss(x, row, x, a), r"advantages is \[2\], logprobs are \[2, 2\]"),
        (lambda: reinforce_loss(row, row, row, a), r"logprobs is \[2\]: all must be \[B, T\]"),
        (lambda: reinforce_loss(x.bfloat16(), x, x, a), "logprobs must be float32, not bfloat16"),
        (lambda: reinforce_loss(x, x, x.bool(), a), "mask must be float32, not bool"),
        (lambda: reinforce_loss(x, x, x, a, weights=row), r"weights is \[2\]"),
        (lambda: reinforce_loss(x, x, x, a, entropies=row, entropy_coefficient=0.1), r"entropies is \[2\]"),
        (
            lambda: reinforce_loss(x, x, x, a, entropy_coefficient=0.1),
            "entropies are needed because entropy_coefficient",
        ),
        (lambda: reinforce_loss(x, x, x, a, entropy_coefficient=NAN), "entropy_coefficient must be finite"),
        (lambda: ppo_loss(x, row, x, x, a), r"old_logprobs is \[2\]"),
        (lambda: ppo_loss(x, x, row, x, a), r"advantages is \[2\]"),
        (lambda: ppo_loss(x, x, x, row, a), r"mask is \[2\]"),
        (lambda: ppo_loss(x, x, x, x, a, clip_low=0.0), "clip_low must be above 0"),
        (lambda: ppo_loss(x, x, x, x, a, clip_high=NAN), "clip_high must be above 0"),
        (lambda: ppo_loss(x, x, x, x, a, weights=x.double()), "weights must be float32"),
        (lambda: a(x, row), r"mask is \[2\], losses are \[2, 2\]"),
        (lambda: truncated_importance_weights(x, row, x), r"engine_logprobs is \[2\]"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
