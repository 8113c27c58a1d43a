"""Lets a process make the self-check of the same weights once, for tests that load one model many times."""

import hashlib
from collections.abc import Iterator

import pytest
import torch

from guerdon.engine import self_check
from guerdon.engine.forward import Forward

_found: dict[str, tuple[self_check._Choice, bool]] = {}


def once() -> Iterator[None]:
    """For a fixture of each module: weights that were checked with the same settings take the path found then."""
    check = self_check._best_path

    def best_path(forward: Forward, *, gradients: bool, shares: bool) -> self_check._Choice:
        if forward.ranks.size > 1:
            return check(forward, gradients=gradients, shares=shares)
        key = _key(forward, gradients)
        if key not in _found:
            made = check(forward, gradients=gradients, shares=shares)
            _found[key] = made, forward._row_products.caught
        made, forward._row_products.caught = _found[key]
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(self_check, "_best_path", best_path)
        yield


def _key(forward: Forward, gradients: bool) -> str:
    trunk = forward.trunk
    settings = (
        type(trunk), trunk.config, forward.info.vocab_size, forward.info.max_length, forward.pad_token_id,
        forward.max_batch_tokens, gradients, ["forward" in vars(module) for module in trunk.modules()],
        self_check.TOLERANCE, self_check.GRADIENT_TOLERANCE,
    )  # fmt: skip
    made = hashlib.sha256(repr(settings).encode())
    for name, tensor in [*trunk.named_parameters(), *trunk.named_buffers()]:
        made.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        made.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return made.hexdigest()
