import numpy as np

from guerdon.core import ModelInfo, Score, ScoreReply, ScoreRequest
from guerdon.errors import SampleFailed
from guerdon.server.page import extremes
from guerdon.server.page.extremes import EACH, MOST_TEXT, ExtremeSamples

INFO = ModelInfo("rm", "echo", vocabulary="v1")
NOW = 1_700_000_000.0


def noted(
    made: ExtremeSamples, rewards: list[float], *, time: float = NOW, version: str = "w7", **asked: object
) -> None:
    asked = asked or {"texts": [f"text {reward}" for reward in rewards]}
    results = [Score(reward) if reward == reward else SampleFailed("none") for reward in rewards]
    lengths = [3] * len(rewards)
    made.note(time, ScoreRequest(**asked), ScoreReply(results, lengths, version), INFO, lengths)


def test_the_best_and_the_worst_of_many_requests_are_kept_in_order():
    made = ExtremeSamples()
    rewards = np.random.default_rng(0).permutation(1000) - 500.0
    for part in np.array_split(rewards, 37):
        noted(made, part.tolist())
    assert [one.reward for one in made.best(0)] == [499.0 - i for i in range(EACH)]
    assert [one.reward for one in made.worst(0)] == [-500.0 + i for i in range(EACH)]
    assert made.best(0)[0].response == "text 499.0"
    assert made.best(0)[0].weights_version == "w7"


def test_few_samples_are_both_best_and_worst():
    made = ExtremeSamples()
    noted(made, [2.0, 1.0])
    assert [one.reward for one in made.best(0)] == [2, 1]
    assert [one.reward for one in made.worst(0)] == [1, 2]


def test_the_same_text_is_there_once_however_often_it_came():
    made = ExtremeSamples()
    for time in range(0, 900, 100):
        noted(made, [5.0, 5.0, 4.0], time=NOW + time)
        noted(made, [5.0], time=NOW + time, tokens=[np.array([1, 2])])
        noted(made, [5.0], time=NOW + time, tokens=[np.array([1, 3])])
    assert [one.reward for one in made.best(0)] == [5, 5, 5, 4]
    assert {one.time for one in made.best(0)} == {NOW + 800}


def test_failed_samples_and_those_before_the_window_are_left_out():
    made = ExtremeSamples()
    noted(made, [9.0, 1.0], time=NOW - 7200)
    noted(made, [float("nan"), 3.0], time=NOW)
    assert [one.reward for one in made.best(NOW - 60)] == [3]
    assert [one.reward for one in made.best(NOW - 9000)] == [9, 3, 1]


def test_what_is_kept_is_bounded():
    made = ExtremeSamples()
    texts = ["x" * 9000 + str(i) for i in range(20)]
    for slot in range(300):
        time = NOW + slot * extremes.COARSE_S
        noted(made, [float(i) for i in range(20)], time=time, texts=texts, prompts=["x" * 5000] * 20)
        noted(made, [float(i) for i in range(20)], time=time + 60)
    assert len(made._coarse) <= extremes.COARSE_WINDOW_S / extremes.COARSE_S + 1
    assert len(made._fine) <= extremes.FINE_WINDOW_S / extremes.FINE_S + 1
    one = next(one for one in made.best(0) if one.response.startswith("xxxx"))
    assert (len(one.prompt), len(one.response), one.is_cut) == (MOST_TEXT, MOST_TEXT, True)


def test_the_oldest_are_evicted_if_all_take_too_much_memory():
    made = ExtremeSamples(most_bytes=1_000_000)
    for slot in range(100):
        texts = [f"{slot} {i}" + "\N{GRINNING FACE}" * 3000 for i in range(EACH)]
        noted(made, [float(slot + i / 10) for i in range(EACH)], time=NOW + slot * extremes.COARSE_S, texts=texts)
    assert sum(slot.num_bytes for slots in (made._coarse, made._fine) for slot in slots.values()) < 1_400_000
    assert made.best(0)[0].reward == 99.5


def test_a_text_whose_reward_differs_in_the_last_digits_is_there_once():
    made = ExtremeSamples()
    for i in range(20):
        noted(made, [1 + i * 1e-7], time=NOW + i, texts=["the same"])
    noted(made, [0.5], time=NOW, texts=["another"])
    noted(made, [1.0], time=NOW, texts=["the same"], version="w8")
    assert [(one.response, one.weights_version) for one in made.best(0)] == [
        ("the same", "w7"),
        ("the same", "w8"),
        ("another", "w7"),
    ]
    assert made.best(0)[0].time == NOW + 19


def test_the_more_extreme_of_one_text_in_one_request_is_kept():
    made = ExtremeSamples()
    noted(made, [1.0, 3.0, 2.0], texts=["the same"] * 3)
    assert [one.reward for one in made.best(0)] == [3]
    assert [one.reward for one in made.worst(0)] == [1]


def test_a_failed_sample_before_the_best_hides_nothing():
    made = ExtremeSamples()
    noted(made, [float(i) for i in range(20)])
    noted(made, [float("nan"), 30.0, -30.0, 5.0])
    assert (made.best(0)[0].reward, made.worst(0)[0].reward) == (30, -30)


def test_better_ones_before_the_window_hide_none_of_it():
    made = ExtremeSamples()
    begin = NOW - NOW % extremes.COARSE_S
    noted(made, [100.0 + i for i in range(10)], time=begin + 10)
    noted(made, [1.0, 2.0], time=begin + 400)
    assert [one.reward for one in made.best(begin + 360)] == [2, 1]
    assert [one.reward for one in made.worst(begin + 360)] == [1, 2]


def test_both_ends_of_a_text_without_a_known_prompt_are_kept():
    made = ExtremeSamples()
    noted(made, [1.0], texts=["P" * 4200 + " the response"])
    (one,) = made.best(0)
    assert one.is_cut
    assert one.response.startswith("PPP")
    assert one.response.endswith("P the response")
    assert len(one.response) <= 2 * MOST_TEXT + 3


def test_contents_of_several_parts_are_told():
    made = ExtremeSamples()
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    conversation = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts[:1]}]
    noted(made, [1.0], messages=[conversation])
    assert (made.best(0)[0].prompt, made.best(0)[0].response) == ("user: one\ntwo", "assistant: one")


def test_prompts_are_kept_apart_if_they_are_known():
    made = ExtremeSamples()
    noted(made, [1.0], texts=["a prompt an answer"], prompts=["a prompt"])
    assert (made.best(0)[0].prompt, made.best(0)[0].response) == ("a prompt", " an answer")
    made = ExtremeSamples()
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    noted(made, [1.0], messages=[conversation])
    assert (made.best(0)[0].prompt, made.best(0)[0].response) == ("user: hi", "assistant: ho")


def test_of_ids_the_last_are_kept_and_which_of_them_are_the_prompts():
    made = ExtremeSamples()
    tokens = np.arange(1500)
    noted(made, [1.0], tokens=[tokens], prompt_lengths=np.array([700]))
    one = made.best(0)[0]
    assert one.response is None
    assert one.tokens.tolist() == list(range(500, 1500))
    assert (one.num_prompt_tokens, one.is_cut, one.vocabulary) == (200, True, "v1")
    assert not np.shares_memory(one.tokens, tokens)
