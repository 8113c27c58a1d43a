"""The score over the wire is the score of plain transformers: every architecture, on one server, by real clients."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import tritonclient.http

import zoo
from guerdon import RewardClient
from guerdon.assembly import build_service
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from tiers import asked, of_each_kind

ROWS = zoo.rows(3, groups=((40, 8), (25, 3), (60, 1)))
MIXED = ["llama", "gpt2", "bert", "mamba"]


@pytest.fixture(scope="module")
def zoo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("zoo")


@pytest.fixture(scope="module")
def server(zoo_folder: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """One server of all architectures that are tried, and of a per-token and a process reward model."""
    torch.set_num_threads(1)
    models = []
    for name in asked(request, zoo.ARCHITECTURES, MIXED):
        folder = zoo.checkpoint(name, zoo_folder / name)
        models.append(ModelConfig(model=str(folder), name=name, max_batch_tokens=300))
    for name, labels in (("values", 1), ("steps", 2)):
        folder = zoo.checkpoint("llama", zoo_folder / name, "tokcls", num_labels=labels)
        models.append(ModelConfig(model=str(folder), name=name, max_batch_tokens=300))
    config = ServerConfig(port=0, grpc_port=0, models=models)
    with RunningServer(build_service(config), config) as running:
        yield running


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= 1e-4 * want.std()


def by_tritonclient(url: str, name: str, rows: list[np.ndarray]) -> np.ndarray:
    tokens = np.zeros((len(rows), max(map(len, rows)) + 3), dtype=np.int64)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    inputs = []
    for key, value in {"tokens": tokens, "sequence_lengths": np.array([[len(r)] for r in rows])}.items():
        inputs.append(tritonclient.http.InferInput(key, value.shape, "INT64"))
        inputs[-1].set_data_from_numpy(value)
    with tritonclient.http.InferenceServerClient(url.removeprefix("http://")) as client:
        rewards = client.infer(name, inputs).as_numpy("rewards")
    assert rewards.dtype == np.float32 and rewards.shape == (len(rows), 1)
    return rewards[:, 0]


@pytest.mark.parametrize("name", of_each_kind(zoo.ARCHITECTURES))
def test_rewards_over_the_wire_equal_transformers(name: str, server: RunningServer, zoo_folder: Path) -> None:
    want = zoo.reference(zoo_folder / name, ROWS)
    assert_close(by_tritonclient(server.http_url, name, ROWS), want)
    assert server.grpc_url is not None
    for url in (server.http_url, server.grpc_url):
        with RewardClient(url, model=name) as client:
            assert_close(client.score(tokens=ROWS).rewards, want)
            # Many requests at once share batches, in whatever order they come.
            singles = [client.submit(tokens=[row]) for row in ROWS]
            assert_close(np.array([f.result(120).rewards[0] for f in singles]), want)


def test_values_over_the_wire_equal_transformers(server: RunningServer, zoo_folder: Path) -> None:
    want = np.concatenate(zoo.reference_tokens(zoo_folder / "values", ROWS))[:, 0]
    with RewardClient(server.http_url, model="values") as client:
        values = client.score(tokens=ROWS).values
    assert values is not None
    assert_close(np.concatenate([v[: len(row)] for v, row in zip(values, ROWS, strict=True)]), want)


def test_step_rewards_over_the_wire_equal_transformers(server: RunningServer, zoo_folder: Path) -> None:
    at = [np.array([len(row) // 2, len(row) - 1]) for row in ROWS]
    outputs = zoo.reference_tokens(zoo_folder / "steps", ROWS)
    want = [torch.softmax(torch.from_numpy(o), -1)[:, 1].numpy()[a] for o, a in zip(outputs, at, strict=True)]
    with RewardClient(server.http_url, model="steps") as client:
        scores = client.score(tokens=ROWS, steps=at)
    assert scores.steps is not None
    np.testing.assert_allclose(np.stack(scores.steps), np.stack(want), atol=1e-5)
    np.testing.assert_allclose(scores.rewards, np.stack(want).min(1), atol=1e-5)


def test_requests_in_parallel_to_many_models_keep_apart(server: RunningServer, zoo_folder: Path) -> None:
    names = MIXED * 4
    with ThreadPoolExecutor(16) as pool:
        got = list(pool.map(lambda name: by_tritonclient(server.http_url, name, ROWS), names))
    for name, rewards in zip(names, got, strict=True):
        assert_close(rewards, zoo.reference(zoo_folder / name, ROWS))
