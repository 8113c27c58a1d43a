"""Runs a driver by the interpreter of its trainer's environment."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

import served
from processes import environment
from trainers import environments

HERE = Path(__file__).parent
SAMPLES = served.samples(64)


def drive(name: str, script: str, *arguments: str, samples: list[dict[str, Any]] | None = None, tmp: Path) -> Any:
    """Returns what a driver prints; takes the arguments of `run`."""
    done = run(name, script, *arguments, samples=samples, tmp=tmp)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def run(
    name: str, script: str, *arguments: str, samples: list[dict[str, Any]] | None = None, tmp: Path
) -> subprocess.CompletedProcess[str]:
    """Runs a driver by its trainer's interpreter and returns its result; skips the test without that interpreter.

    `SAMPLES` among the arguments becomes the file of the samples.
    """
    python = environments.python_of(name)
    if not python.exists():
        pytest.skip(f"no environment of {name}: `make trainers` makes it")
    file = tmp / "samples.json"
    file.write_text(json.dumps(SAMPLES if samples is None else samples))
    command = [python, HERE / script, *(str(file) if a == "SAMPLES" else a for a in arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=environment(), cwd=tmp)
