"""The value loss against numbers worked out by hand."""

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from guerdon.training.algorithms.losses import ValueLossStats, clipped_value_loss
from guerdon.training.algorithms.masking import Sums, fill_left_out


def t(*numbers: float) -> Tensor:
    return torch.tensor(numbers, dtype=torch.float32)


# For each token: value, value before, return, mask.
#   0: moved by 0.5, held at 0.2: (1.0 - 0)^2 = 1 against (0.7 - 0)^2; the larger is the free one
#   1: moved by 0.5, held at 0.2: (1.0 - 2)^2 = 1 against (0.7 - 2)^2 = 1.69, so no gradient
#   2: moved by -0.1, free: (-0.1 - 0.4)^2 = 0.25 both ways
#   3: moved by -1, held at -0.2: (-1 + 1)^2 = 0 against (-0.2 + 1)^2 = 0.64, so no gradient
#   4: masked out
VALUES = (1.0, 1.0, -0.1, -1.0, 5.0)
PREVIOUS = (0.5, 0.5, 0.0, 0.0, 0.0)
RETURNS = (0.0, 2.0, 0.4, -1.0, 9.0)
MASK = (1.0, 1.0, 1.0, 1.0, 0.0)


def test_loss_and_gradient_are_those_worked_out_by_hand() -> None:
    values = t(*VALUES).requires_grad_()
    loss, stats = clipped_value_loss(values, t(*PREVIOUS), t(*RETURNS), t(*MASK), 0.2, 8.0)
    loss.backward()
    # 0.5 * (1 + 1.69 + 0.25 + 0.64) / 8
    assert loss.item() == pytest.approx(0.22375, abs=1e-7)
    # (value - return) / 8 where the free term counts; where both are equal it is the same number
    torch.testing.assert_close(values.grad, t(0.125, 0.0, -0.0625, 0.0, 0.0), atol=1e-7, rtol=0)
    assert stats.sum_loss == pytest.approx(1.79, abs=1e-6)
    assert (stats.sum_mask, stats.sum_clipped, stats.clip_fraction) == (4.0, 2.0, 0.5)


def test_what_moved_within_the_clip_is_not_clipped_by_rounding() -> None:
    # 0.1 + (0.01 - 0.1) is 0.00999999 in float32, which is further from 0.02 than 0.01 is.
    values = t(0.01, 0.2).requires_grad_()
    loss, stats = clipped_value_loss(values, t(0.1, 0.5), t(0.02, 0.3), t(1.0, 1.0), 0.2, 2.0)
    loss.backward()
    # Of the second, which moved by 0.3, the free term is (0.2 - 0.3)^2, and the held one (0.3 - 0.3)^2.
    torch.testing.assert_close(values.grad, t(-0.005, -0.05), atol=1e-7, rtol=0)
    assert (stats.sum_mask, stats.sum_clipped) == (2.0, 0.0)


def test_without_a_clip_it_is_half_the_squared_error() -> None:
    for clip in (0.0, -1.0):
        values = t(*VALUES).requires_grad_()
        loss, stats = clipped_value_loss(values, t(*PREVIOUS), t(*RETURNS), t(*MASK), clip, 4.0)
        loss.backward()
        # 0.5 * (1 + 1 + 0.25 + 0) / 4
        assert loss.item() == pytest.approx(0.28125, abs=1e-7)
        torch.testing.assert_close(values.grad, t(0.25, -0.25, -0.125, 0.0, 0.0), atol=1e-7, rtol=0)
        assert stats.sum_clipped == 0.0


def test_a_mask_weighs_and_what_it_leaves_out_is_never_read() -> None:
    values = t(1.0, 3.0, math.nan).requires_grad_()
    loss, stats = clipped_value_loss(values, t(1.0, 3.0, math.inf), t(0.0, 1.0, math.nan), t(0.5, 2.0, 0.0), 0.2, 2.5)
    loss.backward()
    # 0.5 * (0.5 * 1 + 2 * 4) / 2.5
    assert loss.item() == pytest.approx(1.7, abs=1e-6)
    torch.testing.assert_close(values.grad, t(0.2, 1.6, 0.0), atol=1e-6, rtol=0)
    assert stats.sum_mask == 2.5
    assert (stats.value_mean, stats.return_mean) == pytest.approx((2.6, 0.8), abs=1e-6)


def test_micro_batches_add_up_to_the_global_batch() -> None:
    tensors = [t(*numbers) for numbers in (VALUES, PREVIOUS, RETURNS, MASK)]
    whole, stats = clipped_value_loss(*tensors, 0.2, 4.0)
    parts = [clipped_value_loss(*(x[part] for x in tensors), 0.2, 4.0) for part in (slice(0, 1), slice(1, 5))]
    assert sum(loss.item() for loss, _ in parts) == pytest.approx(whole.item(), abs=1e-7)
    total = sum((part for _, part in parts), ValueLossStats())
    assert total.explained_variance == pytest.approx(stats.explained_variance, abs=1e-9)
    assert total.clip_fraction == stats.clip_fraction
    rows, _ = clipped_value_loss(*(x.expand(2, 5) for x in tensors), 0.2, 8.0)
    assert rows.item() == pytest.approx(whole.item(), abs=1e-7)


def test_a_denominator_below_one_counts_as_one() -> None:
    loss, stats = clipped_value_loss(t(1.0), t(1.0), t(0.0), t(0.0), 0.2, 0.0)
    assert loss.item() == 0.0 and stats.clip_fraction == 0.0 and math.isnan(stats.explained_variance)
    assert math.isnan(stats.value_mean) and math.isnan(stats.return_mean)
    loss, _ = clipped_value_loss(t(1.0), t(1.0), t(0.0), t(0.5), 0.2, 0.5)
    assert loss.item() == pytest.approx(0.25)


def explained(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    return clipped_value_loss(values, values, returns, mask, 0.2, 1.0)[1].explained_variance


def test_explained_variance() -> None:
    # Returns 1, 2, 3, 6 vary by 3.5 about 3; the errors 0, 1, 0, 1 by 0.25: 1 - 0.25 / 3.5
    ones = torch.ones(4)
    assert explained(t(1, 1, 3, 5), t(1, 2, 3, 6), ones) == pytest.approx(1 - 0.25 / 3.5, abs=1e-12)
    # What is off by a constant explains everything; the same value everywhere explains nothing.
    assert explained(t(2, 3, 4, 7), t(1, 2, 3, 6), ones) == pytest.approx(1.0)
    assert explained(t(4, 4, 4, 4), t(1, 2, 3, 6), ones) == pytest.approx(0.0)
    # Weights: 1 (three times) and 5 vary by 3, errors 0 and 2 by 0.75
    assert explained(t(1, 3), t(1, 5), t(3, 1)) == pytest.approx(0.75)


def test_explained_variance_is_nan_if_the_returns_do_not_vary() -> None:
    for number in (0.0, 0.1, 1e4 / 3):
        assert math.isnan(explained(torch.zeros(999), torch.full((999,), number), torch.ones(999)))
    assert not math.isnan(explained(torch.zeros(2), t(1e4, 1e4 + 0.01), torch.ones(2)))


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ((t(1, 2), t(1, 2), t(1), t(1, 1)), r"returns is \[1\], values are \[2\]"),
        ((t(1, 2), t(1, 2), t(1, 2), torch.ones(2, 1)), r"mask is \[2, 1\]"),
        ((torch.ones(1, 1, 1),) * 4, r"values is \[1, 1, 1\]"),
        ((t(1).double(), t(1), t(1), t(1)), "values must be float32, not float64"),
        ((t(1), t(1), t(1), torch.ones(1, dtype=torch.bool)), "mask must be float32, not bool"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_refused(tensors: tuple[Tensor, ...], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        clipped_value_loss(*tensors, 0.2, 1.0)


@dataclass(frozen=True, slots=True)
class Pair(Sums):
    first: float = 0.0
    second: float = 0.0


@dataclass(frozen=True, slots=True)
class Triple(Pair):
    third: float = 0.0


def test_sums_add_up_field_by_field_inherited_ones_too() -> None:
    assert Pair(1, 2) + Pair(10, 20) == Pair(11, 22)
    assert sum([Triple(1, 2, 3), Triple(4, 5, 6)], Triple()) == Triple(5, 7, 9)


def test_sums_of_two_kinds_do_not_add_up() -> None:
    for other in (ValueLossStats(), Triple(), 0):
        with pytest.raises(TypeError):
            Pair() + other  # type: ignore[operator]


def test_what_a_mask_leaves_out_is_0_in_value_and_in_gradient() -> None:
    nan, inf = math.nan, math.inf
    values = torch.tensor([1.0, nan, inf, -inf, 5.0], requires_grad=True)
    mask, filled = fill_left_out(torch.tensor([0.5, 0.0, -1.0, nan, 2.0]), values)
    filled.square().sum().backward()
    assert mask.tolist() == [0.5, 0.0, 0.0, 0.0, 2.0] and filled.tolist() == [1.0, 0.0, 0.0, 0.0, 5.0]
    assert values.grad is not None and values.grad.tolist() == [2.0, 0.0, 0.0, 0.0, 10.0]
