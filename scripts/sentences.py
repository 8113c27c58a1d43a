"""Prints sentences drawn at random from the package and the docs, for a reader who judges how guerdon speaks.

They come from docstrings, comments, messages and help texts of src/guerdon and the prose of docs/*.md. The same seed
draws the same sentences as long as the texts stay.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from generated import ROOT

_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z`\"'(])")


def in_python(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every docstring, comment and text of several words."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) > 4:
            yield node.lineno, node.value
        elif isinstance(node, ast.JoinedStr):
            text = "".join(p.value if isinstance(p, ast.Constant) else "{}" for p in node.values)
            if len(text.split()) > 4:
                yield node.lineno, text
    with path.open("rb") as file:
        block: list[str] = []
        begins = ends = 0
        for token in tokenize.tokenize(file.readline):
            if token.type != tokenize.COMMENT or token.string.startswith(("# type:", "# noqa", "# nosec")):
                continue
            if token.start[0] != ends + 1 and block:
                yield begins, " ".join(block)
                block = []
            begins = begins if block else token.start[0]
            ends = token.start[0]
            block.append(token.string.lstrip("# "))
        if block:
            yield begins, " ".join(block)


def in_markdown(path: Path) -> Iterator[tuple[int, str]]:
    """Line and text of every paragraph, heading, item and cell."""
    is_code, block, begins = False, [], 0
    for number, line in enumerate([*path.read_text(encoding="utf-8").splitlines(), ""], 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        starts_anew = is_code or not line.strip() or line.lstrip().startswith(("#", "-", "|", "```", "<", "!"))
        if starts_anew and block:
            yield begins, " ".join(block)
            block = []
        if not is_code and line.strip() and not line.lstrip().startswith(("```", "<", "|--", "| --", "!")):
            begins = begins if block else number
            block.append(line.strip().lstrip("#- "))


def sentences() -> list[str]:
    """Every sentence of at least four words, behind the file and line where its text begins."""
    found = []
    for path in sorted([*(ROOT / "src").rglob("*.py"), *(ROOT / "docs").rglob("*.md")]):
        read = in_python if path.suffix == ".py" else in_markdown
        for line, text in read(path):
            whole = _END.split(" ".join(text.split()))
            found += [f"{path.relative_to(ROOT)}:{line}: {part}" for part in whole if len(part.split()) >= 4]
    return list(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100, help="how many sentences (default: 100)")
    parser.add_argument("--seed", type=int, default=21, help="of the random draw (default: 21)")
    options = parser.parse_args()
    for i, sentence in enumerate(random.Random(options.seed).sample(sentences(), options.count), 1):
        sys.stdout.write(f"{i:3} {sentence}\n")


if __name__ == "__main__":
    main()
