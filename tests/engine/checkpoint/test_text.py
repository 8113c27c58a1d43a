"""Text to tokens: nothing added, no double BOS, bad rows named, many threads at once."""

from concurrent.futures import ThreadPoolExecutor
from functools import reduce
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer, ByT5Tokenizer

import zoo
from guerdon.core import Truncation
from guerdon.engine.checkpoint import cuts
from guerdon.engine.checkpoint import text as text_module
from guerdon.engine.checkpoint.text import Steps, TextEncoder
from guerdon.errors import CheckpointError, InvalidRequest

Side = Literal["left", "right"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def encoder(folder: Path) -> TextEncoder:
    made = TextEncoder.load(folder)
    assert made is not None
    return made


def test_text_is_encoded_as_it_is(folder: Path, encoder: TextEncoder) -> None:
    reference = AutoTokenizer.from_pretrained(folder)
    text = "the ring</s> über\n"
    (ids,) = encoder.encode([text])
    assert ids.dtype == np.int64
    assert ids.tolist() == reference(text, add_special_tokens=False)["input_ids"]
    assert reference(text)["input_ids"] == [zoo.BOS, *ids.tolist()]
    assert zoo.EOS in ids


def test_rows_keep_their_lengths_and_an_empty_text_is_empty(encoder: TextEncoder) -> None:
    assert [len(ids) for ids in encoder.encode(["ab", "", "abcd"])] == [2, 0, 4]


def test_messages_have_the_templates_bos_once(folder: Path, encoder: TextEncoder) -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    (ids,) = encoder.encode_messages([messages])
    assert ids.tolist().count(zoo.BOS) == 1
    reference = AutoTokenizer.from_pretrained(folder).apply_chat_template(messages, tokenize=True)
    assert ids.tolist() == reference["input_ids"]


def test_named_templates_without_a_default_leave_texts(tmp_path: Path) -> None:
    folder = zoo.tokenizer(tmp_path, chat_template=None)
    zoo.configure(folder, "tokenizer_config.json", chat_template=[{"name": "tool_use", "template": "x"}])
    encoder = TextEncoder.load(folder)
    assert encoder is not None and not encoder.takes_messages and encoder.encode(["a text"])[0].tolist()


@pytest.mark.parametrize(
    ("conversation", "says"),
    [
        ([], "non-empty list"),
        ({"role": "user"}, "non-empty list"),
        (["hello"], "message 0 is a str"),
        ([{"content": "x"}], "message 0 needs a role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 needs a content"),
        ([{"role": "user", "content": 3}], "message 0 needs a content"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0, part 0 is no text"),
        ([{"role": "wizard", "content": "x"}], "unknown role wizard"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
        ([{"role": "user", "content": "x", "deep": reduce(lambda deep, _: [deep], range(1000), [])}], "refuses"),
    ],
)
def test_a_bad_conversation_fails_in_its_place(encoder: TextEncoder, conversation: object, says: str) -> None:
    fine = [{"role": "user", "content": "x"}]
    first, wrong, last = encoder.encode_messages([fine, conversation, fine])
    assert isinstance(wrong, InvalidRequest)
    assert says in str(wrong)
    assert first.tolist() == last.tolist() == encoder.encode_messages([fine])[0].tolist()


def test_parts_are_read_as_their_text(encoder: TextEncoder) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    calls = [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": [{"type": "function"}]}]
    one, same, called, empty = encoder.encode_messages(
        [
            [{"role": "user", "content": "a\nb"}],
            [{"role": "user", "content": parts}],
            calls,
            [calls[0], {"role": "assistant", "content": ""}],
        ]
    )
    assert one.tolist() == same.tolist()
    assert called.tolist() == empty.tolist()


def test_a_lone_surrogate_fails_in_its_place(encoder: TextEncoder) -> None:
    fine, same, wrong = encoder.encode(["fine", "fine", "x\udfff"])
    assert fine.tolist() == same.tolist()
    assert isinstance(wrong, InvalidRequest)
    assert "character 1" in str(wrong)


@pytest.fixture(params=["bos", "both", "python"])
def adding(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A tokenizer that adds a BOS, one that adds an EOS as well, and one in plain Python that adds an EOS."""
    if request.param == "python":
        ByT5Tokenizer().save_pretrained(tmp_path)
        return tmp_path
    made = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path))
    if request.param == "both":
        around = [("<s>", zoo.BOS), ("</s>", zoo.EOS)]
        made.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=around
        )
        made.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [2, 3, 5, 50, None])
def test_truncation_leaves_room_for_special_tokens_as_transformers_does(
    adding: Path, side: Literal["left", "right"], max_tokens: int | None
) -> None:
    reference = AutoTokenizer.from_pretrained(adding, truncation_side=side)
    encoder = TextEncoder.load(adding)
    assert encoder is not None
    texts = ["the abcdef ghi", "a", ""]
    made = encoder.encode(texts, True, Truncation(max_tokens, side))
    expected = reference(texts, truncation=max_tokens is not None, max_length=max_tokens)["input_ids"]
    if max_tokens == reference.num_special_tokens_to_add():
        assert all("leaves nothing of the text" in str(error) for error in made[:2])
        made, expected = made[2:], expected[2:]
    assert [ids.tolist() for ids in made] == expected


def test_special_tokens_that_find_no_room_fail_their_text(adding: Path) -> None:
    encoder = TextEncoder.load(adding)
    assert encoder is not None
    for most in range(AutoTokenizer.from_pretrained(adding).num_special_tokens_to_add() + 1):
        (error,) = encoder.encode(["abc"], True, Truncation(most, "left"))
        assert f"truncation to {most} tokens leaves nothing of the text" in str(error)


def test_a_bos_that_the_text_has_is_not_doubled(encoder: TextEncoder) -> None:
    bare, having, twice = encoder.encode(["ab", "<s>ab", "<s><s>ab"], True)
    assert bare.tolist() == having.tolist() == [zoo.BOS, *encoder.encode(["ab"])[0].tolist()]
    assert twice.tolist() == [zoo.BOS, *having.tolist()]  # what the text has besides, it keeps
    assert encoder.encode(["<s><s>ab"])[0].tolist() == twice.tolist()
    (cut,) = encoder.encode(["<s>abcdef"], True, Truncation(3, "right"))
    assert cut.tolist().count(zoo.BOS) == 1


@pytest.mark.parametrize("ends_with_bos", [False, True])
def test_a_bos_in_the_text_stays_if_the_tokenizer_adds_none(tmp_path: Path, ends_with_bos: bool) -> None:
    made = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path))
    behind = processors.TemplateProcessing(single="$A <s>", special_tokens=[("<s>", zoo.BOS)])
    made.backend_tokenizer.post_processor = behind if ends_with_bos else processors.ByteLevel()
    made.save_pretrained(tmp_path)
    encoder, reference = TextEncoder.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert encoder is not None
    (ids,) = encoder.encode(["<s><s>ab"], True)
    assert ids.tolist() == reference("<s><s>ab")["input_ids"]
    assert ids.tolist().count(zoo.BOS) == 2 + ends_with_bos


def test_many_threads_encode_at_once(encoder: TextEncoder) -> None:
    texts = [f"the answer number {i} is on the ring " * (1 + i % 7) for i in range(64)]
    expected = [ids.tolist() for ids in encoder.encode(texts)]
    with ThreadPoolExecutor(8) as pool:
        for made in pool.map(encoder.encode, [texts] * 24):
            assert [ids.tolist() for ids in made] == expected


def test_special_tokens_and_separators(encoder: TextEncoder) -> None:
    assert (encoder.eos_token_id, encoder.pad_token_id) == (zoo.EOS, zoo.PAD)
    assert encoder.has_token("<extra_0>")
    assert not encoder.has_token("<extra_1>")
    assert len(encoder.separator_ids("\n")) == 1
    assert len(encoder.separator_ids("\n\n")) == 2


def test_a_broken_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    zoo.tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer .* cannot be read") as caught:
        TextEncoder.load(tmp_path)
    assert "\n" not in str(caught.value)


LONG = "the ring</s> of the über reader 12 " * 1000
"""35,000 characters: several pieces."""


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """An eighth of the limits for long texts."""
    monkeypatch.setattr(cuts, "PIECE", cuts.PIECE // 8)
    monkeypatch.setattr(text_module, "_MOST_AT_ONCE", text_module._MOST_AT_ONCE // 8)
    monkeypatch.setattr(text_module, "_TRIMMED", text_module._TRIMMED // 8)


@pytest.fixture(scope="module")
def around(tmp_path_factory: pytest.TempPathFactory) -> TextEncoder:
    """An encoder that adds a BOS before a text and an EOS after it."""
    made = zoo.tokenizer(tmp_path_factory.mktemp("around"))
    tokenizer = AutoTokenizer.from_pretrained(made)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", zoo.BOS), ("</s>", zoo.EOS)]
    )
    tokenizer.save_pretrained(made)
    encoder = TextEncoder.load(made)
    assert encoder is not None
    return encoder


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("text", [LONG, "<s>" + LONG, LONG[:-1] + "x" * 12_000])
@pytest.mark.parametrize(("side", "most"), [("left", 2), ("left", 5000), ("right", 5000), ("right", 10**6), (None, 0)])
def test_a_long_text_has_the_tokens_that_transformers_gives_it(
    around: TextEncoder, adds: bool, text: str, side: Side | None, most: int
) -> None:
    reference = AutoTokenizer.from_pretrained(around._tokenizer.name_or_path, truncation_side=side or "right")
    ids = reference(text, add_special_tokens=adds, truncation=side is not None, max_length=most or None)["input_ids"]
    ids = ids[1:] if adds and ids[:2] == [zoo.BOS] * 2 else ids
    truncation = None if side is None else Truncation(most, side)
    (row,) = around.encode([text], adds, truncation)
    if most == 2 and adds:
        assert "truncation to 2 tokens leaves nothing of the text beside the 2 special tokens" in str(row)
        return
    assert row.dtype == np.int64 and row.tolist() == ids


def read_characters(encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Gets the number of characters of each call of the tokenizer."""
    ids, seen = encoder._ids, []

    def counting(texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        seen.append(sum(map(len, texts)))
        return ids(texts, add_special_tokens)

    monkeypatch.setattr(encoder, "_ids", counting)
    return seen


def finish(steps: Steps) -> tuple[int, list[np.ndarray | InvalidRequest]]:
    """The number of yields, and the rows."""
    num_steps = 0
    while True:
        try:
            next(steps)
        except StopIteration as e:
            return num_steps, e.value
        num_steps += 1


@pytest.mark.parametrize("side", ["left", "right", None])
def test_a_text_that_is_too_long_is_tokenised_only_as_far_as_needed(
    encoder: TextEncoder, side: Side | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = read_characters(encoder, monkeypatch)
    steps = encoder.encode_in_steps(["a", LONG, "b"], False, None if side is None else Truncation(100, side), 100)
    num_steps, rows = finish(steps)
    assert num_steps == 2 and len(seen) == 3 and max(seen) < cuts.PIECE + 100
    if side is None:
        assert str(rows[1]) == "the sample has more than 100 tokens, the most that fit; shorten it"
    else:
        assert len(rows[1]) == 100


def test_nothing_is_tokenised_behind_a_wrong_text_that_fails_the_request(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = read_characters(encoder, monkeypatch)
    texts = ["a", LONG, *[LONG] * 20, "b"]
    _, rows = finish(encoder.encode_in_steps(texts, False, None, 100, is_whole=True))
    assert len(seen) == 2 and sum(seen) < cuts.PIECE + 100
    assert not isinstance(rows[0], InvalidRequest)
    assert [str(row) for row in rows[1:]] == ["the sample has more than 100 tokens, the most that fit; shorten it"] * 22


def test_nothing_but_a_stretch_that_cannot_be_cut_is_tokenised_at_once(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = read_characters(encoder, monkeypatch)
    texts = [LONG, *["the ring"] * 2500, "x" * (1 << 17), "x" * (1 << 17) + "x"]
    rows = encoder.encode(texts)
    assert isinstance(rows[-1], InvalidRequest) and "send a shorter text" in str(rows[-1])
    assert not any(isinstance(row, InvalidRequest) for row in rows[:-1])
    assert sorted(seen)[-1] == 1 << 17 and sorted(seen)[-2] < cuts.PIECE + 100


def test_memory_goes_back_to_the_system_after_the_longest_texts_alone(
    encoder: TextEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    trimmed: list[None] = []
    monkeypatch.setattr(text_module, "trim", lambda: trimmed.append(None))
    encoder.encode([LONG, LONG])
    assert not trimmed
    encoder.encode([LONG * 4])
    assert len(trimmed) == 1


def test_a_slow_tokenizer_takes_a_text_up_to_the_most() -> None:
    slow = TextEncoder(ByT5Tokenizer())
    fits, refused = slow.encode(["x " * 5000, "x " * 75_000])
    assert len(fits) == 10_000 and isinstance(refused, InvalidRequest)


def test_long_conversations_are_read_in_steps(encoder: TextEncoder) -> None:
    conversations = [[{"role": "user", "content": text}] for text in ("the ring", LONG, "of")]
    whole = encoder._tokenizer.apply_chat_template(conversations, tokenize=True)["input_ids"]
    num_steps, rows = finish(encoder.encode_messages_in_steps([*conversations, []]))
    assert num_steps >= 5
    assert [row.tolist() for row in rows[:3] if isinstance(row, np.ndarray)] == whole
    assert isinstance(rows[3], InvalidRequest)
    _, cut = finish(encoder.encode_messages_in_steps(conversations, Truncation(50, "left"), 50))
    assert [row.tolist() for row in cut if isinstance(row, np.ndarray)] == [ids[-50:] for ids in whole]
