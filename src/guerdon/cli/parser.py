"""Reads command lines, lays out their help, and prints scripts that complete them: argparse with our conventions."""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from guerdon.cli import console
from guerdon.errors import Exit
from guerdon.settings.fields import nearest

SHELLS = ("bash", "zsh", "fish", "tcsh")

FILES = {
    "MODEL", "IN", "CONFIG", "FILE", "config", "out", "model", "reward_model", "api_keys_file", "tls_cert",
    "tls_key", "tls_client_ca", "policy.model", "data.prompts", "data.validation", "plot",
}  # fmt: skip
"""Arguments that take the path of a file, or of a file or folder."""
FOLDERS = {"checkpoint_dir", "model_repository", "run.output_dir", "FOLDER"}

_BOOLEANS = ("true", "false")
_MAX_COLUMNS = 100
"""Width of help texts on wide terminals: longer lines are hard to read."""


class HelpFormatter(argparse.HelpFormatter):
    """Lays out help in at most 100 columns; indented lines, such as commands and YAML, keep their line breaks."""

    shown: frozenset[str] | None = None
    """The names of the flags to show; None shows all of them, with the descriptions of their groups."""

    def __init__(self, prog: str, **options: Any) -> None:
        width = min(shutil.get_terminal_size().columns, _MAX_COLUMNS) - 2
        super().__init__(prog, max_help_position=28, width=width, **options)

    def add_argument(self, action: argparse.Action) -> None:
        """Adds the argument if it is to be shown."""
        if self.shown is None or not action.option_strings or action.dest in self.shown:
            super().add_argument(action)

    def add_text(self, text: str | None) -> None:
        """Adds a text; with `shown`, a group has none, so that empty groups are left out."""
        if self.shown is None or self._current_section is self._root_section:
            super().add_text(text)

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
    """Accepts underscores in flags, values of boolean flags, and no abbreviations; its errors say what to do."""

    _first: frozenset[str] | None = None
    _suggestion: str | None = None

    def __init__(self, prog: str, **options: Any) -> None:
        super().__init__(prog, formatter_class=HelpFormatter, add_help=False, allow_abbrev=False, **options)
        self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def show_first(self, *names: str) -> None:
        """Shows only these flags under `--help`, and adds `--help-all`, which shows all of them."""
        self._first = frozenset((*names, "help", "help_all"))
        self.add_argument("--help-all", action=_ShowAllHelp, nargs=0, help="Show all flags and exit.")

    def format_help(self) -> str:
        """Returns the help with the first flags only, if `show_first` has named some."""
        text = super().format_help()
        if self._first is None:
            return text
        num_flags = sum(bool(action.option_strings) for action in self._actions)
        return f"{text}\n{self.prog} --help-all shows all {num_flags} flags.\n"

    def format_all_help(self) -> str:
        """Returns the help with all flags."""
        first, self._first = self._first, None
        try:
            return super().format_help()
        finally:
            self._first = first

    def _get_formatter(self) -> HelpFormatter:
        formatter = HelpFormatter(self.prog)
        formatter.shown = self._first
        return formatter

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parses the arguments; an unknown one is an error here, because this parser knows similar ones."""
        given = sys.argv[1:] if args is None else args
        parsed, unknown = super().parse_known_args(self._resolve_booleans(map(_hyphenate, given)), namespace)
        if unknown:
            flag = unknown[0].partition("=")[0]
            names = [action.dest for action in self._get_positional_actions()]
            positional = {f"--{name.lower()}": name for name in names}
            self._suggestion = positional.get(flag) or nearest(flag, self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def _resolve_booleans(self, args: Iterable[str]) -> list[str]:
        """Returns the arguments with `--flag true` and `--flag=false` as `--flag` and `--no-flag`."""
        resolved: list[str] = []
        may_have_value = False  # the previous argument is a boolean flag
        for arg in args:
            flag, equals, value = arg.partition("=")
            is_boolean = isinstance(self._option_string_actions.get(flag), argparse.BooleanOptionalAction)
            if may_have_value and arg in _BOOLEANS:
                resolved[-1] = resolved[-1] if arg == "true" else _negate(resolved[-1])
            elif is_boolean and value in _BOOLEANS:
                resolved.append(flag if value == "true" else _negate(flag))
            else:
                resolved.append(arg)
            may_have_value = is_boolean and not equals
        return resolved

    def error(self, message: str) -> NoReturn:
        """Exits like every error at startup, with the error and its remedy."""
        meant = ""
        if self._suggestion:
            is_flag = self._suggestion.startswith("-") or not self._suggestion.isupper()
            meant = f"did you mean {self._suggestion}{'' if is_flag else ', without a flag'}? "
        flag = "--help" if self._first is None else "--help-all"
        sys.exit(console.fail(message, f"{meant}`{self.prog} {flag}` lists all arguments", Exit.CANNOT_START))

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError:
            self._suggestion = nearest(str(value), map(str, action.choices or ()))
            raise


class _ShowAllHelp(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> NoReturn:
        assert isinstance(parser, Parser)
        sys.stdout.write(parser.format_all_help())
        parser.exit()


def _negate(flag: str) -> str:
    return f"--{flag.removeprefix('--no-')}" if flag.startswith("--no-") else f"--no-{flag.removeprefix('--')}"


def _hyphenate(arg: str) -> str:
    if not arg.startswith("--"):
        return arg
    flag, equals, value = arg.partition("=")
    return flag.replace("_", "-") + equals + value


def completion_script(parser: Parser, shell: str) -> str:
    """Returns a script that completes the command's arguments in the shell."""
    import shtab  # only this command needs it

    _mark_paths(parser, shtab.FILE, shtab.DIRECTORY)
    return f"{shtab.complete(parser, shell)}\n"


def _mark_paths(parser: Parser, file: object, folder: object) -> None:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _mark_paths(command, file, folder)
        elif action.dest in FILES | FOLDERS and action.nargs != 0 and action.metavar != "NAME":
            action.complete = folder if action.dest in FOLDERS else file  # type: ignore[attr-defined]
