"""Splits the reviews into disjoint parts; trains the judge, naive Bayes over words, on its own part."""

import gzip
import json
import math
import random
import re
from collections import Counter
from itertools import pairwise
from pathlib import Path

PARTS = {"language_model": 0.5, "reward_model": 0.25, "judge": 0.2, "prompts": 0.03, "held_out": 0.02}
PROMPT_WORDS = 4


def read_parts(path: Path, seed: int) -> dict[str, list[dict]]:
    """Reads rows {"text", "label"} from a JSONL file, plain or .gz, shuffles them, and splits them into PARTS."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines if line.strip()]
    random.Random(seed).shuffle(rows)
    parts, first = {}, 0
    for name, share in PARTS.items():
        last = first + round(share * len(rows))
        parts[name], first = rows[first:last], last
    return parts


def write_prompts(rows: list[dict], path: Path) -> list[str]:
    """Writes the first words of each review as prompts for `guerdon reinforce`; returns them."""
    prompts = [" ".join(row["text"].split()[:PROMPT_WORDS]) for row in rows]
    path.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in prompts), encoding="utf-8")
    return prompts


class Judge:
    """Naive Bayes over words and pairs of words; shares no review with the models."""

    def __init__(self, rows: list[dict]) -> None:
        self.counts = [Counter(), Counter()]
        for row in rows:
            self.counts[row["label"]].update(self._features(row["text"]))
        self.totals = [counts.total() + len(self.counts[0] | self.counts[1]) for counts in self.counts]

    def positive(self, text: str) -> float:
        """Returns the probability that the text is positive, with equal priors."""
        log_odds = 0.0
        for feature in self._features(text):
            negative, positive = ((self.counts[label][feature] + 1) / self.totals[label] for label in (0, 1))
            log_odds += math.log(positive / negative)
        return (1 + math.tanh(log_odds / 2)) / 2

    def accuracy(self, rows: list[dict]) -> float:
        """Returns the share of rows judged as labelled."""
        return sum((self.positive(row["text"]) > 0.5) == row["label"] for row in rows) / len(rows)

    @staticmethod
    def _features(text: str) -> set[str]:
        words = re.findall(r"[a-z']+", text.lower())
        return {*words, *map(" ".join, pairwise(words))}
