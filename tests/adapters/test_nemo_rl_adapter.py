"""NeMo-RL's environment of a served reward model, called as its rollouts call it."""

import pickle
from typing import Any

import pytest
import torch

import served
from guerdon.adapters.nemo_rl import RewardEnvironment
from guerdon.errors import ConfigError, InvalidRequest, SampleFailed, Unreachable
from guerdon.settings.config import ModelConfig
from served import Serve
from server.echo_service import MAX_LENGTH, EchoService

LOGS = [
    [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "the reason"}],
    [{"role": "user", "content": "why?"}, {"role": "assistant", "content": "no"}],
    [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": "who?"},
        {"role": "assistant", "content": "I"},
    ],
]
INFO = [{"ground_truth": "reason"}, {"ground_truth": "no"}, None]


@pytest.fixture(scope="module")
def service() -> EchoService:
    return EchoService()


@pytest.fixture(scope="module")
def url(service: EchoService, serve: Serve) -> str:
    return serve(build=lambda _: service, grace_s=0.1).http_url


def test_a_step_rewards_whole_conversations(url: str, service: EchoService) -> None:
    environment = RewardEnvironment({"url": url})
    logs = [[message | {"token_ids": torch.tensor([1])} for message in log] for log in LOGS]
    observations, metadata, stop, rewards, terminateds, answers = environment.step(logs, INFO)
    wanted = [float(len(str(log))) for log in LOGS]
    assert (rewards.dtype, rewards.tolist()) == (torch.float32, wanted)
    assert (terminateds.dtype, terminateds.tolist()) == (torch.bool, [True] * 3)
    assert (metadata, stop, answers) == ([None] * 3, [None] * 3, ["the reason", "no", "I"])
    assert observations[0] == {"role": "environment", "content": f"Environment: {wanted[0]}"}
    asked = service.requests[-1]
    assert asked.messages == LOGS and asked.groups is not None
    assert asked.groups[0] == asked.groups[1] != asked.groups[2]
    assert len(logs[0]) == 2 and len(logs[0][0]) == 3  # NeMo-RL goes on with them


def test_evaluation_asks_with_a_third_argument_and_by_name(url: str) -> None:
    returned = RewardEnvironment({"url": [url]}).step(LOGS, INFO, True)
    assert returned.rewards.shape == (3,) and returned.answers[1] == "no"
    assert pickle.loads(pickle.dumps(returned)).answers == returned.answers  # noqa: S301 - Ray does


def test_prompts_that_have_a_template_already_go_as_texts(url: str, service: EchoService) -> None:
    environment = RewardEnvironment({"url": url, "send": "texts", "ending": "<end>"})
    assert environment.step(LOGS[:2], INFO[:2]).rewards.tolist() == [19.0, 11.0]
    assert service.requests[-1].texts == ["why?the reason<end>", "why?no<end>"]


def labelled(texts: list[str], labels: list[Any]) -> list[float]:
    return [float(text.endswith(label)) for text, label in zip(texts, labels, strict=True)]


def test_labels_go_with_the_samples_and_a_model_without_a_template_is_told() -> None:
    with served.running(ModelConfig(model=f"{__name__}:labelled"), grace_s=0) as server:
        environment = RewardEnvironment({"url": server.http_url, "send": "texts", "labels": "ground_truth"})
        assert environment.step(LOGS[:2], [{"ground_truth": "reason"}, {"ground_truth": "yes"}]).rewards.tolist() == [
            1,
            0,
        ]
        with pytest.raises(InvalidRequest, match="takes no input 'messages'"):
            RewardEnvironment({"url": server.http_url}).step(LOGS, INFO)


def test_metrics_of_a_batch(url: str) -> None:
    batch = {"rewards": torch.tensor([1.0, 2.0, 6.0])}
    same, metrics = RewardEnvironment({"url": url}).global_post_process_and_metrics(batch)
    assert same is batch
    assert metrics["guerdon/mean_reward"] == 3.0 and metrics["guerdon/max_reward"] == 6.0


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        ({}, "no url"),
        ({"url": "h:1", "send": "tokens"}, "send is 'tokens'"),
        (
            {"url": "h:1", "modle": "zz"},
            "unknown setting of the environment: modle; known here: url, model, send, ending, labels, timeout_s",
        ),
    ],
)
def test_settings_that_do_not_hold(cfg: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardEnvironment(cfg)


def test_a_row_that_is_too_long_is_named(url: str) -> None:
    long = [[{"role": "user", "content": "x" * MAX_LENGTH}, {"role": "assistant", "content": "y"}]]
    with pytest.raises(
        SampleFailed, match=f"1 of 4 samples failed; row 3: the sample has .* takes at most {MAX_LENGTH}"
    ):
        RewardEnvironment({"url": url}).step(LOGS + long, [*INFO, None])


def test_errors_survive_the_way_to_another_process(url: str) -> None:
    for error in (ConfigError("no url", "give one"), Unreachable("gone", may_have_arrived=False)):
        error.add_note("a note")
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - Ray does
        assert (type(copy), str(copy), vars(copy)) == (type(error), str(error), vars(error))


def test_contents_in_parts_are_texts(url: str, service: EchoService) -> None:
    parts = [{"type": "text", "text": "why?"}]
    logs = [[{"role": "user", "content": parts}, {"role": "assistant", "content": "no"}]]
    RewardEnvironment({"url": url, "send": "texts"}).step(logs, [None])
    assert service.requests[-1].texts == ["why?no"]
    with pytest.raises(InvalidRequest, match="message 0 needs a content"):
        RewardEnvironment({"url": url, "send": "texts"}).step([[{"role": "user"}]], [None])


def test_prompts_with_a_template_are_warned_of_once(url: str, caplog: pytest.LogCaptureFixture) -> None:
    logs = [[{"role": "user", "content": "<|im_start|>user\nwhy?"}, {"role": "assistant", "content": "no"}]]
    RewardEnvironment({"url": url, "send": "texts"}).step(logs, [None])
    RewardEnvironment({"url": url}).step(LOGS, INFO)
    assert not caplog.records
    environment = RewardEnvironment({"url": url})
    for _ in range(2):
        environment.step(logs, [None])
    (record,) = caplog.records
    assert "already have a chat template" in record.message


def test_it_is_shut_down_at_the_end(url: str) -> None:
    RewardEnvironment({"url": url}).shutdown()
