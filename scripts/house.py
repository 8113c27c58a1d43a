"""Counts what the sources hold, beside bounds: lines, files, importers, helpers, homes of names; prints a table.

python scripts/house.py           prints the table
python scripts/house.py --check   fails if a count exceeds its bound, or if docs/house.md has other bounds
python scripts/house.py --list    prints what was counted, too
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src/guerdon"

MOST = {
    "lines of src": 63_604,
    "files of src": 317,
    "lines of tests": 84_363,
    "modules with one importer": 69,
    "private functions that one place calls": 562,
    "imports, % of the lines": 6.7,
    "public classes with two homes": 0,
    "places outside of kinds/ that ask for the kind": 10,
}
"""Bounds that only fall: whoever lowers a count lowers its bound."""

KIND = re.compile(
    r"\bkind[\"']?\]?\s*(?:==|!=|in\b|not in\b)\s*[(\[{]?[\"']"
    r"(?:reward_model|process-reward|critic|teacher|judge|compare|chat_judge|function|sum)\b"
    r"|isinstance\([^)]*\b(?:(?:Teacher|Judge|ChatJudge|Critic|Model)Config|Operation(?:Info)?|\w*(?:Teacher|Judge|Critic)"
    r"|(?:NextToken|Group|Train|Control)Request|JudgedReply|TrainReport|CriticState|LogprobQuery|TokenLogprobs|Sum)\b"
)
"""Finds comparisons with a kind's name, and `isinstance` of classes that belong to one kind."""


@dataclass
class Counted:
    """What was counted of one kind, and how much of it."""

    number: float
    what: list[str] = field(default_factory=list)


def sources(folder: Path) -> dict[str, str]:
    """Returns the text of each Python and C++ file, by its path inside the folder."""
    paths = [p for ending in ("py", "cpp", "h") for p in folder.rglob(f"*.{ending}")]
    return {str(p.relative_to(folder)): p.read_text() for p in sorted(paths)}


def counted() -> dict[str, Counted]:
    """Counts all that has a bound."""
    texts = sources(SRC)
    trees = {path: ast.parse(text) for path, text in texts.items() if path.endswith(".py")}
    num_lines = sum(len(text.splitlines()) for text in texts.values())
    num_imports = sum(_lines(node) for tree in trees.values() for node in ast.walk(tree) if _is_import(node))
    once = _called_once(texts, trees)
    single = _with_one_importer(trees)
    homes = _with_two_homes(trees)
    asks = [f"{path}:{n}" for path, text in texts.items() if not path.startswith("kinds/") for n in _asks_kind(text)]
    return {
        "lines of src": Counted(num_lines),
        "files of src": Counted(len(texts)),
        "lines of tests": Counted(sum(len(text.splitlines()) for text in sources(ROOT / "tests").values())),
        "modules with one importer": Counted(len(single), single),
        "private functions that one place calls": Counted(len(once), once),
        "imports, % of the lines": Counted(round(100 * num_imports / num_lines, 1)),
        "public classes with two homes": Counted(len(homes), homes),
        "places outside of kinds/ that ask for the kind": Counted(len(asks), asks),
    }


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _lines(node: ast.AST) -> int:
    assert isinstance(node, ast.stmt) and node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def _called_once(texts: dict[str, str], trees: dict[str, ast.Module]) -> list[str]:
    """Returns the private functions and methods whose name stands just twice in their file."""
    found = []
    for path, tree in trees.items():
        words = Counter(re.findall(r"\w+", texts[path]))
        functions = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef))
        names = {f.name: f.lineno for f in functions if f.name.startswith("_") and not f.name.startswith("__")}
        found += [f"{path}:{line} {name}" for name, line in names.items() if words[name] == 2]
    return found


def _with_one_importer(trees: dict[str, ast.Module]) -> list[str]:
    """Returns the modules, `__init__` and commands aside, that just one other module imports."""
    modules = {path.removesuffix(".py").replace("/", "."): path for path in trees if not path.endswith("__init__.py")}
    importers: dict[str, set[str]] = defaultdict(set)
    for path, tree in trees.items():
        for node in ast.walk(tree):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for name in names:
                if (inside := name.removeprefix("guerdon.")) in modules and modules[inside] != path:
                    importers[inside].add(path)
    return [f"{modules[name]} by {next(iter(by))}" for name, by in sorted(importers.items()) if len(by) == 1]


def _with_two_homes(trees: dict[str, ast.Module]) -> list[str]:
    """Returns the public classes whose name is defined in two modules or more."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(path)
    return [f"{name}: {', '.join(paths)}" for name, paths in sorted(homes.items()) if len(paths) > 1]


def _asks_kind(text: str) -> list[int]:
    return [n for n, line in enumerate(text.splitlines(), 1) if KIND.search(line)]


def main() -> int:
    """Prints the table; returns 1 if it is to be checked and a count exceeds its bound."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a count exceeds its bound")
    parser.add_argument("--list", action="store_true", help="print what was counted, too")
    args = parser.parse_args()
    every = counted()
    lines = ["| counted | now | at most |", "| --- | --- | --- |"]
    lines += [f"| {name} | {one.number:,} | {MOST[name]:,} |" for name, one in every.items()]
    if args.list:
        for name, one in every.items():
            lines += [f"\n{name}:", *(f"  {what}" for what in one.what)]
    sys.stdout.write("\n".join(lines) + "\n")
    page = (ROOT / "docs/house.md").read_text()
    if args.check and (missing := [row for name in every if (row := f"| {name} | {MOST[name]:,} |") not in page]):
        sys.stderr.write("docs/house.md lacks the rows\n" + "\n".join(missing) + "\n")
        return 1
    above = [name for name, one in every.items() if one.number > MOST[name]]
    if args.check and above:
        sys.stderr.write(f"above the bound in scripts/house.py: {', '.join(above)}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
