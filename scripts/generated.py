"""A file that is made from the code: written anew, or held against what it would be."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(about: str | None, file: Path, text: Callable[[], str]) -> None:
    """The command of a script that makes one file; with `--check` it ends with 1 where the file is out of date."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="write nothing; status 1 where the file is out of date")
    parser.add_argument(
        "--out", type=Path, default=file, metavar="FILE", help=f"the file (default: {file.relative_to(ROOT)})"
    )
    args = parser.parse_args()
    if not args.check:
        args.out.write_text(text(), encoding="utf-8")
    elif not args.out.exists() or args.out.read_text(encoding="utf-8") != text():
        help_text = f"run `make pages`, or `python scripts/{Path(sys.argv[0]).name}`, and commit what it writes"
        sys.exit(f"{args.out} is out of date\nhelp: {help_text}")
