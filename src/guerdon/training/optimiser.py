"""AdamW over a model's parameters: float32 masters, the norm of the gradient, the schedule, and the state by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from guerdon.config import LearningConfig
from guerdon.errors import ConfigError

EPS = 1e-8
log = logging.getLogger(__name__)
CONSTANTS = ("qmap1", "qmap2")
"""What bitsandbytes keeps with every parameter and never changes."""


class Optimiser:
    """Steps the parameters given by name; those of less than float32 have a float32 master that is stepped for them.

    Gradients come from `backward`, as often as it is called between two steps. Everything that a step needs is
    allocated here, so that memory which does not suffice shows at the start.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], config: LearningConfig) -> None:
        """Raises ConfigError where the 8-bit optimiser is asked for and not installed."""
        self.step = 0
        self._parameters = parameters
        self._masters = {name: _master(parameter) for name, parameter in parameters.items()}
        self._largest_norm = config.gradient_clip_val or math.inf
        make = _adamw_8bit if config.optimizer == "adamw_8bit" else _adamw
        self._adamw = make(list(self._masters.values()), config)
        self._config = config
        self._has_warned = False

    @property
    def learning_rate(self) -> float:
        """That of the next step; it depends on nothing but the number of steps made."""
        return self._config.learning_rate * rate(self._config, self.step)

    def gradient_norm(self) -> float:
        """The norm of all gradients together, before clipping."""
        return torch.nn.utils.get_total_norm(self._gradients()).item()

    def apply(self, norm: float) -> None:
        """One step with the gradients, clipped by their `norm`; they are freed afterwards."""
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._largest_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        with torch.no_grad():
            for name, parameter in self._parameters.items():
                if self._masters[name] is not parameter:
                    parameter.copy_(self._masters[name])
        self.step += 1
        self.free()
        # During the warm-up 0 is where it begins.
        if not self._has_warned and self.step > self._config.warmup_steps and not rate(self._config, self.step):
            self._has_warned = True
            log.warning(
                "the learning rate is 0: the schedule has ended with step %d (total_steps), and more change nothing",
                self._config.total_steps,
            )

    def free(self) -> None:
        """Drops all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._masters[name].grad = None

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    # ---------------------------------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, `<parameter>/<what>`: the tensors themselves, where they are tensors."""
        made: dict[str, Tensor] = {}
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                made[f"{name}/master"] = master.data
            for key, value in self._adamw.state[master].items():
                if key not in CONSTANTS:
                    made[f"{name}/{key}"] = value if isinstance(value, Tensor) else torch.tensor(value)
        return made

    def restore(self, step: int, read: Callable[[str], Tensor]) -> None:
        """Becomes what the state of these names was after `step` steps; the parameters are restored by the caller."""
        for name, tensor in self.tensors().items():
            tensor.copy_(read(name))
        for name, master in self._masters.items():
            for key, value in self._adamw.state[master].items():
                if not isinstance(value, Tensor):
                    self._adamw.state[master][key] = int(read(f"{name}/{key}"))
        self.step = step

    def move(self, device: torch.device) -> None:
        """Moves masters and state to the device; parameters move with their module."""
        for name, master in self._masters.items():
            if master is not self._parameters[name]:
                master.data = master.data.to(device)
            state = self._adamw.state[master]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself where it is float32, else a float32 copy that collects its gradients."""
    if parameter.dtype == torch.float32:
        return parameter
    master = nn.Parameter(parameter.detach().float())

    def collect(_: Tensor) -> None:
        assert parameter.grad is not None
        if master.grad is None:
            master.grad = parameter.grad.float()
        else:
            master.grad += parameter.grad
        parameter.grad = None

    # After every backward, so that micro-batches add up in float32.
    parameter.register_post_accumulate_grad_hook(collect)
    return master


def _adamw(masters: list[nn.Parameter], config: LearningConfig) -> Any:
    on_gpu = masters[0].device.type == "cuda"
    adamw = torch.optim.AdamW(
        masters,
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=EPS,
        weight_decay=config.weight_decay,
        # In one kernel nothing is allocated, so a step cannot run out of memory halfway.
        fused=on_gpu,
    )
    for master in masters:
        adamw.state[master] = {
            "step": torch.zeros((), dtype=torch.float32, device=master.device),
            "exp_avg": torch.zeros_like(master),
            "exp_avg_sq": torch.zeros_like(master),
        }
    return adamw


def _adamw_8bit(masters: list[nn.Parameter], config: LearningConfig) -> Any:
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as e:
        raise ConfigError(
            "optimizer is adamw_8bit, and bitsandbytes is not installed", "pip install 'guerdon[8bit]', or use adamw"
        ) from e
    adamw = AdamW8bit(
        masters,
        lr=config.learning_rate,
        betas=(config.betas[0], config.betas[1]),
        eps=EPS,
        weight_decay=config.weight_decay,
    )
    for i, master in enumerate(masters):
        adamw.init_state(adamw.param_groups[0], master, 0, i)
    return adamw


def moment_bytes(config: LearningConfig) -> int | None:
    """What AdamW's two moments take for each weight of the model; None where adapters alone are trained."""
    if config.lora is not None:
        return None
    return 2 if config.optimizer == "adamw_8bit" else 8


def rate(config: LearningConfig, step: int) -> float:
    """The factor of the learning rate for the step after `step` others, as transformers' `get_scheduler` has it.

    It rises from 0 over the warm-up, and stays at 1, or falls to 0 at `total_steps` and remains there. Written out
    here because a function of the step leaves no state to save, and because importing transformers' own takes seconds.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    assert config.total_steps is not None
    over = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return 1.0 - over if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * over))
