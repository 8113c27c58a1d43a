"""trlX's reward function against guerdon's gRPC server, a real PyTriton, and a model of its own process."""

import dataclasses
from collections.abc import Iterator
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton_client
from transformers import AutoTokenizer
from tritonclient.grpc import service_pb2 as pb

import chats
import served
import zoo
from adapters import pytriton_input_ids
from client import pytriton_server
from client.echo_server import EchoProcess
from guerdon.adapters import trlx
from guerdon.adapters.trlx import create_reward_fn
from guerdon.client import RewardClient
from guerdon.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidRequest,
    SampleFailed,
    ServerFault,
    UnknownModel,
)
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig
from ports import free_port
from server.echo_service import NAN_TOKEN, SLOW_TOKEN, EchoService

EOS = 2


class Numbers:
    """A tokenizer of texts that are their own ids."""

    eos_token, eos_token_id = f" {EOS}", EOS

    def __call__(self, texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[int(word) for word in text.split()] for text in texts]}


@pytest.fixture(scope="module")
def service() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def host(service: EchoService) -> Iterator[str]:
    with RunningServer(service, ServerConfig(port=0, grpc_port=0), grace_s=0.1) as server:
        assert server.grpc_url is not None
        yield server.grpc_url.removeprefix("grpc://")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("gpt2", tmp_path_factory.mktemp("trlx"), "trlx"))


def by_numbers(host: str, **settings: Any) -> Any:
    return create_reward_fn(triton_host=f"{host}/reward_model", tokenizer=Numbers(), **settings)


def at_first_eos(folder: Path, samples: list[str]) -> list[float]:
    """Scores each sample with an EOS appended, as trlX's own reward model does."""
    rows = AutoTokenizer.from_pretrained(folder)([sample + "</s>" for sample in samples])["input_ids"]
    rows = [np.array(row[: row.index(EOS) + 1]) for row in rows]
    return [float(row[-1, 0]) for row in zoo.reference_tokens(folder, rows)]


SAMPLES = ["why? the reason", "why? no</s>", "who? the the the answer" * 3, "größe"]


@pytest.mark.parametrize("where", ["server", "here"])
def test_rewards_are_those_at_the_first_eos(where: str, folder: Path) -> None:
    if where == "here":
        reward_fn: Any = create_reward_fn(str(folder))
        assert reward_fn(SAMPLES) == pytest.approx(at_first_eos(folder, SAMPLES), abs=2e-5)
        reward_fn.close()
        return
    with served.running(ModelConfig(model=str(folder)), grpc_port=0, grace_s=0) as server:
        assert server.grpc_url is not None
        host = server.grpc_url.removeprefix("grpc://") + "/reward_model"
        reward_fn = create_reward_fn(triton_host=host, tokenizer=str(folder), batch_size=3)
        assert reward_fn(SAMPLES) == pytest.approx(at_first_eos(folder, SAMPLES), abs=2e-5)


def test_every_call_form_since_0_2(host: str) -> None:
    reward_fn = by_numbers(host)
    samples, prompts, outputs = ["5 6", "7"], ["5", ""], ["6", "7"]
    wanted = [13.0, 9.0]
    assert reward_fn(samples) == wanted  # 0.2, 0.3
    named = {"samples": samples, "prompts": prompts, "outputs": outputs}
    assert reward_fn(**named) == wanted  # 0.4 to 0.6, and those of RFT and of NeMo since
    assert reward_fn(samples, prompts, outputs) == wanted
    assert reward_fn(**named, original_output=["1", "1"], topic=["a", "b"]) == wanted  # 0.7
    assert reward_fn(**named, tokenizer=Numbers(), topic=["a", "b"]) == wanted  # since
    assert all(type(reward) is float for reward in reward_fn(samples))
    assert reward_fn([]) == reward_fn(samples=[], prompts=[], outputs=[]) == []


def test_host_from_the_environment_and_other_ranks(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    assert create_reward_fn("./no-such-model") is True
    monkeypatch.setenv("TRITON_HOST", f"{host}/reward_model")
    reward_fn: Any = create_reward_fn(tokenizer=Numbers())
    assert reward_fn(["5"]) == [7.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "no server and no model: TRITON_HOST and model are not set"),
        ({"triton_host": "h:1/m"}, "no tokenizer is given, and gpt2's, which trlX's example takes, does not load"),
        ({"triton_host": "h:1", "tokenizer": Numbers()}, "TRITON_HOST is 'h:1'"),
        ({"triton_host": "h:1/a/b", "tokenizer": Numbers()}, "TRITON_HOST is 'h:1/a/b'"),
        ({"triton_host": "h:1/m", "tokenizer": Numbers(), "dense": True, "delta_reward": True}, "one reward a sample"),
    ],
)
def test_settings_that_do_not_hold(
    settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TRITON_HOST", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2").mkdir()  # so that no cache and no hub is asked: nothing of that name loads
    with pytest.raises(ConfigError, match=message):
        create_reward_fn(**settings)


def test_without_arguments_it_is_that_of_trlxs_example(
    host: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The server that TRITON_HOST names, and gpt2's tokenizer; here a folder of that name stands for the hub's."""
    (tmp_path / "gpt2").symlink_to(folder)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_HOST", f"{host}/reward_model")
    reward_fn: Any = create_reward_fn()
    named: Any = create_reward_fn(tokenizer=str(folder))
    assert reward_fn(["a good film", "a"]) == named(["a good film", "a"]) != [0.0, 0.0]


def test_a_tokenizer_that_is_not_the_served_models_is_refused(folder: Path, tmp_path: Path) -> None:
    chats.save("chatml", tmp_path / "other")
    with served.running(ModelConfig(model=str(folder)), grpc_port=0, grace_s=0) as server:
        assert server.grpc_url is not None
        host = server.grpc_url.removeprefix("grpc://") + "/reward_model"
        reward_fn: Any = create_reward_fn(triton_host=host, tokenizer=str(tmp_path / "other"))
        for _ in range(2):
            with pytest.raises(ConfigError, match="the tokenizer is not that of the reward model") as raised:
                reward_fn(["the"])
        assert "give tokenizer" in raised.value.help
        dense: Any = create_reward_fn(triton_host=host, tokenizer=str(tmp_path / "other"), dense=True)
        with pytest.raises(ConfigError, match="the tokenizer is not that of the reward model"):
            dense(["the"], [""], ["the"])


def test_delta_rewards_ask_for_an_original_once(host: str, service: EchoService) -> None:
    reward_fn = by_numbers(host, delta_reward=True)
    rows = {"samples": ["5 6", "5 9", "7"], "prompts": ["5", "5", ""], "outputs": [" 6", " 9", "7"]}
    originals = {"original_output": [" 1", " 1", "4"]}
    service.requests.clear()
    assert reward_fn(**rows, **originals) == [5.0, 8.0, 3.0]
    assert [len(request) for request in service.requests] == [3, 2]
    assert reward_fn(**rows, **originals) == [5.0, 8.0, 3.0]
    assert [len(request) for request in service.requests] == [3, 2, 3]
    with pytest.raises(InvalidRequest, match="delta rewards need original_output"):
        reward_fn(**rows)


def test_other_weights_ask_for_originals_again(host: str, service: EchoService) -> None:
    reward_fn = by_numbers(host, delta_reward=True)
    rows = {"samples": ["5"], "prompts": [""], "outputs": ["5"], "original_output": ["1"]}
    assert reward_fn(**rows) == reward_fn(**rows) == [4.0]
    info = service.scorer.info
    service.scorer.info = dataclasses.replace(info, weights_version="2")
    service.requests.clear()
    assert reward_fn(**rows) == reward_fn(**rows) == [4.0]
    assert [len(request) for request in service.requests] == [1, 1, 1]
    service.scorer.info = info


def test_no_delta_mixes_two_weights(host: str, service: EchoService, monkeypatch: pytest.MonkeyPatch) -> None:
    reward_fn = by_numbers(host, delta_reward=True)
    rows = {"samples": ["5"], "prompts": [""], "outputs": ["5"], "original_output": ["1"]}
    info, versions = service.scorer.info, iter("1222")
    answered: list[str] = []

    def another() -> None:
        answered.append(next(versions))
        service.scorer.info = dataclasses.replace(info, weights_version=answered[-1])

    score = service.scorer.score
    monkeypatch.setattr(service.scorer, "score", lambda sequences: (another(), score(sequences))[1])
    assert reward_fn(**rows) == [4.0]
    assert answered == ["1", "2", "2"]  # the sample by other weights than its original, and so again
    versions = iter(str(n) for n in range(3, 99))
    with pytest.raises(ServerFault, match="different weights, 5 times"):
        reward_fn(**rows)
    service.scorer.info = info


def test_the_cache_does_not_keep_long_originals(host: str) -> None:
    reward_fn = by_numbers(host, delta_reward=True)
    original = " ".join(["1"] * 2000)
    reward_fn(samples=["5"], prompts=[""], outputs=["5"], original_output=[original])
    assert [len(key) for key in reward_fn._originals._rewards] == [16]


def test_originals_are_not_kept_for_ever(host: str, service: EchoService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trlx, "_MAX_KEPT", 2)
    reward_fn = by_numbers(host, delta_reward=True)

    def num_asked(*texts: str) -> int:
        service.requests.clear()
        for text in texts:
            reward_fn(samples=["5"], prompts=[""], outputs=["5"], original_output=[text])
        return len(service.requests) - len(texts)

    assert num_asked("1", "3", "1", "4", "1") == 3
    assert num_asked("3") == 1  # which was used the longest time ago


def test_dense_rewards_are_the_values_of_the_outputs_tokens(host: str) -> None:
    reward_fn: Any = create_reward_fn(triton_host=f"{host}/many", tokenizer=Numbers(), dense=True)
    texts = {"samples": ["5 6 7", "8 9"], "prompts": ["5 6", "8"], "outputs": ["7", "9"]}
    assert reward_fn(**texts, tokenizer=Numbers()) == [[7.0], [9.0]]
    assert reward_fn(**texts | {"prompts": ["5", "1 1 8"], "outputs": ["6 7", "9"]}) == [[6.0, 7.0], [9.0]]

    def other(texts: list[str]) -> dict[str, list[list[int]]]:
        return {"input_ids": [[1] for _ in texts]}

    with pytest.raises(InvalidRequest, match="output 0 is 1 tokens to the reward model and 1 others"):
        reward_fn(**texts, tokenizer=other)
    with pytest.raises(InvalidRequest, match="dense rewards need prompts"):
        reward_fn(["5 6"])
    with pytest.raises(InvalidRequest, match="has no values"):
        by_numbers(host, dense=True)(**texts)


def test_dense_rewards_of_a_model_in_this_process(folder: Path) -> None:
    critic = zoo.tokenizer(zoo.checkpoint("gpt2", folder / "critic", "trlx-critic"))
    reward_fn: Any = create_reward_fn(str(critic), dense=True)
    tokenizer = AutoTokenizer.from_pretrained(critic)
    prompt, output = "why?", " the reason"
    ids = tokenizer([prompt, output])["input_ids"]
    (dense,) = reward_fn([prompt + output], [prompt], [output], tokenizer=tokenizer)
    wanted = zoo.reference_tokens(critic, [np.array(ids[0] + ids[1])])[0][len(ids[0]) :, 0]
    assert dense == pytest.approx(wanted.tolist(), abs=2e-5)
    reward_fn.close()


def test_too_long_is_refused_unless_it_is_cut(host: str) -> None:
    text = " ".join(["1"] * 5000)
    with pytest.raises(InvalidRequest, match="row 1: the sample has 5001 tokens") as caught:
        by_numbers(host)(["5", text])
    assert caught.value.__notes__ == ["asked for 2 samples; row 0 is sample 0"]
    assert by_numbers(host, max_length=4)(["5", text]) == [7.0, 5.0]


def sent_to(call: Any) -> list[bytes]:
    """The ModelInfer requests that `call` sends to the host it is given, by tritonclient or by guerdon."""
    sent: list[bytes] = []

    def infer(body: bytes, _: Any) -> bytes:
        sent.append(body)
        (shape,) = [entry.shape for entry in pb.ModelInferRequest.FromString(body).inputs]
        reply = pb.ModelInferResponse(
            model_name="hh-rm", raw_output_contents=[np.zeros(shape[0], np.float32).tobytes()]
        )
        reply.outputs.add(name="rewards", datatype="FP32", shape=[shape[0]])
        return reply.SerializeToString()

    def describe(_: bytes, __: Any) -> bytes:
        reply = pb.ModelMetadataResponse(name="hh-rm")
        reply.inputs.add(name="input_ids", datatype="INT32", shape=[-1, -1])
        return reply.SerializeToString()

    handlers = {
        n: grpc.unary_unary_rpc_method_handler(f) for n, f in (("ModelInfer", infer), ("ModelMetadata", describe))
    }
    server = grpc.server(futures.ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("inference.GRPCInferenceService", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    call(f"127.0.0.1:{port}")
    server.stop(None)
    return sent


def test_requests_equal_those_of_trlx(folder: Path) -> None:
    samples = ["the longest of all " * 9, *(f"sample {'the ' * (i % 7)}{i}" for i in range(49))]

    def original(host: str) -> None:
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.pad_token = tokenizer.eos_token
        ids = tokenizer([sample + tokenizer.eos_token for sample in samples], padding=True)["input_ids"]
        client = triton_client.InferenceServerClient(url=host)
        for start in range(0, len(ids), 24):
            rows = np.array(ids[start : start + 24], dtype=np.int32)
            tensor = triton_client.InferInput("input_ids", rows.shape, "INT32")
            tensor.set_data_from_numpy(rows)
            client.infer("hh-rm", [tensor])
        client.close()

    def ours(host: str) -> None:
        reward_fn: Any = create_reward_fn(triton_host=f"{host}/hh-rm", tokenizer=str(folder))
        assert reward_fn(samples) == [0.0] * len(samples)

    wanted = sent_to(original)
    assert len(wanted) == 3
    assert sorted(sent_to(ours)) == sorted(wanted)


@pytest.fixture(scope="module")
def pytriton_host() -> Iterator[str]:
    pytest.importorskip("pytriton", reason="nvidia-pytriton is not installed")
    ports = free_port(), free_port()
    process = pytriton_server.start(*ports, script=pytriton_input_ids.__file__)
    try:
        with RewardClient(f"grpc://127.0.0.1:{ports[1]}", "hh-rm") as client:
            client.wait_ready(120.0)
        yield f"127.0.0.1:{ports[1]}/hh-rm"
    finally:
        pytriton_server.stop(process)


@pytest.mark.slow
def test_a_triton_that_knows_nothing_else(pytriton_host: str) -> None:
    reward_fn: Any = create_reward_fn(triton_host=pytriton_host, tokenizer=Numbers())
    samples = ["3 " * (i % 9 + 1) for i in range(100)]
    assert reward_fn(samples) == [3.0 * (i % 9 + 1) + EOS for i in range(100)]
    with pytest.raises(SampleFailed, match="row 0: the server gave no finite reward"):
        reward_fn(["99999 99999"])  # more than float16 can tell
    with pytest.raises(InvalidRequest, match="batch-size must be <= 25"):
        create_reward_fn(triton_host=pytriton_host, tokenizer=Numbers(), batch_size=26)(samples)  # type: ignore[operator]


def test_another_model_is_asked_for(host: str) -> None:
    with pytest.raises(UnknownModel, match="unknown model 'hh-rm'; served here"):
        create_reward_fn(triton_host=f"{host}/hh-rm", tokenizer=Numbers())(["5"])  # type: ignore[operator]


def test_a_failed_sample_is_an_error(host: str) -> None:
    with pytest.raises(SampleFailed, match="row 1: the reward is not finite") as caught:
        by_numbers(host, batch_size=2)(["1", "2", "3", f"{NAN_TOKEN}", "5"])
    assert caught.value.__notes__ == ["asked for 2 samples; row 0 is sample 2"]


def test_a_server_that_is_too_slow(host: str, service: EchoService) -> None:
    with service.scorer.held(), pytest.raises(DeadlineExceeded):
        by_numbers(host, timeout_s=0.2)([f"{SLOW_TOKEN}"])
    assert by_numbers(host)([f"{SLOW_TOKEN}"]) == [779.0]


def test_a_server_that_restarts_meanwhile() -> None:
    with EchoProcess() as first:
        reward_fn = by_numbers(first.grpc_url.removeprefix("grpc://"))
        assert reward_fn(["5"]) == [7.0]
        first.kill()
        with futures.ThreadPoolExecutor(1) as pool:
            rewards = pool.submit(reward_fn, ["6"])
            with first.again():
                assert rewards.result(timeout=120) == [8.0]
