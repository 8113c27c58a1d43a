"""The steps of a call over gRPC: KServe v2 in tritonclient's messages, by grpcio."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.retry import Configure, Describe, Infer, InferResult, Ready, RetryPolicy
from guerdon.client.statuses import WITHOUT_CERTIFICATE, error_of, untrusted, with_way_in
from guerdon.errors import (
    Cancelled,
    DeadlineExceeded,
    GuerdonError,
    InvalidRequest,
    ServerFault,
    Unavailable,
    Unreachable,
)
from guerdon.wire import kserve_grpc

_NO_CONNECTION = ("failed to connect", "DNS resolution failed")
"""What grpcio says where it had no connection to send the request by."""
_BROKEN = (
    *_NO_CONNECTION, "Socket closed", "Connection refused", "Connection reset", "Broken pipe", "GOAWAY", "recvmsg",
    "Stream removed", "Channel closed",
)  # fmt: skip
"""What it says there and where it lost one; a server's own UNAVAILABLE says other things."""


_UNTRUSTED = (
    "CERTIFICATE_VERIFY_FAILED",
    "CERTIFICATE_REQUIRED",
    "UNKNOWN_CA",
    "WRONG_VERSION_NUMBER",
    "Verification Check failed",
)
"""In what it says where TLS refuses a connection, and will refuse it again."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One gRPC exchange with a server: what is sent for a step, and what its answer means."""

    step: Ready | Describe | Configure | Infer

    @property
    def url(self) -> str:
        return self.step.endpoint.url

    def method(self) -> str:
        names = {Ready: "ModelReady", Describe: "ModelMetadata", Configure: "ModelConfig", Infer: "ModelInfer"}
        return names[type(self.step)]

    def request(self) -> Any:
        """The message to send."""
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
        """What is sent beside the message: the connection's `own`, and the trace's."""
        return (*own, *self.step.trace) if isinstance(self.step, Infer) else own

    def result(self, message: Any, metadata: Iterable[tuple[str, str | bytes]]) -> Any:
        """What the step asked for, from the reply's message and metadata."""
        match self.step:
            case Ready():
                if not message.ready:
                    raise Unavailable(f"model '{self.step.model}' at {self.url} is not ready")
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
                except InvalidRequest as e:
                    raise ServerFault(f"{self.url} sent a malformed reply: {e}") from e
                return InferResult(
                    reply,
                    queue_s=(_number(metadata, "guerdon-queue-ms") or 0.0) / 1e3,
                    compute_s=(_number(metadata, "guerdon-compute-ms") or 0.0) / 1e3,
                )

    def failure(self, error: Any) -> GuerdonError:
        """The error of an exchange that ended in a status."""
        code, details, step = error.code().name, error.details() or "", self.step
        check = "is the server running there? Check host and port (http://host:port for an HTTP port, grpcs:// for TLS)"
        if code == "UNAVAILABLE" and any(text in details for text in _UNTRUSTED):
            return untrusted(self.url, details)
        if code == "UNAVAILABLE" and any(text in details for text in _BROKEN):
            is_sent = not any(text in details for text in _NO_CONNECTION)
            if step.endpoint.seen:
                message = f"the connection to {self.url} broke before the answer: {details}"
            else:
                message = f"cannot connect to {self.url}: {details}; {check}"
                if self.url.startswith("grpcs://"):
                    message += WITHOUT_CERTIFICATE
            return Unreachable(message, may_have_arrived=is_sent)
        if code == "DEADLINE_EXCEEDED" and not isinstance(step, Infer):
            return Unreachable(f"no sign of life from {self.url} within {step.timeout_s:.3g} s; {check}")
        if code == "DEADLINE_EXCEEDED" and details in ("", "Deadline Exceeded"):
            return DeadlineExceeded(
                f"no answer from {self.url} within {step.timeout_s:.3g} s; raise timeout_s to wait longer"
            )
        trailing = error.trailing_metadata() or ()
        kind = next((value for key, value in trailing if key == "guerdon-error"), None)
        told = error_of(code, details, _number(trailing, "retry-after"), kind, _number(trailing, "guerdon-num-steps"))
        return with_way_in(told, self.url)


class GrpcTransport:
    """Performs steps over one channel; thread-safe."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        """Raises ConfigError where a file of the credentials cannot be read, GuerdonError as `_Channel` does."""
        self._channel = _Channel(grpc, address, policy)
        self._metadata = _metadata(address)

    def perform(self, step: Ready | Describe | Configure | Infer) -> Any:
        """The step's result; raises its GuerdonError."""
        exchange = Exchange(step)
        metadata = exchange.metadata(self._metadata)
        with self._channel.stub() as stub:
            try:
                method = getattr(stub, exchange.method())
                message, rpc = method.with_call(exchange.request(), timeout=step.timeout_s, metadata=metadata)
            except grpc.RpcError as e:
                raise exchange.failure(e) from e
        return exchange.result(message, (*rpc.initial_metadata(), *rpc.trailing_metadata()))

    def close(self) -> None:
        if (opened := self._channel.end()) is not None:
            opened.close()


class AsyncGrpcTransport:
    """Performs steps over one channel, within one event loop."""

    def __init__(self, address: Address, policy: RetryPolicy) -> None:
        """Raises what `GrpcTransport` does."""
        self._channel = _Channel(grpc.aio, address, policy)
        self._metadata = _metadata(address)

    async def perform(self, step: Ready | Describe | Configure | Infer) -> Any:
        """The step's result; raises its GuerdonError."""
        exchange = Exchange(step)
        metadata = exchange.metadata(self._metadata)
        with self._channel.stub() as stub:
            rpc = getattr(stub, exchange.method())(exchange.request(), timeout=step.timeout_s, metadata=metadata)
            try:
                message = await rpc
            except grpc.RpcError as e:
                raise exchange.failure(e) from e
            return exchange.result(message, (*await rpc.initial_metadata(), *await rpc.trailing_metadata()))

    async def close(self) -> None:
        if (opened := self._channel.end()) is not None:
            await opened.close()


class _Channel:
    """A channel of `library`, grpc or grpc.aio, opened at its first use; thread-safe.

    gRPC mends itself in a fork where no thread was at work in it. After any other this raises GuerdonError there:
    calls would hang, or break those of the parent.
    """

    def __init__(self, library: Any, address: Address, policy: RetryPolicy) -> None:
        _check_fork()
        self._library, self._target, self._options = library, address.netloc, _options(policy)
        self._files = address.credentials.read() if address.has_tls else None
        self._lock = threading.Lock()
        self._num_exchanges = 0
        self._opened: Any = None
        self._stub: Any = None
        self._is_ended = False
        _CHANNELS.add(self)

    @property
    def is_at_work(self) -> bool:
        """Whether a thread is in gRPC: one that waits for an answer, or that which waits for all of an event loop's."""
        return self._num_exchanges > 0 or (self._library is grpc.aio and self._opened is not None)

    @contextmanager
    def stub(self) -> Iterator[Any]:
        """The methods of the service, for one exchange; raises Cancelled after `end`."""
        _check_fork()
        with self._lock:
            if self._is_ended:
                raise Cancelled("the client is closed")
            if self._opened is None:
                self._opened = self._open()
                self._stub = GRPCInferenceServiceStub(self._opened)
            stub = self._stub
            self._num_exchanges += 1
        try:
            yield stub
        finally:
            with self._lock:
                self._num_exchanges -= 1

    def end(self) -> Any:
        """What there is to close, None where nothing was opened; nothing more is opened."""
        with self._lock:
            opened, self._opened, self._stub, self._is_ended = self._opened, None, None, True
            return opened

    def _open(self) -> Any:
        if self._files is None:
            return self._library.insecure_channel(self._target, options=self._options)
        credentials = grpc.ssl_channel_credentials(*self._files)
        return self._library.secure_channel(self._target, credentials, options=self._options)


_CHANNELS: weakref.WeakSet[_Channel] = weakref.WeakSet()
_is_torn = False
"""Whether this process was forked from one in which gRPC was at work."""


def _forked() -> None:
    global _is_torn
    _is_torn = _is_torn or any(channel.is_at_work for channel in _CHANNELS)


if hasattr(os, "register_at_fork"):  # where there are forks
    os.register_at_fork(after_in_child=_forked)


def _check_fork() -> None:
    if _is_torn:
        raise GuerdonError(
            "this process was forked while gRPC was at work, which gRPC does not survive: fork while no call is under "
            "way and no async client is open, give an http:// URL, or start processes by spawn"
        )


def _metadata(address: Address) -> tuple[tuple[str, str], ...]:
    authorization = address.credentials.authorization
    return () if authorization is None else (("authorization", authorization),)


def _options(policy: RetryPolicy) -> list[tuple[str, int]]:
    return [
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", -1),
        # Retries are ours, and grpcio's own pauses between reconnections grow to two minutes.
        ("grpc.enable_retries", 0),
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.min_reconnect_backoff_ms", max(100, int(policy.connect_timeout_s * 1e3))),
        ("grpc.max_reconnect_backoff_ms", 1000),
        # Connections of its own: those that a process shares by default are of no use in a fork of it.
        ("grpc.use_local_subchannel_pool", 1),
        # A host that is gone is noticed; servers refuse pings that come more often than every five minutes.
        ("grpc.keepalive_time_ms", 330_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def _number(metadata: Iterable[tuple[str, str | bytes]], name: str) -> float | None:
    for key, value in metadata:
        if key == name:
            return float(value)
    return None
