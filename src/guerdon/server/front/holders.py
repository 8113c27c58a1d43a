"""Shares the connections among clients, so that one leaves room for another. Pure: no clock, no socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from guerdon.errors import Overloaded
from guerdon.server.batching.sharing import Shares
from guerdon.server.front.admission import RETRY_AFTER_S

TIME_TO_ASK_S = 1.0
"""For so long a new connection is not evicted for one of the same client: its first request may still be unread."""


class Held:
    """One connection: its holder, and how to end it while it is idle."""

    __slots__ = ("end", "holder", "since")

    def __init__(self, holder: str, end: Callable[[], object]) -> None:
        self.holder = holder
        self.end = end
        self.since = 0.0


class Holders:
    """Shares `total` connections among clients: by key once a key was shown, by address before that or without keys.

    Half of them are common to all keys; of the other half each key has an equal part to itself. At the limit a new
    connection evicts an idle one: of a client without a key first, then of the client that holds most, and answered
    ones before those that have not sent a request yet. A burst from one client does not evict its own connections.
    """

    def __init__(self, total: int, names: Collection[str]) -> None:
        self.total = total
        self.num = 0
        self._names = frozenset(names)
        self._shares = Shares(total, names)
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, dict[Held, None]] = {}
        self._new: dict[str, dict[Held, None]] = {}

    def add(self, address: str, end: Callable[[], object], now: float) -> Held | None:
        """Counts a connection from the address as idle; returns None if there is no room."""
        holder = f"at {address}"  # no key's holder can have such a name
        if self.num >= self.total and not self._make_room(holder, now):
            return None
        held = Held(holder, end)
        self.num += 1
        self._count(held, 1)
        self.wait(held)
        return held

    def expect(self, held: Held, now: float) -> None:
        """Marks the connection as open for its first request, from `now` on."""
        if held.holder:
            self.work(held)
            held.since = now
            self._new.setdefault(held.holder, {})[held] = None

    def remove(self, held: Held | None) -> None:
        """Forgets a connection; idempotent, and a no-op for one that was refused."""
        if held is not None and held.holder:
            self.work(held)
            self.num -= 1
            self._count(held, -1)
            held.holder = ""

    def wait(self, held: Held | None) -> None:
        """Marks the connection as idle: it may be evicted."""
        if held is not None and held.holder:
            self._waiting.setdefault(held.holder, {})[held] = None

    def work(self, held: Held | None) -> None:
        """Marks the connection as busy with a request."""
        if held is None:
            return
        for lines in (self._waiting, self._new):
            line = lines.get(held.holder, {})
            line.pop(held, None)
            if not line:
                lines.pop(held.holder, None)

    def admit(self, held: Held | None, name: str) -> None:
        """Assigns the connection to the client that has shown a key; raises Overloaded if it may have no more."""
        if held is None or held.holder in (name, "") or name not in self._names:
            return
        if not self._shares.has_room(name, 1):
            if name not in self._waiting:
                raise Overloaded(
                    f"{name} holds {self._counts[name]} of the {self.total} connections, and may have no more; use "
                    "them again, or raise --max-connections",
                    RETRY_AFTER_S,
                )
            self._end(next(iter(self._waiting[name])))
        self.work(held)
        self._count(held, -1)
        held.holder = name
        self._count(held, 1)

    def _make_room(self, holder: str, now: float) -> bool:
        """Evicts the longest idle connection of the client that holds too many; returns False if there is none."""
        strangers = [self._first(name, holder, now) for name in self._waiting | self._new if name not in self._names]
        known = [name for name in self._waiting if name in self._names and self._counts[name] > self._shares.own]
        may_end = [held for held in strangers if held] or [next(iter(self._waiting[name])) for name in known]
        if may_end:
            self._end(max(may_end, key=lambda held: self._counts[held.holder]))
        return bool(may_end)

    def _first(self, name: str, holder: str, now: float) -> Held | None:
        """Returns the connection of `name` to end first for a new one of `holder`, if any."""
        more = self._counts[name] - self._counts[holder]
        if more < 0:
            return None
        if name in self._waiting:
            return next(iter(self._waiting[name]))
        oldest = next(iter(self._new[name]))
        return oldest if more > 1 or now - oldest.since >= TIME_TO_ASK_S else None

    def _end(self, held: Held) -> None:
        self.remove(held)
        held.end()

    def _count(self, held: Held, more: int) -> None:
        self._counts[held.holder] += more
        if not self._counts[held.holder]:
            del self._counts[held.holder]
        if held.holder in self._names:
            self._shares.take(held.holder, more)
