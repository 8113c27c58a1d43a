"""The self-check tries what it chooses, whatever the limits that a model is served with."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

import zoo
from guerdon.assembly import build_scorer
from guerdon.core import MIN_SHARED, Score, Sequence
from guerdon.engine.checkpoint.language_models import load_policy
from guerdon.engine.engine import Engine
from guerdon.engine.generating import DecoderChoice
from guerdon.engine.logprobs import LanguageEngine
from guerdon.settings.config import LanguageModelConfig, ModelConfig


def build(folder: Path, **config: object) -> Engine:
    engine = build_scorer(ModelConfig(model=str(folder), **config))  # type: ignore[arg-type]
    assert isinstance(engine, Engine)
    return engine


def assert_exact(engine: Engine, folder: Path, lengths: list[int]) -> None:
    random = np.random.default_rng(0)
    rows = [random.integers(zoo.FIRST_TOKEN, zoo.VOCAB_SIZE, n) for n in lengths]
    want = zoo.reference(folder, rows)
    results = engine.score([Sequence(row) for row in rows])
    assert all(isinstance(result, Score) for result in results), results
    got = np.array([result.reward for result in results])  # type: ignore[union-attr]
    assert np.abs(got - want).max() <= 1e-4 * want.std()


@pytest.mark.parametrize("max_batch_tokens", [1, 48])
def test_a_small_budget_hides_no_state_that_runs_from_row_to_row(max_batch_tokens: int, tmp_path: Path) -> None:
    folder = zoo.checkpoint("jamba", tmp_path / "jamba")
    engine = build(folder, max_batch_tokens=max_batch_tokens)
    assert engine.path == "single", engine.info.why
    assert_exact(engine, folder, [10, 12, 14])
    engine = build(zoo.checkpoint("llama", tmp_path / "llama"), max_batch_tokens=max_batch_tokens)
    assert engine.path == "packed+shared", engine.info.why


@pytest.mark.parametrize(
    ("max_length", "path"), [(MIN_SHARED + 1, "packed+shared"), (MIN_SHARED, "packed"), (2, "packed"), (1, "packed")]
)
def test_nothing_is_shared_that_could_not_be_tried(max_length: int, path: str, tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama", tmp_path / "llama")
    engine = build(folder, max_length=max_length)
    assert engine.path == path, engine.info.why
    assert ("share a beginning" in engine.info.why) == (path == "packed")
    assert_exact(engine, folder, [max_length, 1, max_length])


def test_nothing_is_packed_where_no_two_rows_fit_in_a_batch(tmp_path: Path) -> None:
    folder = zoo.checkpoint("llama4", tmp_path / "llama4", floor_scale=2, attn_scale=0.5, no_rope_layers=[1, 0])
    engine = build(folder)
    assert engine.path == "single" and "no two of the sequences tried fit in one batch" in engine.info.why
    assert_exact(engine, folder, [10, 1, 1])


def test_entries_that_a_model_appends_to_the_keys_are_not_left_out(tmp_path: Path) -> None:
    folder = zoo.checkpoint("deepseek-v4", tmp_path / "deepseek")
    # Its files name the trunk's tensors without a prefix.
    state = {name.removeprefix("model."): tensor for name, tensor in zoo.tensors(folder).items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    engine = build(folder)
    assert engine.path == "single" and "packed attention does not support" in engine.info.why
    assert_exact(engine, folder, [200, 130, 40])


def test_a_small_budget_hides_no_state_that_padding_changes(tmp_path: Path) -> None:
    policy = load_policy(LanguageModelConfig(model=str(zoo.language_model("mamba", tmp_path)), max_batch_tokens=39))
    assert DecoderChoice(policy, LanguageEngine(policy)).kind == "alone"
