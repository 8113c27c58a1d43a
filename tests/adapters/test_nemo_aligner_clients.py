"""NeMo-Aligner's clients under their names, against guerdon's servers and against a real PyTriton's."""

import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from omegaconf import OmegaConf

from adapters import pytriton_critic
from client import pytriton_server
from guerdon.adapters.nemo_aligner import RemoteGPTRMClient, RemoteGPTRMCriticClient
from guerdon.client import CriticClient
from guerdon.errors import ConfigError, GuerdonError, InvalidRequest, SampleFailed, Unreachable
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import RemoteCriticConfig, RemoteRewardConfig
from guerdon.settings.config import ServerConfig
from ports import free_port
from served import Serve
from server.arithmetic_critic import FAIL_TOKEN, ArithmeticService, after, request
from server.echo_service import NAN_TOKEN, EchoService

REWARD_YAML = """
pad_to_length: null
reward_model:
  name: reward_model
  ip: localhost
  port: PORT
"""

CRITIC_YAML = """
pad_to_length: null
combine_rm_and_critic_server: True
critic:
  name:
    train: critic_train
    infer: critic_infer
    save: critic_save
  ip: localhost
  port: PORT
reward_model:
  name: reward_model
  ip: localhost
  port: PORT
"""


def config(yaml: str, port: int, **changed: Any) -> Any:
    return OmegaConf.merge(OmegaConf.create(yaml.replace("PORT", str(port))), changed)


def rollout(*rows: list[int], width: int = 5) -> dict[str, torch.Tensor]:
    tokens = torch.full((len(rows), width), 2)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = torch.tensor(row)
    return {
        "response_tokens": tokens,
        "response_lengths": torch.tensor([len(row) for row in rows]),
        "prompt_lengths": torch.ones(len(rows), dtype=torch.int64),
    }


def to_train_on(first_token: int = 5, returns: float = 4.0) -> dict[str, torch.Tensor]:
    """Masked returns of this sum; what else NeMo-Aligner's rollout data has is not sent."""
    mask = torch.zeros(2, 2)
    mask[0, 1] = 1
    shape = {"returns": torch.full((2, 2), returns), "values": torch.zeros(2, 2, requires_grad=True), "mask": mask}
    return {"response_tokens": torch.tensor([[first_token, 2, 3], [4, 5, 6]]), "advantages": mask, **shape}


@pytest.fixture(scope="module")
def reward_port(serve: Serve) -> int:
    return port_of(serve(build=EchoService, grace_s=0.1))


@pytest.fixture
def critic(tmp_path: Path) -> Iterator[RunningServer]:
    service = ArithmeticService(tmp_path, with_rewards=True)
    with RunningServer(service, ServerConfig(port=0, grpc_port=None), grace_s=0.1) as server:
        yield server


def port_of(server: RunningServer) -> int:
    return int(server.http_url.rpartition(":")[2])


def test_rewards_from_guerdon(reward_port: int) -> None:
    client = RemoteGPTRMClient(config(REWARD_YAML, reward_port))
    futures = [client.infer_rm(rollout([500, 600, 7], [3, i])) for i in range(10)]
    for i, future in enumerate(futures):
        rewards = future.result()
        assert (rewards.dtype, rewards.tolist()) == (torch.float32, [[107.0], [3.0 + i]])
    client.communicator.close()


@pytest.mark.parametrize("form", ["mapping", "omegaconf", "ours"])
def test_any_form_of_settings(reward_port: int, form: str) -> None:
    ours = RemoteRewardConfig()
    ours.reward_model.urls = [f"http://localhost:{reward_port}"]
    forms = {
        "mapping": {"reward_model": {"name": "reward_model", "ip": "127.0.0.1", "port": reward_port}},
        "omegaconf": config(REWARD_YAML, reward_port),
        "ours": ours,
    }
    assert RemoteGPTRMClient(forms[form]).infer_rm(rollout([1, 2])).result().tolist() == [[3.0]]
    if form == "ours":
        assert RemoteGPTRMClient(OmegaConf.create(asdict(ours))).infer_rm(rollout([4])).result().tolist() == [[4.0]]


def test_missing_settings_are_named() -> None:
    with pytest.raises(ConfigError, match="no port"):
        RemoteGPTRMClient({"reward_model": {"name": "a", "ip": "b"}})
    with pytest.raises(ConfigError, match="no reward_model"):
        RemoteGPTRMCriticClient({"critic": {"ip": "b", "port": 1}, "combine_rm_and_critic_server": False})
    with pytest.raises(ConfigError, match="send is text"):
        RemoteGPTRMClient(RemoteRewardConfig(send="text"))


def test_a_failed_sample_is_no_reward(reward_port: int) -> None:
    client = RemoteGPTRMClient(config(REWARD_YAML, reward_port))
    with pytest.raises(SampleFailed, match="1 of 2 samples failed; row 1"):
        client.infer_rm(rollout([1, 2], [NAN_TOKEN, 2])).result()


def test_lengths_that_do_not_fit_are_refused(reward_port: int) -> None:
    client = RemoteGPTRMClient(config(REWARD_YAML, reward_port, pad_to_length=4))
    with pytest.raises(InvalidRequest, match=r"tokens\[0\] has 5 ids, more than pad_to_length, 4"):
        client.infer_rm(rollout([1, 2, 3, 4, 5]))
    for length in (9, -1):
        with pytest.raises(InvalidRequest, match=f"row 0 of the tokens has length {length}, which is not from 0 to 5"):
            client.infer_rm(rollout([1]) | {"response_lengths": torch.tensor([length])})


@contextmanager
def served_later(service: Any) -> Iterator[int]:
    """The port on which the service starts in half a second."""
    port = free_port()

    def serve() -> None:
        time.sleep(0.5)
        with RunningServer(service, ServerConfig(port=port, grpc_port=None), grace_s=0.1):
            asked.wait(120)

    asked = threading.Event()
    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield port
    finally:
        asked.set()
        thread.join()


def test_the_first_call_waits_for_a_server_that_is_not_up_yet() -> None:
    with served_later(EchoService()) as port:
        client = RemoteGPTRMClient(config(REWARD_YAML, port))
        assert client.infer_rm(rollout([1, 2])).result().tolist() == [[3.0]]


@pytest.mark.parametrize("first", ["train", "save"])
def test_training_and_saving_wait_for_a_server_that_is_not_up_yet(first: str, tmp_path: Path) -> None:
    with served_later(ArithmeticService(tmp_path, with_rewards=True)) as port:
        client = RemoteGPTRMCriticClient(config(CRITIC_YAML, port))
        done = client.train(to_train_on()) if first == "train" else client.save()
        assert (done.result(timeout=120.0) is None) == (first == "save")
        client.close()


def test_guerdons_critic(critic: RunningServer) -> None:
    client = RemoteGPTRMCriticClient(config(CRITIC_YAML, port_of(critic)))
    rewards, values = client.infer_rm_critic(rollout([5, 6, 7], [8, 9])).result()
    assert (rewards.dtype, rewards.tolist()) == (torch.float32, [18.0, 17.0])
    assert (values.dtype, values.tolist()) == (torch.float32, [[5, 6, 7, 0], [8, 9, 0, 0]])
    assert values.is_contiguous()
    losses = [client.train(to_train_on()), client.train(to_train_on())]
    saved = client.save()  # comes after both
    assert saved.result() is None
    assert all(future.done() for future in losses)
    with CriticClient(critic.http_url) as plain:
        assert plain.state().step == 2 and plain.state().num_unsaved == 0
    # What the trainer says of the second, with the weight 4.5 of the first: |2 * 4.5 - 4|.
    told = [future.result() for future in losses]
    assert told == [{"loss_mean": [2.0]}, {"loss_mean": [5.0]}] and told[0]["loss_mean"].dtype == np.float32
    expected = after([request("", 4.0, 0.0), request("", 4.0, 0.0)])
    _, values = client.infer_rm_critic(rollout([5, 6, 7], [8, 9])).result()
    assert values[0, 0] == 5 * expected
    client.close()


def test_the_reward_model_of_another_server(critic: RunningServer, reward_port: int) -> None:
    settings = RemoteCriticConfig(combine_rm_and_critic_server=False)
    settings.reward_model.port, settings.critic.port = reward_port, port_of(critic)
    client = RemoteGPTRMCriticClient(settings)
    rewards, values = client.infer_rm_critic(rollout([500, 600], [8])).result()
    assert rewards.tolist() == [100.0, 8.0]
    assert values.tolist() == [[500, 600, 0, 0], [8, 0, 0, 0]]


def test_a_failed_train_is_raised_by_the_next_call(critic: RunningServer) -> None:
    client = RemoteGPTRMCriticClient(config(CRITIC_YAML, port_of(critic)))
    future = client.train(to_train_on(FAIL_TOKEN))
    while not future.done():  # which is not a look at how it ended
        time.sleep(0.01)
    with pytest.raises(GuerdonError, match="global batch 0 failed"):
        client.infer_rm_critic(rollout([5]))


def test_models_by_their_own_names(tmp_path: Path) -> None:
    service = ArithmeticService(tmp_path, name="other")
    with RunningServer(service, ServerConfig(port=0, grpc_port=None), grace_s=0.1) as server:
        names = {"train": "other_train", "infer": "other_infer", "save": "other_save"}
        settings = {"critic": {"name": names, "ip": "localhost", "port": port_of(server)}}
        client = RemoteGPTRMCriticClient(settings | {"combine_rm_and_critic_server": True})
        assert client.train(to_train_on()).result() == {"loss_mean": [2.0]}
        assert client.save().result() is None
        with CriticClient(server.http_url, "other") as plain:
            assert plain.state().step == 1


@pytest.fixture(scope="module")
def triton() -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    pytest.importorskip("pytriton", reason="nvidia-pytriton is not installed")
    ports = free_port(), free_port()
    process = pytriton_server.start(*ports, script=pytriton_critic.__file__)
    try:
        with CriticClient(f"127.0.0.1:{ports[0]}") as client:
            client.wait_ready(120.0)
        yield process, ports[0]
    finally:
        pytriton_server.stop(process)


def test_pytritons_reward_model(triton: tuple[Any, int]) -> None:
    client = RemoteGPTRMClient(config(REWARD_YAML, triton[1], pad_to_length=pytriton_critic.WIDTH))
    futures = [client.infer_rm(rollout([500, 600, 7], [3] * (i % 5 + 1))) for i in range(20)]
    assert [f.result().tolist() for f in futures] == [[[107.0], [3.0 * (i % 5 + 1)]] for i in range(20)]


@pytest.mark.slow
def test_pytritons_critic(triton: tuple[Any, int]) -> None:
    client = RemoteGPTRMCriticClient(config(CRITIC_YAML, triton[1], pad_to_length=pytriton_critic.WIDTH))
    rewards, values = client.infer_rm_critic(rollout([5, 6, 7], [8, 9])).result()
    assert rewards.tolist() == [18.0, 17.0]
    assert values.tolist() == [[5, 6, 7, 0], [8, 9, 0, 0]]
    assert client.train(to_train_on()).result() == {"loss_mean": [5.0]}
    assert client.save().result() is None
    _, values = client.infer_rm_critic(rollout([5, 6, 7])).result()
    assert values[0].tolist() == [25, 30, 35, 0]
    client.close()


@pytest.mark.slow
def test_pytriton_is_never_sent_a_train_twice(triton: tuple[Any, int]) -> None:
    process, port = triton
    client = RemoteGPTRMCriticClient(config(CRITIC_YAML, port, pad_to_length=pytriton_critic.WIDTH))
    client.infer_rm_critic(rollout([5])).result()
    future = client.train(to_train_on(pytriton_critic.SLOW_TOKEN))
    time.sleep(1.0)
    assert not future.done()
    (server,) = [p for p in psutil.Process(process.pid).children(recursive=True) if "tritonserver" in p.name()]
    server.kill()
    with pytest.raises(Unreachable) as caught:
        future.result(timeout=120.0)
    assert "not retried" in str(caught.value.__notes__)
