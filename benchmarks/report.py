"""Writes the line that precedes every table of results."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from pathlib import Path


def machine() -> dict[str, str]:
    """Returns date, commit and machine of a measurement."""
    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), "")
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": revision.stdout.strip(),
        "hardware": f"{cpu}, {os.cpu_count()} cores, {platform.system()}",
    }
