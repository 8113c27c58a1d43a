"""What the tests with SmolLM2-135M-Instruct share: where it is, and conversations that end at many lengths."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SMOLLM2 = ROOT / "out/real/smollm2"
MARKS = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not SMOLLM2.exists(), reason="make real gets SmolLM2-135M-Instruct"),
]
QUESTIONS = ["What does a reward model do?", "How do I bake bread at home?", "Say hello in three languages, please."]
WORDS = 3 * (ROOT / "docs/engine.md").read_text(encoding="utf-8").split()


def chats(lengths: tuple[int, ...]) -> list[list[dict[str, str]]]:
    """Answers of so many words to each question; each begins elsewhere in a page of real text."""
    return [
        [
            {"role": "user", "content": question},
            {"role": "assistant", "content": " ".join(WORDS[50 * (len(lengths) * i + j) :][:length])},
        ]
        for i, question in enumerate(QUESTIONS)
        for j, length in enumerate(lengths)
    ]
