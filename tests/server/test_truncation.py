"""Truncation that a request asks for: a real checkpoint scores the ids that transformers would cut."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import zoo
from guerdon.assembly import build_service
from guerdon.core import ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.errors import InvalidRequest
from guerdon.server import reading
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, ServerConfig

MAX_LENGTH = 12
TEXT = "abcdefghijklmnopqrstuvwxyz"
Side = Literal["left", "right"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose tokenizer puts a BOS before a text, and the EOS whose state gives the reward behind it."""
    made = zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("cut")))
    tokenizer = AutoTokenizer.from_pretrained(made)
    around = [("<s>", zoo.BOS), ("</s>", zoo.EOS)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=around
    )
    tokenizer.save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    models = [
        ModelConfig(model=str(folder), max_length=MAX_LENGTH, deterministic=True),
        ModelConfig(model=str(folder), max_length=MAX_LENGTH, deterministic=True, truncation="left", name="cuts"),
    ]
    config = ServerConfig(port=0, grpc_port=None, models=models)
    with RunningServer(build_service(config), config, grace_s=0) as running:
        yield running


def expected(folder: Path, side: Side, max_tokens: int, add_special_tokens: bool) -> float:
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    ids = tokenizer(TEXT, truncation=True, max_length=max_tokens, add_special_tokens=add_special_tokens)["input_ids"]
    assert len(ids) == max_tokens
    return float(zoo.reference(folder, [np.array(ids)])[0])


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [5, -1, 100])
def test_vllms_form(server: RunningServer, folder: Path, max_tokens: int, side: Side, adds: bool) -> None:
    body = {"input": TEXT, "truncate_prompt_tokens": max_tokens, "truncation_side": side, "add_special_tokens": adds}
    answer = httpx.post(server.http_url + "/classify", json=body).raise_for_status().json()
    kept = 5 if max_tokens == 5 else MAX_LENGTH  # the model's own maximum is the largest
    assert answer["data"][0]["probs"][0] == pytest.approx(expected(folder, side, kept, adds), abs=1e-5)


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("side", ["left", "right"])
def test_teis_form(server: RunningServer, folder: Path, side: Side, adds: bool) -> None:
    body = {"inputs": TEXT, "truncate": True, "truncation_direction": side, "add_special_tokens": adds}
    (answer,) = httpx.post(server.http_url + "/predict", json=body).raise_for_status().json()
    assert answer["score"] == pytest.approx(expected(folder, side, MAX_LENGTH, adds), abs=1e-5)


@pytest.mark.parametrize("adds", [False, True])
def test_the_servers_own_setting(server: RunningServer, folder: Path, adds: bool) -> None:
    body = {"model": "cuts", "input": TEXT, "add_special_tokens": adds}
    answer = httpx.post(server.http_url + "/classify", json=body).raise_for_status().json()
    assert answer["data"][0]["probs"][0] == pytest.approx(expected(folder, "left", MAX_LENGTH, adds), abs=1e-5)


def test_samples_are_not_truncated_unless_the_client_asks(server: RunningServer) -> None:
    told = httpx.post(server.http_url + "/classify", json={"input": TEXT})
    assert told.status_code == 400 and f"takes at most {MAX_LENGTH}" in told.json()["error"]["message"]


@pytest.mark.parametrize("by_token", [(), ("values",), ("step_rewards",)])
def test_truncation_is_advised_if_the_model_allows_it(by_token: tuple[str, ...]) -> None:
    told = str(
        reading.find_fault(Sequence(np.arange(5)), ModelInfo("rm", "llama", ("rewards", *by_token), max_length=3))
    )
    assert "has 5 tokens, rm takes at most 3; shorten it" in told
    assert ("--truncation" in told) == (not by_token)


@pytest.mark.parametrize("kind", [{"kind": "tokcls", "num_labels": 2}, {"kind": "tokcls", "num_labels": 1}])
async def test_positions_that_clients_count_are_never_shifted(kind: dict[str, Any], tmp_path: Path) -> None:
    service = build_service(ServerConfig(models=[ModelConfig(model=str(zoo.checkpoint("llama", tmp_path, **kind)))]))
    assert {"values", "step_rewards"} & {*service.catalog.scored_by("").outputs}
    asked = ScoreRequest(tokens=[np.arange(4, 9)], truncation=Truncation(3, "right"))
    with pytest.raises(InvalidRequest, match="truncation would shift the positions"):
        await service.score("reward_model", asked)
