"""Freezes a part of a model's weights by patterns of their names, as SAO freezes the attention of its critic."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import nn

from guerdon.errors import ConfigError

_MOST_NAMES = 4
"""Names that an error shows of the first weights, and of the last."""


def freeze(parameters: Mapping[str, nn.Parameter], trainable: str | None, frozen: str | None) -> None:
    """Leaves to train what `trainable` matches (None: everything) and `frozen` does not; freezes everything else.

    Both are regular expressions that match whole names. A frozen parameter gets no gradient. Call it before the first
    forward, because FSDP reads `requires_grad` there. Raises ConfigError if one matches nothing, or if nothing is left.
    """
    chosen = set(parameters) if trainable is None else _matching(parameters, "trainable", trainable)
    if frozen is not None:
        chosen -= _matching(parameters, "frozen", frozen)
    if not chosen:
        raise ConfigError(
            f"nothing is left to train: trainable is {trainable!r}, frozen {frozen!r}",
            f"change one of them; the weights are {_some(parameters)}",
        )
    for name, parameter in parameters.items():
        parameter.requires_grad_(name in chosen)


def _matching(parameters: Mapping[str, nn.Parameter], setting: str, pattern: str) -> set[str]:
    found = {name for name in parameters if re.fullmatch(pattern, name)}
    if not found:
        raise ConfigError(
            f"{setting} is {pattern!r}, and matches no weight's whole name", f"the weights are {_some(parameters)}"
        )
    return found


def _some(parameters: Mapping[str, nn.Parameter]) -> str:
    names = list(parameters)
    if len(names) > 2 * _MOST_NAMES:
        names = [*names[:_MOST_NAMES], "...", *names[-_MOST_NAMES:]]
    return ", ".join(names)
