"""Findings of `guerdon doctor`: each check's result and remedy, as text or JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Literal

import orjson

from guerdon.cli.console import Style, coloured

Level = Literal["ok", "note", "problem"]

_STYLES: dict[Level, Style] = {"ok": "green", "note": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check: a note may be intended, a problem has to be solved; `help` is advice for both."""

    level: Level
    subject: str
    text: str
    help: str = ""

    def __str__(self) -> str:
        level = coloured(f"{self.level:<7}", _STYLES[self.level], sys.stdout)
        advice = f"         {coloured('help:', 'cyan', sys.stdout)} {self.help}\n" if self.help else ""
        return f"{level}  {self.subject}: {self.text}\n{advice}"


ok, note, problem = partial(Finding, "ok"), partial(Finding, "note"), partial(Finding, "problem")


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints every finding as it comes, and their numbers; returns the number of problems."""
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            print(finding, end="", flush=True)
    problems, notes = (sum(finding.level == level for finding in found) for level in ("problem", "note"))
    if as_json:
        results = {"problems": problems, "findings": [asdict(finding) for finding in found]}
        sys.stdout.write(orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
        return problems
    count = {0: "no problem", 1: "1 problem"}.get(problems, f"{problems} problems")
    print(f"\n{count}, {notes} {'note' if notes == 1 else 'notes'}")
    return problems
