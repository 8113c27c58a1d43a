"""`/tokenize`, `/detokenize` and `/info` as vLLM and TEI answer; the references are `tokenizers` and transformers."""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

import zoo
from guerdon.settings.config import ModelConfig, ServerConfig, TeacherConfig
from guerdon.wire.forms import tokens
from served import running, sums

TEXTS = ["In 2024, the théâtre — 日本語 😀!", "<extra_0>the other", "", " the"]
ASKED = [{"role": "user", "content": "What is 3+4?"}]
ANSWERED = [*ASKED, {"role": "assistant", "content": "7"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("rm"), num_labels=3))


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    teacher = zoo.tokenizer(zoo.language_model("gpt2", folder / "teacher"))
    models = [ModelConfig(model="served:agreement", name="agreement"), ModelConfig(model=str(folder), name="rm")]
    config = ServerConfig(port=0, grpc_port=None, models=[*models, TeacherConfig(model=str(teacher))])
    with running(config) as server, httpx.Client(base_url=server.http_url) as client:
        yield client


@pytest.fixture(scope="module")
def file(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


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
    options: dict[str, bool], messages: list[dict[str, str]], client: httpx.Client, folder: Path
) -> None:
    continues = options.get("continue_final_message", False)
    want = AutoTokenizer.from_pretrained(folder).apply_chat_template(
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


def test_the_model_is_that_which_is_named_and_has_a_tokenizer(client: httpx.Client, folder: Path) -> None:
    for body, query in (({"model": "teacher"}, ""), ({}, "?model=teacher"), ({"model": str(folder / "teacher")}, "")):
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


def test_info_has_teis_fields(client: httpx.Client, folder: Path) -> None:
    told = client.get("/info?model=rm").json()
    assert told["model_type"]["classifier"]["id2label"] == {str(i): f"LABEL_{i}" for i in range(3)}
    assert told["model_id"] == str(folder) and told["model_dtype"] == "float32"
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
