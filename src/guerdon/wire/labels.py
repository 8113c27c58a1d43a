"""A score as the forms of classifiers tell it: a number a label, as it is or as an activation makes it."""

from __future__ import annotations

import base64
from typing import Any, Literal

import numpy as np

from guerdon.core import ModelInfo, Score
from guerdon.wire.forms import number

Activation = Literal["sigmoid", "softmax", "fitting"]
"""What is made of the numbers of a sample; `fitting` is softmax where there are several, else sigmoid."""


def labels_of(info: ModelInfo, count: int = 1) -> tuple[str, ...]:
    """The names of a sample's `count` numbers: its attributes', else those that transformers gives."""
    return ("LABEL_0",) if info.kind == "sum" else info.names_of(count)


def numbers_of(score: Score, info: ModelInfo, activation: Activation | None = None) -> np.ndarray:
    """One number a label, float32 `[A]`: the attributes of a checkpoint that has several, else the reward."""
    has_several = score.attributes is not None and info.kind != "sum"
    numbers = np.asarray(score.attributes if has_several else [number(score.reward)], np.float32)
    return activated(numbers, activation)


def attributes_of(score: Score, info: ModelInfo) -> dict[str, np.float32]:
    """A checkpoint's attributes, or the rewards that a sum is made of, by their names; none where there is but one."""
    if score.attributes is None:
        return {}
    return dict(zip(info.names_of(len(score.attributes)), map(number, score.attributes), strict=True))


def components_of(score: Score, info: ModelInfo) -> dict[str, Any]:
    """The rewards that a sum is made of, by their names, under the key `components`; nothing for any other model."""
    return {"components": attributes_of(score, info)} if info.kind == "sum" else {}


def more_of(score: Score, info: ModelInfo) -> dict[str, Any]:
    """What there is beyond `numbers_of`: a sum's components, or the reward that several attributes come to."""
    if info.kind == "sum" or score.attributes is None:
        return components_of(score, info)
    return {"reward": number(score.reward)}


def activated(numbers: np.ndarray, activation: Activation | None) -> np.ndarray:
    """The numbers, float32 `[..., A]`, or what the activation makes of them over the last axis."""
    if activation is None:
        return np.ascontiguousarray(numbers, np.float32)
    wide = numbers.astype(np.float64)
    if activation == "sigmoid" or (activation == "fitting" and numbers.shape[-1] == 1):
        return np.exp(-np.logaddexp(0, -wide)).astype(np.float32)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


def in_base64(numbers: np.ndarray, dtype: str = "<f4") -> str:
    """The numbers' bytes in row order, of numpy's `dtype`, as base64."""
    return base64.b64encode(numbers.astype(dtype).tobytes()).decode()
