"""Sums of rewards: what is made of the components' replies, and the statistics that are kept of them."""

import json
import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, Overloaded, SampleFailed, named
from guerdon.kinds.sum import Running, Sum
from guerdon.settings.config import ComponentConfig, RewardConfig

CHECKPOINT = ModelInfo(
    "helpful", "llama", vocab_size=300, max_length=64, eos_token_id=2, takes_messages=True, weights_version="abc"
)
OF_TEXTS = ModelInfo("brevity", "function", takes_tokens=False, takes_labels=True)
OF_TOKENS = ModelInfo("length", "function", takes_text=False)


def made(*components: dict[str, Any], clip: float | None = None) -> Sum:
    """A sum of components named a, b, ..."""
    names = "abc"[: len(components)]
    parts = [ComponentConfig(model=name, **settings) for name, settings in zip(names, components, strict=True)]
    infos = [replace(CHECKPOINT, name=name) for name in names]
    return Sum(RewardConfig("reward_model", parts, clip), infos)


def reply(*results: float | GuerdonError, version: str = "abc", **more: Any) -> ScoreReply:
    scores = [r if isinstance(r, GuerdonError) else Score(r) for r in results]
    return ScoreReply(scores, list(range(1, len(scores) + 1)), version, **more)


def rewards(answer: ScoreReply) -> list[float]:
    return [r.reward if isinstance(r, Score) else math.nan for r in answer.results]


numbers = st.floats(-1e6, 1e6, allow_subnormal=False)


@given(st.lists(st.lists(numbers, max_size=6), max_size=6), st.sampled_from([0.0, 1e9, -1e12]))
def test_the_running_statistics_are_those_of_all_numbers_together(parts: list[list[float]], offset: float) -> None:
    seen = Running()
    for part in parts:
        seen.add(np.array(part) + offset)
    together = np.array([number + offset for part in parts for number in part])
    assert seen.count == len(together)
    if len(together):
        scale = max(1.0, float(np.ptp(together)))
        assert seen.mean == pytest.approx(together.mean(), rel=1e-12, abs=1e-9 * scale)
        # numpy's own deviation is taken from the numbers without their offset, which would cost it digits
        assert seen.std == pytest.approx((together - together[0]).std(), rel=1e-6, abs=1e-7 * scale)


@given(numbers, st.lists(st.integers(1, 5), min_size=1, max_size=8))
def test_equal_numbers_have_no_deviation_at_all(number: float, counts: list[int]) -> None:
    seen = Running()
    for count in counts:
        seen.add(np.full(count, number))
    assert (seen.mean, seen.std) == (number, 0.0)


@given(st.permutations([3.0, -1.5, 0.25, 8.0, 2.0, 2.0]), st.integers(0, 6))
def test_neither_order_nor_cuts_change_the_statistics(values: list[float], cut: int) -> None:
    seen = Running()
    seen.add(np.array(values[:cut]))
    seen.add(np.array(values[cut:]))
    assert seen.mean == pytest.approx(np.mean(values), rel=1e-14)
    assert seen.std == pytest.approx(np.std(values), rel=1e-14)


def test_no_number_has_been_seen_yet() -> None:
    assert (Running().count, Running().mean, Running().std) == (0, 0.0, 0.0)


def test_the_sum_is_weighted_and_the_attributes_are_the_components_own() -> None:
    parts = made({"weight": 2.0}, {"weight": -0.5}, {"weight": 0.0})
    answer = parts.combine(
        [
            reply(1.0, 2.0, version="x", queue_s=0.5, compute_s=1.0),
            reply(4.0, -8.0, version="y", queue_s=2.0, compute_s=0.25),
            reply(7.0, 7.0, version="z"),
        ]
    )
    assert rewards(answer) == [0.0, 8.0]
    assert [r.attributes.tolist() for r in answer.results] == [[1, 4, 7], [2, -8, 7]]  # type: ignore[union-attr]
    assert answer.results[0].attributes.dtype == np.float32  # type: ignore[union-attr]
    assert re.fullmatch(r"a=x;b=y;c=z;sum=\w{8}", answer.weights_version)
    assert (answer.queue_s, answer.compute_s, answer.lengths) == (2.0, 1.25, [1, 2])


def test_sums_that_make_other_rewards_of_the_same_components_have_other_versions() -> None:
    rules: list[dict[str, Any]] = [{"mean": 1.0}, {"mean": 2.0}, {"mean": 1.0, "std": 2.0}]
    firsts: list[dict[str, Any]] = [{}, {"weight": 2.0}, {"clip": 3.0}, {"clip": 4.0}, {"normalize": "running"}]
    firsts += [{"normalize": "given", **one} for one in rules]
    sums = [made(first, {}) for first in firsts] + [made({}, {"weight": 2.0}), made({}, {}, clip=3.0)]
    versions = [one.combine([reply(1.0, version="x"), reply(1.0, version="y")]).weights_version for one in sums]
    assert versions[0] == "a=x;b=y"  # a plain sum
    assert len({*versions}) == len(versions) == len({one.info.weights_version for one in sums})


def test_it_is_normalised_then_clipped_then_weighted_then_clipped_again() -> None:
    parts = made({"normalize": "given", "mean": 1.0, "std": 2.0, "clip": 3.0, "weight": 10.0}, {}, clip=25.0)
    answer = parts.combine([reply(1.0, 5.0, 9.0, -9.0), reply(0.5, 0.5, 0.5, 0.5)])
    assert rewards(answer) == [0.5, 20.5, 25.0, -25.0]
    assert [r.attributes[0] for r in answer.results] == [1, 5, 9, -9]  # type: ignore[union-attr,index]


@pytest.mark.parametrize(("settings", "reward"), [({"mean": 1.0}, 4.0), ({"std": 2.0}, 2.5)])
def test_of_mean_and_deviation_one_may_be_given_alone(settings: dict[str, float], reward: float) -> None:
    assert rewards(made({"normalize": "given", **settings}).combine([reply(5.0)])) == [reward]


def test_what_was_seen_of_one_version_is_nothing_to_another() -> None:
    parts = made({"normalize": "running"})
    assert rewards(parts.combine([reply(3.0, 7.0)])) == [-1.0, 1.0]
    parts.renew([replace(CHECKPOINT, name="a", weights_version="def")])
    assert not [*parts.statistics()]
    assert rewards(parts.combine([reply(5003.0, 5007.0, version="def")])) == [-1.0, 1.0]
    assert rewards(parts.combine([reply(3.0, 7.0)])) == [-1.0, 1.0]  # one that was under way
    assert [*parts.statistics()] == [("a", 5005.0, 2.0)]


def test_running_takes_rewards_as_they_are_until_two_differ_and_counts_the_request_itself() -> None:
    parts = made({"normalize": "running"})
    assert rewards(parts.combine([reply(3.0, 3.0)])) == [3.0, 3.0]
    assert rewards(parts.combine([reply(7.0, 7.0)])) == [1.0, 1.0]  # of 3, 3, 7, 7
    assert list(parts.statistics()) == [("a", 5.0, 2.0)]
    answer = parts.combine([reply(9.0)])
    seen = np.array([3, 3, 7, 7, 9.0])
    assert rewards(answer) == pytest.approx([(9 - seen.mean()) / seen.std()], rel=1e-6)


def test_statistics_are_kept_whatever_is_done_with_them() -> None:
    parts = made({}, {"normalize": "given", "mean": 9.0})
    assert list(parts.statistics()) == []
    parts.combine([reply(1.0, 3.0), reply(5.0, 5.0)])
    assert list(parts.statistics()) == [("a", 2.0, 1.0), ("b", 5.0, 0.0)]


def test_a_sample_fails_with_its_component_and_counts_for_none() -> None:
    parts = made({"normalize": "running"}, {})
    late, wrong = SampleFailed("not finite"), InvalidRequest("too long")
    answer = parts.combine([reply(1.0, late, 3.0, 100.0, wrong), reply(0.0, 0.0, 0.0, wrong, late)])
    assert rewards(answer)[0::2][:2] == [-1.0, 1.0]
    told = [(type(r), str(r)) for r in answer.results if isinstance(r, GuerdonError)]
    assert told == [
        (SampleFailed, "a: not finite"), (InvalidRequest, "b: too long"), (InvalidRequest, "a: too long")
    ]  # fmt: skip
    assert (str(late), str(wrong)) == ("not finite", "too long")  # others are told of these, too
    assert list(parts.statistics()) == [("a", 2.0, 1.0), ("b", 0.0, 0.0)]


def test_a_sample_is_as_long_as_the_longest_that_was_read_of_it() -> None:
    replies = [reply(1.0, 2.0, 3.0), reply(1.0, 2.0, 3.0)]
    replies[1].lengths = [5, 0, 4]
    assert made({}, {}).combine(replies).lengths == [5, 2, 4]


def test_all_samples_may_fail() -> None:
    parts = made({"normalize": "running"})
    assert [str(r) for r in parts.combine([reply(SampleFailed("x"))]).results] == ["a: x"]
    assert list(parts.statistics()) == []


@pytest.mark.filterwarnings("error")
def test_a_sum_that_is_not_finite_fails_and_is_bounded_if_it_is_clipped() -> None:
    huge = {"weight": 1e30}
    (failed, fine) = made(huge, {}).combine([reply(1e30, 0.0), reply(1.0, 1.0)]).results
    assert isinstance(failed, SampleFailed) and "is inf" in str(failed)
    assert fine.reward == 1.0  # type: ignore[union-attr]
    assert rewards(made(huge, {}, clip=5.0).combine([reply(1e30), reply(1.0)])) == [5.0]


def test_the_reward_is_a_float32() -> None:
    (score,) = made({"weight": 0.1}, {"weight": 0.2}).combine([reply(1.0), reply(1.0)]).results
    assert score.reward == float(np.float32(0.1 + 0.2))  # type: ignore[union-attr]


def test_an_error_of_a_component_keeps_all_that_it_says() -> None:
    told = named("a", Overloaded("full", 2.5))
    assert isinstance(told, Overloaded)
    assert (str(told), told.retry_after_s, told.grpc) == ("a: full", 2.5, "RESOURCE_EXHAUSTED")


def sum_of(*infos: ModelInfo) -> Sum:
    return Sum(RewardConfig(components=[ComponentConfig(model=info.name) for info in infos]), infos)


def test_it_takes_what_all_its_components_take() -> None:
    info = sum_of(CHECKPOINT, replace(CHECKPOINT, name="safe", max_length=32, weights_version="d"), OF_TEXTS).info
    assert (info.name, info.kind, info.outputs) == ("reward_model", "sum", ("rewards", "attributes"))
    assert info.attribute_names == ("helpful", "safe", "brevity")
    assert (info.takes_text, info.takes_messages, info.takes_tokens) == (True, False, False)
    assert (info.takes_prompts, info.takes_labels, info.max_length) == (False, True, 32)
    assert info.weights_version == "helpful=abc;safe=d;brevity=1"
    assert info.why == "1 helpful + 1 safe + 1 brevity"
    info = sum_of(CHECKPOINT, OF_TOKENS).info
    assert (info.takes_text, info.takes_messages, info.takes_tokens) == (False, False, True)
    assert (info.vocab_size, info.eos_token_id) == (300, 2)
    info = sum_of(CHECKPOINT, replace(CHECKPOINT, name="safe")).info
    assert (info.takes_text, info.takes_messages, info.takes_tokens, info.eos_token_id) == (True, True, True, 2)


@pytest.mark.parametrize("other", [{"vocab_size": 500}, {"eos_token_id": 7}])
def test_ids_of_two_vocabularies_are_not_taken_for_the_same(other: dict[str, int]) -> None:
    parts = sum_of(CHECKPOINT, replace(CHECKPOINT, name="safe", **other))
    assert (parts.info.takes_tokens, parts.info.vocab_size, parts.info.eos_token_id) == (False, None, None)
    with pytest.raises(InvalidRequest, match=r"takes no token ids: helpful reads text or ids .* 300 .*; safe reads"):
        parts.check(ScoreRequest(tokens=[np.array([1])]))
    parts.check(ScoreRequest(texts=["a"]))


def test_nor_are_ids_of_two_tokenizers_of_one_size() -> None:
    told = [json.dumps({"tokens": digest, "added": {}, "template": ""}) for digest in ("one", "two")]
    one, same, other = (replace(CHECKPOINT, name="safe", tokenizer=tokenizer) for tokenizer in (told[0], *told))
    assert sum_of(one, same).info.takes_tokens and sum_of(one, same, OF_TOKENS).info.tokenizer == told[0]
    assert not sum_of(one, other).info.takes_tokens and not sum_of(one, other).info.tokenizer


def test_what_not_all_can_read_is_refused_with_their_names() -> None:
    with pytest.raises(InvalidRequest, match=r"takes no messages: brevity cannot read them .*; send sentences"):
        sum_of(CHECKPOINT, OF_TEXTS).check(ScoreRequest(messages=[[{"role": "user", "content": "hi"}]]))
    with pytest.raises(InvalidRequest, match=r"takes no token ids: .*brevity reads text; send sentences"):
        sum_of(CHECKPOINT, OF_TEXTS).check(ScoreRequest(tokens=[np.array([1])]))
    with pytest.raises(InvalidRequest, match=r"takes no text: .*length reads token ids; send tokens"):
        sum_of(CHECKPOINT, OF_TOKENS).check(ScoreRequest(texts=["a"]))
