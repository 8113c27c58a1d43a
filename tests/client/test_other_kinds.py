"""Every client on every kind of model: it answers, or names the right client and the command that serves its kind."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

import served
import zoo
from guerdon import AsyncCriticClient, AsyncRewardClient, AsyncTeacherClient, CriticClient, RewardClient, TeacherClient
from guerdon.errors import InvalidRequest, UnknownModel
from guerdon.settings.config import (
    ComponentConfig,
    CriticConfig,
    ModelConfig,
    RewardConfig,
    ServerConfig,
    TeacherConfig,
)

ROWS = [[5, 6, 7]]
MASK, ZEROS = [[1.0, 1.0]], [[0.0, 0.0]]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, tuple[str, str]]]:
    """The HTTP and gRPC URLs of the server that has each model."""
    folder = tmp_path_factory.mktemp("kinds")
    reward_model, policy = str(zoo.checkpoint("llama", folder / "rm")), str(zoo.language_model("llama", folder / "lm"))
    steps = str(zoo.checkpoint("llama", folder / "prm", "tokcls", num_labels=2))
    models = [
        ModelConfig(model=reward_model),
        ModelConfig(model=steps, name="steps"),
        TeacherConfig(model=policy),
        ModelConfig(model="scorers:score", name="function"),
    ]
    total = RewardConfig(name="total", components=[ComponentConfig(model="reward_model")])
    configs = [
        ServerConfig(port=0, grpc_port=0, models=models, rewards=[total]),
        ServerConfig(port=0, grpc_port=0, critic=CriticConfig(model=reward_model)),
    ]
    with ExitStack() as stack:
        frozen, critic = (stack.enter_context(served.running(config=config)) for config in configs)
        of_critic = ("critic", "critic_infer", "critic_train")
        yield {
            **{name: (frozen.http_url, str(frozen.grpc_url)) for name in (*(m.name for m in models), "total")},
            **{name: (critic.http_url, str(critic.grpc_url)) for name in of_critic},
        }


def critic_of(url: str, name: str) -> CriticClient:
    """A client of the critic, or one that takes the model for each of a critic's."""
    return CriticClient(url, name if name == "critic" else dict.fromkeys(("infer", "train", "validate"), name))


ASKS: dict[str, tuple[type, Callable[[Any], Any]]] = {
    "score": (RewardClient, lambda client: client.score(tokens=ROWS)),
    "logprobs": (TeacherClient, lambda client: client.logprobs(tokens=ROWS)),
    "top": (TeacherClient, lambda client: client.top(2, tokens=ROWS)),
    "hidden": (TeacherClient, lambda client: client.hidden(tokens=ROWS)),
    "infer": (CriticClient, lambda client: client.infer(ROWS)),
    "infer_with_rewards": (CriticClient, lambda client: client.infer_with_rewards(ROWS)),
    "train": (CriticClient, lambda client: client.train(ROWS, ZEROS, ZEROS, MASK).result()),
    "train_loss": (CriticClient, lambda client: client.train_loss(ROWS, ZEROS, ZEROS, MASK).result()),
    "validate": (CriticClient, lambda client: client.validate(ROWS, ZEROS, ZEROS, MASK)),
}
REWARDS = ("reward_model", "steps", "function", "total")
GIVES = {  # by kind of model: the questions that it answers, and the client that asks them
    **dict.fromkeys(REWARDS, ({"score"}, "RewardClient")),
    "teacher": ({"logprobs", "top", "hidden"}, "TeacherClient"),
    "critic": ({"infer", "train", "train_loss", "validate"}, "CriticClient"),
    "critic_infer": ({"infer"}, "CriticClient"),
    "critic_train": ({"train", "train_loss", "validate"}, "CriticClient"),
}
COMMANDS = {
    RewardClient: "guerdon serve ",
    TeacherClient: "guerdon serve-teacher",
    CriticClient: "guerdon serve-critic",
}


@pytest.mark.parametrize("transport", [0, 1], ids=["http", "grpc"])
@pytest.mark.parametrize("ask", ASKS)
@pytest.mark.parametrize("kind", GIVES)
def test_a_client_of_another_kind_is_told_which(
    kind: str, ask: str, transport: int, urls: dict[str, tuple[str, str]]
) -> None:
    cls, call = ASKS[ask]
    answers, asker = GIVES[kind]
    make = critic_of if cls is CriticClient else cls
    with make(urls[kind][transport], kind) as client:
        if ask in answers:
            call(client)
            return
        with pytest.raises((InvalidRequest, UnknownModel)) as raised:
            call(client)
    said = str(raised.value)
    if kind == "critic_infer" and ask == "infer_with_rewards":
        assert "start its server with --reward-model" in said
    elif kind == "critic_infer" and cls is CriticClient:  # the operations of the same critic have other names
        assert "is no critic that trains: it gives values" in said
    elif kind == "critic" and ask == "infer_with_rewards":
        assert "start its server with --reward-model" in said
    else:
        assert COMMANDS[cls] in said and ("unknown model" in said or asker in said)


@pytest.mark.parametrize("name", [*REWARDS, "critic_infer", "critic_train"])
def test_only_a_teacher_has_a_head(name: str, urls: dict[str, tuple[str, str]]) -> None:
    with (
        TeacherClient(urls[name][0], name) as client,
        pytest.raises(
            InvalidRequest, match=f"{name} is no teacher, and has no output head; use a model of guerdon serve-teacher"
        ),
    ):
        client.head()


async def test_a_name_that_is_not_served_is_told_by_all_clients(urls: dict[str, tuple[str, str]]) -> None:
    for url in urls["teacher"]:
        for client, says in (
            (AsyncRewardClient(url, "x"), "RewardClient needs a model with rewards, such as guerdon serve offers"),
            (AsyncTeacherClient(url, "x"), "TeacherClient needs a model of guerdon serve-teacher"),
            (AsyncCriticClient(url, "x"), "CriticClient needs the models of guerdon serve-critic"),
        ):
            async with client:
                with pytest.raises(UnknownModel, match=f"unknown model 'x.*served here: .*{says}"):
                    await client.wait_ready(1)
                with pytest.raises(UnknownModel, match=f"unknown model 'x.*served here: .*{says}"):
                    await client.info()
