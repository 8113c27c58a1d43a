"""Token ids that mean other words to the reward model or the critic are refused before the first step."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

import served
import zoo
from actor.rollouts import serving
from actor.runs import parts, tiny_policy
from guerdon import LocalRewardModel, RewardClient
from guerdon.actor import ppo, reinforce
from guerdon.actor.remote_critic import RemoteCritic
from guerdon.actor.remote_rewards import RemoteRewards
from guerdon.endings import Ending
from guerdon.errors import ConfigError
from guerdon.settings.actors import (
    CriticServer,
    PPORunConfig,
    ReinforceRunConfig,
    RemoteCriticConfig,
    RemoteRewardConfig,
    RewardServer,
)
from guerdon.settings.config import CriticConfig, ModelConfig, ServerConfig
from guerdon.vocabulary import difference, identity


def edited(folder: Path, edit: Callable[[dict[str, Any]], None]) -> Path:
    """The folder with another tokenizer.json."""
    path = folder / "tokenizer.json"
    made = json.loads(path.read_text())
    edit(made)
    path.write_text(json.dumps(made))
    return folder


def swap_words(made: dict[str, Any]) -> None:
    vocabulary = made["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def reward_model(folder: Path, edit: Callable[[dict[str, Any]], None] | None = None) -> Path:
    made = zoo.tokenizer(zoo.checkpoint("llama", folder))
    return made if edit is None else edited(made, edit)


def settings(url: str, send: Any = "tokens", suffix: str = "") -> RemoteRewardConfig:
    return RemoteRewardConfig(RewardServer(urls=[url]), send=send, suffix=suffix, timeout_s=30.0)


def test_a_run_against_another_tokenizer_does_not_begin(tmp_path: Path) -> None:
    folder, model = tiny_policy(tmp_path), reward_model(tmp_path / "rm", swap_words)
    with serving(ModelConfig(model=str(model))) as server:
        config = ReinforceRunConfig(**parts(folder, tmp_path / "out", steps=1), remote_rm=settings(server.http_url))
        with pytest.raises(ConfigError, match="tokenizer differs from the policy's") as raised:
            reinforce.train(config)
        assert "text or messages" in raised.value.help
        assert not (tmp_path / "out" / "metrics.jsonl").read_text()
        config.remote_rm.send = "text"
        config.run.output_dir = str(tmp_path / "text")
        assert reinforce.train(config).step == 1


def test_a_run_against_a_critic_of_another_tokenizer_does_not_begin(tmp_path: Path) -> None:
    folder, model = tiny_policy(tmp_path), reward_model(tmp_path / "rm", swap_words)
    critic = CriticConfig(model=str(model), reward_model=str(model), checkpoint_dir=str(tmp_path / "critic"))
    with serving(critic=critic) as server:
        remote = RemoteCriticConfig(critic=CriticServer(url=server.http_url), timeout_s=30.0)
        config = PPORunConfig(**parts(folder, tmp_path / "out", steps=1), remote_critic_rm=remote)
        with pytest.raises(ConfigError, match="the critic's tokenizer differs from the policy's"):
            ppo.train(config)


def test_a_critics_own_reward_server_is_compared_too(tmp_path: Path) -> None:
    policy = zoo.tokenizer(tmp_path / "policy")
    same, other = reward_model(tmp_path / "same"), reward_model(tmp_path / "other", swap_words)
    critic, tokenizer = CriticConfig(model=str(same)), AutoTokenizer.from_pretrained(policy)
    with serving(ModelConfig(model=str(other)), critic=critic) as server:
        config = RemoteCriticConfig(
            RewardServer(urls=[server.http_url]),
            critic=CriticServer(url=server.http_url),
            combine_rm_and_critic_server=False,
            timeout_s=30.0,
        )
        with RemoteCritic(config) as remote, pytest.raises(ConfigError, match="the reward model's tokenizer"):
            remote.check_tokenizer(tokenizer, None)


def test_an_unreported_tokenizer_is_logged_and_the_run_continues(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path / "policy"))
    bare = zoo.checkpoint("llama", tmp_path / "bare")
    with (
        serving(ModelConfig(model=str(bare))) as server,
        RemoteRewards(settings(server.http_url)) as rewards,
        caplog.at_level(logging.INFO),
    ):
        rewards.check_tokenizer(tokenizer, None)
    assert [r.getMessage() for r in caplog.records if "does not report its tokenizer" in r.getMessage()]


def test_another_chat_template_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path / "policy", chat_template="other"))
    ending = Ending("", ())
    with (
        serving(ModelConfig(model=str(reward_model(tmp_path / "rm")))) as server,
        RemoteRewards(settings(server.http_url)) as rewards,
    ):
        rewards.check_tokenizer(tokenizer, None)
        assert "chat template" not in caplog.text
        rewards.check_tokenizer(tokenizer, ending)
    assert "the policy's chat template, which makes the token ids, differs from the reward model's" in caplog.text


def test_every_client_reads_the_configuration(tmp_path: Path) -> None:
    model = ModelConfig(model=str(reward_model(tmp_path / "rm")))
    config = ServerConfig(port=0, grpc_port=0, models=[model])

    with served.running(config=config) as server, LocalRewardModel(model.model) as local:
        told = [local.config()]
        for url in (server.http_url, server.grpc_url):
            assert url is not None
            with RewardClient(url) as client:
                told.append(client.config())
    own = identity(AutoTokenizer.from_pretrained(model.model))
    assert [config["parameters"]["tokenizer"]["string_value"] for config in told] == [own] * 3


def test_a_slow_tokenizer_is_the_fast_one_of_the_same_checkpoint(tmp_path: Path) -> None:
    from transformers import BertTokenizer
    from transformers.models.bert.tokenization_bert_legacy import BertTokenizerLegacy

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "inn"]
    (tmp_path / "vocab.txt").write_text("\n".join(words))
    made = {
        kind: [kind.from_pretrained(tmp_path), kind.from_pretrained(tmp_path)]
        for kind in (BertTokenizer, BertTokenizerLegacy)
    }
    (fast, more), (slow, more_slow) = made.values()
    assert fast.is_fast and not slow.is_fast
    assert difference(identity(fast), identity(slow)) is None
    for tokenizer in (more, more_slow):
        tokenizer.add_tokens(["<x>"])
    assert identity(more) == identity(more_slow) != identity(slow)


def test_only_what_ids_mean_makes_tokenizers_differ(tmp_path: Path) -> None:
    plain = zoo.tokenizer(tmp_path / "plain")
    own = identity(AutoTokenizer.from_pretrained(plain))

    def with_added(name: str, *tokens: str) -> str:
        tokenizer = AutoTokenizer.from_pretrained(plain)
        tokenizer.add_tokens(list(tokens))
        return identity(tokenizer)

    padded, thinking, both = with_added("p", "<x>"), with_added("t", "<think>"), with_added("b", "<x>", "<think>")
    assert difference(own, padded) is None and difference(padded, own) is None
    assert difference(padded, both) is None and difference(both, padded) is None
    assert "is <think> to the one, and <x> to the other" in str(difference(thinking, padded))
    assert difference(thinking, both) is not None
    without_template = identity(AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path / "bare", chat_template=None)))
    assert difference(own, without_template) is None
    swapped = edited(zoo.tokenizer(tmp_path / "swapped"), swap_words)
    assert difference(own, identity(AutoTokenizer.from_pretrained(swapped))) == "their vocabularies differ"


@pytest.mark.parametrize(("sent", "suffix", "says"), [("</s>\n", "", False), ("", "</s>", True), (None, "", True)])
def test_texts_that_end_otherwise_than_the_reward_models_template_are_said(
    sent: str | None, suffix: str, says: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(zoo.tokenizer(tmp_path / "policy"))
    with (
        serving(ModelConfig(model=str(reward_model(tmp_path / "rm")))) as server,
        RemoteRewards(settings(server.http_url, send="text", suffix=suffix)) as rewards,
    ):
        rewards.check_tokenizer(tokenizer, None if sent is None else Ending(sent, ()))
    assert ("ends an answer with '</s>\\n', and texts are sent with" in caplog.text) == says
