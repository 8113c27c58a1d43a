"""Pooling and missing tokenizers as clients and users meet them: over HTTP and gRPC, in `/config`, at the start."""

from pathlib import Path

import httpx
import numpy as np
import pytest
import torch
import tritonclient.grpc
import tritonclient.http
from transformers import AutoModelForSequenceClassification, AutoTokenizer
from tritonclient.utils import InferenceServerException

import served
import zoo
from guerdon import LocalRewardModel, RewardClient, cli
from guerdon.assembly import build_trainer
from guerdon.core import Sequence
from guerdon.errors import Exit, InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import CriticConfig, ModelConfig
from served import Serve

TEXTS = ["The colour is red.</s>", "The colour is red.", "Yes</s> and no", "</s></s>", "a</s>\n", "<pad>b<pad>"]
PADS = {"eos": zoo.EOS, "pad": zoo.PAD, "none": None}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pads")


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    """Models of three kinds of pad, one that is asked for the plain last token, and a critic beside a reward model."""
    for name, pad in PADS.items():
        zoo.tokenizer(zoo.checkpoint("gpt2", folder / name, pad_token_id=pad))
    zoo.checkpoint("llama", folder / "critic")
    models = [ModelConfig(model=str(folder / name), name=name) for name in PADS]
    models.append(ModelConfig(model=str(folder / "eos"), name="last", pooling="last"))
    critic = CriticConfig(model=str(folder / "critic"), reward_model=str(folder / "eos"))
    return serve(*models, grpc_port=0, critic=critic)


@torch.no_grad()
def by_transformers(folder: Path) -> list[float]:
    """The texts' rewards as a user of transformers has them."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    encoded = [tokenizer(text, add_special_tokens=False, return_tensors="pt") for text in TEXTS]
    return [model(**inputs).logits.item() for inputs in encoded]


@pytest.mark.parametrize("name", PADS)
def test_texts_are_scored_as_transformers_scores_them(name: str, folder: Path, server: RunningServer) -> None:
    want = pytest.approx(by_transformers(folder / name), abs=1e-4)
    for url in (server.http_url, server.grpc_url):
        with RewardClient(url, model=name) as client:
            assert client.score(texts=TEXTS).rewards.tolist() == want
            assert [client.score(texts=[text]).rewards[0] for text in TEXTS] == want
    with LocalRewardModel(folder / name) as model:
        assert model.score(texts=TEXTS).rewards.tolist() == want
    answer = httpx.post(f"{server.http_url}/classify", json={"model": name, "input": TEXTS}).json()
    assert [row["probs"][0] for row in answer["data"]] == want


def test_the_plain_last_token_is_another_place(folder: Path, server: RunningServer) -> None:
    want = pytest.approx(by_transformers(folder / "none"), abs=1e-4)  # the same weights
    with RewardClient(server.http_url, model="last") as client:
        rewards = client.score(texts=TEXTS).rewards.tolist()
    assert rewards == want
    assert abs(rewards[0] - by_transformers(folder / "eos")[0]) > 0.01


def test_a_reward_model_beside_a_critic_has_the_rule_too(folder: Path, server: RunningServer) -> None:
    rows = [np.r_[np.arange(8, 30), zoo.EOS], np.r_[np.arange(8, 30), zoo.EOS, 9]]
    with RewardClient(server.http_url, model="critic_infer") as client:
        rewards = client.score(tokens=rows).rewards
    np.testing.assert_allclose(rewards, zoo.reference(folder / "eos", rows), atol=1e-4)
    config = CriticConfig(
        model=str(folder / "critic"), reward_model=str(folder / "eos"), reward_pooling="last", deterministic=True
    )
    scores = build_trainer(config).score([Sequence(row) for row in rows])
    np.testing.assert_allclose([s.reward for s in scores], zoo.reference(folder / "none", rows), atol=1e-4)


def test_the_config_names_the_rule(server: RunningServer) -> None:
    rules = {"eos": "last_non_pad (pad 2)", "pad": "last_non_pad (pad 0)", "none": "last", "last": "last"}
    assert server.grpc_url is not None
    with tritonclient.grpc.InferenceServerClient(server.grpc_url.removeprefix("grpc://")) as client:
        for name, rule in {**rules, "critic_infer": "last_non_pad (pad 2)"}.items():
            over_http = httpx.get(f"{server.http_url}/v2/models/{name}/config").json()
            assert over_http["parameters"]["pooling"] == {"string_value": rule}
            assert client.get_model_config(name).config.parameters["pooling"].string_value == rule


def test_text_for_a_model_without_a_tokenizer_is_told_why(folder: Path, tmp_path: Path) -> None:
    zoo.checkpoint("llama", tmp_path)
    why = "the folder of rm has no tokenizer; send tokens, or put the tokenizer's files"
    conversation = [{"role": "user", "content": "a"}]
    with served.running(ModelConfig(model=str(tmp_path), name="rm"), grpc_port=0) as server:
        for body in ({"input": "a"}, {"messages": conversation}):
            answer = httpx.post(f"{server.http_url}/classify", json={"model": "rm", **body})
            assert answer.status_code == 400 and why in answer.text
        for module, url in ((tritonclient.http, server.http_url), (tritonclient.grpc, server.grpc_url)):
            assert url is not None
            sent = module.InferInput("sentences", [1, 1], "BYTES")
            sent.set_data_from_numpy(np.array([[b"a"]], dtype=object))
            client = module.InferenceServerClient(url.rpartition("/")[2])
            with client, pytest.raises(InferenceServerException, match=why):
                client.infer("rm", [sent])
        with RewardClient(server.http_url, model="rm") as client:
            for samples in ({"texts": ["a"]}, {"messages": [conversation]}):
                with pytest.raises(InvalidRequest, match=r"folder without a tokenizer.*send tokens"):
                    client.score(**samples)


def test_the_start_names_the_rule_and_what_is_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path / "rm", pad_token_id=zoo.EOS)
    monkeypatch.setattr("guerdon.server.runtime.run", lambda *_, **__: None)  # would serve until a signal comes
    assert cli.main(["serve", str(folder), "--port", "0", "--grpc-port", "0"]) == Exit.DONE
    (described,) = [line for line in capsys.readouterr().out.splitlines() if "reward_model: sequence-class" in line]
    assert "pooling last_non_pad (pad 2)" in described
    assert f"no tokenizer in {folder}: accepts token ids only" in described
    (warned,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "is an EOS (2)" in warned and "--pooling last" in warned
