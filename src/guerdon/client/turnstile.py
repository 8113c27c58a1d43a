"""The order in which calls may go: one after another, except those that may go together. No clock, no I/O."""

from __future__ import annotations

from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Turnstile(Generic[T]):
    """Lets through those that came first: one that goes `alone`, or as many as follow each other that do not.

    Who has arrived must leave once, whether it was let through or not. The caller keeps threads apart.
    """

    def __init__(self) -> None:
        self._inside: set[T] = set()
        self._is_alone = False
        self._waiting: deque[tuple[T, bool]] = deque()

    def arrive(self, who: T, *, alone: bool) -> list[T]:
        """Takes `who` as the last of the line; returns those that may go now, in order."""
        self._waiting.append((who, alone))
        return self._let_through()

    def leave(self, who: T) -> list[T]:
        """`who` has ended, or waits no longer; returns those that may go now, in order."""
        if who in self._inside:
            self._inside.remove(who)
        else:
            self._waiting = deque(entry for entry in self._waiting if entry[0] is not who)
        return self._let_through()

    def clear(self) -> list[T]:
        """Forgets those that wait, and returns them."""
        waiting = [who for who, _ in self._waiting]
        self._waiting.clear()
        return waiting

    def _let_through(self) -> list[T]:
        gone: list[T] = []
        while self._waiting:
            who, alone = self._waiting[0]
            if self._inside and (alone or self._is_alone):
                break
            self._waiting.popleft()
            self._inside.add(who)
            self._is_alone = alone
            gone.append(who)
        return gone
