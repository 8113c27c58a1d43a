"""What a run's loop asks of the policy, be it in this process or on many ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import numpy as np
from torch import Tensor

from guerdon.engine.checkpoint.language_models import LoadedPolicy
from guerdon.training.policy_trainer import Logprobs, Loss, StepReport


class Policy(Protocol):
    """A policy that learns; what each method does is said at `PolicyTrainer`."""

    @property
    def policy(self) -> LoadedPolicy:
        """The model as it was loaded."""

    @property
    def step_count(self) -> int: ...

    @property
    def weights_version(self) -> str: ...

    def logprobs(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> Logprobs: ...

    def reference_logprobs(
        self, rows: list[np.ndarray], prompt_lengths: np.ndarray, temperature: float = 1.0
    ) -> Tensor: ...

    def step(
        self,
        rows: list[np.ndarray],
        prompt_lengths: np.ndarray,
        loss: Loss,
        *,
        temperature: float = 1.0,
        with_entropies: bool = False,
    ) -> StepReport: ...

    def offload_optimizer(self) -> None: ...

    def onload_optimizer(self) -> None: ...

    def save(self, folder: Path) -> None: ...

    def load(self, folder: Path) -> None: ...
