"""An independent judge of two answers: logistic regression over words and pairs of words, on pairs of its own."""

import re
from collections import Counter
from itertools import pairwise

import numpy as np
from cutting import first_words

FEWEST_USES = 3
STEPS, RATE, DECAY = 300, 0.3, 0.03


class Judge:
    """Shares no pair, no prompt and no weights with the reward model; a model of another kind."""

    def __init__(self, pairs: list[dict]) -> None:
        answers = [features(pair[key]) for pair in pairs for key in ("chosen", "rejected")]
        uses = Counter(feature for answer in answers for feature in answer)
        self.columns = {f: i for i, f in enumerate(f for f, count in uses.items() if count >= FEWEST_USES)}
        rows = np.stack([self._row(pair["chosen"]) - self._row(pair["rejected"]) for pair in pairs])
        self.weights = np.zeros(len(self.columns), np.float32)
        for _ in range(STEPS):
            wrong = 1 / (1 + np.exp(rows @ self.weights))
            self.weights += RATE * (wrong @ rows / len(rows) - DECAY * self.weights)

    def prefers(self, answer: str, other: str) -> float:
        """Returns 1 if the answer is the better one, 0 if the other is, 0.5 for a tie; cuts both to one length."""
        count = min(len(answer.split()), len(other.split()))
        margin = (self._row(first_words(answer, count)) - self._row(first_words(other, count))) @ self.weights
        return float(np.sign(margin) + 1) / 2

    def _row(self, text: str) -> np.ndarray:
        row = np.zeros(len(self.columns), np.float32)
        row[[self.columns[f] for f in features(text) if f in self.columns]] = 1
        return row


def features(text: str) -> list[str]:
    """Returns the text's different words and signs, pairs of neighbours, and how it begins, in a fixed order."""
    words = re.findall(r"[a-z']+|[^\sa-z]", text.lower())
    return list(dict.fromkeys([*words, *map(" ".join, pairwise(words)), f"^{' '.join(words[:1])}"]))
