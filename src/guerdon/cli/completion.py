"""`guerdon completion`: a script that completes the command's words in a shell."""

from __future__ import annotations

import argparse
import sys

from guerdon.cli.parsing import Parser

SHELLS = ("bash", "zsh", "fish", "tcsh")

FILES = {
    "MODEL", "IN", "CONFIG", "config", "out", "data", "model", "reward_model", "api_keys_file", "tls_cert", "tls_key",
    "tls_client_ca", "policy.model", "data.prompts", "data.validation", "json", "plot",
}  # fmt: skip
"""Arguments whose value is the path of a file, or of either a file or a folder."""
FOLDERS = {"checkpoint_dir", "model_repository", "run.output_dir"}


def run(args: argparse.Namespace) -> None:
    """Prints the script; `args.parser` is the whole command's."""
    import shtab  # only here: nothing else needs it

    _tell_paths(args.parser, shtab.FILE, shtab.DIRECTORY)
    sys.stdout.write(shtab.complete(args.parser, args.SHELL) + "\n")


def _tell_paths(parser: Parser, file: object, folder: object) -> None:
    """Says of each argument that takes a path that it does, where shtab looks for that."""
    parser.fill()
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _tell_paths(command, file, folder)
        elif action.dest in FILES | FOLDERS and action.nargs != 0 and action.metavar != "NAME":
            action.complete = folder if action.dest in FOLDERS else file  # type: ignore[attr-defined]
