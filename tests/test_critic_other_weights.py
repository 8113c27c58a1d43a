"""A critic whose model's files were changed between two starts."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import zoo
from guerdon.assembly import build_service
from guerdon.core import ScoreRequest
from guerdon.critic_core import TrainRequest
from guerdon.errors import StartError
from guerdon.server.service import Service
from guerdon.settings.config import CriticConfig, ServerConfig

PROBE = np.arange(1, 9)
SETTINGS = {"global_batch_size": 2, "learning_rate": 1e-2, "dtype": "float32", "device": "cpu"}


def request() -> TrainRequest:
    numbers = np.random.default_rng(0)
    returns, before = numbers.normal(size=(2, 2, 5)).astype(np.float32)
    tokens = numbers.integers(1, 16, (2, 6))
    return TrainRequest("train", tokens, returns, before, np.ones((2, 5), np.float32))


def start(model: Path, critic: Path) -> Service:
    config = CriticConfig(model=str(model), checkpoint_dir=str(critic), **SETTINGS)
    service = build_service(ServerConfig(critic=config))
    service.start()
    return service


async def values(service: Service) -> np.ndarray:
    reply = await service.score("critic_infer", ScoreRequest(tokens=[PROBE]))
    return reply.results[0].values  # type: ignore[union-attr,return-value]


async def test_a_journal_is_not_replayed_on_other_weights(tmp_path: Path) -> None:
    model = zoo.checkpoint("llama", tmp_path / "model", hidden_size=256, intermediate_size=1024)
    file, critic = model / "model.safetensors", tmp_path / "critic"
    whole, tensors = file.read_bytes(), load_file(file)
    service = start(model, critic)
    await service.call("critic_train", request())  # type: ignore[arg-type]
    trained = await values(service)
    await asyncio.to_thread(service.stop)
    tensors["model.layers.0.mlp.gate_proj.weight"] *= 3
    save_file(tensors, file, metadata={"format": "pt"})
    data, edge = file.read_bytes(), 1 << 20
    assert (data[:edge], data[-edge:], len(data)) == (whole[:edge], whole[-edge:], len(whole)) and data != whole
    with pytest.raises(StartError, match=r"the journal was written with weights .*; now: weights ") as refused:
        start(model, critic)
    assert "restore the old files" in refused.value.help and "--checkpoint-dir" in refused.value.help
    file.write_bytes(whole)
    service = start(model, critic)
    np.testing.assert_array_equal(await values(service), trained)
    await asyncio.to_thread(service.stop)
