"""The `guerdon` command as one of several ranks, which is killed or stopped at a set phase of what it executes.

Run by torchrun. Where a rank is to die next, a file says that the test writes while all of them run: see `order`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER = "GUERDON_KILLS"
"""The environment variable that names the folder of the orders."""
PHASES = ("forward", "train", "save", "load", "journal", "commit")
"""Amid a command of that kind; or, on rank 0, between the journal and the command, and before a checkpoint's name."""
AT_THE_END = 1_000_000
"""As the number of an event: after the work of the command, before the other ranks are told."""


HANG = 0
"""In place of a signal: its main thread comes to a standstill, and all others go on."""


def order(folder: Path, rank: int, phase: str, how: int, nth: int) -> Path:
    """Has that rank, the next time that it is in that phase, sent itself the signal `how` at the nth event of it.

    Events are what a command gets on by: a layer, a file. 0 is before the first; at the latest it comes when the
    command's work is done. The file goes when it is obeyed, and another named `met` comes.
    """
    path = folder / f"{rank}-{phase}"
    aside = folder / f"aside-{path.name}"
    aside.write_text(f"{int(how)} {nth}")
    return aside.rename(path)


def _obey(phase: str, nth: int) -> None:
    path = Path(os.environ[FOLDER]) / f"{os.environ.get('RANK', '0')}-{phase}"
    try:
        how, wanted = map(int, path.read_text().split())
    except FileNotFoundError:
        return
    if nth < wanted:
        return
    path.unlink()
    (path.parent / f"met-{path.name}").write_text(str(nth))
    if how == HANG:
        time.sleep(3600)
    os.kill(os.getpid(), how)


def _install() -> None:
    from guerdon.core import Signal
    from guerdon.distributed.commands import Worker
    from guerdon.distributed.pulse import Pulse
    from guerdon.server.critic.checkpoint_folder import CheckpointFolder
    from guerdon.server.critic.store import Journal

    phases = {Signal.FORWARD: "forward", Signal.TRAIN: "train", Signal.SAVE: "save", Signal.LOAD: "load"}
    executing = ""
    events = 0

    def happened() -> None:
        nonlocal events
        if executing:
            events += 1
            _obey(executing, events)

    def execute(original: Callable[..., Any], worker: Worker, command: Any) -> Any:
        nonlocal executing, events
        executing, events = phases.get(command.signal, ""), 0
        try:
            if executing:
                _obey(executing, 0)
            result = original(worker, command)
            if executing:
                _obey(executing, AT_THE_END)
            return result
        finally:
            executing = ""

    def tick(original: Callable[..., Any], *args: Any) -> Any:
        happened()
        return original(*args)

    def append(original: Callable[..., Any], *args: Any) -> Any:
        result = original(*args)
        _obey("journal", 0)
        return result

    def commit(original: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        _obey("commit", 0)
        return original(*args, **kw)

    fsync = os.fsync
    os.fsync = lambda fd: (happened(), fsync(fd))[1]  # type: ignore[assignment]
    for owner, name, replacement in (
        (Worker, "execute", execute),
        (Pulse, "tick", tick),
        (Journal, "append", append),
        (CheckpointFolder, "commit", commit),
    ):
        setattr(owner, name, _wrapped(getattr(owner, name), replacement))


def _wrapped(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kw: replacement(original, *args, **kw)


if __name__ == "__main__":
    import torch

    from guerdon.cli import main

    torch.set_num_threads(1)
    _install()
    sys.exit(main())
