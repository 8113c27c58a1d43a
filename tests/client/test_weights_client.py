"""A trainer's client of live weights over real HTTP: torch's and numpy's tensors, every n steps, errors and retries."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import zoo
from guerdon import InvalidRequest, RetryPolicy, RewardClient, Unavailable, UnknownModel, Unreachable, WeightsClient
from guerdon.client import weights_client
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig
from ports import free_port
from served import running
from server.swapping import ROWS


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.checkpoint("llama", tmp_path_factory.mktemp("rm"))


@pytest.fixture(scope="module")
def server(base: Path) -> Iterator[RunningServer]:
    with running(ModelConfig(model=str(base), name="rm"), weight_transfer=str(base)) as server:
        yield server


def version(server: RunningServer) -> str:
    with RewardClient(server.http_url, "rm") as client:
        return client.score(tokens=ROWS).weights_version


@pytest.mark.slow
def test_every_third_call_sends_torch_or_numpy_with_the_same_bits(
    server: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_client, "_PIECE_BYTES", 1 << 14)  # several pieces, and tensors that are larger
    tensors = {n: torch.nn.Parameter(t * 1.5) for n, t in load_file(base / "model.safetensors").items()}
    send = WeightsClient(server.http_url, "rm", every=3)
    made = [send(tensors.items(), version=f"step-{i}") for i in range(6)]
    assert made[0] is made[1] is made[3] is made[4] is None
    assert made[2] == made[5] == version(server)
    assert WeightsClient(server.http_url)({n: t.detach().numpy() for n, t in tensors.items()}) == made[2]
    half = WeightsClient(server.http_url)({n: t.detach().bfloat16().t().contiguous().t() for n, t in tensors.items()})
    assert half == version(server) != made[2]


class Shard:
    dtype = "torch.float32"

    def full_tensor(self) -> None: ...


@pytest.mark.parametrize(
    ("tensors", "error", "says"),
    [
        ({"a": np.zeros(3)}, InvalidRequest, "a is float64; weights are float32, bfloat16 or float16"),
        ({"a": torch.zeros(3, dtype=torch.int8)}, InvalidRequest, "a is torch.int8"),
        ({"a": [1.0]}, InvalidRequest, "a is list"),
        ({"a": Shard()}, InvalidRequest, r"a is a shard; .* all ranks"),
        ({"a": np.zeros(3, np.float32)}, InvalidRequest, "a is none of the model's tensors"),
        ({}, InvalidRequest, "tensors are missing"),
    ],
)
def test_what_is_no_weight_is_said_and_the_next_call_sends(
    server: RunningServer, base: Path, tensors: Any, error: type[Exception], says: str
) -> None:
    send = WeightsClient(server.http_url, every=2)
    assert send({}) is None
    with pytest.raises(error, match=says):
        send(tensors)
    assert send(load_file(base / "model.safetensors")) == version(server)


def test_settings_and_addresses(server: RunningServer, base: Path) -> None:
    for url, more, says in (
        ("grpc://127.0.0.1:1", {}, "sent over HTTP"),
        ("http://", {}, "malformed"),
        ("http://127.0.0.1:1", {"every": 0}, "at least 1"),
    ):
        with pytest.raises(InvalidRequest, match=says):
            WeightsClient(url, **more)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="below 1"):
        WeightsClient(server.http_url, ema=1.0)({})
    with pytest.raises((UnknownModel, InvalidRequest), match="unknown model 'other model'"):
        WeightsClient(server.http_url, "other model")({})
    with pytest.raises(Unreachable, match="no answer to /init"):  # at once: the address may be wrong
        WeightsClient(f"http://127.0.0.1:{free_port()}")(load_file(base / "model.safetensors"))


def test_an_update_is_retried_unless_its_tensors_are_gone(
    server: RunningServer, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    send = WeightsClient(server.http_url, "rm", policy=RetryPolicy(backoff_s=0.01, jitter=0))
    tensors = load_file(base / "model.safetensors")
    httpx.post(server.http_url + "/sleep", timeout=120)
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        httpx.post(server.http_url + "/wake_up", timeout=120)

    monkeypatch.setattr(weights_client, "time", SimpleNamespace(monotonic=time.monotonic, sleep=wait))
    with pytest.raises(Unavailable, match="asleep"):
        send(iter(tensors.items()))
    assert not waits
    assert send(tensors) == version(server)
    assert len(waits) == 1 and waits[0] >= 5  # the server's Retry-After


def test_an_average_that_serves_no_more_is_told_and_another_begins(server: RunningServer, base: Path) -> None:
    own, plain = load_file(base / "model.safetensors"), WeightsClient(server.http_url, "rm")
    new, averaging = {n: 2 * t for n, t in own.items()}, WeightsClient(server.http_url, "rm", ema=0.5)
    plain(own)
    made = averaging(new)
    assert plain(own) != made  # as after a restart; without ema nothing is lost
    with pytest.raises(InvalidRequest, match=f"the average of this client's updates, {made}, does not serve"):
        averaging(new)
    assert averaging(new) == made == version(server)


def test_it_needs_no_torch(server: RunningServer, base: Path) -> None:
    script = f"""
import sys, numpy as np
from guerdon import WeightsClient
from safetensors.numpy import load_file
print(WeightsClient({server.http_url!r}, "rm")(load_file({str(base / "model.safetensors")!r})))
assert "torch" not in sys.modules
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == version(server)
