"""Reads preferences, and splits them by prompt; says what is wrong with a file, in which line, and what to do."""

import gzip
import json
import random
import sys
import zlib
from itertools import accumulate
from pathlib import Path

from cutting import USEFUL, cut, is_useful

PARTS = {"reward_model": 0.6, "judge": 0.2, "held_out": 0.2}
"""Shares of the prompts. The policy learns on the reward model's prompts."""
FEWEST_PROMPTS = 10
FORM = 'each line must be {"prompt": "...", "chosen": "...", "rejected": "..."}'


def read_parts(path: Path, seed: int) -> dict[str, list[dict]]:
    """Reads JSONL, plain or .gz; returns the pairs of each part; exits if the file has another form or too few."""
    rows = read_pairs(path)
    pairs = [pair for pair in map(cut, rows) if is_useful(pair)]
    prompts = sorted({pair["prompt"] for pair in pairs})
    if len(prompts) < FEWEST_PROMPTS:
        found = f"{path} has {len(rows)} pairs, of which {len(pairs)} are useful, with {len(prompts)} prompts"
        sys.exit(f"error: {found}\nhelp: give {FEWEST_PROMPTS} prompts or more; useful is {USEFUL}")
    random.Random(seed).shuffle(prompts)
    ends = [round(share * len(prompts)) for share in accumulate(PARTS.values(), initial=0.0)]
    part_of = {p: name for name, a, b in zip(PARTS, ends, ends[1:], strict=False) for p in prompts[a:b]}
    return {name: [pair for pair in pairs if part_of[pair["prompt"]] == name] for name in PARTS}


def read_pairs(path: Path) -> list[dict]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            return [parse(line, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()]
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as e:
        sys.exit(f"error: cannot read {path}: {e}\nhelp: check the path; a .gz file must be whole, the text UTF-8")


def parse(line: str, where: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as e:
        sys.exit(f"error: {where}: not valid JSON ({e})\nhelp: {FORM}")
    if not isinstance(row, dict):
        sys.exit(f"error: {where}: not a JSON object\nhelp: {FORM}")
    for key in ("prompt", "chosen", "rejected"):
        if not isinstance(row.get(key), str):
            found = f"is {json.dumps(row[key])[:40]}, not text" if key in row else "is missing"
            sys.exit(f'error: {where}: "{key}" {found}\nhelp: {FORM}')
    return row


def read_rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def write_rows(rows: list[dict], path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
