"""A reward model beside the critic, both on the device or one at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from critics import build, same, values, weights
from plain import request

import zoo
from guerdon.config import ModelConfig
from guerdon.core import Score, Sequence
from guerdon.engine.callable import FunctionScorer
from guerdon.engine.engine import Engine
from guerdon.engine.loading import load
from guerdon.errors import ConfigError, Offloaded, SampleFailed
from guerdon.training.combined import CriticWithReward

ROWS = zoo.rows(0, ((40, 4), (20, 2), (3, 3)))
MEMORY = pytest.mark.parametrize("memory", ["resident", "swap"])
Memory = Literal["resident", "swap"]


class Watched(Engine):
    """An engine that writes down who comes to the device and who leaves it."""

    def __init__(self, loaded: Any, name: str, moves: list[str]) -> None:
        super().__init__(loaded)
        self.name, self.moves = name, moves

    def offload(self) -> None:
        self.moves.append(f"-{self.name}")
        super().offload()

    def onload(self) -> None:
        self.moves.append(f"+{self.name}")
        super().onload()


def make(tmp_path: Path, memory: Memory, **reward: Any) -> tuple[CriticWithReward, Any, Path, list[str]]:
    """Both, the critic by itself, the reward model's folder, and the moves so far."""
    moves: list[str] = []
    critic = build(zoo.checkpoint("llama", tmp_path / "critic"))
    critic.engine.__class__ = Watched
    critic.engine.name, critic.engine.moves = "critic", moves  # type: ignore[attr-defined]
    folder = zoo.checkpoint("qwen2", tmp_path / "reward", seed=3, **reward)

    def load_reward() -> Engine:
        moves.append("+reward")
        return Watched(load(ModelConfig(model=str(folder))), "reward", moves)

    return CriticWithReward(critic, load_reward, memory), critic, folder, moves


def scored(both: CriticWithReward) -> tuple[np.ndarray, np.ndarray]:
    results = both.score([Sequence(row) for row in ROWS])
    assert all(isinstance(r, Score) for r in results), results
    return np.array([r.reward for r in results]), np.concatenate([r.values for r in results])  # type: ignore


@MEMORY
def test_each_answers_what_it_answers_alone(memory: Memory, tmp_path: Path) -> None:
    both, _, folder, _ = make(tmp_path, memory)
    alone = build(tmp_path / "critic")
    want = zoo.reference(folder, ROWS)
    for seed in range(3):
        rewards, told = scored(both)
        np.testing.assert_allclose(rewards, want, atol=1e-4 * want.std())
        np.testing.assert_array_equal(told, values(alone, ROWS))
        assert both.train(request(ROWS, seed=seed)) == alone.train(request(ROWS, seed=seed))
        assert both.validate(request(ROWS)) == alone.validate(request(ROWS))
    assert both.info.weights_version == alone.info.weights_version
    assert both.state() == alone.state()


@MEMORY
def test_what_it_is_as_one_model(memory: Memory, tmp_path: Path) -> None:
    both, critic, _, _ = make(tmp_path, memory, vocab_size=260, max_position_embeddings=99)
    info = both.info
    assert (info.name, info.outputs) == ("critic_infer", ("values", "rewards"))
    assert (info.vocab_size, info.max_length) == (260, 99)
    assert both.max_batch_tokens == 150 and both.encoder is critic.encoder


def test_swapped_one_is_on_the_device_and_a_request_costs_one_exchange(tmp_path: Path) -> None:
    both, _, _, moves = make(tmp_path, "swap")
    assert moves == ["-critic", "+reward"]  # never both, not even at the start
    for want in (["-reward", "+critic"], ["-critic", "+reward"], ["-reward", "+critic"]):
        moves.clear()
        scored(both)
        assert moves == want
    moves.clear()
    both.train(request(ROWS))
    both.validate(request(ROWS))
    assert moves == []
    scored(both)
    moves.clear()
    both.train(request(ROWS))
    assert moves == ["-reward", "+critic"]


def test_resident_none_moves(tmp_path: Path) -> None:
    both, _, _, moves = make(tmp_path, "resident")
    scored(both)
    both.train(request(ROWS))
    assert moves == ["+reward"]


@MEMORY
def test_offloaded_both_leave_and_refuse(memory: Memory, tmp_path: Path) -> None:
    both, critic, _, moves = make(tmp_path, memory)
    want = scored(both)
    both.offload()
    assert {"-critic", "-reward"} <= set(moves)
    moves.clear()
    for call in (lambda: scored(both), lambda: both.train(request(ROWS)), lambda: both.validate(request(ROWS))):
        with pytest.raises(Offloaded):
            call()
    assert moves == []
    both.onload()
    assert moves == (["+critic", "+reward"] if memory == "resident" else ["+critic"])
    for got, before in zip(scored(both), want, strict=True):
        np.testing.assert_array_equal(got, before)
    assert critic.state() == both.state()


@MEMORY
def test_it_is_saved_and_loaded_wherever_the_critic_is(memory: Memory, tmp_path: Path) -> None:
    both, critic, _, _ = make(tmp_path, memory)
    both.train(request(ROWS))
    scored(both)
    (tmp_path / "kept").mkdir()
    both.save(tmp_path / "kept")
    kept = weights(critic)
    both.train(request(ROWS, seed=1))
    scored(both)
    scored(both)
    both.load(tmp_path / "kept", 1)
    assert same(weights(critic), kept)
    assert both.info.weights_version.endswith("+3-load1")


def test_a_sample_fails_where_either_fails_on_it(tmp_path: Path) -> None:
    both, critic, _, _ = make(tmp_path, "resident")
    with torch.no_grad():
        critic.engine.trunk.embed_tokens.weight[7] = float("nan")
        both._reward.trunk.embed_tokens.weight[8] = float("nan")
    results = both.score([Sequence(np.array(row)) for row in ([5, 6], [5, 7], [5, 8])])
    assert [isinstance(r, SampleFailed) for r in results] == [False, True, True]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    critic = build(zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "critic")))
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "reward"))
    load_reward = lambda: Engine(load(ModelConfig(model=str(folder))))  # noqa: E731
    assert CriticWithReward(critic, load_reward).info.takes_text
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(
        text.replace('"1"', '"@"', 1).replace('"?"', '"1"', 1).replace('"@"', '"?"', 1)
    )
    with pytest.raises(ConfigError, match="tokenizer"):
        CriticWithReward(critic, load_reward)


def test_a_function_is_refused(tmp_path: Path) -> None:
    critic = build(zoo.checkpoint("llama", tmp_path / "critic"))
    with pytest.raises(ConfigError, match="function"):
        CriticWithReward(critic, lambda: FunctionScorer(ModelConfig(model="scorers:score")))
