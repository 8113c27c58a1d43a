"""Teachers in the forms of other servers: against transformers, by real clients, and what is refused."""

import base64
import io
import re
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import trl.generation.vllm_client as trl_client
from transformers import AutoTokenizer

import served
import zoo
from detokenizing import BROKEN, by_rule
from guerdon.server.front import http_exchanges
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig, TeacherConfig
from guerdon.wire.forms import logprob_texts
from served import Serve
from teaching import plain

ROWS = [row.tolist() for row in zoo.rows(0, ((40, 3), (20, 2)))]
TEXTS = ["the thing on a", "in the"]
NEAR: Any = {"rtol": 1e-6, "atol": 1e-5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("forms")
    zoo.tokenizer(zoo.language_model("llama", folder / "teacher"))
    zoo.language_model("qwen2", folder / "bare")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    """A reward model before a teacher with a tokenizer, and one without."""
    models: list[Any] = [
        ModelConfig(model=str(served.reward_model(folder / "rm"))),
        TeacherConfig(model=str(folder / "teacher")),
        TeacherConfig(model=str(folder / "bare"), name="bare", max_top_k=5),
    ]
    return serve(*models)


@pytest.fixture(scope="module")
def tables(folder: Path) -> list[np.ndarray]:
    """The plain log-probs `[T,V]` of each row."""
    return [torch.log_softmax(logits, -1).numpy() for logits in plain(folder / "teacher", [np.array(r) for r in ROWS])]


def post(server: RunningServer, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.http_url + path, json=body)


def answer(server: RunningServer, path: str, **body: Any) -> Any:
    reply = post(server, path, body)
    assert reply.status_code == 200, reply.text
    return reply.json()


def check_positions(positions: list[Any], row: list[int], table: np.ndarray, k: int) -> None:
    """Asserts that vLLM's objects have the actual token first, with its rank, and the `k` likeliest ids."""
    assert positions[0] is None and len(positions) == len(row)
    for position, token, logprobs in zip(positions[1:], row[1:], table, strict=False):
        ids = [int(key) for key in position]
        best = np.argsort(-logprobs, kind="stable")[:k]
        assert ids[0] == token and set(ids) == {token, *best.tolist()} and len(ids) == len({*ids})
        np.testing.assert_allclose([one["logprob"] for one in position.values()], logprobs[ids], **NEAR)
        assert [one["rank"] for one in position.values()] == [int((logprobs >= logprobs[i]).sum()) for i in ids]


@pytest.mark.parametrize("k", [0, 1, 20, 128])
def test_vllms_prompt_logprobs_equal_transformers(k: int, server: RunningServer, tables: list[np.ndarray]) -> None:
    reply = answer(server, "/v1/completions", prompt=ROWS, max_tokens=1, temperature=0.3, prompt_logprobs=k)
    assert reply["model"] == "teacher" and reply["object"] == "text_completion"
    num_tokens = sum(map(len, ROWS))
    assert reply["usage"]["prompt_tokens"] == num_tokens and reply["usage"]["total_tokens"] == num_tokens + len(ROWS)
    assert [choice["index"] for choice in reply["choices"]] == [*range(len(ROWS))]
    for choice, row, table in zip(reply["choices"], ROWS, tables, strict=True):
        check_positions(choice["prompt_logprobs"], row, table, k)
        assert choice["finish_reason"] == "length" and choice["logprobs"] is None


def test_texts_are_tokenised_and_every_token_has_its_text(server: RunningServer, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    reply = answer(
        server, "/v1/completions", prompt=TEXTS, max_tokens=0, prompt_logprobs=3, echo=True, return_token_ids=True
    )
    for choice, text in zip(reply["choices"], TEXTS, strict=True):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert choice["text"] == text and choice["prompt_token_ids"] == ids and choice["token_ids"] == []
        (table,) = plain(folder / "teacher", [np.array(ids)])
        check_positions(choice["prompt_logprobs"], ids, torch.log_softmax(table, -1).numpy(), 3)
        for place, position in enumerate(choice["prompt_logprobs"][1:], 1):
            texts = [by_rule(tokenizer, ids[1:place], int(i)) for i in position]
            assert [one["decoded_token"] for one in position.values()] == texts
    one = answer(server, "/v1/completions", prompt=TEXTS[0], max_tokens=0, prompt_logprobs=3)
    assert one["choices"][0]["prompt_logprobs"] == reply["choices"][0]["prompt_logprobs"]
    assert one["choices"][0]["text"] == ""


POSITIONS = [[i % 7] * (i % 3) for i in range(len(ROWS[0]))]
SGLANG = {"return_logprob": True, "logprob_start_len": 0, "sampling_params": {"max_new_tokens": 1}}
LONG: dict[str, tuple[str, dict[str, Any]]] = {
    "vllm": ("/v1/completions", {"prompt": ROWS, "prompt_logprobs": 2, "max_tokens": 1, "echo": True, "logprobs": 3}),
    "sglang": ("/generate", {"input_ids": ROWS, "top_logprobs_num": 2, "token_ids_logprob": [5, 1], **SGLANG}),
    "flat": ("/generate", {"input_ids": ROWS, "top_logprobs_num": 2, "return_flat_raw_top_logprobs": True, **SGLANG}),
    "positions": ("/generate", {"input_ids": ROWS[0], "token_ids_logprob_positions": POSITIONS, **SGLANG}),
    "trl": ("/get_sequence_logprobs/", {"sequences": ROWS, "prompt_lengths": [0] * len(ROWS), "top_logprobs": 2}),
}


@pytest.mark.parametrize("form", LONG)
def test_a_long_answer_is_written_and_sent_in_parts(
    form: str, server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, body = LONG[form]
    body |= {"request_id": "one", "rid": "one"}
    whole = post(server, path, body)
    monkeypatch.setattr(logprob_texts, "_POSITIONS", 7)
    monkeypatch.setattr(http_exchanges, "INLINE_BYTES", 0)
    parts = post(server, path, body)
    of_the_moment = re.compile(r'"(created|e2e_latency)":[^,]*')
    assert whole.status_code == 200 and of_the_moment.sub("", parts.text) == of_the_moment.sub("", whole.text)


def test_one_prompt_of_ids_is_one_choice(server: RunningServer) -> None:
    (choice,) = answer(server, "/v1/completions", prompt=ROWS[0], max_tokens=0, prompt_logprobs=0)["choices"]
    assert len(choice["prompt_logprobs"]) == len(ROWS[0])
    (choice,) = answer(server, "/v1/completions", prompt=[7], max_tokens=0, prompt_logprobs=2)["choices"]
    assert choice["prompt_logprobs"] == [None]


def test_the_prompts_own_temperature_has_another_name(server: RunningServer, folder: Path) -> None:
    reply = answer(server, "/v1/completions", prompt=ROWS[0], max_tokens=0, prompt_logprobs=4, logprobs_temperature=0.5)
    (logits,) = plain(folder / "teacher", [np.array(ROWS[0])])
    check_positions(reply["choices"][0]["prompt_logprobs"], ROWS[0], torch.log_softmax(logits / 0.5, -1).numpy(), 4)


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_echoed_logprobs_equal_transformers(
    max_tokens: int, server: RunningServer, folder: Path, tables: list[np.ndarray]
) -> None:
    """As OpenAI's completions have them; AReaL reads the first entry of each object."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    for row, table in zip(ROWS, tables, strict=True):
        body = {"prompt": row, "echo": True, "logprobs": 2, "max_tokens": max_tokens}
        (choice,) = answer(server, "/v1/completions", **body)["choices"]
        logprobs, whole = choice["logprobs"], [*row, *([int(table[-1].argmax())] if max_tokens else [])]
        texts = [tokenizer.decode(row[:1]), *(by_rule(tokenizer, row[1:i], row[i]) for i in range(1, len(row)))]
        texts += [by_rule(tokenizer, [], i) for i in whole[len(row) :]]
        assert logprobs["tokens"] == texts and choice["prompt_logprobs"] is None
        assert choice["text"].rstrip(BROKEN) == tokenizer.decode(whole).rstrip(BROKEN)
        assert logprobs["text_offset"] == np.cumsum([0, *map(len, logprobs["tokens"])])[:-1].tolist()
        assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
        actual = table[np.arange(len(whole) - 1), whole[1:]]
        np.testing.assert_allclose(logprobs["token_logprobs"][1:], actual, **NEAR)
        firsts = [next(iter(top.values())) for top in logprobs["top_logprobs"][1:]]
        np.testing.assert_allclose(firsts, actual, **NEAR)
        named = answer(server, "/v1/completions", **body, return_tokens_as_token_ids=True)["choices"][0]["logprobs"]
        assert named["tokens"] == [f"token_id:{i}" for i in whole]
        for top, token, values in zip(named["top_logprobs"][1:], whole[1:], table, strict=False):
            ids = [int(name.removeprefix("token_id:")) for name in top]
            assert ids[0] == token and {*ids} == {token, *np.argsort(-values)[:2].tolist()}
            np.testing.assert_allclose([*top.values()], values[ids], **NEAR)


def test_the_next_token_is_the_likeliest(server: RunningServer, folder: Path, tables: list[np.ndarray]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    reply = answer(server, "/v1/completions", prompt=ROWS, max_tokens=1, logprobs=3, return_token_ids=True)
    for choice, table in zip(reply["choices"], tables, strict=True):
        best = int(table[-1].argmax())
        assert choice["token_ids"] == [best] and choice["logprobs"]["tokens"] == [by_rule(tokenizer, [], best)]
        np.testing.assert_allclose(choice["logprobs"]["token_logprobs"], [table[-1][best]], **NEAR)
    plain_one = answer(server, "/v1/completions", prompt=ROWS[0], max_tokens=1)["choices"][0]
    assert plain_one["text"] == tokenizer.decode([int(tables[0][-1].argmax())]).removesuffix(BROKEN)


def test_a_character_of_several_tokens_is_told_with_its_last_one(server: RunningServer) -> None:
    """As vLLM tells it; the offsets count what is told."""
    body = {"prompt": "a 😀 日", "echo": True, "logprobs": 0, "max_tokens": 0, "prompt_logprobs": 0}
    (choice,) = answer(server, "/v1/completions", **body)["choices"]
    texts = ["a", " ", "", "", "", "😀", " ", "", "", "日"]
    assert choice["logprobs"]["tokens"] == texts and choice["text"] == body["prompt"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 2, 2, 2, 3, 4, 4, 4]
    told = [one["decoded_token"] for position in choice["prompt_logprobs"][1:] for one in position.values()]
    assert told == texts[1:]


def test_a_teacher_without_a_tokenizer_gives_ids(server: RunningServer, folder: Path) -> None:
    (logits,) = plain(folder / "bare", [np.array(ROWS[0])])
    body = {"model": "bare", "prompt": ROWS[0], "max_tokens": 1, "echo": True, "logprobs": 1, "prompt_logprobs": 5}
    (choice,) = answer(server, "/v1/completions", **body)["choices"]
    check_positions(choice["prompt_logprobs"], ROWS[0], torch.log_softmax(logits, -1).numpy(), 5)
    assert choice["text"] == "" and {
        one["decoded_token"] for position in choice["prompt_logprobs"][1:] for one in position.values()
    } == {None}
    assert choice["logprobs"]["tokens"][:-1] == [f"token_id:{i}" for i in ROWS[0]]


def test_vllms_ids_in_and_ids_out_equal_transformers(server: RunningServer, tables: list[np.ndarray]) -> None:
    """As prime-rl asks."""
    params = {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0, "prompt_logprobs": 1, "logprobs": 2}
    for row, table in zip(ROWS, tables, strict=True):
        reply = answer(server, "/inference/v1/generate", model="teacher", token_ids=row, sampling_params=params)
        check_positions(reply["prompt_logprobs"], row, table, 1)
        assert reply["output_mode"] == "tokens" and reply["prompt_token_id_logprobs"] is None
        (choice,) = reply["choices"]
        best = np.argsort(-table[-1])[:2].tolist()
        assert choice["token_ids"] == best[:1]
        (new,) = choice["logprobs"]["content"]
        assert new["token_id"] == best[0] and [top["token_id"] for top in new["top_logprobs"]] == best


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
def test_vllms_given_ids_equal_transformers(
    prompt_logprobs: int | None, server: RunningServer, tables: list[np.ndarray]
) -> None:
    row, table, start = ROWS[0], tables[0], 30
    given = np.random.default_rng(0).integers(-1, zoo.VOCAB_SIZE, (len(row) - 1 - start, 3))
    params = {"max_tokens": 0, "prompt_logprob_token_ids": given.tolist(), "prompt_logprob_start": start}
    if prompt_logprobs is not None:
        params["prompt_logprobs"] = prompt_logprobs
    reply = answer(server, "/inference/v1/generate", token_ids=row, sampling_params=params)
    got = np.load(io.BytesIO(base64.b64decode(reply["prompt_token_id_logprobs"])))
    want = np.where(given < 0, -np.inf, np.take_along_axis(table[start:-1], np.maximum(given, 0), 1))
    np.testing.assert_allclose(got, want, **NEAR)
    assert got.dtype == np.float32
    if prompt_logprobs is not None:
        check_positions(reply["prompt_logprobs"], row, table, prompt_logprobs)


def test_trls_own_client_reads_it(
    server: RunningServer, tables: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl_client, "is_vllm_available", lambda: True)  # it is only asked for, and not used
    client = trl_client.VLLMClient(base_url=server.http_url)
    assert client.model == "teacher", "the first of `/v1/models`, though a reward model is the first in the file"
    lengths = [len(row) // 2 for row in ROWS]
    got = client.get_sequence_logprobs(ROWS, lengths, chunk_size=2)
    for i, (row, table, length) in enumerate(zip(ROWS, tables, lengths, strict=True)):
        asked, targets = table[length - 1 : -1], np.array(row[length:])
        np.testing.assert_allclose(got["logprobs"][i], -np.sort(-asked, 1)[:, :100], **NEAR)
        ids = np.array(got["logprob_token_ids"][i])
        np.testing.assert_allclose(np.take_along_axis(asked, ids, 1), got["logprobs"][i], **NEAR)
        actual = np.array(got["actual_logprobs"][i])[:, 0]
        np.testing.assert_allclose(actual, asked[np.arange(len(targets)), targets], **NEAR)


COMPLETION_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "generation": ({"max_tokens": 2}, "max_tokens is 2; a teacher does not generate: send max_tokens 0, or 1"),
    "no max_tokens": ({"max_tokens": None}, "the body has no max_tokens, which means 16 to vLLM"),
    "too many ids": ({"prompt_logprobs": 129}, "prompt_logprobs is 129; teacher gives at most 128 ids"),
    "all ids": ({"prompt_logprobs": -1}, "prompt_logprobs is -1; send a whole number from 0 up"),
    "too many echoed": ({"logprobs": 6, "model": "bare"}, "logprobs is 6; bare gives at most 5 ids"),
    "several completions": ({"n": 2}, "n is 2; send 1: a teacher gives only the likeliest next token"),
    "a stream": ({"stream": True}, "stream is not supported"),
    "an id beyond the vocabulary": ({"prompt": [[5], [5, 300]]}, "row 1: token id 300 is outside the vocabulary"),
    "nothing": ({"prompt": []}, "prompt is an empty list"),
    "a temperature of 0": ({"logprobs_temperature": 0}, "logprobs_temperature is 0; send a number above 0"),
    "given ids": ({"prompt_logprob_token_ids": [[1]]}, "send it to /inference/v1/generate"),
    "a reward model": ({"model": "reward_model"}, "reward_model gives rewards and no log-probs; name a teacher"),
    "text for ids": ({"model": "bare", "prompt": "a"}, "bare"),
}


GIVEN_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few rows": ({"prompt_logprob_token_ids": [[1]]}, "has 1 rows from row 0 on, and the prompt of 3 tokens has 2"),
    "a start behind the end": (
        {"prompt_logprob_token_ids": [[1]], "prompt_logprob_start": 9}, "has 1 rows from row 9 on",
    ),
    "a start alone": ({"prompt_logprob_start": 1}, "prompt_logprob_start goes with prompt_logprob_token_ids"),
    "an id beyond the vocabulary": ({"prompt_logprob_token_ids": [[1], [300]]}, "the given id 300 is outside"),
    "too many ids": ({"prompt_logprob_token_ids": [[1] * 129, []]}, "prompt_logprob_token_ids is 129; teacher gives"),
    "generation": ({"max_tokens": 9}, "max_tokens is 9; a teacher does not generate"),
}  # fmt: skip


def test_an_answer_too_large_as_json_is_refused_before_it_is_computed(server: RunningServer) -> None:
    body = {"prompt": [[5] * 200] * 600, "max_tokens": 0, "prompt_logprobs": 128}
    reply = post(server, "/v1/completions", body)
    assert reply.status_code == 400 and "may have at most 1,024 MiB" in reply.text, reply.text


def check_triples(entries: list[Any], ids: list[int], values: np.ndarray) -> None:
    """Asserts that SGLang's `[log-prob, id, text]` are those of the ids."""
    assert [entry[1] for entry in entries] == ids
    np.testing.assert_allclose([entry[0] for entry in entries], values[ids], **NEAR)


@pytest.mark.parametrize(("start", "max_new_tokens"), [(0, 0), (1, 0), (12, 1)])
def test_sglangs_logprobs_equal_transformers(
    start: int, max_new_tokens: int, server: RunningServer, tables: list[np.ndarray]
) -> None:
    """slime and miles read the last entries, AReaL calls `float` on all from a start above 0."""
    reply = answer(
        server, "/generate", input_ids=ROWS, return_logprob=True, logprob_start_len=start, top_logprobs_num=3,
        token_ids_logprob=[7, 3], sampling_params={"temperature": 0, "max_new_tokens": max_new_tokens},
    )  # fmt: skip
    for one, row, table in zip(reply, ROWS, tables, strict=True):
        meta, best = one["meta_info"], np.argsort(-table, 1, kind="stable")[:, :3]
        assert meta["prompt_tokens"] == len(row) and meta["completion_tokens"] == max_new_tokens
        told = meta["input_token_logprobs"]
        assert [entry[1] for entry in told] == row[start:] and {entry[2] for entry in told} == {None}
        lists = [meta["input_top_logprobs"], meta["input_token_ids_logprobs"]]
        assert all(len(entries) == len(told) for entries in lists)
        if start == 0:
            assert told[0] == [None, row[0], None] and [entries[0] for entries in lists] == [None, None]
        first = max(1, start)
        tops, given = (entries[first - start :] for entries in lists)
        asked, targets = table[first - 1 : -1], row[first:]
        actual = asked[np.arange(len(targets)), targets]
        np.testing.assert_allclose([entry[0] for entry in told[first - start :]], actual, **NEAR)
        for i, (top, some) in enumerate(zip(tops, given, strict=True)):
            check_triples(top, best[first - 1 + i].tolist(), asked[i])
            check_triples(some, [7, 3], asked[i])
        new = best[-1, :1].tolist() if max_new_tokens else []
        assert one["output_ids"] == new and [entry[1] for entry in meta["output_token_logprobs"]] == new
        if new:
            check_triples(meta["output_top_logprobs"][0], best[-1].tolist(), table[-1])


@pytest.mark.parametrize("start", [0, 5])
def test_sglangs_flat_arrays_equal_its_lists(start: int, server: RunningServer) -> None:
    body = {
        "input_ids": ROWS[0], "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 4,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    lists = answer(server, "/generate", **body)["meta_info"]["input_top_logprobs"]
    told = [[entry[:2] for entry in position] for position in lists if position is not None]
    values, ids = np.array(told)[..., 0].astype(np.float32), np.array(told)[..., 1].astype(np.int32)
    flat = answer(server, "/generate", **body, return_flat_raw_top_logprobs=True)["meta_info"]
    assert flat["input_top_logprobs_shape"] == [*values.shape] and "input_top_logprobs" not in flat
    assert flat["input_top_logprobs_null_prefix"] == len(lists) - len(told) == (start == 0)
    np.testing.assert_array_equal(np.array(flat["input_top_logprobs_val_flat"], np.float32), values.ravel())
    assert flat["input_top_logprobs_idx_flat"] == ids.ravel().tolist()
    both = {"return_flat_raw_top_logprobs": True, "return_flat_raw_top_logprobs_b64": True}
    binary = answer(server, "/generate", **body, **both)["meta_info"]
    for name, table in (("val", values), ("idx", ids)):
        key = f"input_top_logprobs_{name}_flat_b64"
        got = np.frombuffer(base64.b64decode(binary[key]), np.dtype(binary[f"{key}_dtype"]))
        np.testing.assert_array_equal(got.reshape(binary["input_top_logprobs_shape"]), table)


def test_sglangs_ids_may_differ_by_position(server: RunningServer, tables: list[np.ndarray]) -> None:
    positions: list[list[int]] = [[] for _ in ROWS[0]]
    positions[9], positions[12] = [5, 7], [11]
    body = {
        "input_ids": ROWS[0], "return_logprob": True, "logprob_start_len": 8, "token_ids_logprob_positions": positions,
        "sampling_params": {"max_new_tokens": 0},
    }  # fmt: skip
    rows = answer(server, "/generate", **body)["meta_info"]["input_token_ids_logprobs"]
    assert [len(row) for row in rows] == [len(ids) for ids in positions[8:]]
    check_triples(rows[1], [5, 7], tables[0][8])
    check_triples(rows[4], [11], tables[0][11])


def test_sglangs_text_and_what_it_leaves_out(server: RunningServer, folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder / "teacher")
    ids = tokenizer.encode(TEXTS[0], add_special_tokens=False)
    body = {"text": TEXTS[0], "sampling_params": {"max_new_tokens": 0}, "return_logprob": True, "model": "default"}
    told = answer(server, "/generate", **body, logprob_start_len=0, return_text_in_logprobs=True)["meta_info"]
    assert [entry[2] for entry in told["input_token_logprobs"]] == [tokenizer.decode([i]) for i in ids]
    none = answer(server, "/generate", **body, top_logprobs_num=2)["meta_info"]
    assert none["input_token_logprobs"] == [] and none["prompt_tokens"] == len(ids)
    (one,) = answer(server, "/generate", **body | {"text": [TEXTS[0]], "return_logprob": False})
    assert "input_token_logprobs" not in one["meta_info"] and one["text"] == ""


SGLANG_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "generation": ({"sampling_params": {"max_new_tokens": 2}}, "max_new_tokens is 2; a teacher does not generate"),
    "no number of tokens": ({"sampling_params": {}}, "sampling_params has no max_new_tokens, which means 128"),
    "neither": ({"input_ids": None}, "the body has neither text nor input_ids"),
    "too many ids": ({"top_logprobs_num": 129}, "top_logprobs_num is 129; teacher gives at most 128 ids"),
    "a start behind the end": ({"logprob_start_len": 4}, "start is 4, after the end of the sample's 3 tokens"),
    "an id beyond the vocabulary": ({"token_ids_logprob": [300]}, "the given id 300 is outside the vocabulary"),
    "no id": ({"token_ids_logprob": [5, -1]}, "token_ids_logprob[1] is -1"),
    "no id of a sample's": ({"token_ids_logprob": [[5, -1]]}, "token_ids_logprob[0][1] is -1"),
    "ids and lists": ({"token_ids_logprob": [1, [2]]}, "token_ids_logprob holds ids and lists"),
    "too few positions": ({"token_ids_logprob_positions": [[1]]}, "has 1 entries for sample 0 of 3 tokens"),
    "wrong positions": ({"token_ids_logprob_positions": [1, 2, 3]}, "token_ids_logprob_positions is wrong"),
    "base64 alone": ({"return_flat_raw_top_logprobs_b64": True}, "goes with return_flat_raw_top_logprobs"),
    "two starts for one": ({"logprob_start_len": [0, 1]}, "logprob_start_len is a list of 2; send one value"),
    "a stream": ({"stream": True}, "stream is not supported"),
}


LENGTHS = [0, *(len(row) // 2 for row in ROWS[1:-1]), len(ROWS[-1])]


def test_trls_older_lists_equal_transformers(server: RunningServer, tables: list[np.ndarray]) -> None:
    reply = answer(server, "/get_sequence_logprobs/", sequences=ROWS, prompt_lengths=LENGTHS, top_logprobs=4)
    rows = zip(reply["logprobs"], reply["logprob_token_ids"], ROWS, tables, LENGTHS, strict=True)
    for values, ids, row, table, length in rows:
        assert len(values) == len(ids) == len(row) - length
        if length == 0:
            assert values.pop(0) == ids.pop(0) == []
        targets, asked = row[max(1, length) :], table[max(1, length) - 1 : -1]
        for some, names, target, logprobs in zip(values, ids, targets, asked, strict=True):
            best = np.argsort(-logprobs, kind="stable")[:4].tolist()
            assert names == (best if target in best else [*best, target])
            np.testing.assert_allclose(some, logprobs[names], **NEAR)


@pytest.mark.parametrize("k", [1, 5])
def test_trls_older_arrays_equal_transformers(k: int, server: RunningServer, tables: list[np.ndarray]) -> None:
    body = {"sequences": ROWS, "prompt_lengths": LENGTHS, "top_logprobs": k, "response_format": "binary"}
    reply = answer(server, "/get_sequence_logprobs/", **body)
    sizes = [len(row) - length for row, length in zip(ROWS, LENGTHS, strict=True)]
    assert reply["completion_lengths"] == sizes and reply["shape"] == [len(ROWS), max(sizes), k]
    arrays = {}
    for key, dtype, width in (("logprobs", "f4", k), ("token_ids", "i4", k)):
        for name, last in ((key, width), (f"actual_{key}", 1)):
            arrays[name] = np.frombuffer(base64.b64decode(reply[f"{name}_b64"]), dtype).reshape(
                *reply["shape"][:2], last
            )
    for i, (row, table, length) in enumerate(zip(ROWS, tables, LENGTHS, strict=True)):
        first = max(1, length)
        part, asked = slice(first - length, sizes[i]), table[first - 1 : -1]
        np.testing.assert_array_equal(arrays["token_ids"][i, part], np.argsort(-asked, 1, kind="stable")[:, :k])
        np.testing.assert_allclose(arrays["logprobs"][i, part], -np.sort(-asked, 1)[:, :k], **NEAR)
        assert arrays["actual_token_ids"][i, part, 0].tolist() == row[first:]
        actual = asked[np.arange(len(asked)), row[first:]]
        np.testing.assert_allclose(arrays["actual_logprobs"][i, part, 0], actual, **NEAR)
        for name in ("logprobs", "actual_logprobs"):
            assert np.isneginf(arrays[name][i, sizes[i] :]).all() and np.isneginf(arrays[name][i, : part.start]).all()


TRL_WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "a length too few": ({"prompt_lengths": []}, "prompt_lengths has 0 entries, sequences 1"),
    "a prompt too long": ({"prompt_lengths": [4]}, "prompt length 4 lies outside the sample's 3 tokens"),
    "no ids": ({"top_logprobs": 0}, "top_logprobs is 0; send a whole number from 1 up"),
    "too many ids": ({"top_logprobs": 129}, "top_logprobs is 129; teacher gives at most 128"),
    "another form": ({"response_format": "npz"}, "response_format is 'npz'; send binary or json"),
}


OF_THREE: dict[str, tuple[dict[str, Any], dict[str, tuple[dict[str, Any], str]]]] = {
    "/v1/completions": ({"prompt": [[5, 6, 7]], "max_tokens": 1, "prompt_logprobs": 1}, COMPLETION_WRONG),
    "/inference/v1/generate": ({"token_ids": [5, 6, 7], "sampling_params": {"max_tokens": 0}}, GIVEN_WRONG),
    "/generate": ({"input_ids": [5, 6, 7], **SGLANG, "sampling_params": {"max_new_tokens": 0}}, SGLANG_WRONG),
    "/get_sequence_logprobs/": ({"sequences": [[5, 6, 7]], "prompt_lengths": [1]}, TRL_WRONG),
}
"""By path, a right request about a row of three tokens, and the changes that make it wrong."""


@pytest.mark.parametrize(("path", "wrong"), [(path, wrong) for path, (_, table) in OF_THREE.items() for wrong in table])
def test_a_wrong_request_is_one_clear_error(path: str, wrong: str, server: RunningServer) -> None:
    usual, table = OF_THREE[path]
    changes, message = table[wrong]
    if path == "/inference/v1/generate":
        changes = {"sampling_params": usual["sampling_params"] | changes}
    reply = post(server, path, usual | changes)
    said = reply.json()
    assert reply.status_code == 400 and message in (said.get("detail") or said["error"]["message"]), said
