"""Starts processes, and notes what each one took when it has ended."""

import os
import subprocess
import sys
import time
from typing import Any

took: list[dict[str, Any]] = []
"""Name, seconds, seconds of the processor and peak memory in gigabytes of each ended process, in the order of ends."""

_MAXRSS_UNITS = 1e9 if sys.platform == "darwin" else 1e6


class Measured(subprocess.Popen[str]):
    """A process that is listed in `took` after `wait`."""

    def __init__(self, name: str, command: list[object], **settings: Any) -> None:
        self.name, self.began = name, time.monotonic()
        super().__init__(list(map(str, command)), text=True, **settings)

    def wait(self, timeout: float | None = None) -> int:
        """Returns the exit status; never times out."""
        if self.returncode is None:
            _, status, usage = os.wait4(self.pid, 0)
            self.returncode = os.waitstatus_to_exitcode(status)
            took.append({
                "name": self.name,
                "seconds": time.monotonic() - self.began,
                "cpu_seconds": usage.ru_utime + usage.ru_stime,
                "gigabytes": usage.ru_maxrss / _MAXRSS_UNITS,
            })  # fmt: skip
        return self.returncode
