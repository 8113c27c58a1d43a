"""Masks of transformers are recognised by their code: a version that makes them otherwise must not pass unnoticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import masking_utils as masks

from guerdon.engine.attention.patterns import Pattern, Reach, packed_mask

NO_PADDING = torch.zeros(1, dtype=torch.long)


@pytest.mark.parametrize(
    ("function", "reach", "chunk"),
    [
        (masks.sliding_window_causal_mask_function(7), (6, 0), None),
        (masks.sliding_window_bidirectional_mask_function(7), (7, 7), None),
        (masks.chunked_causal_mask_function(7, NO_PADDING), None, 7),
        (masks.chunked_causal_mask_function(7, torch.ones(1, dtype=torch.long)), None, None),
        (lambda b, h, q, k: k <= q, None, None),
    ],
)
def test_what_a_mask_is(function: Callable[..., Any], reach: Reach | None, chunk: int | None) -> None:
    assert packed_mask(mask_function=function, local_size=7) == Pattern(function, 7, reach, chunk)


@pytest.mark.parametrize("function", [masks.causal_mask_function, masks.bidirectional_mask_function])
def test_plain_masks_are_no_pattern(function: Callable[..., Any]) -> None:
    assert packed_mask(mask_function=function) is None
