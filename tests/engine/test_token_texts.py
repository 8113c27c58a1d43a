"""Texts of single tokens beside log-probs: by the rule of vLLM's detokenizer, as `detokenizing` has it."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import zoo
from detokenizing import BROKEN, by_rule
from guerdon.engine.checkpoint.text import TextEncoder

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
