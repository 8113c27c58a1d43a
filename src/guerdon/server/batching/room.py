"""What may wait in one model's queue, by client, and how soon there is room again. Pure: no clock, no thread."""

from __future__ import annotations

from collections.abc import Collection

from guerdon.errors import Overloaded
from guerdon.server.batching.shares import Shares


class Room:
    """The sequences and tokens that wait, and how many may; of `clients` each has a part that no other can take."""

    def __init__(self, max_sequences: int, max_tokens: int, clients: Collection[str] = ()) -> None:
        self.sequences = Shares(max_sequences, clients)
        self.tokens = Shares(max_tokens, clients)
        self._tokens_per_s = 0.0

    def check(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Raises Overloaded where the client may not have so much more wait.

        Unless more waits already than should, a client of whom nothing waits may send a request of any size, and every
        client one that is larger than all that it could have: so a request that no empty queue has the room for is not
        refused for ever, and what waits beyond the bounds is one request at most.
        """
        sequences, tokens = self.sequences, self.tokens
        is_within = sequences.taken <= sequences.total and tokens.taken <= tokens.total
        is_too_large = num_sequences > sequences.most(client) or num_tokens > tokens.most(client)
        if is_within and (is_too_large or not sequences.held(client)):
            return
        if sequences.has_room(client, num_sequences) and tokens.has_room(client, num_tokens):
            return
        own = sequences.held(client)
        whose = f", {own} of them of {client}" if client else ""
        raise Overloaded(
            f"the queue has no room for {num_sequences} more sequences ({num_tokens} tokens): "
            f"{sequences.taken} ({tokens.taken} tokens) wait{whose}; try again later, or send fewer at once",
            self.retry_after_s(),
        )

    def check_coming(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """As `check`, of a request that nobody has read yet: it has at most about so many tokens, padding included.

        Of one that may be as large as half of what the client could have no more than that half is asked for.
        """
        most = self.tokens.most(client)
        self.check(num_sequences, num_tokens if num_tokens > most else min(num_tokens, most // 2), client)

    def take(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Counts what waits from now on."""
        self.sequences.take(client, num_sequences)
        self.tokens.take(client, num_tokens)

    def give(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Counts what waits no longer."""
        self.sequences.give(client, num_sequences)
        self.tokens.give(client, num_tokens)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from a finished batch how fast the worker is, for Retry-After."""
        rate = num_tokens / max(seconds, 1e-6)
        self._tokens_per_s = rate if not self._tokens_per_s else 0.9 * self._tokens_per_s + 0.1 * rate

    def retry_after_s(self) -> float:
        """Seconds until half of what waits now will be done, between 1 and 60."""
        if not self._tokens_per_s:
            return 1.0
        return min(60.0, max(1.0, 0.5 * self.tokens.taken / self._tokens_per_s))
