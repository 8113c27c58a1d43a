"""Rows that name their teachers, and mixtures of them: by every client and form, equal to transformers."""

import asyncio
import json
import re
import threading
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
import torch

import served
import zoo
from guerdon import AsyncTeacherClient, TeacherClient
from guerdon.core import Sequence
from guerdon.errors import InvalidRequest, UnknownModel
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from served import Serve
from teaching import check, plain

NEAR: Any = {"rtol": 1e-6, "atol": 1e-5}
ROWS = zoo.rows(0, ((40, 3), (20, 2)))[:6]
LENGTHS = [38, 38, 39, 17, 18, 4]
MIXTURE = {"code": 3, "teacher": 1, "maths": 0.5}
TEACHERS: list[Any] = ["maths", MIXTURE, None, "code", {"maths": 2.0}, MIXTURE]
NAMES = ("teacher", "maths", "code")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three teachers, of other architectures and sizes; one has a larger table of embeddings."""
    folder = tmp_path_factory.mktemp("together")
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher"))
    zoo.tokenizer(zoo.language_model("qwen2", folder / "maths", hidden_size=48, num_hidden_layers=1))
    zoo.tokenizer(zoo.language_model("llama", folder / "code", seed=2, vocab_size=zoo.VOCAB_SIZE + 64))
    zoo.language_model("llama", folder / "bare", seed=3)
    zoo.tokenizer(zoo.language_model("llama", folder / "other"))
    words = json.loads((folder / "other/tokenizer.json").read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (folder / "other/tokenizer.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    names = (*NAMES, "bare", "other")
    models: list[Any] = [TeacherConfig(model=str(folder / name), name=name) for name in names]
    models.append(ModelConfig(model=str(served.reward_model(folder / "rm"))))
    return serve(*models, grpc_port=0)


@pytest.fixture(scope="module")
def logits(folder: Path) -> dict[str, list[torch.Tensor]]:
    return {name: plain(folder / name, ROWS) for name in NAMES}


def mixed(logits: dict[str, list[torch.Tensor]], i: int, teachers: Any, temperature: float = 1.0) -> torch.Tensor:
    """The log-probs `[T,V]` of row `i` in float64: the weighted mean of the teachers' probabilities."""
    weights = {teachers or "teacher": 1.0} if not isinstance(teachers, dict) else teachers
    width = max(logits[name][i].shape[1] for name in weights)
    total = torch.zeros(len(ROWS[i]), width, dtype=torch.float64)
    for name, weight in weights.items():
        probs = torch.softmax(logits[name][i].double() / temperature, -1)
        total[:, : probs.shape[1]] += probs * weight / sum(weights.values())
    return total.log()


@pytest.mark.parametrize("way", ["http", "grpc", "asyncio"])
def test_one_request_asks_several_teachers(
    way: str, server: RunningServer, logits: dict[str, list[torch.Tensor]]
) -> None:
    samples: dict[str, Any] = {
        "tokens": ROWS, "prompt_lengths": LENGTHS, "teachers": TEACHERS, "temperature": 0.7, "entropy": True,
    }  # fmt: skip
    given = [np.array([[3, 7, -1]] * (len(row) - n)) for row, n in zip(ROWS, LENGTHS, strict=True)]
    if way == "asyncio":

        async def ask() -> Any:
            async with AsyncTeacherClient(server.http_url) as client:
                return await asyncio.gather(client.top(5, **samples, rest=True), client.given(given, **samples))

        found = asyncio.run(ask())
    else:
        with TeacherClient(server.http_url if way == "http" else str(server.grpc_url)) as client:
            found = client.top(5, **samples, rest=True), client.given(given, **samples)
    top, about = found
    assert top.errors == about.errors == [None] * len(ROWS)
    names = [part.partition("=")[0] for part in top.weights_version.split(";")]
    assert names == sorted(NAMES) and about.weights_version == top.weights_version
    for i, (row, length) in enumerate(zip(ROWS, LENGTHS, strict=True)):
        table = mixed(logits, i, TEACHERS[i], 0.7)
        common: dict[str, Any] = {"with_entropy": True}
        answer = TokenLogprobs(top.logprobs[i], top.entropy[i], None, top.top_ids[i], top.top_logprobs[i])
        check(answer, table, Sequence(row, prompt_length=length, ask=LogprobQuery(top_k=5, **common)))
        answer = TokenLogprobs(about.logprobs[i], about.entropy[i], given_logprobs=about.given_logprobs[i])
        check(answer, table, Sequence(row, prompt_length=length, ask=LogprobQuery(given=given[i], **common)))
        rest = 1 - np.exp(np.take_along_axis(table.numpy()[length - 1 : -1], top.top_ids[i], 1)).sum(1)
        np.testing.assert_allclose(top.rest[i], np.log(rest), **NEAR)


def test_the_rest_is_exact_where_it_is_tiny_or_nothing(server: RunningServer, folder: Path) -> None:
    """At a low temperature nearly all is in the likeliest ids: 1 less their sum would be 0 in float32."""
    (logits,) = plain(folder / "teacher", ROWS[:1])
    table = torch.log_softmax(logits.double() / 0.01, -1).numpy()[:-1]
    with TeacherClient(server.http_url) as client:
        answers = client.top(5, tokens=ROWS[:1], temperature=0.01, rest=True)
    others = table.copy()
    np.put_along_axis(others, answers.top_ids[0], -np.inf, 1)
    expected = np.logaddexp.reduce(others, 1)
    assert (expected < -20).any()
    # A logit of about 1 has an error of 1e-6, a hundred times as large at this temperature.
    np.testing.assert_allclose(answers.rest[0], expected, rtol=1e-5, atol=1e-3)


def test_mixtures_have_what_else_a_teacher_gives(server: RunningServer, logits: dict[str, list[torch.Tensor]]) -> None:
    """Over the protocol: ranks, and the token after the last; with prompts of the teachers' own."""
    tokens = [row.tolist() for row in ROWS]
    body = {
        "inputs": [
            {"name": "tokens", "shape": [1, len(tokens[0])], "datatype": "INT64", "data": [tokens[0]]},
            {"name": "sequence_lengths", "shape": [1, 1], "datatype": "INT64", "data": [len(tokens[0])]},
            {"name": "teachers", "shape": [1, 1], "datatype": "BYTES", "data": [json.dumps(MIXTURE)]},
        ],
        "outputs": [{"name": name} for name in ("logprobs", "ranks", "next_ids", "next_logprobs", "top_ids")],
        "parameters": {"top_k": 3},
    }
    reply = httpx.post(f"{server.http_url}/v2/models/teacher/infer", json=body)
    assert reply.status_code == 200, reply.text
    got = {output["name"]: np.array(output["data"]).reshape(output["shape"])[0] for output in reply.json()["outputs"]}
    answer = TokenLogprobs(
        got["logprobs"].astype(np.float32), ranks=got["ranks"], next_ids=got["next_ids"],
        next_logprobs=got["next_logprobs"],
    )  # fmt: skip
    check(answer, mixed(logits, 0, MIXTURE), Sequence(ROWS[0], ask=LogprobQuery(with_ranks=True, with_next=True)))
    prompts = [row[:n] for row, n in zip(tokens, LENGTHS, strict=True)]
    responses = [row[n:] for row, n in zip(tokens, LENGTHS, strict=True)]
    with TeacherClient(server.http_url) as client:
        own = client.logprobs(tokens=responses, teacher_prompts=prompts, teachers=MIXTURE)
        expected = client.logprobs(tokens=tokens, prompt_lengths=LENGTHS, teachers=MIXTURE)
    for one, other in zip(own.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-6)


def test_the_forms_route_and_mix(server: RunningServer, logits: dict[str, list[torch.Tensor]]) -> None:
    rows = [row.tolist() for row in ROWS]
    asked: dict[str, Any] = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/generate", {"input_ids": rows, **asked}),
        ("/v1/completions", {"prompt": rows, "max_tokens": 0, "prompt_logprobs": 0}),
        ("/get_sequence_logprobs/", {"sequences": rows, "prompt_lengths": [1] * len(rows), "top_logprobs": 1,
                                     "response_format": "json"}),
    ]  # fmt: skip
    for path, body in bodies:
        reply = httpx.post(server.http_url + path, json={**body, "teachers": TEACHERS})
        assert reply.status_code == 200, reply.text
        told = reply.json()
        for i, row in enumerate(rows):
            table = mixed(logits, i, TEACHERS[i]).numpy()
            actual = table[np.arange(len(row) - 1), row[1:]]
            if path == "/generate":
                got = [entry[0] for entry in told[i]["meta_info"]["input_token_logprobs"][1:]]
            elif path == "/v1/completions":
                got = [next(iter(one.values()))["logprob"] for one in told["choices"][i]["prompt_logprobs"][1:]]
            else:
                got, actual = [one[0] for one in told["logprobs"][i]], table[:-1].max(1)
            np.testing.assert_allclose(got, actual, **NEAR)


def test_concurrent_mixtures_in_both_orders_have_the_same_bits(server: RunningServer) -> None:
    """Of two teachers each is the first in one mixture, alone and beside others; without kernels it is close."""
    rows = [row for row in ROWS for _ in range(3)]
    orders = [{"teacher": 1, "maths": 2}, {"maths": 2, "teacher": 1}]
    with TeacherClient(server.http_url) as client:
        alone = {i: client.top(3, tokens=ROWS[:1], teachers=teachers, rest=True) for i, teachers in enumerate(orders)}
        found: list[tuple[int, Any]] = []

        def ask(i: int) -> None:
            found.append((i, client.top(3, tokens=rows, teachers=orders[i], rest=True)))

        threads = [threading.Thread(target=ask, args=(i % 2,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        near = {"rtol": 0, "atol": 0} if client.config()["parameters"]["same_bits"]["string_value"] == "true" else NEAR
    assert len(found) == 8
    for i, answers in found:
        for name in ("logprobs", "top_ids", "top_logprobs", "rest"):
            np.testing.assert_allclose(getattr(answers, name)[0], getattr(alone[i], name)[0], **near)


def test_a_path_names_the_teacher(server: RunningServer, logits: dict[str, list[torch.Tensor]]) -> None:
    """For clients whose only setting is an address, such as TRL's of several teachers."""
    url, row = server.http_url, ROWS[0].tolist()
    assert [one["id"] for one in httpx.get(f"{url}/models/maths/v1/models").json()["data"]] == ["maths"]
    body = {"prompt": [row], "max_tokens": 0, "prompt_logprobs": 0}
    reply = httpx.post(f"{url}/models/maths/v1/completions", json=body).json()
    got = [next(iter(one.values()))["logprob"] for one in reply["choices"][0]["prompt_logprobs"][1:]]
    table = mixed(logits, 0, "maths").numpy()
    assert reply["model"] == "maths"
    np.testing.assert_allclose(got, table[np.arange(len(row) - 1), row[1:]], **NEAR)
    named = httpx.post(f"{url}/models/maths/v1/completions", json=body | {"model": "code"}).json()
    assert named["model"] == "code"  # the body counts
    for path, status in (("/models/absent/v1/models", 404), ("/models/maths/absent", 404), ("/models/maths", 404)):
        assert httpx.get(url + path).status_code == status
    assert "unknown model 'absent'" in httpx.post(f"{url}/models/absent/v1/completions", json=body).text


@pytest.mark.parametrize(
    ("teachers", "error", "message"),
    [
        ("absent", UnknownModel, "row 0, teachers: unknown model 'absent'; served here: .*maths"),
        ({"maths": 1, "absent": 1}, UnknownModel, "unknown model 'absent'"),
        ("reward_model", InvalidRequest, "reward_model is no teacher"),
        ({"maths": 0, "code": 1}, InvalidRequest, r"teachers\[0\]: the weight of maths is 0.*above 0"),
        ({"maths": -1.0, "code": 1}, InvalidRequest, "the weight of maths is -1"),
        ({"maths": float("nan"), "code": 1}, InvalidRequest, "the weight of maths is nan"),
        ({"maths": float("inf"), "code": 1}, InvalidRequest, "the weight of maths is inf"),
        ({"maths": True}, InvalidRequest, "the weight of maths is True"),
        ({"maths": "1"}, InvalidRequest, "the weight of maths is 1"),
        ({}, InvalidRequest, "must be a teacher's name"),
        (["maths", "code"], InvalidRequest, "one entry for each of the 1 samples"),
        ([["maths"]], InvalidRequest, "must be a teacher's name"),
        (
            {"teacher": 1, "other": 1},
            InvalidRequest,
            "cannot be mixed, because token ids mean others",
        ),
    ],
)
def test_what_cannot_be_asked_is_one_clear_error(
    teachers: Any, error: type[Exception], message: str, server: RunningServer
) -> None:
    with TeacherClient(server.http_url) as client:
        with pytest.raises(error, match=message):
            client.logprobs(tokens=[[5, 6, 7]], teachers=teachers)
        assert client.logprobs(tokens=[[5, 6, 7]], teachers="maths").errors == [None]


def test_weights_on_the_wire_are_checked_too(server: RunningServer) -> None:
    body = {"prompt": [[5, 6]], "max_tokens": 0, "prompt_logprobs": 0}
    for teachers, message in (
        ([{"maths": 0}], "the weight of maths is 0"),
        ([{"maths": -0.5, "code": 1}], "the weight of maths is -0.5"),
        (["absent"], "unknown model 'absent'"),
        (["maths", "maths"], "teachers has 2 entries for 1 samples"),
    ):
        reply = httpx.post(f"{server.http_url}/v1/completions", json={**body, "teachers": teachers})
        assert reply.status_code in (400, 404) and re.search(message, reply.text), reply.text


def test_a_row_that_one_teacher_cannot_read_harms_no_other(server: RunningServer) -> None:
    rows = [[5, zoo.VOCAB_SIZE + 3, 7], [5, 6, 7], [5, zoo.VOCAB_SIZE + 3, 7]]
    with TeacherClient(server.http_url) as client:
        answers = client.logprobs(tokens=rows, teachers=["code", {"code": 1, "maths": 1}, {"code": 1, "maths": 1}])
        assert [error is None for error in answers.errors] == [True, True, False]
        assert re.search("maths: token id .* outside the vocabulary of maths", answers.errors[2])
        with pytest.raises(InvalidRequest, match="a mixture has no hidden states"):
            client.hidden(tokens=[[5, 6]], teachers=MIXTURE)
        with pytest.raises(InvalidRequest, match="differ in size"):
            client.hidden(tokens=[[5, 6]] * 2, teachers=["teacher", "maths"])
        tiny = client.logprobs(tokens=[[5, 6, 7]], teachers={"maths": 5e-324, "code": 1e29})
        alone = client.logprobs(tokens=[[5, 6, 7]], teachers="code")
        np.testing.assert_allclose(tiny.logprobs[0], alone.logprobs[0], rtol=0, atol=1e-6)
    with TeacherClient(server.http_url, "maths") as client:
        assert len(client.hidden(tokens=[[5, 6]] * 2, teachers="maths").hidden) == 2


@pytest.mark.slow
def test_a_mixture_holds_one_heads_table_at_a_time(folder: Path, serve: Serve) -> None:
    """Three vocabularies of 65,536: all tables of 512 tokens would be 400 MB, and one of 1,024 tokens is 64 MiB's."""
    names = ("first", "second", "third")
    for seed, name in enumerate(names):
        zoo.language_model("llama", folder / name, seed=seed, vocab_size=1 << 16)
    models: list[Any] = [TeacherConfig(model=str(folder / name), name=name) for name in names]
    server = serve(*models)
    rows = [np.arange(3, 99) + i for i in range(32)]
    with TeacherClient(server.http_url, "first") as client:
        client.top(5, tokens=rows[:2], teachers=dict.fromkeys(names, 1.0), entropy=True, rest=True)
        process, peak, ends = psutil.Process(), 0, threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ends.wait(0.002):
                peak = max(peak, process.memory_info().rss)

        before = process.memory_info().rss
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            client.top(5, tokens=rows, teachers=dict.fromkeys(names, 1.0), entropy=True, rest=True)
        finally:
            ends.set()
            watcher.join()
    all_tables = 3 * 32 * 95 * (1 << 16) * 4
    assert peak - before < all_tables / 4, (peak - before) / 1e6
