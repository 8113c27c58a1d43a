"""Servers that trainers' clients and adapters are tried against, and the texts that they have scored."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zoo
from guerdon.assembly import build_service
from guerdon.server.runtime import RunningServer
from guerdon.server.service import Service
from guerdon.settings.config import ComponentConfig, CriticConfig, ModelConfig, RewardConfig, ServerConfig

FAILS = "unscorable"
"""A text with this word has no score by `flaky`."""

_QUESTIONS = ("What is 2+2?", "Name a colour.", "Who wrote Faust?", "Say something kind — in français.")
_ANSWERS = ("4", "Blue, I think.", "Goethe did, in two parts.", "You are doing well; c'est très bien.")


def samples(count: int) -> list[dict[str, Any]]:
    """Prompts of four responses each, and a label for each response."""
    made = []
    for i in range(count):
        question = f"Question {i // 4}: {_QUESTIONS[i // 4 % 4]}\nAnswer:"
        made.append({"prompt": question, "response": f" {_ANSWERS[i % 4]} ({i})", "label": str(i % 3)})
    return made


def texts(samples: list[dict[str, Any]]) -> list[str]:
    """What is scored of each sample."""
    return [s["prompt"] + s["response"] for s in samples]


def agreement(texts: list[str], prompts: Any = None, labels: Any = None) -> list[float]:
    """A user's function: how often a text has its label's digit in it."""
    return [float(text.count(str(label))) for text, label in zip(texts, labels, strict=True)]


def graded_answer(responses: list[str], labels: Any = None) -> list[float]:
    """A user's function of the assistant's answers: how often an answer has its label's digit in it."""
    return agreement(responses, labels=labels)


def shortness(responses: list[str]) -> list[float]:
    """The README's function: a scorer of lengths."""
    return [1 / (1 + len(response)) for response in responses]


def stars(responses: list[str]) -> list[float]:
    """A scorer of whole stars, which tells few texts from another."""
    return [float(sum(response.encode()) % 3) for response in responses]


def flaky(texts: list[str]) -> list[float]:
    """A user's function that has no score for some texts."""
    return [math.nan if FAILS in text else float(len(text)) for text in texts]


def reward_model(folder: Path) -> Path:
    """A small random reward model with a tokenizer and a chat template."""
    return zoo.tokenizer(zoo.checkpoint("llama", folder, num_labels=1))


@contextmanager
def plain(folder: Path) -> Iterator[RunningServer]:
    """`reward_model`, whose scores are bitwise the same whatever shares their batch; 127.0.0.1, HTTP and gRPC."""
    with running(ModelConfig(model=str(reward_model(folder / "rm")), deterministic=True), grpc_port=0) as server:
        yield server


@contextmanager
def sums(folder: Path) -> Iterator[RunningServer]:
    """The same model as `helpful`, the functions above, and two sums: `total` for texts, `graded` for conversations."""
    models = [
        ModelConfig(model=str(reward_model(folder / "rm")), name="helpful", deterministic=True),
        ModelConfig(model="served:agreement", name="agreement"),
        ModelConfig(model="served:flaky", name="flaky"),
        ModelConfig(model="served:graded_answer", name="graded_answer"),
    ]
    rewards = [
        RewardConfig(
            name=name,
            components=[ComponentConfig(model="helpful"), ComponentConfig(model=function, weight=0.5, clip=3.0)],
        )
        for name, function in (("total", "agreement"), ("graded", "graded_answer"))
    ]
    with running(*models, rewards=rewards, grpc_port=0) as server:
        yield server


@contextmanager
def critic(folder: Path) -> Iterator[RunningServer]:
    """A critic that trains and keeps checkpoints, and beside it the reward model that it began as."""
    model = str(reward_model(folder / "rm"))
    config = CriticConfig(model=model, reward_model=model, checkpoint_dir=str(folder / "checkpoints"))
    config.deterministic, config.global_batch_size = True, 3
    with running(critic=config, grpc_port=0) as server:
        yield server


@contextmanager
def running(
    *models: Any,
    config: ServerConfig | None = None,
    build: Callable[[ServerConfig], Service] = build_service,
    grace_s: float | None = None,
    **settings: Any,
) -> Iterator[RunningServer]:
    """Serves these models with these settings, or `config`, in threads of this process; without gRPC unless set."""
    if config is None:
        config = ServerConfig(**{"port": 0, "grpc_port": None, "models": [*models], **settings})
    with RunningServer(build(config), config, grace_s=grace_s) as server:
        yield server


def briefly(ask: Callable[[str], object] = lambda url: None) -> Callable[..., None]:
    """In place of `runtime.run`: serves until `ask` of the URL returns, instead of until a signal comes."""

    def run(service: Service, config: ServerConfig, on_started: Callable[[str, str | None], None]) -> None:
        with RunningServer(service, config) as server:
            on_started(server.http_url, server.grpc_url)
            ask(server.http_url)

    return run


Serve = Callable[..., RunningServer]
"""The fixture `serve`: takes the arguments of `running`; its servers run until the module's last test has ended."""
