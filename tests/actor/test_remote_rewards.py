"""Rewards from real servers: whose they are, what fails, and what becomes of a server that is away."""

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import scorers
import zoo
from actor.rollouts import rollout, serving
from guerdon.actor.remote_rewards import RemoteRewards, samples_of
from guerdon.actor.rollouts import Rollout
from guerdon.errors import ConfigError, StartError
from guerdon.settings.actors import RemoteRewardConfig, RewardServer
from guerdon.settings.config import ModelConfig
from ports import free_port
from server.helpers import tried_again

SUM = ModelConfig(model="scorers:score")


def remote(url: str, *, name: str = "reward_model", timeout_s: float = 120.0, **settings: Any) -> RemoteRewards:
    server = RewardServer(name=name, urls=[url])
    return RemoteRewards(RemoteRewardConfig(server, timeout_s=timeout_s, **settings))


def group_of(*responses: list[int], group: int = 0) -> list[Rollout]:
    return [rollout([5, 6], response, group=group, index=i) for i, response in enumerate(responses)]


def test_each_rollout_gets_its_own_reward_or_its_own_error() -> None:
    groups = [group_of([1], [2, 3]), group_of([scorers.NAN], [7], [8], group=1)]
    with serving(SUM) as server, remote(server.http_url) as rewards:
        rewards.wait_ready()
        for group in groups:
            rewards.submit(group)
        rewards.collect()
    assert [[r.reward for r in group] for group in groups] == [[12.0, 16.0], [None, 18.0, 19.0]]
    errors = [r.error for group in groups for r in group]
    assert errors[2] is not None and "nan" in errors[2] and errors[:2] + errors[3:] == [None] * 4


def test_score_takes_several_groups_and_leaves_nothing_behind() -> None:
    rollouts = [*group_of([1], [2]), *group_of([3], group=4)]
    with serving(SUM) as server, remote(server.http_url) as rewards:
        rewards.score(rollouts)
        assert [r.reward for r in rollouts] == [12.0, 13.0, 14.0]
        rollouts[0].reward = None
        rewards.collect()
    assert rollouts[0].reward is None


def test_a_bug_of_the_scorer_fails_only_the_sample_that_meets_it() -> None:
    group = group_of([scorers.RAISES], [2])
    with serving(SUM) as server, remote(server.http_url) as rewards:
        rewards.score(group)
    assert [r.reward for r in group] == [None, 13.0]
    assert group[0].error and group[1].error is None


def test_a_server_that_is_started_again_is_waited_for() -> None:
    group = group_of([1], [2])
    port = free_port()
    with serving(SUM, port=port) as server, remote(server.http_url) as rewards:
        rewards.wait_ready()
        server.close()
        rewards.submit(group)
        time.sleep(0.5)
        with serving(SUM, port=port):
            rewards.collect()
    assert [r.reward for r in group] == [12.0, 13.0]


def test_whoever_waits_for_a_server_can_be_called_away() -> None:
    group = group_of([1])

    def heed() -> None:
        raise InterruptedError

    with serving(SUM) as server, remote(server.http_url) as rewards:
        rewards.wait_ready()
        server.close()
        rewards.submit(group)
        with pytest.raises(InterruptedError):
            rewards.collect(heed)
    assert group[0].reward is group[0].error is None


@tried_again
def test_a_server_that_stays_away_fails_its_samples() -> None:
    group = group_of([1])
    with serving(SUM) as server, remote(server.http_url, timeout_s=1.0) as rewards:
        rewards.wait_ready()
        server.close()
        rewards.score(group)
    assert group[0].reward is None and "cannot connect" in str(group[0].error)


def test_a_start_without_a_server_says_where_and_what_to_do() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with remote(url, timeout_s=0.3) as rewards, pytest.raises(StartError, match=f"at {url} is not ready") as raised:
        rewards.wait_ready()
    assert "guerdon serve" in raised.value.help
    with (
        serving(SUM) as server,
        remote(server.http_url, name="other") as rewards,
        pytest.raises(StartError, match="unknown model 'other'"),
    ):
        rewards.wait_ready()


def test_a_start_with_the_wrong_kind_of_input_says_so() -> None:
    with (
        serving(SUM) as server,
        remote(server.http_url, send="text") as rewards,
        pytest.raises(ConfigError, match=r"accepts tokens, .*, but not 'sentences'") as raised,
    ):
        rewards.wait_ready()
    assert "`send`" in raised.value.help


def test_text_is_the_prompt_and_the_response() -> None:
    made = rollout([5], [6, 7], prompt_text="Once ", text="upon")
    with (
        serving(ModelConfig(model="actor.reward_functions:length")) as server,
        remote(server.http_url, send="text") as rewards,
    ):
        rewards.wait_ready()
        rewards.score([made])
    assert made.reward == len("Once upon")


def test_a_suffix_stands_behind_the_texts_that_an_eos_ended(tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "model"))
    ended, cut = (rollout([5], [6], prompt_text="the ", text="inn", has_eos=has_eos) for has_eos in (True, False))
    with (
        serving(ModelConfig(model=str(folder))) as server,
        remote(server.http_url, send="text", suffix="</s>") as rewards,
    ):
        rewards.wait_ready()
        rewards.score([ended, cut])
    row = zoo.PreTrainedTokenizerFast.from_pretrained(folder)("the inn", add_special_tokens=False)["input_ids"]
    want = zoo.reference(folder, [np.array([*row, zoo.EOS]), np.array(row)])
    assert [ended.reward, cut.reward] == pytest.approx(want.tolist(), abs=1e-4)


@pytest.mark.parametrize(
    ("begun", "text"), [((), "no"), (("on the",), " other")], ids=["whole", "that the prompt begins"]
)
def test_messages_are_the_conversation_and_the_answer(begun: tuple[str, ...], text: str, tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "model"))
    asked = {"role": "user", "content": "the inn?"}
    messages = (asked, *({"role": "assistant", "content": part} for part in begun))
    made = rollout([5], [6], text=text, prompt_text="unused", messages=messages)
    plain = rollout([5], [6], text="no", prompt_text="the inn?")
    with serving(ModelConfig(model=str(folder))) as server, remote(server.http_url, send="messages") as rewards:
        rewards.wait_ready()
        rewards.score([made])
        with pytest.raises(ConfigError, match="plain text"):
            rewards.submit([plain])
    fast = zoo.PreTrainedTokenizerFast.from_pretrained(folder)
    row = fast.apply_chat_template([asked, {"role": "assistant", "content": "".join(begun) + text}])["input_ids"]
    assert made.reward == pytest.approx(float(zoo.reference(folder, [np.array(row)])[0]), abs=1e-4)
    assert [message["content"] for message in messages[1:]] == [*begun]  # the prompt has other responses, too


def test_rows_are_padded_for_servers_that_want_it_and_one_too_long_fails_alone() -> None:
    group = group_of([1], [1, 1, 1, 1], [2])
    with serving(SUM) as server, remote(server.http_url, pad_to_length=4) as rewards:
        rewards.score(group)
    assert [r.reward for r in group] == [12.0, None, 13.0]
    assert group[1].error == "longer than pad_to_length, 4"
    assert samples_of(group, RemoteRewardConfig(pad_to_length=4))["pad_to_length"] == 4
