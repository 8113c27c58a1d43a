"""Generalised advantage estimation against numbers worked out by hand."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from guerdon.training.algorithms.advantages import adaptive_lams, gae
from guerdon.training.algorithms.kl import token_rewards


def t(*numbers: float | tuple[float, ...]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


def test_advantages_and_returns() -> None:
    # gamma = lambda = 1/2; backwards over the three tokens of the first row, r = 0.5, 0, 8 and V = 1, 2, 4:
    #   delta = 8 - 4 = 4                    A = 4                      return 8
    #   delta = 0 + 0.5 * 4 - 2 = 0          A = 0 + 0.25 * 4 = 1       return 3
    #   delta = 0.5 + 0.5 * 2 - 1 = 0.5      A = 0.5 + 0.25 * 1 = 0.75  return 1.75
    # The second row has one token, 3 - 1; the third has none.
    nan, inf = math.nan, math.inf
    rewards = t((nan, 0.5, 0, 8, inf), (3, nan, inf, -inf, nan), (nan,) * 5)
    values = t((inf, 1, 2, 4, nan), (1, inf, nan, nan, -inf), (inf,) * 5)
    mask = t((0, 1, 1, 1, 0), (1, 0, 0, 0, 0), (0,) * 5)
    advantages, returns = gae(rewards, values, mask, 0.5, 0.5)
    assert advantages.tolist() == [[0, 0.75, 1, 4, 0], [2, 0, 0, 0, 0], [0] * 5]
    assert returns.tolist() == [[0, 1.75, 3, 8, 0], [3, 0, 0, 0, 0], [0] * 5]
    assert (advantages.dtype, returns.dtype) == (torch.float32, torch.float32)


def test_defaults_are_gamma_1_and_lambda_0_95() -> None:
    # A = 10 - 4 = 6; A = 4 - 2 + 0.95 * 6 = 7.7
    advantages, returns = gae(t((0, 10)), t((2, 4)), t((1, 1)))
    torch.testing.assert_close(advantages, t((7.7, 6.0)), atol=1e-6, rtol=0)
    torch.testing.assert_close(returns, t((9.7, 10.0)), atol=1e-6, rtol=0)


def test_the_ends_of_lambda() -> None:
    rewards, values, mask = t((1, 2, 4)), t((8, 16, 32)), torch.ones(1, 3)
    # lambda 1: the rewards still to come, whatever the later values; lambda 0: one step. gamma is 1/2.
    assert gae(rewards, values, mask, 0.5, 1.0)[1].tolist() == [[3.0, 4.0, 4.0]]
    assert gae(rewards, values, mask, 0.5, 0.0)[0].tolist() == [[1.0, 2.0, -28.0]]


def test_each_sequence_may_have_a_lambda_of_its_own() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards, values = (torch.randn(3, 6, generator=generator) for _ in range(2))
    mask = (torch.rand(3, 6, generator=generator) < 0.6).float()
    lams = torch.tensor([0.0, 0.5, 1.0], dtype=torch.float64)
    own = gae(rewards, values, mask, 0.9, lams)
    for i, lam in enumerate(lams.tolist()):
        alone = gae(rewards[i : i + 1], values[i : i + 1], mask[i : i + 1], 0.9, lam)
        assert all(torch.equal(result[i : i + 1], one) for result, one in zip(own, alone, strict=True))


def test_lambda_grows_with_the_number_of_tokens_and_is_never_below_0() -> None:
    mask = torch.zeros(4, 50)
    for i, places in enumerate((range(0), range(2), range(10, 14), range(0, 50, 2))):
        mask[i, list(places)] = 0.5  # a weight, which counts as a token
    # alpha is 0.4: 1 - 1 / 0.8 is below 0; 1 - 1 / (0.4 * 4) = 0.375; 1 - 1 / (0.4 * 25) = 0.9.
    torch.testing.assert_close(adaptive_lams(mask, 0.4), torch.tensor([0, 0, 0.375, 0.9], dtype=torch.float64))


def test_nothing_carries_a_gradient() -> None:
    values = torch.ones(1, 2, requires_grad=True)
    assert not any(result.requires_grad for result in gae(torch.ones(1, 2), values, torch.ones(1, 2)))


@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.9, 1.0]),
    st.sampled_from([0.0, 0.95, 1.0]),
    st.sampled_from([math.nan, math.inf, -math.inf]),
)
def test_equals_the_sum_over_each_sequence_alone(seed: int, gamma: float, lam: float, poison: float) -> None:
    """Also with holes in the mask: a masked token changes nothing for its neighbours."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(3, 6, generator=generator) for _ in range(2))
    mask = (torch.rand(3, 6, generator=generator) < 0.6).float()
    advantages, returns = gae(
        rewards.masked_fill(mask == 0, poison), values.masked_fill(mask == 0, poison), mask, gamma, lam
    )
    expected, expected_returns = torch.zeros(2, 3, 6, dtype=torch.float64)
    for i in range(3):
        places = [j for j in range(6) if mask[i, j]]
        r, v = rewards[i, places].double().tolist(), [*values[i, places].double().tolist(), 0.0]
        deltas = [r[k] + gamma * v[k + 1] - v[k] for k in range(len(r))]
        for k, place in enumerate(places):
            expected[i, place] = sum((gamma * lam) ** (n - k) * deltas[n] for n in range(k, len(deltas)))
            expected_returns[i, place] = expected[i, place] + v[k]
    torch.testing.assert_close(advantages, expected.float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(returns, expected_returns.float(), atol=1e-5, rtol=1e-5)


def test_from_scalar_rewards_with_a_penalty_to_returns() -> None:
    # Rows of lengths 2 and 1; r = -0.5 * 2, 10 - 0.5 * 4 and 20 + 0.5 * 2; gamma = lambda = 1, so the returns are sums.
    mask = t((1, 1, 0), (0, 1, 0))
    rewards = token_rewards(t(10, 20), t((2, 4, math.nan), (math.inf, -2, math.nan)), mask, 0.5)
    advantages, returns = gae(rewards, t((1, 3, math.nan), (math.nan, 5, math.inf)), mask, 1.0, 1.0)
    assert returns.tolist() == [[7, 8, 0], [0, 21, 0]]
    assert advantages.tolist() == [[6, 5, 0], [0, 16, 0]]


def test_arguments_that_do_not_fit_are_refused() -> None:
    ones = torch.ones(2, 3)
    for call, reason in (
        (lambda: gae(ones, torch.ones(2, 4), ones), r"values is \[2, 4\], rewards are \[2, 3\]"),
        (lambda: gae(torch.ones(3), torch.ones(3), torch.ones(3)), r"rewards is \[3\]: all must be \[B, T\]"),
        (lambda: gae(ones, ones.double(), ones), "values must be float32, not float64"),
        (lambda: gae(ones, ones, ones.bool()), "mask must be float32, not bool"),
        (lambda: gae(ones, ones, ones, 1.1), "gamma must be within 0 and 1, not 1.1"),
        (lambda: gae(ones, ones, ones, lam=-0.1), "lam must be within 0 and 1, not -0.1"),
        (lambda: gae(ones, ones, ones, math.nan), "gamma must be within 0 and 1, not nan"),
        (lambda: gae(ones, ones, ones, lam=torch.tensor([1, 1.5]).double()), "lam must be within 0 and 1, not 1.5"),
        (lambda: gae(ones, ones, ones, lam=torch.ones(2)), "lam must be float64, not float32"),
        (lambda: gae(ones, ones, ones, lam=torch.ones(3).double()), r"lam is \[3\], not \[2\]"),
        (lambda: adaptive_lams(ones, 0.0), "alpha must be above 0, not 0.0"),
    ):
        with pytest.raises(ValueError, match=reason):
            call()
