"""Several passes over the rows of one train request, as critics of agents make them for each update of the policy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import build, same, weights
from plain import request

import zoo
from guerdon.critic_core import TrainRequest
from guerdon.errors import TrainFailed
from guerdon.training.critic_trainer import CriticTrainer

ROWS = zoo.rows(0, ((40, 5), (20, 3), (30, 5)))[:12]
"""Two whole global batches of 5, and a smaller one."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.checkpoint("llama", tmp_path / "llama")


def passes(count: int, name: str = "first") -> TrainRequest:
    asked = request(ROWS, name=name)
    asked.updates = count
    return asked


def moments(trainer: CriticTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer._optimiser.tensors().items()}


def test_two_passes_in_one_request_are_two_requests_bit_for_bit(folder: Path) -> None:
    once, twice = build(folder), build(folder)
    reports = [once.train(passes(1)), once.train(passes(1, "second"))]
    report = twice.train(passes(2))
    assert same(weights(once), weights(twice)) and same(moments(once), moments(twice))
    assert once.weights_version == twice.weights_version == report.weights_version
    assert report.losses == reports[0].losses + reports[1].losses and len(report.losses) == 6
    assert report.pass_losses == [r.loss for r in reports] and report.pass_losses[1] < report.pass_losses[0]
    for name in ("loss", "clip_fraction", "explained_variance"):
        assert getattr(report, name) == getattr(reports[0], name), name
    for name in ("step", "grad_norm", "learning_rate"):
        assert getattr(report, name) == getattr(reports[1], name), name
    for name in ("num_tokens", "num_steps"):
        assert getattr(report, name) == sum(getattr(r, name) for r in reports), name


def test_a_request_that_breaks_off_in_its_second_pass_is_done_again_up_to_there(folder: Path) -> None:
    broken, again = build(folder), build(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broken, "_add_gradients", _failing(broken, 5))
        with pytest.raises(TrainFailed, match="global batch 5 of 6 failed") as failed:
            broken.train(passes(2))
    assert failed.value.num_steps == 4
    report = again.train(passes(2), first_steps=4)
    assert same(weights(broken), weights(again)) and same(moments(broken), moments(again))
    assert (report.num_steps, len(report.losses), len(report.pass_losses)) == (4, 4, 2)


def _failing(trainer: CriticTrainer, nth: int) -> Any:
    add_gradients, calls = trainer._add_gradients, []

    def add(batch: Any) -> Any:
        calls.append(batch)
        if len(calls) == nth:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return add_gradients(batch)

    return add


def test_each_pass_skips_a_step_without_a_finite_gradient(folder: Path) -> None:
    trainer, asked = build(folder), passes(3)
    asked.returns[0][asked.mask[0] > 0] = np.float32(3e38)  # its square is infinite
    report = trainer.train(asked)
    assert (report.num_steps, report.num_skipped) == (6, 3)
