"""A share of what was answered is scored again by the plain forward: after the answer, counted, and told."""

from __future__ import annotations

import asyncio
import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import zoo
from guerdon.assembly import build_service
from guerdon.core import Command, Score, Scored, ScoreRequest, Sequence, Signal
from guerdon.errors import Offloaded, SampleFailed
from guerdon.server.batching.jobs import Job, Limits
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.recheck import compare
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.metrics import Metrics
from guerdon.settings.config import ModelConfig, ServerConfig

BAD = 7
"""The first id of what has no score."""


class TwoPaths:
    """Rewards are the first ids; the plain forward gives `apart` more, and `plain_error` is raised there."""

    def __init__(self) -> None:
        self.apart = 0.0
        self.plain_error: BaseException | None = None
        self.answered = threading.Event()
        self.batches_answered = 0
        self.commands: list[Command] = []

    def execute(self, command: Command) -> Scored | None:
        if command.signal is Signal.EXIT:
            return None
        self.commands.append(command)
        if command.plain:
            batches = sum(not c.plain for c in self.commands)
            assert self.batches_answered == batches  # nobody waits for this
            if self.plain_error is not None:
                raise self.plain_error
        more = self.apart if command.plain else 0.0
        firsts = [int(s.tokens[0]) for s in command.sequences]
        return Scored([SampleFailed("bad") if n == BAD else Score(n + more) for n in firsts], "1")


class Checked:
    """A loop over the models `m`, of which a share is scored again, and `other`, of which none is."""

    def __init__(self, share: float = 1.0, dtype: str = "float32") -> None:
        self.group, self.metrics = TwoPaths(), Metrics()
        schedulers = {name: Scheduler(Limits()) for name in ("m", "other")}
        self.loop = Loop(
            self.group, schedulers, self._deliver, self.metrics, on_crash=lambda: None,
            recheck={"m": share, "other": 0.0}, dtypes={"m": dtype},
        )  # fmt: skip
        self.loop.start()

    def _deliver(self, jobs: list[Job]) -> None:
        self.group.batches_answered += 1
        self.group.answered.set()

    def score(self, *firsts: int, model: str = "m") -> None:
        self.group.answered.clear()
        self.loop.submit(model, Job([Sequence(np.array([n, i])) for i, n in enumerate(firsts)]))
        assert self.group.answered.wait(120)

    def told(self, outcome: str) -> float:
        value = self.metrics._registry.get_sample_value(
            "guerdon_recheck_sequences_total", {"model": "m", "outcome": outcome}
        )
        return value or 0.0

    def __enter__(self) -> Checked:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.loop.stop(20)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]


def test_scores_that_agree_are_counted_so_and_what_failed_is_not_compared(caplog: pytest.LogCaptureFixture) -> None:
    with Checked() as checked:
        checked.group.apart = 1e-4
        checked.score(1, BAD, 3)
    assert [len(c.sequences) for c in checked.group.commands] == [3, 1, 2]  # a failed one at once
    assert checked.group.commands[1].plain and not checked.group.commands[0].plain
    assert (checked.told("same"), checked.told("differs"), checked.told("failed")) == (2, 0, 0)
    total = checked.metrics._registry.get_sample_value("guerdon_recheck_difference_sum", {"model": "m"})
    assert total == pytest.approx(2e-4) and not warnings(caplog)


def test_scores_that_differ_are_counted_and_told_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    with Checked() as checked:
        checked.group.apart = 0.25
        checked.score(1, 1000)  # of 1000 it is little
        checked.score(2)
    assert (checked.told("same"), checked.told("differs")) == (1, 2)
    (warned,) = warnings(caplog)
    assert warned.startswith("m: scores differ from the plain forward's by up to 0.25")


@pytest.mark.parametrize(("dtype", "outcome"), [("float32", "differs"), ("bfloat16", "same"), ("float16", "same")])
def test_half_precision_may_differ_by_more(dtype: str, outcome: str) -> None:
    with Checked(dtype=dtype) as checked:
        checked.group.apart = 0.01
        checked.score(1)
    assert checked.told(outcome) == 1


@pytest.mark.parametrize("error", [ValueError("a text that nobody else may read"), MemoryError(), SystemExit(1)])
def test_a_plain_forward_that_fails_changes_no_answer(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    with Checked() as checked:
        checked.group.plain_error = error
        checked.score(1, 2)
        checked.score(3)
    assert checked.told("failed") == 3
    assert len(warnings(caplog)) == 1 and "nobody else" not in caplog.text


def test_weights_that_are_gone_by_then_are_no_difference(caplog: pytest.LogCaptureFixture) -> None:
    with Checked() as checked:
        checked.group.plain_error = Offloaded("the weights are off the device")
        checked.score(1)
    assert checked.told("failed") == 0 and not warnings(caplog)


def test_a_share_is_a_share_and_a_model_without_one_is_left_alone() -> None:
    with Checked(share=0.25) as checked:
        checked.score(*range(10, 1010))
        checked.score(*range(10, 1010), model="other")
    assert 180 < checked.told("same") < 320
    assert len(checked.group.commands) == 3


def test_all_that_a_score_has_is_compared() -> None:
    values = np.array([1.0, 2.0, 4.0], np.float32)
    assert compare(Score(1.0, values=values), Score(1.0, values=values + np.array([0, 0, 2]))) == (
        2.0,
        pytest.approx(1 / 3),
    )
    assert compare(Score(1.0, steps=values), Score(1.0, steps=values + np.array([0, 0.5, 0])))[0] == 0.5
    assert compare(Score(1.0, attributes=values), Score(1.0))[0] == np.inf
    assert compare(Score(1.0, values=values), Score(1.0, values=values[:2]))[0] == np.inf
    assert compare(Score(1.0), Score(float("nan")))[1] == np.inf
    assert compare(Score(5.0), Score(1.0), wants_reward=False) == (0.0, 0.0)


def test_a_served_models_scores_are_those_of_its_plain_forward(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "rm")
    service = build_service(ServerConfig(models=[ModelConfig(model=str(folder), recheck_share=1.0)]))

    async def scored() -> Any:
        service.start()
        rows = [np.arange(4, 20 + i) for i in range(12)]
        reply = await service.score("reward_model", ScoreRequest(tokens=rows))
        await asyncio.to_thread(service.stop)
        return reply

    reply = asyncio.run(scored())
    assert all(isinstance(r, Score) for r in reply.results)
    told = service.metrics.render().decode()
    assert 'guerdon_recheck_sequences_total{model="reward_model",outcome="same"} 12.0' in told
