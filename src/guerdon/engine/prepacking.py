"""Keeps a frozen model's weights in the order in which oneDNN multiplies them, in place of the plain ones, on CPUs.

Otherwise oneDNN brings them into that order in every product, which is 5 to 10% of a forward of SmolLM2's shape on an
AMD EPYC (`benchmarks/RESULTS.md`). A product has the same bits by either, which is checked here with the model's own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from torch import Tensor, nn

from guerdon import memory
from guerdon.engine import onednn
from guerdon.engine.forward import Forward
from guerdon.engine.independence import is_equal, row_states


def prepack(forward: Forward, rows: list[np.ndarray], before: list[Tensor] | None = None) -> bool:
    """Reorders the weights of the trunk's linear layers, and says whether it did; the chosen path must be in use.

    `before` are the rows' states by the plain weights in any batch, computed here if they are unknown. The weights are
    as before if the states had other bits by them, or if the trunk uses its weights in ways of its own. The path
    `single` restores the plain order in each product, which loses nothing.
    """
    layers = list(_layers(forward.trunk))
    if before is None:
        before = row_states(forward, forward.path, rows)
    try:
        for layer in layers:
            layer.weight = nn.Parameter(onednn.reordered(layer.weight.detach()), requires_grad=False)
            memory.trim()  # the gaps do not fit the next one
        after = row_states(forward, forward.path, rows)
        forward.use("single")
        row_states(forward, "single", rows[-1:])
        forward.use(forward.path)
        if all(map(is_equal, after, before)):
            return bool(layers)
    except (RuntimeError, NotImplementedError, AttributeError):  # an operator that does not take such weights
        forward.reset_after_error()
    onednn.restore(forward.trunk)
    forward.use(forward.path)
    return False


def _layers(trunk: nn.Module) -> Iterator[nn.Linear]:
    """Yields the linear layers that multiply as PyTorch's do, by a weight that is no other module's."""
    owners = Counter(id(p) for module in trunk.modules() for p in module.parameters(recurse=False))
    for module in trunk.modules():
        if (
            type(module) is nn.Linear
            and onednn.is_plain(module)
            and type(module.weight) is nn.Parameter
            and owners[id(module.weight)] == 1
            and onednn.can_reorder(module.weight.dtype)
        ):
            yield module
