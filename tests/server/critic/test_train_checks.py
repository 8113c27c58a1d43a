"""What is refused of a train request, and the place that the text names; what is never read is never looked at."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from guerdon.core import ModelInfo
from guerdon.critic_core import Gae, TrainRequest
from guerdon.errors import InvalidRequest
from guerdon.server.critic.train_checks import MAX_ID_LENGTH, check

INFO = ModelInfo("critic_infer", "test", vocab_size=100, max_length=4)


def request() -> TrainRequest:
    """Three rows of six tokens: learnt from are the columns 1 and 2, nothing, and 0."""
    mask = np.zeros((3, 5), np.float32)
    mask[0, 1:3] = mask[2, 0] = 1
    targets = np.ones((3, 5), np.float32)
    return TrainRequest("a", np.full((3, 6), 7), targets, targets.copy(), mask)


def test_padding_may_hold_anything() -> None:
    asked = request()
    asked.tokens[0, 4:] = asked.tokens[1] = asked.tokens[2, 2:] = -100
    asked.tokens[2, 5] = 10_000
    for targets in (asked.returns, asked.prev_values):
        targets[asked.mask == 0] = np.nan
    check(asked, INFO)


def set_at(name: str, row: int, column: int, value: float) -> Callable[[TrainRequest], None]:
    def change(asked: TrainRequest) -> None:
        getattr(asked, name)[row, column] = value

    return change


def cut(name: str) -> Callable[[TrainRequest], None]:
    return lambda asked: setattr(asked, name, getattr(asked, name)[:, :-1])


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_at("returns", 0, 2, np.nan), "returns is nan in row 0, column 2"),
        (set_at("returns", 2, 0, -np.inf), "returns is -inf in row 2, column 0"),
        (set_at("prev_values", 0, 1, np.inf), "prev_values is inf in row 0, column 1"),
        (set_at("mask", 1, 4, np.nan), "mask is nan in row 1, column 4"),
        (set_at("mask", 0, 0, -1), "mask is -1.0 in row 0, column 0"),
        (set_at("tokens", 0, 3, 100), "tokens is 100 in row 0, column 3: the vocabulary ends at 99"),
        (set_at("tokens", 0, 0, -1), "tokens is -1 in row 0, column 0"),
        (set_at("tokens", 2, 1, 100), "tokens is 100 in row 2, column 1"),
        (set_at("mask", 1, 4, 0.5), "row 1 learns from 5 tokens, critic_infer takes at most 4"),
        (lambda asked: asked.mask.fill(0), "mask is 0 everywhere"),
        (cut("returns"), r"returns has shape \[3, 4\], not \[N, T-1\] = \[3, 5\]"),
        (cut("mask"), r"mask has shape \[3, 4\]"),
        (cut("tokens"), r"returns has shape \[3, 5\], not \[N, T-1\] = \[3, 4\]; it has T columns: leave out"),
        (lambda asked: setattr(asked, "tokens", asked.tokens[:0]), r"tokens has shape \[0, 6\]"),
        (lambda asked: setattr(asked, "tokens", asked.tokens[:, :1]), r"tokens has shape \[3, 1\]"),
        (lambda asked: setattr(asked, "tokens", asked.tokens[0]), r"tokens has shape \[6\]"),
        (lambda asked: setattr(asked, "prev_values", asked.prev_values[:2]), r"prev_values has shape \[2, 5\]"),
        (lambda asked: setattr(asked, "id", "x" * (MAX_ID_LENGTH + 1)), "train_id has 201 characters"),
        (lambda asked: setattr(asked, "updates", 0), "updates is 0; give 1 to 100 passes"),
        (lambda asked: setattr(asked, "updates", 101), "updates is 101"),
    ],
)
def test_each_mistake_is_refused_by_its_place(change: Callable[[TrainRequest], None], says: str) -> None:
    asked = request()
    check(asked, INFO)
    change(asked)
    with pytest.raises(InvalidRequest, match=says):
        check(asked, INFO)


def rewarded(per_token: bool = True) -> TrainRequest:
    """As `request`, with rewards of every token or of every row."""
    asked = request()
    asked.rewards = np.ones((3, 5 if per_token else 1), np.float32)
    asked.returns = asked.prev_values = np.empty((3, 0), np.float32)
    asked.gae = Gae()
    return asked


def gae(**changes: float) -> Callable[[TrainRequest], None]:
    return lambda asked: setattr(asked, "gae", Gae(**changes))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (set_at("rewards", 2, 0, np.nan), "rewards is nan in row 2, column 0"),
        (cut("rewards"), r"rewards has shape \[3, 4\], not \[N, T-1\] = \[3, 5\]"),
        (gae(gamma=1.1), "gamma is 1.1; give a number from 0 to 1"),
        (gae(lam_critic=math.nan), "lam_critic is nan"),
        (gae(lam_policy=-0.1), "lam_policy is -0.1"),
        (gae(lam_alpha=0.0), "lam_alpha is 0.0; give a number above 0"),
        (gae(lam_alpha=math.inf), "lam_alpha is inf"),
        (gae(lam_policy=1.0, lam_alpha=0.05), "lam_policy and lam_alpha exclude each other"),
    ],
)
def test_each_mistake_with_rewards_is_refused(change: Callable[[TrainRequest], None], says: str) -> None:
    asked = rewarded()
    asked.rewards[asked.mask == 0] = np.nan  # type: ignore[index]
    check(asked, INFO)
    change(asked)
    with pytest.raises(InvalidRequest, match=says):
        check(asked, INFO)


def test_a_rows_reward_counts_if_a_token_of_it_does() -> None:
    asked = rewarded(per_token=False)
    asked.rewards[1] = np.nan  # type: ignore[index]  # of a row without masked tokens
    check(asked, INFO)
    set_at("rewards", 2, 0, np.inf)(asked)
    with pytest.raises(InvalidRequest, match="rewards is inf in row 2, column 0"):
        check(asked, INFO)


def test_a_model_without_bounds_has_none() -> None:
    asked = request()
    asked.tokens[0] = 10**12
    check(asked, replace(INFO, vocab_size=None, max_length=None))


def tree() -> TrainRequest:
    """Three segments of a tree, of 2, 1 and 3 tokens, the last a child of the first; the last action is learnt."""
    mask = np.zeros((3, 3), np.float32)
    mask[2, 1] = 1
    targets = np.ones((3, 3), np.float32)
    made = TrainRequest("a", np.full((3, 3), 7), targets, targets.copy(), mask)
    made.parents, made.lengths = np.array([-1, 0, 0]), np.array([2, 1, 3])
    return made


def test_padding_of_segments_may_hold_anything() -> None:
    asked = tree()
    asked.tokens[0, 2:] = asked.tokens[1, 1:] = -100
    asked.returns[asked.mask == 0] = asked.prev_values[asked.mask == 0] = np.nan
    check(asked, INFO)
    asked.mask[1, 0] = asked.mask[0, 1] = 1
    with pytest.raises(InvalidRequest, match="returns is nan in row 0, column 1"):
        check(asked, INFO)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda asked: asked.parents.fill(-3), "parents is -3 in row 0: give -1"),
        (lambda asked: asked.lengths.fill(0), "sequence_lengths is 0 in row 0: a segment has at least one token"),
        (set_at("mask", 0, 0, 1), "mask is 1.0 in row 0, column 0: no state comes before a root's first token"),
        (set_at("mask", 1, 1, 1), "mask is 1.0 in row 1, column 1: the segment has no token there"),
        (set_at("mask", 2, 2, 1), None),
        (lambda asked: asked.lengths.__setitem__(0, 3), None),
        (
            lambda asked: (asked.lengths.__setitem__(0, 3), asked.mask.__setitem__((2, 2), 1)),
            "row 2 learns from 5 tokens, its ancestors' included, critic_infer takes at most 4; shorten it",
        ),
        (set_at("tokens", 1, 0, 100), "tokens is 100 in row 1, column 0: the vocabulary ends at 99"),
        (set_at("tokens", 0, 0, -1), "tokens is -1 in row 0, column 0"),
        (cut("returns"), r"returns has shape \[3, 2\], not \[N, T\] = \[3, 3\]$"),
        (lambda asked: asked.mask.fill(0), "mask is 0 everywhere"),
        (lambda asked: (setattr(asked, "rewards", asked.returns), setattr(asked, "gae", Gae())), "rewards and parents"),
    ],
)
def test_each_wrong_tree_is_named_with_its_place(change: Callable[[TrainRequest], object], says: str | None) -> None:
    asked = tree()
    change(asked)
    if says is None:
        check(asked, INFO)
        return
    with pytest.raises(InvalidRequest, match=says):
        check(asked, INFO)
