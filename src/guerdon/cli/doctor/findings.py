"""What an examination finds, and how it is told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TextIO

from guerdon.cli.colours import Style, coloured

Level = Literal["ok", "note", "problem"]

_STYLES: dict[Level, Style] = {"ok": "green", "note": "yellow", "problem": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at: `subject`, what it is (`text`), and unless that is ok, what to do (`help`)."""

    level: Level
    subject: str
    text: str
    help: str = ""


def ok(subject: str, text: str) -> Finding:
    """As it should be."""
    return Finding("ok", subject, text)


def note(subject: str, text: str, help: str) -> Finding:  # noqa: A002 - the word that errors use
    """To be known: it may be meant so."""
    return Finding("note", subject, text, help)


def problem(subject: str, text: str, help: str) -> Finding:  # noqa: A002
    """Something does not work."""
    return Finding("problem", subject, text, help)


def line(finding: Finding, stream: TextIO) -> str:
    """The finding as it is to be written to the stream, with what to do on a line of its own."""
    level = coloured(f"{finding.level:<7}", _STYLES[finding.level], stream)
    text = f"{level}  {finding.subject}: {finding.text}\n"
    if finding.help:
        text += f"         {coloured('help:', 'cyan', stream)} {finding.help}\n"
    return text
