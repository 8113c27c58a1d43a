"""One model's scores and orders in the order in which they came. Pure: no clock, no thread.

An order waits for the scores before it, and scores behind it wait for it: what is asked after a train is answered by
the trained weights, what was asked before it by those of then.
"""

from __future__ import annotations

from collections import deque
from typing import Generic, Protocol, TypeVar

from guerdon.server.batching.scheduler import Batch, Job, Limits, Scheduler


class Turn(Protocol):
    """Whatever takes its turn between scores; it counts in the queue by what it holds, and as one sequence at least,
    of the client that asked for it.

    Until it `is_ready`, all behind it wait for it.
    """

    num_sequences: int
    num_tokens: int
    is_ready: bool
    client: str


OrderT = TypeVar("OrderT", bound=Turn)


class Lane(Generic[OrderT]):
    """The queue of one model. Not thread-safe: its owner holds a lock.

    The scheduler has the scores up to the first order that waits; that order and all that came later are held back.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._held: deque[Job | OrderT] = deque()  # its first is an order
        self._room = scheduler.room

    @property
    def num_sequences(self) -> int:
        """Sequences that wait, those of orders included."""
        return self._room.sequences.taken

    @property
    def num_tokens(self) -> int:
        """Tokens that wait, those of orders included."""
        return self._room.tokens.taken

    @property
    def limits(self) -> Limits:
        """What one batch may hold."""
        return self._scheduler.limits

    def add(self, job: Job, now: float | None = None) -> None:
        """Accepts the whole job, or raises Overloaded at once; behind an order no deadline counts."""
        if not self._held:
            self._scheduler.add(job, now)
            return
        self._room.check(*_size(job))
        self._hold(job)

    def add_order(self, order: OrderT, *, finds_room: bool = False) -> None:
        """Accepts the order behind all that came before, or raises Overloaded, unless it `finds_room` in any case."""
        if not finds_room:
            self._room.check(*_size(order))
        self._hold(order)

    def fill(self, order: OrderT, num_sequences: int, num_tokens: int) -> bool:
        """Makes ready an order that holds its place, with what it holds; False where it was dropped meanwhile.

        Raises Overloaded where there is no room for that; then it has its place still.
        """
        if order not in self._held:
            return False
        self._room.give(*_size(order))
        try:
            self._room.check(num_sequences, num_tokens, order.client)
            order.num_sequences, order.num_tokens, order.is_ready = num_sequences, num_tokens, True
        finally:
            self._room.take(*_size(order))
        return True

    def drop_order(self, order: OrderT) -> bool:
        """Takes an order out, and says whether it was there: one that was taken is done."""
        if order not in self._held:
            return False
        self._held.remove(order)
        self._room.give(*_size(order))
        self._release()
        return True

    def drop_unready(self) -> list[OrderT]:
        """Takes out all orders that are not ready."""
        orders = [item for item in self._held if not isinstance(item, Job) and not item.is_ready]
        for order in orders:
            self.drop_order(order)
        return orders

    def check_room(self, num_sequences: int, num_tokens: int = 0, client: str = "") -> None:
        """Raises Overloaded where the queue has no room for what is coming, as `Room.check_coming`."""
        self._room.check_coming(num_sequences, num_tokens, client)

    def cancel(self, job: Job) -> None:
        """Drops what of the job has not been taken yet."""
        if job in self._held:
            self._held.remove(job)
            self._room.give(*_size(job))
            job.cancelled = True
        else:
            self._scheduler.cancel(job)

    def drop_all(self) -> tuple[list[Job], list[OrderT]]:
        """Empties the queue; returns the jobs and orders that were in it."""
        jobs, orders = self._scheduler.drop_all(), []
        for item in self._held:
            self._room.give(*_size(item))
            if isinstance(item, Job):
                item.cancelled = True
                jobs.append(item)
            else:
                orders.append(item)
        self._held.clear()
        return jobs, orders

    def requests(self) -> tuple[set[Job], int]:
        """As `Scheduler.requests`, orders and what they hold back included."""
        begun, num_waiting = self._scheduler.requests()
        return begun, num_waiting + len(self._held)

    def take_late(self) -> list[Job]:
        """Takes out the jobs that were dropped as they could not be done by their deadlines."""
        late, self._scheduler.late = self._scheduler.late, []
        return late

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learns from the batch that was taken last how fast the worker is."""
        self._scheduler.observe(num_tokens, seconds)

    def resize(self, max_batch_tokens: int) -> None:
        """Lets a batch hold at most so many tokens from now on."""
        self._scheduler.resize(max_batch_tokens)

    def change(self, limits: Limits) -> None:
        """Has other limits from now on, as `Scheduler.change`."""
        self._scheduler.change(limits)

    def starts_at(self) -> float | None:
        """When the next batch or order may start: None where there is none that may, 0.0 for at once."""
        if not self._held:
            return self._scheduler.starts_at()
        return 0.0 if self._scheduler.num_sequences or self._held[0].is_ready else None  # type: ignore[union-attr]

    def take(self, now: float, *, hurry: bool = False) -> Batch | OrderT | None:
        """The next batch or order at time `now`, or None where there is none, or none yet.

        What was taken must be done before the next is taken. Scores before an order wait for no company: those that
        come now are held behind it.
        """
        batch = self._scheduler.take(now, hurry=hurry or bool(self._held))
        if batch is not None or not self._held:
            return batch
        order = self._held[0]
        assert not isinstance(order, Job)
        if not order.is_ready:
            return None
        self._held.popleft()
        self._room.give(*_size(order))
        self._release()
        return order

    def _release(self) -> None:
        """Gives the scheduler the scores that no order holds back any more."""
        while self._held and isinstance(job := self._held[0], Job):
            self._held.popleft()
            self._scheduler.put(job)

    def _hold(self, item: Job | OrderT) -> None:
        self._held.append(item)
        self._room.take(*_size(item))


def _size(item: Job | Turn) -> tuple[int, int, str]:
    """Sequences, tokens, and whose they are."""
    if isinstance(item, Job):
        return len(item.sequences), sum(s.num_tokens for s in item.sequences), item.client
    return max(1, item.num_sequences), item.num_tokens, item.client
