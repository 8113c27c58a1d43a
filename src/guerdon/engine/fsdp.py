"""When the weights of a model that FSDP2 shards are gathered: layer by layer in a forward, or all of them at once.

FSDP all-gathers a layer's weights before its forward or backward and frees them after it, and reduces its gradients
over the ranks as soon as they exist. Everything else (embeddings, the last norm, the output layer) belongs to the root:
it is gathered when the root's forward begins and stays until the backward pass is over. So any code that runs a part of
the model by itself must do so through the root, and on all ranks at the same time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

from guerdon.distributed.ranks import Ranks


class Fsdp:
    """One model's FSDP root; without a root the model is not sharded, and everything here is a no-op."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root: Any = root
        self._is_gathered = self._has_run = False
        if root is not None:
            root.register_forward_pre_hook(self._on_forward)
            for module in self._modules():
                # Sum, do not average: a share of a loss is already a share of the global batch's.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                # Reduce in float32, and round to the weights' dtype once. Neither transformers nor torch can set this
                # on a sharded model; transformers' own setting also casts every input of a layer. FSDP reads it when
                # the model first runs.
                for group in module._get_fsdp_state()._fsdp_param_groups:
                    if any(parameter.sharded_param.dtype != torch.float32 for parameter in group.fsdp_params):
                        group.mp_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)

    def through_root(self, trunk: nn.Module) -> Callable[..., Any]:
        """Returns the trunk as a function that also gathers its weights in the root."""
        if self._root is None or trunk is self._root:
            return trunk
        # The copy shares modules, parameters and FSDP's hooks.
        entrance = shallow_copy(self._root)
        entrance.forward = lambda **inputs: trunk(**inputs)
        return entrance

    def below_root(self, model: nn.Module) -> Any:
        """Returns a copy of the root without hooks, for code that runs between the trunk's forward and its backward.

        Ranks may call it a different number of times, and again in the backward pass. It shares modules and parameters.
        """
        made = shallow_copy(model)
        if self._root is not None:
            made._forward_pre_hooks, made._forward_hooks = OrderedDict(), OrderedDict()
        return made

    def no_gradients(self) -> AbstractContextManager[Any]:
        """Disables gradients inside the context."""
        # Tensors that FSDP makes in inference mode cannot be used outside of it.
        return torch.inference_mode() if self._root is None else self._no_grad()

    @contextmanager
    def _no_grad(self) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        finally:
            self.reset()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Collective; gathers all weights inside the context, in which ranks run any number of forwards.

        Nothing may take gradients or change the weights meanwhile.
        """
        if self._root is None or self._is_gathered:
            yield
            return
        inner = [module for module in self._modules() if module is not self._root]
        try:
            self._is_gathered = True
            for module in (self._root, *inner):
                module.unshard()
            for module in inner:  # the root never reshards after a forward
                module.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for module in inner:
                module.set_reshard_after_forward(True, recurse=False)
            self._is_gathered = False
            self.reset()

    def reset(self) -> None:
        """Reshards the weights, and forgets forwards that raised or that no backward pass has followed."""
        if self._has_run and not self._is_gathered:
            self._root.reset_iter_state()

    def _on_forward(self, *_: Any) -> None:
        self._has_run = True  # FSDP creates the state that `reset` needs in the first forward

    def _modules(self) -> list[Any]:
        assert self._root is not None
        return [module for module in self._root.modules() if isinstance(module, FSDPModule)]


NOT_SHARDED = Fsdp()


def shallow_copy(module: nn.Module) -> Any:
    """Copies as `copy.copy` does, which FSDP's classes forbid."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


def fsdp_of(model: nn.Module, ranks: Ranks) -> Fsdp:
    """Returns the `Fsdp` of a model that `build_model` has loaded for these ranks."""
    return Fsdp(model) if ranks.in_step else NOT_SHARDED
