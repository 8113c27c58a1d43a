"""Runs guerdon with the real trainers whose environments are there, and writes what ran into docs/compatibility.md.

python scripts/compatibility.py              all of tests/trainers, the adapters, and the oldest transformers
python scripts/compatibility.py -k slime     the part of tests/trainers that pytest's -k names
python scripts/compatibility.py --merge A B  runs nothing: takes the newer rows of other copies of the page

A row stays as it is, with its date, until that version of the trainer runs again. Exits with 1 if a test failed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/compatibility.md"
HEAD = "| what | version | passed | what ran | date |\n| --- | --- | --- | --- | --- |\n"

sys.path.insert(0, str(ROOT / "tests"))
from trainers import environments  # noqa: E402

EXACT = [
    *(f"tests/engine/test_{part}.py" for part in ("engine", "forest", "logprobs")),
    "tests/engine/checkpoint/test_reward_models.py",
    "tests/training/test_exact.py",
    "tests/test_exact_over_http.py",
]
"""The tests that compare scores, values, log-probs and gradients with plain transformers."""

TRL = [f"tests/adapters/test_trl_{part}.py" for part in ("adapter", "critic", "distillation", "models")]

Rows = dict[tuple[str, str], str]


def rows_of(page: str) -> Rows:
    """Returns the table's lines by their first two cells."""
    lines = [line for line in page.splitlines() if re.match(r"\| [^|]+ \| [^|]+ \| \d", line)]
    return {(cells[1].strip(), cells[2].strip()): line for line in lines if (cells := line.split("|"))}


def date(line: str) -> str:
    """Returns the date at the end of a table's line; an empty text has none."""
    return line[-12:-2]


def row(name: str, release: str, outcomes: list[tuple[str, bool]]) -> Rows:
    """Returns a trainer's line of today, from its tests' names and whether each passed."""
    passed = sum(is_passed for _, is_passed in outcomes)
    words = dict.fromkeys(re.sub(r"^test_|\[.*", "", test).replace("_", " ") for test, _ in outcomes)
    cells = [name, release, f"{passed} of {len(outcomes)}", "; ".join(words), str(datetime.date.today())]
    return {(name, release): "| " + " | ".join(cells) + " |"}


def ran_with_trainers(keyword: str | None) -> Rows:
    """Runs tests/trainers and returns the lines of the trainers that ran."""
    found: dict[str, list[tuple[str, bool]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "ran.jsonl"
        more = ["-k", keyword] if keyword else []
        pytest("tests/trainers", "--ran", str(report), *more)
        for line in map(json.loads, report.read_text().splitlines() if report.exists() else []):
            for trainer in line["trainers"]:
                found[trainer].append((line["test"], line["passed"]))
    rows: Rows = {}
    for trainer, outcomes in found.items():
        rows |= row(trainer, environments.version_of(trainer), outcomes)
    return rows


def ran_suite(name: str, release: str, tests: list[str], python: str = sys.executable) -> Rows:
    """Runs tests by an interpreter and returns their line, which counts them by file."""
    summary = pytest(*tests, "-m", "not slow", python=python).splitlines()[-1]
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|error)", summary)}
    passed, total = counts.get("passed", 0), sum(counts.values())
    cells = [name, release, f"{passed} of {total}", ", ".join(f"`{test}`" for test in tests)]
    return {(name, release): "| " + " | ".join([*cells, str(datetime.date.today())]) + " |"}


def pytest(*arguments: str, python: str = sys.executable) -> str:
    """Runs pytest with its output's end on the screen too, and returns the output."""
    command, paths = [python, "-m", "pytest", "-q", *arguments], {"PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(command, cwd=ROOT, env=os.environ | paths, stdout=subprocess.PIPE, text=True)
    sys.stdout.write(done.stdout[-3000:])
    sys.stdout.flush()
    return done.stdout.strip()


def main() -> int:
    """Runs what is there and writes the page; returns 1 if a test of today's failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-k", metavar="KEYWORD", dest="keyword", help="only these tests of tests/trainers")
    parser.add_argument("--merge", metavar="PAGE", nargs="+", type=Path, default=[], help="take rows from these pages")
    args = parser.parse_args()
    rows: Rows = {} if args.merge else ran_with_trainers(args.keyword)
    for page in args.merge:
        rows |= {key: line for key, line in rows_of(page.read_text()).items() if date(line) >= date(rows.get(key, ""))}
    if not args.keyword and not args.merge:
        if environments.stamp_of("trl").exists():
            rows |= ran_suite("trl", version("trl"), TRL)
        if environments.stamp_of("transformers").exists():
            python, oldest = environments.python_of("transformers"), environments.version_of("transformers")
            rows |= ran_suite("transformers", version("transformers"), EXACT)
            rows |= ran_suite("transformers", oldest, EXACT, str(python))
    before, _, _ = PAGE.read_text().partition(HEAD)
    every = rows_of(PAGE.read_text()) | rows
    PAGE.write_text(before + HEAD + "\n".join(every[key] for key in sorted(every)) + "\n")
    counts = [re.findall(r"\| (\d+) of (\d+) \|", line)[0] for line in rows.values()]
    return int(any(passed != total for passed, total in counts))


if __name__ == "__main__":
    sys.exit(main())
