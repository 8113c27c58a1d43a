"""Clocks that jump: nothing that lasts is measured by the time of day."""

import ast
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ports import free_port
from processes import environment

TESTS = Path(__file__).parent
SRC = TESTS.parent / "src" / "guerdon"
TOLD = {
    "actor/trackers.py", "cli/console.py", "engine/checkpoint/digests.py", "server/catalog.py",
    "server/page/recorder.py", "server/front/http_app.py", "server/triton.py", "server/tracing.py",
    "wire/forms/label_probs.py", "wire/forms/vllm_logprobs.py", "wire/forms/vllm_pooling.py",
}  # fmt: skip
"""Where the time of day is told to somebody, or compared with a file's, and no duration is measured by it."""
CLOCKS = {"time", "time_ns", "gmtime", "localtime", "now", "utcnow", "today"}


def looks_at_the_clock(source: str) -> list[int]:
    """Lines that call the time of day: `time.time()`, `datetime.now()` and what else gives it, or import it bare."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr in CLOCKS:
            if node.value.id in ("time", "datetime", "date"):
                found.append(node.lineno)
        elif isinstance(node, ast.ImportFrom) and node.module in ("time", "datetime"):
            found += [node.lineno for name in node.names if name.name in CLOCKS]
    return found


@pytest.mark.slow
def test_no_duration_is_measured_by_the_time_of_day() -> None:
    used = {p.relative_to(SRC).as_posix(): looks_at_the_clock(p.read_text()) for p in sorted(SRC.rglob("*.py"))}
    assert {path for path, lines in used.items() if lines} == TOLD
    for source in ("import time\ntime.time()", "from time import time", "import datetime as x\ndatetime.now()"):
        assert looks_at_the_clock(source), source


@contextmanager
def serving(folder: Path, port: int) -> Iterator[str]:
    """The server of jumping_clock.py; in the end it leaves in order."""
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
    process = subprocess.Popen([sys.executable, TESTS / "jumping_clock.py", "serve", str(folder), str(port)], env=env)
    try:
        yield f"http://127.0.0.1:{port}"
        process.terminate()
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.wait()


def ask(url: str, first: int, number: int, *go: Path) -> list[str]:
    env = environment()
    env["PYTHONPATH"] += f"{os.pathsep}{TESTS}"
    command = [sys.executable, str(TESTS / "jumping_clock.py"), "ask", url, str(first), str(number), *map(str, go)]
    run = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout.split()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_server_and_clients_whose_clocks_jump_by_days_train_score_and_come_back(tmp_path: Path) -> None:
    port = free_port()
    with serving(tmp_path / "critic", port) as url:
        step, now, _ = ask(url, 0, 5, tmp_path / "critic" / "go")
        assert (step, int(now) >= 5) == ("5", True)
        metrics = urllib.request.urlopen(f"{url}/metrics", timeout=120).read().decode()
        seconds = re.findall(r"^(guerdon_\w+_seconds)_sum\S* (\S+)$", metrics, re.MULTILINE)
        assert seconds and all(0 <= float(value) < 60 for _, value in seconds), seconds
    with serving(tmp_path / "critic", port) as url:  # it goes on where it was, whatever the time was then
        again, after, _ = ask(url, 5, 2)
        assert int(again) == int(now) + 2 and int(after) >= int(again)
