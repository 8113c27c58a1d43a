"""Heads: literal hidden states and logits in, literal scores out."""

import numpy as np
import pytest
import torch

from guerdon.core import Score, Sequence
from guerdon.engine.heads import Head, StepRule, to_scores
from guerdon.errors import SampleFailed

SEPARATOR = 9


def sequence(*tokens: int, **more: object) -> Sequence:
    return Sequence(np.array(tokens, dtype=np.int64), **more)


def head(num_outputs: int = 1, pooling: str = "last", **more: object) -> Head:
    return Head(torch.nn.Identity(), num_outputs, pooling, **more)


def process_head(separator: tuple[int, ...] = (SEPARATOR,), reduction: str = "min", **more: object) -> Head:
    return head(2, per_token=True, steps=StepRule("\n", separator, reduction), **more)


def logits_of(*probabilities: float) -> torch.Tensor:
    """Two logits a token whose softmax gives these probabilities of label 1."""
    p = torch.tensor(probabilities)
    return torch.stack([torch.zeros_like(p), torch.log(p / (1 - p))], dim=1)


def test_attributes_are_returned_raw_and_merged_by_weights_before_standardisation() -> None:
    weighted = head(2, weights=np.array([0.25, 0.75]), mean=0.5, std=2.0)
    scores = to_scores(weighted, torch.tensor([[1.0, 2.0], [3.0, 4.0]]), [sequence(1), sequence(2)])
    assert [s.reward for s in scores] == [0.625, 1.625]
    np.testing.assert_array_equal(scores[1].attributes, np.array([3, 4], dtype=np.float32))


def test_without_weights_the_reward_is_the_plain_mean() -> None:
    assert to_scores(head(2), torch.tensor([[1.0, 2.0]]), [sequence(1)])[0].reward == 1.5


def test_one_output_has_no_attributes_and_no_squashing() -> None:
    (score,) = to_scores(head(), torch.tensor([[7.25]]), [sequence(1)])
    assert (score.reward, score.attributes, score.values, score.steps) == (7.25, None, None, None)


def test_a_sample_that_is_not_finite_fails_alone_and_says_where() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    first, failed, last = to_scores(head(2), logits, [sequence(1)] * 3)
    assert (first.reward, last.reward) == (1.5, 5.5)
    assert isinstance(failed, SampleFailed)
    assert "nan at index 1 of 2" in str(failed)


def test_values_are_standardised_and_the_reward_is_the_last_one() -> None:
    tokens = [torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([[7.0]])]
    scores = to_scores(head(per_token=True, mean=1.0, std=2.0), torch.cat(tokens), [sequence(1, 2, 3), sequence(4)])
    np.testing.assert_array_equal(scores[0].values, np.array([0, 1, 2], dtype=np.float32))
    assert scores[0].values.dtype == np.float32
    assert [s.reward for s in scores] == [2.0, 3.0]


@pytest.mark.parametrize(("pooling", "reward"), [("last", 5.0), ("first", 1.0), ("mean", 3.0), ("first_eos", 3.0)])
def test_pooling_chooses_a_per_token_reward(pooling: str, reward: float) -> None:
    tokens = [torch.tensor([[0.0]]), torch.tensor([[1.0], [3.0], [5.0]])]
    scores = to_scores(
        head(pooling=pooling, per_token=True, eos_token_id=2), torch.cat(tokens), [sequence(4), sequence(4, 2, 2)]
    )
    assert scores[1].reward == reward


def test_one_infinite_value_fails_its_sequence_only() -> None:
    tokens = [torch.tensor([[1.0], [float("inf")]]), torch.tensor([[2.0], [3.0]])]
    failed, fine = to_scores(head(per_token=True), torch.cat(tokens), [sequence(1, 2), sequence(3, 4)])
    assert isinstance(failed, SampleFailed)
    assert fine.reward == 3.0


@pytest.mark.parametrize(
    ("pooling", "positions"),
    [("last", [3, 1, 1, 0]), ("first", [0, 0, 0, 0]), ("first_eos", [1, 1, 0, 0]), ("last_non_pad", [2, 1, 0, 0])],
)
def test_positions_of_each_pooling_rule(pooling: str, positions: list[int]) -> None:
    rows = [np.array(row) for row in ([4, 2, 5, 2], [4, 5], [2, 2], [4])]
    assert head(pooling=pooling, eos_token_id=2, pad_token_id=2).positions(rows).tolist() == positions


def test_steps_are_probabilities_at_the_separators() -> None:
    tokens = [logits_of(0.5, 0.9, 0.5, 0.2), logits_of(0.5, 0.7)]
    scores = to_scores(
        process_head(), torch.cat(tokens), [sequence(1, SEPARATOR, 3, SEPARATOR), sequence(1, SEPARATOR)]
    )
    np.testing.assert_allclose(scores[0].steps, [0.9, 0.2], atol=1e-6)
    np.testing.assert_allclose(scores[1].steps, [0.7], atol=1e-6)
    assert scores[0].reward == pytest.approx(0.2)
    assert scores[0].values is None


def test_given_positions_count_instead_of_separators_in_their_order() -> None:
    given = sequence(1, SEPARATOR, 3, steps=np.array([2, 0]))
    (score,) = to_scores(process_head(), logits_of(0.1, 0.2, 0.3), [given])
    np.testing.assert_allclose(score.steps, [0.3, 0.1], atol=1e-6)


def test_a_separator_of_several_tokens_ends_a_step_at_its_last_one_and_never_in_the_prompt() -> None:
    tokens = sequence(7, 8, 1, 7, 8, 2, 7, 7, 8, prompt_length=3)
    (score,) = to_scores(process_head((7, 8)), logits_of(*(i / 10 for i in range(1, 10))), [tokens])
    np.testing.assert_allclose(score.steps, [0.5, 0.9], atol=1e-6)


@pytest.mark.parametrize(("reduction", "reward"), [("min", 0.2), ("mean", 0.4), ("last", 0.4), ("product", 0.048)])
def test_step_reductions(reduction: str, reward: float) -> None:
    (score,) = to_scores(
        process_head(reduction=reduction), logits_of(0.6, 0.2, 0.4), [sequence(SEPARATOR, SEPARATOR, SEPARATOR)]
    )
    assert score.reward == pytest.approx(reward, abs=1e-6)


def test_a_sequence_without_a_step_fails_alone() -> None:
    failed, fine = to_scores(process_head(), logits_of(0.5, 0.5, 0.5), [sequence(1, 2), sequence(SEPARATOR)])
    assert isinstance(failed, SampleFailed)
    assert "no step to reward" in str(failed)
    assert isinstance(fine, Score)


def test_a_step_that_is_not_finite_fails_its_sequence_only() -> None:
    bad = torch.tensor([[0.0, float("nan")]])
    failed, fine = to_scores(process_head(), torch.cat([bad, logits_of(0.25)]), [sequence(SEPARATOR)] * 2)
    assert isinstance(failed, SampleFailed)
    assert fine.reward == pytest.approx(0.25)


def test_the_head_computes_in_float32_whatever_surrounds_it() -> None:
    linear = torch.nn.Linear(64, 1, dtype=torch.bfloat16)
    made = Head(linear, 1, "last")
    hidden = torch.randn(5, 64, dtype=torch.bfloat16)
    expected = hidden.float() @ made.module.weight.T + made.module.bias
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = made(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)
