"""Pairs of texts in every form that has them: the ids and token types are those of transformers' `tokenizer(a, b)`."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import httpx
import numpy as np
import pytest
import torch
from tokenizers import processors
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertTokenizer,
    DebertaV2Tokenizer,
    DistilBertTokenizer,
    PreTrainedTokenizerFast,
    RobertaTokenizer,
    XLMRobertaTokenizer,
)

import rewarding
import zoo
from actor.rollouts import rollout
from guerdon import LocalRewardModel, RewardClient
from guerdon.actor.remote_rewards import RemoteRewards
from guerdon.server.runtime import RunningServer
from guerdon.settings.actors import RemoteRewardConfig, RewardServer
from guerdon.settings.config import ComponentConfig, ModelConfig, RewardConfig
from served import Serve
from tiers import slow_but

Pairs = list[tuple[str, str]]
CLIENT = httpx.Client(timeout=120)

LETTERS = "abcdefghijklmnopqrstuvwxyzéç日本🙂.,?!"
Side = Literal["left", "right"]


def word_pieces(folder: Path, kind: type) -> None:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *LETTERS, *(f"##{c}" for c in LETTERS), "hello", "world"]
    kind(vocab={word: i for i, word in enumerate(words)}).save_pretrained(folder)


def marked_pieces(folder: Path, kind: type, specials: tuple[str, ...]) -> None:
    pieces = [(word, 0.0) for word in specials] + [("▁", -2.0)]
    pieces += [(c, -3.0) for c in LETTERS] + [("▁hello", -1.0), ("▁a", -1.0)]
    kind(vocab=pieces).save_pretrained(folder)


def byte_pieces(folder: Path) -> None:
    words = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", *"Ġabcdefghijklmnopqrstuvwxyz.?", "he", "ab"]
    vocab = {word: i for i, word in enumerate(words)}
    RobertaTokenizer(vocab=vocab, merges=[("h", "e"), ("a", "b")]).save_pretrained(folder)


def with_template(folder: Path, names: list[str], pair: str, single: str) -> None:
    """A tokenizer as `zoo.tokenizer` saves it, with this template."""
    fast = AutoTokenizer.from_pretrained(zoo.tokenizer(folder, chat_template=None))
    around = [("<s>", zoo.BOS), ("</s>", zoo.EOS)]
    fast.backend_tokenizer.post_processor = (
        processors.TemplateProcessing(single=single, pair=pair, special_tokens=around)
        if pair
        else processors.ByteLevel(trim_offsets=False)
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=fast.backend_tokenizer,
        **{name: getattr(fast, name) for name in ("pad_token", "bos_token", "eos_token")},
        model_input_names=names,
    )
    made.save_pretrained(folder)


IDS, MASK, TYPES = "input_ids", "attention_mask", "token_type_ids"
BERT = ("<s> $A </s> $B:1 </s>:1", "<s> $A </s>")
MODELS: dict[str, tuple[str, dict[str, Any], Callable[[Path], None]]] = {
    "bert": ("bert", {}, lambda f: word_pieces(f, BertTokenizer)),
    "electra": ("electra", {}, lambda f: word_pieces(f, BertTokenizer)),
    "distilbert": ("distilbert", {}, lambda f: word_pieces(f, DistilBertTokenizer)),
    "roberta": ("roberta", {}, byte_pieces),
    "xlm-roberta": (
        "roberta",
        {"type_vocab_size": 1},
        lambda f: marked_pieces(f, XLMRobertaTokenizer, ("<s>", "<pad>", "</s>", "<unk>")),
    ),
    "deberta-v2": (
        "deberta-v2",
        {"type_vocab_size": 2},
        lambda f: marked_pieces(f, DebertaV2Tokenizer, ("[PAD]", "[CLS]", "[SEP]", "[UNK]")),
    ),
    "modernbert": ("modernbert", {}, lambda f: with_template(f, [IDS, MASK], *BERT)),
    "bert-untyped": ("bert", {}, lambda f: with_template(f, [IDS, MASK], *BERT)),
    "llama": ("llama", {}, lambda f: with_template(f, [IDS, TYPES, MASK], "<s> $A <s> $B:1", "<s> $A")),
    "qwen2": ("qwen2", {}, lambda f: with_template(f, [IDS, MASK], "", "")),
}
ENCODERS = [name for name in MODELS if name not in ("llama", "qwen2")]
MOST = 48
"""The length of the models named `short-...`."""

LONG = "hello a world " * 30
PAIRS = [
    ("a", "b"),
    ("hello a", "b."),
    ("hello", " hello a?"),
    ("he", "llo"),
    ("hello ab", "a"),
    ("hello", "ab a"),
    ("", "hello"),
    ("hello", ""),
    ("hello\n", "\n a"),
    ("é 日本", "ça 🙂"),
    ("a [SEP] b", "</s> a <s>"),
    ("b a a" * 6, "a b" * 9),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("pairs")
    for name, (architecture, settings, save) in MODELS.items():
        save(zoo.checkpoint(architecture, root / name, **settings))
    return root


@pytest.fixture(scope="module")
def server(folder: Path, serve: Serve) -> RunningServer:
    models = [ModelConfig(model=str(folder / name), name=name) for name in MODELS]
    models += [
        ModelConfig(model=str(folder / name), name=f"{side}-{name}", truncation=side, max_length=MOST)
        for name in ("bert", "qwen2")
        for side in ("left", "right")
    ]
    models.append(ModelConfig(model="rewarding:brevity", name="brevity"))
    total = RewardConfig(name="total", components=[ComponentConfig(model="bert"), ComponentConfig(model="brevity")])
    return serve(*models, grpc_port=0, rewards=[total])


@pytest.fixture(scope="module")
def reference(folder: Path) -> Callable[..., float | None]:
    """What transformers makes of a pair by itself; None if truncation leaves nothing of what is scored."""
    tokenizers = {name: AutoTokenizer.from_pretrained(folder / name) for name in MODELS}
    models = {
        name: AutoModelForSequenceClassification.from_pretrained(folder / name, attn_implementation="eager").eval()
        for name in MODELS
    }

    @torch.no_grad()
    def score(name: str, first: str, second: str, side: Side = "right", **options: Any) -> float | None:
        tokenizer = tokenizers[name]
        tokenizer.truncation_side = side
        options = {"add_special_tokens": name in ENCODERS, **options}
        num_added = tokenizer.num_special_tokens_to_add(bool(second)) if options["add_special_tokens"] else 0
        if options.get("max_length", num_added) < num_added:
            return None
        made = tokenizer(first, second, **options)
        if tokenizer(second or first, add_special_tokens=False)[IDS] and int(bool(second)) not in made.sequence_ids():
            return None
        inputs = {key: torch.tensor([made[key]]) for key in (IDS, TYPES) if key in made}
        if name not in ENCODERS or not getattr(models[name].config, "type_vocab_size", 0):
            inputs.pop(TYPES, None)
        return float(models[name](**inputs).logits[0, 0])

    return score


def send(server: RunningServer, path: str, body: Any) -> httpx.Response:
    return CLIENT.post(server.http_url + path, json=body)


def post(server: RunningServer, path: str, body: Any) -> Any:
    return send(server, path, body).raise_for_status().json()


def by_score(server: RunningServer, name: str, pairs: Pairs, **options: Any) -> list[float]:
    body = {"model": name, "text_1": [a for a, _ in pairs], "text_2": [b for _, b in pairs], **options}
    return [entry["score"] for entry in post(server, "/score", body)["data"]]


def by_queries(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    return [
        post(server, "/v1/score", {"model": name, "queries": a, "documents": [b]})["data"][0]["score"] for a, b in pairs
    ]


def by_tei(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    batch = post(server, "/predict", {"model": name, "inputs": [[*pair] for pair in pairs]})
    (one,) = post(server, "/predict", {"model": name, "inputs": [*pairs[0]]})
    assert one["score"] == pytest.approx(batch[0][0]["score"], abs=1e-5)
    return [entry[0]["score"] for entry in batch]


def by_slime(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    return [post(server, f"/reward?model={name}", {"prompt": a, "response": b}) for a, b in pairs]


def by_page(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    told = [post(server, "/dashboard/try", {"model": name, "prompt": a, "responses": [b]}) for a, b in pairs]
    return [one["results"][0]["reward"] for one in told]


def by_openrlhf(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    texts, prompts = [a + b for a, b in pairs], [a for a, _ in pairs]
    return post(server, f"/get_reward?model={name}", {"query": texts, "prompts": prompts})["rewards"]


def by_kserve(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    columns = {"sentences": [a + b for a, b in pairs], "prompts": [a for a, _ in pairs]}
    inputs = [{"name": n, "datatype": "BYTES", "shape": [len(c)], "data": c} for n, c in columns.items()]
    (rewards, *_) = post(server, f"/v2/models/{name}/infer", {"inputs": inputs})["outputs"]
    return rewards["data"]


def by_client(url: str | None, name: str, pairs: Pairs) -> list[float]:
    assert url is not None
    with RewardClient(url, model=name) as client:
        return list(client.score(texts=[a + b for a, b in pairs], prompts=[a for a, _ in pairs]))


def by_rerank(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    """Each pair is the only one of its ranking, at all paths; the last prompt's responses are ranked together, too."""
    told = [
        post(server, path, {"model": name, "query": a, "documents": [b]})["results"][0]["relevance_score"]
        for (a, b), path in zip(pairs, itertools.cycle(("/rerank", "/v1/rerank", "/v2/rerank")))
    ]
    documents = [b for _, b in pairs]
    rows = post(server, "/v2/rerank", {"model": name, "query": pairs[-1][0], "documents": documents})["results"]
    scores = [row["relevance_score"] for row in rows]
    assert scores == sorted(scores, reverse=True)
    assert [row["document"]["text"] for row in rows] == [documents[row["index"]] for row in rows]
    (own,) = [row["relevance_score"] for row in rows if row["index"] == len(pairs) - 1]
    assert own == pytest.approx(told[-1], abs=1e-5)
    return told


def by_teis_rerank(server: RunningServer, name: str, pairs: Pairs) -> list[float]:
    return [post(server, "/rerank", {"model": name, "query": a, "texts": [b]})[0]["score"] for a, b in pairs]


FORMS = {"/score": by_score, "/v1/score": by_queries, "/predict": by_tei, "/reward": by_slime, "Try it": by_page}
FORMS |= {"/rerank": by_rerank, "/rerank of TEI": by_teis_rerank}
ONE_BY_ONE = ("/rerank", "/rerank of TEI", "/v1/score", "/reward", "Try it")
OF_ENCODERS = {
    "/get_reward": by_openrlhf,
    "KServe": by_kserve,
    "RewardClient": lambda server, name, pairs: by_client(server.http_url, name, pairs),
    "gRPC": lambda server, name, pairs: by_client(server.grpc_url, name, pairs),
}
"""Forms whose texts are prompts and responses together, beside the prompts."""


@pytest.mark.parametrize("form", slow_but(("/score", "/predict", "/get_reward", "KServe"), [*FORMS, *OF_ENCODERS]))
def test_the_score_is_that_of_the_tokenizers_pair(
    form: str, server: RunningServer, reference: Callable[..., float]
) -> None:
    for name in MODELS if form in FORMS else ENCODERS:
        pairs = PAIRS[:5] if form in ONE_BY_ONE else PAIRS
        want = [reference(name, *pair) for pair in pairs]
        assert len({round(x, 4) for x in want}) > len(pairs) - 3
        assert {**FORMS, **OF_ENCODERS}[form](server, name, pairs) == pytest.approx(want, abs=2e-5), name


def test_a_model_in_process_reads_the_same_pairs(folder: Path, reference: Callable[..., float]) -> None:
    with LocalRewardModel(folder / "bert", deterministic=True) as model:
        scores = model.score(texts=[a + b for a, b in PAIRS], prompts=[a for a, _ in PAIRS])
    assert list(scores) == pytest.approx([reference("bert", *pair) for pair in PAIRS], abs=2e-5)


def test_the_actors_texts_are_pairs_to_an_encoder(server: RunningServer, reference: Callable[..., float]) -> None:
    rollouts = [rollout([5], [6], group=i, prompt_text=a, text=b) for i, (a, b) in enumerate(PAIRS)]
    config = RemoteRewardConfig(RewardServer(name="bert", urls=[server.http_url]), send="text")
    with RemoteRewards(config) as rewards:
        rewards.wait_ready()
        rewards.score(rollouts)
    assert [r.reward for r in rollouts] == pytest.approx([reference("bert", *pair) for pair in PAIRS], abs=2e-5)


def single_scores(server: RunningServer, name: str, texts: list[str]) -> dict[str, list[float]]:
    """The scores of texts without prompts, by the form."""
    sentences = {"name": "sentences", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    (rewards, *_) = post(server, f"/v2/models/{name}/infer", {"inputs": [sentences]})["outputs"]
    with RewardClient(server.http_url, model=name) as client:
        scores = client.score(texts=texts)
    asked = {"model": name, "input": texts}
    return {
        "KServe": rewards["data"],
        "RewardClient": list(scores),
        "/classify": [entry["probs"][0] for entry in post(server, "/classify", asked)["data"]],
        "/pooling": [entry["data"][0] for entry in post(server, "/pooling", asked)["data"]],
        "/predict": [entry[0]["score"] for entry in post(server, "/predict", {"model": name, "inputs": [*zip(texts)]})],
        "/get_reward": post(server, f"/get_reward?model={name}", {"query": texts})["rewards"],
    }


def test_a_text_by_itself_has_the_special_tokens_of_an_encoder(
    server: RunningServer, reference: Callable[..., float]
) -> None:
    texts = ["hello a", "b", "hello world " * 9]
    for name in MODELS:
        want = [reference(name, text, "") for text in texts]
        for form, got in single_scores(server, name, texts).items():
            assert got == pytest.approx(want, abs=2e-5), (name, form)
        plain = post(server, "/classify", {"model": name, "input": texts, "add_special_tokens": False})["data"]
        want = [reference(name, text, "", add_special_tokens=False) for text in texts]
        assert [entry["probs"][0] for entry in plain] == pytest.approx(want, abs=2e-5), name
    brevity = rewarding.brevity(texts)
    want = [reference("bert", text, "") + more for text, more in zip(texts, brevity, strict=True)]
    assert single_scores(server, "total", texts)["KServe"] == pytest.approx(want, abs=2e-5)


def test_a_text_by_itself_is_cut_as_transformers_cuts_it(
    server: RunningServer, reference: Callable[..., float]
) -> None:
    for side in ("left", "right"):
        want = reference("bert", LONG, "", side, max_length=MOST, truncation=True)
        assert single_scores(server, f"{side}-bert", [LONG])["KServe"] == pytest.approx([want], abs=2e-5)


def test_the_tokens_shown_are_those_that_are_scored(server: RunningServer) -> None:
    for name, num_added in (("bert", 2), ("qwen2", 0)):
        counts = [
            post(server, "/tokenize", {"model": name, "prompt": "hello a", **more})["count"]
            for more in ({}, {"add_special_tokens": False}, {"add_special_tokens": True})
        ]
        assert counts == [counts[1] + num_added, counts[1], counts[1] + num_added], name
        (spans,) = post(server, "/tokenize", {"model": name, "inputs": ["hello a"]})
        assert len(spans) == counts[0]
    whole, pair = "[CLS] hello a [SEP]", {"model": "bert"}
    (spans,) = post(server, "/tokenize", {**pair, "inputs": [whole]})
    assert len(spans) == post(server, "/tokenize", {**pair, "prompt": whole})["count"] == 4
    for text, length in {whole: 4, "hello a": 4, "hello": 3}.items():
        (shown,) = post(server, "/dashboard/try", {**pair, "responses": [text]})["results"]
        assert len(shown["tokens"]) == shown["num_tokens"] == length


@pytest.mark.parametrize("adds", [False, True])
def test_special_tokens_are_added_as_the_client_says(
    adds: bool, server: RunningServer, reference: Callable[..., float]
) -> None:
    # Some of these pairs differ in nothing but their token types.
    pairs = [("hello a", "b"), ("hello", "a b"), ("hello a a", "a"), ("hello a", "a a")]
    for name in MODELS:
        want = [reference(name, *pair, add_special_tokens=adds) for pair in pairs]
        assert by_score(server, name, pairs, add_special_tokens=adds) == pytest.approx(want, abs=2e-5), name
        got = post(server, "/predict", {"model": name, "inputs": [*map(list, pairs)], "add_special_tokens": adds})
        assert [entry[0]["score"] for entry in got] == pytest.approx(want, abs=2e-5), name


def test_a_bos_that_the_first_text_has_is_not_doubled(server: RunningServer, reference: Callable[..., float]) -> None:
    (got,) = by_score(server, "llama", [("<s>hello", "a")], add_special_tokens=True)
    assert got == pytest.approx(reference("llama", "hello", "a", add_special_tokens=True), abs=2e-5)


def test_one_prompt_goes_with_all_responses_and_a_text_may_stand_beside_pairs(
    server: RunningServer, reference: Callable[..., float], folder: Path
) -> None:
    body = {"model": "bert", "text_1": "hello a", "text_2": ["b", "", "a b"]}
    got = [entry["score"] for entry in post(server, "/score", body)["data"]]
    assert got == pytest.approx([reference("bert", "hello a", b) for b in body["text_2"]], abs=2e-5)
    body = {"model": "bert", "inputs": [["hello a"], ["hello a", "b"], ["b"]], "add_special_tokens": True}
    want = [reference("bert", *pair) for pair in (("hello a", ""), ("hello a", "b"), ("b", ""))]
    assert [entry[0]["score"] for entry in post(server, "/predict", body)] == pytest.approx(want, abs=2e-5)


def test_a_sum_passes_its_pairs_to_all_components(server: RunningServer, reference: Callable[..., float]) -> None:
    pair = ("hello a", "b a")
    brevity = rewarding.brevity([pair[0] + pair[1]])[0]
    for form in (by_score, by_tei, by_kserve):
        (got,) = form(server, "total", [pair])
        assert got == pytest.approx(reference("bert", *pair) + brevity, abs=2e-5)


def test_a_text_that_has_special_tokens_already_stands_as_it_is(server: RunningServer) -> None:
    whole = "[CLS] hello a [SEP] b [SEP]"
    body = {"model": "bert", "input": [whole, "hello a"]}  # beside a text that has none
    plain, *_ = post(server, "/classify", {**body, "add_special_tokens": False})["data"]
    alone, _ = post(server, "/classify", body)["data"]
    assert alone["probs"] == pytest.approx(plain["probs"], abs=2e-5)
    assert by_kserve(server, "bert", [("[CLS] hello a [SEP]", " b [SEP]")]) == pytest.approx(alone["probs"], abs=2e-5)


def test_a_prompt_that_does_not_begin_its_text_fails_the_sample(server: RunningServer) -> None:
    with RewardClient(server.http_url, model="bert") as client:
        scores = client.score(texts=["a b", "a b"], prompts=["a ", "hello"])
    assert np.isfinite(scores.rewards[0]) and "does not begin with its prompt" in str(scores.errors[1])


def test_a_decoder_takes_prompts_in_no_tensor_and_its_texts_are_whole(
    server: RunningServer, reference: Callable[..., float]
) -> None:
    told = send(server, "/v2/models/qwen2/infer", {"inputs": [{"name": "prompts", "datatype": "BYTES", "shape": [0]}]})
    assert told.status_code == 400
    assert by_client(server.http_url, "qwen2", [("t", "he")]) == pytest.approx(
        [reference("qwen2", "the", "")], abs=2e-5
    )
    assert by_score(server, "qwen2", [("t", "he")]) == pytest.approx([reference("qwen2", "t", "he")], abs=2e-5)
    assert reference("qwen2", "the", "") != pytest.approx(reference("qwen2", "t", "he"), abs=1e-3)


TOO_LONG = [
    (LONG, "hello b"),
    ("hello b", LONG),
    (LONG, LONG + "b"),
    (LONG + "b", LONG),
    ("a b", "b"),
    (LONG, ""),
    ("", LONG),
]


@pytest.mark.parametrize(
    ("name", "side"),
    slow_but(
        ("bert",),
        [("bert", "left"), ("bert", "right"), ("xlm-roberta", "right"), ("llama", "left"), ("qwen2", "right")],
    ),
)
def test_truncation_cuts_the_longer_text_first_or_is_refused(
    name: str, side: Side, server: RunningServer, reference: Callable[..., float | None]
) -> None:
    adds = name != "qwen2"
    for most in (1, 3, 4, 5, 33, -1):
        longest = zoo.MAX_LENGTH if most == -1 else most
        for pair in TOO_LONG:
            want = reference(name, *pair, side, truncation=True, max_length=longest, add_special_tokens=adds)
            body = {"model": name, "text_1": pair[0], "text_2": pair[1], "add_special_tokens": adds}
            told = send(server, "/score", {**body, "truncate_prompt_tokens": most, "truncation_side": side})
            if want is None:
                assert told.status_code == 400 and "leaves nothing of the" in told.text, (most, pair)
            else:
                assert told.json()["data"][0]["score"] == pytest.approx(want, abs=2e-5), (most, pair)


@pytest.mark.parametrize("side", slow_but(("right",), ["left", "right"]))
@pytest.mark.parametrize("name", ["bert", "qwen2"])
def test_the_servers_setting_and_teis_truncate_do_the_same(
    name: str, side: Side, server: RunningServer, reference: Callable[..., float]
) -> None:
    pairs = [pair for pair in TOO_LONG if pair[1]]
    want = [reference(name, *pair, side, truncation=True, max_length=MOST) for pair in pairs]
    for form in FORMS.values():
        assert form(server, f"{side}-{name}", pairs) == pytest.approx(want, abs=2e-5)
    for pair, score in zip(pairs, want, strict=True):
        body = {"model": f"right-{name}", "query": pair[0], "texts": [pair[1]]}
        (row,) = post(server, "/rerank", {**body, "truncate": True, "truncation_direction": side})
        assert row["score"] == pytest.approx(score, abs=2e-5)
    body = {"model": f"right-{name}", "inputs": [*map(list, pairs)], "truncate": True, "truncation_direction": side}
    assert [entry[0]["score"] for entry in post(server, "/predict", body)] == pytest.approx(want, abs=2e-5)


def test_responses_to_a_long_prompt_keep_their_own_scores(server: RunningServer) -> None:
    body = {
        "model": "qwen2",
        "text_1": "hello " * 600,
        "text_2": ["good", "bad", "ugly"],
        "truncate_prompt_tokens": 100,
    }
    scores = [entry["score"] for entry in post(server, "/score", body)["data"]]
    assert len({*scores}) == 3


@pytest.mark.parametrize(
    ("name", "text_1", "text_2", "says"),
    [
        ("qwen2", "", "", "has no tokens"),
        ("bert", LONG * 3, "b", "takes at most 256"),
        ("bert", "hello " * 20_000, "b", "has more than 256 tokens"),
    ],
)
def test_a_pair_that_cannot_be_read_is_refused(
    name: str, text_1: str, text_2: str, says: str, server: RunningServer
) -> None:
    told = send(server, "/score", {"model": name, "text_1": text_1, "text_2": text_2})
    assert told.status_code == 400 and says in told.text
