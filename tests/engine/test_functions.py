"""A user's function as a model: which settings it can have, and that none is accepted and does nothing."""

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from guerdon.engine.functions import FunctionScorer
from guerdon.errors import CheckpointError, ConfigError
from guerdon.settings.config import ModelConfig, TokenRewardConfig, TurnConfig

OF_CHECKPOINTS: dict[str, Any] = {
    "revision": "main", "base": "other", "dtype": "bfloat16", "require_packed": True, "deterministic": True,
    "attribute_weights": [1.0],
    "mean": 1.5, "std": 2.0, "recheck_share": 0.5, "pooling": "mean", "step_separator": "##", "step_reduction": "mean",
    "dequantize": True, "chat_template": "t.jinja", "system": "", "generation_prompt": True,
    "turns": [TurnConfig(content="?")], "reward": TokenRewardConfig(ids=[1]),
}  # fmt: skip
OF_TOKENS: dict[str, Any] = {"max_length": 10, "truncation": "left"}


@pytest.mark.parametrize("name", OF_CHECKPOINTS)
@pytest.mark.parametrize("function", ["scorers:score", "rewarding:brevity"])
def test_a_setting_that_would_do_nothing_is_refused(function: str, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} is .*, but {function} is a function, .* does not apply") as caught:
        FunctionScorer(ModelConfig(model=function, **{name: OF_CHECKPOINTS[name]}))
    assert caught.value.help


@pytest.mark.parametrize("name", OF_TOKENS)
def test_lengths_in_tokens_are_for_functions_of_tokens_alone(name: str) -> None:
    settings = {name: OF_TOKENS[name]}
    for function in ("rewarding:brevity", "rewarding:words"):
        with pytest.raises(ConfigError, match=f"{name} is .* a function of texts"):
            FunctionScorer(ModelConfig(model=function, **settings))
    FunctionScorer(ModelConfig(model="scorers:score", **settings))


def test_settings_that_apply_to_functions_are_accepted() -> None:
    settings: dict[str, Any] = {
        "device": "cpu",
        "max_batch_tokens": 100,
        "max_queue_tokens": 9,
        "max_queue_sequences": 9,
    }
    assert FunctionScorer(ModelConfig(model="rewarding:brevity", name="short", **settings)).max_batch_tokens == 100
    info = FunctionScorer(ModelConfig(model="scorers:score", max_length=10, truncation="right")).info
    assert info.max_length == 10


def test_a_module_that_exits_when_it_is_imported_refuses_the_start() -> None:
    with pytest.raises(CheckpointError, match="cannot import leaving_import:f: SystemExit: this is a script"):
        FunctionScorer(ModelConfig(model="leaving_import:f"))


def test_a_version_is_that_of_the_name_and_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    source = "def one(texts):\n    return [1.0] * len(texts)\n\n\nother = one\n"
    versions = {}
    for name, text in (("versioned", source), ("versioned", source + "# edited\n"), ("versioned_too", source)):
        (tmp_path / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
        importlib.invalidate_caches()
        for function in ("one", "other"):
            versions[name, text, function] = FunctionScorer(
                ModelConfig(model=f"{name}:{function}")
            ).info.weights_version
    assert len({*versions.values()}) == len(versions) == 6
