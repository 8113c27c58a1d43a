"""Long texts in parts: cut wherever that may be, the parts' tokens are the whole text's, for each kind of tokenizer."""

import functools
import itertools
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from guerdon.engine.checkpoint import cuts
from guerdon.engine.checkpoint.cuts import Cuts, Uncut
from tiers import slow_but

LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "the ring of the reader is on the table, and 1234 of them are 5 thing's ends",
    "over and over  the same\n\nthing\t(again) über naïve 日本語 の テキスト",
    "aaa aab aba abb baa bab bba bbb a b ab ba aaaa bbbb 12 123 1234 12345",
] * 5
SPECIALS = [AddedToken("<s>", special=True), AddedToken("<mask>", lstrip=True, special=True), AddedToken("  ")]
NUM_SPECIALS = {"bert": 2, "unigram": 1}  # with more, tokenizers itself panics where Strip leaves nothing


def byte_level(pattern: str | None) -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=pattern is None)
    if pattern is not None:
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
        byte = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        made.pre_tokenizer = pre_tokenizers.Sequence([split, byte])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    return made


def sentencepiece(*, writes: bool) -> Tokenizer:
    """As Llama 2 has it, and Gemma without the space before a text: one word for BPE, unknown characters as bytes."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=200, show_progress=False))
    vocab = trained.get_vocab()
    merges = [(a, b) for b in sorted(vocab) for a in sorted(vocab) if a + b in vocab]
    for token in ["<unk>", "▁", *(f"<0x{i:02X}>" for i in range(256))]:
        vocab.setdefault(token, len(vocab))
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] if writes else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    if not writes:
        made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    spaces = normalizers.Replace(Regex(" {2,}"), " ")
    made.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.NFKC(), spaces])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    made.train_from_iterator(CORPUS, trainers.UnigramTrainer(vocab_size=120, unk_token="<unk>", show_progress=False))
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]"], show_progress=False)
    )
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    "gpt2": functools.partial(byte_level, None),
    "llama3": functools.partial(byte_level, LLAMA_3),
    "llama2": functools.partial(sentencepiece, writes=True),
    "gemma": functools.partial(sentencepiece, writes=False),
    "unigram": unigram,
    "bert": wordpiece,
}
WORDS = [
    "the", "a", "b", "ab", "12", "1234", "ring's", " ", "  ", "\n", ", ", "<s>", "<mask>", "▁", "ﹰ", "é", "日本", "'s",
]  # fmt: skip
TEXTS = st.lists(st.sampled_from(WORDS) | st.text(max_size=3), max_size=40).flatmap(
    lambda words: st.sampled_from([" ".join(words), "".join(words)])
)


@functools.cache
def tokenizer(kind: str) -> Tokenizer:
    made = KINDS[kind]()
    made.add_tokens(SPECIALS[: NUM_SPECIALS.get(kind)])
    return made


@pytest.mark.parametrize("kind", slow_but([*KINDS][::3], KINDS))
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, from_end=st.booleans(), piece=st.integers(1, 20))
def test_parts_have_the_tokens_of_the_whole(kind: str, text: str, from_end: bool, piece: int) -> None:
    made = tokenizer(kind)
    how = Cuts.of(made)
    assert how is not None
    before, cuts.PIECE = cuts.PIECE, piece
    try:
        parts = [*how.parts(text, 10_000, from_end=from_end)]
    finally:
        cuts.PIECE = before
    ids = [made.encode(part, add_special_tokens=False).ids for part in (reversed(parts) if from_end else parts)]
    assert [*itertools.chain(*ids)] == made.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_many_and_about_as_long_as_they_should_be(kind: str) -> None:
    how = Cuts.of(tokenizer(kind))
    assert how is not None
    text = "the ring, of 12 " * 50_000
    for from_end in (False, True):
        sizes = [len(part) for part in how.parts(text, cuts.PIECE + 100, from_end=from_end)]
        assert sum(sizes) >= len(text) - len(sizes)
        assert all(cuts.PIECE - 1 <= size < cuts.PIECE + 100 for size in sizes[:-1])


def test_a_text_that_cannot_be_cut_is_refused_beyond_the_most() -> None:
    how = Cuts.of(tokenizer("gpt2"))
    assert how is not None
    for from_end in (False, True):
        assert len([*how.parts("x" * 100_000, 100_000, from_end=from_end)]) == 1
        with pytest.raises(Uncut):
            list(how.parts("x" * 100_001, 100_000, from_end=from_end))


def unlike(change: Callable[[Tokenizer], None], kind: str = "gpt2") -> Tokenizer:
    made = KINDS[kind]()
    change(made)
    return made


def set_normalizer(step: normalizers.Normalizer) -> Callable[[Tokenizer], None]:
    return lambda made: setattr(made, "normalizer", step)


def set_pre_tokenizer(step: pre_tokenizers.PreTokenizer) -> Callable[[Tokenizer], None]:
    return lambda made: setattr(made, "pre_tokenizer", step)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("gpt2", set_normalizer(normalizers.Replace(Regex("a b"), "c"))),
        ("gpt2", set_normalizer(normalizers.Replace(" ", "\n"))),
        ("gpt2", set_normalizer(normalizers.Strip())),
        ("gpt2", set_normalizer(normalizers.Prepend("▁"))),
        ("gpt2", set_pre_tokenizer(pre_tokenizers.Split(Regex(r"\w+ \w+"), "isolated"))),
        ("gpt2", set_pre_tokenizer(pre_tokenizers.Split(Regex(r"\p{L}+"), "removed"))),
        ("gpt2", set_pre_tokenizer(pre_tokenizers.ByteLevel(use_regex=False))),
        ("gpt2", lambda made: made.add_tokens(["a b"])),
        ("gpt2", lambda made: made.add_tokens(["Human:"])),
        ("gpt2", lambda made: setattr(made.model, "dropout", 0.1)),
        ("llama2", lambda made: made.add_tokens(["e▁t"])),
        ("llama2", lambda made: setattr(made.model, "ignore_merges", True)),
        ("unigram", set_pre_tokenizer(pre_tokenizers.Metaspace(prepend_scheme="first"))),
        ("unigram", set_pre_tokenizer(pre_tokenizers.Metaspace(split=False))),
        ("bert", lambda made: made.add_tokens(["  "])),
        ("bert", set_pre_tokenizer(pre_tokenizers.Digits())),
    ],
)
def test_texts_are_not_cut_for_tokenizers_that_are_not_known_to_be_local(
    kind: str, change: Callable[[Tokenizer], None]
) -> None:
    assert Cuts.of(KINDS[kind]()) is not None
    assert Cuts.of(unlike(change, kind)) is None
