"""Runs the examples: on made reviews in forks that need no imports, and, marked slow, on real ones as a user does."""

import gzip
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

import chats
from forks import Forks
from guerdon.settings.actors import PPORunConfig, ReinforceRunConfig, get_algorithm
from guerdon.settings.fields import from_mapping
from guerdon.settings.yaml_files import read_yaml
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


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes pairs whose chosen answer is the longer one and has other words."""
    path = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    draw = random.Random(0)
    rows = [
        {"prompt": f"How was film {i // 2}?", **{
            key: " and ".join(f"{draw.choice(WHAT)} is {draw.choice(HOW[label])}" for _ in range(3 + label))
            for label, key in enumerate(("rejected", "chosen"))
        }}
        for i in range(80)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def run(python: list[object], example: str, data: Path, out: Path, *arguments: object) -> tuple[dict, str]:
    """Returns the example's figures and its stdout."""
    command = [*python, EXAMPLES / example / "run.py", "--data", data, "--out", out, *arguments]
    environ = environment() | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(next(out.glob("*.json")).read_text()), done.stdout


def forking(folder: Path) -> list[object]:
    """Returns the words that run a script in a fork, and the commands that it starts as `python -m guerdon` too."""
    python, guerdon, own, code = (folder / name for name in ("python", "guerdon", "own", "code"))
    python.write_text(FORKS.wrapper("python"))
    guerdon.write_text(FORKS.wrapper("guerdon"))
    code.write_text(IN_A_FORK)
    own.write_text(f"""#!/bin/sh -eu
if [ "$1 $2" = "-m guerdon" ]; then shift 2; exec {guerdon} "$@"; fi
exec {python} -c "$(cat {code})" {own} "$@"
""")
    for program in (python, guerdon, own):
        program.chmod(0o755)
    return [python, "-c", IN_A_FORK, own]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: str(path.relative_to(EXAMPLES)))
def test_a_script_has_at_most_60_lines(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 60


def test_the_settings_are_those_that_the_commands_have() -> None:
    for path in sorted(EXAMPLES.glob("*/*.yaml")):
        if path.stem not in ("reinforce", "ppo", "sao"):
            continue
        kind = ReinforceRunConfig if path.stem == "reinforce" else PPORunConfig
        config = from_mapping(kind, read_yaml(path))
        num_responses = config.rollouts.prompts_per_step * config.rollouts.rollouts_per_prompt
        assert get_algorithm(config)[1].global_batch_size == num_responses


@pytest.mark.timeout(300)
@pytest.mark.slow
@pytest.mark.parametrize(("example", "name"), [("movie_reviews", "reinforce"), ("ppo", "ppo")])
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


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a random Llama of two layers whose template and EOS are SmolLM2's."""
    folder = chats.save("chatml", tmp_path_factory.mktemp("chat"))
    tokenizer = AutoTokenizer.from_pretrained(folder, pad_token="<|im_end|>")
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=36, intermediate_size=64, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_chat_example_takes_its_first_steps(chat_model: Path, pairs: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    few = ["--model", chat_model, "--steps", 4, "--minutes", 60, "--seed", 3]
    verdict, _ = run(forking(tmp_path), "smollm2", pairs, out, *few)
    before, *trained = (verdict["policies"][name] for name in ("before", "reinforce", "ppo"))
    assert before["rise"] == 0 and before["judge_wins"] == 0.5
    # Its KL is the difference of two forwards. A log-prob, about -log V, is a small logit less a sum of exponentials:
    # each is right to two units in its last place, and forwards that add up in another order differ by no more.
    unit = np.spacing(np.float32(math.log(chats.VOCAB_SIZE)))
    assert abs(before["kl"]) <= 4 * unit * before["tokens"]
    assert all(abs(figures["kl"]) > 1e-7 for figures in trained)
    assert verdict["accuracy"]["longer_uncut"] == 1 and verdict["accuracy"]["judge"] > 0.9
    names = ["train_reward_model.py", "guerdon reinforce", "guerdon ppo", "guerdon serve-critic", *["respond.py"] * 3]
    assert [part["name"] for part in verdict["parts"]] == [*names, "guerdon serve"]
    assert all(part["seconds"] > 0 and part["gigabytes"] > 0 for part in verdict["parts"])
    assert "[ppo, reward " in (out / "samples.txt").read_text()


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


WHOLE = {"prompt": "a", "chosen": "b c", "rejected": "d e"}


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (None, "No such file"),
        ("", "has 0 pairs"),
        ([WHOLE], "has 1 pairs, of which 0 are useful"),
        ([WHOLE, {"prompt": "a", "chosen": "b"}], 'line 2: "rejected" is missing'),
        ([WHOLE | {"prompt": [WHOLE]}], 'line 1: "prompt" is [{"prompt'),
        ([WHOLE | {"chosen": None}], 'line 1: "chosen" is null, not text'),
        ([WHOLE, "text"], "line 2: not a JSON object"),
        ('\n{"prompt": ', "line 2: not valid JSON"),
    ],
)
def test_the_chat_example_says_what_is_wrong_with_the_pairs(lines: Any, said: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.jsonl"
    if lines is not None:
        path.write_text(lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines))
    code = "import sys, pathlib, pairs; pairs.read_parts(pathlib.Path(sys.argv[1]), 0)"
    assert_refused([sys.executable, "-c", code, path], f"{path}", said, PYTHONPATH=str(EXAMPLES / "smollm2"))


@pytest.mark.slow
def test_the_chat_example_says_that_its_model_is_missing(pairs: Path, tmp_path: Path) -> None:
    command = [sys.executable, EXAMPLES / "smollm2/run.py", "--data", pairs, "--model", tmp_path / "a/b/c"]
    assert_refused(command, "there is no model", "make real", **environment())


def assert_refused(command: list[Any], *said: str, **environ: str) -> None:
    """Asserts that the command ends with an error that says this, and without a traceback."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environ, check=False)
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, done.stderr
    assert "error: " in done.stderr and all(part in done.stderr for part in said), done.stderr


def test_no_pair_tells_by_its_lengths_which_answer_is_better(pairs: Path) -> None:
    code = (
        "import sys, json, pathlib; sys.path.insert(0, sys.argv[1]); import pairs\n"
        "print(json.dumps(pairs.read_parts(pathlib.Path(sys.argv[2]), 0)))"
    )
    command = [sys.executable, "-c", code, EXAMPLES / "smollm2", pairs]
    parts = json.loads(subprocess.run(command, capture_output=True, check=True).stdout)
    assert {name: len(rows) for name, rows in parts.items()} == {"reward_model": 48, "judge": 16, "held_out": 16}
    prompts = [{row["prompt"] for row in rows} for rows in parts.values()]
    assert sum(map(len, prompts)) == len(set.union(*prompts)) == 40
    whole = {json.loads(line)[key] for line in pairs.read_text().splitlines() for key in ("chosen", "rejected")}
    for row in (row for rows in parts.values() for row in rows):
        assert len(row["chosen"].split()) == len(row["rejected"].split()) == row["count"]
        assert row["longer_wins"] and not {row["chosen"], row["rejected"]} & whole


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.skipif(not REAL.exists(), reason=f"there is no {REAL}")
def test_on_real_reviews_the_judge_agrees_that_sentiment_rose(tmp_path: Path) -> None:
    figures, _ = run([sys.executable], "movie_reviews", REAL, tmp_path)
    assert figures["judge_after"] > figures["judge_before"] + 0.15
    assert figures["reward_after"] > figures["reward_before"] + 0.5
    assert 0 < figures["kl"] < 20
