"""The kinds of models that a server can have: whoever has a model or its settings finds its kind here."""

from __future__ import annotations

from typing import Any

from guerdon.core import ModelInfo
from guerdon.kinds.chat_judge import ChatJudgeKind
from guerdon.kinds.critic import CriticKind
from guerdon.kinds.function import FunctionKind
from guerdon.kinds.judges import JudgeKind
from guerdon.kinds.kind import Kind
from guerdon.kinds.reward import RewardKind
from guerdon.kinds.sum import SumKind
from guerdon.kinds.teachers import TeacherKind

REWARD = RewardKind()
KINDS: list[Kind] = [FunctionKind(), REWARD, CriticKind(), TeacherKind(), JudgeKind(), ChatJudgeKind(), SumKind()]
"""The first that owns a model's settings is its kind."""

_BY_NAME = {name: kind for kind in KINDS for name in kind.names}


def of(info: ModelInfo) -> Kind:
    """Returns the kind of a model; checkpoints with a head, whatever their architecture, are reward models."""
    return _BY_NAME.get(info.kind, REWARD)


def of_settings(config: Any) -> Kind:
    """Returns the kind of the model that has these settings."""
    return next(kind for kind in KINDS if kind.owns(config))


def add(kind: Kind) -> None:
    """Adds a kind to those that are there."""
    KINDS.append(kind)
    _BY_NAME.update(dict.fromkeys(kind.names, kind))
