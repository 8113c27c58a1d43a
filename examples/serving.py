"""Runs guerdon's commands as a user would type them; prints each one before it runs."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def guerdon(*arguments: object, num_threads: int | None = None, accepted: tuple[int, ...] = (0,)) -> None:
    """Runs `guerdon ARGUMENTS`; exits with its status if that is not `accepted`."""
    command, env = _prepare(arguments, num_threads)
    if (status := subprocess.run(command, check=False, env=env).returncode) not in accepted:
        sys.exit(status)


@contextmanager
def serving(*arguments: object, log: Path, num_threads: int | None = None) -> Iterator[str]:
    """Runs `guerdon ARGUMENTS`, a server on a free port; yields its URL when it is ready, and stops it at the end."""
    command, env = _prepare([*arguments, "--port", 0, "--no-grpc"], num_threads)
    with log.open("w", encoding="utf-8") as stderr:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
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


def _prepare(arguments: tuple[object, ...] | list[object], num_threads: int | None) -> tuple[list[str], dict[str, str]]:
    print("  $ guerdon", *arguments, flush=True)
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    return [sys.executable, "-m", "guerdon", *map(str, arguments)], {**os.environ, **threads}
