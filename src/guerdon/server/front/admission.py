"""Admission: takes every request through the same steps, whichever transport it comes by.

Who asks, for which model, in which role, whether there is room, then read, decode, score, encode. A transport describes
a request as an `Exchange`; a `Visit` takes it through the steps.
"""

from __future__ import annotations

import asyncio
import functools
import threading
import time
from collections.abc import Callable, Collection, Coroutine
from typing import Any, Protocol, TypeVar

from guerdon.core import ModelInfo, ScoreReply, Sequence
from guerdon.critic_core import OperationInfo
from guerdon.errors import GuerdonError, Overloaded, Unauthenticated, UnknownModel
from guerdon.memory import trim
from guerdon.server import tracing
from guerdon.server.auth import Caller
from guerdon.server.batching.sharing import Shares
from guerdon.server.metrics import UNKNOWN
from guerdon.server.reading import INLINE_BYTES, Workers
from guerdon.server.service import Service
from guerdon.settings.access import Role
from guerdon.settings.config import LimitsConfig
from guerdon.wire import schema
from guerdon.wire.schema import Info
from guerdon.wire.tensors import InferRequest

T = TypeVar("T")
ReplyT = TypeVar("ReplyT", covariant=True)

RETRY_AFTER_S = 1.0

_NUMBER_BYTES = 4

_TRIMMED_BYTES = 64 << 20
_TRIMMED_AFTER_S = 1.0
"""So long after so many bytes are given back, free memory is returned: by then nothing refers to them any longer."""
_LARGE_BYTES = 1 << 20
_IDLE_S = 10.0
"""So long after the last large body, too, since the text of an answer may be many times its tensors."""

Decoder = Callable[[Info], tuple[InferRequest | None, Any]]
"""Returns the tensors and the model's request, each None if absent."""


class Exchange(Protocol[ReplyT]):
    """One request and its reply in the terms of a protocol and a transport.

    Once it is read, `num_bytes` is about the size of what its decoder has to work on, and `num_tables` is how many
    tables its reply makes of the answer's arrays.
    """

    caller: Caller
    num_bytes: int
    num_tables: int

    async def read(self, visit: Visit) -> Info:
        """Reads the request within the visit's room, and finds the model that it asks for."""
        ...

    def take_decoder(self) -> Decoder:
        """Returns the function that decodes the body, and releases the bytes."""
        ...

    async def encode(self, answer: Any, info: Info) -> ReplyT:
        """Returns the reply."""
        ...


def _trim_after(delay_s: float) -> threading.Timer:
    timer = threading.Timer(delay_s, trim)
    timer.daemon = True
    timer.start()
    return timer


class Gate:
    """Counts requests in progress, and the bytes of their bodies, over all transports, and bounds both.

    `clients` are the keys' holders; once room runs out they share it evenly.
    """

    def __init__(self, config: LimitsConfig, clients: Collection[str] = (), codec: Workers | None = None) -> None:
        self.codec = codec or Workers("codec")
        # One body always fits; if clients have parts of their own, into the common half.
        least_mb = config.max_body_mb * (2 if len(clients) > 1 else 1)
        self.requests = Shares(config.max_requests, clients)
        self.bytes = Shares(max(config.max_bodies_mb, least_mb) << 20, clients)
        self.max_body_bytes = config.max_body_mb << 20
        self._num_given = 0
        self._when_idle: threading.Timer | None = None

    def give_bytes(self, client: str, num_bytes: int) -> None:
        """Counts these bytes as held no longer; after many, and after the last, free memory goes back to the system."""
        self.bytes.give(client, num_bytes)
        self._num_given += num_bytes
        if self._num_given >= _TRIMMED_BYTES:
            self._num_given = 0
            _trim_after(_TRIMMED_AFTER_S)
        elif num_bytes >= _LARGE_BYTES:
            if self._when_idle is not None:
                self._when_idle.cancel()
            self._when_idle = _trim_after(_IDLE_S)


class Place:
    """One request's reservation; a context that releases it."""

    def __init__(self, gate: Gate, client: str = "") -> None:
        self._gate = gate
        self._client = client
        self._num_bytes = 0
        self._has_entered = False

    def check_room(self) -> None:
        """Raises Overloaded if the client may have no more requests in progress."""
        requests = self._gate.requests
        if not requests.has_room(self._client, 1):
            raise Overloaded(
                f"{requests.total} requests are in progress, which is the limit{_share(requests, self._client)}; "
                "try again",
                RETRY_AFTER_S,
            )

    def take(self) -> None:
        """Counts the request as in progress; raises Overloaded if there is no room."""
        self.check_room()
        self._gate.requests.take(self._client, 1)
        self._has_entered = True

    def reach(self, num_bytes: int) -> None:
        """Holds at least so many bytes, but never more than one body may have, which always fits."""
        if (num_bytes := min(num_bytes, self._gate.max_body_bytes)) > self._num_bytes:
            self.hold(num_bytes)

    def hold(self, num_bytes: int) -> None:
        """Sets the number of bytes that the request holds; raises Overloaded if there is no room for them."""
        more, total = num_bytes - self._num_bytes, self._gate.bytes
        if more > 0 and not total.has_room(self._client, more):
            raise Overloaded(
                f"the bodies and answers of the requests in progress would exceed {total.total >> 20} MiB"
                f"{_share(total, self._client)}; try again",
                RETRY_AFTER_S,
            )
        total.take(self._client, more)
        self._num_bytes = num_bytes

    async def run(self, work: Callable[[], T], num_bytes: int, inline_bytes: int = INLINE_BYTES) -> T:
        """Runs `work` on about so many bytes, in a thread if they are many."""
        return await self._gate.codec.run_if(num_bytes > inline_bytes, self._client, work)

    def leave(self) -> None:
        """Counts the request as in progress no longer; it still holds its bytes."""
        if self._has_entered:
            self._gate.requests.give(self._client, 1)
            self._has_entered = False

    def release(self) -> None:
        """Gives the bytes back."""
        self._gate.give_bytes(self._client, self._num_bytes)
        self._num_bytes = 0

    def __enter__(self) -> Place:
        self.take()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.leave()
        self.release()


class Visit(Place):
    """One request in the server; a context that counts its outcome, and releases its reservation."""

    def __init__(self, admission: Admission, caller: Caller) -> None:
        super().__init__(admission.gate, caller.name)
        self.label = UNKNOWN
        """The model that the request is counted under."""
        self.tensors: InferRequest | None = None
        """The decoded tensors, which say how to encode the reply."""
        self._service = admission.service
        self._names = admission.names
        self._caller = caller
        self._asked_name = ""
        self._model = ""
        self._body_bytes: int | None = None
        """The size of its body; None until it has entered."""
        self._is_read = self._is_operation = False
        self._num_tables = 0
        self._keeps_bytes = False

    async def admit(self, exchange: Exchange[Any]) -> tuple[Info, Any]:
        """Reads and decodes the request; returns the model and its request, for `ask`.

        A critic's request is not decoded: the critic calls `read` in its turn.
        """
        info = await exchange.read(self)
        self._is_read, self._num_tables = True, exchange.num_tables
        decode, num_bytes = functools.partial(exchange.take_decoder(), info), exchange.num_bytes
        if self._is_operation:
            self._unread = decode, num_bytes
            return info, self
        self.tensors, request = decode() if num_bytes <= INLINE_BYTES else await self.run(decode, num_bytes)
        return info, request

    async def read(self) -> Any:
        """Decodes a critic's request, once; raises InvalidRequest."""
        decode, num_bytes = self._unread
        del self._unread  # with the bytes
        self.tensors, request = decode() if num_bytes <= INLINE_BYTES else await self.run(decode, num_bytes)
        assert self.tensors is not None
        self.tensors.inputs = {}  # it may wait for long: the request alone holds the arrays
        return request

    def ask(self, info: Info, request: Any) -> Coroutine[Any, Any, Any]:
        """Returns the coroutine that answers the request."""
        if request is self:
            return self._service.call(info.name, request, self._client)
        if request is None:
            return _nothing(info)
        return self._service.score(info.name, request, self._client, hold=self._hold_answer)

    def enter(self, num_bytes: int) -> None:
        """Counts the request as in progress if it is not yet; `num_bytes` is the size of its body, 0 if unknown.

        Raises Overloaded, and Unavailable if the server is not ready.
        """
        if not self._has_entered:
            self.take()
        self._service.check_ready()
        self._body_bytes = num_bytes
        if self._model:
            self._service.check_room(self._model, self._client, num_bytes)

    def find(self, name: str, version: str = "") -> Info:
        """Finds the model or operation of that name; raises UnknownModel, Forbidden if the role does not allow it."""
        self._asked_name = name
        self.count_as(name if name in self._names else UNKNOWN)
        info = self._service.catalog.model(name, version)
        self._is_operation = isinstance(info, OperationInfo)
        if self._is_operation:
            self._caller.need(Role.TRAIN, info.name)
        else:
            self._model = name
            if self._body_bytes is not None:
                self._service.check_room(self._model, self._client, self._body_bytes)
        return info

    def find_scorer(self, name: str, output: str = schema.REWARDS.name, *, has_samples: bool = True) -> ModelInfo:
        """Finds the model of that name, of that checkpoint, or the default one; raises UnknownModel."""
        info = self._service.catalog.scored_by(name, output)
        self.count_as(info.name)
        if has_samples:
            self._model = info.name
            if self._body_bytes is not None:
                self._service.check_room(self._model, self._client, self._body_bytes)
        return info

    def check_time(self, num_bytes: int, timeout_s: float | None) -> None:
        """Raises Overloaded if the request, of which only `timeout_s` is read, would be late behind the queue."""
        allowed_s = timeout_s or self._service.timeout_s
        if self._model and allowed_s and self._service.critic is None:  # whose requests wait for training, too
            left_s = allowed_s - (time.monotonic() - self._started)
            self._service.check_room(self._model, self._client, num_bytes, left_s)

    def count_as(self, label: str) -> None:
        """Counts and traces the request under this model from now on."""
        self.label = label
        tracing.tell(model=label)

    def _hold_answer(self, sequences: list[Sequence], info: ModelInfo) -> None:
        """Holds the answer's bytes, before it is made; one that is larger than all room may be made alone."""
        if info.is_by_token:  # else each answer has only a few numbers
            rows = [_NUMBER_BYTES * s.num_tokens if s.ask is None else s.ask.array_bytes for s in sequences]
            # Tables are made of them besides, whose rows are as long as the longest.
            num_bytes = sum(rows) + self._num_tables * len(rows) * max(rows, default=0)
            self.hold(min(self._num_bytes + num_bytes, self._gate.bytes.most(self._client)))

    def keep_bytes(self) -> None:
        """Has the bytes held until `release`, beyond the end of this context."""
        self._keeps_bytes = True

    def __enter__(self) -> Visit:
        self._started = time.monotonic()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        self.leave()
        if kind is not None or not self._keeps_bytes:
            self.release()
        service = self._service
        if isinstance(error, GuerdonError | asyncio.CancelledError) and not self._is_read:
            operation = service.catalog.operations.get(self._asked_name)
            if operation is not None and service.critic is not None:
                service.critic.count_refused(operation.operation, error)
        service.metrics.request_done(self.label, time.monotonic() - self._started, kind)


class Admission:
    """The one way in: all transports of a server share it."""

    def __init__(self, service: Service, config: LimitsConfig) -> None:
        self.service = service
        self.gate = Gate(config, service.access.names, service.codec)
        self.names = frozenset(service.catalog.names())

    @property
    def num_requests(self) -> int:
        """How many requests are in progress."""
        return self.gate.requests.taken

    def identify(self, authorization: bytes | str | None, token: bytes | str | None) -> Caller:
        """Returns whose key this is; raises Unauthenticated, which is counted."""
        try:
            return self.service.access.caller(authorization, token)
        except Unauthenticated as e:
            self.service.metrics.client_request_done(UNKNOWN, type(e))
            raise

    def label(self, name: str, output: str = schema.REWARDS.name) -> str:
        """Returns the model that a form's request is counted under, which names its model so."""
        try:
            return self.service.catalog.scored_by(name, output).name
        except UnknownModel:
            return UNKNOWN


async def _nothing(info: Any) -> ScoreReply:
    """Answers a form's request without samples."""
    return ScoreReply([], [], info.weights_version)


def _share(of: Shares, client: str) -> str:
    """Returns an error's addition if the free room belongs to other clients."""
    return f", or {client}'s share of it" if of.taken < of.total and client else ""
