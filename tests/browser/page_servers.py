"""Servers whose page is looked at, the load that they are under, and functions whose rewards are told apart there."""

import itertools
import random
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np

import served
from guerdon.client import RewardClient
from guerdon.settings.config import ComponentConfig, CriticConfig, ModelConfig, RewardConfig, ServerConfig
from stand_in import Handler, serving_http

MARKUP = '<img src=x onerror="window.wasRun = true"><script>window.wasRun = true</script><b>bold</b>'
"""A client's text that a careless page would take for its own."""

BREAKS = "unscorable"
FUNCTIONS = ("longwinded", "marked", "fair", "broken")


def longwinded(tokens: list[np.ndarray]) -> list[float]:
    """A reward that a policy gets by being long."""
    return [len(row) / 20 for row in tokens]


def marked(texts: list[str]) -> list[float]:
    """A reward that a policy gets by markup."""
    return [float(text.count("<")) for text in texts]


def fair(texts: list[str]) -> list[float]:
    """A reward that has nothing to do with the length."""
    return [(zlib.crc32(text.encode()) % 1000) / 250 - 2 for text in texts]


def broken(texts: list[str]) -> list[float]:
    """A function that has a mistake."""
    return [float("nan") if BREAKS in text else 1.0 for text in texts]


def settings(folder: Path | None, **others: Any) -> ServerConfig:
    """The functions of this module and, if there is a folder for it, a small checkpoint `reward_model`."""
    models = [ModelConfig(model=f"browser.page_servers:{name}", name=name) for name in FUNCTIONS]
    models.append(ModelConfig(model="browser.page_servers:marked", name="twice"))
    if folder is not None:
        models.insert(0, ModelConfig(model=str(served.reward_model(folder / "rm"))))
    return ServerConfig(**{"port": 0, "grpc_port": None, "models": models, **others})


def total() -> RewardConfig:
    """A sum of two of the functions, by the name `total`."""
    return RewardConfig(name="total", components=[ComponentConfig(model="fair"), ComponentConfig(model="marked")])


def critic_settings(folder: Path, *, is_alone: bool = False) -> ServerConfig:
    """A critic, which also gives rewards unless it is alone."""
    model = str(served.reward_model(folder / "rm"))
    critic = CriticConfig(model=model, checkpoint_dir=str(folder / "checkpoints"))
    critic.reward_model = None if is_alone else model
    critic.global_batch_size, critic.learning_rate = 4, 1e-3
    return ServerConfig(port=0, grpc_port=None, critic=critic)


def texts(rng: random.Random, count: int = 8) -> list[str]:
    """Responses of all lengths to one prompt."""
    prompt = f"Question {rng.randrange(10_000)}: what is it?"
    return [prompt + " word" * rng.randrange(1, 40) + f" {rng.random():.3f}" for _ in range(count)]


def train_rows(rng: np.random.Generator, count: int) -> dict[str, list[np.ndarray]]:
    """What a critic is trained with: rows of random tokens, and targets."""
    rows = [rng.integers(4, 300, size=12) for _ in range(count)]
    floats = [np.ones(11, np.float32) for _ in rows]
    return {"tokens": rows, "returns": floats, "prev_values": [0 * row for row in floats], "mask": floats}


@contextmanager
def under_a_prefix(origin: str, prefix: str) -> Iterator[str]:
    """The URL of a proxy that has the server of that origin under the prefix alone."""

    class Proxy(Handler):
        def pass_on(self) -> None:
            if not self.path.startswith(prefix + "/"):
                self.send_error(404)
                return
            body = self.read_body()
            kind = {"content-type": self.headers.get("content-type", "text/plain"), "accept-encoding": "identity"}
            answer = client.request(self.command, self.path.removeprefix(prefix), content=body, headers=kind)
            kept = {"content-type", "content-security-policy"} & answer.headers.keys()
            self.answer(answer.content, answer.status_code, **{name: answer.headers[name] for name in kept})

        do_GET = do_POST = pass_on

    with httpx.Client(base_url=origin) as client, serving_http(Proxy) as url:
        yield f"{url}{prefix}/"


@contextmanager
def load(url: str, *models: str) -> Iterator[None]:
    """Has a client of each model send requests until the context is left: many at first, so that all charts fill."""
    is_over = threading.Event()

    def ask(model: str) -> None:
        rng = random.Random(model)
        with RewardClient(url, model=model) as client:
            for i in itertools.count():
                if is_over.wait(0.05 if i < 40 else 0.4):
                    break
                if model == "longwinded":
                    client.score(tokens=[np.ones(rng.randrange(4, 200), np.int64) for _ in range(8)])
                else:
                    client.score(texts=texts(rng))

    threads = [threading.Thread(target=ask, args=(model,)) for model in models]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
