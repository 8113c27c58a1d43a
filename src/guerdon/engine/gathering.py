"""When the weights of a model that FSDP2 shards are whole: layer by layer in a forward, or all of them for a while.

A layer's weights are gathered as it begins and given up as it ends, in the forward and in the backward pass, and its
gradients are summed over the ranks as soon as they are there. All else (embeddings, the last norm, the layer that
makes logits) belongs to the root: it is gathered when the root begins and stays until the backward pass is over. So
whatever runs a part of the model by itself must do so through the root, and all ranks at the same time.
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


class Gathering:
    """The root of one model that FSDP2 shards; with None it is of a model that is whole, and changes nothing."""

    def __init__(self, root: nn.Module | None = None) -> None:
        self._root: Any = root
        self._is_gathered = self._has_run = False
        if root is not None:
            root.register_forward_pre_hook(self._ran)
            for module in self._modules():
                # Sums, for every share of a loss is a share of the whole batch's.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                _sum_in_float32(module)

    def through_root(self, trunk: nn.Module) -> Callable[..., Any]:
        """The trunk as a function, whose weights in the root are gathered, too."""
        if self._root is None or trunk is self._root:
            return trunk
        # A copy shares modules, parameters and FSDP's hooks.
        entrance = shallow_copy(self._root)
        entrance.forward = lambda **inputs: trunk(**inputs)
        return entrance

    def below_root(self, model: nn.Module) -> Any:
        """A copy of the root that gathers nothing, to run something between the trunk's forward and its backward.

        So its calls may be more on one rank than on another, and may come again in the backward pass. It shares modules
        and parameters.
        """
        made = shallow_copy(model)
        if self._root is not None:
            made._forward_pre_hooks, made._forward_hooks = OrderedDict(), OrderedDict()
        return made

    def no_gradients(self) -> AbstractContextManager[Any]:
        """Within it nothing is differentiated."""
        # What FSDP makes within inference mode cannot be used outside of it.
        return torch.inference_mode() if self._root is None else self._no_gradients()

    @contextmanager
    def _no_gradients(self) -> Iterator[None]:
        try:
            with torch.no_grad():
                yield
        finally:
            self.reset()

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Within it all weights are whole: ranks run as many forwards as they like, without gradients.

        All ranks must enter it at the same time, and nothing may change the weights meanwhile.
        """
        if self._root is None or self._is_gathered:
            yield
            return
        inner = [module for module in self._modules() if module is not self._root]
        try:
            self._is_gathered = True
            for module in (self._root, *inner):
                module.unshard()
            for module in inner:  # the root keeps its own anyhow
                module.set_reshard_after_forward(False, recurse=False)
            yield
        finally:
            for module in inner:
                module.set_reshard_after_forward(True, recurse=False)
            self._is_gathered = False
            self.reset()

    def reset(self) -> None:
        """Gives up what is whole, and forgets forwards that no backward pass has followed, or that raised."""
        if self._has_run and not self._is_gathered:
            self._root.reset_iter_state()

    def _ran(self, *_: Any) -> None:
        self._has_run = True  # before that FSDP has not made what a reset wants

    def _modules(self) -> list[Any]:
        assert self._root is not None
        return [module for module in self._root.modules() if isinstance(module, FSDPModule)]


WHOLE = Gathering()


def _sum_in_float32(module: Any) -> None:
    """Has a module's gradients summed over the ranks in float32, and rounded to the weights' dtype once."""
    # Neither transformers nor torch lets a model that is sharded be told so; the setting of transformers' own casts all
    # that goes into a layer, too. It is read when the model first runs.
    for group in module._get_fsdp_state()._fsdp_param_groups:
        if any(parameter.sharded_param.dtype != torch.float32 for parameter in group.fsdp_params):
            group.mp_policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)


def shallow_copy(module: nn.Module) -> Any:
    """As `copy.copy`, which FSDP's classes do not let pass."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


def gathering(model: nn.Module, ranks: Ranks) -> Gathering:
    """That of a model that `fill` has loaded for these ranks."""
    return Gathering(model) if ranks.in_step else WHOLE
