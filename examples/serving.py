"""Runs commands as a user would type them; prints each one before it runs."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from measured import Measured


def guerdon(*arguments: object, num_threads: int | None = None, accepted: tuple[int, ...] = (0,)) -> None:
    """Runs `guerdon ARGUMENTS`; exits with its status if that is not `accepted`."""
    if (status := _start("guerdon", arguments, num_threads).wait()) not in accepted:
        sys.exit(status)


def script(path: Path, *arguments: object) -> None:
    """Runs `python PATH ARGUMENTS`; exits with its status if that is not 0."""
    if status := _start(path, arguments).wait():
        sys.exit(status)


@contextmanager
def serving(*arguments: object, log: Path, num_threads: int | None = None) -> Iterator[str]:
    """Runs `guerdon ARGUMENTS`, a server on a free port; yields its URL when it is ready, and stops it at the end."""
    with log.open("w", encoding="utf-8") as stderr:
        arguments = (*arguments, "--port", 0, "--no-grpc")
        process = _start("guerdon", arguments, num_threads, stdout=subprocess.PIPE, stderr=stderr)
    assert process.stdout is not None
    try:
        for line in process.stdout:
            if ready := re.search(r"ready at (http://\S+)", line):
                print(f"  ready at {ready[1]}", flush=True)
                yield ready[1]
                return
        sys.exit(f"the server ended with status {process.wait()}: see {log}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def _start(program: str | Path, arguments: tuple[object, ...], num_threads: int | None = None, **io: Any) -> Measured:
    is_guerdon = program == "guerdon"
    print(f"  $ {'' if is_guerdon else 'python '}{program}", *arguments, flush=True)
    env = {**os.environ, **({} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)})}
    words = ["-m", "guerdon"] if is_guerdon else [program]
    name = f"guerdon {arguments[0]}" if is_guerdon else Path(program).name
    return Measured(name, [sys.executable, *words, *arguments], env=env, **io)
