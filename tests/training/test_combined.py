"""A reward model beside the critic, both on the device or one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from critics import build, same, values, weights
from plain import request

import zoo
from guerdon.core import Score, Sequence
from guerdon.critic_core import Gae
from guerdon.distributed.ranks import ALONE
from guerdon.engine.checkpoint.reward_models import load_reward_model
from guerdon.engine.engine import Engine
from guerdon.engine.functions import FunctionScorer
from guerdon.errors import ConfigError, Offloaded, SampleFailed, ServerFault, TrainFailed
from guerdon.settings.config import ModelConfig
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
        return Watched(load_reward_model(ModelConfig(model=str(folder))), "reward", moves)

    return CriticWithReward(critic, load_reward, memory), critic, folder, moves


def scored(both: CriticWithReward) -> tuple[np.ndarray, np.ndarray]:
    results = both.score([Sequence(row) for row in ROWS])
    assert all(isinstance(r, Score) for r in results), results
    return np.array([r.reward for r in results]), np.concatenate([r.values for r in results])  # type: ignore


@MEMORY
def test_returns_are_estimated_by_the_critic_wherever_it_waits(memory: Memory, tmp_path: Path) -> None:
    both, _, _, moves = make(tmp_path, memory)
    asked = request(ROWS)
    asked.rewards, asked.gae = np.ones((len(ROWS), 1), np.float32), Gae(lam_policy=0.5)
    want = build(tmp_path / "critic").estimate(asked)
    moves.clear()
    made = both.estimate(asked)
    assert moves == ([] if memory == "resident" else ["-reward", "+critic"])
    for name in ("returns", "advantages", "prev_values"):
        np.testing.assert_array_equal(getattr(made, name), getattr(want, name))


@MEMORY
def test_each_answers_what_it_answers_alone(memory: Memory, tmp_path: Path) -> None:
    both, _, folder, _ = make(tmp_path, memory)
    alone = build(tmp_path / "critic")
    want = zoo.reference(folder, ROWS)
    for seed in range(3):
        rewards, told = scored(both)
        np.testing.assert_allclose(rewards, want, atol=1e-4 * want.std())
        np.testing.assert_array_equal(told, values(alone, ROWS))
        # By their texts: NaN is not NaN.
        assert repr(both.train(request(ROWS, seed=seed))) == repr(alone.train(request(ROWS, seed=seed)))
        assert repr(both.validate(request(ROWS))) == repr(alone.validate(request(ROWS)))
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


def test_for_values_alone_the_reward_model_is_left_where_it_is(tmp_path: Path) -> None:
    both, critic, folder, moves = make(tmp_path, "swap")
    scored(both)
    scored(both)
    both.train(request(ROWS))
    moves.clear()
    alone = both.score([Sequence(row, wants_reward=False) for row in ROWS])
    assert moves == []
    np.testing.assert_array_equal(np.concatenate([r.values for r in alone]), values(critic, ROWS))  # type: ignore
    # In one batch with others, only these have their rewards.
    ran: list[int] = []
    plain_score = both._reward.score
    both._reward.score = lambda some: (ran.append(len(some)), plain_score(some))[1]  # type: ignore
    mixed = both.score([Sequence(row, wants_reward=i == 2) for i, row in enumerate(ROWS)])
    assert ran == [1]
    assert mixed[2].reward == pytest.approx(zoo.reference(folder, ROWS)[2], abs=1e-4)  # type: ignore[union-attr]
    assert moves == ["-critic", "+reward"]


def fills_up(engine: Any) -> list[bool]:
    """Makes the engine's device too small for it, once part of it is there, as long as the list says True."""
    full = [True]
    to = engine.head.to

    def move(where: Any) -> Any:
        engine.moves.append(f"head to {where}")
        if full[0] and engine.moves[-2].startswith("+"):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return to(where)

    engine.head.to = move
    return full


def test_if_the_critic_does_not_fit_only_the_request_fails(tmp_path: Path) -> None:
    both, critic, _, moves = make(tmp_path, "swap")
    alone = build(tmp_path / "critic")
    full = fills_up(critic.engine)
    for call in (both.train, both.validate):
        moves.clear()
        with pytest.raises(TrainFailed, match=r"critic cannot be .*OutOfMemoryError.*: nothing was changed") as caught:
            call(request(ROWS))
        assert caught.value.num_steps == 0
        assert moves[-2:] == ["-critic", "head to cpu"]  # what had arrived has left again
    results = both.score([Sequence(row) for row in ROWS])
    assert all(isinstance(r, ServerFault) and "the critic cannot be moved" in str(r) for r in results)
    full[0] = False
    assert both.train(request(ROWS)) == alone.train(request(ROWS))
    np.testing.assert_array_equal(scored(both)[1], values(alone, ROWS))


def test_nobody_is_taken_for_hung_while_models_change_places(tmp_path: Path) -> None:
    both, critic, _, _ = make(tmp_path, "swap")
    waits: list[int] = []

    def told(move: Callable[[], None]) -> Callable[[], None]:
        return lambda: (waits.append(ALONE.doing.num_waits), move())[1]

    for engine in (critic.engine, both._reward):
        engine.offload, engine.onload = told(engine.offload), told(engine.onload)  # type: ignore[method-assign]
    scored(both)
    fills_up(both._reward)
    both.train(request(ROWS))
    both.score([Sequence(row) for row in ROWS])
    assert len(waits) >= 5 and all(waits) and ALONE.doing.num_waits == 0


def test_if_the_reward_model_does_not_fit_the_critic_still_learns(tmp_path: Path) -> None:
    both, _, folder, moves = make(tmp_path, "swap")
    both.train(request(ROWS))
    full = fills_up(both._reward)
    results = both.score([Sequence(row) for row in ROWS])
    assert all(isinstance(r, ServerFault) and "the reward model cannot be moved" in str(r) for r in results)
    assert moves[-2:] == ["-reward", "head to cpu"]
    assert both.train(request(ROWS, seed=1)).num_steps > 0
    full[0] = False
    want = zoo.reference(folder, ROWS)
    np.testing.assert_allclose(scored(both)[0], want, atol=1e-4 * want.std())


@pytest.mark.parametrize("memory", ["resident"])
def test_an_onload_that_fails_leaves_nothing_on_the_device(memory: Memory, tmp_path: Path) -> None:
    both, _, _, moves = make(tmp_path, memory)
    want = scored(both)
    both.offload()
    full = fills_up(both._reward)
    moves.clear()
    with pytest.raises(torch.OutOfMemoryError):
        both.onload()
    assert [m for m in moves if m[0] in "+-"] == ["+critic", "+reward", "-critic", "-reward"]
    with pytest.raises(Offloaded):
        scored(both)
    full[0] = False
    both.onload()
    np.testing.assert_array_equal(scored(both)[0], want[0])


def test_resident_none_moves(tmp_path: Path) -> None:
    both, _, _, moves = make(tmp_path, "resident")
    scored(both)
    both.train(request(ROWS))
    assert moves == ["+reward"]


@MEMORY
def test_offloading_moves_both_off_and_refuses_requests(memory: Memory, tmp_path: Path) -> None:
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
    assert "+3." in both.info.weights_version and both.info.weights_version.endswith("-load1")


def test_a_sample_fails_if_either_model_fails_on_it(tmp_path: Path) -> None:
    both, critic, _, _ = make(tmp_path, "resident")
    with torch.no_grad():
        critic.engine.trunk.embed_tokens.weight[7] = float("nan")
        both._reward.trunk.embed_tokens.weight[8] = float("nan")
    results = both.score([Sequence(np.array(row)) for row in ([5, 6], [5, 7], [5, 8])])
    assert [isinstance(r, SampleFailed) for r in results] == [False, True, True]


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    critic = build(zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "critic")))
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "reward"))
    load_reward = lambda: Engine(load_reward_model(ModelConfig(model=str(folder))))  # noqa: E731
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
