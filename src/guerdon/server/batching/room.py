"""How much may wait in one model's queue, and how fast it is worked off. Pure: no clock, no thread."""

from __future__ import annotations

from collections.abc import Collection

from guerdon.errors import Overloaded
from guerdon.server.batching.sharing import Shares

_NEW = 0.2
"""Weight of the last batch in the moving average."""
_SPARE = 0.2
"""Share of the remaining time that estimates keep free when a request arrives, because no estimate is exact."""


class Pace:
    """Estimates the computed tokens per second of full batches.

    Smaller batches are slower. So before the first full batch the estimate serves `retry_after_s` only, and after it a
    smaller batch counts only if it was faster: then the estimate was too low.
    """

    def __init__(self) -> None:
        self.batch_tokens = 0
        """Tokens of the last full batch."""
        self._tokens_per_s = 0.0
        self._running = 0
        self._is_full = False
        self._is_known = False

    def begin(self, num_tokens: int, *, is_full: bool) -> None:
        """Notes that a batch of this many tokens begins."""
        self._running, self._is_full = num_tokens, is_full

    def end(self, seconds: float) -> None:
        """Notes how long that batch took."""
        rate = self._running / max(seconds, 1e-6)
        is_first = not self._tokens_per_s or (self._is_full and not self._is_known)
        if self._is_full:
            self.batch_tokens, self._is_known = self._running, True
        if is_first:
            self._tokens_per_s = rate
        elif self._is_full or not self._is_known or rate > self._tokens_per_s:
            self._tokens_per_s += (rate - self._tokens_per_s) * _NEW
        self._running = 0

    def is_late(self, num_tokens: int, seconds_left: float) -> bool:
        """Whether this many tokens certainly take longer than `seconds_left`."""
        return self._is_known and num_tokens > self._tokens_per_s * seconds_left

    def would_be_late(self, num_tokens: int, seconds_left: float) -> bool:
        """Whether this many tokens, after the running batch, probably take longer than `seconds_left`."""
        return self._is_known and self.late_by_s(num_tokens, seconds_left) > 0

    def late_by_s(self, num_tokens: int, seconds_left: float) -> float:
        """Returns by how many seconds they probably take longer."""
        return self.seconds_for(num_tokens + self._running) - (1 - _SPARE) * seconds_left

    def seconds_for(self, num_tokens: float) -> float:
        """Returns the estimated seconds for this many tokens; 0.0 before the first batch."""
        return num_tokens / self._tokens_per_s if self._tokens_per_s else 0.0


class Room:
    """Counts the sequences and tokens that wait, and bounds them; each of `clients` has a part of its own.

    `pace` gives refused clients a Retry-After.
    """

    def __init__(self, max_sequences: int, max_tokens: int, clients: Collection[str] = ()) -> None:
        self.sequences = Shares(max_sequences, clients)
        self.tokens = Shares(max_tokens, clients)
        self.pace = Pace()

    def check(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Raises Overloaded if the client may not queue this much more.

        An oversized request, or any request of a client with nothing queued, is admitted unless the queue is over its
        limits already: so nothing is refused for ever, and at most one request exceeds the limits.
        """
        sequences, tokens = self.sequences, self.tokens
        if sequences.has_room(client, num_sequences) and tokens.has_room(client, num_tokens):
            return
        is_within = sequences.taken <= sequences.total and tokens.taken <= tokens.total
        is_too_large = num_sequences > sequences.most(client) or num_tokens > tokens.most(client)
        if is_within and (is_too_large or not sequences.held(client)):
            return
        own = sequences.held(client)
        whose = f", {own} of them of {client}" if client else ""
        raise Overloaded(
            f"the queue has no room for {num_sequences} more sequences ({num_tokens} tokens): "
            f"{sequences.taken} ({tokens.taken} tokens) wait{whose}; try again later, or send fewer at once",
            self.retry_after_s(),
        )

    def check_coming(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Does `check` for a request that has not been decoded yet; `num_tokens` is an upper bound, padding included.

        Reserves at most half of the client's maximum, unless the request exceeds it all.
        """
        most = self.tokens.most(client)
        self.check(num_sequences, num_tokens if num_tokens > most else min(num_tokens, most // 2), client)

    def check_time(self, num_tokens: int, waiting_cost: int, cost: int, seconds_left: float) -> None:
        """Raises Overloaded if so many tokens, of which `cost` are the request's own, take longer than `seconds_left`.

        It would be accepted at the latest when the queue is empty.
        """
        late_by_s = min(self.pace.late_by_s(num_tokens, seconds_left), self.pace.late_by_s(waiting_cost, 0.0))
        if late_by_s > 0:
            raise Overloaded(
                f"{self.sequences.taken} sequences ({self.tokens.taken} tokens) wait, too many to score {cost} tokens "
                f"more in {seconds_left:.3g} s; try again later, or allow more time",
                self.retry_after_s(late_by_s),
            )

    def take(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Counts what joins the queue."""
        self.sequences.take(client, num_sequences)
        self.tokens.take(client, num_tokens)

    def give(self, num_sequences: int, num_tokens: int, client: str) -> None:
        """Counts what leaves the queue."""
        self.sequences.give(client, num_sequences)
        self.tokens.give(client, num_tokens)

    def retry_after_s(self, late_by_s: float | None = None) -> float:
        """Returns the seconds until half of the queue is done, or `late_by_s` are over, between 1 and 60."""
        return min(60.0, max(1.0, self.pace.seconds_for(0.5 * self.tokens.taken) if late_by_s is None else late_by_s))
