"""AdamW over a model's parameters: float32 masters, gradient norm, learning-rate schedule, and the state by name."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.errors import ConfigError, install_command
from guerdon.settings.config import LearningConfig
from guerdon.training import collectives

EPS = 1e-8
log = logging.getLogger(__name__)
CONSTANTS = ("qmap1", "qmap2")
"""State that bitsandbytes keeps with every parameter and never changes."""


class Optimiser:
    """Steps the parameters given by name; a parameter of less than float32 has a float32 master, which is stepped for
    it.

    Gradients come from `backward`, called any number of times between two steps, with `collect` after each. Everything
    that a step needs is allocated at the start, so that lack of memory shows there. If a parameter is sharded, each
    rank steps its own shard, because AdamW is elementwise.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: LearningConfig,
        ranks: Ranks = ALONE,
        summed_over_tensor_ranks: frozenset[str] = frozenset(),
    ) -> None:
        """Raises ConfigError if the 8-bit optimiser is not installed, or as `check_layout`.

        `summed_over_tensor_ranks` names the parameters whose gradients must be summed over the ranks of tensor
        parallelism.
        """
        check_layout(config, ranks)
        self.step = 0
        self._parameters = parameters
        self._ranks, self._summed = ranks, summed_over_tensor_ranks
        self._masters = {}  # a sharded parameter's is this rank's shard
        for name, parameter in parameters.items():
            if parameter.dtype == torch.float32:
                own = nn.Parameter(collectives.local_shard(parameter)) if isinstance(parameter, DTensor) else parameter
            else:  # accumulates its gradients
                own = nn.Parameter(collectives.local_shard(parameter.detach()).float())
            self._masters[name] = own
        for name in self._copied():
            self._collect_on_backward(name)
        self._largest_norm = config.gradient_clip_val or math.inf
        self._adamw = _made_adamw(list(self._masters.values()), config)
        for name in self._borrowed():
            self._release(name)
        self._config = config
        self._has_warned = False

    @property
    def learning_rate(self) -> float:
        """That of the next step; it depends only on the number of steps made."""
        return self._config.learning_rate * schedule_factor(self._config, self.step)

    def collect(self) -> None:
        """Moves gradients of lower-precision parameters to their masters; call it after each backward.

        A hook does so already, except after a sharded parameter has moved to another device: that creates a new tensor
        without the hook.
        """
        for name in self._copied():
            if (parameter := self._parameters[name]).grad is not None:
                self._collect(name)
                # The old list of hooks is still there, but is not called any more.
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                self._collect_on_backward(name)

    def sum_over_ranks(self) -> None:
        """Collective; sums the gradients over the ranks' parts of the batch. Call it once a step.

        FSDP sums its sharded gradients itself.
        """
        ranks = self._ranks
        if ranks.size == 1:
            return
        whole = [name for name, p in self._parameters.items() if not collectives.is_sharded_over(p, collectives.DATA)]
        with ranks.waiting():  # summing a large model's gradients takes long, and no layer runs that would tick
            if ranks.data_size > 1 and whole:
                found = self._gradients()
                # A weight that no rank used has no gradient and must not decay.
                has_any = ranks.total([float(name in found) for name in whole])
                wanted = [name for name, count in zip(whole, has_any, strict=True) if count]
                # Allocates before the all-reduce, in which the other ranks would wait for one that is out of memory.
                with collectives.share_errors(ranks):
                    gradients = [self._gradient_or_zeros(name) for name in wanted]
                collectives.sum_gradients(gradients, ranks.data_group)
            if ranks.tensor_size > 1:
                found = self._gradients()
                summed = sorted(self._summed & found.keys())
                collectives.sum_gradients((found[name] for name in summed), ranks.tensor_group)

    def gradient_norm(self) -> float:
        """Returns the norm of all gradients together, before clipping; with several ranks, call it after
        `sum_over_ranks`.
        """
        gradients = self._gradients()
        if self._ranks.size == 1:
            return torch.nn.utils.get_total_norm(list(gradients.values())).item()
        with self._ranks.waiting():
            return collectives.gradient_norm(gradients, self._parameters, self._ranks)

    def apply(self, norm: float) -> None:
        """Makes one step with the gradients, clipped by their `norm`, and frees them."""
        with self._ranks.waiting():
            assert all(self._parameters[name].grad is None for name in self._copied()), "gradients were not collected"
            for name in self._borrowed():
                master, parameter = self._masters[name], self._parameters[name]
                master.data = collectives.local_shard(parameter)
                master.grad = self._gradient(name)
            torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._largest_norm, torch.tensor(norm))
            for group in self._adamw.param_groups:
                group["lr"] = self.learning_rate
            self._adamw.step()
            with torch.no_grad():
                for name in self._copied():
                    collectives.local_shard(self._parameters[name]).copy_(self._masters[name])
            self.step += 1
            self.free()
            for name in self._borrowed():
                self._release(name)
        # A learning rate of 0 is normal at the start of the warm-up.
        has_ended = self.step > self._config.warmup_steps and not schedule_factor(self._config, self.step)
        if has_ended and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the learning rate is 0: the schedule ended at step %d (total_steps), and further steps change nothing",
                self._config.total_steps,
            )

    def free(self) -> None:
        """Drops all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._masters[name].grad = None

    def _gradients(self) -> dict[str, Tensor]:
        """Returns this rank's shards of the existing gradients, by the parameters' names."""
        found = {name: self._gradient(name) for name in self._parameters}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _gradient(self, name: str) -> Tensor | None:
        parameter, master = self._parameters[name], self._masters[name]
        if master.dtype != parameter.dtype:
            return master.grad
        return collectives.local_gradient(parameter)

    def _gradient_or_zeros(self, name: str) -> Tensor:
        if (found := self._gradient(name)) is not None:
            return found
        parameter, master = self._parameters[name], self._masters[name]
        if master.dtype != parameter.dtype:
            master.grad = torch.zeros_like(master)
        else:
            parameter.grad = torch.zeros_like(parameter)
        zeros = self._gradient(name)
        assert zeros is not None
        return zeros

    def _collect_on_backward(self, name: str) -> None:
        # At once, so that gradients are not all held in both dtypes. FSDP calls the hook after summing over ranks.
        self._parameters[name].register_post_accumulate_grad_hook(lambda _: self._collect(name))

    def _collect(self, name: str) -> None:
        """Adds the parameter's gradient to its master's, so that micro-batches accumulate in float32."""
        parameter, master = self._parameters[name], self._masters[name]
        gradient = collectives.local_gradient(parameter)
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
        parameter.grad = None

    def _copied(self) -> list[str]:
        """Returns the parameters of less than float32, whose masters are copies."""
        return [name for name, parameter in self._parameters.items() if parameter.dtype != torch.float32]

    def _borrowed(self) -> list[str]:
        """Returns the sharded float32 parameters, whose masters refer to their local shards during a step only."""
        return [
            name for name, p in self._parameters.items() if p.dtype == torch.float32 and self._masters[name] is not p
        ]

    def _release(self, name: str) -> None:
        # A reference to the shard would keep it on the device when the weights are offloaded.
        master = self._masters[name]
        master.grad = None
        master.data = master.data.new_empty(0)

    # ---------------------------------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        """Returns all state by name, `<parameter>/<what>`: the tensors themselves, not copies.

        State of the shape of a sharded parameter is sharded like it.
        """
        made: dict[str, Tensor] = {}
        copied = set(self._copied())
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if name in copied:
                made[f"{name}/master"] = collectives.as_distributed(master.data, parameter)
            for key, value in self._adamw.state[master].items():
                if key not in CONSTANTS:
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    made[f"{name}/{key}"] = tensor if key == "step" else collectives.as_distributed(tensor, parameter)
        return made

    def restore(self, step: int, read: Callable[[str], Tensor]) -> None:
        """Restores the state of `step` steps from `read(name)`; the caller restores the parameters."""
        for name, tensor in self.tensors().items():
            tensor.copy_(read(name))
        for name, master in self._masters.items():
            for key, value in self._adamw.state[master].items():
                if not isinstance(value, Tensor):
                    self._adamw.state[master][key] = int(read(f"{name}/{key}"))
        self.step = step

    def move(self, device: torch.device) -> None:
        """Moves masters and state to the device; parameters move with their module."""
        for name in self._copied():
            self._masters[name].data = self._masters[name].data.to(device)
        for master in self._masters.values():
            state = self._adamw.state[master]
            state |= {key: value.to(device) for key, value in state.items() if isinstance(value, Tensor)}


def _made_adamw(masters: list[nn.Parameter], config: LearningConfig) -> Any:
    """Returns the optimiser with its whole state; raises ConfigError if it is the 8-bit one and not installed."""
    settings: dict[str, Any] = {"lr": config.learning_rate, "betas": tuple(config.betas), "eps": EPS}
    settings["weight_decay"] = config.weight_decay
    if config.optimizer != "adamw_8bit":
        # Fused on a GPU, because a single kernel allocates nothing: a step cannot run out of memory halfway.
        adamw = torch.optim.AdamW(masters, **settings, fused=masters[0].device.type == "cuda")
        for master in masters:
            adamw.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }
        return adamw
    try:
        from bitsandbytes.optim import AdamW8bit
    except ImportError as e:
        raise ConfigError(
            "optimizer is adamw_8bit, and bitsandbytes is not installed", f"{install_command('8bit')}, or use adamw"
        ) from e
    adamw = AdamW8bit(masters, **settings)
    for i, master in enumerate(masters):
        adamw.init_state(adamw.param_groups[0], master, 0, i)
    return adamw


def check_layout(config: LearningConfig, ranks: Ranks) -> None:
    """Raises ConfigError if the settings do not fit the ranks' layout; call it before anything is loaded."""
    if config.lora is not None and ranks.tensor_size > 1:
        raise ConfigError(
            f"lora is set, and tensor_parallel is {ranks.tensor_size}: adapters do not fit sharded layers",
            "use fsdp, or leave tensor_parallel at 1, or remove lora",
        )
    if config.optimizer == "adamw_8bit" and config.lora is None and ranks.is_sharded:
        raise ConfigError(
            "optimizer is adamw_8bit, and the weights are sharded over ranks, but bitsandbytes quantises whole tensors",
            "use adamw, whose state is sharded as the weights are, or neither tensor_parallel nor fsdp",
        )


def moment_bytes(config: LearningConfig) -> int | None:
    """Returns the bytes of AdamW's two moments per weight of the model; None if only adapters are trained."""
    if config.lora is not None:
        return None
    return 2 if config.optimizer == "adamw_8bit" else 8


def schedule_factor(config: LearningConfig, step: int) -> float:
    """Returns the factor of the learning rate after `step` steps, as transformers' `get_scheduler` defines it.

    It rises from 0 during the warm-up, then stays at 1 or falls to 0 at `total_steps`. It is reimplemented here because
    a function of the step has no state to save, and because importing transformers' version takes seconds.
    """
    if step < config.warmup_steps:
        return step / config.warmup_steps
    if config.lr_schedule == "constant":
        return 1.0
    assert config.total_steps is not None
    progress = min(1.0, (step - config.warmup_steps) / (config.total_steps - config.warmup_steps))
    return 1.0 - progress if config.lr_schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
