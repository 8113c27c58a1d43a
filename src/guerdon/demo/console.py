"""What the demo prints: headings, text in columns, colours where a terminal shows them."""

from __future__ import annotations

import sys
import textwrap

from guerdon.cli import colours

GREEN: colours.Style = "green"
RED: colours.Style = "red"
GREY: colours.Style = "faint"


def heading(text: str) -> None:
    """A part of the demo begins."""
    print(f"\n{bold(text)}", flush=True)


def bold(text: str) -> str:
    """Bold, where it is shown."""
    return coloured("bold", text)


def coloured(style: colours.Style, text: str) -> str:
    """Coloured where stdout shows colours."""
    return colours.coloured(text, style, sys.stdout)


def wrapped(text: str, width: int, most: int = 3) -> list[str]:
    """At most `most` lines of the text; one at least, which says so where there is nothing in it."""
    return textwrap.wrap(" ".join(text.split()) or "(nothing)", width, max_lines=most, placeholder=" ...")


def shortened(text: str, width: int = 110) -> str:
    """The text in one line."""
    return textwrap.shorten(text, width, placeholder=" ...")


def files(named: list[tuple[object, str]]) -> None:
    """Lists files and what is in them."""
    width = max(len(str(path)) for path, _ in named)
    for path, what in named:
        print(f"  {bold(str(path))}{' ' * (width - len(str(path)))}  {what}")
