"""A bounded amount that several clients draw on, so that none of them can take it all. Pure: no clock, no thread."""

from __future__ import annotations

from collections.abc import Collection


class Shares:
    """So many of something, taken and given back by clients' names.

    Half of it is everybody's; the other half is kept in equal parts, one for each of the `clients`, which nobody else
    can take: `own` is one of these. With fewer than two of them all of it is everybody's. `taken` is what all have
    together.
    """

    def __init__(self, total: int, clients: Collection[str] = ()) -> None:
        self.total = total
        self.taken = 0
        self._clients = frozenset(clients if len(clients) > 1 else ())
        self.own = total // (2 * len(self._clients)) if self._clients else 0
        self._common = total - self.own * len(self._clients)
        self._common_taken = 0
        self._held: dict[str, int] = {}

    def has_room(self, client: str, amount: int) -> bool:
        """Whether the client may take so much more; within its own part it always may."""
        if not self._clients:
            return self.taken + amount <= self.total
        own = self.own if client in self._clients else 0
        if self._held.get(client, 0) + amount <= own:
            return True
        return self._common_taken + self._of_common(client, amount) <= self._common

    def take(self, client: str, amount: int) -> None:
        """Counts so much more for the client, whether there is room or not."""
        self.taken += amount
        if not self._clients:  # as a rule, and this is done for every sequence
            return
        self._common_taken += self._of_common(client, amount)
        held = self._held.get(client, 0) + amount
        if held:
            self._held[client] = held
        else:
            self._held.pop(client, None)

    def give(self, client: str, amount: int) -> None:
        """Takes so much back."""
        self.take(client, -amount)

    def most(self, client: str) -> int:
        """What the client could have if nobody else had any."""
        return self._common + (self.own if client in self._clients else 0)

    def held(self, client: str) -> int:
        """What the client has; where there are no parts, what all have."""
        return self._held.get(client, 0) if self._clients else self.taken

    def _of_common(self, client: str, amount: int) -> int:
        """What of `amount` more comes from everybody's half."""
        own = self.own if client in self._clients else 0
        held = self._held.get(client, 0)
        return max(0, held + amount - own) - max(0, held - own)
