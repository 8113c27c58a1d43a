"""What is read of long texts and token ids: what is cut, on which side, and what is refused."""

import asyncio
import contextlib
import gzip
import json
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import orjson
import psutil
import pytest
from tokenizers import Tokenizer, processors
from transformers import AutoTokenizer

import chats
import zoo
from guerdon import RewardClient
from guerdon.assembly import build_service
from guerdon.core import ModelInfo, ScoreRequest, Sequence, Truncation
from guerdon.engine.checkpoint import cuts
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import InvalidRequest, Overloaded
from guerdon.server import reading
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig, TeacherConfig
from guerdon.wire.forms import tokens
from served import Serve, running, sums

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
def server(folder: Path, serve: Serve) -> RunningServer:
    models = [
        ModelConfig(model=str(folder), max_length=MAX_LENGTH, deterministic=True),
        ModelConfig(model=str(folder), max_length=MAX_LENGTH, deterministic=True, truncation="left", name="cuts"),
    ]
    return serve(*models, grace_s=0)


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
def chat(tmp_path_factory: pytest.TempPathFactory, serve: Serve) -> tuple[RunningServer, Path]:
    """A model without a limit of its own that matters here, and two whose servers cut to 40 tokens."""
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("chat")))
    models = [ModelConfig(model=str(folder), deterministic=True)]
    models += [
        ModelConfig(model=str(folder), deterministic=True, truncation=side, name=side, max_length=40)
        for side in ("left", "right")
    ]
    return serve(*models, grace_s=0), folder


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
            found = reading.split_at_cut(encoder, request, 0, Truncation(5, side))
            assert found is not None
            whole, part = found
            if side == "right":
                assert whole.startswith(part)
                assert whole[len(part) :].removesuffix(ending).strip() == answer.strip()
            else:
                assert part.strip() == ending.strip() and whole.removesuffix(part).endswith(answer.strip())


TEXTS = ["In 2024, the théâtre — 日本語 😀!", "<extra_0>the other", "", " the"]
ASKED = [{"role": "user", "content": "What is 3+4?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "7"}]


@pytest.fixture(scope="module")
def ids_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("rm"), num_labels=3))


@pytest.fixture(scope="module")
def client(ids_folder: Path) -> Iterator[httpx.Client]:
    teacher = zoo.tokenizer(zoo.language_model("gpt2", ids_folder / "teacher"))
    models = [ModelConfig(model="served:agreement", name="agreement"), ModelConfig(model=str(ids_folder), name="rm")]
    config = ServerConfig(port=0, grpc_port=None, models=[*models, TeacherConfig(model=str(teacher))])
    with running(config=config) as server, httpx.Client(base_url=server.http_url) as client:
        yield client


@pytest.fixture(scope="module")
def file(ids_folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(ids_folder / "tokenizer.json"))


@pytest.mark.parametrize("added", [None, False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_a_texts_ids_are_those_of_the_file(
    text: str, added: bool | None, client: httpx.Client, file: Tokenizer
) -> None:
    body = {"prompt": text} | ({} if added is None else {"add_special_tokens": added})
    told = client.post("/tokenize", json=body | {"return_token_strs": True}).json()
    want = file.encode(text, add_special_tokens=bool(added))
    assert told == {
        "count": len(want.ids),
        "max_model_len": zoo.MAX_LENGTH,
        "tokens": want.ids,
        "token_strs": want.tokens,
    }
    assert client.post("/tokenize?add_special_tokens=true", json={"prompt": text}).json()["tokens"][:1] == [zoo.BOS]


@pytest.mark.parametrize("added", [False, True])
def test_teis_tokens_have_their_places(added: bool, client: httpx.Client, file: Tokenizer) -> None:
    told = client.post("/tokenize", json={"inputs": TEXTS, "add_special_tokens": added}).json()
    for text, row in zip(TEXTS, told, strict=True):
        want = file.encode(text, add_special_tokens=added)
        assert [token["id"] for token in row] == want.ids
        for token, is_added, (start, stop) in zip(row, want.special_tokens_mask, want.offsets, strict=True):
            place = (None, None) if is_added else (start, stop)
            assert (token["special"], token["start"], token["stop"]) == (bool(is_added), *place)
            assert token["text"] == ("<s>" if is_added else text[start:stop])
    assert (
        client.post("/tokenize", json={"inputs": TEXTS[0]}).json()[0]
        == client.post("/tokenize", json={"inputs": TEXTS}).json()[0]
    )


def test_a_second_bos_is_added_nowhere(client: httpx.Client) -> None:
    """As where texts are scored."""
    (row,) = client.post("/tokenize", json={"inputs": "<s>the", "add_special_tokens": True}).json()
    body = {"prompt": "<s>the", "add_special_tokens": True}
    assert [t["id"] for t in row] == client.post("/tokenize", json=body).json()["tokens"]
    assert [t["id"] for t in row].count(zoo.BOS) == 1


@pytest.mark.parametrize(
    ("options", "messages"),
    [
        ({}, ASKED),
        ({"add_generation_prompt": False}, ANSWERED),
        ({"continue_final_message": True}, ANSWERED),
        ({"add_generation_prompt": True}, ANSWERED),
    ],
)
def test_messages_are_rendered_as_vllm_does(
    options: dict[str, bool], messages: list[dict[str, str]], client: httpx.Client, ids_folder: Path
) -> None:
    continues = options.get("continue_final_message", False)
    want = AutoTokenizer.from_pretrained(ids_folder).apply_chat_template(
        messages,
        return_dict=False,
        add_generation_prompt=options.get("add_generation_prompt", not continues),
        continue_final_message=continues,
    )
    told = client.post("/tokenize", json={"messages": messages, **options}).json()
    assert told["tokens"] == want and told["count"] == len(want)


def test_ids_are_decoded(client: httpx.Client, file: Tokenizer) -> None:
    ids = [zoo.BOS, *file.encode(TEXTS[0], add_special_tokens=False).ids]
    assert client.post("/detokenize", json={"tokens": ids}).json() == {"prompt": "<s>" + TEXTS[0]}
    refused = client.post("/detokenize", json={"tokens": [5, zoo.VOCAB_SIZE]})
    assert refused.status_code == 400 and "outside the vocabulary" in refused.json()["error"]["message"]


def test_the_model_is_that_which_is_named_and_has_a_tokenizer(client: httpx.Client, ids_folder: Path) -> None:
    for body, query in (
        ({"model": "teacher"}, ""),
        ({}, "?model=teacher"),
        ({"model": str(ids_folder / "teacher")}, ""),
    ):
        assert client.post(f"/tokenize{query}", json={"prompt": "the", **body}).status_code == 200
    unknown = client.post("/tokenize", json={"prompt": "a", "model": "nobody"})
    assert unknown.status_code == 404 and "served here: agreement, rm, teacher" in unknown.json()["error"]["message"]
    without = client.post("/tokenize", json={"prompt": "a", "model": "agreement"})
    assert without.status_code == 400 and "agreement has no tokenizer" in without.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/tokenize", {}, "neither prompt nor messages"),
        ("/tokenize", {"prompt": "a", "messages": ASKED}, "prompt and messages"),
        ("/tokenize", {"prompt": 5}, "prompt is 5"),
        ("/tokenize", {"prompt": "\ud800"}, "JSON"),
        ("/tokenize", {"prompt": "a", "chat_template": "b"}, "chat_template is not supported"),
        ("/tokenize", {"messages": [{"role": "cat", "content": "a"}]}, "unknown role cat"),
        ("/tokenize", {"messages": ANSWERED, "add_generation_prompt": True, "continue_final_message": True}, "both"),
        ("/tokenize", {"inputs": []}, "inputs is an empty list"),
        ("/tokenize", {"inputs": ["a", 1]}, "inputs[1] is 1"),
        ("/tokenize", {"inputs": ["a" * tokens.MAX_SPANS, "b"]}, "at most 32,768 are tokenised"),
        ("/tokenize", {"prompt": "a" * (tokens.MAX_TEXT + 1)}, "at most 131,072 are tokenised"),
        ("/detokenize", {"tokens": []}, "tokens is an empty list"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0] is -1"),
    ],
)
def test_what_is_wrong_is_named(path: str, body: dict[str, object], text: str, client: httpx.Client) -> None:
    refused = client.post(path, content=json.dumps(body))
    assert refused.status_code == 400 and text in refused.json()["error"]["message"]


def test_a_large_answer_comes_whole(client: httpx.Client, file: Tokenizer) -> None:
    text = "the other 😀 " * 2_700
    (row,) = client.post("/tokenize", json={"inputs": text}).json()
    want = file.encode(text, add_special_tokens=False)
    assert [token["id"] for token in row] == want.ids and [row[-1]["start"], row[-1]["stop"]] == [*want.offsets[-1]]
    assert client.post("/tokenize", json={"prompt": text}).json()["tokens"] == want.ids


def test_info_has_teis_fields(client: httpx.Client, ids_folder: Path) -> None:
    told = client.get("/info?model=rm").json()
    assert told["model_type"]["classifier"]["id2label"] == {str(i): f"LABEL_{i}" for i in range(3)}
    assert told["model_id"] == str(ids_folder) and told["model_dtype"] == "float32"
    assert told["max_input_length"] == zoo.MAX_LENGTH and told["auto_truncate"] is False
    fields = "model_id model_sha model_dtype model_type max_concurrent_requests max_input_length max_batch_tokens "
    fields += "max_batch_requests max_client_batch_size auto_truncate tokenization_workers version sha docker_label"
    assert {*told} == {*fields.split()}  # of `Info` in TEI's router/src/lib.rs
    assert "reranker" in client.get("/info").json()["model_type"]
    unknown = client.get("/info?model=nobody")
    assert unknown.status_code == 404 and unknown.json()["error_type"] == "Validation"


def test_a_sum_has_no_tokens_of_its_own(tmp_path: Path) -> None:
    with sums(tmp_path) as server, httpx.Client(base_url=server.http_url) as client:
        assert client.post("/tokenize", json={"prompt": "a", "model": "total"}).status_code == 400
        assert client.post("/tokenize", json={"prompt": "a"}).status_code == 200  # by the first with a tokenizer
        assert client.get("/info?model=total").status_code == 200


LONG = "the ring of the reader " * 40_000
"""920,000 characters, 14 steps."""


@pytest.fixture(scope="module")
def long_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("long")))


@pytest.mark.slow
def test_a_small_body_that_holds_a_long_text_takes_little_memory(long_folder: Path) -> None:
    command = [sys.executable, "-m", "guerdon", "serve", str(long_folder), "--port", "0", "--no-grpc"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)", next(line for line in process.stdout if "ready at" in line))
        assert found is not None
        body = gzip.compress(orjson.dumps({"input": "the ring of a reader " * 1_150_000}))
        assert len(body) < 100_000
        peaks = []
        for text in (orjson.dumps({"input": "the ring"}), body):
            headers = {"Content-Encoding": "gzip"} if text is body else {}
            answer = httpx.post(f"http://127.0.0.1:{found[1]}/classify", content=text, headers=headers, timeout=120)
            peaks.append(psutil.Process(process.pid).memory_info().rss)
        assert answer.status_code == 400 and f"has more than {zoo.MAX_LENGTH} tokens" in answer.text
        status = Path(f"/proc/{process.pid}/status")
        if status.exists():
            peaks.append(1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]))  # type: ignore[index]
        # The body and its text are held a few times over; tokenised whole it took 3 GB.
        assert max(peaks) - peaks[0] < 400e6
    finally:
        process.terminate()
        assert process.wait(120) == 0


@contextlib.asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Service, list[int]]]:
    """A service that truncates on the left, so that a long prompt's length is counted; and what it tokenised."""
    ids, seen = TextEncoder._ids, []

    def counting(self: TextEncoder, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        seen.append(sum(map(len, texts)))
        return ids(self, texts, add_special_tokens)

    monkeypatch.setattr(TextEncoder, "_ids", counting)
    service = build_service(ServerConfig(models=[ModelConfig(model=str(folder))]))
    seen.clear()
    service.start()
    try:
        yield service, seen
    finally:
        await asyncio.to_thread(service.stop)


def many(count: int) -> ScoreRequest:
    """Texts that are tokenised for as long as `count` steps take."""
    return ScoreRequest(texts=[LONG[:60_000]] * count)


async def test_one_clients_texts_do_not_starve_anothers(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(long_folder, monkeypatch) as (service, seen):
        flood = [asyncio.create_task(service.score("reward_model", many(15), "a")) for _ in range(3)]
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        before = len(seen)
        await service.score("reward_model", ScoreRequest(texts=["the ring"]), "b")
        # Two threads, on which the clients alternate.
        assert sum(seen[before : seen.index(len("the ring"))]) <= 4 * cuts.PIECE
        for task in flood:
            assert all(isinstance(row, InvalidRequest) for row in (await task).results)


async def test_nothing_more_is_tokenised_for_who_has_left(long_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(long_folder, monkeypatch) as (service, seen):
        leaves = asyncio.create_task(service.score("reward_model", many(200), "a"))
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        before = len(seen)
        for _ in range(5):
            await service.score("reward_model", ScoreRequest(texts=["the ring"]), "a")
        assert len(seen) - before <= 5 + 1


async def test_a_text_is_tokenised_no_further_than_its_model_reads(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(long_folder, monkeypatch) as (service, seen):
        reply = await service.score("reward_model", ScoreRequest(texts=[LONG]))
        assert f"has more than {zoo.MAX_LENGTH} tokens" in str(reply.results[0])
        assert len(seen) == 1 and seen[0] < len(LONG) / 10


async def test_texts_are_not_tokenised_if_the_queue_has_no_room_for_them(
    long_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(long_folder, monkeypatch) as (service, seen):
        room = service.loops.of["reward_model"]._schedulers["reward_model"].room
        room.take(waiting := room.sequences.total - 1, 1, "")
        with pytest.raises(Overloaded):
            await service.score("reward_model", ScoreRequest(texts=["the ring"] * 2))
        assert not seen
        room.give(waiting, 1, "")
        await service.score("reward_model", ScoreRequest(texts=["the ring"] * 2))
        assert seen
