"""Whose the connections are, so that one client's leave room for another's. Pure: no clock, no socket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection

from guerdon.errors import Overloaded
from guerdon.server.batching.shares import Shares
from guerdon.server.front.gate import RETRY_AFTER_S


class Held:
    """One connection: who holds it, and how to end it while it waits for its client."""

    __slots__ = ("end", "holder")

    def __init__(self, holder: str, end: Callable[[], object]) -> None:
        self.holder = holder
        self.end = end


class Holders:
    """Up to `total` connections: by key once one was shown, by address before, and where there are no keys.

    Who has shown a key may hold half of them, and an equal part of the other half that nobody else can have. If all are
    held, one that waits for its client ends for a new one: without a key before with one, and of whoever holds most.
    """

    def __init__(self, total: int, names: Collection[str]) -> None:
        self.total = total
        self.num = 0
        self._names = frozenset(names)
        self._shares = Shares(total, names)
        self._counts: Counter[str] = Counter()
        self._waiting: dict[str, dict[Held, None]] = {}

    def add(self, address: str, end: Callable[[], object]) -> Held | None:
        """Takes on a connection from the address, which waits for its client; None if there is no room."""
        holder = f"at {address}"  # no key's holder has such a name
        if self.num >= self.total and not self._make_room(holder):
            return None
        held = Held(holder, end)
        self.num += 1
        self._count(held, 1)
        self.wait(held)
        return held

    def remove(self, held: Held | None) -> None:
        """Forgets a connection; no-op the second time, and for one that was not taken on."""
        if held is not None and held.holder:
            self.work(held)
            self.num -= 1
            self._count(held, -1)
            held.holder = ""

    def wait(self, held: Held | None) -> None:
        """Says that the connection owes nothing, and may be ended for another."""
        if held is not None and held.holder:
            self._waiting.setdefault(held.holder, {})[held] = None

    def work(self, held: Held | None) -> None:
        """Says that the connection has a request."""
        if held is None:
            return
        line = self._waiting.get(held.holder, {})
        line.pop(held, None)
        if not line:
            self._waiting.pop(held.holder, None)

    def admit(self, held: Held | None, name: str) -> None:
        """Makes it the connection of whoever has shown a key; raises Overloaded if that client may have no more."""
        if held is None or held.holder in (name, "") or name not in self._names:
            return
        if not self._shares.has_room(name, 1):
            if name not in self._waiting:
                raise Overloaded(
                    f"{name} holds {self._counts[name]} of the {self.total} connections, and may have no more; use "
                    "them again, or raise --max-connections",
                    RETRY_AFTER_S,
                )
            self._end_first(name)
        self.work(held)
        self._count(held, -1)
        held.holder = name
        self._count(held, 1)

    def _make_room(self, holder: str) -> bool:
        """Ends the connection that has waited longest of whoever should have fewer; False if there is none."""
        strangers = [name for name in self._waiting if name not in self._names]
        strangers = [name for name in strangers if self._counts[name] >= self._counts[holder]]
        known = [name for name in self._waiting if name in self._names and self._counts[name] > self._shares.own]
        for names in (strangers, known):
            if names:
                self._end_first(max(names, key=lambda name: self._counts[name]))
                return True
        return False

    def _end_first(self, holder: str) -> None:
        held = next(iter(self._waiting[holder]))
        self.remove(held)
        held.end()

    def _count(self, held: Held, more: int) -> None:
        self._counts[held.holder] += more
        if not self._counts[held.holder]:
            del self._counts[held.holder]
        if held.holder in self._names:
            self._shares.take(held.holder, more)
