"""Every decoder checkpoint becomes a critic of one value a token, and what cannot is refused."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.reward_models import load_critic
from guerdon.engine.engine import Engine
from guerdon.errors import CheckpointError
from guerdon.settings.config import ModelConfig


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def make(folder: Path, **config: Any) -> Engine:
    return Engine(load_critic(ModelConfig(model=str(folder), **config)))


def served(engine: Engine, rows: list[np.ndarray]) -> list[np.ndarray]:
    results = engine.score([Sequence(row) for row in rows])
    assert all(isinstance(r, Score) and r.values is not None for r in results), results
    return [r.values for r in results]  # type: ignore[union-attr, misc]


def outputs(folder: Path, rows: list[np.ndarray]) -> list[np.ndarray]:
    """Raw outputs `[T, A]` of every token by plain transformers: those at the end of every beginning of a row."""
    table = zoo.reference_outputs(folder, [row[: t + 1] for row in rows for t in range(len(row))])
    return np.split(table, np.cumsum([len(row) for row in rows])[:-1])


def assert_close(got: list[np.ndarray], want: list[np.ndarray]) -> None:
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, atol=1e-4 * np.concatenate(want).std())


ROWS = zoo.rows(2, groups=((18, 2), (5, 1)))


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_any_head_values_every_token(kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path / kind, kind)
    engine = make(folder)
    assert engine.info.outputs == ("values",)
    assert_close(served(engine, ROWS), [o[:, 0] for o in outputs(folder, ROWS)])


@pytest.mark.parametrize("name", ["llama", "gptj"])
def test_several_attributes_become_one_value_by_their_weights(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name, num_labels=3)
    raw = outputs(folder, ROWS)
    engine = make(folder)
    assert engine.head.num_outputs == 1 and engine.info.attribute_names == ()
    assert_close(served(engine, ROWS), [o.mean(1) for o in raw])
    weighted = make(folder, attribute_weights=[0.5, -2.0, 0.0], mean=1.5, std=4.0)
    assert_close(served(weighted, ROWS), [(0.5 * o[:, 0] - 2.0 * o[:, 1] - 1.5) / 4.0 for o in raw])


def test_weights_that_are_not_one_scale_a_single_output_too(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    assert_close(served(make(folder, attribute_weights=[-3.0]), ROWS), [-3.0 * o[:, 0] for o in outputs(folder, ROWS)])


def test_models_without_a_value_for_each_token_are_refused(tmp_path: Path) -> None:
    for folder, reason in (
        (zoo.checkpoint("bert", tmp_path / "bert"), "is an encoder"),
        (zoo.checkpoint("bert", tmp_path / "tokens", "tokcls"), "is an encoder"),
        (zoo.checkpoint("llama", tmp_path / "steps", "tokcls", num_labels=2), "is a process reward model"),
        ("rewards:score", "is a function"),
    ):
        with pytest.raises(CheckpointError, match=reason) as caught:
            load_critic(ModelConfig(model=str(folder)))
        assert "decoder with a scalar reward head" in caught.value.help


def test_off_the_device_and_back_the_parameters_are_the_same_objects(tmp_path: Path) -> None:
    engine = make(zoo.checkpoint("llama", tmp_path / "llama"))
    before, parameters = served(engine, ROWS), [*engine.trunk.parameters(), *engine.head.parameters()]
    engine.offload()
    engine.onload()
    after = [*engine.trunk.parameters(), *engine.head.parameters()]
    assert all(a is b for a, b in zip(parameters, after, strict=True))
    assert all((a == b).all() for a, b in zip(before, served(engine, ROWS), strict=True))
    engine.device = torch.device("meta")
    engine.onload()
    assert all(p.is_meta for p in [*engine.trunk.parameters(), *engine.head.parameters()])
