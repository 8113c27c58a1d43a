"""Tokens are those of `tokenizer.json`, whichever class a folder names; the reference is the library `tokenizers`."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import regex
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
)

import zoo
from detokenizing import BROKEN, by_rule
from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint import tokenizer_files
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.checkpoint.stored import open_checkpoint
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer
from guerdon.engine.engine import Engine
from guerdon.engine.teacher import TeacherEngine
from guerdon.errors import CheckpointError
from guerdon.settings.config import LanguageModelConfig, ModelConfig, TeacherConfig

TEXTS = [
    "In 2024, 1234567 people paid $18.99 each.", "  two  spaces\tand tabs\n\nnew", "HELLO World, DON'T shout",
    "def f(x1):\n    return x1**2 # 10%", "naïve café ÄÖÜ Привет 日本語 한국어 😀👩‍👩‍👧",
    "a<|im_end|>b</s> c", "", " ", "2.50", "a <mask> b<sep>c[MASK]",
]  # fmt: skip
SPECIALS = ["<pad>", "<s>", "</s>", "<unk>", "<|im_end|>"]


def byte_level(*before: Any, normalizer: Any = None) -> Tokenizer:
    """A byte-level BPE with the steps `before` its bytes, learnt from text so that digits and words are merged."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    learner = trainers.BpeTrainer(
        vocab_size=296,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(["20 24 2024 1234 567 18 99 the they there DON'T don't return  four"] * 9, learner)
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [*before, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not before)]
    )
    made.decoder = decoders.ByteLevel()
    return made


def metaspace() -> Tokenizer:
    pieces = [(token, 0.0) for token in SPECIALS]
    pieces += [(piece, -2.0 - 0.01 * i) for i, piece in enumerate(["▁the", "▁", "20", "24", "▁20", "hello", "in"])]
    pieces += [(chr(i), -6.0) for i in range(33, 127)]
    made = Tokenizer(models.Unigram(pieces, unk_id=3))
    made.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Digits(True)])
    made.decoder = decoders.Metaspace()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return made


def word_pieces() -> Tokenizer:
    words = [*SPECIALS, "[UNK]", *[chr(i) for i in range(33, 127)], *["##" + chr(i) for i in range(33, 127)], "the"]
    made = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=False)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Digits(True)])
    made.decoder = decoders.WordPiece()
    made.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    return made


THREES = pre_tokenizers.Split(Regex(r"\p{N}{1,3}| ?\p{L}+|[^\p{L}\p{N}]"), "isolated")
PIPELINES = {
    "digits": byte_level(pre_tokenizers.Digits(individual_digits=True)),
    "threes": byte_level(THREES),
    "lower": byte_level(THREES, normalizer=normalizers.Lowercase()),
    "plain": byte_level(),
    "metaspace": metaspace(),
    "words": word_pieces(),
}
CLASSES = [
    "GPT2Tokenizer", "GPT2TokenizerFast", "Qwen2Tokenizer", "GPTNeoXTokenizer", "CohereTokenizer", "LlamaTokenizer",
    "CodeLlamaTokenizer", "GemmaTokenizer", "BertTokenizer", "T5Tokenizer", "RobertaTokenizer", "XLMRobertaTokenizer",
    "BartTokenizer", "MPNetTokenizer", "FunnelTokenizer", "HerbertTokenizer", "NllbTokenizer", "SeamlessM4TTokenizer",
    "PreTrainedTokenizerFast", "TokenizersBackend", "NobodysTokenizer", None,
]  # fmt: skip
MODELS = ["llama", "qwen2", "qwen3", "exaone4", "starcoder2", "mistral", "gpt2", "gpt_neox", "cohere", "gemma3_text"]


def write(folder: Path, pipeline: str, cls: str | None = None, model: str | None = None, **config: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    PIPELINES[pipeline].save(str(folder / "tokenizer.json"))
    named = {} if cls is None else {"tokenizer_class": cls}
    settings = {**named, "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if model is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model}))
    return folder


def assert_the_files(folder: Path) -> tuple[str, ...]:
    file, encoder = Tokenizer.from_file(str(folder / "tokenizer.json")), TextEncoder.load(folder)
    assert encoder is not None
    rows = encoder.encode(TEXTS, False)
    assert [np.asarray(row).tolist() for row in rows] == [file.encode(t, add_special_tokens=False).ids for t in TEXTS]
    around = encoder.encode(TEXTS[:3], True)
    assert [np.asarray(row).tolist() for row in around] == [file.encode(text).ids for text in TEXTS[:3]]
    tokenizer = load_tokenizer(folder).tokenizer
    named = [token for token in tokenizer.special_tokens_map.values() if isinstance(token, str)]
    assert all(file.token_to_id(token) is not None for token in named)
    for row in rows:
        ids = np.asarray(row).tolist()
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == file.decode(ids, skip_special_tokens=False)
    assert encoder.proofs[0].startswith("tokens are those of tokenizer.json (")
    return encoder.proofs


@pytest.mark.parametrize("pipeline", PIPELINES)
@pytest.mark.parametrize("cls", CLASSES, ids=str)
def test_ids_and_text_are_the_files_whichever_class_is_named(pipeline: str, cls: str | None, tmp_path: Path) -> None:
    assert_the_files(write(tmp_path, pipeline, cls, "llama"))


@pytest.mark.parametrize("model", MODELS)
def test_ids_and_text_are_the_files_whichever_model_it_is(model: str, tmp_path: Path) -> None:
    assert_the_files(write(tmp_path, "threes", None, model))
    assert_the_files(write(tmp_path / "digits", "digits", "GPT2Tokenizer", model))


def test_the_proof_says_how_many_ids_transformers_would_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With whatever version of transformers: here it drops the file's first step."""

    def rebuilt(folder: Path) -> tuple[Any, str]:
        tokenizer, why = original(folder)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        return tokenizer, why

    original = tokenizer_files._rebuilt
    monkeypatch.setattr(tokenizer_files, "_rebuilt", rebuilt)
    (proof, *_) = assert_the_files(write(tmp_path, "digits", "PreTrainedTokenizerFast"))
    assert "; transformers rebuilds it as " in proof and "with other ids for " in proof


def test_what_the_other_files_declare_stays(tmp_path: Path) -> None:
    added = {"296": {"content": "<step>", "special": True}, "297": {"content": "km/h", "special": False}}
    folder = write(
        tmp_path, "threes", "PreTrainedTokenizerFast", added_tokens_decoder=added, chat_template="{{ messages[0] }}"
    )
    tokenizer, proofs = load_tokenizer(folder)
    step, unit = tokenizer.convert_tokens_to_ids(["<step>", "km/h"])
    assert tokenizer("a<step>9km/h")["input_ids"].count(step) == 1 and unit in tokenizer("a<step>9km/h")["input_ids"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 0)
    assert tokenizer.decode([step], skip_special_tokens=True) == ""
    assert tokenizer.chat_template == "{{ messages[0] }}" and proofs[1] == "the chat template prints no date"


@pytest.mark.parametrize("where", ["tokenizer_config.json", "added_tokens.json"])
@pytest.mark.parametrize("cls", ["PreTrainedTokenizerFast", "GemmaTokenizer", "RobertaTokenizer"])
def test_a_declared_token_has_the_id_that_is_declared(cls: str, where: str, tmp_path: Path) -> None:
    """Also if the class has tokens of its own, which then get no id; otherwise the folder is refused."""
    size = PIPELINES["threes"].get_vocab_size()
    for name, first in (("right", size), ("gap", size + 4)):
        listed = {"<step>": first, "km/h": first + 1}
        added = {str(i): {"content": token, "special": False} for token, i in listed.items()}
        folder = write(
            tmp_path / name, "threes", cls, "llama",
            **({"added_tokens_decoder": added} if where == "tokenizer_config.json" else {}),
        )  # fmt: skip
        if where == "added_tokens.json":
            (folder / where).write_text(json.dumps(listed))
    tokenizer, _ = load_tokenizer(tmp_path / "right")
    assert tokenizer.convert_tokens_to_ids(["<step>", "km/h"]) == [size, size + 1]
    assert tokenizer("a<step>km/h", add_special_tokens=False)["input_ids"][1:] == [size, size + 1]
    with pytest.raises(CheckpointError, match=rf"declares the token '<step>' as {size + 4}, and after .* it is {size}"):
        load_tokenizer(tmp_path / "gap")


def test_what_a_file_says_about_cutting_and_padding_is_left_to_the_server(tmp_path: Path) -> None:
    folder = write(tmp_path, "threes")
    stored = Tokenizer.from_file(str(folder / "tokenizer.json"))
    stored.enable_truncation(4)
    stored.enable_padding(length=8)
    stored.save(str(folder / "tokenizer.json"))
    text = TEXTS[0] * 3
    whole = PIPELINES["threes"].encode(text, add_special_tokens=False).ids
    assert np.asarray(TextEncoder.load(folder).encode([text], False)[0]).tolist() == whole  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("stated", "want"), [({}, [1]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1])]
)
def test_a_class_of_llamas_kind_obeys_its_config_about_bos_and_eos(
    stated: dict[str, bool], want: list[int], tmp_path: Path
) -> None:
    folder = write(tmp_path, "threes", "LlamaTokenizer", "llama", **stated)
    file = Tokenizer.from_file(str(folder / "tokenizer.json"))
    file.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    file.save(str(folder / "tokenizer.json"))
    ids = file.encode("the", add_special_tokens=False).ids
    encoder = TextEncoder.load(folder)
    assert encoder is not None
    row = np.asarray(encoder.encode(["the"], True)[0]).tolist()
    assert row == [*want, *ids, *([2] if stated.get("add_eos_token") else [])]
    assert ("the former counts" in encoder.proofs[0]) == bool(stated)


def test_what_cannot_be_proved_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def surround(pipeline: Tokenizer, *_: Any) -> str:
        pipeline.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        return ""

    monkeypatch.setattr(tokenizer_files, "_surround", surround)
    with pytest.raises(CheckpointError, match=r"gives other ids than its tokenizer\.json"):
        TextEncoder.load(write(tmp_path, "threes"))


def test_reward_models_teachers_and_policies_read_the_files_tokens(tmp_path: Path) -> None:
    text = "In 2024 1234567 people paid 18.99"
    ids = PIPELINES["threes"].encode(text, add_special_tokens=False).ids
    reward = write(zoo.checkpoint("llama", tmp_path / "reward", vocab_size=300), "threes", "GPT2Tokenizer")
    engine = build_scorer(ModelConfig(model=str(reward)))
    assert isinstance(engine, Engine) and engine.encoder is not None
    (result,) = engine.score([Sequence(np.asarray(engine.encoder.encode([text], False)[0]))])
    with torch.no_grad():
        want = AutoModelForSequenceClassification.from_pretrained(reward)(input_ids=torch.tensor([ids])).logits
    assert isinstance(result, Score) and result.reward == pytest.approx(float(want), abs=1e-5)
    language = write(zoo.language_model("llama", tmp_path / "language"), "threes", "GPT2Tokenizer")
    teacher = TeacherEngine(load_policy(TeacherConfig(model=str(language))))
    assert teacher.encoder is not None
    assert np.asarray(teacher.encoder.encode([text], False)[0]).tolist() == ids
    assert load_policy(LanguageModelConfig(model=str(language))).tokenizer(text)["input_ids"] == ids
    for info in (engine.info, teacher.info):
        assert info.proofs[0].startswith("tokens are those of tokenizer.json (")


# ------------------------------------------------------------------------------------------------------- tekken


def tekken(folder: Path, **config: Any) -> Path:
    """A file such as Mistral's: 256 bytes, a few merges, 20 special tokens before them."""
    pieces = [bytes([i]) for i in range(256)] + [
        b"th",
        b"the",
        b" the",
        b"20",
        b"he",
        b" 2",
        "é".encode(),
        b"qxz",
    ]  # no merges lead to the last
    stored = {
        "config": {
            "pattern": r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            "num_vocab_tokens": len(pieces),
            "default_vocab_size": 20 + len(pieces),
            "default_num_special_tokens": 20,
            "version": "v3",
            **config,
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(piece).decode(), "token_str": None}
            for i, piece in enumerate(pieces)
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tekken.json").write_text(json.dumps(stored))
    return folder


def by_ranks(folder: Path, text: str) -> list[int]:
    """The format's own rule: a part of the text is a token itself, else neighbours of the lowest rank are merged."""
    stored = json.loads((folder / "tekken.json").read_text())
    ranks = {base64.b64decode(token["token_bytes"]): token["rank"] for token in stored["vocab"]}
    ids = []
    for part in (match.group().encode() for match in regex.finditer(stored["config"]["pattern"], text)):
        pieces = [part] if part in ranks else [bytes([byte]) for byte in part]
        while found := [(ranks[a + b], i) for i, (a, b) in enumerate(itertools.pairwise(pieces)) if a + b in ranks]:
            _, i = min(found)
            pieces[i : i + 2] = [pieces[i] + pieces[i + 1]]
        ids += [20 + ranks[piece] for piece in pieces]
    return ids


def test_a_folder_with_tekken_alone_has_its_tokens(tmp_path: Path) -> None:
    folder = tekken(tmp_path)
    tokenizer, (proof,) = load_tokenizer(folder)
    assert proof == "tokens are converted from tekken.json"
    texts = [*tokenizer_files.PROBES, *TEXTS[:5], "the 2020 theé qxz", "qxz"]
    assert [tokenizer(text, add_special_tokens=False)["input_ids"] for text in texts] == [
        by_ranks(folder, text) for text in texts
    ]
    assert [tokenizer.decode(by_ranks(folder, text)) for text in texts] == texts
    assert tokenizer("the")["input_ids"][0] == tokenizer.bos_token_id == 1
    assert tokenizer("[INST]</s>", add_special_tokens=False)["input_ids"] == [3, 2]


def test_tekken_is_part_of_a_version_if_it_is_read(tmp_path: Path) -> None:
    folder = tekken(zoo.language_model("llama", tmp_path))
    before = open_checkpoint(str(folder)).version
    tekken(folder, default_vocab_size=282)
    after = open_checkpoint(str(folder)).version
    assert before != after
    write(folder, "threes")
    beside = open_checkpoint(str(folder)).version
    tekken(folder)
    assert open_checkpoint(str(folder)).version == beside, "nobody reads it beside a tokenizer.json"


def test_a_model_with_tekken_alone_is_served_by_text(tmp_path: Path) -> None:
    folder = tekken(zoo.language_model("llama", tmp_path))
    teacher = TeacherEngine(load_policy(TeacherConfig(model=str(folder))))
    assert teacher.encoder is not None
    row = np.asarray(teacher.encoder.encode(["the 2020"], False)[0])
    assert row.tolist() == by_ranks(folder, "the 2020")
    (result,) = teacher.score([Sequence(row)])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(folder)(input_ids=torch.from_numpy(row)[None]).logits[0]
    want = logits.log_softmax(-1)[:-1].gather(1, torch.from_numpy(row[1:])[:, None])[:, 0].numpy()
    assert isinstance(result, Score) and result.answer is not None and result.answer.logprobs is not None
    np.testing.assert_allclose(result.answer.logprobs[-len(want) :], want, atol=1e-5)


TEXT = "a 😀 日本, é! 👩‍👩‍👧 \ufffd x"


def with_spaces(folder: Path) -> None:
    """As Llama 2's: pieces with signs for spaces, and a token for each byte."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), "▁", *"abcdefghx,!", "▁a", "▁▁", "é", "日"]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=[("▁", "a"), ("▁", "▁")],
        unk_token="<unk>",
        byte_fallback=True,
        fuse_unk=True,
    )
    made = Tokenizer(model)
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>", bos_token="<s>").save_pretrained(folder)


@pytest.fixture(scope="module", params=["bytes", "pieces"])
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "bytes":
        zoo.tokenizer(folder)
    else:
        with_spaces(folder)
    return AutoTokenizer.from_pretrained(folder)


def test_a_prompts_tokens_have_the_texts_that_vllm_tells(tokenizer: PreTrainedTokenizerFast) -> None:
    ids = tokenizer.encode(TEXT, add_special_tokens=False)
    told = TextEncoder(tokenizer).texts_among(np.array(ids), np.arange(len(ids)), np.array(ids))
    # The first prompt token has no log-prob, and so it is no context.
    assert told == [by_rule(tokenizer, ids[1:i], ids[i]) for i in range(len(ids))]
    assert " 😀" in told or {" ", "😀"} <= {*told}
    assert "".join(told).replace(" ", "") == TEXT.replace(BROKEN, "").replace(" ", "")


def test_a_character_is_told_with_its_last_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path))
    ids = tokenizer.encode("a😀 日", add_special_tokens=False)
    told = TextEncoder(tokenizer).texts_among(np.array(ids), np.arange(len(ids)), np.array(ids))
    assert told == ["a", "", "", "", "😀", " ", "", "", "日"]


def test_any_tokens_at_any_place_have_the_texts_that_vllm_tells(tokenizer: PreTrainedTokenizerFast) -> None:
    """Characters that never end, bytes that begin none, and alternatives that end another's character."""
    random, vocab = np.random.default_rng(0), len(tokenizer)
    whole = tokenizer.encode(TEXT * 3, add_special_tokens=False)
    for tokens in (np.array(whole), random.integers(0, vocab, 200), random.permutation(whole)):
        places = random.integers(0, len(tokens) + 1, 400)
        ids = np.where(random.random(400) < 0.5, random.choice(whole, 400), random.integers(0, vocab, 400))
        told = TextEncoder(tokenizer).texts_among(ids, places, tokens)
        for i, place, text in zip(ids.tolist(), places.tolist(), told, strict=True):
            assert text == by_rule(tokenizer, tokens[1:place].tolist(), i), (tokens[max(0, place - 4) : place], i)
