"""A critic whose folder guerdon 0.1 wrote, and one whose model's files were changed between two starts."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

import zoo
from guerdon.assembly import build_service
from guerdon.core import ScoreRequest
from guerdon.critic_core import ControlRequest, Operation, TrainReport
from guerdon.errors import StartError
from guerdon.server.service import Service
from guerdon.settings.config import CriticConfig, ServerConfig
from written_by_0_1.make import CRITIC, HERE, MODEL, PROBE, SETTINGS, request

THEN = json.loads((HERE / "then.json").read_text())


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """Copies of the model and of the critic's folder."""
    return (
        Path(shutil.copytree(MODEL, tmp_path / "model")),
        Path(shutil.copytree(CRITIC, tmp_path / "critic")),
    )


def start(model: Path, critic: Path) -> Service:
    config = CriticConfig(model=str(model), checkpoint_dir=str(critic), **SETTINGS)
    service = build_service(ServerConfig(critic=config))
    service.start()
    return service


async def train(service: Service, number: int) -> TrainReport:
    return await service.call("critic_train", request(number))  # type: ignore[arg-type,return-value]


async def values(service: Service) -> np.ndarray:
    reply = await service.score("critic_infer", ScoreRequest(tokens=[PROBE]))
    return reply.results[0].values  # type: ignore[union-attr,return-value]


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["checkpoint", "journal alone"])
async def test_what_0_1_wrote_is_gone_on_from(
    has_checkpoint: bool, folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    model, critic = folders
    if not has_checkpoint:
        shutil.rmtree(critic / "checkpoint-000001-step-2")
    with caplog.at_level(logging.INFO):
        service = start(model, critic)
    try:
        assert caplog.text.count("replaying the journal: ") == (2 if has_checkpoint else 4)
        np.testing.assert_allclose(await values(service), THEN["values"], rtol=1e-3, atol=1e-3)
        again = await train(service, 3)
        assert (again.step, again.loss) == (4, pytest.approx(THEN["loss"], rel=1e-3))
        assert (await train(service, 4)).step == 5
        trained = await values(service)
    finally:
        await asyncio.to_thread(service.stop)
    for _ in range(2):  # from old records and a new one, then from a new checkpoint
        service = start(model, critic)
        np.testing.assert_array_equal(await values(service), trained)
        await service.call("critic_save", ControlRequest(Operation.SAVE))
        await asyncio.to_thread(service.stop)


@pytest.mark.parametrize("has_checkpoint", [True, False], ids=["checkpoint", "journal alone"])
def test_what_0_1_wrote_is_refused_on_other_weights(has_checkpoint: bool, folders: tuple[Path, Path]) -> None:
    model, critic = folders
    if not has_checkpoint:
        shutil.rmtree(critic / "checkpoint-000001-step-2")
    tensors = load_file(model / "model.safetensors")
    tensors["score.weight"] += 1
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(StartError, match="belongs to a critic of another" if has_checkpoint else "was written with w"):
        start(model, critic)


async def test_a_journal_is_not_replayed_on_other_weights(tmp_path: Path) -> None:
    model = zoo.checkpoint("llama", tmp_path / "model", hidden_size=256, intermediate_size=1024)
    file, critic = model / "model.safetensors", tmp_path / "critic"
    whole, tensors = file.read_bytes(), load_file(file)
    service = start(model, critic)
    await train(service, 0)
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
