"""A rubric and what transformers makes of it: one question at a time, in float32."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer

from teaching import plain

TEMPLATE = "Q: {prompt}\nA: {response}\n{criterion}"
LABELS = {"y": 1.0, "n": 0.0, "m": 0.25}
CRITERIA = {"right": ("Is it right?", 2.0), "brief": ("Or brief?", -0.5), "kind": ("Kind?", 1.0)}

RUBRIC = """\
template: "Q: {prompt}\\nA: {response}\\n{criterion}"
labels: {y: 1, n: 0, m: 0.25}
criteria:
  - {name: right, text: "Is it right?", weight: 2}
  - {name: brief, text: "Or brief?", weight: -0.5}
  - {name: kind, text: "Kind?"}
"""

COMPARING = """\
template: "Q: {prompt}\\nA: {response_a}\\nB: {response_b}\\n{criterion}"
labels: {h: 1, p: 0}
criteria:
  - {name: right, text: "Is A right?", weight: 2}
  - {name: brief, text: "Or brief?", weight: -0.5}
compare: {schedule: round_robin, scores: wins}
"""
COMPARED = {"right": "Is A right?", "brief": "Or brief?"}
COMPARED_WEIGHTS = np.array([2.0, -0.5])
COMPARED_LABELS = {"h": 1.0, "p": 0.0}

PROMPTS = ["two and two? ", "two and two? ", "a colour? "]
RESPONSES = ["the answer is {4}", "that is no number I can name", "red"]
TEXTS = [prompt + response for prompt, response in zip(PROMPTS, RESPONSES, strict=True)]


def write(folder: Path, text: str = RUBRIC, name: str = "rubric.yaml") -> str:
    """Writes a rubric and returns its path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text, encoding="utf-8")
    return str(folder / name)


def wanted(folder: Path, prompts: list[str] = PROMPTS, responses: list[str] = RESPONSES) -> dict[str, np.ndarray]:
    """Rewards `[N]` and the criteria's values `[N,K]`, both also by the likeliest labels, and other mass `[N,K]`."""
    questions = [
        TEMPLATE.replace("{prompt}", prompt).replace("{response}", response).replace("{criterion}", text)
        for prompt, response in zip(prompts, responses, strict=True)
        for text, _ in CRITERIA.values()
    ]
    chosen = probabilities(folder, questions, LABELS).reshape(len(prompts), len(CRITERIA), -1)
    points, weights = np.array([*LABELS.values()]), np.array([weight for _, weight in CRITERIA.values()])
    values = (chosen / chosen.sum(-1, keepdims=True)) @ points
    likeliest = points[chosen.argmax(-1)]
    return {
        "rewards": values @ weights,
        "values": values,
        "likeliest": likeliest,
        "likeliest_rewards": likeliest @ weights,
        "other": 1 - chosen.sum(-1),
        "entropy": entropy(chosen),
    }


def entropy(chosen: np.ndarray) -> np.ndarray:
    """The entropy over the labels alone, in nats."""
    shares = chosen / chosen.sum(-1, keepdims=True)
    return -(shares * np.log(shares)).sum(-1)


def probabilities(folder: Path, questions: list[str], values: dict[str, float]) -> np.ndarray:
    """The labels' probabilities behind each question, of all tokens', `[Q,L]`."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = []
    for question in questions:
        if tokenizer.chat_template:
            messages = [{"role": "user", "content": question}]
            question = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        ids = tokenizer(question, add_special_tokens=not tokenizer.chat_template).input_ids
        rows.append(np.array(ids, np.int64))
    labels = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in values]
    last = torch.stack([logits[-1] for logits in plain(folder, rows)]).double()
    return torch.softmax(last, -1)[:, labels].numpy()


def wanted_verdict(
    folder: Path, prompt: str, first: str, second: str, labels: dict[str, float] = COMPARED_LABELS
) -> tuple[np.ndarray, ...]:
    """For each criterion the first response's verdict, whether the orders disagree, and the most other mass and
    entropy."""
    questions = [
        f"Q: {prompt}\nA: {a}\nB: {b}\n{text}"
        for a, b in ((first, second), (second, first))
        for text in COMPARED.values()
    ]
    chosen = probabilities(folder, questions, labels).reshape(2, len(COMPARED), -1)
    values = np.array([*labels.values()])
    expected = (chosen / chosen.sum(-1, keepdims=True)) @ values
    best = values[chosen.argmax(-1)]
    agrees = best[0] == 1 - best[1]
    verdict = np.where(agrees, (expected[0] + 1 - expected[1]) / 2, 0.5)
    return verdict, ~agrees, (1 - chosen.sum(-1)).max(0), entropy(chosen).max(0)
