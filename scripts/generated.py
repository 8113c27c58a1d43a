"""Writes a file that is generated from the code, or checks that it is up to date."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(about: str | None, file: Path, text: Callable[[], str]) -> None:
    """Runs the command of a script that generates one file; `--check` exits with 1 if the file is out of date."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--check", action="store_true", help="Write nothing; exit with 1 if the file is out of date.")
    parser.add_argument(
        "--out", type=Path, default=file, metavar="FILE", help=f"The file to write. (default: {file.relative_to(ROOT)})"
    )
    args = parser.parse_args()
    if not args.check:
        args.out.write_text(text(), encoding="utf-8")
    elif not args.out.exists() or args.out.read_text(encoding="utf-8") != text():
        help_text = f"run `make pages`, or `python scripts/{Path(sys.argv[0]).name}`, and commit what it writes"
        sys.exit(f"{args.out} is out of date\nhelp: {help_text}")
