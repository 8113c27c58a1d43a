"""What tests that start other Python processes share."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import guerdon


def environment() -> dict[str, str]:
    """This process's environment, with the sources on the path whether guerdon is installed or not."""
    return os.environ | {"PYTHONPATH": str(Path(guerdon.__file__).parents[1])}


def end_of_child(work: Callable[[], object]) -> int:
    """How a forked child ends that does `work`: 0, 1 after an exception, or as it makes itself end."""
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


def in_child(work: Callable[[], Any]) -> Any:
    """What `work` returns in a forked child, whose limits are its own; RuntimeError where it returns not."""
    reader, writer = os.pipe()
    with os.fdopen(reader, "rb") as results, os.fdopen(writer, "wb") as pipe:

        def send() -> None:
            pickle.dump(work(), pipe)
            pipe.flush()

        status = end_of_child(send)
        pipe.close()
        if status:
            raise RuntimeError(f"the child ended with {status}")
        return pickle.load(results)  # noqa: S301 - of our own child
