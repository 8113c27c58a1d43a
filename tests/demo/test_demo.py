"""The demo: its text, its loss, its model, and, slowly, the whole of it as a user runs it."""

from __future__ import annotations

import gzip
import json
import math
import random
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from guerdon.demo import recipe, run
from guerdon.demo.story import KINDS, NUM_ANSWERS, Story
from guerdon.errors import StartError
from processes import environment

PAIR = {"prompt": "How are you?", "responses": ["Fine, thank you.", "Äh ..."]}


def heldout() -> list[dict]:
    text = files("guerdon.demo").joinpath("heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_the_held_out_file_has_every_kind_for_every_prompt() -> None:
    rows = heldout()
    assert len(rows) == 24
    for row in rows:
        assert sorted(row["kinds"]) == sorted(KINDS)
        assert len(row["responses"]) == len(KINDS)


def test_no_held_out_answer_is_in_the_training_text() -> None:
    story = Story(random.Random(0))
    facts = {fact for topic in story.topics.values() for fact in topic["facts"]}
    for row in heldout():
        kept = [r for r, kind in zip(row["responses"], row["kinds"], strict=True) if kind in ("helpful", "brief")]
        assert not [(fact, response) for response in kept for fact in facts if fact in response]


def test_drawing_is_seeded_and_complete() -> None:
    first, again = (Story(random.Random(3)).draw() for _ in range(2))
    assert first == again
    assert len(first[1]) == NUM_ANSWERS


def test_bradley_terry_loss_by_hand() -> None:
    flat = torch.zeros(2, NUM_ANSWERS)
    assert recipe.bradley_terry_loss(flat).item() == pytest.approx(math.log(2))
    # Helpful 1 above brief, brief 1 above the four others: 1 + 4 pairs at distance 1, 4 pairs at distance 2.
    ranked = torch.tensor([[2.0, 1.0, 0.0, 0.0, 0.0, 0.0]])
    expected = (5 * math.log1p(math.exp(-1)) + 4 * math.log1p(math.exp(-2))) / 9
    assert recipe.bradley_terry_loss(ranked).item() == pytest.approx(expected)


def test_the_model_is_a_normal_folder_and_the_recipe_repeats_itself(tmp_path: Path) -> None:
    short = recipe.Recipe(num_steps=3, prompts_per_step=2)
    losses: list[list[float]] = [[], []]
    for folder, seen in zip(("a", "b"), losses, strict=True):
        recipe.make(tmp_path / folder, short, lambda _, loss, seen=seen: seen.append(loss))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    messages = [{"role": "user", "content": "né?"}, {"role": "assistant", "content": "ja 🙂"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>né?<|end|><|assistant|>ja 🙂<|end|>"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ('{"prompt": "a"}\n', "line 1: no prompt text with a list of response texts"),
        (json.dumps(PAIR) + '\n{"prompt": "a", "responses": [1]}\n', "line 2: no prompt text"),
        ("not json\n", "line 1: not valid JSON"),
        ("[1]\n", "line 1: no prompt text"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(StartError, match=message):
        run.run(tmp_path / "out", tmp_path / "data.jsonl", 10)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_whole_demo(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "guerdon", "demo", "--out", tmp_path], check=True, env=environment())
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["num_responses"], summary["num_failed"]) == (144, 0)
    assert summary["pair_accuracy"] > 0.9
    assert (tmp_path / "rewards.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_on_own_data_takes_the_first_prompts(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "own.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({**PAIR, "id": i}) + "\n" for i in range(5))
    command = [sys.executable, "-m", "guerdon", "demo", "--data", tmp_path / "own.jsonl.gz", "--limit", "3"]
    done = subprocess.run(
        [*command, "--out", tmp_path / "out"], check=True, env=environment(), capture_output=True, text=True
    )
    assert "taking the first 3" in done.stdout
    assert len((tmp_path / "out" / "scores.jsonl").read_text().splitlines()) == 3
