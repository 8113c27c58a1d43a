"""SmolLM2-135M-Instruct as the judge of docs/judge.md, against transformers, one question at a time."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from released import MARKS, SMOLLM2
from transformers import AutoModelForCausalLM, AutoTokenizer

from guerdon.local import LocalJudge

pytestmark = MARKS

PAGE = Path(__file__).parents[2] / "docs/judge.md"
PROMPT, RESPONSES = "What is 2+2? ", ["4", "5"]


@pytest.fixture(scope="module")
def rubric() -> str:
    """The page's own."""
    (found,) = re.findall(r"```yaml\n(# rubric.yaml\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return found


@torch.no_grad()
def wanted(rubric: str) -> np.ndarray:
    """Each sample's values of the criteria, its other mass and its labels' entropy, `[N,K+2]`."""
    parts: dict[str, Any] = yaml.load(rubric, yaml.BaseLoader)
    tokenizer: Any = AutoTokenizer.from_pretrained(SMOLLM2)
    model: Any = AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=torch.float32).eval()
    spelled = [tokenizer.decode([i]).strip().casefold() for i in range(len(tokenizer))]
    rows = []
    for response in RESPONSES:
        values, other, entropy = [], 0.0, 0.0
        for criterion in parts["criteria"]:
            question = parts["template"].format(prompt=PROMPT, response=response, criterion=criterion["text"])
            messages = [{"role": "system", "content": parts["system"]}, {"role": "user", "content": question}]
            text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
            shares = torch.softmax(model(ids).logits[0, -1].double(), -1).numpy()
            yes, no = (sum(shares[i] for i, word in enumerate(spelled) if word == label) for label in ("yes", "no"))
            values.append(yes / (yes + no))
            other = max(other, 1 - yes - no)
            share = np.array([yes, no]) / (yes + no)
            entropy = max(entropy, -share @ np.log(share))
        rows.append([*values, other, entropy])
    return np.array(rows)


def test_the_pages_rubric_gives_scores(rubric: str, tmp_path: Path) -> None:
    want = wanted(rubric)
    (tmp_path / "rubric.yaml").write_text(rubric)
    with LocalJudge(SMOLLM2, tmp_path / "rubric.yaml", max_other_mass=0.9) as judge:
        scores = judge.score(texts=[PROMPT + text for text in RESPONSES], prompts=[PROMPT] * 2)
    assert scores.attributes is not None
    np.testing.assert_allclose(scores.attributes, want, atol=2e-5)
    np.testing.assert_allclose(scores.rewards, 2 * want[:, 0] + want[:, 1], atol=5e-5)


def test_exact_labels_fail_and_the_models_own_are_named(rubric: str, tmp_path: Path) -> None:
    (tmp_path / "rubric.yaml").write_text(rubric.replace("spellings: any\n", ""))
    with LocalJudge(SMOLLM2, tmp_path / "rubric.yaml") as judge:
        scores = judge.score(texts=[PROMPT + text for text in RESPONSES], prompts=[PROMPT] * 2)
    assert np.isnan(scores.rewards).all()
    for error in scores.errors:
        assert "the likeliest tokens are 'No' 0." in str(error) and "'Yes' for 'yes'" in str(error)
