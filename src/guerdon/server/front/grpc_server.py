"""gRPC: KServe v2's service over the same data plane as HTTP's."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf import json_format
from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from guerdon.errors import (
    GuerdonError,
    InvalidRequest,
    ServerFault,
    StartError,
    UnknownModel,
)
from guerdon.server import status, tracing
from guerdon.server.auth import ANYBODY, PYTRITONS_METADATA, Caller, read_pems, tls_context
from guerdon.server.front.admission import Admission, Decoder, Visit
from guerdon.server.front.grpc_messages import Receiving, end_unread, write_or_end
from guerdon.server.front.http_request import LEAST_BYTES_PER_S, Headers, answer_headers, error_headers
from guerdon.server.front.request_spans import message_span, with_span
from guerdon.server.logs import failure, without_frames
from guerdon.server.service import Service
from guerdon.settings.access import Role
from guerdon.settings.config import LimitsConfig, ServerConfig
from guerdon.wire import kserve, kserve_grpc, signature
from guerdon.wire.forms import triton_repository
from guerdon.wire.kserve import ServedReply, ServedRequest
from guerdon.wire.schema import Info
from guerdon.wire.score_tensors import table_bytes
from guerdon.wire.tensors import InferRequest

logger = logging.getLogger("guerdon.grpc")

_FINAL = "triton_final_response"
"""Triton's parameter of the last response to a request, which is the only one here."""

SERVICE = "inference.GRPCInferenceService"

_HEADROOM_BYTES = 65_536
_SPARE_STREAMS = 100
_MOST_SMALL_BYTES = 1 << 16
_PING_AFTER_MS = 60_000
_PING_ANSWER_MS = 60_000
_LEAST_PING_MS = 1_000
_MOST_BUFFERED_BYTES = 65_536  # of an answer, which gRPC takes without waiting for its reader
_MOST_TEXT_BYTES = 2000  # each of which may travel as three
_MOST_BYTES = 2**31 - 1  # what gRPC can count


def server(service: Service, config: ServerConfig, admission: Admission | None = None) -> tuple[grpc.aio.Server, int]:
    """Returns a gRPC server, bound but not started, and its port.

    Raises StartError if the port is not available, ConfigError if the files of TLS are wrong.
    """
    address = f"[{config.host}]" if ":" in config.host else config.host
    grpc_server = grpc.aio.server(options=_options(config))
    front = _Front(admission or Admission(service, config), config)
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, front.handlers()),))
    tls_context(config)  # raises what is wrong
    pems = read_pems(config)
    try:
        if pems is None:
            port = grpc_server.add_insecure_port(f"{address}:{config.grpc_port}")
        else:
            key, cert, authority = pems
            needs_cert = authority is not None
            credentials = grpc.ssl_server_credentials([(key, cert)], authority, require_client_auth=needs_cert)
            port = grpc_server.add_secure_port(f"{address}:{config.grpc_port}", credentials)
    except RuntimeError as e:
        raise StartError(
            f"cannot listen for gRPC on {address}:{config.grpc_port}: in use, or not an address of this machine",
            "stop what uses the port, choose another with --grpc-port, or turn gRPC off with --no-grpc",
        ) from e
    return grpc_server, port


def _options(config: ServerConfig) -> tuple[tuple[str, int], ...]:
    """gRPC's options: limits of connections and messages."""
    return (
        # The default of 4 MiB is less than what clients send; the default of sharing ports hides a second server.
        ("grpc.max_receive_message_length", min((config.max_body_mb << 20) + _HEADROOM_BYTES, _MOST_BYTES)),
        ("grpc.max_send_message_length", -1),
        ("grpc.so_reuseport", 0),
        # More than the gate allows, so that a call too many is refused and does not wait in its client.
        ("grpc.max_concurrent_streams", config.max_requests + _SPARE_STREAMS),
        ("grpc.max_allowed_incoming_connections", config.max_connections),
        ("grpc.server_handshake_timeout_ms", math.ceil(config.header_timeout_s * 1000)),
        ("grpc.max_connection_idle_ms", math.ceil(config.idle_timeout_s * 1000)),
        # Unanswered pings reveal a vanished host, and a client that reads nothing.
        ("grpc.keepalive_time_ms", _PING_AFTER_MS),
        ("grpc.http2.ping_timeout_ms", _PING_ANSWER_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        # Clients may ping, too, while they wait for a long call: gRPC's default, 5 minutes, ends their connection.
        ("grpc.http2.min_ping_interval_without_data_ms", _LEAST_PING_MS),
        # Else the window that a message may fill before its turn would grow with the connection.
        ("grpc.http2.bdp_probe", 0),
    )


class _Call:
    """One call: its caller, and its message, which is not read before `message` asks for it."""

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
        timeout_s = min(self._limits.read_timeout_s, self._limits.request_timeout_s)
        return await self._receiving.message(self.context, self.caller.name, timeout_s)

    async def parsed(self, kind: Any) -> Any:
        """Reads and parses a small message; raises InvalidRequest."""
        data = await self._receiving.message(self.context, self.caller.name, self._limits.header_timeout_s)
        if len(data) > _MOST_SMALL_BYTES:
            raise InvalidRequest(f"the message has {len(data)} bytes; this method takes at most {_MOST_SMALL_BYTES}")
        try:
            return kind.FromString(data)
        except DecodeError as e:
            raise InvalidRequest(f"the message is not a {kind.DESCRIPTOR.name}: {e}") from e


Read = Callable[[], Awaitable[bytes]]


class _InferExchange:
    """One ModelInfer message, which `read_message` reads, and its reply."""

    num_tables = 4  # the table, its bytes, the message and what is sent

    def __init__(self, call: _Call, read_message: Read, limits: LimitsConfig) -> None:
        self.caller = call.caller
        self.num_bytes = 0
        self.request_id = ""
        self.answer: ServedReply = None
        self._context = call.context
        self._read_message = read_message
        self._limits = limits

    async def read(self, visit: Visit) -> Info:
        """Takes its place with the message: `Receiving` bounds the calls that wait for theirs."""
        self._visit = visit
        visit.check_room()
        data = await self._read_message()
        self.num_bytes = len(data)
        visit.take()
        visit.hold(self.num_bytes)
        # Typed contents take more memory once parsed.
        visit.reach(await visit.run(functools.partial(kserve_grpc.memory, data), self.num_bytes))
        self._message = await visit.run(functools.partial(kserve_grpc.parse, data), self.num_bytes)
        del data
        self.request_id = self._message.id
        self._remaining_s = self._context.time_remaining()
        info = visit.find(self._message.model_name, self._message.model_version)
        visit.enter(self.num_bytes)
        return info

    def take_decoder(self) -> Decoder:
        """Returns a function that decodes the message, with the call's deadline as its time-out."""
        message, self._message = self._message, None
        return functools.partial(self._decode, message)

    def _decode(self, message: pb.ModelInferRequest, info: Info) -> tuple[InferRequest, ServedRequest]:
        tensors = kserve_grpc.decode(message)
        asked = kserve.to_request(tensors, info)
        if self._remaining_s is not None:
            asked.timeout_s = min(asked.timeout_s or math.inf, max(self._remaining_s, 1e-3))
        return tensors, asked

    async def encode(self, answer: ServedReply, info: Info) -> pb.ModelInferResponse:
        """Returns the message; its bytes stay counted until `release`."""
        self.answer = answer
        tensors = self._visit.tensors
        assert tensors is not None

        def write() -> pb.ModelInferResponse:
            return kserve_grpc.encode(kserve.to_reply(answer, tensors, info))

        reply = await self._visit.run(write, max(self.num_bytes, table_bytes(answer, info)))
        self._visit.keep_bytes()
        return reply

    def release(self) -> None:
        """Counts the reply as sent."""
        self._visit.release()


Method = Callable[[_Call], Awaitable[Any]]


class _Front:
    """The methods of the service; the protocol's others answer UNIMPLEMENTED.

    Each reads its message itself, as the only one of a stream, which is the same on the wire: so it is not read before
    the key was checked, nor while too many others are.
    """

    def __init__(self, admission: Admission, config: ServerConfig) -> None:
        self._admission = admission
        self._service = admission.service
        self._limits = config
        self._receiving = Receiving(config, self._service.access.names)

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
        """Wraps `method`: checks the key, unless it is open to all, and turns errors into gRPC's statuses.

        A stream counts its requests one by one, in the method itself.
        """
        service = self._service

        async def answer(_: Any, context: grpc.aio.ServicerContext) -> Any:
            try:
                caller = ANYBODY
                if not is_open:
                    sent = dict(context.invocation_metadata())
                    caller = self._admission.identify(sent.get("authorization"), sent.get(PYTRITONS_METADATA))
                with contextlib.nullcontext() if is_stream else self._counting(caller.name):
                    return await method(_Call(context, caller, self._receiving, self._limits))
            except Exception as e:
                error = _to_error(method.__name__, e)
            tracing.failed(error)
            trailing = _metadata(error_headers(error))
            await context.abort(grpc.StatusCode[error.grpc], _cut(str(error)), trailing)
            raise error  # abort has raised already

        if service.traces is None:
            return answer

        def knows(sent: Mapping[str, Any]) -> bool:
            return service.access.knows(sent.get("authorization"), sent.get(PYTRITONS_METADATA))

        return with_span(answer, service.traces, SERVICE, method.__name__, knows)

    @contextlib.contextmanager
    def _counting(self, client: str) -> Iterator[None]:
        """Counts the block as a request of the key's holder, by the class of its error."""
        kind: type[BaseException] | None = None
        try:
            yield
        except BaseException as e:
            kind = type(e)
            raise
        finally:
            self._service.metrics.client_request_done(client, kind)

    async def ServerLive(self, _: _Call) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, _: _Call) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=status.is_ready(self._service))

    async def ModelReady(self, call: _Call) -> pb.ModelReadyResponse:
        request = await call.parsed(pb.ModelReadyRequest)
        try:
            self._service.catalog.model(request.name, request.version)
        except UnknownModel:  # not an error, as in Triton: its clients rely on it
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=status.is_ready(self._service, request.name))

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
        source = triton_repository.source_of(kserve_grpc.read_parameters(request.parameters))
        version = await self._service.repository.load(request.model_name, source, call.caller.name)
        call.context.set_trailing_metadata((("guerdon-weights-version", version),))
        return pb.RepositoryModelLoadResponse()

    async def RepositoryModelUnload(self, call: _Call) -> pb.RepositoryModelUnloadResponse:
        call.caller.need(Role.ADMIN, "to unload a model")
        request = await call.parsed(pb.RepositoryModelUnloadRequest)
        triton_repository.check_unload_of(kserve_grpc.read_parameters(request.parameters))
        await self._service.repository.unload(request.model_name, call.caller.name)
        return pb.RepositoryModelUnloadResponse()

    async def ModelStatistics(self, call: _Call) -> pb.ModelStatisticsResponse:
        request = await call.parsed(pb.ModelStatisticsRequest)
        told = status.statistics(self._service, request.name, request.version)
        return json_format.ParseDict(told, pb.ModelStatisticsResponse())

    async def ModelInfer(self, call: _Call) -> pb.ModelInferResponse:
        context = call.context
        exchange = _InferExchange(call, call.message, self._limits)
        reply = await self._answer(exchange)
        # Its bytes count until the answer is sent: a client that does not read it takes no room of others.
        context.add_done_callback(lambda _: exchange.release())
        if (reply_bytes := reply.ByteSize()) > _MOST_BUFFERED_BYTES:
            end_unread(context, self._seconds_to_send(reply_bytes))
        context.set_trailing_metadata(_metadata(answer_headers(exchange.answer)))
        return reply

    async def ModelStreamInfer(self, call: _Call) -> None:
        """Answers until the client sends no more; raises UploadTooSlow if no message comes."""
        name = call.caller.name
        sent = dict(call.context.invocation_metadata())

        async def infer(read: Read, held: contextlib.ExitStack) -> pb.ModelStreamInferResponse:
            """Answers the message; `held` has the answer's reservation until it is sent."""
            exchange = _InferExchange(call, read, self._limits)
            try:
                with self._counting(name), message_span(self._service.traces, SERVICE, sent, _code_number):
                    reply = await self._answer(exchange)
                    held.callback(exchange.release)
                    response = pb.ModelStreamInferResponse(infer_response=reply)
                    response.infer_response.parameters[_FINAL].bool_param = True
                    return response
            except Exception as e:
                return _refusal(_to_error("ModelStreamInfer", e), exchange.request_id)

        # The first message has to come as soon as any call's, later ones while a connection may rest.
        timeout_s = min(self._limits.read_timeout_s, self._limits.request_timeout_s)
        with self._receiving.stream(name):
            while (data := await self._receiving.next_message(call.context, timeout_s)) is not None:
                timeout_s = max(timeout_s, self._limits.idle_timeout_s)
                messages = [data]
                del data  # only its reader holds it, and only until it is parsed

                async def read(messages: list[bytes] = messages) -> bytes:
                    return messages.pop()

                with contextlib.ExitStack() as held:
                    told = await infer(read, held)
                    await write_or_end(call.context, told, self._seconds_to_send(told.ByteSize()))

    async def _answer(self, exchange: _InferExchange) -> pb.ModelInferResponse:
        with Visit(self._admission, exchange.caller) as visit:
            info, request = await visit.admit(exchange)
            answer = await visit.ask(info, request)
            return await exchange.encode(answer, info)

    def _seconds_to_send(self, num_bytes: int) -> float:
        return self._limits.write_timeout_s + num_bytes / LEAST_BYTES_PER_S


def _refusal(error: GuerdonError, request_id: str) -> pb.ModelStreamInferResponse:
    """Returns the response with the error; the stream stays open."""
    told = pb.ModelStreamInferResponse(error_message=str(error), infer_response=pb.ModelInferResponse(id=request_id))
    parameters = told.infer_response.parameters
    parameters[_FINAL].bool_param = True
    parameters["guerdon-error"].string_param = type(error).__name__
    if error.retry_after_s is not None:
        parameters["retry-after"].int64_param = math.ceil(error.retry_after_s)
    return told


def _code_number(error: Exception) -> int:
    code = grpc.StatusCode[error.grpc] if isinstance(error, GuerdonError) else grpc.StatusCode.INTERNAL
    number: int = code.value[0]
    return number


def _to_error(method: str, error: Exception) -> GuerdonError:
    """Returns the error for clients; logs unexpected exceptions."""
    if isinstance(error, GuerdonError):
        return without_frames(error)
    failure(logger, logging.ERROR, "unexpected error in %s", method, error=error)
    return ServerFault("internal error; the server's log has the details")


def _metadata(headers: Headers) -> tuple[tuple[str, str], ...]:
    return tuple((name.decode(), value.decode("latin-1")) for name, value in headers)


def _serialised(reply: Any) -> bytes:
    return reply.SerializeToString()


def _cut(text: str) -> str:
    """Returns the beginning of a long text: it is sent as a header, which clients limit to 8 KiB."""
    data = text.encode(errors="replace")
    return text if len(data) <= _MOST_TEXT_BYTES else data[:_MOST_TEXT_BYTES].decode(errors="ignore") + " ..."
