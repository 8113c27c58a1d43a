from __future__ import annotations

import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import SampleFailed
from guerdon.server.dashboard import extremes
from guerdon.server.dashboard.extremes import EACH, MOST_TEXT, Extremes

INFO = ModelInfo("rm", "echo", vocabulary="v1")
NOW = 1_700_000_000.0


def noted(made: Extremes, rewards: list[float], *, time: float = NOW, **asked: object) -> None:
    asked = asked or {"texts": [f"text {reward}" for reward in rewards]}
    results = [Score(reward) if reward == reward else SampleFailed("none") for reward in rewards]
    made.note(time, ScoreRequest(**asked), ScoreReply(results, [3] * len(rewards), "w7"), INFO)


def test_the_best_and_the_worst_of_many_requests_are_kept_in_order():
    made = Extremes()
    rewards = np.random.default_rng(0).permutation(1000) - 500.0
    for part in np.array_split(rewards, 37):
        noted(made, part.tolist())
    assert [one.reward for one in made.best(0)] == [499.0 - i for i in range(EACH)]
    assert [one.reward for one in made.worst(0)] == [-500.0 + i for i in range(EACH)]
    assert made.best(0)[0].response == "text 499.0"
    assert made.best(0)[0].weights_version == "w7"


def test_of_few_samples_all_are_both():
    made = Extremes()
    noted(made, [2.0, 1.0])
    assert [one.reward for one in made.best(0)] == [2, 1]
    assert [one.reward for one in made.worst(0)] == [1, 2]


def test_the_same_text_is_there_once_however_often_it_came():
    made = Extremes()
    for time in range(0, 900, 100):
        noted(made, [5.0, 5.0, 4.0], time=NOW + time)
        noted(made, [5.0], time=NOW + time, tokens=[np.array([1, 2])])
        noted(made, [5.0], time=NOW + time, tokens=[np.array([1, 3])])
    assert [one.reward for one in made.best(0)] == [5, 5, 5, 4]
    assert {one.time for one in made.best(0)} == {NOW + 800}


def test_failed_samples_and_those_before_the_window_are_left_out():
    made = Extremes()
    noted(made, [9.0, 1.0], time=NOW - 7200)
    noted(made, [float("nan"), 3.0], time=NOW)
    assert [one.reward for one in made.best(NOW - 60)] == [3]
    assert [one.reward for one in made.best(NOW - 9000)] == [9, 3, 1]


def test_what_is_kept_is_bounded():
    made = Extremes()
    for slot in range(2 * extremes._NUM_SLOTS):
        time = NOW + slot * extremes.SLOT_S
        noted(made, [float(i) for i in range(20)], time=time, texts=["x" * 9000] * 20, prompts=["x" * 5000] * 20)
    assert len(made._slots) <= extremes._NUM_SLOTS
    one = made.best(0)[0]
    assert (len(one.prompt), len(one.response), one.is_cut) == (MOST_TEXT, MOST_TEXT, True)


def test_prompts_are_told_apart_where_they_are_known():
    made = Extremes()
    noted(made, [1.0], texts=["a prompt an answer"], prompts=["a prompt"])
    assert (made.best(0)[0].prompt, made.best(0)[0].response) == ("a prompt", " an answer")
    made = Extremes()
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    noted(made, [1.0], messages=[conversation])
    assert (made.best(0)[0].prompt, made.best(0)[0].response) == ("user: hi", "assistant: ho")


def test_of_ids_the_last_are_kept_and_which_of_them_are_the_prompts():
    made = Extremes()
    tokens = np.arange(1500)
    noted(made, [1.0], tokens=[tokens], prompt_lengths=np.array([700]))
    one = made.best(0)[0]
    assert one.response is None
    assert one.tokens.tolist() == list(range(500, 1500))
    assert (one.num_prompt_tokens, one.is_cut, one.vocabulary) == (200, True, "v1")
    assert not np.shares_memory(one.tokens, tokens)
