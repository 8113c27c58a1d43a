"""Tests the demo: its text, its loss, its models, and, marked slow, all of it as `make demo` runs it."""

import gzip
import json
import math
import random
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from demo import parts, policy, reward_model, scoring
from demo.repetition import repetition
from demo.story import KINDS, NUM_ANSWERS, SPOKEN, PlainStory, Story
from guerdon import LocalRewardModel
from processes import environment

ROOT = Path(__file__).parents[2]
PAIR = {"prompt": "How are you?", "responses": ["Fine, thank you.", "Äh ..."]}


def heldout() -> list[dict]:
    text = (ROOT / "examples/demo/heldout.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def command(*arguments: object) -> dict[str, Any]:
    """Returns what Popen needs to run the demo as the Makefile does."""
    makefile = (ROOT / "Makefile").read_text()
    line = re.search(r"^demo:.*\n\tPYTHONPATH=(\S+) \$\(BIN\)/python (-m demo) ", makefile, re.MULTILINE)
    assert line
    env = environment() | {"PYTHONPATH": f"{ROOT / line[1]}:{ROOT / 'src'}"}
    return {"args": [sys.executable, *line[2].split(), *map(str, arguments)], "env": env, "text": True}


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
    assert reward_model.bradley_terry_loss(flat).item() == pytest.approx(math.log(2))
    # Helpful 1 above brief, brief 1 above the five others: 1 + 5 pairs at distance 1, 5 pairs at distance 2.
    ranked = torch.tensor([[2.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    expected = (6 * math.log1p(math.exp(-1)) + 5 * math.log1p(math.exp(-2))) / 11
    assert reward_model.bradley_terry_loss(ranked).item() == pytest.approx(expected)


def test_the_model_is_a_normal_folder_and_the_recipe_repeats_itself(tmp_path: Path) -> None:
    short = reward_model.RewardModelRecipe(num_steps=3, prompts_per_step=2)
    losses: list[list[float]] = [[], []]
    for folder, seen in zip(("a", "b"), losses, strict=True):
        reward_model.make(tmp_path / folder, short, lambda _, loss, seen=seen: seen.append(loss))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert model.config.num_labels == 1
    assert model.config.pad_token_id == tokenizer.pad_token_id == 0
    messages = [{"role": "user", "content": "né?"}, {"role": "assistant", "content": "ja 🙂"}]
    ids = tokenizer.apply_chat_template(messages, return_dict=False)
    assert tokenizer.decode(ids) == "<|user|>né?<|end|><|assistant|>ja 🙂<|end|>"
    asked = tokenizer.apply_chat_template(messages[:1], add_generation_prompt=True, tokenize=False)
    assert asked == "<|user|>né?<|end|><|assistant|>"


def test_the_last_answer_has_no_end() -> None:
    tokenizer = reward_model.make_tokenizer(["one two three"], 300)
    chats = reward_model._chats(tokenizer, "one?", ["two", "three", "thr"])
    assert [chat.removeprefix("<|user|>one?<|end|><|assistant|>") for chat in chats] == [
        "two<|end|>",
        "three<|end|>",
        "thr",
    ]


def test_plain_answers_stand_in_the_file() -> None:
    story = PlainStory(random.Random(1))
    facts = {fact for topic in story.topics.values() for fact in topic["facts"]}
    known = facts | {phrase for phrases in story.phrases.values() for phrase in phrases}
    said = [story.say()[1] for _ in range(300)]
    assert sum(answer in known for answer in said) > 100
    assert len(set(said)) > 100


def test_each_kind_of_answer_is_about_its_topic_or_not() -> None:
    story = PlainStory(random.Random(2))
    own = set(story.topics["bread"]["facts"])
    foreign = {fact for name, topic in story.topics.items() if name != "bread" for fact in topic["facts"]}
    for kind in SPOKEN:
        answers = [story._answer(kind, "bread") for _ in range(20)]
        on_topic = [any(fact in answer for fact in own) for answer in answers]
        off_topic = [any(fact in answer for fact in foreign) for answer in answers]
        assert all(on_topic) or kind not in ("helpful", "brief")
        assert not any(on_topic) or kind not in ("off_topic", "evasive")
        assert all(off_topic) == (kind == "off_topic")


def test_the_policy_is_a_normal_folder_and_its_recipe_repeats_itself(tmp_path: Path) -> None:
    story = Story(random.Random(0))
    tokenizer = reward_model.make_tokenizer([s for group in story.by_topic() for s in group], 1000)
    short = policy.PolicyRecipe(num_steps=3, batch_size=4)
    losses: list[list[float]] = [[], []]
    for folder, seen in zip(("a", "b"), losses, strict=True):
        policy.make(tmp_path / folder, tokenizer, short, lambda _, loss, seen=seen: seen.append(loss))
    assert losses[0] == losses[1]
    assert len(losses[0]) == 3

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "a")
    assert AutoTokenizer.from_pretrained(tmp_path / "a").eos_token_id == model.config.eos_token_id


def test_the_policy_reads_answers_alone() -> None:
    tokenizer = reward_model.make_tokenizer(["one two three"], 300)
    tokens, targets = next(policy._batches(PlainStory(random.Random(0)), tokenizer, 4))
    answering, end = tokenizer.convert_tokens_to_ids("<|assistant|>"), tokenizer.eos_token_id
    for row, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        start = row.index(answering)
        assert wanted[:start] == [-1] * start
        length = wanted.index(-1, start) if -1 in wanted[start:] else len(wanted)
        assert wanted[start:length] == row[start + 1 : length + 1]
        assert wanted[length - 1] == end
        assert wanted.count(end) == 1


def test_prompts_are_files_that_the_actor_reads(tmp_path: Path) -> None:
    parts.make_prompts(tmp_path, seed=3)
    first = (tmp_path / parts.PROMPTS).read_text()
    held_out = {json.loads(line)["prompt"] for line in (tmp_path / parts.VALIDATION).read_text().splitlines()}
    asked = [json.loads(line)["prompt"] for line in first.splitlines()]
    assert len(asked) == parts.NUM_PROMPTS
    assert held_out == {row["prompt"] for row in heldout()}
    assert not held_out & set(asked)
    parts.make_prompts(tmp_path, seed=4)
    assert (tmp_path / parts.PROMPTS).read_text() != first


def test_repetition_by_hand() -> None:
    once, twice = "Let the dough rise.", "Let the dough rise. Let the dough rise."
    # Of the six phrases of three words in `twice`, two stand in it before.
    assert repetition([once, twice, "", "so so so so"]) == pytest.approx([0, -2 / 6, 0, -1 / 2])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no rows"),
        ('{"prompt": "a"}\n', "line 1: no prompt with a list of responses"),
        (json.dumps(PAIR) + '\n{"prompt": "a", "responses": [1]}\n', "line 2: no prompt with a list of responses"),
        ("not json\n", "line 1: not valid JSON"),
        ("[1]\n", "line 1: no prompt with a list of responses"),
    ],
)
def test_rows_that_cannot_be_scored(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text(text)
    with pytest.raises(SystemExit, match=message):
        scoring.run(tmp_path / "out", tmp_path / "data.jsonl", 10)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_whole_demo(tmp_path: Path) -> None:
    done = subprocess.run(**command("--out", tmp_path), check=True, capture_output=True)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["pair_accuracy"] > 0.9
    assert summary["reward_after"] > summary["reward_before"] + 2
    assert 0 < summary["kl"] < 10
    assert summary["steps"] == 60
    assert (tmp_path / "learning.png").stat().st_size > 10_000
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-000060" / "policy")
    assert heldout()[0]["prompt"] in done.stdout
    assert_the_readmes_example_is_in_its_order(tmp_path / "reward_model")


def assert_the_readmes_example_is_in_its_order(model: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    example = re.search(r"    question = .*?    scores = client\.score\(.*?\)\n", text, re.DOTALL)
    shown = re.search(r"```text\n\[ *(\S+) +(\S+) *\]\n```", text)
    assert example and shown
    with LocalRewardModel(model) as client:
        known: dict[str, Any] = {"client": client}
        exec(textwrap.dedent(example[0]), known)
    good, bad = known["scores"].rewards.tolist()
    assert good > bad + 2 and float(shown[1]) > float(shown[2]) + 2


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_demo_on_own_data_takes_the_first_prompts(tmp_path: Path) -> None:
    with gzip.open(tmp_path / "own.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps({**PAIR, "id": i}) + "\n" for i in range(5))
    arguments = command("--data", tmp_path / "own.jsonl.gz", "--limit", 3, "--out", tmp_path / "out")
    done = subprocess.run(**arguments, check=True, capture_output=True)
    assert "taking the first 3" in done.stdout
    assert len((tmp_path / "out" / "scores.jsonl").read_text().splitlines()) == 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_demo_that_is_told_to_stop_leaves_no_server(tmp_path: Path) -> None:
    process = subprocess.Popen(**command("--out", tmp_path / "demo", "--steps", 4), stdout=subprocess.PIPE)
    assert process.stdout is not None
    next(line for line in process.stdout if "ready at" in line)
    (server,) = psutil.Process(process.pid).children()
    process.terminate()
    process.stdout.read()
    assert process.wait(120) == 143
    server.wait(120)
