"""The client of a trainer that replaces a served model's weights; it needs no torch, but takes its tensors."""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import urlencode

import numpy as np

from guerdon import tensor_files
from guerdon.client.addresses import Credentials, addresses
from guerdon.client.http_transport import fetch
from guerdon.client.retry import RetryPolicy
from guerdon.errors import GuerdonError, InvalidRequest, Unreachable

_DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_PIECE_BYTES = 16 << 20
"""Tensors are sent together up to this size, and larger ones alone."""


class WeightsClient:
    """Replaces the weights of a served reward model, teacher or judge at every `every`-th call; not thread-safe.

    `url` is the http:// or https:// address of a server with --weight-transfer, `model` by default its first model.
    With `ema` e the served weights become e · served + (1 - e) · sent. While they are swapped in requests wait; with
    `beside` the old weights answer them, and both are in the server's memory.
    """

    def __init__(
        self,
        url: str,
        model: str | None = None,
        *,
        ema: float | None = None,
        every: int = 1,
        beside: bool = False,
        policy: RetryPolicy = RetryPolicy(),  # noqa: B008 - frozen
        credentials: Credentials | None = None,
    ) -> None:
        """Raises InvalidRequest for a malformed URL, and unless `every` is at least 1; connects at the first update."""
        (self._address,) = addresses(url, credentials)
        if self._address.is_grpc:
            raise InvalidRequest(f"live weights are sent over HTTP, not to {url}: give http://host:port")
        if every < 1:
            raise InvalidRequest(f"every is {every}; it must be at least 1")
        self._query = {} if model is None else {"model": model}
        self._settings = {"ema": ema or 0.0, "beside": beside}
        self._every, self._policy = every, policy
        self._num_calls, self._has_answered = 0, policy.wait_for_start
        self._average: str | None = None  # the version that the last update made

    def __call__(
        self, tensors: Mapping[str, Any] | Iterable[tuple[str, Any]], version: str | None = None
    ) -> str | None:
        """Sends the tensors by their names, and returns the new weights' version; None on the calls between.

        They are torch's, on any device, or numpy's, float32, bfloat16 or float16, named as in the model's checkpoint:
        `model.state_dict()`. Few are in memory here at once. `version` is your own name for them, for the server's
        reply. Raises the class that the server raised; the old weights serve then, and the next call sends again.
        With `ema` raises InvalidRequest if this client's average does not serve any more; the next call begins another.
        It is retried as `policy` says, unless `tensors` is an iterator, or the new weights may serve already.
        """
        self._num_calls += 1
        if self._num_calls < self._every:
            return None
        pairs = tensors.items() if isinstance(tensors, Mapping) else tensors
        ends = time.monotonic() + self._policy.timeout_s
        attempt = 0
        while True:
            attempt += 1
            try:
                made = self._update(pairs, version)
            except GuerdonError as e:
                delay_s = self._policy.next_delay(attempt, e, random.Random())
                is_wrong = isinstance(e, Unreachable) and not self._has_answered
                if delay_s is None or is_wrong or iter(pairs) is pairs or time.monotonic() + delay_s > ends:
                    raise
                time.sleep(delay_s)
            else:
                self._num_calls = 0
                return made

    def _update(self, pairs: Iterable[tuple[str, Any]], version: str | None) -> str:
        self._post("/init_weight_transfer_engine", {"init_info": self._settings})  # a server that restarted forgot it
        self._has_answered = True
        told = self._post("/start_weight_update")
        update_id, serves = told["update_id"], told.get("weights_version")  # older servers do not say what serves
        if self._settings["ema"] and None not in (self._average, serves) and self._average != serves:
            lost, self._average = self._average, None
            raise InvalidRequest(
                f"the average of this client's updates, {lost}, does not serve: the server was restarted, or given "
                f"other weights, or an update's answer was lost. The next call begins another average, with {serves}"
            )
        for piece in _pieces(pairs):
            self._post("/update_weights", piece, update_id=update_id)
        try:
            told = self._post("/finish_weight_update", {"weight_version": version}, update_id=update_id)
        except GuerdonError as e:  # once they may have been swapped in, another try might average with them twice
            e.retryable = isinstance(e, Unreachable) and not e.may_have_arrived
            raise
        self._average = str(told["weights_version"])
        return self._average

    def _post(self, path: str, body: bytes | dict[str, Any] = b"", **query: str) -> Any:
        path += "?" + urlencode(self._query | query)
        if isinstance(body, dict):
            content, media_type = json.dumps(body).encode(), "application/json"
        else:
            content, media_type = body, "application/octet-stream"
        sent: dict[str, Any] = {"content": content, "media_type": media_type, "timeout_s": self._policy.timeout_s}
        return fetch(self._address, path, method="POST", **sent).json()


def _pieces(pairs: Iterable[tuple[str, Any]]) -> Iterator[bytes]:
    """Yields bodies of safetensors; raises InvalidRequest for what is no weight."""
    some: dict[str, tuple[str, tuple[int, ...], memoryview]] = {}
    num_bytes = 0
    for name, tensor in pairs:
        found = _numbers(name, tensor)
        if some and (name in some or num_bytes + len(found[2]) > _PIECE_BYTES):
            yield _body(some)
            some, num_bytes = {}, 0
        some[name] = found
        num_bytes += len(found[2])
    if some:
        yield _body(some)


def _body(some: dict[str, tuple[str, tuple[int, ...], memoryview]]) -> bytes:
    described = {name: (dtype, shape) for name, (dtype, shape, _) in some.items()}
    return b"".join([tensor_files.header(described, {"format": "pt"}), *(data for _, _, data in some.values())])


def _numbers(name: str, tensor: Any) -> tuple[str, tuple[int, ...], memoryview]:
    """Returns the tensor's dtype in safetensors, its shape and its bytes."""
    if hasattr(tensor, "full_tensor"):  # gathering is collective, and this may be the only rank that sends
        raise InvalidRequest(f"{name} is a shard; send what its full_tensor() returns, which all ranks must call")
    what = getattr(tensor, "dtype", type(tensor).__name__)
    dtype = _DTYPES.get(str(what).removeprefix("torch."))
    if dtype is None:
        raise InvalidRequest(f"{name} is {what}; weights are float32, bfloat16 or float16")
    if hasattr(tensor, "detach"):
        torch: Any = sys.modules["torch"]  # its tensor has loaded it, and a client needs it for nothing else
        array = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    else:
        array = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return dtype, tuple(tensor.shape), array.data
