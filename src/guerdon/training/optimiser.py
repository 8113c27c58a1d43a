"""AdamW over a model's parameters: float32 masters, the norm of the gradient, the schedule, and the state by name."""

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
"""What bitsandbytes keeps with every parameter and never changes."""


class Optimiser:
    """Steps the parameters given by name; those of less than float32 have a float32 master that is stepped for them.

    Gradients come from `backward`, as often as it is called between two steps, and `collect` after each. Everything
    that a step needs is allocated here, so that memory which does not suffice shows at the start. Of a parameter that
    is sharded over ranks each steps its own part: AdamW knows no other element than the one it steps.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        config: LearningConfig,
        ranks: Ranks = ALONE,
        summed_over_tensor_ranks: frozenset[str] = frozenset(),
    ) -> None:
        """`summed_over_tensor_ranks` names those whose gradients are sums over the ranks of tensor parallelism.

        Raises ConfigError where the 8-bit optimiser is asked for and not installed, and as `check_layout`.
        """
        check_layout(config, ranks)
        self.step = 0
        self._parameters = parameters
        self._ranks, self._summed = ranks, summed_over_tensor_ranks
        self._masters = {name: _master(parameter) for name, parameter in parameters.items()}
        for name in self._copied():
            self._collect_as_made(name)
        self._largest_norm = config.gradient_clip_val or math.inf
        make = _adamw_8bit if config.optimizer == "adamw_8bit" else _adamw
        self._adamw = make(list(self._masters.values()), config)
        for name in self._lent():
            self._give_back(name)
        self._config = config
        self._has_warned = False

    @property
    def learning_rate(self) -> float:
        """That of the next step; it depends on nothing but the number of steps made."""
        return self._config.learning_rate * rate(self._config, self.step)

    def collect(self) -> None:
        """Takes what a backward pass has left in parameters of less than float32; to be called after each.

        Nothing is left but where a sharded parameter was moved from one device to another: that gives it another
        tensor, without the hook.
        """
        for name in self._copied():
            if (parameter := self._parameters[name]).grad is not None:
                self._collect(name)
                # The list of them has stayed, and is not looked at any more.
                parameter._post_accumulate_grad_hooks = None  # type: ignore[assignment]
                self._collect_as_made(name)

    def sum_over_ranks(self) -> None:
        """Makes the gradients those of all ranks' parts of the batch; to be called once a step, on every rank.

        What FSDP shards it has summed itself.
        """
        if self._ranks.size > 1:
            # Gradients of a large model are long on their way, and no layer runs that would tick.
            with self._ranks.waiting():
                self._sum_over_ranks()

    def _sum_over_ranks(self) -> None:
        ranks = self._ranks
        whole = [name for name, p in self._parameters.items() if not collectives.is_sharded_over(p, collectives.DATA)]
        if ranks.data_size > 1 and whole:
            found = self._gradients()
            # A weight that nothing was computed with has no gradient, and is not to decay: unless another rank has one.
            has_any = ranks.total([float(name in found) for name in whole])
            wanted = [name for name, count in zip(whole, has_any, strict=True) if count]
            # What has to be allocated is, before any rank waits for another in the sum itself.
            made = collectives.together(ranks, lambda: [self._gradient_or_zeros(name) for name in wanted])
            collectives.sum_gradients(made, ranks.data_group)
        if ranks.tensor_size > 1:
            found = self._gradients()
            collectives.sum_gradients((found[name] for name in sorted(self._summed & found.keys())), ranks.tensor_group)

    def gradient_norm(self) -> float:
        """The norm of all gradients together, before clipping; of many ranks, once they are summed."""
        gradients = self._gradients()
        if self._ranks.size == 1:
            return torch.nn.utils.get_total_norm(list(gradients.values())).item()
        with self._ranks.waiting():
            return collectives.total_norm(gradients, self._parameters, self._ranks)

    def apply(self, norm: float) -> None:
        """One step with the gradients, clipped by their `norm`; they are freed afterwards."""
        with self._ranks.waiting():
            self._apply(norm)

    def _apply(self, norm: float) -> None:
        assert all(self._parameters[name].grad is None for name in self._copied()), "gradients were not collected"
        for name in self._lent():
            master, parameter = self._masters[name], self._parameters[name]
            master.data = collectives.local(parameter)
            master.grad = self._gradients_of(name)
        torch.nn.utils.clip_grads_with_norm_(self._masters.values(), self._largest_norm, torch.tensor(norm))
        for group in self._adamw.param_groups:
            group["lr"] = self.learning_rate
        self._adamw.step()
        with torch.no_grad():
            for name in self._copied():
                collectives.local(self._parameters[name]).copy_(self._masters[name])
        self.step += 1
        self.free()
        for name in self._lent():
            self._give_back(name)
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

    def _gradients(self) -> dict[str, Tensor]:
        """This rank's parts of the gradients that there are, by the parameters' names."""
        found = {name: self._gradients_of(name) for name in self._parameters}
        return {name: gradient for name, gradient in found.items() if gradient is not None}

    def _gradients_of(self, name: str) -> Tensor | None:
        parameter, master = self._parameters[name], self._masters[name]
        if master.dtype != parameter.dtype:
            return master.grad
        return collectives.local_gradient(parameter)

    def _gradient_or_zeros(self, name: str) -> Tensor:
        if (found := self._gradients_of(name)) is not None:
            return found
        parameter, master = self._parameters[name], self._masters[name]
        if master.dtype != parameter.dtype:
            master.grad = torch.zeros_like(master)
        else:
            parameter.grad = torch.zeros_like(parameter)
        made = self._gradients_of(name)
        assert made is not None
        return made

    def _collect_as_made(self, name: str) -> None:
        # As soon as it is there, so that not all are held in both dtypes; FSDP calls it once it has summed over ranks.
        self._parameters[name].register_post_accumulate_grad_hook(lambda _: self._collect(name))

    def _collect(self, name: str) -> None:
        """Adds the parameter's gradient to its master's, so that micro-batches add up in float32."""
        parameter, master = self._parameters[name], self._masters[name]
        gradient = collectives.local_gradient(parameter)
        assert gradient is not None
        if master.grad is None:
            master.grad = gradient.float()
        else:
            master.grad += gradient
        parameter.grad = None

    def _copied(self) -> list[str]:
        """The parameters of less than float32, which have copies of their own as masters."""
        return [name for name, parameter in self._parameters.items() if parameter.dtype != torch.float32]

    def _lent(self) -> list[str]:
        """The sharded parameters in float32, whose masters are their parts on this rank, for the time of a step."""
        return [
            name for name, p in self._parameters.items() if p.dtype == torch.float32 and self._masters[name] is not p
        ]

    def _give_back(self, name: str) -> None:
        # A part that is held on to would stay on the device when the weights leave it.
        master = self._masters[name]
        master.grad = None
        master.data = master.data.new_empty(0)

    # ---------------------------------------------------------------------------------------- state

    def tensors(self) -> dict[str, Tensor]:
        """All state by name, `<parameter>/<what>`: the tensors themselves, where they are tensors.

        What is as large as a sharded parameter is sharded as it is.
        """
        made: dict[str, Tensor] = {}
        copied = set(self._copied())
        for name, master in self._masters.items():
            parameter = self._parameters[name]
            if name in copied:
                made[f"{name}/master"] = collectives.whole_of(master.data, parameter)
            for key, value in self._adamw.state[master].items():
                if key not in CONSTANTS:
                    tensor = value if isinstance(value, Tensor) else torch.tensor(value)
                    made[f"{name}/{key}"] = tensor if key == "step" else collectives.whole_of(tensor, parameter)
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
        copied = set(self._copied())
        for name, master in self._masters.items():
            if name in copied:
                master.data = master.data.to(device)
            state = self._adamw.state[master]
            for key, value in state.items():
                if isinstance(value, Tensor):
                    state[key] = value.to(device)


def _master(parameter: nn.Parameter) -> nn.Parameter:
    """The parameter itself where it is float32, else a float32 copy that collects its gradients.

    Of a sharded parameter it is this rank's part.
    """
    if parameter.dtype == torch.float32:
        return nn.Parameter(collectives.local(parameter)) if isinstance(parameter, DTensor) else parameter
    return nn.Parameter(collectives.local(parameter.detach()).float())


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
            "optimizer is adamw_8bit, and bitsandbytes is not installed", f"{install_command('8bit')}, or use adamw"
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


def check_layout(config: LearningConfig, ranks: Ranks) -> None:
    """Raises ConfigError where the settings do not go with the ranks' layout; before anything is loaded."""
    if config.lora is not None and ranks.tensor_size > 1:
        raise ConfigError(
            f"lora is set, and tensor_parallel is {ranks.tensor_size}: adapters do not fit layers that lie in parts",
            "use fsdp, or leave tensor_parallel at 1, or leave lora out",
        )
    if config.optimizer == "adamw_8bit" and config.lora is None and ranks.is_sharded:
        raise _sharded_8bit()


def _sharded_8bit() -> ConfigError:
    return ConfigError(
        "optimizer is adamw_8bit, and the weights are sharded over ranks: bitsandbytes quantises whole tensors only",
        "use adamw, whose state is sharded as the weights are, or neither tensor_parallel nor fsdp",
    )


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
