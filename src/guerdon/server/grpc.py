"""gRPC: KServe v2's service over the same data plane as HTTP's."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import math
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf import json_format
from tritonclient.grpc import service_pb2 as pb

from guerdon.config import ServerConfig
from guerdon.core import ModelInfo, OperationInfo, ScoreReply
from guerdon.errors import GuerdonError, ServerFault, StartError, TrainFailed, UnknownModel
from guerdon.metrics import UNKNOWN
from guerdon.server import about
from guerdon.server.body import Coming, off_loop
from guerdon.server.gate import Gate, Place
from guerdon.server.service import Service
from guerdon.wire import kserve_grpc, operations, signature
from guerdon.wire.kserve import InferRequest
from guerdon.wire.operations import Answer, Asked

logger = logging.getLogger("guerdon.grpc")

SERVICE = "inference.GRPCInferenceService"

_HEADROOM_BYTES = 65_536
_MOST_TEXT_BYTES = 2000  # each of which may travel as three
_MOST_BYTES = 2**31 - 1  # what gRPC can count


def server(service: Service, config: ServerConfig, gate: Gate | None = None) -> tuple[grpc.aio.Server, int]:
    """A bound, not yet started gRPC server and its port; raises StartError where the port cannot be had."""
    address = f"[{config.host}]" if ":" in config.host else config.host
    grpc_server = grpc.aio.server(
        options=(
            # The default of 4 MiB is less than what clients send; the default of sharing ports hides a second server.
            ("grpc.max_receive_message_length", min((config.max_body_mb << 20) + _HEADROOM_BYTES, _MOST_BYTES)),
            ("grpc.max_send_message_length", -1),
            ("grpc.so_reuseport", 0),
        )
    )
    front = _Front(service, gate or Gate(config))
    grpc_server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, front.handlers()),))
    try:
        port = grpc_server.add_insecure_port(f"{address}:{config.grpc_port}")
    except RuntimeError as e:
        raise StartError(
            f"cannot listen for gRPC on {address}:{config.grpc_port}: in use, or not an address of this machine",
            "stop what uses the port, choose another with --grpc-port, or turn gRPC off with --no-grpc",
        ) from e
    return grpc_server, port


class _Front:
    """The methods of the service; those that the protocol has beyond these answer UNIMPLEMENTED."""

    def __init__(self, service: Service, gate: Gate) -> None:
        self._service = service
        self._gate = gate
        self._names = {info.name for info in service.models()}

    def handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        methods = (
            (self.ServerLive, pb.ServerLiveRequest),
            (self.ServerReady, pb.ServerReadyRequest),
            (self.ModelReady, pb.ModelReadyRequest),
            (self.ServerMetadata, pb.ServerMetadataRequest),
            (self.ModelMetadata, pb.ModelMetadataRequest),
            (self.ModelConfig, pb.ModelConfigRequest),
            (self.ModelInfer, _Sized),
            (self.RepositoryIndex, pb.RepositoryIndexRequest),
        )
        return {
            method.__name__: grpc.unary_unary_rpc_method_handler(
                _answering(method), request.FromString, lambda reply: reply.SerializeToString()
            )
            for method, request in methods
        }

    async def ServerLive(self, request: pb.ServerLiveRequest, _: Any) -> pb.ServerLiveResponse:
        return pb.ServerLiveResponse(live=True)

    async def ServerReady(self, request: pb.ServerReadyRequest, _: Any) -> pb.ServerReadyResponse:
        return pb.ServerReadyResponse(ready=self._service.is_ready())

    async def ModelReady(self, request: pb.ModelReadyRequest, _: Any) -> pb.ModelReadyResponse:
        try:
            self._service.model(request.name, request.version)
        except UnknownModel:  # an answer, not an error: so Triton has it, and its clients count on it
            return pb.ModelReadyResponse(ready=False)
        return pb.ModelReadyResponse(ready=self._service.is_ready(request.name))

    async def ServerMetadata(self, request: pb.ServerMetadataRequest, _: Any) -> pb.ServerMetadataResponse:
        return pb.ServerMetadataResponse(**about.server())

    async def ModelMetadata(self, request: pb.ModelMetadataRequest, _: Any) -> pb.ModelMetadataResponse:
        return pb.ModelMetadataResponse(**signature.metadata(self._service.model(request.name, request.version)))

    async def ModelConfig(self, request: pb.ModelConfigRequest, _: Any) -> pb.ModelConfigResponse:
        config = signature.config(self._service.model(request.name, request.version))
        return json_format.ParseDict({"config": config}, pb.ModelConfigResponse())

    async def RepositoryIndex(self, request: pb.RepositoryIndexRequest, _: Any) -> pb.RepositoryIndexResponse:
        return pb.RepositoryIndexResponse(models=about.repository_index(self._service, request.ready))

    async def ModelInfer(self, sized: _Sized, context: grpc.aio.ServicerContext) -> pb.ModelInferResponse:
        service, size, name = self._service, sized.num_bytes, sized.message.model_name
        label = name if name in self._names else UNKNOWN
        with service.metrics.request(label), contextlib.ExitStack() as held:
            with service.arriving(name):
                place = held.enter_context(Place(self._gate))
                place.hold(size)
                info = service.model(name, sized.message.model_version)
                service.check_ready()
            decode = functools.partial(_decode, sized.message, info, context.time_remaining())
            del sized.message  # whoever waits for long does not hold it
            if isinstance(info, OperationInfo):
                coming = Coming(decode, size, place)
                del decode
                answer: Answer = await service.call(info.name, coming)
                decoded = coming.form
            else:
                decoded, asked = await off_loop(decode, size)
                del decode
                answer = await service.call(info.name, asked)
            reply = await off_loop(functools.partial(_encode, answer, decoded, info), size)
        trailing: list[tuple[str, str]] = []
        if isinstance(answer, ScoreReply):
            trailing.append(("guerdon-queue-ms", f"{answer.queue_s * 1e3:.3f}"))
            trailing.append(("guerdon-compute-ms", f"{answer.compute_s * 1e3:.3f}"))
        if answer is not None:
            trailing.append(("guerdon-weights-version", answer.weights_version))
        context.set_trailing_metadata(tuple(trailing))
        return reply


class _Sized:
    """A request to score, and the bytes that it had on the wire, which the message itself would have to count."""

    __slots__ = ("message", "num_bytes")

    def __init__(self, message: pb.ModelInferRequest, num_bytes: int) -> None:
        self.message = message
        self.num_bytes = num_bytes

    @staticmethod
    def FromString(data: bytes) -> _Sized:
        return _Sized(pb.ModelInferRequest.FromString(data), len(data))


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


def _answering(method: Callable[[Any, Any], Awaitable[Any]]) -> Callable[[Any, Any], Awaitable[Any]]:
    """`method`, with what it raises told in gRPC's way."""

    @functools.wraps(method)
    async def answer(request: Any, context: grpc.aio.ServicerContext) -> Any:
        try:
            return await method(request, context)
        except GuerdonError as e:
            error = e
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("unexpected error in %s", method.__name__)
            error = ServerFault("internal error; the server's log has the details")
        trailing = [("guerdon-error", type(error).__name__)]
        if error.retry_after_s is not None:
            trailing.append(("retry-after", str(math.ceil(error.retry_after_s))))
        if isinstance(error, TrainFailed):
            trailing.append(("guerdon-num-steps", str(error.num_steps)))
        await context.abort(grpc.StatusCode[error.grpc], _cut(str(error)), tuple(trailing))
        raise error  # abort has raised already

    return answer


def _cut(text: str) -> str:
    """The text, or the beginning of a long one: it travels as a header, of which clients take 8 KiB."""
    data = text.encode(errors="replace")
    return text if len(data) <= _MOST_TEXT_BYTES else data[:_MOST_TEXT_BYTES].decode(errors="ignore") + " ..."
