"""Waiting for what a critic was asked, and saying what of it was not done."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from guerdon.core import Operation
from guerdon.errors import Cancelled, DeadlineExceeded, GuerdonError
from guerdon.server.batching.loop import Loop
from guerdon.server.batching.orders import Order

log = logging.getLogger(__name__)

_DROPPABLE = (Operation.STATE, Operation.VALIDATE, Operation.SAVE, Operation.LOAD)
"""What is not done where its caller has left, or waits no longer, before it has begun."""


async def outcome_of(
    order: Order, operation: Operation, what: str, timeout_s: float | None, loop: Loop, lane: str, *, is_known: bool
) -> Any:
    """What comes of an order in that lane of the loop; raises what it raises, and DeadlineExceeded after `timeout_s`.

    `what` is the operation with its request's id, and `is_known` says that another request has given the order.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await asyncio.wrap_future(order.outcome)
    except TimeoutError:
        pass
    except asyncio.CancelledError:
        if operation in _DROPPABLE and loop.drop(lane, order):
            warn(what, Cancelled("the client left before it began; it is dropped"))
        raise
    except GuerdonError as e:
        if is_known:
            warn(what, e)
        raise
    late = f"{operation} takes longer than {timeout_s:g} s"
    if operation in _DROPPABLE and loop.drop(lane, order):
        error = DeadlineExceeded(f"{late}: it had not begun, and is dropped")
    else:
        again = f"; ask again with train_id {what.split(' ', 1)[1]!r}" if operation is Operation.TRAIN else ""
        error = DeadlineExceeded(f"{late}, and goes on{again}")
    warn(what, error)
    raise error


def warn(what: str, error: BaseException) -> None:
    """Says on the log that something asked for did not end in success."""
    log.warning("%s: %s: %s", what, type(error).__name__, str(error))
