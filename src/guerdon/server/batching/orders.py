"""Work that is not a score but keeps its order among a model's scores: a critic's operations, swaps of weights.

An order waits for the scores before it, and scores behind it wait for it: a score sent after a train is computed by the
trained weights, one sent before it by the old ones.
"""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

from guerdon.core import Executor
from guerdon.errors import GuerdonError, RanksLost, ServerFault, describe
from guerdon.server import tracing
from guerdon.server.batching.halving import check_device
from guerdon.server.batching.jobs import Job
from guerdon.server.batching.room import Room
from guerdon.server.logs import failure

log = logging.getLogger(__name__)


class Order:
    """Runs `run(group)` on the loop's thread between two batches of a model, in its turn.

    `outcome` gets its result or error; `then(group)` runs afterwards. `num_sequences` and `num_tokens` are the order's
    share of the queue while it waits, charged to `client`. `name` is for the log: a failure that is reported to the
    caller is logged under it.
    """

    def __init__(
        self,
        run: Callable[[Executor], Any],
        *,
        client: str = "",
        num_sequences: int = 0,
        num_tokens: int = 0,
        then: Callable[[Executor], None] | None = None,
        name: str = "",
    ) -> None:
        self.client = client
        self.num_sequences = num_sequences
        self.num_tokens = num_tokens
        self.name = name
        self.outcome: Future[Any] = Future()
        self.outcome.set_running_or_notify_cancel()  # what was accepted is done even if the client disconnects
        self.traced = tracing.part()
        self._run: Callable[[Executor], Any] | None = run
        self._then = then

    def execute(self, group: Executor) -> None:
        """Runs it; whatever it raises goes into the outcome. Raises as `check_device`, and then nothing follows."""
        run, then, self._run, self._then = self._run, self._then, None, None  # frees what they hold
        assert run is not None
        traced, self.traced = self.traced, None
        try:
            with contextlib.nullcontext() if traced is None else traced.order(self.num_sequences, self.num_tokens):
                result = run(group)
        except GuerdonError as e:
            if self.name:
                log_unsuccessful(self.name, e)
            self.fail(e)
            check_device(e)
        except BaseException as e:
            failure(log, logging.ERROR, "an order failed", error=e)
            self.fail(ServerFault(describe(e)))
            check_device(e)
        else:
            with contextlib.suppress(InvalidStateError):
                self.outcome.set_result(result)  # for a critic's operation the acknowledgement
        if then is not None:
            try:
                then(group)
            except RanksLost as e:
                log.error("the work after an order was not done: %s", e)
            except BaseException as e:
                failure(log, logging.ERROR, "the work after an order failed", error=e)

    def fail(self, error: GuerdonError) -> None:
        """Sets the error as the outcome if there is none yet; thread-safe."""
        with contextlib.suppress(InvalidStateError):
            self.outcome.set_exception(error)


class HeldBack:
    """The orders that wait for one model, and the jobs behind them. Not thread-safe: its owner holds a lock.

    Jobs before the first order are the scheduler's; `put(job)` releases jobs that no order holds back any more.
    Everything here counts in `room`, an order as at least one sequence.
    """

    def __init__(self, room: Room, put: Callable[[Job], None]) -> None:
        self._room = room
        self._put = put
        self.items: deque[Job | Order] = deque()
        """In order of arrival; it never begins with a job."""

    def add(self, order: Order, *, finds_room: bool = False) -> None:
        """Queues an order behind everything; raises Overloaded if there is no room, unless it `finds_room` anyway."""
        if not finds_room:
            self._room.check(*_size(order))
        self.hold(order)

    def hold(self, item: Job | Order) -> None:
        """Queues an item for which there is room."""
        self.items.append(item)
        self._room.take(*_size(item))

    def drop(self, item: Job | Order) -> bool:
        """Removes an item; returns False if it was not there, as an order that has begun."""
        if item not in self.items:
            return False
        self.items.remove(item)
        self._room.give(*_size(item))
        self._release()
        return True

    def drop_all(self) -> tuple[list[Job], list[Order]]:
        """Removes everything; returns the jobs and the orders."""
        jobs: list[Job] = []
        orders: list[Order] = []
        for item in self.items:
            self._room.give(*_size(item))
            if isinstance(item, Order):
                orders.append(item)
            else:
                item.cancelled = True
                jobs.append(item)
        self.items.clear()
        return jobs, orders

    def take(self) -> Order | None:
        """Takes the first order out and releases the jobs behind it; None if there is none."""
        if not self.items:
            return None
        order = self.items.popleft()
        assert isinstance(order, Order)
        self._room.give(*_size(order))
        self._release()
        return order

    def _release(self) -> None:
        while self.items and not isinstance(job := self.items[0], Order):
            self.items.popleft()
            self._put(job)


def log_unsuccessful(what: str, error: BaseException) -> None:
    """Logs that an operation did not succeed."""
    log.warning("%s: %s: %s", what, type(error).__name__, str(error))


def _size(item: Job | Order) -> tuple[int, int, str]:
    """Returns the sequences, the tokens and the client that count in the room."""
    return max(1, item.num_sequences), item.num_tokens, item.client
