"""What tests that start other Python processes share."""

import functools
import importlib
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import guerdon

SKIPPED = 77
"""How a process ends whose test says `pytest.skip`."""


def environment() -> dict[str, str]:
    """This process's environment, with the sources on the path whether guerdon is installed or not."""
    return os.environ | {"PYTHONPATH": str(Path(guerdon.__file__).parents[1])}


def end_of_child(work: Callable[[], object]) -> int:
    """How a forked child ends that does `work`: 0, 1 after an exception, or as it makes itself end.

    For tests that run `by_itself`: a fork has no other threads, but the locks that they held.
    """
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def by_itself(test: Callable[..., None]) -> Callable[..., None]:
    """The test in a fresh Python of its own, which it may fork, limit and unshare: no other test has run there.

    Its fixtures must be what pickle takes, and are made here.
    """

    @functools.wraps(test)
    def run(**fixtures: Any) -> None:
        command = [sys.executable, "-m", __name__]
        env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        with subprocess.Popen(command, stdin=subprocess.PIPE, env=env, start_new_session=True) as process:
            try:
                process.communicate(pickle.dumps((test.__module__, test.__name__, fixtures)))
            except BaseException:  # as when the test's time is up: its children go too
                os.killpg(process.pid, signal.SIGKILL)
                raise
        if process.returncode == SKIPPED:
            pytest.skip("the test's own process said so")
        assert process.returncode == 0, "it failed in its own process, which told stderr why"

    return run


def main() -> None:
    module, name, fixtures = pickle.load(sys.stdin.buffer)  # noqa: S301 - of our own parent
    try:
        getattr(importlib.import_module(module), name).__wrapped__(**fixtures)
    except pytest.skip.Exception as skipped:
        print(skipped, file=sys.stderr)
        sys.exit(SKIPPED)


if __name__ == "__main__":
    main()
