"""Heads: literal hidden states and logits in, literal scores out."""

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
from guerdon.engine.heads import RewardHead as Head
from guerdon.engine.heads import StepRule, to_scores
from guerdon.errors import CheckpointError, ConfigError, SampleFailed
from guerdon.settings.config import ModelConfig
from tiers import slow_but

SEPARATOR = 9


def sequence(*tokens: int, **more: object) -> Sequence:
    return Sequence(np.array(tokens, dtype=np.int64), **more)


def head(num_outputs: int = 1, pooling: str = "last", **more: object) -> Head:
    return Head(torch.nn.Identity(), num_outputs, pooling, **more)


def process_head(separator: tuple[int, ...] = (SEPARATOR,), reduction: str = "min", **more: object) -> Head:
    return head(2, per_token=True, steps=StepRule("\n", separator, reduction), **more)


def logits_of(*probabilities: float) -> torch.Tensor:
    """Two logits a token whose softmax gives these probabilities of label 1."""
    p = torch.tensor(probabilities)
    return torch.stack([torch.zeros_like(p), torch.log(p / (1 - p))], dim=1)


def test_a_sample_that_is_not_finite_fails_alone_and_says_where() -> None:
    logits = torch.tensor([[1.0, 2.0], [3.0, float("nan")], [5.0, 6.0]])
    first, failed, last = to_scores(head(2), logits, [sequence(1)] * 3)
    assert (first.reward, last.reward) == (1.5, 5.5)
    assert isinstance(failed, SampleFailed)
    assert "nan at index 1 of 2" in str(failed)


@pytest.mark.parametrize(("pooling", "reward"), [("last", 5.0), ("first", 1.0), ("mean", 3.0), ("first_eos", 3.0)])
def test_pooling_chooses_a_per_token_reward(pooling: str, reward: float) -> None:
    tokens = [torch.tensor([[0.0]]), torch.tensor([[1.0], [3.0], [5.0]])]
    scores = to_scores(
        head(pooling=pooling, per_token=True, eos_token_id=2), torch.cat(tokens), [sequence(4), sequence(4, 2, 2)]
    )
    assert scores[1].reward == reward


@pytest.mark.parametrize(
    ("pooling", "positions"),
    [("last", [3, 1, 1, 0]), ("first", [0, 0, 0, 0]), ("first_eos", [1, 1, 0, 0]), ("last_non_pad", [2, 1, 0, 0])],
)
def test_positions_of_each_pooling_rule(pooling: str, positions: list[int]) -> None:
    rows = [np.array(row) for row in ([4, 2, 5, 2], [4, 5], [2, 2], [4])]
    assert head(pooling=pooling, eos_token_id=2, pad_token_id=2).positions(rows).tolist() == positions


def test_given_positions_count_instead_of_separators_in_their_order() -> None:
    given = sequence(1, SEPARATOR, 3, steps=np.array([2, 0]))
    (score,) = to_scores(process_head(), logits_of(0.1, 0.2, 0.3), [given])
    np.testing.assert_allclose(score.steps, [0.3, 0.1], atol=1e-6)


def test_a_separator_of_several_tokens_ends_a_step_at_its_last_one_and_never_in_the_prompt() -> None:
    tokens = sequence(7, 8, 1, 7, 8, 2, 7, 7, 8, prompt_length=3)
    (score,) = to_scores(process_head((7, 8)), logits_of(*(i / 10 for i in range(1, 10))), [tokens])
    np.testing.assert_allclose(score.steps, [0.5, 0.9], atol=1e-6)


def test_a_sequence_without_a_step_fails_alone() -> None:
    failed, fine = to_scores(process_head(), logits_of(0.5, 0.5, 0.5), [sequence(1, 2), sequence(SEPARATOR)])
    assert isinstance(failed, SampleFailed)
    assert "no step to reward" in str(failed)
    assert isinstance(fine, Score)


def test_the_head_computes_in_float32_whatever_surrounds_it() -> None:
    linear = torch.nn.Linear(64, 1, dtype=torch.bfloat16)
    made = Head(linear, 1, "last")
    hidden = torch.randn(5, 64, dtype=torch.bfloat16)
    expected = hidden.float() @ made.module.weight.T + made.module.bias
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad():
        logits = made(hidden)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected)


NAMES = ("llama", "qwen2", "gpt2", "gpt-neox", "opt", "gemma3", "gptj", "falcon", "jamba")
"""Packed with and without a narrowed last layer, and one sequence at a time; gpt2, opt and others have own classes."""
PADS: dict[str, dict[str, Any]] = {
    "pad is EOS": {"pad_token_id": zoo.EOS},
    "pad": {"pad_token_id": zoo.PAD},
    "pad is a word": {"pad_token_id": 7},
    "no pad": {"pad_token_id": None},
}


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


@pytest.mark.parametrize("pad", slow_but(("pad is EOS", "pad is a word"), PADS))
@pytest.mark.parametrize("name", slow_but(("llama", "gptj"), NAMES))
def test_rewards_are_read_where_transformers_reads_them(name: str, pad: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path, **PADS[pad])
    engine = Engine(load_reward_model(ModelConfig(model=str(folder))))
    want = zoo.reference(folder, ROWS)
    sequences = [Sequence(row) for row in ROWS]
    assert_equal(engine.score(sequences), want)
    assert_equal(engine.score_plainly(sequences), want)
    engine.max_batch_tokens = 64
    assert_equal(engine.score(sequences), want)


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


@pytest.mark.parametrize(
    ("name", "named", "rule"),
    [
        *((name, None, "first") for name in ("bert", "roberta", "modernbert", "distilbert")),
        *(("cohere-compass", *pair) for pair in ((None, "last_non_pad (pad 0)"), ("bos", "first"), ("mean", "mean"))),
    ],
)
def test_encoders_read_their_first_token_and_compass_what_its_config_says(
    name: str, named: str | None, rule: str, tmp_path: Path
) -> None:
    folder = zoo.checkpoint(name, tmp_path, **({"pooling": named} if name == "cohere-compass" else {}))
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
    assert load_critic(ModelConfig(model=str(folder))).info.pooling == "" and warnings(caplog) == told


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


CRITICS_ROWS = zoo.rows(2, groups=((18, 2), (5, 1)))


@pytest.mark.parametrize("kind", zoo.KINDS)
def test_any_head_values_every_token(kind: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("gpt2", tmp_path / kind, kind)
    engine = make(folder)
    assert engine.info.outputs == ("values",)
    assert_close(served(engine, CRITICS_ROWS), [o[:, 0] for o in outputs(folder, CRITICS_ROWS)])


@pytest.mark.parametrize("name", slow_but(("llama",), ["llama", "gptj"]))
def test_several_attributes_become_one_value_by_their_weights(name: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint(name, tmp_path / name, num_labels=3)
    raw = outputs(folder, CRITICS_ROWS)
    engine = make(folder)
    assert engine.head.num_outputs == 1 and engine.info.attribute_names == ()
    assert_close(served(engine, CRITICS_ROWS), [o.mean(1) for o in raw])
    weighted = make(folder, attribute_weights=[0.5, -2.0, 0.0], mean=1.5, std=4.0)
    assert_close(served(weighted, CRITICS_ROWS), [(0.5 * o[:, 0] - 2.0 * o[:, 1] - 1.5) / 4.0 for o in raw])
    single = zoo.checkpoint(name, tmp_path / "single")
    scaled = make(single, attribute_weights=[-3.0])
    assert_close(served(scaled, CRITICS_ROWS), [-3.0 * o[:, 0] for o in outputs(single, CRITICS_ROWS)])


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
    before, parameters = served(engine, CRITICS_ROWS), [*engine.trunk.parameters(), *engine.head.parameters()]
    engine.offload()
    engine.onload()
    after = [*engine.trunk.parameters(), *engine.head.parameters()]
    assert all(a is b for a, b in zip(parameters, after, strict=True))
    assert all((a == b).all() for a, b in zip(before, served(engine, CRITICS_ROWS), strict=True))
    engine.device = torch.device("meta")
    engine.onload()
    assert all(p.is_meta for p in [*engine.trunk.parameters(), *engine.head.parameters()])
