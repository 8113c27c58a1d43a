"""KL estimators and the rewards that they penalise, against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guerdon.training.algorithms.kl import (
    KL_ESTIMATORS,
    kl_per_sequence,
    kl_per_token,
    penalised_rewards,
    token_rewards,
)


def t(*numbers: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


# x = logp - ref = 0.5, -1, 0, and a masked token that nobody may read.
LOGPROBS = (-1.0, -2.0, -0.5, math.nan)
REFERENCE = (-1.5, -1.0, -0.5, -math.inf)
MASK = (1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("estimator", "expected", "gradient"),
    [
        ("k1", (0.5, -1.0, 0.0, 0.0), (1.0, 1.0, 1.0, 0.0)),
        ("k2", (0.125, 0.5, 0.0, 0.0), (0.5, -1.0, 0.0, 0.0)),
        # exp(-0.5) - 1 + 0.5, exp(1) - 1 - 1; gradient 1 - exp(-x)
        ("k3", (0.10653066, 0.71828183, 0.0, 0.0), (0.39346934, -1.71828183, 0.0, 0.0)),
        ("abs", (0.5, 1.0, 0.0, 0.0), (1.0, -1.0, 0.0, 0.0)),
    ],
)
def test_estimates_and_gradients(estimator: str, expected: tuple[float, ...], gradient: tuple[float, ...]) -> None:
    logprobs = t(*LOGPROBS).requires_grad_()
    kl = kl_per_token(logprobs, t(*REFERENCE), t(*MASK), estimator)
    kl.sum().backward()
    torch.testing.assert_close(kl.detach(), t(*expected), atol=1e-6, rtol=0)
    torch.testing.assert_close(logprobs.grad, t(*gradient), atol=1e-6, rtol=0)


def test_k1_and_k3_are_unbiased_and_abs_estimates_something_else() -> None:
    # p = (1/2, 1/2), q = (1/4, 3/4): each token is as likely, so the mean over both is the expectation.
    # KL(p || q) = ln(2) / 2 + ln(2/3) / 2 = ln(4/3) / 2
    p, q, ones = t(0.5, 0.5).log(), t(0.25, 0.75).log(), torch.ones(2)
    means = {name: kl_per_token(p, q, ones, name).mean().item() for name in KL_ESTIMATORS}
    assert means["k1"] == pytest.approx(0.14384104, abs=1e-6)
    assert means["k3"] == pytest.approx(0.14384104, abs=1e-6)
    # (ln(2)^2 + ln(2/3)^2) / 4, and (ln(2) - ln(2/3)) / 2
    assert means["k2"] == pytest.approx(0.16121381, abs=1e-6)
    assert means["abs"] == pytest.approx(0.54930614, abs=1e-6)


def test_a_small_k3_keeps_its_digits() -> None:
    # x^2 / 2; exp(-x) - 1 + x in float32 would be 0 or 6e-8
    assert kl_per_token(t(1e-3), t(0), t(1), "k3").item() == pytest.approx(5e-7, rel=2e-3)


def test_log_ratios_are_clamped() -> None:
    logprobs = t(50, -50).requires_grad_()
    kl = kl_per_token(logprobs, t(0, 0), t(1, 1), "k3")
    kl.sum().backward()
    # exp(-20) - 1 + 20, exp(20) - 1 - 20
    torch.testing.assert_close(kl.detach(), t(19.0, 485165174.4), rtol=1e-6, atol=0)
    assert logprobs.grad is not None and logprobs.grad.tolist() == [0.0, 0.0]
    assert kl_per_token(t(50, -math.inf), t(0, 0), t(1, 1), "k1").tolist() == [20.0, -20.0]


def test_a_sequence_has_the_sum_of_its_tokens() -> None:
    kl = t((0.5, -1.0, 2.0), (math.nan, 0.25, math.inf), (math.nan,) * 3).requires_grad_()
    sums = kl_per_sequence(kl, t((1, 1, 1), (0, 1, 0), (0, 0, 0)))
    sums.sum().backward()
    # A mean would be 0.5 for the first: twice the length must be twice the penalty.
    assert sums.tolist() == [1.5, 0.25, 0.0]
    assert kl.grad is not None and kl.grad.tolist() == [[1, 1, 1], [0, 1, 0], [0, 0, 0]]


def test_or_their_mean_as_in_nemo_aligner() -> None:
    kl = t((0.5, -1.0, 2.0), (math.nan, 0.25, math.inf), (math.nan,) * 3).requires_grad_()
    means = kl_per_sequence(kl, t((1, 1, 1), (0, 1, 0), (0, 0, 0)), "mean")
    means.sum().backward()
    assert means.tolist() == [0.5, 0.25, 0.0]
    assert kl.grad is not None and kl.grad.tolist() == [pytest.approx([1 / 3] * 3), [0, 1, 0], [0, 0, 0]]
    with pytest.raises(ValueError, match="unknown KL reduction 'max'; known are sum, mean"):
        kl_per_sequence(kl, torch.ones(3, 3), "max")


def test_penalised_rewards() -> None:
    assert penalised_rewards(t(1, -2), t(10, 4), 0.25).tolist() == [-1.5, -3.0]
    # Without a penalty there may be no reference at all, and what stands in for it is not read.
    assert penalised_rewards(t(1, -2), None, 0.0).tolist() == [1.0, -2.0]
    assert penalised_rewards(t(1, -2), t(math.nan, math.inf), 0).tolist() == [1.0, -2.0]


def test_token_rewards_put_the_reward_on_the_action_that_emits_the_last_token() -> None:
    # Prompt lengths 2, 1, 3 and lengths 4, 5, 4 of S = 5: actions 1-2, 0-3 and 2; rewards at L - 2 = 2, 3, 2.
    mask = t((0, 1, 1, 0), (1, 1, 1, 1), (0, 0, 1, 0))
    kl = t((math.nan, 2, 4, math.inf), (1, -2, 3, -4), (-math.inf, math.nan, 8, 1))
    expected = [[0, -1, 8, 0], [-0.5, 1, -1.5, 22], [0, 0, 26, 0]]
    assert token_rewards(t(10, 20, 30), kl, mask, 0.5).tolist() == expected
    assert token_rewards(t(10, 20, 30), None, mask, 0.0).tolist() == [[0, 0, 10, 0], [0, 0, 0, 20], [0, 0, 30, 0]]


def test_a_row_without_tokens_gets_no_reward() -> None:
    rewards = token_rewards(t(math.nan, -math.inf, 1), torch.zeros(3, 2), t((0, 0), (0, 0), (1, 0)), 0.1)
    assert rewards.tolist() == [[0, 0], [0, 0], [1, 0]]


@given(st.integers(0, 2**31), st.sampled_from(sorted(KL_ESTIMATORS)))
def test_estimates_and_gradients_equal_a_reference_of_one_sequence_after_the_other(seed: int, estimator: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    logprobs, ref_logprobs = (torch.randn(3, 5, generator=generator) for _ in range(2))
    lengths = torch.randint(0, 6, (3,), generator=generator).tolist()
    mask = t(*(tuple(float(i < n) for i in range(5)) for n in lengths))
    ours, naive = logprobs.clone().requires_grad_(), logprobs.double().requires_grad_()
    sums = kl_per_sequence(kl_per_token(ours, ref_logprobs, mask, estimator), mask)
    formulas = {"k1": lambda x: x, "k2": lambda x: x * x / 2, "k3": lambda x: torch.exp(-x) - 1 + x, "abs": torch.abs}
    for i, n in enumerate(lengths):
        reference = formulas[estimator](naive[i, :n] - ref_logprobs[i, :n].double()).sum()
        assert sums[i].item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-5)
        (reference * (i + 1)).backward()
    (sums * t(1, 2, 3)).sum().backward()
    assert ours.grad is not None and naive.grad is not None
    torch.testing.assert_close(ours.grad, naive.grad.float(), rtol=1e-5, atol=1e-5)


def test_unknown_names_list_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; known are k1, k2, k3, abs"):
        kl_per_token(t(1), t(1), t(1), "k4")


def test_shapes_dtypes_and_coefficients_that_do_not_fit_are_refused() -> None:
    ones, two, square = t(1, 1), t(1, 2), torch.ones(2, 2)
    for call, reason in (
        (lambda: kl_per_token(ones, t(1), ones, "k1"), r"ref_logprobs is \[1\], logprobs are \[2\]"),
        (lambda: kl_per_token(square, square, ones, "k1"), r"mask is \[2\]"),
        (lambda: kl_per_token(ones.double(), ones, ones, "k1"), "logprobs must be float32, not float64"),
        (lambda: kl_per_token(ones, ones.bfloat16(), ones, "k1"), "ref_logprobs must be float32, not bfloat16"),
        (lambda: kl_per_token(ones, ones, ones.bool(), "k1"), "mask must be float32, not bool"),
        (lambda: kl_per_sequence(ones, ones), r"kl is \[2\]: all must be \[B, T\]"),
        (lambda: penalised_rewards(two, square, 0.1), r"kl is \[2, 2\], not \[2\]"),
        (lambda: penalised_rewards(square, two, 0.1), r"rewards is \[2, 2\], not \[B\]"),
        (lambda: penalised_rewards(two.double(), two, 0.1), "rewards must be float32, not float64"),
        (lambda: penalised_rewards(two, None, 0.1), "kl is needed because beta is 0.1"),
        (lambda: token_rewards(two, None, square, 0.1), "kl is needed because beta is 0.1"),
        # B is T: a product of [B, T] and [B] would run.
        (lambda: token_rewards(two, two, square, 0.1), r"kl is \[2\]"),
        (lambda: token_rewards(t(1), square, square, 0.1), r"rewards is \[1\], not \[2\]"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
    for beta in (-0.1, math.nan, math.inf):
        with pytest.raises(ValueError, match="beta must be finite and not negative"):
            penalised_rewards(two, two, beta)
        with pytest.raises(ValueError, match="beta must be finite and not negative"):
            token_rewards(two, square, square, beta)
