"""The loads and requests of `make bench`: real text in cells, written as each peer reads it."""

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guerdon.core import common_prefix
from tiers import slow_but

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
DATA = Path(__file__).parents[1] / "examples/demo/heldout.jsonl"


@pytest.fixture(scope="module")
def workload() -> Any:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        import workload

        yield workload
    finally:
        sys.path.remove(str(BENCHMARKS))


@pytest.fixture(scope="module")
def chats(workload: Any) -> list[dict]:
    return workload.read_chats(DATA)


@pytest.fixture(scope="module")
def tokenizer(workload: Any, chats: list[dict]) -> Any:
    from workload import make_tokenizer

    return make_tokenizer([c["prompt"] + r for c in chats for r in c["responses"]])


def test_a_cell_has_each_prompts_own_responses_first(workload: Any, chats: list[dict], tokenizer: Any) -> None:
    cell = workload.make_cell(chats, tokenizer, "bare", 16)
    assert {len(g.rows) for g in cell.groups} == {16}
    group = next(g for g in cell.groups if g.first == 0)
    mine, others = group.texts[: len(chats[0]["responses"])], group.texts[len(chats[0]["responses"]) :]
    asked = f"Human: {chats[0]['prompt']}\n\nAssistant: "
    assert mine == [asked + r for r in chats[0]["responses"]]
    assert all(t.startswith(asked) for t in others)
    assert [t.removeprefix(asked) for t in others[:2]] == [chats[1]["responses"][0], chats[2]["responses"][0]]


@pytest.mark.parametrize(("load", "tokens"), slow_but(("short",), [("short", 180), ("long", 1_000)]))
def test_earlier_turns_make_a_prompt_as_long_as_its_load_says(
    workload: Any, chats: list[dict], tokenizer: Any, load: str, tokens: int
) -> None:
    groups = workload.make_cell(chats, tokenizer, load, 1).groups
    lengths = [g.prompt_tokens for g in groups]
    # A turn is whole, so that a prompt may pass what was wanted by a question and the fewest tokens of a reply.
    assert all(0.85 * tokens - workload.FEWEST <= n <= 1.15 * tokens + 80 for n in lengths), lengths
    assert len(set(lengths)) > 5
    rows = sorted((g.rows[0] for g in groups), key=lambda row: row.tolist())
    assert all(common_prefix(a, b) < 16 for a, b in itertools.pairwise(rows))


def test_a_response_is_cut_where_a_trainer_would_stop_it(workload: Any, tokenizer: Any) -> None:
    text = " ".join(["a reply of very many words"] * 99)
    short = workload.cut(text, tokenizer, 40)
    assert text.startswith(short) and len(tokenizer(short)["input_ids"]) == 40
    assert workload.cut(short, tokenizer, 40) == short


def test_a_cell_is_as_large_as_batches_need(workload: Any, chats: list[dict], tokenizer: Any) -> None:
    by_sequences = workload.make_cell(chats, tokenizer, "long", 16)
    assert sum(len(g.rows) for g in by_sequences.groups) == workload.SEQUENCES
    by_tokens = workload.make_cell(chats, tokenizer, "short", 1)
    mean = sum(g.num_tokens for g in by_tokens.groups[: workload.FIRST]) / workload.FIRST
    assert len(by_tokens.groups) == min(len(chats), max(round(workload.TOKENS / mean), workload.SEQUENCES))


@pytest.fixture
def groups(workload: Any) -> list[Any]:
    return [
        workload.Group([f"text {i} {j}" for j in range(3)], [np.arange(4, 9 + i + j) for j in range(3)], 3 * i, 4)
        for i in range(5)
    ]


def test_every_sequence_is_asked_for_once(workload: Any, groups: list[Any]) -> None:
    from forms import FORMS

    for form in FORMS:
        asked = list(form.requests(groups))
        numbers = [n for _, some in asked for n in some]
        assert numbers == list(range(form.most or 15))
        if form.by_prompt and form.most is None:
            assert [some for _, some in asked] == [[3 * i, 3 * i + 1, 3 * i + 2] for i in range(5)]
        elif not form.by_prompt:
            assert all(len(some) == 1 for _, some in asked)


def test_requests_hold_the_rows_and_only_the_default_pads_to_the_maximum(workload: Any, groups: list[Any]) -> None:
    from forms import FORMS, PADDED_TO_MAXIMUM
    from guerdon.wire import kserve

    def tokens_of(name: str) -> tuple[np.ndarray, np.ndarray]:
        form = next(f for f in FORMS if f.name == name)
        head, _, body = next(iter(form.requests(groups)))[0].partition(b"\r\n\r\n")
        length = int(head.split(b"Inference-Header-Content-Length: ")[1].split(b"\r\n")[0])
        inputs = kserve.decode(body, length).inputs
        return inputs["tokens"].data, inputs["sequence_lengths"].data

    tokens, lengths = tokens_of("guerdon, one request per prompt")
    assert tokens.shape == (3, 7) and lengths[:, 0].tolist() == [5, 6, 7]
    assert [row[:n].tolist() for row, n in zip(tokens, lengths[:, 0], strict=True)] == [
        r.tolist() for r in groups[0].rows
    ]
    assert tokens_of(PADDED_TO_MAXIMUM)[0].shape == (3, 2048)


def test_answers_are_read_as_scores(workload: Any) -> None:
    from forms import read_labels, read_pooled, read_scores
    from load import Answer

    def answer(body: Any) -> Answer:
        return Answer(0, 200, json.dumps(body).encode(), None, 0.1)

    assert read_scores(answer({"scores": [0.5, -1.0]})) == [0.5, -1.0]
    x = 0.7
    p = np.exp(x) / (np.exp(x) + np.exp(-x))
    row = [{"label": "LABEL_1", "score": 1 - p}, {"label": "LABEL_0", "score": p}]
    assert read_labels(answer({"data": [row]})) == pytest.approx([x])
    assert read_pooled(answer({"data": [{"probs": [0.5]}, {"probs": [-2.0]}]})) == [0.5, -2.0]
