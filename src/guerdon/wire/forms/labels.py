"""A score as classifiers' forms write it: a number a label, as it is or activated."""

from __future__ import annotations

import base64
from typing import Annotated, Any, Literal

import numpy as np
from msgspec import Meta

from guerdon.core import ModelInfo, Score, ScoreReply
from guerdon.errors import InvalidRequest, SampleFailed
from guerdon.wire.bodies import BLOCK, Written
from guerdon.wire.score_tensors import scores_of

Activation = Literal["sigmoid", "softmax", "fitting"]
"""The function of a sample's numbers; `fitting` is softmax for several, sigmoid for one."""

ACTIVATIONS: dict[str, Activation | None] = {"fitting": "fitting", "sigmoid": "sigmoid", "none": None}
"""By `ModelInfo.activation`; any other is a function that a checkpoint names, and that is not known here."""

InBase64 = Annotated[Any, Meta(extra_json_schema={"type": "string"})]
"""A string, or `Written` as one."""

_LARGEST = float(np.finfo(np.float32).max)


def number(value: float) -> np.float32:
    """Returns the number as float32; raises SampleFailed if it is not finite there, since JSON would write null."""
    if not abs(value) <= _LARGEST:
        raise SampleFailed(f"the score {value} is not a finite number of float32")
    return np.float32(value)


def rewards_of(reply: ScoreReply) -> np.ndarray:
    """Returns the samples' rewards, float32 `[B]`; raises the first failed row's error."""
    return np.array([number(score.reward) for score in scores_of(reply)], np.float32)


def activated_rewards_of(reply: ScoreReply, info: ModelInfo, activation: Activation | None) -> np.ndarray:
    """Returns `rewards_of` activated; raises InvalidRequest if that has no meaning, for a sum of several labels."""
    if activation is not None and len(info.attribute_names) > 1 and not info.has_components:
        raise InvalidRequest(
            f"the reward of {info.name} is a weighted sum of {', '.join(info.attribute_names)}, to which no activation "
            "belongs: ask for the labels by /classify, or for the raw number"
        )
    return activated(rewards_of(reply)[:, None], activation)[:, 0]


def labels_of(info: ModelInfo, count: int = 1) -> tuple[str, ...]:
    """Returns the names of a sample's `count` numbers: its attributes', else transformers' label names."""
    return ("LABEL_0",) if info.has_components else info.names_of(count)


def numbers_of(score: Score, info: ModelInfo, activation: Activation | None = None) -> np.ndarray:
    """Returns one number a label, float32 `[A]`: a checkpoint's attributes if it has several, else the reward."""
    has_several = score.attributes is not None and not info.has_components
    numbers = np.asarray(score.attributes if has_several else [number(score.reward)], np.float32)
    return activated(numbers, activation)


def attributes_of(score: Score, info: ModelInfo) -> dict[str, np.float32]:
    """Returns a checkpoint's attributes, or the components of a sum or judge, by name; empty if there are none."""
    if score.attributes is None:
        return {}
    names = score.names or info.names_of(len(score.attributes))
    return dict(zip(names, map(number, score.attributes), strict=True))


def components_of(score: Score, info: ModelInfo) -> dict[str, Any]:
    """Returns the components of a sum or judge under the key `components`; empty for any other model."""
    return {"components": attributes_of(score, info)} if info.has_components else {}


def more_of(score: Score, info: ModelInfo) -> dict[str, Any]:
    """Returns what `numbers_of` leaves out: the components, or the reward beside several attributes."""
    if info.has_components or score.attributes is None:
        return components_of(score, info)
    return {"reward": number(score.reward)}


def activated(numbers: np.ndarray, activation: Activation | None) -> np.ndarray:
    """Returns the numbers, float32 `[..., A]`, activated over the last axis."""
    if activation is None:
        return np.ascontiguousarray(numbers, np.float32)
    wide = numbers.astype(np.float64)
    if activation == "sigmoid" or (activation == "fitting" and numbers.shape[-1] == 1):
        return np.exp(-np.logaddexp(0, -wide)).astype(np.float32)
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    return (powers / powers.sum(axis=-1, keepdims=True)).astype(np.float32)


def in_base64(numbers: np.ndarray, dtype: str = "<f4") -> InBase64:
    """Returns the numbers' bytes in row order, of numpy's `dtype`, as base64, which is made late if it is long."""
    data = np.ascontiguousarray(numbers, dtype)
    if data.nbytes <= BLOCK:
        return base64.b64encode(data.tobytes()).decode()
    return Written.in_base64(data.reshape(-1).view(np.uint8).data)
