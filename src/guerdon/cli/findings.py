"""What `guerdon doctor` finds: the result of each check, with what to do, as text or as JSON."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, TextIO

import orjson

from guerdon.cli.console import Style, coloured

Level = Literal["ok", "note", "problem"]

_STYLES: dict[Level, Style] = {"ok": "green", "note": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check; `help` says what to do unless it is ok."""

    level: Level
    subject: str
    text: str
    help: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding("ok", subject, text)


def note(subject: str, text: str, help: str) -> Finding:  # noqa: A002 - the word that errors use
    """Something that may be intended."""
    return Finding("note", subject, text, help)


def problem(subject: str, text: str, help: str) -> Finding:  # noqa: A002
    """Something does not work."""
    return Finding("problem", subject, text, help)


def format_finding(finding: Finding, stream: TextIO) -> str:
    """Formats the finding for the stream."""
    level = coloured(f"{finding.level:<7}", _STYLES[finding.level], stream)
    text = f"{level}  {finding.subject}: {finding.text}\n"
    if finding.help:
        text += f"         {coloured('help:', 'cyan', stream)} {finding.help}\n"
    return text


def report(findings: Iterable[Finding], *, as_json: bool) -> int:
    """Prints every finding as it comes, and their numbers; returns the number of problems."""
    found = []
    for finding in findings:
        found.append(finding)
        if not as_json:
            sys.stdout.write(format_finding(finding, sys.stdout))
            sys.stdout.flush()
    problems = sum(finding.level == "problem" for finding in found)
    if as_json:
        results = {"problems": problems, "findings": [asdict(finding) for finding in found]}
        sys.stdout.write(orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE).decode())
        return problems
    count = {0: "no problem", 1: "1 problem"}.get(problems, f"{problems} problems")
    notes = sum(finding.level == "note" for finding in found)
    sys.stdout.write(f"\n{count}, {notes} {'note' if notes == 1 else 'notes'}\n")
    return problems
