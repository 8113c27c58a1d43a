"""A critic of SmolLM2 that the command serves: what it values, learns and keeps, against transformers and torch.

The reference computes one sequence at a time, in float32 and in float64, which says what the true result is. guerdon
may be as far from it as plain float32, times `SLACK`, for it adds up the same numbers in another order.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from released import MARKS, SMOLLM2, chats
from safetensors import safe_open
from torch import Tensor
from transformers import AutoTokenizer

from guerdon import CriticClient, TrainReport
from processes import environment
from training.plain import PlainCritic, request

pytestmark = MARKS

LR = 1e-3
"""Large enough that a step is seen in every weight."""
SLACK = 3.0


@dataclass
class Life:
    """What a critic said before it was killed and after, and the checkpoint between its two train requests."""

    before: list[np.ndarray]
    report: TrainReport
    after: list[np.ndarray]
    checkpoint: Path
    at_the_end: list[np.ndarray]
    again: list[np.ndarray]
    steps: tuple[int, int]


class FirstStep:
    """torch's AdamW, a parameter at a time, in a third of the memory: it keeps no moments, and so can make one step."""

    def __init__(self, adamw: torch.optim.AdamW) -> None:
        (group,) = adamw.param_groups
        self._parameters: list[Tensor] = group["params"]
        self._settings = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}

    def zero_grad(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None

    def step(self) -> None:
        for parameter in self._parameters:
            torch.optim.AdamW([parameter], **self._settings).step()
        self.zero_grad()


@dataclass
class Reference:
    """What plain torch makes of the same request; `weights` are those after it, by their names in a checkpoint."""

    before: list[np.ndarray]
    loss: float
    norm: float
    weights: dict[str, Tensor]
    after: list[np.ndarray]

    @classmethod
    def of(cls, folder: Path, rows: list[np.ndarray], dtype: torch.dtype) -> Reference:
        plain = PlainCritic(folder, lr=LR, dtype=dtype)
        plain.optimiser = FirstStep(plain.optimiser)  # type: ignore[assignment]
        before = values_of(plain, rows)
        (loss,), (norm,) = plain.train(request(rows), len(rows))
        weights = {f"model.{name}": p.detach() for name, p in plain.trunk.named_parameters()}
        weights["score.weight"] = plain.head.weight.detach()
        return cls(before, loss, norm, weights, values_of(plain, rows))


@torch.no_grad()
def values_of(plain: PlainCritic, rows: list[np.ndarray]) -> list[np.ndarray]:
    return [plain.values(row).double().numpy() for row in rows]


@contextmanager
def served(model: Path, folder: Path) -> Iterator[tuple[CriticClient, subprocess.Popen[str]]]:
    """A client of `guerdon serve-critic`, which is killed by SIGKILL at the end."""
    flags = ["--port", "0", "--no-grpc", "--learning-rate", str(LR), "--checkpoint-dir", str(folder)]
    command = [sys.executable, "-m", "guerdon", "serve-critic", str(model), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert process.stdout is not None
        url = next(line for line in process.stdout if "ready at" in line).split()[3]
        with CriticClient(url) as client:
            yield client, process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture(scope="module")
def rows() -> list[np.ndarray]:
    """Six sequences of two answers to each of three prompts."""
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    return [np.array(tokenizer.apply_chat_template(chat, tokenize=True, return_dict=False)) for chat in chats((4, 20))]


@pytest.fixture(scope="module")
def life(reward_model: Path, rows: list[np.ndarray], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder, asked = tmp_path_factory.mktemp("critic"), request(rows)
    arrays = {name: getattr(asked, name) for name in ("tokens", "returns", "prev_values", "mask")}
    with served(reward_model, folder) as (client, _):
        before = client.infer(tokens=rows).values
        report = client.train(**arrays).result(600)
        after = client.infer(tokens=rows).values
        checkpoint = folder / client.save().name
        # One more, which is only in the journal when the server dies.
        client.train(**arrays).result(600)
        at_the_end, step = client.infer(tokens=rows).values, client.state().step
    with served(reward_model, folder) as (client, _):
        again, steps = client.infer(tokens=rows).values, (step, client.state().step)
    yield Life(before, report, after, checkpoint, at_the_end, again, steps)
    shutil.rmtree(folder)  # gigabytes


@pytest.fixture(scope="module")
def single(life: Life, reward_model: Path, rows: list[np.ndarray]) -> Reference:
    """Computed when the server is gone, whose memory it needs."""
    return Reference.of(reward_model, rows, torch.float32)


@pytest.fixture(scope="module")
def exact(life: Life, reward_model: Path, rows: list[np.ndarray]) -> Reference:
    return Reference.of(reward_model, rows, torch.float64)


def distance(a: list[np.ndarray], b: list[np.ndarray]) -> float:
    return float(np.linalg.norm(np.concatenate(a) - np.concatenate(b)))


def test_values_are_those_of_transformers(life: Life, single: Reference, exact: Reference) -> None:
    for name in ("before", "after"):
        got, plain, true = (getattr(source, name) for source in (life, single, exact))
        assert distance(got, true) <= SLACK * distance(plain, true)
        np.testing.assert_allclose(np.concatenate(got), np.concatenate(plain), atol=1e-4)
        assert np.concatenate(true).std() > 0.5


def test_a_train_request_is_the_step_of_plain_torch(
    life: Life, single: Reference, exact: Reference, reward_model: Path
) -> None:
    assert (life.report.num_steps, life.report.num_skipped) == (1, 0)
    np.testing.assert_allclose(life.report.loss, single.loss, rtol=1e-5)
    np.testing.assert_allclose(life.report.grad_norm, single.norm, rtol=1e-5)
    squares = np.zeros(3)
    with (
        safe_open(life.checkpoint / "model.safetensors", "pt") as learnt,
        safe_open(reward_model / "model.safetensors", "pt") as begun,
    ):
        assert set(learnt.keys()) == exact.weights.keys()
        for name, true in exact.weights.items():
            moved = true - begun.get_tensor(name)
            assert moved.any(), f"{name} did not move"
            errors = learnt.get_tensor(name) - true, single.weights[name] - true
            squares += [x.square().sum().item() for x in (*errors, moved)]
    # AdamW's first step is as large for a gradient of rounding noise as for any other, so that a few weights go the
    # other way, by chance; over all weights the distances are comparable.
    ours, plain, moved = np.sqrt(squares)
    assert plain < 1e-3 * moved
    assert ours <= SLACK * plain


def test_a_killed_critic_has_the_same_values_bitwise(life: Life) -> None:
    assert life.steps == (2, 2)
    for kept, again, earlier in zip(life.at_the_end, life.again, life.after, strict=True):
        np.testing.assert_array_equal(kept, again)
        assert (kept != earlier).any()
