"""The `guerdon` command."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from guerdon.cli import console
from guerdon.cli.subcommands import make_parser
from guerdon.engine.host import limit_spinning
from guerdon.errors import Exit

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, one of `Exit`."""
    return console.exit_status(lambda: _main(sys.argv[1:] if argv is None else argv))


def _main(argv: Sequence[str]) -> int | None:
    parser = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        sys.stderr.write("\n")
        return console.fail(
            "no command is given", "name one of the commands above: guerdon COMMAND --help", Exit.CANNOT_START
        )
    args = parser.parse_args(argv)
    console.set_format(getattr(args, "log_format", "text"))
    limit_spinning()
    status: int | None = args.run(args)
    return status
