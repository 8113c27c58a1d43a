"""What a load is made of: its shape, the same for the same seed, and rows of a file."""

from pathlib import Path

import numpy as np
import pytest

from guerdon.client.calls import ModelSignature
from guerdon.errors import StartError
from load_requests import CHARACTERS_PER_TOKEN, FromFile, RandomTexts, RandomTokens, Shape

SHAPE = Shape(prompt_tokens=40, response_tokens=60, responses=4, spread=0.5, max_length=400)
TAKES_TEXT = ModelSignature("m", ("1",), "guerdon", {"sentences": "BYTES"}, {"rewards": "FP32"})


def test_the_responses_of_a_request_share_its_prompt() -> None:
    request = RandomTexts(SHAPE, seed=0).request(3)
    prompt = request.samples["prompts"][0]
    assert len(set(request.samples["texts"])) == request.num_sequences == 4
    assert all(text.startswith(prompt) for text in request.samples["texts"])
    rows = RandomTokens(SHAPE, seed=0, vocab_size=1000).request(3).samples["tokens"]
    assert len({row[:10].tobytes() for row in rows}) == 1 and len({row.tobytes() for row in rows}) == 4


def test_a_seed_makes_the_same_requests_and_each_number_another() -> None:
    def texts(seed: int, index: int) -> list[str]:
        return RandomTexts(SHAPE, seed).request(index).samples["texts"]

    assert texts(5, 7) == texts(5, 7)
    assert texts(5, 7) != texts(6, 7) and not set(texts(5, 7)) & set(texts(5, 8))
    one, other = (RandomTokens(SHAPE, 5, 1000).request(index).samples["tokens"][0][:10] for index in (7, 8))
    assert one.tolist() != other.tolist()


def test_lengths_have_the_means_that_were_asked_for() -> None:
    random = np.random.default_rng(0)
    drawn = [SHAPE.lengths(random) for _ in range(3000)]
    assert np.mean([prompt for prompt, _ in drawn]) == pytest.approx(40, rel=0.05)
    assert np.mean([lengths for _, lengths in drawn]) == pytest.approx(60, rel=0.05)
    assert np.std(np.log([lengths for _, lengths in drawn])) == pytest.approx(0.5, rel=0.1)


@pytest.mark.parametrize("longest", [1, 2, 50, 64])
def test_no_sequence_is_longer_than_it_may_be(longest: int) -> None:
    shape = Shape(40, 60, 4, 1.5, longest)
    load = RandomTokens(shape, 0, vocab_size=7)
    rows = [row for i in range(200) for row in load.request(i).samples["tokens"]]
    assert max(map(len, rows)) <= max(2, longest)
    assert all(row.min() >= 0 and row.max() < 7 for row in rows)
    assert len(load.longest().samples["tokens"][0]) == longest


def test_the_sequences_of_a_request_are_known_before_it_is_made(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "p ", "responses": ["a", "b"]}\n{"text": "alone"}\n')
    for load in (RandomTexts(SHAPE, 0), RandomTokens(SHAPE, 0, 9), FromFile(file, False, TAKES_TEXT)):
        for index in range(3):
            assert load.num_sequences(index) == load.request(index).num_sequences


def test_texts_are_about_as_long_as_their_tokens() -> None:
    load = RandomTexts(Shape(100, 100, 8, 0.0, 400), 0)
    (length,) = {len(text) for text in load.request(12).samples["texts"]}
    assert length == pytest.approx(200 * CHARACTERS_PER_TOKEN, abs=10)
    assert len(load.longest().samples["texts"][0]) == 1.25 * 400 * CHARACTERS_PER_TOKEN


def test_a_files_rows_are_requests_again_from_the_first(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "p ", "responses": ["a", "b"], "label": 3}\n{"text": "alone"}\n')
    load = FromFile(file, False, TAKES_TEXT)
    assert load.request(0).samples == {"texts": ["p a", "p b"], "prompts": ["p ", "p "], "labels": [3, 3]}
    assert load.request(1).samples == {"texts": ["alone"]}
    assert load.request(2) is load.request(0)


def test_rows_that_the_model_does_not_take_are_told_before_anything_is_sent(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "t"}\n{"prompt": "p", "response": "r"}\n')
    with pytest.raises(StartError, match="has messages, and model 'm' takes sentences"):
        FromFile(file, True, TAKES_TEXT)
    file.write_text('{"prompt": "p", "responses": []}\n')
    with pytest.raises(StartError, match="has no sample"):
        FromFile(file, False, TAKES_TEXT)
    file.write_text("nonsense\n")
    with pytest.raises(StartError, match="line 1: not valid JSON"):
        FromFile(file, False, TAKES_TEXT)
