"""`guerdon serve` as a process of its own, as a user would start it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from guerdon.demo.console import GREY, coloured
from guerdon.errors import StartError


@contextmanager
def served(model: Path, log_path: Path) -> Iterator[str]:
    """Serves the model on a free port; yields the server's URL once it says that it is ready, and stops it after."""
    command = [sys.executable, "-m", "guerdon", "serve", str(model), "--port", "0", "--no-grpc"]
    print("  $ guerdon " + " ".join(command[3:]))
    # A model this small loses more between threads than it gains, and the other cores have work.
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    with open(log_path, "wb") as log:
        process = subprocess.Popen(  # our own command, no shell  # nosec B603
            command, stdout=subprocess.PIPE, stderr=log, text=True, env=env
        )
    assert process.stdout is not None
    try:
        for line in process.stdout:
            print(f"  {coloured(GREY, line.rstrip())}", flush=True)
            ready = re.search(r"ready at (http://\S+)", line)
            if ready:
                break
        else:
            tail = "\n".join(log_path.read_text(encoding="utf-8", errors="replace").splitlines()[-5:])
            raise StartError(f"the server ended with status {process.wait()}:\n{tail}", f"see {log_path}")
        yield ready[1]
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=30)
        print("  the server has stopped")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        process.stdout.close()
