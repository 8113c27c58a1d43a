"""A rubric and what transformers makes of it: one question at a time, in float32."""

from __future__ import annotations

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
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    rows = []
    for prompt, response in zip(prompts, responses, strict=True):
        for text, _ in CRITERIA.values():
            question = TEMPLATE.replace("{prompt}", prompt).replace("{response}", response).replace("{criterion}", text)
            if tokenizer.chat_template:
                messages = [{"role": "user", "content": question}]
                question = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
            ids = tokenizer(question, add_special_tokens=not tokenizer.chat_template).input_ids
            rows.append(np.array(ids, np.int64))
    labels = [tokenizer(label, add_special_tokens=False).input_ids[0] for label in LABELS]
    last = torch.stack([logits[-1] for logits in plain(folder, rows)]).double()
    chosen = torch.softmax(last, -1)[:, labels].numpy().reshape(len(prompts), len(CRITERIA), -1)
    points, weights = np.array([*LABELS.values()]), np.array([weight for _, weight in CRITERIA.values()])
    values = (chosen / chosen.sum(-1, keepdims=True)) @ points
    likeliest = points[chosen.argmax(-1)]
    return {
        "rewards": values @ weights,
        "values": values,
        "likeliest": likeliest,
        "likeliest_rewards": likeliest @ weights,
        "other": 1 - chosen.sum(-1),
    }
