"""The child that calls the user's function, one sample at a time, until it is killed or its keeper leaves."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import socket
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from guerdon.core import Score
from guerdon.engine.functions import FunctionForm, as_scores
from guerdon.engine.isolation import process_tree
from guerdon.engine.isolation.channel import (
    LEAVES,
    NONCE_BYTES,
    STAYS,
    Answer,
    Limits,
    decode_sample,
    encode,
    receive,
    send,
)
from guerdon.errors import SampleFailed, describe

_MAX_FILES = 1024


def run(
    channel: socket.socket, output: int, keeper: int, folder: str, function: Callable[..., Any], form: FunctionForm,
    limits: Limits,
) -> None:  # fmt: skip
    """Answers samples over `channel` until it closes; `output` becomes stdout and stderr, `folder` TMPDIR."""
    os.setsid()
    process_tree.die_with_parent(keeper)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["TMPDIR"] = folder
    tempfile.tempdir = None  # the template's
    for descriptor in (1, 2):
        os.dup2(output, descriptor)
    os.close(output)
    _lower_limits(limits)
    while (request := receive(channel)) is not None:
        nonce, sample = request[:NONCE_BYTES], request[NONCE_BYTES:]
        answer = _call(function, form, decode_sample(sample))
        is_spent = not _flush() or answer.is_out_of_memory
        send(channel, nonce + (LEAVES if is_spent else STAYS) + encode(answer))


def _lower_limits(limits: Limits) -> None:
    with open("/proc/self/oom_score_adj", "w") as file:  # the kernel should end a child before the server
        file.write("1000")
    process_tree.limit(resource.RLIMIT_CORE, 0)
    process_tree.limit(resource.RLIMIT_NOFILE, _MAX_FILES)
    process_tree.limit(resource.RLIMIT_FSIZE, limits.memory_bytes)
    process_tree.limit(resource.RLIMIT_DATA, process_tree.data_bytes(os.getpid()) + limits.memory_bytes)


def _call(function: Callable[..., Any], form: FunctionForm, arguments: dict[str, Any]) -> Answer:
    try:
        sample = arguments.pop("sample")
        if form.takes == "tokens":
            sample = np.array(sample, dtype=np.int64)
        values = function([sample], **{name: [value] for name, value in arguments.items()})
        (result,) = as_scores(values, 1, getattr(function, "__name__", "the function"))
    except MemoryError:
        return Answer(is_out_of_memory=True)
    except BaseException as e:  # SystemExit as well: only its sample fails
        result = SampleFailed(f"the function raised {describe(e)}{_place(e)}")
        with contextlib.suppress(BaseException):  # stderr may be closed
            traceback.print_tb(e.__traceback__ and e.__traceback__.tb_next)
            print(describe(e), file=sys.stderr)  # noqa: T201 - for the log; the whole text may have any size
    return Answer(reward=result.reward) if isinstance(result, Score) else Answer(error=str(result))


def _place(error: BaseException) -> str:
    *callers, (frame, line) = traceback.walk_tb(error.__traceback__)
    return f" ({os.path.basename(frame.f_code.co_filename)}, line {line})" if callers else ""


def _flush() -> bool:
    """Returns whether stdout and stderr still work; the function may have closed or replaced them."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException:
        return False
    return True
