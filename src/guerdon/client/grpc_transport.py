"""Performs the steps of a call over gRPC: KServe v2 by the stub and the messages of tritonclient.

tritonclient's own client drops the metadata that we need: an error's class, Retry-After and steps, a reply's times.
"""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from guerdon import errors
from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.retry import Configure, Describe, Exchange, FetchHead, Infer, InferResult, Ready, RetryPolicy
from guerdon.client.statuses import CERTIFICATE_HINT, stated, stated_error, tls_failure
from guerdon.wire import kserve_grpc

_NO_CONNECTION = ("failed to connect", "DNS resolution failed")
"""In grpcio's details if it had no connection to send the request over."""
_BROKEN = (
    *_NO_CONNECTION, "Socket closed", "Connection refused", "Connection reset", "Broken pipe", "GOAWAY", "recvmsg",
    "Stream removed", "Channel closed",
)  # fmt: skip
"""In grpcio's details if it had no connection or lost one; a server's own UNAVAILABLE has other details."""

_TLS_ERRORS = (
    "CERTIFICATE_VERIFY_FAILED",
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "WRONG_VERSION_NUMBER",
    "Verification Check failed",
)
"""In grpcio's details if TLS refuses a connection, and would refuse it again."""


@dataclass(frozen=True, slots=True)
class GrpcExchange:
    """One step's request to a server, and the meaning of the reply; no I/O."""

    step: Exchange

    @property
    def url(self) -> str:
        return self.step.endpoint.url

    @property
    def method(self) -> str:
        """The name of the service's method."""
        names = {Ready: "ModelReady", Describe: "ModelMetadata", Configure: "ModelConfig", Infer: "ModelInfer"}
        return names[type(self.step)]

    def request(self) -> Any:
        """Returns the message to send."""
        match self.step:
            case Ready():
                return pb.ModelReadyRequest(name=self.step.model)
            case Describe():
                return pb.ModelMetadataRequest(name=self.step.model)
            case Configure():
                return pb.ModelConfigRequest(name=self.step.model)
            case Infer(request=request):
                return kserve_grpc.encode_request(request, self.step.model)

    def metadata(self, own: tuple[tuple[str, str], ...]) -> tuple[tuple[str, str], ...]:
        """Returns the metadata to send: the connection's `own`, and the trace's."""
        return (*own, *self.step.trace) if isinstance(self.step, Infer) else own

    def result(self, message: Any, metadata: Mapping[str, Any]) -> Any:
        """Returns the step's result, from the reply's message and metadata."""
        match self.step:
            case Ready():
                if not message.ready:
                    raise errors.Unavailable(f"model '{self.step.model}' at {self.url} is not ready")
                return None
            case Describe():
                return ModelSignature(
                    name=message.name,
                    versions=tuple(message.versions),
                    platform=message.platform,
                    inputs={tensor.name: tensor.datatype for tensor in message.inputs},
                    outputs={tensor.name: tensor.datatype for tensor in message.outputs},
                )
            case Configure():
                return json_format.MessageToDict(message.config, preserving_proto_field_name=True)
            case Infer():
                try:
                    reply = kserve_grpc.decode_reply(message)
                except errors.InvalidRequest as e:
                    raise errors.ServerFault(f"{self.url} sent a malformed reply: {e}") from e
                return InferResult(
                    reply,
                    queue_s=(stated(metadata, "guerdon-queue-ms") or 0.0) / 1e3,
                    compute_s=(stated(metadata, "guerdon-compute-ms") or 0.0) / 1e3,
                )

    def failure(self, error: Any) -> errors.GuerdonError:
        """Returns the error of an exchange that ended in a status."""
        code, details, step = error.code().name, error.details() or "", self.step
        check = "is the server running there? Check host and port (http://host:port for an HTTP port, grpcs:// for TLS)"
        if code == "UNAVAILABLE" and any(text in details for text in _TLS_ERRORS):
            return tls_failure(self.url, details)
        if code == "UNAVAILABLE" and any(text in details for text in _BROKEN):
            is_sent = not any(text in details for text in _NO_CONNECTION)
            if step.endpoint.seen:
                message = f"the connection to {self.url} broke before the answer: {details}"
            else:
                message = f"cannot connect to {self.url}: {details}; {check}"
                if self.url.startswith("grpcs://"):
                    message += CERTIFICATE_HINT
            return errors.Unreachable(message, may_have_arrived=is_sent)
        if code == "DEADLINE_EXCEEDED" and not isinstance(step, Infer):
            return errors.Unreachable(f"no sign of life from {self.url} within {step.timeout_s:.3g} s; {check}")
        if code == "DEADLINE_EXCEEDED" and details in ("", "Deadline Exceeded"):
            return errors.DeadlineExceeded(
                f"no answer from {self.url} within {step.timeout_s:.3g} s; raise timeout_s to wait longer"
            )
        return stated_error(code, details, dict(error.trailing_metadata() or ()), self.url)


class GrpcTransport:
    """Performs steps over one channel, which opens at the first step, within one event loop.

    The channel is grpcio's, not `grpc.aio`'s, whose thread is always at work once it is open: grpcio's survives a fork
    while no call is under way. After any other fork the child's calls would hang, or break the parent's, so they raise
    GuerdonError.
    """

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        """Raises ConfigError if a file of the credentials cannot be read, GuerdonError after a fork as above."""
        _check_fork()
        authorization = address.credentials.authorization
        self._target, self._options = address.netloc, _options(policy)
        self._metadata = () if authorization is None else (("authorization", authorization),)
        self._files = address.credentials.read() if address.has_tls else None
        self._channel: grpc.Channel | None = None
        self._stub: Any = None
        self._lock = threading.Lock()  # of the channel: `perform_here` is for any thread
        self._is_closed = False
        self.exchanges: set[object] = set()
        _TRANSPORTS.add(self)

    async def perform(self, step: Exchange) -> Any:
        """Returns the step's result; raises its GuerdonError."""
        if isinstance(step, FetchHead):
            raise errors.Unsupported("a head is a file, which is fetched over HTTP only: give the server's http:// URL")
        exchange, loop = GrpcExchange(step), asyncio.get_running_loop()
        ended = loop.create_future()

        def wake(_: Any) -> None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(lambda: None if ended.done() else ended.set_result(None))

        with self._count_exchange():
            rpc = getattr(self._open_stub(), exchange.method).future(
                exchange.request(), timeout=step.timeout_s, metadata=exchange.metadata(self._metadata)
            )
            rpc.add_done_callback(wake)
            try:
                await ended
            finally:
                rpc.cancel()  # no-op unless this task was cancelled
        if rpc.code() is not grpc.StatusCode.OK:
            raise exchange.failure(rpc)
        return exchange.result(rpc.result(), dict((*rpc.initial_metadata(), *rpc.trailing_metadata())))

    def perform_here(self, step: Infer) -> Any:
        """Returns what `perform` returns, but blocks; for any thread."""
        exchange = GrpcExchange(step)
        with self._count_exchange():
            try:
                message, rpc = getattr(self._open_stub(), exchange.method).with_call(
                    exchange.request(), timeout=step.timeout_s, metadata=exchange.metadata(self._metadata)
                )
            except grpc.RpcError as e:
                raise exchange.failure(e) from e
        return exchange.result(message, dict((*rpc.initial_metadata(), *rpc.trailing_metadata())))

    async def close(self) -> None:
        """Closes the channel; calls in progress end with Cancelled."""
        with self._lock:
            channel, self._channel, self._is_closed = self._channel, None, True
        if channel is not None:
            channel.close()

    @contextmanager
    def _count_exchange(self) -> Iterator[None]:
        _check_fork()
        exchange = object()
        self.exchanges.add(exchange)
        try:
            yield
        finally:
            self.exchanges.discard(exchange)

    def _open_stub(self) -> Any:
        with self._lock:
            if self._is_closed:
                raise errors.Cancelled("the client is closed")
            if self._channel is None:
                if self._files is None:
                    self._channel = grpc.insecure_channel(self._target, options=self._options)
                else:
                    credentials = grpc.ssl_channel_credentials(*self._files)
                    self._channel = grpc.secure_channel(self._target, credentials, options=self._options)
                self._stub = GRPCInferenceServiceStub(self._channel)
            return self._stub


_TRANSPORTS: weakref.WeakSet[GrpcTransport] = weakref.WeakSet()
_was_busy_at_fork = False


def _mark_fork() -> None:
    global _was_busy_at_fork
    _was_busy_at_fork = _was_busy_at_fork or any(transport.exchanges for transport in _TRANSPORTS)


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_mark_fork)


def _check_fork() -> None:
    if _was_busy_at_fork:
        raise errors.GuerdonError(
            "this process was forked while gRPC was at work, which gRPC does not survive: fork while no call is under "
            "way, give an http:// URL, or start processes by spawn"
        )


def _options(policy: RetryPolicy) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # Retries are ours; grpcio's own backoff between reconnections grows to two minutes.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", max(100, int(policy.connect_timeout_s * 1e3))),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Separate connections: a process's shared ones do not work in its forks.
        ("grpc.use_local_subchannel_pool", 1),
        # Notices a dead host; servers refuse pings more often than every five minutes.
        ("grpc.keepalive_time_ms", 330_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]
