"""gRPC: KServe v2's service over the same data plane as HTTP's."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from guerdon.core import ModelInfo, OperationInfo, ScoreReply
from guerdon.errors import (
    GuerdonError,
    InvalidRequest,
    ServerFault,
    StartError,
    TrainFailed,
    Unauthenticated,
    UnknownModel,
)
from guerdon.server import status, tracing
from guerdon.server.aside import answer_bytes, off_loop
from guerdon.server.auth import ANYBODY, PYTRITONS_METADATA, Caller
from guerdon.server.front import tls
from guerdon.server.front.body import Coming
from guerdon.server.front.gate import Gate, Place
from guerdon.server.front.grpc_stream import Read, answer_stream, message_span, refusal, response
from guerdon.server.front.receiving import Receiving
from guerdon.server.front.request_spans import with_span
from guerdon.server.front.unread import end_unread
from guerdon.server.logs import failure, without_frames
from guerdon.server.metrics import UNKNOWN
from guerdon.server.service import Service
from guerdon.settings.access import Role
from guerdon.settings.config import LimitsConfig, ServerConfig
from guerdon.wire import kserve_grpc, operations, repository, signature
from guerdon.wire.kserve import InferRequest
from guerdon.wire.operations import Answer, Asked

logger = logging.getLogger("guerdon.grpc")

SERVICE = "inference.GRPCInferenceService"

_HEADROOM_BYTES = 65_536
_SPARE_STREAMS = 100
_MOST_SMALL_BYTES = 1 << 20
_PING_AFTER_MS = 60_000
_PING_ANSWER_MS = 60_000
_MOST_BUFFERED_BYTES = 65_536  # of an answer, which gRPC takes without waiting for its reader
_LEAST_BYTES_PER_S = 1 << 16
_MOST_TEXT_BYTES = 2000  # each of which may travel as three
_MOST_BYTES = 2**31 - 1  # what gRPC can count


def server(service: Service, config: ServerConfig, gate: Gate | None = None) -> tuple[grpc.aio.Server, int]:
    """A bound, not yet started gRPC server and its port.

    Raises StartError where the port cannot be had, ConfigError where the files of TLS are not what they say.
    """
    address = f"[{config.host}]" if ":" in config.host else config.host
    grpc_server = grpc.aio.server(options=_options(config))
    front = _Front(service, config, gate or Gate(config, service.access.names))
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, front.handlers()),))
    credentials = _credentials(config)
    try:
        if credentials is None:
            port = grpc_server.add_insecure_port(f"{address}:{config.grpc_port}")
        else:
            port = grpc_server.add_secure_port(f"{address}:{config.grpc_port}", credentials)
    except RuntimeError as e:
        raise StartError(
            f"cannot listen for gRPC on {address}:{config.grpc_port}: in use, or not an address of this machine",
            "stop what uses the port, choose another with --grpc-port, or turn gRPC off with --no-grpc",
        ) from e
    return grpc_server, port


def _options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """gRPC's settings: what a connection and a message may be, and when a connection ends."""
    return (
        # The default of 4 MiB is less than what clients send; the default of sharing ports hides a second server.
        ("grpc.max_receive_message_length", min((config.max_body_mb << 20) + _HEADROOM_BYTES, _MOST_BYTES)),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        # Beyond the gate's number, so that a call too many is refused and does not wait in its client.
        ("grpc.max_concurrent_streams", config.max_requests + _SPARE_STREAMS),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.server_handshake_timeout_ms", math.ceil(config.header_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", math.ceil(config.idle_timeout_s * 1000)),
        # A host that has vanished, or a client that reads nothing of its connection, is noticed by unanswered pings.
        ("grpc.keepalive_time_ms", _PING_AFTER_MS),
        ("grpc.http2.ping_timeout_ms", _PING_ANSWER_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Before its turn a message may fill its stream's window, which would otherwise grow with the connection.
        ("grpc.http2.bdp_probe", 0),
    )


def _credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    tls.context(config)  # which says what is wrong
    pems = tls.pems(config)
    if pems is None:
        return None
    key, cert, authority = pems
    return grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=authority is not None)


class _Call:
    """One call: who makes it, and its message, of which nothing is read before `message` asks for it."""

    __slots__ = ("_limits", "_receiving", "caller", "context", "request_id")

    def __init__(
        self, context: grpc.aio.ServicerContext, caller: Caller, receiving: Receiving, limits: LimitsConfig
    ) -> None:
        self.context = context
        self.caller = caller
        self.request_id = ""
        self._receiving = receiving
        self._limits = limits

    async def message(self) -> bytes:
        """The message's bytes."""
        timeout_s = min(self._limits.read_timeout_s, self._limits.request_timeout_s)
        return await self._receiving.message(self.context, self.caller.name, timeout_s)

    async def parsed(self, kind: Any) -> Any:
        """The message, of a method whose messages are small; raises InvalidRequest."""
        data = await self._receiving.message(self.context, self.caller.name, self._limits.header_timeout_s)
        if len(data) > _MOST_SMALL_BYTES:
            raise InvalidRequest(f"the message has {len(data)} bytes; this method takes at most {_MOST_SMALL_BYTES}")
        try:
            return kind.FromString(data)
        except DecodeError as e:
            raise InvalidRequest(f"the message is not a {kind.DESCRIPTOR.name}: {e}") from e


Method = Callable[[_Call], Awaitable[Any]]


class _Front:
    """The methods of the service; those that the protocol has beyond these answer UNIMPLEMENTED.

    Each reads its one message by itself, as a stream's only one, which is the same on the wire: so that it is not read
    before its sender's key was seen, nor while too many others are.
    """

    def __init__(self, service: Service, config: ServerConfig, gate: Gate) -> None:
        self._service = service
        self._gate = gate
        self._limits = config
        self._receiving = Receiving(config, service.access.names)
        self._names = {info.name for info in service.catalog.models()}

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        is_open = {self.ServerLive: True, self.ServerReady: True}
        methods: tuple[Method, ...] = (
            *is_open,
            self.ModelReady,
            self.ServerMetadata,
            self.ModelMetadata,
            self.ModelConfig,
            self.ModelStatistics,
            self.ModelInfer,
            self.RepositoryIndex,
            self.RepositoryModelLoad,
            self.RepositoryModelUnload,
        )
        handlers = {
            method.__name__: grpc.stream_unary_rpc_method_handler(
                self._answering(method, method in is_open, False), None, _serialised
            )
            for method in methods
        }
        streaming = self._answering(self.ModelStreamInfer, False, True)
        handlers["ModelStreamInfer"] = grpc.stream_stream_rpc_method_handler(streaming, None, _serialised)
        return handlers

    def _answering(self, method: Method, is_open: bool, is_stream: bool) -> Callable[[Any, Any], Awaitable[Any]]:
        """`method` for callers with a key, where it is not open to all; what it raises is told in gRPC's way.

        A stream's requests are counted one by one, by the method itself.
        """
        service = self._service

        async def answer(_: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                if is_open:
                    return await method(_Call(context, ANYBODY, self._receiving, self._limits))
                sent = dict(context.invocation_metadata())
                try:
                    caller = service.access.caller(sent.get("authorization"), sent.get(PYTRITONS_METADATA))
                except Unauthenticated as e:
                    service.metrics.asked(UNKNOWN, type(e))
                    raise
                counting = contextlib.nullcontext() if is_stream else service.metrics.client(caller.name)
                with counting:
                    return await method(_Call(context, caller, self._receiving, self._limits))
            except Exception as e:
                error = _to_error(method.__name__, e)
            tracing.failed(error)
            trailing = [("guerdon-error", type(error).__name__)]
            if error.retry_after_s is not None:
                trailing.append(("retry-after", str(math.ceil(error.retry_after_s))))
            if isinstance(error, TrainFailed):
                trailing.append(("guerdon-num-steps", str(error.num_steps)))
            await context.abort(grpc.StatusCode[error.grpc], _cut(str(error)), tuple(trailing))
            raise error  # abort has raised already

        if service.traces is None:
            return answer

        def knows(sent: Mapping[str, Any]) -> bool:
            return service.access.knows(sent.get("authorization"), sent.get(PYTRITONS_METADATA))

        return with_span(answer, service.traces, SERVICE, method.__name__, knows)

    async def ServerLive(self, _: _Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: _Call) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.is_ready())

    async def ModelReady(self, call: _Call) -> pb.ModelReadyResponse:
        request = await call.parsed(pb.ModelReadyRequest)
        try:
            self._service.catalog.model(request.name, request.version)
        except UnknownModel:  # an answer, not an error: so Triton has it, and its clients count on it
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._service.is_ready(request.name))

    async def ServerMetadata(self, _: _Call) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**status.server())

    async def ModelMetadata(self, call: _Call) -> pb.ModelMetadataResponse:
        request = await call.parsed(pb.ModelMetadataRequest)
        return pb.ModelMetadataResponse(
            **signature.metadata(self._service.catalog.model(request.name, request.version))
        )

    async def ModelConfig(self, call: _Call) -> pb.ModelConfigResponse:
        request = await call.parsed(pb.ModelConfigRequest)
        info = self._service.catalog.model(request.name, request.version)
        config = signature.config(info, self._service.max_request_sequences)
        return json_format.ParseDict({"config": config}, pb.ModelConfigResponse())

    async def RepositoryIndex(self, call: _Call) -> pb.RepositoryIndexResponse:
        request = await call.parsed(pb.RepositoryIndexRequest)
        return pb.RepositoryIndexResponse(models=status.repository_index(self._service, request.ready))

    async def RepositoryModelLoad(self, call: _Call) -> pb.RepositoryModelLoadResponse:
        call.caller.need(Role.ADMIN, "to load a model")
        request = await call.parsed(pb.RepositoryModelLoadRequest)
        source = repository.source_of(request.parameters)
        version = await self._service.repository.load(request.model_name, source, call.caller.name)
        call.context.set_trailing_metadata((("guerdon-weights-version", version),))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, call: _Call) -> pb.RepositoryModelUnloadResponse:
        call.caller.need(Role.ADMIN, "to unload a model")
        request = await call.parsed(pb.RepositoryModelUnloadRequest)
        repository.check_unload_of(request.parameters)
        await self._service.repository.unload(request.model_name, call.caller.name)
        return pb.RepositoryModelUnloadResponse()

    async def ModelStatistics(self, call: _Call) -> pb.ModelStatisticsResponse:
        request = await call.parsed(pb.ModelStatisticsRequest)
        told = status.statistics(self._service, request.name, request.version)
        return json_format.ParseDict(told, pb.ModelStatisticsResponse())

    async def ModelInfer(self, call: _Call) -> pb.ModelInferResponse:
        context = call.context
        with contextlib.ExitStack() as held:
            reply, answer = await self._infer(call, call.message, held)
            # Its bytes stand for the answer's until that is sent: a client that does not read it has no others' room.
            context.add_done_callback(_leaving(held.pop_all()))
            if (reply_bytes := reply.ByteSize()) > _MOST_BUFFERED_BYTES:
                end_unread(context, self._seconds_to_send(reply_bytes))
        trailing: list[tuple[str, str]] = []
        if isinstance(answer, ScoreReply):
            trailing.append(("guerdon-queue-ms", f"{answer.queue_s * 1e3:.3f}"))
            trailing.append(("guerdon-compute-ms", f"{answer.compute_s * 1e3:.3f}"))
        if answer is not None:
            trailing.append(("guerdon-weights-version", answer.weights_version))
        context.set_trailing_metadata(tuple(trailing))
        return reply

    async def ModelStreamInfer(self, call: _Call) -> None:
        service, name = self._service, call.caller.name
        sent = dict(call.context.invocation_metadata())

        async def infer(read: Read, held: contextlib.ExitStack) -> pb.ModelStreamInferResponse:
            call.request_id = ""
            try:
                with service.metrics.client(name), message_span(service.traces, SERVICE, sent):
                    return response((await self._infer(call, read, held))[0])
            except Exception as e:
                return refusal(_to_error("ModelStreamInfer", e), call.request_id)

        with self._receiving.stream(name):
            await answer_stream(call.context, self._receiving, self._limits, infer, self._seconds_to_send)

    async def _infer(self, call: _Call, read: Read, held: contextlib.ExitStack) -> tuple[pb.ModelInferResponse, Answer]:
        """Answers the message that `read` reads; `held` keeps the bytes that the answer counts for."""
        service, caller = self._service, call.caller
        with service.metrics.request(UNKNOWN) as counted:
            self._gate.check_room(caller.name)  # before its message is read for nothing
            data = await read()
            place = held.enter_context(Place(self._gate, caller.name))
            place.hold(size := len(data))
            # What typed contents are parsed into takes more than was sent; what one body may have always fits.
            place.reach(min(kserve_grpc.memory(data), self._limits.max_body_mb << 20))
            message = await off_loop(functools.partial(kserve_grpc.parse, data), size)
            del data
            call.request_id, name = message.id, message.model_name
            counted.model = name if name in self._names else UNKNOWN
            tracing.tell(model=counted.model)
            with service.arriving(name):
                info = service.catalog.model(name, message.model_version)
                if isinstance(info, OperationInfo):
                    caller.need(Role.TRAIN, info.name)
                service.check_ready()
                if isinstance(info, ModelInfo):
                    service.check_room(info.name, caller.name, size)  # before it is decoded for nothing
            decode = functools.partial(_decode, message, info, call.context.time_remaining())
            del message  # whoever waits for long does not hold it
            if isinstance(info, OperationInfo):
                coming = Coming(decode, size, place)
                del decode
                answer: Answer = await service.call(info.name, coming, caller.name)
                decoded = coming.form
            else:
                decoded, asked = await off_loop(decode, size)
                del decode
                answer = await service.call(info.name, asked, caller.name)
            table_bytes = answer_bytes(answer, info)
            place.reach(min(table_bytes, self._limits.max_body_mb << 20))
            reply = await off_loop(functools.partial(_encode, answer, decoded, info), max(size, table_bytes))
            place.answered()
        return reply, answer

    def _seconds_to_send(self, num_bytes: int) -> float:
        return self._limits.write_timeout_s + num_bytes / _LEAST_BYTES_PER_S


def _to_error(method: str, error: Exception) -> GuerdonError:
    """Returns the error that clients are told of; whatever is not ours is logged."""
    if isinstance(error, GuerdonError):
        return without_frames(error)
    failure(logger, logging.ERROR, "unexpected error in %s", method, error=error)
    return ServerFault("internal error; the server's log has the details")


def _decode(
    request: pb.ModelInferRequest, info: ModelInfo | OperationInfo, remaining_s: float | None
) -> tuple[InferRequest, Asked]:
    decoded = kserve_grpc.decode(request)
    asked = operations.to_request(decoded, info)
    if remaining_s is not None:
        asked.timeout_s = min(asked.timeout_s or math.inf, max(remaining_s, 1e-3))
    return decoded, asked


def _encode(answer: Answer, request: InferRequest, info: ModelInfo | OperationInfo) -> pb.ModelInferResponse:
    return kserve_grpc.encode(operations.to_reply(answer, request, info))


def _leaving(held: contextlib.ExitStack) -> Callable[[Any], None]:
    def leave(_: Any) -> None:
        held.close()

    return leave


def _serialised(reply: Any) -> bytes:
    return reply.SerializeToString()


def _cut(text: str) -> str:
    """The text, or the beginning of a long one: it travels as a header, of which clients take 8 KiB."""
    data = text.encode(errors="replace")
    return text if len(data) <= _MOST_TEXT_BYTES else data[:_MOST_TEXT_BYTES].decode(errors="ignore") + " ..."
