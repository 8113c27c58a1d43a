"""Packed batches hold exactly the rows they were given, and store what rows share once."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import zoo
from guerdon.core import MIN_SHARED
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.packing import MAX_DEPTH, PackedBatch, indices, pack


def rows_of(rng: np.random.Generator, prompts: int, responses: int, prompt: int = 40) -> list[np.ndarray]:
    rows = []
    for _ in range(prompts):
        start = rng.integers(0, 100, prompt)
        rows += [np.concatenate([start, rng.integers(0, 100, rng.integers(1, 50))]) for _ in range(responses)]
    return rows


def contents(batches: list[PackedBatch]) -> dict[int, list[int]]:
    return {row: b.tokens[indices(b.spans[i])].tolist() for b in batches for i, row in enumerate(b.rows)}


@pytest.mark.parametrize("share", [False, True])
@pytest.mark.parametrize("budget", [64, 200, 10_000])
@pytest.mark.parametrize("seed", range(5))
def test_every_row_is_there_whole_with_its_positions(share: bool, budget: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = rows_of(rng, 3, 5) + rows_of(rng, 4, 1, prompt=3)
    rows += [rows[0], rows[1][:30], rows[2][:1]]
    batches = list(pack(rows, budget=budget, share=share))
    assert contents(batches) == {i: row.tolist() for i, row in enumerate(rows)}
    for b in batches:
        for i, row in enumerate(b.rows):
            assert b.positions[indices(b.spans[i])].tolist() == list(range(len(rows[row])))
            assert b.last[i] == indices(b.spans[i])[-1]
        assert b.num_tokens <= budget + (MIN_SHARED * len(b.rows) if share else 0) or len(b.rows) == 1
        assert b.max_length == max(len(rows[r]) for r in b.rows)


def test_a_prompt_is_stored_once_and_its_descendants_follow_it() -> None:
    prompt = np.arange(20)
    rows = [np.concatenate([prompt, [100 + i, 7, 8]]) for i in range(4)]
    (batch,) = pack(rows, budget=1000, share=True)
    assert batch.num_tokens == 20 + 4 * 3
    root, *leaves = batch.segments
    assert (root.start, root.stop, root.end) == (0, 20, 32)
    assert all(leaf.ancestors == ((0, 20),) and leaf.position == 20 for leaf in leaves)


def test_a_short_common_beginning_is_not_shared() -> None:
    rows = [np.concatenate([np.arange(MIN_SHARED - 1), [50 + i]]) for i in range(3)]
    (batch,) = pack(rows, budget=1000, share=True)
    assert batch.num_tokens == sum(map(len, rows)) and len(batch.segments) == 3


def test_sharing_ends_at_the_prompt_length_where_it_is_given() -> None:
    rows = [np.arange(40), np.concatenate([np.arange(30), [99]])]
    (batch,) = pack(rows, budget=1000, share=True, limits=[20, None])
    assert batch.num_tokens == 20 + 20 + 11


def test_a_group_that_the_budget_cuts_stores_its_prompt_in_each_part() -> None:
    rows = [np.concatenate([np.arange(40), np.full(10, 60 + i)]) for i in range(6)]
    batches = list(pack(rows, budget=80, share=True))
    assert [b.num_tokens for b in batches] == [80, 60]
    assert all(b.segments[1].ancestors for b in batches)


def test_deeply_nested_prefixes_stay_within_the_depth_limit() -> None:
    long = np.arange(4000)
    rows = [long[: MIN_SHARED * (i + 1)] for i in range(200)]
    batches = list(pack(rows, budget=10**9, share=True))
    assert contents(batches) == {i: row.tolist() for i, row in enumerate(rows)}
    assert max(len(s.ancestors) for b in batches for s in b.segments) <= MAX_DEPTH


def test_a_comb_costs_its_tokens_and_keeps_to_the_budget() -> None:
    """A row branches off after each of 30 runs, as where each turn of an agent is tried twice."""
    spine = np.arange(30 * 40)
    rows = [np.concatenate([spine[: 40 * (i + 1)], np.full(200, 5000 + i)]) for i in range(30)]
    (batch,) = pack(rows, budget=10**9, share=True)
    assert batch.num_tokens == 30 * (40 + 200)
    batches = list(pack(rows, budget=2600, share=True))
    assert max(b.num_tokens for b in batches) <= 2600 and len(batches) <= 4


def test_a_prompt_longer_than_the_budget_keeps_its_responses() -> None:
    rows = [np.concatenate([np.arange(500), np.full(20, 1000 + i)]) for i in range(8)]
    (batch,) = pack(rows, budget=400, share=True)
    assert batch.num_tokens == 500 + 8 * 20


def test_a_group_may_exceed_the_budget_to_store_its_prompt_once() -> None:
    rows = [np.concatenate([np.arange(40), np.full(10, 60 + i)]) for i in range(6)]
    assert [b.num_tokens for b in pack(rows, budget=80, share=True, most=160)] == [100]
    many = [np.concatenate([np.arange(40), np.full(10, 60 + i)]) for i in range(30)]
    sizes = [b.num_tokens for b in pack(many, budget=80, share=True, most=160)]
    assert max(sizes) <= 160 and sizes[0] <= 80 and sizes[-1] > 80
    others = [np.full(30, 100), *rows, np.full(30, 200)]
    assert [b.num_tokens for b in pack(others, budget=80, share=True, most=160)] == [100, 60]


def test_rows_that_share_nothing_keep_to_the_budget() -> None:
    rows = [np.full(50, i) for i in range(4)]
    assert [b.num_tokens for b in pack(rows, budget=80, share=True, most=160)] == [50] * 4


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
