"""A path that fails while it serves is left once, with a warning, and the request is served by the plain forward."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AttentionInterface

import zoo
from guerdon.assembly import build_scorer
from guerdon.core import Score, Sequence
from guerdon.critic_core import TrainRequest
from guerdon.distributed.commands import Worker
from guerdon.engine.attention import registry
from guerdon.engine.engine import Engine
from guerdon.errors import GuerdonError, SampleFailed, ServerFault, TrainFailed
from guerdon.server.batching.jobs import Job, Limits
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.scheduler import Scheduler
from guerdon.server.metrics import Metrics
from guerdon.settings.config import ModelConfig
from training.critics import build, same, weights

pytestmark = pytest.mark.usefixtures("one_self_check")

LONG = 100
"""Tokens of a batch with which the attention begins to fail, which is more than any probe of the start has."""
NOT_COMPATIBLE = RuntimeError("view size is not compatible with input tensor's size and stride\nUse .reshape(...).")
NO_MEMORY = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes")


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Exception], None]]:
    """Makes the packed attention raise the error for long rows, from now on."""

    def install(error: Exception) -> None:
        def failing(module: Any, query: torch.Tensor, *given: Any, **more: Any) -> Any:
            if query.shape[2] > LONG:
                raise error
            return registry.packed_attention(module, query, *given, **more)

        AttentionInterface.register(registry.NAME, failing)

    yield install
    registry.register()


class Serving:
    """A server's loop over one model."""

    def __init__(self, scorer: Any) -> None:
        self.scorer = scorer
        self.loop = Loop(
            Worker({"m": scorer}), {"m": Scheduler(Limits(max_batch_tokens=4096))}, self._deliver, Metrics(),
            on_crash=lambda: None,
        )  # fmt: skip
        self.loop.start()

    def _deliver(self, jobs: list[Job]) -> None:
        for job in jobs:
            job.owner.set()  # type: ignore[attr-defined]

    def score(self, rows: list[np.ndarray]) -> list[Score | GuerdonError]:
        job = Job([Sequence(row) for row in rows], owner=threading.Event())
        self.loop.submit("m", job)
        assert job.owner.wait(120)  # type: ignore[attr-defined]
        return list(job.results)

    def rewards(self, rows: list[np.ndarray]) -> np.ndarray:
        results = self.score(rows)
        assert all(isinstance(result, Score) for result in results), results
        return np.array([result.reward for result in results])  # type: ignore[union-attr]

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        assert self.loop.stop(20)


def texts(*lengths: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    return [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in lengths]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING and "the path" in r.getMessage()]


def reward_model(folder: Path) -> Engine:
    engine = build_scorer(ModelConfig(model=str(zoo.checkpoint("llama", folder)), name="rm"))
    assert isinstance(engine, Engine) and engine.path == "packed+shared"
    return engine


def test_the_request_is_served_and_the_path_left_once(
    tmp_path: Path, fail: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    engine, rows = reward_model(tmp_path), texts(10, 150, 20, 120)
    want = zoo.reference(tmp_path, rows)
    with Serving(engine) as serving:
        fail(NOT_COMPATIBLE)
        np.testing.assert_allclose(serving.rewards(rows[:1]), want[:1], atol=1e-5)
        assert engine.info.path == "packed+shared" and not warnings(caplog)
        np.testing.assert_allclose(serving.rewards(rows), want, atol=1e-5)
        assert engine.info.path == engine.path == "single"
        assert engine.info.why.startswith("packed+shared failed while it served: the model failed on this sample: Runt")
        assert "same bits in any batch" not in engine.info.proofs
        assert "view size is not compatible" in engine.info.why and "\n" not in engine.info.why
        np.testing.assert_allclose(serving.rewards(rows[1:2]), want[1:2], atol=1e-5)
    (line,) = warnings(caplog)
    assert line.startswith("rm: the path packed+shared fails on samples that the plain forward computes, and is not ")


def test_a_path_without_finite_scores_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The request is served, and a sample that is not finite by the plain forward either leaves no path."""
    engine, rows = reward_model(tmp_path), texts(10, 150, 20, 120)
    want = zoo.reference(tmp_path, rows)
    plain = registry.packed_attention

    def broken(module: Any, query: torch.Tensor, *given: Any, **more: Any) -> Any:
        out, none = plain(module, query, *given, **more)
        return out * (torch.nan if query.shape[2] > LONG else 1), none

    AttentionInterface.register(registry.NAME, broken)
    try:
        with Serving(engine) as serving, monkeypatch.context() as patched:
            patched.setattr(engine, "score_plainly", lambda sequences: [SampleFailed("not finite") for _ in sequences])
            assert all(isinstance(result, SampleFailed) for result in serving.score(rows))
            assert engine.info.path == "packed+shared" and not warnings(caplog)
            patched.undo()
            np.testing.assert_allclose(serving.rewards(rows), want, atol=1e-5)
            assert engine.info.path == "single" and "this sample is not finite: nan" in engine.info.why
            np.testing.assert_allclose(serving.rewards(rows[1:2]), want[1:2], atol=1e-5)
    finally:
        registry.register()
    assert len(warnings(caplog)) == 1


def test_lack_of_memory_leaves_no_path(
    tmp_path: Path, fail: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    engine, rows = reward_model(tmp_path), texts(60, 60, 60, 150)
    with Serving(engine) as serving:
        fail(NO_MEMORY)
        *others, large = serving.score(rows)
    assert all(isinstance(result, Score) for result in others) and isinstance(large, ServerFault)
    assert engine.path == "packed+shared" and not warnings(caplog)


def test_a_sample_that_the_plain_forward_refuses_too_leaves_no_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine, rows = reward_model(tmp_path), texts(10, 20, 30)
    run_trunk = engine.run_trunk

    def run(**inputs: Any) -> Any:
        if (inputs["input_ids"] == rows[1][3]).any():
            raise RuntimeError("a poisoned token")
        return run_trunk(**inputs)

    rows[0] = rows[0][rows[0] != rows[1][3]]
    rows[2] = rows[2][rows[2] != rows[1][3]]
    monkeypatch.setattr(engine, "run_trunk", run)
    with Serving(engine) as serving:
        first, poisoned, last = serving.score(rows)
    assert isinstance(first, Score) and isinstance(last, Score) and isinstance(poisoned, ServerFault)
    assert "a poisoned token" in str(poisoned)
    assert engine.path == "packed+shared" and not warnings(caplog)


# ------------------------------------------------------------------------------------------------------ learning


def request(rows: list[np.ndarray], name: str = "first") -> TrainRequest:
    """As critics get them: padded tokens, targets for all but the last."""
    width = max(map(len, rows))
    tokens = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
    mask = np.stack([np.arange(width - 1) < len(row) - 1 for row in rows]).astype(np.float32)
    returns = np.random.default_rng(1).normal(size=mask.shape).astype(np.float32) * mask
    return TrainRequest(name, tokens, np.zeros_like(mask), returns, mask)


ROWS = texts(20, 25, 30, 20, 25, 130, 20, 140, 30, 25, 20, 30)
"""Of three global batches the second has the long rows."""


def test_a_step_is_made_once_and_whole_by_the_plain_forward(
    tmp_path: Path, fail: Callable[[Exception], None], caplog: pytest.LogCaptureFixture
) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    want, got = (build(folder, max_batch_tokens=90) for _ in range(2))
    expected = want.train(request(ROWS))
    fail(NOT_COMPATIBLE)
    report = got.train(request(ROWS))
    assert want.engine.path == "packed+shared" and got.engine.path == got.info.path == "single"
    assert (report.num_steps, report.step, len(report.losses)) == (3, 3, 3)
    assert report.weights_version == expected.weights_version
    np.testing.assert_allclose(report.losses, expected.losses, rtol=1e-4)
    for name, tensor in weights(want).items():
        torch.testing.assert_close(weights(got)[name], tensor, atol=2e-4, rtol=0)
    (line,) = warnings(caplog)
    assert "view size is not compatible" in line
    assert got.train(request(ROWS, "second")).num_steps == 3


def test_a_step_without_memory_leaves_the_path_and_changes_nothing(
    tmp_path: Path, fail: Callable[[Exception], None]
) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    one, broken = (build(folder, max_batch_tokens=90) for _ in range(2))
    one.train(request(ROWS), first_batches=1)
    fail(NO_MEMORY)
    with pytest.raises(TrainFailed, match="global batch 2 of 3 failed"):
        broken.train(request(ROWS))
    assert broken.engine.path == "packed+shared" and same(weights(broken), weights(one))


@pytest.mark.slow
def test_values_and_losses_are_measured_by_the_plain_forward(tmp_path: Path, fail: Callable[[Exception], None]) -> None:
    folder = zoo.checkpoint("llama", tmp_path)
    want, got = (build(folder, max_batch_tokens=90) for _ in range(2))
    expected = want.validate(request(ROWS))
    fail(NOT_COMPATIBLE)
    report = got.validate(request(ROWS))
    assert got.engine.path == "single" and report.num_steps == 0
    np.testing.assert_allclose(report.losses, expected.losses, rtol=1e-4)
