"""The token that gives the reward is the one that the checkpoint's own library reads, whatever pad is."""

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zoo
from guerdon.core import Score, Sequence
from guerdon.engine.checkpoint.reward_models import load_critic, load_reward_model
from guerdon.engine.engine import Engine
from guerdon.errors import ConfigError
from guerdon.settings.config import ModelConfig

NAMES = ("llama", "qwen2", "gpt2", "gpt-neox", "opt", "gemma3", "gptj", "falcon", "jamba")
"""Packed with and without a narrowed last layer, and one sequence at a time; gpt2, opt and others have own classes."""
PADS: dict[str, dict[str, Any]] = {
    "pad is EOS": {"pad_token_id": zoo.EOS},
    "pad": {"pad_token_id": zoo.PAD},
    "pad is a word": {"pad_token_id": 7},
    "no pad": {"pad_token_id": None},
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread() -> None:
    torch.set_num_threads(1)


def rows() -> list[np.ndarray]:
    """Responses to one prompt and others, with 0, EOS (2) and 7 behind them, inside them and alone."""
    random = np.random.default_rng(5)
    prompt = random.integers(8, zoo.VOCAB_SIZE, 40)
    made = []
    for special in (zoo.PAD, zoo.EOS, 7):
        response = random.integers(8, zoo.VOCAB_SIZE, 9)
        made += [
            np.r_[prompt, response, special],
            np.r_[prompt, response, special, special, special],
            np.r_[prompt, response[:4], special, response[4:]],
            np.r_[prompt, response[:4], special, response[4:], special],
            np.r_[prompt, special],  # the state that is read may lie in the prompt that others share
            np.r_[special, response],
            np.r_[special],
            np.r_[special, special, special],
            np.r_[response[0], special, special],
        ]
    return [*made, prompt, np.r_[prompt, zoo.EOS, 7, zoo.PAD]]


ROWS = rows()


def assert_equal(scores: list[Score], want: np.ndarray) -> None:
    np.testing.assert_allclose([s.reward for s in scores], want, atol=1e-4 * want.std(), rtol=0)


@pytest.mark.parametrize("pad", PADS)
@pytest.mark.parametrize("name", NAMES)
def test_rewards_are_read_where_transformers_reads_them(name: str, pad: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path, **PADS[pad])
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    want = zoo.reference(folder, ROWS)
    sequences = [Sequence(row) for row in ROWS]
    assert_equal(engine.score(sequences), want)
    assert_equal(engine.score_plainly(sequences), want)


@pytest.mark.parametrize("settings", [{"deterministic": True}, {"max_batch_tokens": 64}])
@pytest.mark.parametrize("pad", PADS)
def test_the_rule_holds_by_itself_and_in_small_batches(pad: str, settings: dict[str, Any], tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path, **PADS[pad])
    engine = Engine(load_reward_model(ModelConfig(model=str(folder), **settings)))
    assert_equal(engine.score([Sequence(row) for row in ROWS]), zoo.reference(folder, ROWS))


def test_the_state_that_is_read_may_lie_in_a_shared_prompt(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path, pad_token_id=zoo.EOS)
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    assert engine.path == "packed+shared"
    prompt = ROWS[-2]
    made = [np.r_[prompt, [zoo.EOS] * n] for n in range(1, 4)] + [np.r_[prompt, 9, zoo.EOS], prompt]
    (states,) = engine.run(engine.plan(made))
    assert any(len(spans) > 1 for spans in states.spans), "nothing is shared"
    assert states.read is not None and len(set(states.read.tolist())) == 2
    assert_equal(engine.score([Sequence(row) for row in made]), zoo.reference(folder, made))


@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "distilbert"])
def test_encoders_read_their_first_token_whatever_pad_is(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path)
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    assert_equal(engine.score([Sequence(row) for row in ROWS]), zoo.reference(folder, ROWS))
    assert engine.info.pooling == "first"


@pytest.mark.parametrize(("named", "rule"), [(None, "last_non_pad (pad 0)"), ("bos", "first"), ("mean", "mean")])
def test_cohere_compass_reads_as_its_config_says(named: str | None, rule: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("cohere-compass", tmp_path, pooling=named)
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    made = [row for row in ROWS if zoo.PAD not in row] if named == "mean" else ROWS  # its mask tells it of pads
    assert_equal(engine.score([Sequence(row) for row in made]), zoo.reference(folder, made))
    assert engine.info.pooling == rule


def test_the_plain_last_token_can_be_asked_for(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "a", pad_token_id=zoo.EOS)
    plain = zoo.checkpoint("llama", tmp_path / "b", pad_token_id=None)
    want = zoo.reference(plain, ROWS)
    engine = Engine(load_reward_model(ModelConfig(model=str(folder), pooling="last")))
    assert_equal(engine.score([Sequence(row) for row in ROWS]), want)
    assert engine.info.pooling == "last"
    assert np.abs(want - zoo.reference(folder, ROWS)).max() > 0.1 * want.std()


@pytest.mark.parametrize("kind", ["openrlhf", "trlx"])
def test_heads_of_openrlhf_and_trlx_read_the_last_token_that_is_sent(kind: str, tmp_path: Path) -> None:
    """Both go by the attention mask, which is 1 for what the client sends."""
    folder = zoo.checkpoint("llama", tmp_path, kind, pad_token_id=zoo.EOS)
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    assert_equal(engine.score([Sequence(row) for row in ROWS]), zoo.reference(folder, ROWS))
    assert engine.info.pooling == "last"
    asked = Engine(load_reward_model(ModelConfig(model=str(folder), pooling="last_non_pad")))
    assert asked.info.pooling == f"last_non_pad (pad {zoo.EOS})"
    ends_in_eos = Sequence(np.r_[ROWS[-2], zoo.EOS])
    assert asked.score([ends_in_eos])[0].reward == pytest.approx(engine.score([Sequence(ROWS[-2])])[0].reward, abs=1e-5)


@pytest.mark.parametrize("pad", [None, -1])
def test_without_a_pad_the_last_token_is_read(pad: int | None, tmp_path: Path) -> None:
    folder = zoo.tokenizer(zoo.checkpoint("llama", tmp_path, pad_token_id=pad))  # whose tokenizer has a pad token
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    assert engine.info.pooling == "last"
    assert_equal(engine.score([Sequence(row) for row in ROWS]), zoo.reference(folder, ROWS))
    with pytest.raises(ConfigError, match="needs a pad token"):
        load_reward_model(ModelConfig(model=str(folder), pooling="last_non_pad"))


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "pooling", "is_told"),
    [
        ({"pad_token_id": zoo.EOS}, "auto", True),
        ({"pad_token_id": 7, "eos_token_id": [zoo.EOS, 7]}, "auto", True),
        ({"pad_token_id": zoo.EOS}, "last", False),
        ({"pad_token_id": zoo.PAD}, "auto", False),
        ({"pad_token_id": None}, "auto", False),
    ],
)
def test_the_start_warns_if_pad_is_an_eos(
    settings: dict[str, Any], pooling: Any, is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zoo.checkpoint("llama", tmp_path, **settings)
    load_reward_model(ModelConfig(model=str(folder), name="rm", pooling=pooling))
    told = warnings(caplog)
    assert len(told) == is_told
    if is_told:
        assert told[0].startswith(f"rm: the pad token of {folder} is an EOS ({settings['pad_token_id']})")
        assert "--pooling last" in told[0]


def test_a_critic_has_no_such_token(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = zoo.checkpoint("llama", tmp_path, pad_token_id=zoo.EOS)
    assert load_critic(ModelConfig(model=str(folder))).info.pooling == ""
    assert warnings(caplog) == []
