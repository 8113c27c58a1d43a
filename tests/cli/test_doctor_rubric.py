"""`guerdon doctor MODEL --rubric --rows` shows what plain forwards say about the first ten rows of a file."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

import judged
import zoo
from guerdon.cli import main
from guerdon.cli.doctor_model import examine_rubric
from guerdon.cli.findings import Finding


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.language_model("llama", tmp_path_factory.mktemp("doctor") / "llama"))


def write(folder: Path, rows: list[dict[str, object]]) -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def number(finding: Finding, pattern: str) -> float:
    found = re.search(pattern, finding.text)
    assert found is not None, finding.text
    return float(found[1])


def test_each_answer_is_that_of_a_plain_forward(model: Path, tmp_path: Path) -> None:
    pairs = [*zip(judged.PROMPTS, judged.RESPONSES, strict=True)] * 4
    rows = write(tmp_path, [{"prompt": prompt, "response": response, "label": "4"} for prompt, response in pairs])
    *answers, summary = examine_rubric(str(model), judged.write(tmp_path), rows)
    assert len(answers) == 10 * len(judged.CRITERIA) and answers[4].subject == "line 2, brief"
    want = judged.wanted(model)
    for i, finding in enumerate(answers):
        at = i // 3 % 3, i % 3
        assert number(finding, r"no label ([\d.]+)") == pytest.approx(want["other"][at], abs=6e-4)
        assert number(finding, r"entropy ([\d.]+)") == pytest.approx(want["entropy"][at], abs=6e-3)
        shares = [number(finding, rf"'{label}' ([\d.]+)") for label in judged.LABELS]
        assert sum(shares) == pytest.approx(1 - want["other"][at], abs=2e-3)
        assert finding.level == ("problem" if want["other"][at] > 0.5 else "ok")
    few = int((want["other"][[i % 3 for i in range(10)]] > 0.5).sum())
    assert summary.level == "problem" and f"30 answers; labels have {1 - want['other'].max():.3f} to" in summary.text
    assert summary.text.endswith(f"below 0.5 in {few}")


def test_the_bias_of_the_order_is_that_of_plain_forwards(model: Path, tmp_path: Path) -> None:
    responses = judged.RESPONSES
    rows = write(tmp_path, [{"prompt": "two and two? ", "responses": responses}])
    found = [*examine_rubric(str(model), judged.write(tmp_path, judged.COMPARING), rows)]
    assert len(found) == 6 * len(judged.COMPARED) + 2 and "first, right" in found[0].subject
    questions = [
        f"Q: two and two? \nA: {a}\nB: {b}\n{text}"
        for a in responses for b in responses if a != b for text in judged.COMPARED.values()
    ]  # fmt: skip
    chosen = judged.probabilities(model, questions, judged.COMPARED_LABELS)
    bias = (chosen[:, 0] / chosen.sum(-1)).mean() - 0.5
    assert number(found[-1], r"gets ([-+][\d.]+) beyond") == pytest.approx(float(np.asarray(bias)), abs=6e-4)


def test_rows_and_arguments_that_are_wrong_are_named(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rubric = judged.write(tmp_path)
    rows = write(tmp_path, [{"prompt": "a", "response": "red" * 200}, {"messages": [{"role": "user", "content": "a"}]}])
    found = [*examine_rubric(str(model), rubric, rows)]
    assert [one.level for one in found] == ["problem"] * 5
    assert found[0].subject.endswith("rows.jsonl, line 2") and "no response to score" in found[0].text
    assert "shorten it" in found[1].text and "no question was answered" in found[-1].text
    (missing,) = examine_rubric(str(model), rubric, str(tmp_path / "none.jsonl"))
    assert missing.level == "problem" and "none.jsonl" in missing.text
    assert main(["doctor", str(model), "--rubric", rubric]) != 0
    assert "a rubric is tried by one model on one file" in capsys.readouterr().err
