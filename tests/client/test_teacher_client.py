"""The clients of a teacher against real servers, over HTTP and gRPC; their answers are those of transformers."""

import asyncio
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

import served
import zoo
from guerdon import AsyncTeacherClient, Head, TeacherAnswers, TeacherClient
from guerdon.core import Sequence
from guerdon.errors import GuerdonError, InvalidRequest, SampleFailed, ServerFault, Unsupported
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from guerdon.teacher_core import LogprobQuery, TokenLogprobs
from ports import free_port
from served import Serve
from teaching import check, plain

ROWS = zoo.rows(0, ((40, 3), (20, 2)))
PROMPTS = [40, 40, 40, 20, 20, 4, 40]
GIVEN = [[3, 7, -1], [8, 9]] + [[4]] * (len(ROWS) - 2)
HEADS = ("llama", "gemma2", "cohere", "granite", "phi")
"""Plain, with a cap, with scales, with a bias."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("teachers")


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    models: list[Any] = [
        TeacherConfig(model=str(zoo.language_model(name, folder / name)), name=name, max_top_k=7) for name in HEADS
    ]
    models.append(TeacherConfig(model=str(folder / "llama"), name="half", dtype="bfloat16"))
    models.append(TeacherConfig(model=str(zoo.tokenizer(zoo.language_model("llama", folder / "text"))), name="text"))
    models.append(ModelConfig(model=str(served.reward_model(folder / "rm"))))
    return serve(*models, grpc_port=0)


@pytest.fixture(params=["http", "grpc", "asyncio"])
def ask(request: pytest.FixtureRequest, server: RunningServer) -> Iterator[Any]:
    """A function that calls a method of a client of that kind."""
    assert server.grpc_url is not None

    def call(model: str, method: str, *args: Any, **samples: Any) -> Any:
        if request.param == "asyncio":

            async def run() -> Any:
                async with AsyncTeacherClient(server.http_url, model) as client:
                    return await getattr(client, method)(*args, **samples)

            return asyncio.run(run())
        with TeacherClient(server.http_url if request.param == "http" else str(server.grpc_url), model) as client:
            return getattr(client, method)(*args, **samples)

    return call


def each(answers: TeacherAnswers) -> list[TokenLogprobs]:
    """The answers by sample; all rows are writable."""
    fields = ("logprobs", "entropy", "top_ids", "top_logprobs", "given_logprobs", "hidden")
    tables = {name: rows for name in fields if (rows := getattr(answers, name)) is not None}
    assert all(row.flags.writeable for rows in tables.values() for row in rows)
    return [TokenLogprobs(**{name: rows[i] for name, rows in tables.items()}) for i in range(len(answers))]


def test_answers_equal_transformers(ask: Any, folder: Path) -> None:
    logits = plain(folder / "llama", ROWS)
    about = {"tokens": ROWS, "prompt_lengths": PROMPTS, "temperature": 0.7, "entropy": True}
    ids = [np.array(row) for row in GIVEN]
    common = {"temperature": 0.7, "with_entropy": True}
    asked: list[tuple[TeacherAnswers, list[LogprobQuery]]] = [
        (ask("llama", "logprobs", **about), [LogprobQuery(**common)] * len(ROWS)),
        (ask("llama", "top", 5, **about), [LogprobQuery(top_k=5, **common)] * len(ROWS)),
        (ask("llama", "given", ids, **about), [LogprobQuery(given=row, **common) for row in ids]),
    ]
    for answers, queries in asked:
        assert answers.errors == [None] * len(ROWS) and answers.raise_for_failed().weights_version
        for answer, table, row, prompt, query in zip(each(answers), logits, ROWS, PROMPTS, queries, strict=True):
            assert answer.logprobs is not None and answer.logprobs.shape == (len(row) - prompt,)
            check(answer, table, Sequence(row, prompt_length=prompt, ask=query))


def test_given_ids_may_differ_by_token(server: RunningServer, folder: Path) -> None:
    random = np.random.default_rng(0)
    ids = [random.integers(0, zoo.VOCAB_SIZE, (len(row) - n, 2 + n % 3)) for row, n in zip(ROWS, PROMPTS, strict=True)]
    with TeacherClient(server.http_url, "llama") as client:
        answers = client.given(ids, tokens=ROWS, prompt_lengths=PROMPTS)
    for answer, logits, row, prompt, given in zip(
        each(answers), plain(folder / "llama", ROWS), ROWS, PROMPTS, ids, strict=True
    ):
        check(answer, logits, Sequence(row, prompt_length=prompt, ask=LogprobQuery(given=given)))


@pytest.mark.parametrize("name", HEADS)
def test_a_head_makes_dense_logits_of_hidden_states(name: str, server: RunningServer, folder: Path) -> None:
    with TeacherClient(server.http_url, name) as client:
        head, answers = client.head(), client.hidden(tokens=ROWS)
        rounded = client.hidden(tokens=ROWS, dtype="bfloat16")
        assert client.head(head) is head
    assert answers.hidden is not None and rounded.hidden is not None and answers.logprobs is None
    for hidden, half, logits in zip(answers.hidden, rounded.hidden, plain(folder / name, ROWS), strict=True):
        dense = head.logits(hidden)
        assert dense.dtype == torch.float32
        torch.testing.assert_close(dense, logits[:-1], rtol=1e-6, atol=1e-5)
        np.testing.assert_array_equal(torch.from_numpy(hidden).bfloat16().float().numpy(), half)


def test_a_head_in_bfloat16_gives_the_served_logprobs(server: RunningServer) -> None:
    with TeacherClient(server.http_url, "half") as client:
        head = client.head()
        hidden, logprobs = client.hidden(tokens=ROWS).hidden, client.logprobs(tokens=ROWS).logprobs
        with TeacherClient(server.http_url, "llama") as other:
            assert other.head(head).digest != head.digest  # another model's: it is fetched
    assert head.weight.dtype == np.uint16 and hidden is not None and logprobs is not None
    for row, states, served_now in zip(ROWS, hidden, logprobs, strict=True):
        dense = head.logits(torch.from_numpy(states))
        assert dense.dtype == torch.bfloat16
        own = torch.log_softmax(dense.float(), -1)[torch.arange(len(row) - 1), torch.from_numpy(row[1:])]
        np.testing.assert_allclose(served_now, own, atol=0.05)


def test_logits_without_torch_say_what_to_install(server: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with TeacherClient(server.http_url, "llama") as client:
        head = client.head()
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(GuerdonError, match=r"logits need torch, which is not installed: pip install .*server"):
        head.logits(np.zeros((1, zoo.HIDDEN), np.float32))


def test_a_file_that_is_no_head_is_the_servers_fault() -> None:
    for file in (b"", b"<html>not a head</html>", b"\x02\0\0\0\0\0\0\0{}"):
        with pytest.raises(ServerFault, match="a head that cannot be read"):
            Head.from_file(file)


def test_grpc_has_no_heads(server: RunningServer) -> None:
    assert server.grpc_url is not None
    with TeacherClient(server.grpc_url, "llama") as client, pytest.raises(Unsupported, match="over HTTP only"):
        client.head()


def test_text_comes_whole_or_as_prompt_and_response(server: RunningServer, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "text")
    prompts, responses = ["in the", "on a thing "], [" thing", "on the"]
    chat = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "in the"}]
    rows = [tokenizer.encode(p + r, add_special_tokens=False) for p, r in zip(prompts, responses, strict=True)]
    lengths = [len(tokenizer.encode(p, add_special_tokens=False)) for p in prompts]
    with TeacherClient(server.http_url, "text") as client:
        apart = client.logprobs(responses=responses, prompts=prompts).logprobs
        whole = client.logprobs(
            texts=[p + r for p, r in zip(prompts, responses, strict=True)], prompts=prompts
        ).logprobs
        together = client.logprobs(tokens=rows, prompt_lengths=lengths).logprobs
        assert client.logprobs(messages=[chat]).logprobs[0].size > 3  # type: ignore[index]
        answered = client.logprobs(messages=[chat[:1]], responses=["in the"]).logprobs
    assert apart is not None and whole is not None and together is not None and answered is not None
    assert len(answered[0]) == len(tokenizer.encode("in the", add_special_tokens=False))
    for one, same, other in zip(apart, whole, together, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)
        np.testing.assert_array_equal(one, same)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ({"texts": [" thing"], "prompts": ["in the"]}, "' thing', does not begin with its prompt, 'in the'.*responses"),
        ({"texts": ["a"], "messages": [[{"role": "user", "content": "a"}]]}, "texts are whole: give the responses to"),
        ({"responses": ["a"]}, "responses go with prompts or with messages"),
        ({"responses": ["a"], "prompts": ["b"], "texts": ["ba"]}, "responses go with prompts or with messages"),
        ({"responses": ["a"], "prompts": ["b"], "tokens": [[5]]}, "responses go with prompts or with messages"),
        ({"responses": ["a"], "prompts": ["b", "c"]}, "prompts has 2 entries for 1 responses"),
        ({"responses": "a", "prompts": ["b"]}, "responses must be a list of at least one sample, not a string"),
        ({"responses": ["a"], "prompts": [7]}, r"prompts\[0\] is an int; each sample must be a string"),
    ],
)
def test_texts_and_responses_cannot_be_mixed_up(samples: Any, message: str, server: RunningServer) -> None:
    with TeacherClient(server.http_url, "text") as client, pytest.raises((InvalidRequest, SampleFailed), match=message):
        client.logprobs(**samples).raise_for_failed()


def test_a_failed_sample_is_told_apart(ask: Any) -> None:
    answers = ask("llama", "top", 2, tokens=[[5, 6, 7], [5, zoo.VOCAB_SIZE]])
    assert answers.errors[0] is None and "token id 300 is outside the vocabulary" in answers.errors[1]
    assert [len(row) for row in answers.logprobs] == [2, 0] and answers.top_ids[1].shape == (0, 2)
    with pytest.raises(SampleFailed, match="1 of 2 samples failed; row 1"):
        answers.raise_for_failed()


WRONG: dict[str, tuple[str, str, tuple[Any, ...], dict[str, Any], str]] = {
    "no teacher": ("reward_model", "logprobs", (), {}, "'reward_model' is no teacher: it gives rewards.*serve-teacher"),
    "no head of a reward model": ("reward_model", "head", (), None, "reward_model is no teacher"),  # type: ignore[dict-item]
    "too many ids": ("llama", "top", (8,), {}, "top_k is 8; it must be from 0 to 7"),
    "no temperature": ("llama", "logprobs", (), {"temperature": 0.0}, "temperature is 0; it must be finite and above"),
    "ids for other samples": ("llama", "given", ([[1], [2]],), {}, "ids has 2 entries for 1 samples"),
    "ids of two forms": ("llama", "given", ([[1], [[2]]],), {"tokens": [[5, 6]] * 2}, "choose one form"),
    "ids that are no integers": ("llama", "given", ([[0.5]],), {}, r"ids\[0\] must be a list of ids"),
    "ragged ids": ("llama", "given", ([[[1], [2, 3]]],), {}, r"ids\[0\] cannot be read as integers"),
    "an unknown id": ("llama", "given", ([[300]],), {}, "the given id 300 is outside the vocabulary"),
    "prompts without a tokenizer": (
        "llama", "logprobs", (), {"tokens": None, "texts": ["ba"], "prompts": ["b"]}, "takes no prompts.*send tokens",
    ),
}  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_question_is_one_clear_error(wrong: str, server: RunningServer) -> None:
    model, method, args, more, message = WRONG[wrong]
    samples = {} if more is None else {"tokens": [[5, 6, 7]], **more}
    refusals = (InvalidRequest, Unsupported, SampleFailed)
    with TeacherClient(server.http_url, model) as client, pytest.raises(refusals, match=message):
        getattr(client, method)(*args, **samples).raise_for_failed()


def test_a_client_is_one_of_the_others(server: RunningServer) -> None:
    """It waits, describes its model, shares work among servers without a lost one, and may be pickled."""
    dead = f"http://127.0.0.1:{free_port()}"
    with TeacherClient([dead, server.http_url], "text") as client:
        client.wait_ready(120)
        assert "logprobs" in client.info().outputs and client.config()["parameters"]["tokenizer"]
        for future in [client.submit(tokens=[[5, 6]]) for _ in range(3)]:
            assert future.result(120).errors == [None]
        assert client.head().weight.shape == (zoo.VOCAB_SIZE, zoo.HIDDEN)
        with pickle.loads(pickle.dumps(client)) as copy:  # noqa: S301 - our own
            assert repr(copy) == repr(client)
            assert copy.logprobs(tokens=[[5, 6]]).weights_version == client.head().weights_version
