from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo
from guerdon.engine.checkpoint.text import TextEncoder

TEXT = "The answer: naïve café ✓ 你好 👩‍👩‍👧 — \n\n  two  spaces, don't."


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    encoder = TextEncoder.load(zoo.tokenizer(tmp_path_factory.mktemp("bytes")))
    assert encoder is not None
    return encoder


def fast(model: object, decoder: object, **parts: object) -> TextEncoder:
    made = Tokenizer(model)
    made.decoder = decoder
    for name, part in parts.items():
        setattr(made, name, part)
    return TextEncoder(PreTrainedTokenizerFast(tokenizer_object=made, unk_token="[UNK]"))


def pieces(encoder: TextEncoder, text: str) -> list[str]:
    (ids,) = encoder.encode([text])
    assert isinstance(ids, np.ndarray)
    found = encoder.pieces(ids)
    assert len(found) == len(ids)
    return found


def test_bytes_of_one_character_come_with_the_last(byte_level):
    assert pieces(byte_level, " the é✓") == [" the", " ", "", "é", "", "", "✓"]


def test_pieces_make_up_the_text(byte_level):
    assert "".join(pieces(byte_level, TEXT)) == TEXT
    assert "".join(pieces(byte_level, "<s>" + TEXT + "</s><pad>")) == "<s>" + TEXT + "</s><pad>"


def test_characters_that_are_cut_off_or_none_are_told_once_and_end(byte_level):
    (ids,) = byte_level.encode(["a✓b"])
    assert byte_level.pieces(ids[:3]) == ["a", "", "\ufffd"]
    (own,) = byte_level.encode(["x\ufffdy"])
    assert "".join(byte_level.pieces(own)) == "x\ufffdy"
    half = byte_level.pieces(np.repeat(ids[2:3], 40))
    assert all(any(half[i : i + 4]) for i in range(0, 40, 4))
    wild = np.random.default_rng(0).integers(zoo.FIRST_TOKEN, len(byte_level._tokenizer), 300)
    found = byte_level.pieces(wild)
    assert len(found) == 300
    assert max(map(len, found)) <= 12


def test_no_tokens_and_ids_beyond_the_tokenizer(byte_level):
    assert byte_level.pieces(np.empty(0, np.int64)) == []
    beyond = byte_level.pieces(np.array([999_999] * 100 + byte_level.encode([" the a"])[0].tolist()))
    assert "".join(beyond) == " the a"


def test_wordpiece():
    words = ["[UNK]", "play", "##ing", "##er", "well", ",", "."]
    encoder = fast(
        models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"),
        decoders.WordPiece(prefix="##", cleanup=True),
        normalizer=normalizers.Lowercase(),
        pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
    )
    assert pieces(encoder, "Playing well, player.") == ["play", "ing", " well", ",", " play", "er", "."]


def test_sentencepiece_with_bytes():
    words = ["[UNK]", "▁", "▁the", "re", "▁is", *(f"<0x{i:02X}>" for i in range(256))]
    encoder = fast(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="[UNK]", fuse_unk=True, byte_fallback=True),
        decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        ),
    )
    is_, e = words.index("▁is"), [words.index(f"<0x{byte:02X}>") for byte in "é✓".encode()]
    tokens = np.array([words.index("▁the"), words.index("re"), is_, words.index("▁"), *e, is_])
    assert encoder.pieces(tokens) == ["the", "re", " is", " ", "", "é", "", "", "✓", " is"]


def test_a_slow_tokenizer_says_the_same(tmp_path: Path):
    from transformers import ByT5Tokenizer

    encoder = TextEncoder(ByT5Tokenizer())
    assert not encoder._tokenizer.is_fast
    assert "".join(pieces(encoder, "naïve ✓")) == "naïve ✓"
    assert pieces(encoder, "é") == ["", "é"]
