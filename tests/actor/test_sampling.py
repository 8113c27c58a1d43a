"""Tokens drawn by inverting the distribution, cut as transformers cuts it; texts that end a response."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import (
    AutoTokenizer,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

import zoo
from guerdon.actor.generation import Sampler, StopTexts, sample_indices, uniforms
from guerdon.errors import ConfigError, RunFailed
from guerdon.settings.actors import RolloutConfig

VOCAB = 300


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


def grid(count: int) -> torch.Tensor:
    """Numbers that fill [0, 1) evenly: of `count` draws a token of probability p gets p * count, but for one."""
    return (torch.arange(count, dtype=torch.float64) + 0.5) / count


@pytest.mark.parametrize("vocab", [1, 63, 64, 65, 300, 5000])
def test_frequencies_are_the_probabilities(vocab: int) -> None:
    weights = torch.rand(vocab, generator=torch.Generator().manual_seed(vocab)) ** 4
    drawn = sample_indices(weights.expand(20_000, vocab), grid(20_000))
    expected = weights.double() / weights.double().sum() * 20_000
    assert (torch.bincount(drawn, minlength=vocab) - expected).abs().max() <= 1.001


def test_what_has_no_weight_is_never_drawn() -> None:
    weights = torch.zeros(4, 200)
    weights[0, 130] = weights[1, 0] = weights[2, 199] = 1e-30
    weights[3, [63, 64]] = torch.tensor([1.0, 1e-7])
    for number in (0.0, 0.5, 1 - 2**-53):
        assert sample_indices(weights, torch.full((4,), number, dtype=torch.float64))[:3].tolist() == [130, 0, 199]
    assert sample_indices(weights, torch.full((4,), 1 - 2**-53, dtype=torch.float64))[3] == 64


def test_the_sampler_draws_from_the_softmax() -> None:
    sample, count = Sampler(RolloutConfig(temperature=0.7, min_new_tokens=0), ()), 10_000
    row = logits(1)
    tokens, logprobs = sample(row.expand(count, VOCAB), grid(count), torch.zeros(count, dtype=torch.long))
    want = torch.softmax(row[0].double() / 0.7, -1)
    assert (torch.bincount(tokens, minlength=VOCAB) - want * count).abs().max() < 1.1
    torch.testing.assert_close(logprobs, want.log()[tokens].float(), rtol=1e-5, atol=1e-6)


def test_rollouts_numbers_are_uniform_and_each_ones_own() -> None:
    rows = np.stack([uniforms((0, 7), group, index, 200) for group in range(20) for index in range(8)])
    counts = np.histogram(rows, bins=50, range=(0, 1))[0]
    expected = rows.size / 50
    assert ((counts - expected) ** 2 / expected).sum() < 49 + 5 * np.sqrt(2 * 49)  # chi-squared, five deviations
    assert abs(np.corrcoef(rows)[np.triu_indices(len(rows), 1)]).max() < 0.4
    assert len(np.unique(rows)) == rows.size
    assert np.array_equal(uniforms((0, 7), 3, 2, 10), uniforms((0, 7), 3, 2, 200)[:10])
    assert not np.array_equal(uniforms((0, 8), 3, 2, 10), uniforms((0, 7), 3, 2, 10))


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5},
        {"top_k": 7},
        {"top_k": 1000},
        {"top_p": 0.6},
        {"top_p": 1e-9},
        {"repetition_penalty": 1.7},
        {"min_new_tokens": 4},
        {"temperature": 1.6, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.3, "min_new_tokens": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize("num_new", [3, 4])
def test_cuts_as_transformers_does(settings: dict, num_new: int) -> None:
    config = RolloutConfig(**{"min_new_tokens": 0, **settings})
    row, eos = logits(1, seed=5), [2, 9]
    row[0, 9] = row.max() + 1
    before = torch.tensor([[5, 9, 17, 40]])
    want = RepetitionPenaltyLogitsProcessor(config.repetition_penalty)(before, row)
    want = MinNewTokensLengthLogitsProcessor(4 - num_new, config.min_new_tokens, eos)(before, want)
    want = TemperatureLogitsWarper(config.temperature)(before, want)
    want = TopKLogitsWarper(config.top_k)(before, want) if config.top_k else want
    want = TopPLogitsWarper(config.top_p)(before, want) if config.top_p < 1 else want
    probabilities = torch.softmax(want[0].double(), -1)

    count = 8_000
    seen = torch.zeros(1, VOCAB, dtype=torch.bool).index_fill(1, before[0], True).expand(count, VOCAB)
    numbers, counts = grid(count), torch.full((count,), num_new)
    tokens, logprobs = Sampler(config, eos)(row.expand(count, VOCAB), numbers, counts, seen)
    assert (torch.bincount(tokens, minlength=VOCAB) - probabilities * count).abs().max() < 1.1
    whole = torch.log_softmax(row[0].double() / config.temperature, -1)  # of the distribution before the cuts
    torch.testing.assert_close(logprobs, whole[tokens].float(), rtol=1e-5, atol=1e-6)

    greedy, _ = Sampler(config, eos, greedy=True)(row, numbers[:1], counts[:1], seen[:1])
    assert greedy == want.argmax()


def test_only_rows_that_are_too_short_may_not_end() -> None:
    row = torch.zeros(2, VOCAB)
    row[:, 2] = 50.0
    numbers = torch.full((2,), 0.5, dtype=torch.float64)
    tokens, _ = Sampler(RolloutConfig(min_new_tokens=2), [2])(row, numbers, torch.tensor([1, 2]))
    assert tokens[0] != 2 and tokens[1] == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_stop_the_run(value: float) -> None:
    broken = logits(3)
    broken[1, 4] = value
    with pytest.raises(RunFailed, match="diverged"):
        Sampler(RolloutConfig(), ())(broken, grid(3), torch.zeros(3, dtype=torch.long))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> object:
    return AutoTokenizer.from_pretrained(zoo.tokenizer(Path(tmp_path_factory.mktemp("tokenizer"))))


@pytest.mark.parametrize(
    ("text", "stop", "upto"),
    [
        ("say the end. and more", "the end.", "say the end."),  # across tokens: " the" is one
        ("in there: she", "he", "in the"),  # begins within the token "the" and ends with it
        ("one\n\ntwo", "\n\n", "one\n\n"),
        ("a b ", " ", "a "),
        ("grüße €5 ok", "€", "grüße €"),  # several tokens a character
        ("x 漢字 y", "漢字 ", "x 漢字 "),
        ("abab", "bab", "abab"),
    ],
)
def test_a_stop_text_is_complete_in_one_token(tokenizer, text: str, stop: str, upto: str) -> None:
    tokens = tokenizer.encode(text, add_special_tokens=False)
    stops = StopTexts(["never", stop], tokenizer)
    ends = [stops.complete(tokens[: i + 1]) for i in range(len(tokens))]
    assert tokenizer.decode(tokens[: ends.index(True) + 1]).startswith(upto)
    assert stop not in tokenizer.decode(tokens[: ends.index(True)])


def test_a_stop_text_before_the_start_does_not_count_again(tokenizer) -> None:
    tokens = tokenizer.encode("tea on", add_special_tokens=False)
    stops = StopTexts(["tea on"], tokenizer)
    assert stops.complete(tokens) and not stops.complete(tokens, start=1)
    assert stops.complete(tokens * 2, start=len(tokens)) and not stops.complete(tokens * 2, start=len(tokens) + 1)


def test_a_special_token_can_be_a_stop_text(tokenizer) -> None:
    stops = StopTexts(["<extra_0>"], tokenizer)
    token = tokenizer.convert_tokens_to_ids("<extra_0>")
    assert stops.complete([10, token]) and not stops.complete([token, 10])


def test_no_stop_texts_never_end_and_need_no_tokenizer() -> None:
    assert not StopTexts([], None).complete([5])


def test_stop_texts_that_cannot_be(tokenizer) -> None:
    with pytest.raises(ConfigError, match="no tokenizer"):
        StopTexts(["x"], None)
    with pytest.raises(ConfigError, match="empty"):
        StopTexts([""], tokenizer)
