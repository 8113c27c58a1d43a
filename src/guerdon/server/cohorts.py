"""Groups that arrive in single calls: waits until a group's samples are there, judges them at once, answers each call.

Trainers that send one response at a time still get rewards relative to the group. A call that leaves takes only its
own answer with it: its sample stays in the group, and the same sample, sent again, gets the answer.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from guerdon.core import ModelInfo, ScoreReply, ScoreRequest
from guerdon.errors import GuerdonError, InvalidRequest, SampleFailed, ServerFault, Unavailable, describe
from guerdon.server.metrics import Metrics
from guerdon.settings.config import LimitsConfig
from guerdon.wire.bodies import digest

Key = tuple[object, ...]
Score = Callable[[str, ScoreRequest, str], Coroutine[Any, Any, ScoreReply]]

_LISTS = ("texts", "messages", "prompts", "references")
"""Parts of a request with an entry per sample, which are put together."""


@dataclasses.dataclass(eq=False)
class _Call:
    """One call's samples, and the future that it waits for; None if it has left."""

    request: ScoreRequest
    place: int | None
    content: str
    future: asyncio.Future[ScoreReply] | None
    outcome: ScoreReply | GuerdonError | None = None


@dataclasses.dataclass(eq=False)
class _Group:
    """Calls that wait for each other, at most until the `timer`; `task` judges them."""

    info: ModelInfo
    size: int
    timer: asyncio.TimerHandle | None = None
    calls: list[_Call] = dataclasses.field(default_factory=list)
    task: asyncio.Task[None] | None = None

    @property
    def num_samples(self) -> int:
        """The samples that have arrived."""
        return sum(len(call.request) for call in self.calls)


class Cohorts:
    """The open groups of a server. Belongs to one asyncio loop."""

    def __init__(self, config: LimitsConfig, score: Score, metrics: Metrics) -> None:
        self._config, self._score, self._metrics = config, score, metrics
        self._open: dict[Key, _Group] = {}
        self._left: dict[tuple[Key, str], list[tuple[_Group, _Call]]] = {}
        self._is_ending = False

    def size(self, request: ScoreRequest) -> int:
        """Returns the number of samples in the request's group, 0 if it has none."""
        return 0 if request.cohort is None else request.cohort.size or self._config.group_size

    async def score(self, info: ModelInfo, request: ScoreRequest, client: str) -> ScoreReply:
        """Returns the reply about the request's own samples, once their group is judged by that model.

        They fail if the group stays incomplete. Raises InvalidRequest if the request does not go with the others, and
        what the judge raises for all of them.
        """
        if self._is_ending:
            raise Unavailable("the server is stopping, and waits for no group")
        assert request.cohort is not None
        key, place = (info.name, client, request.cohort.key), request.cohort.place
        content = digest([place, *(getattr(request, part) for part in _LISTS)])
        future: asyncio.Future[ScoreReply] = asyncio.get_running_loop().create_future()
        again = self._left.get((key, content), [])
        again[:] = [kept for kept in again if (task := kept[0].task) is None or not task.cancelling()]
        if again:
            group, call = again.pop()
            call.future = future
            if call.outcome is not None:
                _resolve(call, call.outcome)
        else:
            group = self._group(key, info, request)
            call = _Call(request, place, content, future)
            self._add(group, call)
            if group.num_samples >= group.size:
                self._close(key, group, "whole")
        try:
            return await future
        except asyncio.CancelledError:
            self._leave(key, group, call)
            raise

    def end(self) -> None:
        """Lets no group wait any longer, as when its time has passed; idempotent."""
        self._is_ending = True
        for key, group in [*self._open.items()]:
            self._expire(key, group)

    def _group(self, key: Key, info: ModelInfo, request: ScoreRequest) -> _Group:
        """Returns the open group that the request belongs to, perhaps a new one; raises InvalidRequest."""
        group, size = self._open.get(key), self.size(request)
        num_samples, fault = (0 if group is None else group.num_samples) + len(request), ""
        if group is not None:
            first = group.calls[0].request
            mixed = [part for part in _LISTS if (getattr(first, part) is None) != (getattr(request, part) is None)]
            if group.size != size:
                fault = f"group_size is {size}, and {group.size} in another call of the group"
            elif mixed:
                fault = f"one call of the group has {mixed[0]}, and another has none"
        if num_samples > size and not fault:
            fault = f"the group would have {num_samples} samples, and group_size is {size}"
        if fault:
            raise InvalidRequest(f"{fault}; send the same keys in all calls of a group, and name each group otherwise")
        if group is None:
            group = self._open[key] = _Group(info, size)
            wait_s = self._config.group_wait_s
            group.timer = asyncio.get_running_loop().call_later(wait_s, self._expire, key, group)
        return group

    def _add(self, group: _Group, call: _Call) -> None:
        """Adds a call; another sample in the same place takes that of the older one."""
        older = next((one for one in group.calls if call.place is not None and one.place == call.place), None)
        group.calls.append(call)
        if older is not None:
            group.calls.remove(older)
            _resolve(older, _failed(older, group, f"another sample has come as number {call.place} of its group"))

    def _leave(self, key: Key, group: _Group, call: _Call) -> None:
        """Notes that nobody waits for a call's answer; it is kept for `group_wait_s`, if the call comes again."""
        call.future = None
        place, kept = (key, call.content), (group, call)
        self._left.setdefault(place, []).append(kept)

        def forget() -> None:
            if kept in (some := self._left.get(place, [])):
                some.remove(kept)
            if not some:
                self._left.pop(place, None)

        asyncio.get_running_loop().call_later(self._config.group_wait_s, forget)
        if all(one.future is None for one in group.calls) and group.task is not None:
            group.task.cancel()  # nobody waits for any of it

    def _drop(self, key: Key, group: _Group) -> None:
        if group.timer is not None:
            group.timer.cancel()
        if self._open.get(key) is group:
            del self._open[key]

    def _expire(self, key: Key, group: _Group) -> None:
        """Ends the wait of a group that is not whole."""
        if self._open.get(key) is not group:
            return
        if self._config.group_incomplete == "judge" and any(call.future is not None for call in group.calls):
            self._close(key, group, "incomplete")
            return
        self._drop(key, group)
        self._metrics.add("guerdon_groups", 1, str(key[0]), "failed")
        why = (
            f"its group has {group.num_samples} of {group.size} samples after {self._config.group_wait_s:g} s "
            "(group_wait_s), and group_incomplete is fail"
        )
        for call in group.calls:
            _resolve(call, _failed(call, group, why))

    def _close(self, key: Key, group: _Group, outcome: str) -> None:
        self._drop(key, group)
        self._metrics.add("guerdon_groups", 1, str(key[0]), outcome)
        group.task = asyncio.get_running_loop().create_task(self._judge(str(key[0]), group, str(key[1])))

    async def _judge(self, name: str, group: _Group, client: str) -> None:
        """Judges the group as one request, and gives each call its part of the reply."""
        requests = [call.request for call in group.calls]
        parts: dict[str, Any] = {
            part: [row for request in requests for row in getattr(request, part)]
            for part in _LISTS
            if getattr(requests[0], part) is not None
        }
        groups = np.zeros(group.num_samples, np.int64)
        priority = max(request.priority for request in requests)
        whole = dataclasses.replace(
            requests[0], **parts, groups=groups, splits=None, is_whole=False, cohort=None, priority=priority
        )
        try:
            reply = await self._score(name, whole, client)
        except BaseException as e:
            error: GuerdonError = ServerFault(f"the group could not be judged: {describe(e)}")
            if isinstance(e, asyncio.CancelledError):
                error = Unavailable("the group is not judged any more: nobody waited for it")
            for call in group.calls:
                _resolve(call, e if isinstance(e, GuerdonError) else error)
            if not isinstance(e, GuerdonError):
                raise
            return
        start = 0
        for call in group.calls:
            part = slice(start, start + len(call.request))
            start = part.stop
            _resolve(call, dataclasses.replace(reply, results=reply.results[part], lengths=reply.lengths[part]))


def _resolve(call: _Call, outcome: ScoreReply | GuerdonError) -> None:
    """Answers a call, or keeps its answer if it has left."""
    call.outcome = outcome
    if call.future is None or call.future.done():
        return
    if isinstance(outcome, GuerdonError):
        call.future.set_exception(copy.copy(outcome))
    else:
        call.future.set_result(outcome)


def _failed(call: _Call, group: _Group, why: str) -> ScoreReply:
    count = len(call.request)
    return ScoreReply([SampleFailed(why)] * count, [0] * count, group.info.weights_version)
