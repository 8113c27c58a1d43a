"""The same 64 texts have the same scores by every protocol and adapter, in the digits that float32 has."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pytest
import tritonclient.grpc
import tritonclient.http
from huggingface_hub import InferenceClient
from transformers import AutoTokenizer

import served
import zoo
from guerdon import AsyncRewardClient, LocalRewardModel, RewardClient
from guerdon.adapters import areal, nemo_rl, openrlhf, rewardbench, trl, trlx, verl
from guerdon.adapters.judge import judge
from guerdon.server.runtime import RunningServer
from tiers import slow_but

SAMPLES = served.samples(64)
TEXTS = served.texts(SAMPLES)
PROMPTS, RESPONSES = [s["prompt"] for s in SAMPLES], [s["response"] for s in SAMPLES]
RAW = {"use_activation": False}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("same")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with served.plain(folder) as running:
        yield running


@pytest.fixture(scope="module")
def expected(folder: Path, server: RunningServer) -> list[float]:
    """What plain transformers makes of each text by itself; the server's own digits where they agree to 1e-5."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "rm")
    rows = [np.array(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in TEXTS]
    with RewardClient(server.http_url) as client:
        rewards = client.score(texts=TEXTS).rewards
    assert np.abs(rewards - zoo.reference(folder / "rm", rows)).max() < 1e-5
    assert len(set(rewards.tolist())) == len(TEXTS)
    return rewards.tolist()


def post(server: RunningServer, path: str, body: Any) -> Any:
    return httpx.post(server.http_url + path, json=body, timeout=120).raise_for_status().json()


def kserve_json(server: RunningServer) -> list[float]:
    tensor = {"name": "sentences", "datatype": "BYTES", "shape": [len(TEXTS), 1], "data": TEXTS}
    (rewards, *_) = post(server, "/v2/models/reward_model/infer", {"inputs": [tensor]})["outputs"]
    return rewards["data"]


def kserve_by_tritonclient(server: RunningServer, kind: Any, url: str) -> list[float]:
    tensor = kind.InferInput("sentences", [len(TEXTS), 1], "BYTES")
    tensor.set_data_from_numpy(np.array([[text.encode()] for text in TEXTS], np.object_))
    with kind.InferenceServerClient(url.partition("://")[2]) as client:
        return client.infer("reward_model", [tensor]).as_numpy("rewards")[:, 0].tolist()


def kserve_by_pytriton(server: RunningServer) -> list[float]:
    pytriton_client = pytest.importorskip("pytriton.client", reason="nvidia-pytriton is not installed")
    with pytriton_client.ModelClient(server.http_url, "reward_model") as client:
        texts = np.array([[text.encode()] for text in TEXTS], np.object_)
        return client.infer_batch(sentences=texts)["rewards"][:, 0].tolist()


def by_async_client(server: RunningServer) -> list[float]:
    async def score() -> list[float]:
        async with AsyncRewardClient(server.grpc_url) as client:
            return list(await client.score(texts=TEXTS))

    return asyncio.run(score())


def by_local_model(server: RunningServer, folder: Path) -> list[float]:
    with LocalRewardModel(folder / "rm", deterministic=True) as model:
        return list(model.score(texts=TEXTS))


def by_tei(server: RunningServer) -> list[float]:
    client = InferenceClient(f"{server.http_url}/predict")
    ones = [client.text_classification(text) for text in TEXTS[:4]]
    batch = post(server, "/predict", {"inputs": [[text] for text in TEXTS]})
    scores = [entry[0]["score"] for entry in batch]
    assert [np.float32(one.score) for one in ones] == [np.float32(score) for score in scores[:4]]  # type: ignore[attr-defined]
    return scores


def by_trl(server: RunningServer) -> list[float | None]:
    reward = pickle.loads(pickle.dumps(trl.reward_function(server.http_url)))  # noqa: S301 - our own
    return reward(prompts=PROMPTS, completions=RESPONSES, completion_ids=[[1]] * 64, trainer_state=None)


def by_trl_async(server: RunningServer) -> list[float | None]:
    reward = trl.async_reward_function(server.grpc_url)
    return asyncio.run(reward(prompts=PROMPTS, completions=RESPONSES, completion_ids=[[1]] * 64))


def by_verl(server: RunningServer) -> list[float]:
    return [
        verl.compute_score("reviews", s["response"], s["label"], {"prompt": s["prompt"]}, url=server.http_url)["score"]
        for s in SAMPLES
    ]


def by_areal(server: RunningServer) -> list[float]:
    reward = areal.reward_function(server.http_url)
    return [reward(s["prompt"], s["response"], [1], [2]) for s in SAMPLES]


def by_openrlhf_file(server: RunningServer) -> list[float]:
    return openrlhf.reward_function(server.http_url)(TEXTS, PROMPTS, [s["label"] for s in SAMPLES])["rewards"]


def by_nemo_rl(server: RunningServer) -> list[float]:
    environment = nemo_rl.RewardEnvironment({"url": server.http_url, "send": "texts"})
    logs = [
        [{"role": "user", "content": s["prompt"]}, {"role": "assistant", "content": s["response"]}] for s in SAMPLES
    ]
    return environment.step(logs, [None] * len(logs)).rewards.tolist()


def by_rewardbench(server: RunningServer, folder: Path) -> list[float]:
    scorer = judge(server.http_url, "reward_model", 60)
    pipeline = rewardbench.ServerPipeline(scorer, AutoTokenizer.from_pretrained(folder / "rm"), send="texts")
    return [entry["score"] for entry in pipeline(TEXTS, batch_size=8, truncation=False)]


WAYS: dict[str, Callable[[RunningServer, Path], list[Any]]] = {
    "KServe v2, JSON": lambda server, _: kserve_json(server),
    "KServe v2, tritonclient over HTTP": lambda s, _: kserve_by_tritonclient(s, tritonclient.http, s.http_url),
    "KServe v2, tritonclient over gRPC": lambda s, _: kserve_by_tritonclient(s, tritonclient.grpc, s.grpc_url or ""),
    "KServe v2, PyTriton's client": lambda server, _: kserve_by_pytriton(server),
    "AsyncRewardClient over gRPC": lambda server, _: by_async_client(server),
    "LocalRewardModel": by_local_model,
    "OpenRLHF": lambda server, _: post(server, "/get_reward", {"query": TEXTS, "prompts": PROMPTS})["rewards"],
    "OpenRLHF's Python file": lambda server, _: by_openrlhf_file(server),
    "slime": lambda server, _: [
        post(server, "/reward", {"prompt": s["prompt"], "response": s["response"], "label": None}) for s in SAMPLES
    ],
    "vLLM /classify": lambda s, _: [e["probs"][0] for e in post(s, "/classify", {"input": TEXTS, **RAW})["data"]],
    "vLLM /pooling": lambda s, _: [
        entry["data"][0] for entry in post(s, "/pooling", {"input": TEXTS, "task": "classify", **RAW})["data"]
    ],
    "vLLM /score": lambda s, _: [
        entry["score"] for entry in post(s, "/score", {"text_1": PROMPTS, "text_2": RESPONSES, **RAW})["data"]
    ],
    "SGLang /classify": lambda s, _: [entry["embedding"][0] for entry in post(s, "/classify", {"text": TEXTS})],
    "SGLang /encode": lambda s, _: [entry["embedding"][0] for entry in post(s, "/encode", {"text": TEXTS})],
    "SGLang /v1/embeddings": lambda s, _: [
        entry["embedding"][0] for entry in post(s, "/v1/embeddings", {"model": "default", "input": TEXTS})["data"]
    ],
    "TEI /predict": lambda server, _: by_tei(server),
    "TRL": lambda server, _: by_trl(server),
    "TRL, async": lambda server, _: by_trl_async(server),
    "verl": lambda server, _: by_verl(server),
    "AReaL": lambda server, _: by_areal(server),
    "NeMo-RL": lambda server, _: by_nemo_rl(server),
    "RewardBench": by_rewardbench,
}


@pytest.mark.parametrize("way", slow_but([*WAYS][::5], WAYS))
def test_the_scores_are_the_same(way: str, server: RunningServer, folder: Path, expected: list[float]) -> None:
    got = WAYS[way](server, folder)
    assert [np.float32(reward) for reward in got] == expected


def test_a_form_writes_the_digits_of_float32(server: RunningServer, expected: list[float]) -> None:
    told = httpx.post(server.http_url + "/get_reward", json={"query": TEXTS}).content
    assert told.startswith(
        b'{"rewards":' + orjson.dumps(np.array(expected, np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
    )


def test_trlx_scores_the_same_locally_and_remotely(server: RunningServer, folder: Path) -> None:
    """trlX has the tokenizer add its BOS, and ends each sample with an EOS: these are the scores of other texts."""
    with RewardClient(server.http_url) as client:
        ended = client.score(texts=[f"<s>{text}</s>" for text in TEXTS]).rewards.tolist()
    name, tokenizer = (server.grpc_url or "").removeprefix("grpc://") + "/reward_model", str(folder / "rm")
    remote = trlx.create_reward_fn(tokenizer=tokenizer, triton_host=name)
    local = trlx.create_reward_fn(tokenizer)
    assert callable(remote) and callable(local)
    rewards = [float(x) for x in remote(TEXTS, PROMPTS, RESPONSES)]
    assert rewards == ended
    assert [float(x) for x in local(TEXTS, PROMPTS, RESPONSES)] == pytest.approx(ended, abs=1e-5)
