"""guerdon's commands as processes, as a user would type them; each is printed before it runs."""

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def guerdon(*arguments: object) -> None:
    """Runs `guerdon ARGUMENTS` to its end, and ends with its status where it failed or was stopped."""
    if status := subprocess.run(_command(arguments), check=False).returncode:
        sys.exit(status)


@contextmanager
def serving(*arguments: object, log: Path) -> Iterator[str]:
    """The URL of `guerdon ARGUMENTS` on a free port, once it is ready; it is stopped at the end of the block."""
    with log.open("w", encoding="utf-8") as stderr:
        command = _command([*arguments, "--port", 0, "--no-grpc"])
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        for line in process.stdout:
            if ready := re.search(r"ready at (http://\S+)", line):
                print(f"  it is ready at {ready[1]}", flush=True)
                yield ready[1]
                return
        sys.exit(f"the server ended with status {process.wait()}: see {log}")
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait()
        process.stdout.close()


def _command(arguments: list[object] | tuple[object, ...]) -> list[str]:
    print("  $ guerdon", *arguments, flush=True)
    return [sys.executable, "-m", "guerdon", *map(str, arguments)]
