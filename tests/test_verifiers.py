"""The verifiers that guerdon brings, behind a real server: mathematics by math-verify, and programs with tests."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from guerdon.client import RewardClient
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ModelConfig
from served import running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="isolation needs Linux")


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = [
        ModelConfig(
            model=f"guerdon.verifiers.{name}:verify", name=name, isolate=True, children=2, sample_deadline_s=60.0
        )
        for name in ("mathematics", "programs")
    ]
    with running(*models, grpc_port=0) as server:
        yield server


def ask(server: RunningServer, name: str, answered: list[tuple[str, Any]]) -> list[float | str]:
    """Returns each response's reward, or its error."""
    question = "Question\n"
    with RewardClient(server.http_url, name) as client:
        scores = client.score(
            texts=[question + response for response, _ in answered],
            prompts=[question] * len(answered),
            labels=[label for _, label in answered],
        )
    results = zip(scores.rewards, scores.errors, strict=True)
    return [float(reward) if error is None else error for reward, error in results]


def test_answers_are_compared_as_mathematics(server: RunningServer) -> None:
    right = [
        ("The answer is $\\frac{1}{2}$.", "0.5"),
        ("so \\boxed{\\frac{2}{4}}", "\\frac{1}{2}"),
        ("I think it is 42", 42),
        ("$x^2+2x+1$", "(x+1)^2"),
        ("\\boxed{\\{1, 2\\}}", "$\\{2, 1\\}$"),
    ]
    wrong = [("\\boxed{41}", "42"), ("I do not know.", "42"), ("", 7), ("\\boxed{\\frac{}{}}", "1")]
    assert ask(server, "mathematics", right) == [1.0] * len(right)
    assert ask(server, "mathematics", wrong) == [0.0] * len(wrong)


def test_a_label_that_cannot_be_read_fails_its_sample(server: RunningServer) -> None:
    answers = ask(server, "mathematics", [("\\boxed{1}", label) for label in ("???", [1, 2], True, None, "1")])
    assert "finds no answer in the label '???'" in str(answers[0])
    assert "the label is a list of 2; send one answer" in str(answers[1])
    assert "the label is bool" in str(answers[2])
    assert "label was not sent" in str(answers[3])
    assert answers[4] == 1.0


def block(program: str) -> str:
    return f"Like this:\n```python\n{program}\n```\nThat is it."


DOUBLES = {"cases": [{"stdin": "2\n", "stdout": "4"}, {"stdin": "-3\n", "stdout": "-6\n"}]}
ASSERTS = {"asserts": ["assert double(2) == 4", "assert double(-3) == -6"]}


@pytest.mark.parametrize(
    ("program", "label", "reward"),
    [
        ("print(2 * int(input()))", DOUBLES, 1.0),
        ("print(4)", DOUBLES, 0.0),
        ("def double(x):\n    return 2 * x", ASSERTS, 1.0),
        ("def double(x):\n    return x + 2", ASSERTS, 0.0),
        ("def double(x):\n    return 2 * x\nprint('2 *', end=' ')", ASSERTS, 1.0),
        ("def double(x):\n    return 2 * x\nif __name__ == '__main__':\n    print(double(int(input())))", ASSERTS, 1.0),
        (
            "from __future__ import annotations\nfrom dataclasses import dataclass\n"
            "@dataclass\nclass Two:\n    x: int = 2\ndef double(x):\n    return Two().x * x",
            ASSERTS,
            1.0,
        ),
        ("raise SystemExit(0)", ASSERTS, 0.0),
        ("import os\nos._exit(0)", ASSERTS, 0.0),
        ("while True: pass", DOUBLES | {"seconds": 0.5}, 0.0),
        ("import os, time\nos.fork()\ntime.sleep(600)", ASSERTS | {"seconds": 0.5}, 0.0),
        ("x = bytearray(3 << 30)\nprint(2 * int(input()))", DOUBLES, 0.0),
        ("no python", ASSERTS, 0.0),
    ],
)
def test_a_program_passes_all_tests_or_none(
    server: RunningServer, program: str, label: dict[str, Any], reward: float
) -> None:
    assert ask(server, "programs", [(block(program), label)]) == [reward]


def test_the_last_python_block_counts_and_no_block_is_no_answer(server: RunningServer) -> None:
    right = "print(2 * int(input()))"
    two = block("print(0)") + "\n" + block(right) + "\n```text\nprint(1)\n```\n"
    assert ask(server, "programs", [(two, DOUBLES), (f"```\n{right}\n```", DOUBLES), (right, DOUBLES)]) == [
        1.0,
        1.0,
        0.0,
    ]


def test_the_program_is_that_of_the_markdown(server: RunningServer) -> None:
    right = "print(2 * int(input()))"
    responses = [
        f"1. So:\n   ~~~py\n   {right}\n   ~~~\n\n   It prints:\n   ```\n   4\n   ```\n",
        f"> ```python\n> {right}",
        f"<think>\n```python\nprint(4)\n```\n</think>\n```\n{right}\n```",
        f"```python\n{right}```\nThat is it.",
        f"<think>\n{block(right)}",
    ]
    assert ask(server, "programs", [(response, DOUBLES) for response in responses]) == [1.0, 1.0, 1.0, 1.0, 0.0]


def test_labels_come_from_parquet(server: RunningServer, tmp_path: Path) -> None:
    path = tmp_path / "problems.parquet"
    pd.DataFrame({"label": [DOUBLES, ASSERTS | {"seconds": 9.5}]}).to_parquet(path)
    labels = pd.read_parquet(path)["label"].tolist()
    assert isinstance(labels[1]["asserts"], np.ndarray) and labels[1]["cases"] is None
    right = "def double(x):\n    return 2 * x"
    asked = [(block("print(2 * int(input()))"), labels[0]), (block(right), labels[1]), (block(right), labels[0])]
    assert ask(server, "programs", asked) == [1.0, 1.0, 0.0]


def test_a_label_without_tests_fails_its_sample(server: RunningServer) -> None:
    labels = [{"cases": None}, {"cases": [{"stdin": "1"}]}, "assert True", {"assert": ["assert True"]}]
    labels += [ASSERTS | {"seconds": 0}]
    answers = ask(server, "programs", [(block("pass"), label) for label in labels])
    assert "give cases or asserts" in str(answers[0])
    for answer in answers[1:]:
        assert "the label holds no tests: " in str(answer)
