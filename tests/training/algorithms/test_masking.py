"""Sums that add up field by field, and masks that nothing gets past."""

import math
from dataclasses import dataclass

import pytest
import torch

from guerdon.training.algorithms.losses import ValueLossStats
from guerdon.training.algorithms.masking import Sums, fill_left_out


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
