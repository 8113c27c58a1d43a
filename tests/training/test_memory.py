"""A critic's memory is estimated before it is loaded; too little memory is one clear error."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

import zoo
from guerdon.assembly import build_trainer
from guerdon.engine.checkpoint import placement
from guerdon.errors import CheckpointError, StartError
from guerdon.settings.config import CriticConfig
from guerdon.training import critic_trainer as training_critic

HELPS = ("lora", "adamw_8bit", "activation_checkpointing", "smaller model")


@pytest.mark.parametrize(
    ("settings", "bytes_a_weight"),
    [
        ({"dtype": "float32"}, 4 + 4 + 8),  # weights, gradients, moments
        ({"dtype": "bfloat16"}, 2 + 4 + 4 + 8),  # beside them the masters
        ({"dtype": "bfloat16", "optimizer": "adamw_8bit"}, 2 + 4 + 4 + 2),
        ({"dtype": "bfloat16", "lora": 2}, 2),
    ],
    ids=str,
)
def test_all_that_trains_is_counted_before_anything_is_loaded(
    settings: Any, bytes_a_weight: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "optimizer" in settings:
        pytest.importorskip("bitsandbytes")
    folder = zoo.checkpoint("llama", tmp_path)
    needed = bytes_a_weight * sum(math.prod(tensor.shape) for tensor in zoo.tensors(folder).values())
    config = CriticConfig(model=str(folder), device="cpu", **settings)
    monkeypatch.setattr(placement, "_host_bytes", lambda: needed)
    build_trainer(config)
    monkeypatch.setattr(placement, "_host_bytes", lambda: needed - 1)
    with pytest.raises(CheckpointError, match="are free on this machine") as caught:
        build_trainer(config)
    if "lora" not in settings:
        assert "with its optimiser's state" in str(caught.value)
        assert all(word in caught.value.help for word in HELPS)


def test_a_device_that_is_full_is_one_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(training_critic, "Optimiser", full)
    folder = zoo.checkpoint("llama", tmp_path)
    with pytest.raises(StartError, match=r"leaves no memory to train it: CUDA out of memory") as caught:
        build_trainer(CriticConfig(model=str(folder)))
    assert all(word in caught.value.help for word in HELPS)
