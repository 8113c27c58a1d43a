"""Limits on gRPC messages in transit: concurrent receives, and an end to calls whose answers nobody reads.

gRPC tells a message's size only when all of it is there, so each on its way may be as large as the largest: only so
many are received at once that they fit the memory that bodies have.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Iterator
from typing import Any

from guerdon.errors import InvalidRequest, Overloaded
from guerdon.server.batching.sharing import FairTurns, Shares
from guerdon.server.front.admission import RETRY_AFTER_S
from guerdon.server.front.http_request import UploadTooSlow
from guerdon.settings.config import LimitsConfig

log = logging.getLogger(__name__)

_CALLS_TASK = "rpc_task"


class Receiving:
    """Reads messages within limits of number, memory and time.

    As many may come at once as there is memory for. With several clients, and fewer than that, each client has one
    place of its own, so that messages of others that never come cannot keep it out. Clients take turns for the rest.

    Streams have as many separate places, each held while the stream is open, because an idle stream cannot be
    distinguished from one whose next message is in transit.
    """

    def __init__(self, limits: LimitsConfig, clients: tuple[str, ...]) -> None:
        count = max(1, limits.max_bodies_mb // limits.max_body_mb)
        own = clients if 1 < len(clients) < count else ()
        self._own = {name: FairTurns(1) for name in own}
        self._common = FairTurns(count - len(own))
        self._calls = Shares(limits.max_requests, clients)
        self._streams = Shares(count, clients)
        self._limits = limits

    @contextlib.contextmanager
    def stream(self, client: str) -> Iterator[None]:
        """Holds one stream's place within the context; raises Overloaded if there is none."""
        if not self._streams.has_room(client, 1):
            raise Overloaded(
                f"{self._streams.taken} streams are open, and {client or 'this server'} may have no more: ask by "
                "ModelInfer, or raise --max-bodies-mb",
                RETRY_AFTER_S,
            )
        self._streams.take(client, 1)
        try:
            yield
        finally:
            self._streams.give(client, 1)

    async def next_message(self, context: Any, timeout_s: float) -> bytes | None:
        """Returns a stream's next message; None if its client sends no more. Raises UploadTooSlow."""
        try:
            async with asyncio.timeout(timeout_s):
                data = await context.read()
        except TimeoutError as e:
            raise _too_slow(timeout_s) from e
        return data if isinstance(data, bytes) else None

    async def message(self, context: Any, client: str, timeout_s: float) -> bytes:
        """Returns the call's message, which has `timeout_s` seconds to come, including its wait for a turn.

        So calls whose messages never come end together, and delay later ones no longer. Raises Overloaded if it had to
        wait and did not come in time, or if too many calls wait; UploadTooSlow, and InvalidRequest if none comes.
        """
        if not self._calls.has_room(client, 1):
            raise Overloaded("too many calls wait for their messages; try again", RETRY_AFTER_S)
        own = self._own.get(client)
        turns = self._common if own is None or (self._common.is_free and not own.is_free) else own
        had_to_wait = not turns.is_free
        self._calls.take(client, 1)
        try:
            async with asyncio.timeout(timeout_s), turns.turn(client):
                data = await context.read()
        except TimeoutError as e:
            if had_to_wait:
                raise Overloaded(
                    f"the messages of other calls took all places, and this one did not come within {timeout_s:g} s; "
                    "try again",
                    RETRY_AFTER_S,
                ) from e
            raise _too_slow(timeout_s) from e
        finally:
            self._calls.give(client, 1)
        if not isinstance(data, bytes):  # gRPC itself has ended the call if it was too large
            raise InvalidRequest(f"no message came, or one of more than {self._limits.max_body_mb} MiB")
        return data


def end_unread(context: Any, timeout_s: float) -> None:
    """Ends the current handler's call if its answer is not sent within so many seconds.

    gRPC offers a server no way to do this. The call has two tasks: the handler's, which then waits for the answer to be
    sent, and one that waits for the call to end. gRPC resets the call's stream once neither holds it any more.
    """
    timer = asyncio.get_running_loop().call_later(timeout_s, _end, asyncio.current_task(), timeout_s)
    context.add_done_callback(lambda _: timer.cancel())


async def write_or_end(context: Any, reply: Any, timeout_s: float) -> None:
    """Writes one of a stream's answers; ends the current handler's call if it is not read in time."""
    timer = asyncio.get_running_loop().call_later(timeout_s, _end, asyncio.current_task(), timeout_s)
    try:
        await context.write(reply)
    finally:
        timer.cancel()


def _end(handler: asyncio.Task[Any] | None, timeout_s: float) -> None:
    assert handler is not None
    log.debug("an answer was not read within %.0f s", timeout_s)
    for task in asyncio.all_tasks():
        if task.get_name() == _CALLS_TASK and _holds(task.get_coro(), handler):
            task.cancel()
    handler.cancel()


def _holds(coroutine: Any, task: asyncio.Task[Any]) -> bool:
    """Whether the task is among the coroutine's variables; compiled coroutines show these to the collector alone."""
    return any(task in gc.get_referents(variables) for variables in gc.get_referents(coroutine))


def _too_slow(timeout_s: float) -> UploadTooSlow:
    return UploadTooSlow(f"the message did not come within {timeout_s:g} s; send it faster, or fewer rows")
