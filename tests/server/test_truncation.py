"""Truncation that a request asks for: a real checkpoint scores the ids that transformers would cut."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

import chats
import zoo
from guerdon import RewardClient
from guerdon.assembly import build_service
from guerdon.core import ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import InvalidRequest
from guerdon.server import reading, truncating
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


ANSWER = "xyz!"


def conversation(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningServer, Path]]:
    """A model without a limit of its own that matters here, and two whose servers cut to 40 tokens."""
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("chat")))
    models = [ModelConfig(model=str(folder), deterministic=True)]
    models += [
        ModelConfig(model=str(folder), deterministic=True, truncation=side, name=side, max_length=40)
        for side in ("left", "right")
    ]
    config = ServerConfig(port=0, grpc_port=None, models=models)
    with RunningServer(build_service(config), config, grace_s=0) as running:
        yield running, folder


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_conversation_keeps_some_of_its_answer_or_fails(chat: tuple[RunningServer, Path], side: Side) -> None:
    """Every byte is a token, so that it is known of each bound what is left."""
    server, folder = chat
    tokenizer = AutoTokenizer.from_pretrained(folder, truncation_side=side)
    messages = conversation("Q" * 30, ANSWER)
    text = tokenizer.apply_chat_template(messages, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    before, behind = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in text.split(ANSWER))
    others = len(before) if side == "right" else len(behind)
    bounds = [1, 2, 3, 5, others, others + 1, len(ids) - 1, len(ids), len(ids) + 1]
    for most in bounds:
        body = {"messages": messages, "truncate_prompt_tokens": most, "truncation_side": side}
        told = httpx.post(server.http_url + "/classify", json=body)
        if most <= others:
            assert told.status_code == 400 and "leaves nothing of the response" in told.text, most
            continue
        cut = ids[:most] if side == "right" else ids[-most:]
        want = float(zoo.reference(folder, [np.array(cut)])[0])
        assert told.json()["data"][0]["probs"][0] == pytest.approx(want, abs=1e-5), most


def test_the_servers_own_setting_fails_samples_without_their_answer_alone(chat: tuple[RunningServer, Path]) -> None:
    """In every form of sample whose prompt is known; the others of the request have their scores."""
    server, folder = chat
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = ["Q" * 60, "Q" * 10]
    texts = [prompt + ANSWER for prompt in prompts]
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts]
    samples: list[dict[str, Any]] = [
        {"texts": texts, "prompts": prompts},
        {"tokens": rows, "prompt_lengths": [60, 10]},
        {"texts": texts, "prompt_lengths": [60, 10]},
        {"messages": [conversation(prompt, ANSWER) for prompt in prompts]},
    ]
    for sample in samples:
        with RewardClient(server.http_url, model="right") as client:
            scores = client.score(**sample)
        assert "truncation to 40 tokens at the right leaves nothing of the response" in str(scores.errors[0]), sample
        assert np.isfinite(scores.rewards[1]) and scores.errors[1] is None
        with RewardClient(server.http_url, model="left") as client:
            assert client.score(**sample).errors == [None, None]
    body = {"query": texts, "prompts": prompts}
    assert "leaves nothing of the response" in httpx.post(server.http_url + "/get_reward?model=right", json=body).text
    with RewardClient(server.http_url, model="right") as client:  # nobody says where the prompts end
        want = zoo.reference(folder, [np.array(row[:40]) for row in rows])
        np.testing.assert_allclose(client.score(texts=texts).rewards, want, atol=1e-5)


@pytest.mark.parametrize(
    ("messages", "fails"),
    [
        (conversation("Q" * 60, ""), False),  # there was nothing to lose
        ([{"role": "user", "content": "Q" * 60}], False),
        ([*conversation("Q" * 60, "A"), {"role": "user", "content": "why?"}], True),
        ([*conversation("Q", "A" * 60), {"role": "user", "content": "why?"}], True),
        (conversation("Q", "A" * 60), False),
        (conversation("Q" * 30 + ANSWER, ANSWER), True),
        (conversation("Q" * 60, "a"), True),  # which the role's name has, too
    ],
)
def test_what_is_scored_of_a_conversation_is_its_last_message(
    chat: tuple[RunningServer, Path], messages: list[dict[str, str]], fails: bool
) -> None:
    with RewardClient(chat[0].http_url, model="right") as client:
        scores = client.score(messages=[messages])
    assert (scores.errors[0] is not None) == fails
    assert fails == bool(np.isnan(scores.rewards[0]))


@pytest.mark.parametrize("family", chats.FAMILIES)
def test_the_answer_is_found_in_every_familys_template(family: str, tmp_path: Path) -> None:
    chats.save(family, tmp_path)
    encoder, ending = TextEncoder.load(tmp_path), chats.FAMILIES[family].ending
    assert encoder is not None
    for answer in ("yes", "a", " assistant ", "e"):
        request = ScoreRequest(messages=[conversation("Is it? " + answer, answer)])
        for side in ("right", "left"):
            found = truncating.split_at_cut(encoder, request, 0, Truncation(5, side))
            assert found is not None
            whole, part = found
            if side == "right":
                assert whole.startswith(part)
                assert whole[len(part) :].removesuffix(ending).strip() == answer.strip()
            else:
                assert part.strip() == ending.strip() and whole.removesuffix(part).endswith(answer.strip())
