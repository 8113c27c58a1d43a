"""Text to tokens: nothing added, no double BOS, bad rows named, many threads at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, ByT5Tokenizer

import zoo
from guerdon.engine.text import TextEncoder
from guerdon.errors import CheckpointError, InvalidRequest


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


@pytest.mark.parametrize(
    ("conversation", "says"),
    [
        ([], "non-empty list"),
        ({"role": "user"}, "non-empty list"),
        (["hello"], "message 0 is a str"),
        ([{"content": "x"}], "message 0 needs a role"),
        ([{"role": "user", "content": "x"}, {"role": "user"}], "message 1 needs a content"),
        ([{"role": "user", "content": 3}], "message 0 needs a content"),
        ([{"role": "wizard", "content": "x"}], "unknown role wizard"),
        ([{"role": "user", "content": "\ud800"}], "not valid Unicode"),
    ],
)
def test_a_bad_conversation_fails_in_its_place(encoder: TextEncoder, conversation: object, says: str) -> None:
    fine = [{"role": "user", "content": "x"}]
    first, wrong, last = encoder.encode_messages([fine, conversation, fine])
    assert isinstance(wrong, InvalidRequest)
    assert says in str(wrong)
    assert first.tolist() == last.tolist() == encoder.encode_messages([fine])[0].tolist()


def test_a_lone_surrogate_fails_in_its_place(encoder: TextEncoder) -> None:
    fine, same, wrong = encoder.encode(["fine", "fine", "x\udfff"])
    assert fine.tolist() == same.tolist()
    assert isinstance(wrong, InvalidRequest)
    assert "character 1" in str(wrong)


def test_without_a_template_it_takes_no_messages(tmp_path: Path) -> None:
    assert not TextEncoder.load(zoo.tokenizer(tmp_path, chat_template=None)).takes_messages


def test_many_threads_encode_at_once(encoder: TextEncoder) -> None:
    texts = [f"the answer number {i} is on the ring " * (1 + i % 7) for i in range(64)]
    expected = [ids.tolist() for ids in encoder.encode(texts)]
    with ThreadPoolExecutor(8) as pool:
        for made in pool.map(encoder.encode, [texts] * 24):
            assert [ids.tolist() for ids in made] == expected


def test_a_tokenizer_in_plain_python_works_too(tmp_path: Path) -> None:
    ByT5Tokenizer().save_pretrained(tmp_path)
    (ids,) = TextEncoder.load(tmp_path).encode(["abc"])
    assert ids.tolist() == [100, 101, 102]


def test_special_tokens_and_separators(encoder: TextEncoder) -> None:
    assert (encoder.eos_token_id, encoder.pad_token_id) == (zoo.EOS, zoo.PAD)
    assert encoder.has_token("<extra_0>")
    assert not encoder.has_token("<extra_1>")
    assert len(encoder.separator_ids("\n")) == 1
    assert len(encoder.separator_ids("\n\n")) == 2


def test_a_folder_without_a_tokenizer_has_none(tmp_path: Path) -> None:
    assert TextEncoder.load(tmp_path) is None


def test_a_broken_tokenizer_is_one_clear_error(tmp_path: Path) -> None:
    zoo.tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer .* cannot be read") as caught:
        TextEncoder.load(tmp_path)
    assert "\n" not in str(caught.value)
