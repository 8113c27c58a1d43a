"""Calls of gRPC whose answers nobody reads: they end, which gRPC gives a server no other way to do."""

from __future__ import annotations

import asyncio
import gc
import logging
from typing import Any

log = logging.getLogger(__name__)

_CALLS_TASK = "rpc_task"


def end_unread(context: Any, timeout_s: float) -> None:
    """Ends the call, in whose handler this is, where its answer is not sent within so many seconds from now.

    The call has two tasks: the handler's, which then waits for the answer to be sent, and one that waits for the call
    to end. gRPC resets the call's stream, and drops what waits in it, once neither holds it any more.
    """
    timer = asyncio.get_running_loop().call_later(timeout_s, _end, asyncio.current_task(), timeout_s)
    context.add_done_callback(lambda _: timer.cancel())


async def write_or_end(context: Any, reply: Any, timeout_s: float) -> None:
    """Writes one of a stream's answers; ends the call, whose handler this is, if it is not read in time."""
    timer = asyncio.get_running_loop().call_later(timeout_s, _end, asyncio.current_task(), timeout_s)
    try:
        await context.write(reply)
    finally:
        timer.cancel()


def _end(handlers: asyncio.Task[Any] | None, timeout_s: float) -> None:
    assert handlers is not None
    log.debug("an answer was not read within %.0f s", timeout_s)
    for task in asyncio.all_tasks():
        if task.get_name() == _CALLS_TASK and _holds(task.get_coro(), handlers):
            task.cancel()
    handlers.cancel()


def _holds(coroutine: Any, task: asyncio.Task[Any]) -> bool:
    """Whether the coroutine has the task among its variables, which compiled ones show to the collector alone."""
    return any(task in gc.get_referents(variables) for variables in gc.get_referents(coroutine))
