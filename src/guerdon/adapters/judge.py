"""Whom the adapters of reward functions ask: one served model, from wherever a trainer calls."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, Unpack

from guerdon.client import AsyncRewardClient, Credentials, RetryPolicy, RewardClient, Scores
from guerdon.client.reward_client import ScoreArgs
from guerdon.errors import DeadlineExceeded, Unavailable

TIMEOUT_S = 600.0
"""How long a call may take, with all its tries, where nothing else is said."""

_QUEUE_S = 1.0
"""How long a call that found no server speaks for those that waited behind it."""


class Judge:
    """A served reward model, to be asked from any thread, process or event loop; `judge` makes it."""

    def __init__(self, url: str | tuple[str, ...], model: str, timeout_s: float, credentials: Credentials) -> None:
        self._arguments = (url, model, timeout_s)
        self._credentials = credentials
        self._policy = RetryPolicy.patient(timeout_s, wait_for_start=True)
        self._client = RewardClient(url, model, policy=self._policy, credentials=credentials)
        self._by_loop: dict[asyncio.AbstractEventLoop, AsyncRewardClient] = {}
        self._lost_at, self._lost_why = -_QUEUE_S, ""

    def __reduce__(self) -> Any:
        # Some trainers pickle their function at every call: it finds its connections, and the key, where it arrives.
        return judge, self._arguments

    def score(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """The samples' scores; blocks. Raises what the server or the way to it raised."""
        return self._client.score(**samples)

    def score_in_queue(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """`score` for calls that wait for each other: those behind one that found no server in time fail at once."""
        if time.monotonic() - self._lost_at < _QUEUE_S:
            raise Unavailable(f"not asked, as a moment ago: {self._lost_why}")
        try:
            return self.score(**samples)
        except (Unavailable, DeadlineExceeded) as e:
            self._lost_at, self._lost_why = time.monotonic(), str(e)
            raise

    async def score_async(self, **samples: Unpack[ScoreArgs]) -> Scores:
        """`score` for the running event loop, each of which has connections of its own."""
        loop = asyncio.get_running_loop()
        if loop not in self._by_loop:
            for other in list(self._by_loop):
                if other.is_closed():  # its client would hold it, and its sockets, for ever
                    self._by_loop.pop(other, None)  # another thread may have seen it, too
            url, model, _ = self._arguments
            self._by_loop[loop] = AsyncRewardClient(url, model, policy=self._policy, credentials=self._credentials)
        return await self._by_loop[loop].score(**samples)


def judge(url: str | Sequence[str], model: str, timeout_s: float) -> Judge:
    """The one Judge of these arguments and the environment's credentials in this process; it can be pickled.

    It connects at the first call. Servers that are away or not up yet are tried again until `timeout_s` have gone by
    since the call. Raises InvalidRequest for a malformed URL, and ConfigError for credentials that cannot be.
    """
    key = (url if isinstance(url, str) else tuple(url), model, timeout_s, Credentials.from_environment())
    return _judges.get(key) or _judges.setdefault(key, Judge(*key))  # in one step: two threads get the same one


_judges: dict[tuple[str | tuple[str, ...], str, float, Credentials], Judge] = {}
