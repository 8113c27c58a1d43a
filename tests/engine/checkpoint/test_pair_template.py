"""Pairs of texts as tokens: what transformers' `tokenizer(a, b)` gives, for templates of every shape and long texts."""

import itertools
import logging
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer, ByT5Tokenizer, PreTrainedTokenizerFast

import zoo
from guerdon.core import Sequence, Truncation
from guerdon.engine.checkpoint import cuts
from guerdon.engine.checkpoint.pair_template import PairTemplate, longest_first
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.engine.checkpoint.tokenizer_files import load_tokenizer
from guerdon.errors import InvalidRequest

AROUND = [("<s>", zoo.BOS), ("</s>", zoo.EOS), ("<extra_0>", 3)]
TEMPLATES = {
    "BERT": "<s> $A </s> $B:1 </s>:1",
    "RoBERTa": "<s> $A </s> </s> $B </s>",
    "Llama": "<s> $A <s>:1 $B:1",
    "T5": "$A </s> $B </s>",
    "XLNet without its third type": "$A <extra_0> $B:1 <extra_0>:1 <s>:1",
    "nothing": "$A $B",
    "types only": "$A $B:1",
}
UNKNOWN = {"swapped": "<s> $B $A", "types back": "<s>:1 $A $B:1", "third type": "$A $B:1 <s>:2"}
PAIRS = [("a", "b"), ("the ring", "of the"), ("über 🙂", "</s>"), ("", "x"), ("x", ""), ("a a", "a")]


def tokenizer(folder: Path, template: str, names: tuple[str, ...] = ("input_ids", "token_type_ids")) -> Any:
    made = AutoTokenizer.from_pretrained(zoo.tokenizer(folder)).backend_tokenizer
    made.post_processor = processors.TemplateProcessing(single="<s> $A", pair=template, special_tokens=AROUND)
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", model_input_names=[*names])
    fast.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def assert_same(row: Sequence | InvalidRequest, made: Any) -> None:
    assert isinstance(row, Sequence)
    assert row.tokens.dtype == np.int64 and row.tokens.tolist() == made["input_ids"]
    start = len(row.tokens) if row.second_start is None else row.second_start
    types = [int(i >= start) for i in range(len(row.tokens))]
    assert types == (made.get("token_type_ids") or [0] * len(types))


@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("names", [("input_ids",), ("input_ids", "token_type_ids")])
@pytest.mark.parametrize("template", TEMPLATES)
def test_ids_and_types_are_those_of_transformers(
    template: str, names: tuple[str, ...], adds: bool, tmp_path: Path
) -> None:
    reference = tokenizer(tmp_path, TEMPLATES[template], names)
    encoder = TextEncoder.load(tmp_path)
    assert encoder is not None
    for pair, row in zip(PAIRS, encoder.encode_pairs(PAIRS, adds), strict=True):
        assert_same(row, reference(*pair, add_special_tokens=adds))


@pytest.mark.parametrize("template", UNKNOWN)
def test_a_template_of_another_shape_is_refused(template: str, tmp_path: Path) -> None:
    tokenizer(tmp_path, UNKNOWN[template])
    encoder = TextEncoder.load(tmp_path)
    assert encoder is not None
    (refused,), (plain,) = encoder.encode_pairs([("a", "b")], True), encoder.encode_pairs([("a", "b")])
    assert "has no template for pairs" in str(refused) and isinstance(plain, Sequence)


def test_a_tokenizer_that_takes_no_pairs_has_no_template() -> None:
    class Single:
        is_fast = False

        def __call__(self, *texts: str, add_special_tokens: bool) -> Any:
            raise ValueError("no pairs")

    assert PairTemplate.of(Single(), lambda text: [1], add_special_tokens=True) is None


@pytest.mark.parametrize("adds", [False, True])
def test_a_tokenizer_in_plain_python(adds: bool, tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    encoder, reference = TextEncoder.load(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    assert encoder is not None
    pairs = [pair for pair in PAIRS if pair[1] not in ("", "</s>")]  # ByT5 has rules of its own for these
    for pair, row in zip(pairs, encoder.encode_pairs(pairs, adds), strict=True):
        assert_same(row, reference(*pair, add_special_tokens=adds))


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_is_that_of_transformers(side: Literal["left", "right"], tmp_path: Path) -> None:
    reference = tokenizer(tmp_path, TEMPLATES["BERT"])
    reference.truncation_side = side
    encoder = TextEncoder.load(tmp_path)
    assert encoder is not None
    pairs = [("abcdefgh"[:i], "stuvwxyz"[:j]) for i in range(9) for j in range(1, 9)]
    for most in (0, 2, 3, 4, 5, 8, 9, 14, 30):
        for pair, row in zip(pairs, encoder.encode_pairs(pairs, True, Truncation(most, side)), strict=True):
            made = reference(*pair, truncation=True, max_length=most) if most >= 3 else None
            if made is None or 1 not in made.sequence_ids():
                assert "leaves nothing of the" in str(row)
            else:
                assert_same(row, made)


def test_the_longer_text_is_cut_first_as_by_tokenizers(tmp_path: Path) -> None:
    reference = tokenizer(tmp_path, TEMPLATES["nothing"])
    for first, second, room in itertools.product(range(8), range(1, 8), range(1, 16)):
        made = reference("a" * first, "b" * second, truncation=True, max_length=room).sequence_ids()
        assert longest_first(first, second, room) == (made.count(0), made.count(1))


LONG = "the ring</s> of the über reader 12 " * 1000


@pytest.mark.parametrize("side", ["left", "right", None])
@pytest.mark.parametrize("pair", [(LONG, "the ring"), ("the ring", LONG), (LONG, LONG[7:]), (LONG, ""), ("", LONG)])
def test_long_texts_are_read_no_further_than_needed(
    pair: tuple[str, str], side: Literal["left", "right"] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuts, "PIECE", 1 << 12)
    reference = tokenizer(tmp_path, TEMPLATES["BERT"])
    encoder, seen = TextEncoder.load(tmp_path), []
    assert encoder is not None
    encode = encoder._ids
    monkeypatch.setattr(
        encoder, "_ids", lambda texts, *adds: (seen.append(sum(map(len, texts))), encode(texts, *adds))[1]
    )
    if side is None:
        (row,) = encoder.encode_pairs([pair], True)
        assert_same(row, reference(*pair))
        return
    reference.truncation_side = side
    (row,) = encoder.encode_pairs([pair], True, Truncation(101, side))
    if min(map(len, pair)) < cuts.PIECE:
        assert_same(row, reference(*pair, truncation=True, max_length=101))
    else:  # transformers takes a minute
        kept = slice(-49, None) if side == "left" else slice(49)
        first, second = (reference(text, add_special_tokens=False)["input_ids"][kept] for text in pair)
        assert isinstance(row, Sequence) and row.second_start == 51
        assert row.tokens.tolist() == [zoo.BOS, *first, zoo.EOS, *second, zoo.EOS]
    assert max(seen) < cuts.PIECE + 100 and sum(seen) < 2.2 * cuts.PIECE


def test_a_bad_text_fails_its_pairs_alone_and_equal_texts_are_read_once(tmp_path: Path) -> None:
    tokenizer(tmp_path, TEMPLATES["BERT"])
    encoder, seen = TextEncoder.load(tmp_path), []
    assert encoder is not None
    encode = encoder._ids
    encoder._ids = lambda texts, *adds: (seen.extend(texts), encode(texts, *adds))[1]  # type: ignore[method-assign]
    one, other, bad, worse = encoder.encode_pairs([("a", "b"), ("a", "c"), ("a", "\udfff"), ("\ud800", "b")], True)
    assert isinstance(one, Sequence) and isinstance(other, Sequence)
    assert all("not valid Unicode" in str(error) for error in (bad, worse))
    assert sorted(seen) == ["a", "b", "c"]


TURNS = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
LLAMA = (
    "{%- if not date_string is defined %}{%- if strftime_now is defined %}"
    "{%- set date_string = strftime_now('%d %b %Y') %}{%- else %}{%- set date_string = '26 Jul 2024' %}{%- endif %}"
    "{%- endif %}Today Date: {{ date_string }}\n" + TURNS
)
DATE = "prints the date (strftime_now)"


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (TURNS, ""),
        (LLAMA, DATE),
        ("{{ strftime_now('%H:%M:%S') }}" + TURNS, DATE),
        ("{% if messages[0]['role'] == 'system' %}{{ strftime_now('%Y') }}{% endif %}" + TURNS, DATE),
        ("{% if tools %}{{ strftime_now('%Y') }}{% endif %}" + TURNS, f"{DATE} in some conversations"),
        ("{% if add_generation_prompt %}{{ strftime_now('%Y') }}{% endif %}" + TURNS, DATE),
        ("{{ ['a', 'b', 'c', 'd'] | random }}" + TURNS, "prints random text"),
        ("{{ lipsum() }}" + TURNS, "prints random text"),
        ("{{ namespace }}" + TURNS, ""),
        ("{{ cycler('a') }}" + TURNS, "prints addresses in memory"),
        ("{{ raise_exception('no') }}", ""),
        ("{% set my_strftime_now = 1 %}" + TURNS, ""),
    ],
)
def test_what_changes_between_two_renderings_is_named(
    template: str, found: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zoo.tokenizer(tmp_path, chat_template=template)
    with caplog.at_level(logging.WARNING):
        proof = load_tokenizer(folder).proofs[1]
        load_tokenizer(folder, warns=False)
    lines = [record.getMessage() for record in caplog.records if record.name.startswith("guerdon")]
    if not found:
        assert proof == "the chat template prints no date" and not lines
        return
    assert proof == f"the chat template {found}: the same messages score differently another time"
    assert [line.split("; ")[0] for line in lines] == [f"{folder}: the chat template {found}"]
    assert "chat_template.jinja" in lines[0]


def test_without_a_template_nothing_is_said_of_one(tmp_path: Path) -> None:
    assert len(load_tokenizer(zoo.tokenizer(tmp_path, chat_template=None)).proofs) == 1
