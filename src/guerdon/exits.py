"""How a command ends: every exit status of the house, in one place."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """An exit status; `docs/cli.md` says when a command ends with which."""

    DONE = 0
    """All that was asked is done."""
    FAILED = 1
    """It began, and something of it failed."""
    CANNOT_START = 2
    """The command line, the settings, the installation or the machine do not allow it."""
    RANK_LOST = 70
    """Another of the processes that share the work was lost: EX_SOFTWARE of sysexits.h."""
    TRY_AGAIN = 75
    """It has saved and left as its time was up; the same command goes on: EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ended by Ctrl-C, as a shell tells of SIGINT."""
    PIPE_CLOSED = 141
    """Nobody reads its output any more, as a shell tells of SIGPIPE."""
    TERMINATED = 143
    """Ended by SIGTERM, as a shell tells of it; what trains has saved before."""
