"""Reads preferences, cuts both answers of a pair to the same number of words, and splits the pairs by prompt.

Longer answers usually win. Cut to the shorter one's length, only the longer one would stop in the middle of
a sentence, which tells as much. So both lose their ends, and are then about as short as the policy's answers.
"""

import gzip
import json
import random
from itertools import accumulate
from pathlib import Path

WORDS = 48
"""Longest answer, in words: about 64 tokens. The policy writes 48."""
FEWEST_WORDS = 8
PROMPT_WORDS = 60
PARTS = {"reward_model": 0.6, "judge": 0.2, "held_out": 0.2}
"""Shares of the prompts. The policy learns on the reward model's prompts."""


def read_parts(path: Path, seed: int) -> dict[str, list[dict]]:
    """Reads rows {"prompt", "chosen", "rejected"} from JSONL, plain or .gz; returns the pairs of each part."""
    pairs = [pair for pair in map(cut, read_rows(path)) if is_useful(pair)]
    prompts = sorted({pair["prompt"] for pair in pairs})
    random.Random(seed).shuffle(prompts)
    ends = [round(share * len(prompts)) for share in accumulate(PARTS.values(), initial=0.0)]
    part_of = {p: name for name, a, b in zip(PARTS, ends, ends[1:], strict=False) for p in prompts[a:b]}
    return {name: [pair for pair in pairs if part_of[pair["prompt"]] == name] for name in PARTS}


def cut(row: dict) -> dict:
    """Returns the pair with equally many words in both answers, and with the answers' own numbers of words."""
    lengths = {key: len(row[key].split()) for key in ("chosen", "rejected")}
    count = min(WORDS, *(length - 1 for length in lengths.values()))
    answers = {key: first_words(row[key], count) for key in lengths}
    return {"prompt": row["prompt"], **answers, "count": count, "longer_wins": lengths["chosen"] > lengths["rejected"]}


def first_words(text: str, count: int) -> str:
    """Returns the text up to the end of a word, with its blanks and line breaks."""
    end = 0
    for word in text.split()[:count]:
        end = text.index(word, end) + len(word)
    return text[:end]


def is_useful(pair: dict) -> bool:
    """Returns whether a cut pair has short, different answers to a short prompt."""
    is_short = len(pair["prompt"].split()) <= PROMPT_WORDS
    return is_short and pair["count"] >= FEWEST_WORDS and pair["chosen"] != pair["rejected"]


def read_rows(path: Path) -> list[dict]:
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.strip()]


def write_rows(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
