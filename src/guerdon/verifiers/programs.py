"""Runs a response's Python program against tests: `guerdon serve guerdon.verifiers.programs:verify --isolate`.

Every test is a fresh interpreter in a folder of its own, under the limits of the child process. That is no sandbox: a
program can read files, use the network and look for the tests.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated, Any

import msgspec

from guerdon.verifiers.responses import answer_of, find_program

_MAX_OUTPUT_BYTES = 1_048_576
_IMPORTED = ("-c", "import runpy, sys; runpy.run_path(sys.argv[1], run_name='program')")
"""Arguments that run a file as a module, without what it does as a script, such as to read stdin."""


class Case(msgspec.Struct, forbid_unknown_fields=True):
    """One test of a whole program: its stdin, and its expected stdout."""

    stdin: str
    stdout: str


class Tests(msgspec.Struct, forbid_unknown_fields=True):
    """A label: cases, or assertions about the program's definitions; `seconds` limits all of them together."""

    cases: list[Case] = []
    asserts: list[str] = []
    seconds: Annotated[float, msgspec.Meta(gt=0)] = 5.0


def verify(responses: list[str], labels: list[Any]) -> list[float]:
    """Returns 1.0 if the response's program, by `find_program`, passes all tests of its label, else 0.0.

    A label is `{"cases": [{"stdin": ..., "stdout": ...}]}` or `{"asserts": ["assert f(1) == 2"]}`, with `seconds` for
    all tests together, 5 by default. Outputs are compared without whitespace at the ends of lines. A response without a
    block, or whose program takes too long, gets 0.0. Raises ValueError for a label without tests.
    """
    return [float(_passes_all(_read_tests(label), response)) for response, label in zip(responses, labels, strict=True)]


verify.needs_isolation = True  # type: ignore[attr-defined]


def _read_tests(label: Any) -> Tests:
    if isinstance(label, dict):  # a table has null for what one of its rows lacks
        label = {key: value for key, value in label.items() if value is not None}
    try:
        tests = msgspec.convert(label, Tests)
    except msgspec.ValidationError as e:
        raise ValueError(f"the label holds no tests: {e}") from e
    if not tests.cases and not tests.asserts:
        raise ValueError("the label holds no tests: give cases or asserts")
    return tests


def _passes_all(tests: Tests, response: str) -> bool:
    program = find_program(answer_of(response))
    if program is None:
        return False
    ends = time.monotonic() + tests.seconds
    for case in tests.cases:
        written = _run(program, case.stdin, ends)
        if written is None or _lines(written) != _lines(case.stdout):
            return False
    if not tests.asserts:
        return True
    word = secrets.token_hex(16)  # written last: a program that exits early has not passed
    tested = "\n".join([program, *tests.asserts, f"print('\\n' + {word!r})"])
    written = _run(tested, "", ends, *_IMPORTED)
    return written is not None and _lines(written)[-1:] == [word]


def _run(program: str, stdin: str, ends: float, *starter: str) -> str | None:
    """Returns the program's stdout; None if it fails or times out. `starter` are arguments before the file."""
    with tempfile.TemporaryDirectory() as folder:
        file, given, written = (Path(folder, name) for name in ("program.py", "stdin", "stdout"))
        file.write_text(program, encoding="utf-8", errors="surrogatepass")
        given.write_text(stdin, encoding="utf-8")
        # Files, because what a program starts could keep a pipe open.
        with given.open("rb") as reads, written.open("wb") as writes:
            process = subprocess.Popen(  # noqa: S603
                [sys.executable, "-I", "-B", *starter, str(file)],
                stdin=reads, stdout=writes, stderr=subprocess.DEVNULL, cwd=folder, start_new_session=True,
            )  # fmt: skip
            try:
                status = process.wait(max(0.0, ends - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
        if status or written.stat().st_size > _MAX_OUTPUT_BYTES:
            return None
        return written.read_text(encoding="utf-8", errors="replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
