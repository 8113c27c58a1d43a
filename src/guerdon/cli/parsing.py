"""How a command line is read and its help laid out: argparse, with the manners of the house."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

from guerdon.cli import console
from guerdon.errors import Exit
from guerdon.settings.fields import nearest

_BOOLEANS = ("true", "false")
_MOST_COLUMNS = 100
"""Of a help text: longer lines are hard to read, however wide the terminal is."""


class HelpFormatter(argparse.HelpFormatter):
    """Help in at most 100 columns, where descriptions keep their indented lines, such as commands and YAML."""

    def __init__(self, prog: str, **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS) - 2
        super().__init__(prog, max_help_position=28, width=width, **options)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        text, room = super()._format_action_invocation(action), self._width - self._current_indent
        lines = [""]
        for part in re.findall(r"[^,]*,?", text):
            if lines[-1] and len(lines[-1] + part) > room:
                lines.append(" " * self._current_indent * 2)
                part = part.lstrip()
            lines[-1] += part
        return "\n".join(lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        blocks = textwrap.dedent(text).strip().split("\n\n")
        return "\n\n".join(
            textwrap.indent(block, indent)
            if any(line.startswith("  ") for line in block.splitlines())
            else textwrap.indent("\n".join(self._split_lines(block, width - len(indent))), indent)
            for block in blocks
        )


class Parser(argparse.ArgumentParser):
    """Takes flags with the underscores that their settings have in YAML, too; its errors say what to do.

    `late`, where given, adds more arguments once they are needed: so a command is quick to start that imports much.
    """

    def __init__(
        self, prog: str, *, late: Callable[[argparse.ArgumentParser], None] | None = None, **options: Any
    ) -> None:
        super().__init__(prog, formatter_class=HelpFormatter, **options)
        self._late = late
        self._near: str | None = None

    def fill(self) -> None:
        """Adds what comes late, once."""
        late, self._late = self._late, None
        if late is not None:
            late(self)

    def format_help(self) -> str:
        """As the base's."""
        self.fill()
        return super().format_help()

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As the base's, but that what is not known is an error here, where its neighbours are."""
        self.fill()
        given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(self._without_booleans(map(_hyphenated, given)), namespace)
        if unknown:
            self._near = nearest(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _without_booleans(self, args: Iterable[str]) -> list[str]:
        """Returns the arguments with `--flag true` and `--flag=false` as `--flag` and `--no-flag`."""
        made: list[str] = []
        is_open = False  # a flag stands last that may have its value behind it
        for arg in args:
            flag, equals, value = arg.partition("=")
            is_flag = isinstance(self._option_string_actions.get(flag), argparse.BooleanOptionalAction)
            if is_open and arg in _BOOLEANS:
                made[-1] = made[-1] if arg == "true" else _negated(made[-1])
            elif is_flag and value in _BOOLEANS:
                made.append(flag if value == "true" else _negated(flag))
            else:
                made.append(arg)
            is_open = is_flag and not equals
        return made

    def error(self, message: str) -> NoReturn:
        """Ends as every start error does: what is wrong, and what to do."""
        meant = f"did you mean {self._near}? " if self._near else ""
        sys.exit(console.fail(message, f"{meant}`{self.prog} --help` lists what can be given", Exit.CANNOT_START))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            self._near = nearest(str(value), map(str, action.choices or ()))
            raise


def _negated(flag: str) -> str:
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag.removeprefix('--')}"


def _hyphenated(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value
