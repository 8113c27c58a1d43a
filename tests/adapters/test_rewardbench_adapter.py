"""RewardBench's pipeline through a server, called as its command calls it."""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import chats
import zoo
from guerdon.adapters import rewardbench
from guerdon.adapters.judge import TIMEOUT_S, judge
from guerdon.adapters.rewardbench import ServerPipeline
from guerdon.errors import ConfigError, SampleFailed
from guerdon.settings.config import ModelConfig
from served import Serve

TEXTS = ["the answer", "<s>user: why?</s>\nassistant: the reason</s>\n", "x"]
CALL = {"batch_size": 8, "truncation": False, "padding": True, "max_length": 512, "function_to_apply": "none"}
"""The arguments that the command passes besides the texts."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("rewardbench")))


@pytest.fixture(scope="module")
def url(folder: Path, serve: Serve) -> str:
    return serve(ModelConfig(model=str(folder), device="cpu"), grace_s=0).http_url


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    return AutoTokenizer.from_pretrained(folder, padding_side="left", truncation_side="left")


def pipeline(url: str, tokenizer: Any, send: str = "tokens", timeout_s: float = TIMEOUT_S) -> ServerPipeline:
    return ServerPipeline(judge(url, "reward_model", timeout_s), tokenizer, send)


def scores(answer: list[dict[str, float]]) -> list[float]:
    return [entry["score"] for entry in answer]


def reference(folder: Path, rows: list[list[int]]) -> Any:
    return pytest.approx(zoo.reference(folder, [np.array(row) for row in rows]).tolist(), abs=2e-5)


def test_scores_are_those_of_rewardbenchs_own_ids(url: str, folder: Path, tokenizer: Any) -> None:
    rows = [tokenizer(text)["input_ids"] for text in TEXTS]
    assert rows[1][:2] == [zoo.BOS, zoo.BOS]  # of which it masks the first
    wanted = reference(folder, [rows[0], rows[1][1:], rows[2]])
    assert scores(pipeline(url, tokenizer)(TEXTS, **CALL, return_token_type_ids=False)) == wanted


def test_texts_are_truncated_only_on_request(url: str, folder: Path, tokenizer: Any) -> None:
    text = "abcdefghij" * 60
    with pytest.raises(SampleFailed, match=f"row 1: the sample has 601 tokens, .* at most {zoo.MAX_LENGTH}"):
        pipeline(url, tokenizer)(["x", text], **CALL)
    cut = pipeline(url, tokenizer)(["x", text], **CALL | {"truncation": True, "max_length": 20})
    wanted = [tokenizer(part, truncation=True, max_length=20)["input_ids"] for part in ("x", text)]
    assert scores(cut) == reference(folder, wanted)


def test_texts_are_scored_as_they_are(url: str, folder: Path, tokenizer: Any) -> None:
    rows = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    assert scores(pipeline(url, tokenizer, "texts")(TEXTS, **CALL)) == reference(folder, rows)
    with pytest.raises(ConfigError, match="texts are sent"):
        pipeline(url, tokenizer, "texts")(TEXTS, **CALL | {"truncation": True})


def test_ids_of_another_tokenizer_are_refused(url: str, folder: Path, tmp_path: Path) -> None:
    other = AutoTokenizer.from_pretrained(chats.save("chatml", tmp_path))
    with pytest.raises(ConfigError, match="the tokenizer is not that of the served model: their vocabularies differ"):
        pipeline(url, other)(["x"], **CALL)
    assert scores(pipeline(url, other, "texts")(["x"], **CALL))


def test_what_the_command_sets_and_reads(url: str, tokenizer: Any) -> None:
    pipe = pipeline(url, tokenizer)
    assert pipe.tokenizer.pad_token_id == pipe.model.config.pad_token_id == zoo.PAD
    pipe.model = pipe.model  # prepared by accelerate
    pipe.tokenizer.add_eos_token = True


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for RewardBench where it is registered with, whose command looks its model up as the real one."""
    package = ModuleType("rewardbench")
    package.REWARD_MODEL_CONFIG = {}  # type: ignore[attr-defined]
    command = ModuleType("rewardbench.rewardbench")
    package.rewardbench = command  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "rewardbench", package)
    monkeypatch.setitem(sys.modules, "rewardbench.rewardbench", command)
    monkeypatch.setattr(sys, "argv", ["as it was"])
    return package


def test_the_command_registers_and_hands_over(url: str, folder: Path, tokenizer: Any, installed: ModuleType) -> None:
    seen: dict[str, Any] = {}

    def main() -> None:
        seen["argv"] = sys.argv
        entry = installed.REWARD_MODEL_CONFIG["mine"]
        assert set(entry) == {"model_builder", "pipeline_builder", "quantized", "custom_dialogue", "model_type"}
        assert not entry["quantized"] and not entry["custom_dialogue"]
        model = entry["model_builder"]("mine", revision=None, device_map="auto", trust_remote_code=False)
        pipe = entry["pipeline_builder"]("text-classification", model=model, tokenizer=tokenizer)
        seen["scores"] = scores(pipe(TEXTS, **CALL))

    installed.rewardbench.main = main
    rewardbench.main(["--server", url, "--model", "mine", "--tokenizer", str(folder), "--batch_size", "64", "--debug"])
    assert seen["argv"] == [
        "rewardbench",
        "--model",
        "mine",
        "--tokenizer",
        str(folder),
        "--batch_size",
        "64",
        "--debug",
    ]
    assert seen["scores"] == scores(pipeline(url, tokenizer)(TEXTS, **CALL))
