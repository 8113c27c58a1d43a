"""A teacher reads responses under prompts of its own: by every client and form, equal to transformers."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import zoo
from guerdon import AsyncTeacherClient, LocalTeacher, TeacherClient
from guerdon.errors import InvalidRequest
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import TeacherConfig
from served import Serve
from teaching import plain

NEAR: Any = {"rtol": 1e-6, "atol": 1e-5}
ROWS = [row.tolist() for row in zoo.rows(0, ((40, 3), (20, 2)))][:6]
LENGTHS = [38, 38, 39, 17, 18, 4]
CHAT = [{"role": "user", "content": "2 and 2? (It is 4.)"}]
PROMPTS: list[Any] = [CHAT, "the answer is four: ", [9, 8, 7], CHAT, None, [11]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prompts")
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher"))
    zoo.language_model("llama", folder / "bare")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    models: list[Any] = [
        TeacherConfig(model=str(folder / "teacher")),
        TeacherConfig(model=str(folder / "bare"), name="bare"),
    ]
    return serve(*models, grpc_port=0)


@pytest.fixture(scope="module")
def tables(folder: Path) -> list[np.ndarray]:
    """The log-probs `[n,V]` of each response's tokens after the teacher's own prompt."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    found = []
    for row, length, prompt in zip(ROWS, LENGTHS, PROMPTS, strict=True):
        if prompt is CHAT:
            before = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=True)["input_ids"]
        elif isinstance(prompt, str):
            before = tokenizer.encode(prompt, add_special_tokens=False)
        else:
            before = row[:length] if prompt is None else prompt
        (logits,) = plain(folder / "teacher", [np.array(before + row[length:])])
        found.append(torch.log_softmax(logits, -1).numpy()[len(before) - 1 : -1])
    return found


def actual(tables: list[np.ndarray]) -> list[np.ndarray]:
    """The log-probs of the responses' tokens."""
    rows = zip(tables, ROWS, LENGTHS, strict=True)
    return [table[np.arange(len(table)), row[length:]] for table, row, length in rows]


@pytest.mark.parametrize("way", ["http", "grpc", "asyncio", "local"])
def test_each_response_token_has_a_row(way: str, server: RunningServer, folder: Path, tables: list[np.ndarray]) -> None:
    samples: dict[str, Any] = {"tokens": ROWS, "prompt_lengths": LENGTHS, "teacher_prompts": PROMPTS}
    if way == "asyncio":

        async def ask() -> Any:
            async with AsyncTeacherClient(server.http_url) as client:
                return await client.top(3, **samples)

        answers = asyncio.run(ask())
    elif way == "local":
        with LocalTeacher(folder / "teacher") as local:
            answers = local.top(3, **samples)
    else:
        with TeacherClient(server.http_url if way == "http" else str(server.grpc_url)) as client:
            answers = client.top(3, **samples)
    assert answers.errors == [None] * len(ROWS)
    for got, ids, top, table, own in zip(
        answers.logprobs, answers.top_ids, answers.top_logprobs, tables, actual(tables), strict=True
    ):
        np.testing.assert_allclose(got, own, **NEAR)
        np.testing.assert_array_equal(ids, np.argsort(-table, 1, kind="stable")[:, :3])
        np.testing.assert_allclose(top, np.take_along_axis(table, ids, 1), **NEAR)


def test_rows_may_be_responses_alone_and_arrays(server: RunningServer, tables: list[np.ndarray]) -> None:
    responses = [np.array(row[length:]) for row, length in zip(ROWS[:4], LENGTHS, strict=False)]
    prompts = [*PROMPTS[:2], torch.tensor(PROMPTS[2]), tuple(CHAT)]
    with TeacherClient(server.http_url) as client:
        answers = client.given([[4, 5]] * 4, tokens=responses, teacher_prompts=prompts)
        empty = client.logprobs(tokens=[[5, 6]], prompt_lengths=[2], teacher_prompts=["a"])
    for got, given, table, own in zip(answers.logprobs, answers.given_logprobs, tables, actual(tables), strict=False):
        np.testing.assert_allclose(got, own, **NEAR)
        np.testing.assert_allclose(given, table[:, [4, 5]], **NEAR)
    assert empty.errors == [None] and empty.logprobs[0].shape == (0,)


GENERATE = {
    "input_ids": [5, 6, 7, 8], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True,
    "teacher_prompts": ["a"], "prompt_lengths": [2],
}  # fmt: skip
INPUTS = [
    {"name": "tokens", "datatype": "INT64", "shape": [1, 4], "data": [5, 6, 7, 8]},
    {"name": "sequence_lengths", "datatype": "INT64", "shape": [1, 1], "data": [4]},
    {"name": "prompt_lengths", "datatype": "INT64", "shape": [1, 1], "data": [2]},
    {"name": "teacher_prompts", "datatype": "BYTES", "shape": [1, 1], "data": ['"a"']},
]


def post(server: RunningServer, path: str, **body: Any) -> Any:
    reply = httpx.post(server.http_url + path, json=body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def test_the_forms_have_the_rows_at_the_responses_tokens(server: RunningServer, tables: list[np.ndarray]) -> None:
    own: dict[str, Any] = {"teacher_prompts": PROMPTS, "prompt_lengths": LENGTHS}
    vllm = post(server, "/v1/completions", prompt=ROWS, max_tokens=0, prompt_logprobs=2, **own)
    trl = post(server, "/get_sequence_logprobs/", sequences=ROWS, top_logprobs=1, response_format="binary", **own)
    asked = {"sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "logprob_start_len": 0}
    positions = [[[token] for token in row] for row in ROWS]
    sglang = post(
        server, "/generate", input_ids=ROWS, **asked, token_ids_logprob_positions=positions, top_logprobs_num=2, **own
    )
    assert trl["completion_lengths"] == [len(row) - length for row, length in zip(ROWS, LENGTHS, strict=True)]
    for i, (row, length, logprobs) in enumerate(zip(ROWS, LENGTHS, actual(tables), strict=True)):
        told = vllm["choices"][i]["prompt_logprobs"]
        first = 1 if PROMPTS[i] is None else length
        assert len(told) == len(row) and told[:first] == [None] * first
        values = [next(iter(one.values()))["logprob"] for one in told[length:]]
        np.testing.assert_allclose(values, logprobs, **NEAR)
        meta = sglang[i]["meta_info"]
        entries = meta["input_token_logprobs"]
        assert entries[0][0] is None and len(entries) == 1 + len(row) - (1 if PROMPTS[i] is None else length)
        # As slime and miles read it.
        last = entries[1:][-len(logprobs) :]
        np.testing.assert_allclose([value for value, _, _ in last], logprobs, **NEAR)
        assert [token for _, token, _ in last] == row[length:]
        given = meta["input_token_ids_logprobs"][1:][-len(logprobs) :]
        assert [one[0][1] for one in given] == row[length:]
        np.testing.assert_allclose([one[0][0] for one in given], logprobs, **NEAR)
        one = post(
            server, "/inference/v1/generate", token_ids=row, sampling_params={"max_tokens": 0, "prompt_logprobs": 0},
            teacher_prompts=PROMPTS[i : i + 1], prompt_lengths=LENGTHS[i : i + 1],
        )  # fmt: skip
        assert one["prompt_logprobs"][0] is None and len(one["prompt_logprobs"]) == len(row)
        values = [next(iter(one.values()))["logprob"] for one in one["prompt_logprobs"][length:]]
        np.testing.assert_allclose(values, logprobs, **NEAR)


def test_one_bad_prompt_harms_no_other(server: RunningServer) -> None:
    rows, fine = [[5, 6, 7]] * 5, [[5, 6, 7]]
    prompts: list[Any] = ["", [zoo.VOCAB_SIZE], [{"role": "user"}], [5] * zoo.MAX_LENGTH, "ok"]
    with TeacherClient(server.http_url) as client:
        answers = client.logprobs(tokens=rows, prompt_lengths=[1] * 5, teacher_prompts=prompts)
        expected = client.logprobs(tokens=fine, prompt_lengths=[1], teacher_prompts=["ok"])
        assert [error is None for error in answers.errors] == [False] * 4 + [True]
        for error, part in zip(
            answers.errors, ("no tokens", "outside the vocabulary", "content", "at most"), strict=False
        ):
            assert part in error
        np.testing.assert_array_equal(answers.logprobs[4], expected.logprobs[0])
        answers = client.logprobs(tokens=fine, prompt_lengths=[4], teacher_prompts=["ok"])
        assert "prompt length 4 lies outside" in answers.errors[0]
    with TeacherClient(server.http_url, "bare") as client:
        assert client.logprobs(tokens=fine, teacher_prompts=[[8]]).errors == [None]
        with pytest.raises(InvalidRequest, match="has no tokenizer"):
            client.logprobs(tokens=fine, teacher_prompts=["text"])


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"tokens": [[5, 6]], "teacher_prompts": ["a", "b"]}, "one entry for each of the 1 samples"),
        ({"tokens": [[5, 6]], "teacher_prompts": "a"}, "must be a list"),
        ({"tokens": [[5, 6]], "teacher_prompts": [{"role": "user"}]}, r"teacher_prompts\[0\] must be a text"),
        ({"tokens": [[5, 6]], "teacher_prompts": [[-1]]}, r"teacher_prompts\[0\] must be a text"),
        ({"tokens": [[5, 6]], "teacher_prompts": [[1.5]]}, r"teacher_prompts\[0\] must be a text"),
        ({"tokens": [[5, 6]], "teacher_prompts": ["\ud800"]}, "UTF-8"),
        ({"texts": ["ab"], "teacher_prompts": ["a"]}, "go with tokens"),
    ],
)
def test_what_cannot_be_a_prompt_is_refused(samples: dict[str, Any], message: str, server: RunningServer) -> None:
    with TeacherClient(server.http_url) as client, pytest.raises(InvalidRequest, match=message):
        client.logprobs(**samples)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/v1/completions", {"prompt": [[5, 6]], "teacher_prompts": ["a", "b"]}, "teacher_prompts has 2 entries for 1"),
        ("/v1/completions", {"prompt": ["ab"], "teacher_prompts": ["a"]}, "go with token ids"),
        ("/v1/completions", {"prompt": [[5, 6]], "teacher_prompts": [[]]}, r"teacher_prompts\[0\] must be"),
        ("/v1/completions", {"prompt": [[5, 6]], "teacher_prompts": ["a"], "echo": True, "logprobs": 1}, "not echoed"),
        ("/v1/completions", {"prompt": [[5]], "teacher_prompts": ["a"], "prompt_lengths": [2]}, "prompt length 2 lies"),
        ("/generate", {**GENERATE, "logprob_start_len": 1}, "logprob_start_len is 1; under teacher_prompts"),
        ("/generate", {**GENERATE, "logprob_start_len": 3}, "logprob_start_len is 3; .*token 2 on: send 0"),
        ("/v2/models/teacher/infer", {"inputs": INPUTS, "parameters": {"start": 3}}, "leave start out"),
        ("/v2/models/teacher/infer", {"inputs": INPUTS, "parameters": {"start": 1}}, "leave start out"),
    ],
)
def test_forms_refuse_what_contradicts_itself(
    path: str, body: dict[str, Any], message: str, server: RunningServer
) -> None:
    defaults = {"max_tokens": 0, "prompt_logprobs": 0} if path.startswith("/v1") else {}
    reply = httpx.post(server.http_url + path, json={**defaults, **body})
    assert reply.status_code == 400 and re.search(message, json.dumps(reply.json())), reply.text
