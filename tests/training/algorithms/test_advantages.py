"""Baselines and whitening against numbers worked out by hand, and what failed or unfinished samples may change."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guerdon.training.algorithms.advantages import (
    ADVANTAGE_ESTIMATORS,
    RunningMean,
    estimate_advantages,
    group_mean,
    rloo,
    whiten,
)
from guerdon.training.algorithms.advantages import (
    MaskedMoments as Moments,
)


def t(*numbers: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers)


def bools(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.bool)


# Group 7 has the rewards 1, 2, 6, group -3 has 5, 9, interleaved.
REWARDS = (1.0, 5.0, 2.0, 9.0, 6.0)
GROUPS = (7, -3, 7, -3, 7)


def test_rloo() -> None:
    # Group 7: 1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2; group -3: 5 - 9, 9 - 5
    advantages = rloo(t(*REWARDS), ids(*GROUPS), bools(1, 1, 1, 1, 1))
    assert advantages.tolist() == [-3.0, -4.0, -1.5, 4.0, 4.5]


def test_rloo_leaves_out_what_did_not_end_from_sum_and_divisor() -> None:
    # Without the 6, the others of 1 and 2 are one, not two: 1 - 2 / 1, 2 - 1 / 1. Without the 9, the 5 is alone.
    advantages = rloo(t(*REWARDS), ids(*GROUPS), bools(1, 1, 1, 0, 0))
    assert advantages.tolist() == [-1.0, 0.0, 1.0, 0.0, 0.0]
    # With nobody else, and with nobody at all
    assert rloo(t(1, 2), ids(0, 1), bools(1, 1)).tolist() == [0.0, 0.0]
    assert rloo(t(1, 2), ids(0, 0), bools(0, 0)).tolist() == [0.0, 0.0]


def test_grpo_and_dr_grpo() -> None:
    args = t(*REWARDS), ids(*GROUPS), bools(1, 1, 1, 1, 1)
    # Means 3 and 7
    assert group_mean(*args, scale_by_std=False).tolist() == [-2.0, -2.0, -1.0, 2.0, 3.0]
    # Variances (4 + 1 + 9) / 2 = 7 and (4 + 4) / 1 = 8; std + 1e-4 = 2.64585131 and 2.82852712
    expected = t(-0.75590037, -0.70708178, -0.37795018, 0.70708178, 1.13385055)
    torch.testing.assert_close(group_mean(*args, scale_by_std=True), expected, atol=1e-6, rtol=0)


def test_the_epsilon_is_beside_the_standard_deviation() -> None:
    # 0 and 2e-4: mean 1e-4, std sqrt(2) * 1e-4; 1e-4 / (1.41421356e-4 + 1e-4) = 1 / 2.41421356
    advantages = group_mean(t(0, 2e-4), ids(0, 0), bools(1, 1), scale_by_std=True)
    torch.testing.assert_close(advantages, t(-0.41421356, 0.41421356), atol=1e-6, rtol=0)
    # Rewards that are all one number teach nothing.
    assert group_mean(t(3, 3, 3), ids(0, 0, 0), bools(1, 1, 1), scale_by_std=True).tolist() == [0.0, 0.0, 0.0]


def test_group_means_are_over_what_counts() -> None:
    # 1 and 2 without the 6: mean 1.5, variance 0.5 / 1, so 0.5 / (0.70710678 + 1e-4); 5 is alone
    args = t(*REWARDS), ids(*GROUPS), bools(1, 1, 1, 0, 0)
    assert group_mean(*args, scale_by_std=False).tolist() == [-0.5, 0.0, 0.5, 0.0, 0.0]
    expected = t(-0.70700680, 0.0, 0.70700680, 0.0, 0.0)
    torch.testing.assert_close(group_mean(*args, scale_by_std=True), expected, atol=1e-6, rtol=0)


NONE_YET = RunningMean()
MASK = ((0.0, 1.0, 1.0), (1.0, 0.0, 0.0), (1.0, 1.0, 1.0))


def estimated(
    name: str, rewards: Tensor, is_end: Tensor | None = None, running: RunningMean = NONE_YET
) -> tuple[list[list[float]], RunningMean]:
    advantages, running = estimate_advantages(name, rewards, ids(0, 0, 0), t(*MASK), is_end=is_end, running=running)
    assert advantages.dtype == torch.float32 and advantages.shape == (3, 3)
    return advantages.tolist(), running


def rows(first: float, second: float, third: float) -> list[list[float]]:
    return [[0, first, first], [second, 0, 0], [third, third, third]]


def test_estimators_by_name_give_every_token_its_sequences_advantage() -> None:
    # B is T here: a product of [B, T] and [B] would run, and give each column an advantage.
    rewards, all_three = t(1, 2, 6), bools(1, 1, 1)
    assert estimated("rloo", rewards) == estimated("rloo", rewards, all_three)
    assert estimated("none", rewards, all_three) == (rows(1, 2, 6), RunningMean())
    assert estimated("rloo", rewards, all_three) == (rows(-3, -1.5, 4.5), RunningMean())
    assert estimated("dr_grpo", rewards, all_three) == (rows(-2, -1, 3), RunningMean())
    grpo, _ = estimated("grpo", rewards, all_three)
    assert grpo[2] == pytest.approx([1.13385055] * 3, abs=1e-6) and grpo[0][0] == 0.0


def test_the_running_mean_knows_earlier_rewards_only() -> None:
    advantages, running = estimated("mean", t(1, 2, 6), bools(1, 1, 1))
    assert advantages == rows(1, 2, 6) and running == RunningMean(9.0, 3.0)
    # What does not count moves nothing: the mean of 1, 2, 6 is 3, that of 1, 2, 6, 5, 4 is 3.6.
    advantages, following = estimated("mean", t(5, math.nan, 4), bools(1, 0, 1), running=running)
    assert advantages == rows(2, 0, 1) and following == RunningMean(18.0, 5.0) and following.mean == 3.6
    assert running == RunningMean(9.0, 3.0) and RunningMean().mean == 0.0
    assert estimated("mean", t(5, 5, 5), bools(0, 0, 0), running=running) == (rows(0, 0, 0), running)


def test_reinforce_plus_plus_whitens_over_all_tokens() -> None:
    # Six tokens: 1, 1; 2; 6, 6, 6. Mean 22 / 6, mean square 114 / 6, variance 19 - 484 / 36 = 50 / 9: sqrt 2.35702260
    # (1 - 11/3) / 2.35702260, (2 - 11/3) / 2.35702260, (6 - 11/3) / 2.35702260
    advantages, _ = estimated("reinforce++", t(1, 2, 6), bools(1, 1, 1))
    expected = t(*(tuple(row) for row in rows(-1.13137085, -0.70710678, 0.98994949)))
    torch.testing.assert_close(torch.tensor(advantages), expected, atol=1e-6, rtol=0)
    # The longest did not end: 1, 1, 2 have mean 4/3, variance 2/9, and it has 0.
    advantages, _ = estimated("reinforce++", t(1, 2, 6), bools(1, 1, 0))
    expected = t(*(tuple(row) for row in rows(-0.70710675, 1.41421350, 0)))
    torch.testing.assert_close(torch.tensor(advantages), expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", ADVANTAGE_ESTIMATORS)
def test_a_sample_that_does_not_count_is_as_if_it_had_not_been(name: str) -> None:
    generator = torch.Generator().manual_seed(5)
    rewards, groups = torch.randn(6, generator=generator), ids(0, 1, 0, 1, 0, 1)
    mask = t(*(tuple(float(i < n) for i in range(4)) for n in (1, 4, 2, 3, 4, 2)))
    is_end, kept = bools(1, 1, 0, 1, 1, 1), [0, 1, 3, 4, 5]
    running = RunningMean(3.0, 2.0)
    for reward in (math.nan, math.inf, -math.inf, 1e30, 0.0):
        rewards[2] = reward
        ours, after = estimate_advantages(name, rewards, groups, mask, is_end=is_end, running=running)
        without, expected = estimate_advantages(name, rewards[kept], groups[kept], mask[kept], running=running)
        assert after == expected and ours[2].tolist() == [0.0] * 4
        torch.testing.assert_close(ours[kept], without, atol=1e-6, rtol=0)


def test_groups_are_the_ids_in_any_order_and_nothing_else() -> None:
    # Two prompts may hold equal tokens: with ids of their own they are two groups.
    rewards, counted = t(1, 2, 6, 11), bools(1, 1, 1, 1)
    assert rloo(rewards, ids(0, 0, 1, 1), counted).tolist() == [-1.0, 1.0, -5.0, 5.0]
    assert rloo(rewards, ids(2**40, -1, -1, 2**40), counted).tolist() == [-10.0, -4.0, 4.0, 10.0]


def test_large_rewards_keep_their_differences() -> None:
    # Sums of ten thousands in float32 would round these.
    assert rloo(t(20001, 20002, 20006), ids(0, 0, 0), bools(1, 1, 1)).tolist() == [-3.0, -1.5, 4.5]


samples = st.lists(
    st.tuples(st.integers(-32, 32).map(lambda n: n / 8), st.integers(0, 3), st.booleans()), min_size=1, max_size=12
)


@given(samples, st.randoms(use_true_random=False))
def test_group_baselines_equal_a_loop_over_the_groups(drawn: list[tuple[float, int, bool]], random) -> None:
    rewards, groups, counted = (
        t(*(r for r, _, _ in drawn)),
        ids(*(g for _, g, _ in drawn)),
        bools(*(m for *_, m in drawn)),
    )
    outcomes = [rloo(rewards, groups, counted)] + [
        group_mean(rewards, groups, counted, scale) for scale in (False, True)
    ]
    for i, (reward, group, is_counted) in enumerate(drawn):
        others = [r for j, (r, g, m) in enumerate(drawn) if m and g == group and j != i]
        expected = (0.0, 0.0, 0.0)
        if is_counted and others:
            members = [*others, reward]
            mean = math.fsum(members) / len(members)
            std = math.sqrt(math.fsum((r - mean) ** 2 for r in members) / (len(members) - 1))
            expected = (reward - math.fsum(others) / len(others), reward - mean, (reward - mean) / (std + 1e-4))
        assert [x[i].item() for x in outcomes] == pytest.approx(expected, rel=1e-5, abs=1e-6)
    order = list(range(len(drawn)))
    random.shuffle(order)
    torch.testing.assert_close(rloo(rewards[order], groups[order], counted[order]), outcomes[0][order])
    # A prompt whose rewards are all higher is no better: a baseline takes off what the group shares.
    torch.testing.assert_close(rloo(rewards + groups * 16.0, groups, counted), outcomes[0])


def test_whitening() -> None:
    # 1, 2, 3, 6 have mean 3 and variance (4 + 1 + 0 + 9) / 4 = 3.5: sqrt 1.87082869
    values, mask = t(1, math.nan, 2, 3, math.inf, 6), t(1, 0, 1, 1, 0, 1)
    moments = Moments.of(values, mask)
    assert moments == Moments(4.0, 12.0, 50.0) and (moments.mean, moments.variance) == (3.0, 3.5)
    expected = t(-1.06904497, 0, -0.53452248, 0, 0, 1.60356745)
    torch.testing.assert_close(whiten(values, mask, moments), expected, atol=1e-6, rtol=0)
    # Weights: 1 three times and 5 once have mean 2 and variance 3
    moments = Moments.of(t(1, 5), t(3, 1))
    assert (moments.mean, moments.variance) == (2.0, 3.0)


def test_whitening_what_does_not_vary() -> None:
    for number in (0.0, 0.1, -1e4 / 3):
        values, mask = torch.full((2, 50), number), torch.ones(2, 50)
        assert whiten(values, mask, Moments.of(values, mask)).abs().max() < 1e-3
    # The epsilon is in the root: (1e-4 - 0) / sqrt(1e-8 + 1e-8)
    values = t(1e-4, -1e-4)
    whitened = whiten(values, t(1, 1), Moments.of(values, t(1, 1)))
    torch.testing.assert_close(whitened, t(0.70710678, -0.70710678), atol=1e-6, rtol=0)
    assert whiten(t(math.nan), t(0), Moments.of(t(math.nan), t(0))).tolist() == [0.0]
    assert (Moments().mean, Moments().variance) == (0.0, 0.0)


def test_moments_of_micro_batches_add_up_and_means_of_means_do_not() -> None:
    values, mask = t((1, 2, 3), (6, math.nan, 9), (7, 7, 7)), t((1, 1, 1), (1, 0, 0), (0, 0, 0))
    parts = [Moments.of(values[i : i + 1], mask[i : i + 1]) for i in range(3)]
    whole = sum(parts, Moments())
    assert whole == Moments.of(values, mask) and whole.mean == 3.0
    assert (parts[0].mean + parts[1].mean) / 2 == 4.0
    pieces = [whiten(values[i : i + 1], mask[i : i + 1], whole) for i in range(3)]
    assert torch.equal(torch.cat(pieces), whiten(values, mask, whole))
    with pytest.raises(TypeError):
        Moments() + RunningMean()


@given(st.integers(0, 2**31))
def test_whitened_tokens_have_mean_0_and_variance_1(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(4, 6, generator=generator) * 3 + 50
    mask = (torch.rand(4, 6, generator=generator) < 0.7).float()
    mask[0, :2] = 1.0
    whitened = whiten(values, mask, Moments.of(values, mask))
    after = Moments.of(whitened, mask)
    assert after.mean == pytest.approx(0, abs=1e-5) and after.variance == pytest.approx(1, abs=1e-4)


def test_a_counted_reward_that_is_no_number_is_an_error() -> None:
    for reward in (math.nan, math.inf):
        with pytest.raises(ValueError, match=r"the reward of sample 1 is .*: a sample without a reward must not count"):
            rloo(t(1, reward), ids(0, 0), bools(1, 1))
        for name in ADVANTAGE_ESTIMATORS:
            with pytest.raises(ValueError, match="the reward of sample 1"):
                estimated(name, t(1, reward, 1), bools(1, 1, 1))


def test_unknown_names_list_the_known_ones() -> None:
    known = "none, mean, rloo, grpo, dr_grpo, reinforce\\+\\+"
    with pytest.raises(ValueError, match=f"unknown advantage estimator 'rlo'; known are {known}"):
        estimated("rlo", t(1, 2, 3), bools(1, 1, 1))


def test_shapes_and_dtypes_that_do_not_fit_are_refused() -> None:
    two, three, counted, square = t(1, 2), t(1, 2, 3), bools(1, 1), torch.ones(2, 2)
    for call, reason in (
        (lambda: rloo(three, ids(0, 0), counted), r"groups is \[2\], not \[3\]"),
        (lambda: rloo(square, ids(0, 0), counted), r"rewards is \[2, 2\], not \[B\]"),
        (lambda: rloo(two.double(), ids(0, 0), counted), "rewards must be float32, not float64"),
        (lambda: rloo(two, two, counted), "groups must be int64, not float32"),
        (lambda: group_mean(two, ids(0, 0), two, True), "is_counted must be bool, not float32"),
        (lambda: whiten(square, two, Moments()), r"mask is \[2\], values are \[2, 2\]"),
        (lambda: Moments.of(two.double(), two), "values must be float32"),
        (lambda: estimate_advantages("none", three, ids(0, 0, 0), square), r"rewards is \[3\]"),
        (lambda: estimate_advantages("none", two, ids(0), square), r"groups is \[1\], not \[2\]"),
        (lambda: estimate_advantages("none", two, ids(0, 0), two), r"mask is \[2\]"),
        (lambda: estimate_advantages("none", two, ids(0, 0), square, is_end=two), "is_end must be bool"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
