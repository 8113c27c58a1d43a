"""Probabilities of labels in SGLang's and vLLM's forms, by teachers and judges, against transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import requests
import torch
from transformers import AutoTokenizer

import judged
import zoo
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import JudgeConfig, ModelConfig, TeacherConfig
from served import Serve
from teaching import plain
from tiers import asked, of_each_kind

NAMES = [*zoo.DECODERS, *zoo.LANGUAGE_MODELS]
LABELS = [11, 4, 30]
QUERY = "Is this the answer to what was asked before? "
ITEMS = ["the sky is blue.", "grass", "the sky is green, or so."]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels")


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve, request: pytest.FixtureRequest) -> RunningServer:
    """A reward model, then a teacher of every architecture, one without a tokenizer, and a judge."""
    names = asked(request, NAMES, ["llama", "gpt2"])
    for name in names:
        zoo.tokenizer(zoo.language_model(name, folder / name))
    zoo.language_model("llama", folder / "bare")
    zoo.tokenizer(zoo.checkpoint("llama", folder / "rewards", num_labels=1))
    models: list[Any] = [ModelConfig(model=str(folder / "rewards"), name="rewards")]
    models += [TeacherConfig(model=str(folder / name), name=name) for name in [*names, "bare"]]
    rubric = judged.write(folder)
    models.append(JudgeConfig(model=str(folder / "llama"), name="judge", rubric=rubric))
    return serve(*models, grpc_port=0)


def wanted(folder: Path, rows: list[list[int]], labels: list[int], over_labels: bool) -> np.ndarray:
    """The labels' probabilities behind each row, `[N,L]`, by plain transformers."""
    last = [logits[-1].double() for logits in plain(folder, [np.array(row, np.int64) for row in rows])]
    if over_labels:
        return np.stack([torch.softmax(row[labels], -1).numpy() for row in last])
    return np.stack([torch.softmax(row, -1)[labels].numpy() for row in last])


def sglang_rows(folder: Path, item_first: bool = False) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    return [tokenizer(item + QUERY if item_first else QUERY + item).input_ids for item in ITEMS]


def vllm_rows(folder: Path, item_first: bool = False, special: bool = True) -> list[list[int]]:
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    query = tokenizer.encode(QUERY, add_special_tokens=special)
    items = [tokenizer.encode(item, add_special_tokens=False) for item in ITEMS]
    return [item + query if item_first else query + item for item in items]


def ask(server: RunningServer, path: str, **body: Any) -> dict[str, Any]:
    response = requests.post(f"{server.http_url}{path}", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("name", [*of_each_kind(NAMES), "judge"])
def test_texts_are_joined_as_sglang_joins_them(name: str, server: RunningServer, folder: Path) -> None:
    model = folder / ("llama" if name == "judge" else name)
    rows = sglang_rows(model)
    told = ask(server, "/v1/score", model=name, query=QUERY, items=ITEMS, label_token_ids=LABELS)
    np.testing.assert_allclose(told["scores"], wanted(model, rows, LABELS, over_labels=False), rtol=0, atol=1e-5)
    num_tokens = sum(map(len, rows))
    assert told["usage"]["prompt_tokens"] == told["usage"]["total_tokens"] == num_tokens
    assert told["object"] == "scoring" and told["model"] == name


@pytest.mark.parametrize("name", [*of_each_kind(NAMES), "judge"])
def test_ids_are_concatenated_as_vllm_concatenates_them(name: str, server: RunningServer, folder: Path) -> None:
    model = folder / ("llama" if name == "judge" else name)
    rows = vllm_rows(model)
    told = ask(server, "/generative_scoring", model=name, query=QUERY, items=ITEMS, label_token_ids=LABELS)
    want = wanted(model, rows, LABELS, over_labels=True)[:, 0]
    np.testing.assert_allclose([row["score"] for row in told["data"]], want, rtol=0, atol=1e-5)
    assert [(row["index"], row["object"]) for row in told["data"]] == [(0, "score"), (1, "score"), (2, "score")]
    usage, num_tokens = told["usage"], sum(map(len, rows))
    counts = (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"])
    assert counts == (num_tokens, 3, num_tokens + 3)
    assert told["id"].startswith("generative-scoring-") and told["object"] == "list" and told["model"] == name


@pytest.mark.parametrize("over_labels", [False, True])
@pytest.mark.parametrize("item_first", [False, True])
@pytest.mark.parametrize("name", ["gpt2", "judge"])
def test_orders_and_softmax_of_both_forms(
    name: str, item_first: bool, over_labels: bool, server: RunningServer, folder: Path
) -> None:
    model = folder / ("llama" if name == "judge" else name)
    body: Any = {"model": name, "query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
    body |= {"apply_softmax": over_labels, "item_first": item_first}
    want = wanted(model, sglang_rows(model, item_first), LABELS, over_labels)
    np.testing.assert_allclose(ask(server, "/v1/score", **body)["scores"], want, rtol=0, atol=1e-5)
    for special in (True, False):
        told = ask(server, "/generative_scoring", **body, add_special_tokens=special)["data"]
        want = wanted(model, vllm_rows(model, item_first, special), LABELS, over_labels)[:, 0]
        np.testing.assert_allclose([row["score"] for row in told], want, rtol=0, atol=1e-5)


def test_token_ids_need_no_tokenizer_and_parts_may_differ_in_kind(server: RunningServer, folder: Path) -> None:
    query, items = [5, 6, 7] * 8, [[9], [8, 7, 40], []]
    body: Any = {"query": query, "items": items, "label_token_ids": LABELS}
    for name in ("bare", "judge"):
        model = folder / ("llama" if name == "judge" else name)
        want = wanted(model, [query + item for item in items], LABELS, over_labels=False)
        told = ask(server, "/v1/score", model=name, **body)
        np.testing.assert_allclose(told["scores"], want, rtol=0, atol=1e-5)
        told = ask(server, "/generative_scoring", model=name, apply_softmax=False, **body)
        np.testing.assert_allclose([row["score"] for row in told["data"]], want[:, 0], rtol=0, atol=1e-5)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder / "gpt2")
    rows = [query + tokenizer.encode(item, add_special_tokens=False) for item in ITEMS]
    told = ask(server, "/generative_scoring", model="gpt2", query=query, items=ITEMS, label_token_ids=LABELS)
    want = wanted(folder / "gpt2", rows, LABELS, over_labels=True)[:, 0]
    np.testing.assert_allclose([row["score"] for row in told["data"]], want, rtol=0, atol=1e-5)


def test_a_label_given_twice_counts_as_each_server_counts_it(server: RunningServer, folder: Path) -> None:
    """SGLang's softmax has a place for each, vLLM's for each distinct one."""
    labels, model = [4, 11, 4], folder / "llama"
    body: Any = {"model": "llama", "query": QUERY, "items": ITEMS, "label_token_ids": labels}
    told = ask(server, "/v1/score", apply_softmax=True, **body)["scores"]
    np.testing.assert_allclose(told, wanted(model, sglang_rows(model), labels, over_labels=True), rtol=0, atol=1e-5)
    told = [row["score"] for row in ask(server, "/generative_scoring", **body)["data"]]
    want = wanted(model, vllm_rows(model), labels[:2], over_labels=True)[:, 0]
    np.testing.assert_allclose(told, want, rtol=0, atol=1e-5)


def test_one_text_is_an_item_and_no_items_have_no_scores(server: RunningServer) -> None:
    several = ask(server, "/v1/score", model="llama", query=QUERY, items=ITEMS, label_token_ids=LABELS)
    one = ask(server, "/v1/score", model="llama", query=QUERY, items=ITEMS[0], label_token_ids=LABELS)
    np.testing.assert_allclose(one["scores"], several["scores"][:1], atol=1e-6)
    none = ask(server, "/v1/score", model="llama", query=QUERY, items=[], label_token_ids=LABELS)
    assert none["scores"] == [] and none["usage"]["prompt_tokens"] == 0


@pytest.mark.parametrize("path", ["/v1/score", "/generative_scoring"])
def test_the_first_language_model_answers_if_none_is_named(path: str, server: RunningServer) -> None:
    told = ask(server, path, query=QUERY, items=ITEMS, label_token_ids=LABELS)
    assert told["model"] == NAMES[0]


def test_pairs_in_vllms_form_still_ask_the_reward_model(server: RunningServer) -> None:
    told = ask(server, "/v1/score", text_1=QUERY, text_2=ITEMS)
    assert told["model"] == "rewards" and len(told["data"]) == len(ITEMS)


def test_items_share_the_query_in_one_forest(server: RunningServer) -> None:
    """The query is computed once for all items."""

    def computed() -> float:
        text = requests.get(f"{server.http_url}/metrics", timeout=120).text
        line = next(x for x in text.splitlines() if x.startswith('guerdon_computed_tokens_total{model="bare"}'))
        return float(line.split()[-1])

    query, items = [*range(3, 83)], [[90 + i, 5] for i in range(10)]
    before = computed()
    ask(server, "/v1/score", model="bare", query=query, items=items, label_token_ids=LABELS)
    # The scheduler counts the label's place and the answer as a token each.
    assert computed() - before == len(query) + sum(map(len, items)) + 2 * len(items)


BODY: dict[str, Any] = {"model": "llama", "query": QUERY, "items": ITEMS, "label_token_ids": LABELS}
BOTH = ["/v1/score", "/generative_scoring"]


@pytest.mark.parametrize(
    ("paths", "change", "message"),
    [
        (BOTH, {"model": "rewards"}, "rewards gives rewards and no probabilities of tokens; name a language model"),
        (
            BOTH,
            {"label_token_ids": [4, 10**6]},
            "label_token_ids has 1000000, which is outside the vocabulary of llama",
        ),
        (BOTH, {"label_token_ids": [-1]}, "label_token_ids[0]"),
        (BOTH, {"label_token_ids": []}, "label_token_ids"),
        (BOTH, {"label_token_ids": [*range(129)]}, "label_token_ids has 129 ids; llama answers about at most 128"),
        (BOTH, {"query": None}, "query"),
        (BOTH, {"items": ["a", [3]]}, "items[1] is a list, and"),
        (BOTH, {"query": [], "items": [[]]}, "query and item have no tokens, and nothing predicts a first token"),
        (BOTH, {"query": [10**6], "items": [[3]]}, "token id 1000000 is outside the vocabulary of llama"),
        (BOTH, {"query": "red " * 100}, "llama takes at most 256; shorten it"),
        (BOTH, {"query": "x" * 10**6, "items": ["y"] * 100}, "the query with each of 100 items makes 100,000,100"),
        (BOTH, {"model": "bare"}, "bare"),
        (BOTH[:1], {"text_1": "a"}, "the body has keys of vLLM's form and of SGLang's"),
        (BOTH[:1], {"query": [3, 4]}, "items[0] is a string, and query is a list"),
        (BOTH[:1], {"return_pooled_hidden_states": True}, "return_pooled_hidden_states is not supported"),
        (BOTH[1:], {"items": []}, "items"),
    ],
    ids=lambda value: str([*value]) if isinstance(value, dict) else "",
)
def test_what_cannot_be_answered_is_refused(
    paths: list[str], change: dict[str, Any], message: str, server: RunningServer
) -> None:
    for path in paths:
        response = requests.post(f"{server.http_url}{path}", json=BODY | change, timeout=120)
        assert response.status_code == 400, response.text
        assert message in response.json()["error"]["message"], response.text


def test_switches_of_the_other_form_are_refused_in_the_url(server: RunningServer) -> None:
    response = requests.post(f"{server.http_url}/v1/score?use_activation=true", json=BODY, timeout=120)
    assert response.status_code == 400 and "which SGLang's form does not have" in response.text
