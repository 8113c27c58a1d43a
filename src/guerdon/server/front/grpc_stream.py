"""ModelStreamInfer: the requests of a stream, each answered before the next is read, so that the client waits."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any

import grpc
from tritonclient.grpc import service_pb2 as pb

from guerdon.errors import GuerdonError
from guerdon.server import tracing
from guerdon.server.front.receiving import Receiving
from guerdon.server.front.request_spans import FAULTS
from guerdon.server.front.unread import write_or_end
from guerdon.server.tracing import Traces
from guerdon.settings.config import LimitsConfig

Read = Callable[[], Awaitable[bytes]]
Infer = Callable[[Read, contextlib.ExitStack], Awaitable[pb.ModelStreamInferResponse]]
"""Answers the message that is read; the context holds what the answer takes until it is sent."""

_FINAL = "triton_final_response"
"""Triton's parameter of the last response to a request, which is the only one here."""


async def answer_stream(
    context: grpc.aio.ServicerContext,
    receiving: Receiving,
    limits: LimitsConfig,
    infer: Infer,
    seconds_to_send: Callable[[int], float],
) -> None:
    """Answers until the client sends no more.

    Raises UploadTooSlow if no message comes, the first as soon as any call's, later ones while a connection may rest.
    """
    timeout_s = min(limits.read_timeout_s, limits.request_timeout_s)
    while (data := await receiving.next_message(context, timeout_s)) is not None:
        timeout_s = max(timeout_s, limits.idle_timeout_s)
        messages = [data]
        del data  # only its reader holds it, and only until it is parsed

        async def read(messages: list[bytes] = messages) -> bytes:
            return messages.pop()

        with contextlib.ExitStack() as held:
            told = await infer(read, held)
            await write_or_end(context, told, seconds_to_send(told.ByteSize()))


def response(reply: pb.ModelInferResponse) -> pb.ModelStreamInferResponse:
    """Returns the response that carries the reply."""
    told = pb.ModelStreamInferResponse(infer_response=reply)
    told.infer_response.parameters[_FINAL].bool_param = True
    return told


def refusal(error: GuerdonError, request_id: str) -> pb.ModelStreamInferResponse:
    """Returns the response that carries the error; the stream goes on."""
    told = pb.ModelStreamInferResponse(error_message=str(error), infer_response=pb.ModelInferResponse(id=request_id))
    parameters = told.infer_response.parameters
    parameters[_FINAL].bool_param = True
    parameters["guerdon-error"].string_param = type(error).__name__
    if error.retry_after_s is not None:
        parameters["retry-after"].int64_param = math.ceil(error.retry_after_s)
    return told


@contextlib.contextmanager
def message_span(traces: Traces | None, service: str, sent: Mapping[str, Any]) -> Iterator[None]:
    """A context that has the span of one request, with the status that a call of its own would have."""
    if traces is None:
        yield
        return
    facts = {"rpc.system": "grpc", "rpc.service": service, "rpc.method": "ModelStreamInfer"}
    with traces.request(f"{service}/ModelStreamInfer", sent, facts) as traced:
        code = grpc.StatusCode.OK
        try:
            yield
        except Exception as e:
            code = grpc.StatusCode[e.grpc] if isinstance(e, GuerdonError) else grpc.StatusCode.INTERNAL
            tracing.failed(e)
            raise
        finally:
            if traced is not None:
                traced.answered("rpc.grpc.status_code", code.value[0], is_fault=code.value[0] in FAULTS)
