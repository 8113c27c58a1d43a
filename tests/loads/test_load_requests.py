"""The requests of a load, and its summary."""

import dataclasses
import io
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from guerdon.client.calls import ModelSignature
from guerdon.errors import StartError
from guerdon.server.metrics import Metrics
from load_generator import NOT_SENT, Answer
from load_requests import CHARACTERS_PER_TOKEN, FromFile, RandomTexts, RandomTokens, Shape
from load_summary import Work, check_bounds, notes, parse_counters, summarise, table, work_between

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


GOOD = Answer(sent_s=0.0, seconds=0.5, num_sequences=8, num_tokens=80, queue_s=0.1, compute_s=0.2)


def counters(model: str, received: float, computed: float, batches: int = 1) -> Metrics:
    """A server's metrics, as the server itself keeps them."""
    metrics = Metrics()
    metrics.add("guerdon_received_tokens", received, model)
    for _ in range(batches):
        metrics.batch(model, 6, int(computed / batches), 0.1)
    return metrics


def test_the_servers_own_text_is_read() -> None:
    before = parse_counters(counters('a"b\\', 100, 60).render().decode())
    after = parse_counters(counters('a"b\\', 300, 160, 2).render().decode())
    (model,) = {name for name, _ in after if name}
    assert work_between(before, after, model) == Work(model, 200, 100, 1, 6)


def test_a_sum_counts_what_all_its_models_do() -> None:
    one, other = (parse_counters(counters(name, 50, 40).render().decode()) for name in ("helpful", "safe"))
    assert work_between(Counter(), one + other, "total") == Work("", 100, 80, 2, 12)
    assert work_between(Counter(), one + other, "safe") == Work("safe", 50, 40, 1, 6)


def test_no_work_is_reported_for_a_restarted_server_or_one_without_counters() -> None:
    more, less = (parse_counters(counters("m", n, n).render().decode()) for n in (100, 50))
    assert work_between(more, less, "m") is None
    assert work_between(None, more, "m") is None and work_between(more, None, "m") is None
    assert work_between(more, more, "m") is None


def test_failed_samples_count_towards_neither_throughput_nor_latency() -> None:
    lost = Answer(0.0, 9.0, 8, 80, 8, error="Overloaded", text="the queue is full")
    partly = dataclasses.replace(GOOD, num_failed=2, error="SampleFailed", text="not finite")
    summary = summarise([GOOD, partly, lost], None, 0.5)
    assert (summary.requests, summary.answered, summary.sequences, summary.failed_sequences) == (3, 2, 14, 10)
    assert summary.seconds == 9.0 and summary.sequences_per_s == pytest.approx(14 / 9)
    assert summary.latency is not None and summary.latency.max == 500
    assert summary.received_tokens == 160 and summary.has_failed
    assert {failure.kind: failure.count for failure in summary.failures} == {"Overloaded": 1, "SampleFailed": 1}


def test_without_answers_no_bound_holds_and_no_number_is_made_up() -> None:
    summary = summarise([Answer(0.0, 1.0, 8, None, 8, error="Unreachable", text="gone")], None, 0.0)
    summary.checks = check_bounds(summary, 100, 0.1)
    assert summary.latency is None and summary.received_tokens is None
    assert [check.holds for check in summary.checks] == [False, False]
    told = table(summary, "heading", "load", io.StringIO())
    assert "Unreachable 1 times, first: gone" in told and "is nothing" in told and "\x1b" not in told


def test_times_that_a_server_does_not_report_are_absent() -> None:
    summary = summarise([dataclasses.replace(GOOD, queue_s=0.0, compute_s=0.0)], None, 0.0)
    assert summary.queue is None and summary.compute is None
    assert "server's queue" not in table(summary, "", "", io.StringIO())


def test_a_client_at_its_limit_says_so() -> None:
    assert not list(notes(summarise([GOOD], None, 0.1)))
    (note,) = notes(summarise([GOOD], None, 0.98))
    assert "0.98 cores" in note


def sent(late_s: float, seconds: float, count: int = 11) -> list[Answer]:
    """Answers to requests that were due ten a second, of which the last was sent so late and took so long."""
    return [
        dataclasses.replace(GOOD, sent_s=i / 10, late_s=late_s * i / (count - 1), seconds=seconds) for i in range(count)
    ]


def test_the_clients_delay_is_reported_apart_from_the_servers_latency() -> None:
    summary = summarise(sent(late_s=1.0, seconds=1.5), None, 0.3, rate=10.0)
    assert summary.late is not None and summary.late.max == 1000
    assert summary.sent_per_s == pytest.approx(10 / 2), "ten more in two seconds, which should have been one"
    (note,) = notes(summary)
    assert "could not keep up with 10 requests per second" in note and "1.00 s late, 5.0 per second" in note
    told = table(summary, "", "", io.StringIO())
    assert "client's delay" in told and "10 requested" in told
    assert summary.as_json()["late_ms"]["max"] == 1000 and summary.as_json()["sent_per_s"] == pytest.approx(5)


@pytest.mark.parametrize(("late_s", "seconds"), [(0.005, 0.006), (0.05, 1.0), (0.0, 1.0)])
def test_a_negligible_delay_is_not_noted(late_s: float, seconds: float) -> None:
    assert not list(notes(summarise(sent(late_s, seconds), None, 0.3, rate=10.0)))


def test_without_a_rate_nothing_is_due_and_nothing_late() -> None:
    summary = summarise(sent(late_s=1.0, seconds=1.5), None, 0.3)
    assert summary.late is None and summary.sent_per_s is None and not list(notes(summary))
    assert "delay" not in table(summary, "", "", io.StringIO())


def test_unsent_requests_count_towards_neither_rate_nor_delay() -> None:
    left_out = [Answer(9.0, 0.0, 1, None, 1, error=NOT_SENT, text="")]
    summary = summarise(sent(late_s=0.0, seconds=0.5) + left_out, None, 0.3, rate=10.0)
    assert summary.sent_per_s == pytest.approx(10) and summary.requests == 12
