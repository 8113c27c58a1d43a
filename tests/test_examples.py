"""Runs the examples: on made reviews in forks that need no imports, and, marked slow, on real ones as a user does."""

from __future__ import annotations

import gzip
import json
import math
import random
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from transformers import AutoModelForCausalLM

from forks import Forks
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig
from guerdon.settings.fields import from_mapping
from guerdon.settings.sources import read_yaml
from processes import environment

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
SCRIPTS = sorted(path for path in EXAMPLES.rglob("*.py") if EXAMPLES / "demo" not in path.parents)
REAL = ROOT.parent / "shared/data/movie_reviews.jsonl.gz"

FORKS = Forks()
IN_A_FORK = """
import os, runpy, sys
sys.executable, sys.path[0] = sys.argv.pop(1), os.path.dirname(sys.argv[1])
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""

WHAT = ["the plot", "the acting", "this film", "the story", "the ending", "every scene"]
HOW = ["dull and slow", "a bad bore", "weak and flat"], ["warm and funny", "a great joy", "fresh and moving"]


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reviews") / "reviews.jsonl.gz"
    draw = random.Random(0)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        for _ in range(240):
            label = draw.randrange(2)
            text = " and ".join(f"{draw.choice(WHAT)} is {draw.choice(HOW[label])}" for _ in range(2))
            file.write(json.dumps({"text": f"{text} .", "label": label}) + "\n")
    return path


def run(python: list[object], example: str, data: Path, out: Path, *arguments: object) -> tuple[dict, str]:
    """Returns the example's judge.json and its stdout."""
    command = [*python, EXAMPLES / example / "run.py", "--data", data, "--out", out, *arguments]
    environ = environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads((out / "judge.json").read_text()), done.stdout


def forking(folder: Path) -> list[object]:
    """Returns the words that run a script in a fork, and the commands that it starts as `python -m guerdon` too."""
    python, guerdon, own = folder / "python", folder / "guerdon", folder / "own"
    python.write_text(FORKS.wrapper("python"))
    guerdon.write_text(FORKS.wrapper("guerdon"))
    own.write_text(f'#!/bin/sh -eu\ntest "$1 $2" = "-m guerdon"\nshift 2\nexec {guerdon} "$@"\n')
    for program in (python, guerdon, own):
        program.chmod(0o755)
    return [python, "-c", IN_A_FORK, own]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_script_has_at_most_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_the_settings_are_those_that_the_commands_have() -> None:
    reinforce = from_mapping(ReinforceRunConfig, read_yaml(EXAMPLES / "movie_reviews/reinforce.yaml"))
    ppo = from_mapping(PPORunConfig, read_yaml(EXAMPLES / "ppo/ppo.yaml"))
    responses = [config.rollouts.prompts_per_step * config.rollouts.rollouts_per_prompt for config in (reinforce, ppo)]
    assert responses == [reinforce.reinforce.global_batch_size, ppo.ppo.global_batch_size]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("example", "name"), [("movie_reviews", "reinforce"), pytest.param("ppo", "ppo", marks=pytest.mark.slow)]
)
def test_an_example_leaves_what_it_says(example: str, name: str, reviews: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    figures, printed = run(forking(tmp_path), example, reviews, out, "--steps", 5, "--seed", 3)
    for key in ("judge", "judge_probability"):
        assert all(0 <= figures[f"{key}_{when}"] <= 1 for when in ("before", "after"))
    assert math.isfinite(figures["kl"]) and figures["seconds"] > 0
    assert "$ guerdon serve" in printed and f"$ guerdon {name}" in printed and "after" in printed

    metrics = [json.loads(line) for line in (out / name / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [0, 1, 2, 3, 4, 5]
    assert (out / name / "curves.png").stat().st_size > 10_000
    assert yaml.safe_load((out / name / "settings.yaml").read_text())["run"]["seed"] == 3
    before, after = (
        AutoModelForCausalLM.from_pretrained(folder).state_dict()
        for folder in (out / "language_model", out / name / "checkpoints/step-000005/policy")
    )
    assert all((before[key] != after[key]).any() for key in before)
    if name == "ppo":
        assert all(row["critic_loss"] > 0 for row in metrics[1:])
        assert list((out / "critic").iterdir())


def test_the_parts_share_no_review(reviews: Path) -> None:
    code = (
        "import sys, json, pathlib; sys.path.insert(0, sys.argv[1]); import reviews\n"
        "parts = reviews.read_parts(pathlib.Path(sys.argv[2]), 0)\n"
        "judge = reviews.Judge(parts['judge'])\n"
        "print(json.dumps([{k: len(v) for k, v in parts.items()}, judge.accuracy(parts['prompts']),"
        " len({id(row) for rows in parts.values() for row in rows}), judge.positive('a great joy')]))"
    )
    command = [sys.executable, "-c", code, EXAMPLES / "movie_reviews", reviews]
    sizes, accuracy, num_rows, positive = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert sizes == {"language_model": 120, "reward_model": 60, "judge": 48, "prompts": 7, "held_out": 5}
    assert num_rows == 240
    assert accuracy == 1.0
    assert positive > 0.9


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not REAL.exists(), reason=f"there is no {REAL}")
def test_on_real_reviews_the_judge_agrees_that_sentiment_rose(tmp_path: Path) -> None:
    figures, _ = run([sys.executable], "movie_reviews", REAL, tmp_path)
    assert figures["judge_after"] > figures["judge_before"] + 0.15
    assert figures["reward_after"] > figures["reward_before"] + 0.5
    assert 0 < figures["kl"] < 20
