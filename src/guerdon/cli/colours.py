"""Colours for a terminal that shows them, and for nothing else."""

from __future__ import annotations

import os
from typing import Literal, TextIO

Style = Literal["bold", "faint", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "faint": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}


def coloured(text: str, style: Style, stream: TextIO) -> str:
    """The text as it is to be written to the stream: in the style, or bare where the stream shows none."""
    return f"\033[{_CODES[style]}m{text}\033[0m" if shows_colours(stream) else text


def shows_colours(stream: TextIO) -> bool:
    """Whether the stream is a terminal that shows colours.

    NO_COLOR forbids them and FORCE_COLOR asks for them, whatever the stream is; each counts where it is not empty, and
    NO_COLOR goes first. A terminal that calls itself dumb shows none.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()
