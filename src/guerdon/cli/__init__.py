"""The `guerdon` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from guerdon.cli import console
from guerdon.cli.subcommands import make_parser
from guerdon.engine.host import limit_spinning
from guerdon.errors import Exit, GuerdonError, StartError

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, one of `Exit`."""
    try:
        status = _main(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # as with `| head`; Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE_CLOSED


def _main(argv: Sequence[str]) -> int:
    parser = make_parser()
    if not argv:
        parser.print_help(sys.stderr)
        sys.stderr.write("\n")
        return console.fail("no command is given", "name one of those above: guerdon COMMAND --help", Exit.CANNOT_START)
    if argv[0] == "demo":  # a command up to 0.2
        return console.fail("the demo is not installed", "run `make demo` in a clone of guerdon", Exit.CANNOT_START)
    args = parser.parse_args(argv)
    console.set_format(getattr(args, "log_format", "text"))
    limit_spinning()
    try:
        return int(args.run(args) or Exit.DONE)
    except StartError as e:
        return console.fail(e, e.help, Exit.CANNOT_START)
    except GuerdonError as e:
        return console.fail(e, console.advise(e), Exit.FAILED)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
