"""What the handlers of HTTP requests share: queries, replies and how they are sent, work that ends with its client."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar
from urllib.parse import parse_qsl

from starlette.types import Receive, Scope, Send

from guerdon.core import ScoreReply
from guerdon.errors import Cancelled

T = TypeVar("T")

Headers = list[tuple[bytes, bytes]]
Reply = tuple[int, Headers, bytes]
Handler = Callable[[Scope, Receive], Awaitable[Reply]]

JSON = (b"content-type", b"application/json")

_WATCH_AFTER_S = 0.01


def query_of(scope: Scope) -> dict[str, str]:
    """What stands behind the URL's `?`, also what has no value: a misspelt name is refused either way."""
    return dict(parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True))


async def send_reply(send: Send, reply: Reply, *, more_body: bool = False) -> None:
    """Sends status, headers and body; with `more_body` the connection stays for what the caller does yet."""
    status, headers, body = reply
    headers.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body, "more_body": more_body})


def version_header(weights_version: str) -> tuple[bytes, bytes]:
    """Which weights gave the answer."""
    return b"guerdon-weights-version", weights_version.encode("latin-1", "replace")


def score_headers(reply: ScoreReply) -> Headers:
    """How long the samples waited and were computed, and by which weights."""
    return [
        (b"guerdon-queue-ms", b"%.3f" % (reply.queue_s * 1e3)),
        (b"guerdon-compute-ms", b"%.3f" % (reply.compute_s * 1e3)),
        version_header(reply.weights_version),
    ]


async def unless_left(asking: Coroutine[Any, Any, T], receive: Receive) -> T:
    """What `asking` returns, which is cancelled where the client leaves; then raises Cancelled.

    The connection is only watched once that takes longer than a moment, which costs a quick one nothing.
    """
    loop = asyncio.get_running_loop()
    waiting = asyncio.current_task()
    assert waiting is not None
    watches: list[asyncio.Task[None]] = []
    has_left = False

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        waiting.cancel()

    timer = loop.call_later(_WATCH_AFTER_S, lambda: watches.append(loop.create_task(watch())))
    try:
        return await asking
    except asyncio.CancelledError:
        if not has_left:
            raise
        waiting.uncancel()
        raise Cancelled("the client left") from None
    finally:
        timer.cancel()
        for task in watches:
            task.cancel()
