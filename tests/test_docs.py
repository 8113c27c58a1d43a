"""What the documentation names exists: functions of the walk, files, links, flags, metrics."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.run as torchrun
import yaml

from guerdon import cli
from guerdon.adapters import trl, trlx, verl
from guerdon.config import CriticConfig, EngineConfig
from guerdon.metrics import TABLE

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
TRAINERS = sorted((ROOT / "docs/trainers").glob("*.md"))
DEPLOY = sorted((ROOT / "docs/deploy").glob("*.md"))
COLLECTED = {"guerdon_queue_sequences", "guerdon_queue_tokens", "guerdon_model_info"}


@pytest.mark.parametrize(("page", "num_steps"), [("walk", 8), ("critic", 11), ("actors", 10)])
def test_the_walks_go_through_functions_that_exist(page: str, num_steps: int) -> None:
    text = (ROOT / f"docs/{page}.md").read_text()
    steps = re.findall(r"^ ?(\d+)  (\S+)\.py +(\S+)", text, re.MULTILINE)
    assert [int(number) for number, *_ in steps] == list(range(1, num_steps + 1))
    for _, path, name in steps:
        found = importlib.import_module("guerdon." + path.replace("/", "."))
        for part in name.split("."):
            found = getattr(found, part)
        assert callable(found)


def test_the_critics_settings_stand_in_its_page() -> None:
    told = dict(re.findall(r"^\| `(\w+)` \| `?([^|`]*?)`? ?\|", (ROOT / "docs/critic.md").read_text(), re.MULTILINE))
    engine = {field.name for field in dataclasses.fields(EngineConfig)}
    own = [field for field in dataclasses.fields(CriticConfig) if field.name not in {*engine, "model"}]
    assert sorted(told) == sorted(field.name for field in own)
    for name, default in vars(CriticConfig()).items():
        if name in told:
            assert yaml.safe_load(told[name]) == default or float(told[name]) == default, name


@pytest.mark.parametrize("page", [*PAGES, *TRAINERS, *DEPLOY], ids=lambda page: f"{page.parent.name}/{page.name}")
def test_links_and_files_exist(page: Path) -> None:
    text = page.read_text()
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target
    for path in re.findall(
        r"`((?:src|tests|benchmarks|docs)/[\w./]+|(?:server|wire|engine|client|training)/\w+\.py)`", text
    ):
        assert (ROOT / path).exists() or (ROOT / "src/guerdon" / path).exists(), path


def helps() -> list[str]:
    """The help of each command, and torchrun's."""
    texts = [cli.make_parser().format_help(), torchrun.get_args_parser().format_help()]
    for action in cli.make_parser()._subparsers._group_actions:  # type: ignore[union-attr]
        texts += [parser.format_help() for parser in action.choices.values()]  # type: ignore[union-attr]
    return texts


@pytest.mark.parametrize("page", TRAINERS, ids=lambda page: page.name)
def test_what_the_trainers_pages_use_of_guerdon_exists(page: Path) -> None:
    text = page.read_text()
    for module, names in re.findall(r"^from (guerdon[\w.]*) import (.+)$", text, re.MULTILINE):
        for name in names.split(", "):
            found = importlib.import_module(module)
            assert hasattr(found, name) or importlib.import_module(f"{module}.{name}"), name
    for command in re.findall(r"^guerdon .*$", text, re.MULTILINE):
        for flag in re.findall(r"--[a-z][a-z-]+", command):
            assert any(flag in text for text in helps()), flag


@pytest.mark.parametrize(
    ("page", "function"),
    [("trl", trl.reward_function), ("verl", verl.compute_score), ("trlx", trlx.create_reward_fn)],
    ids=["trl", "verl", "trlx"],
)
def test_the_adapters_arguments_stand_in_their_pages(page: str, function: Callable[..., object]) -> None:
    rows = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \|", (ROOT / f"docs/trainers/{page}.md").read_text(), re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"\w+", row)}
    of_verl = {"data_source", "solution_str", "ground_truth", "extra_info", "by_verl"}
    assert told - {"triton_host"} == {*inspect.signature(function).parameters} - of_verl - {"triton_host"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_flags_and_metrics_exist(page: Path) -> None:
    text = page.read_text()
    if page.name == "README.md":  # whose table of trainers has their flags
        text = re.sub(r"^\| .*docs/trainers/.*$", "", text, flags=re.MULTILINE)
    for flag in re.findall(r"`[^`]*?(--[a-z][a-z-]+)", text):
        assert any(flag in text for text in helps()), flag
    for metric in re.findall(r"guerdon_[a-z]+_?[a-z_]*[a-z]", text):
        assert metric.removesuffix("_total") in {*TABLE, *COLLECTED}, metric
