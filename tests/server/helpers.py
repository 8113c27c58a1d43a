"""Requests and waiting, shared by the tests of the transports."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import httpx
import orjson

INFER = "/v2/models/reward_model/infer"


def body_of(rows: list[list[int]], **more) -> bytes:
    """A JSON request to score token rows; `more` are further keys of its object."""
    width = max(map(len, rows))
    tokens = {"name": "tokens", "shape": [len(rows), width], "datatype": "INT64"}
    lengths = {"name": "sequence_lengths", "shape": [len(rows), 1], "datatype": "INT64"}
    tokens["data"] = [row + [0] * (width - len(row)) for row in rows]
    lengths["data"] = [len(row) for row in rows]
    return orjson.dumps({"inputs": [tokens, lengths], **more})


def wait_until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    """Returns once `condition` holds; fails the test after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.01)


def outcomes(url: str) -> dict[tuple[str, str], int]:
    """How many requests the server at `url` has counted, by model and outcome."""
    found = re.findall(
        r'^guerdon_requests_total\{model="(.*)",outcome="(.*)"\} (.*)$', httpx.get(url + "/metrics").text, re.MULTILINE
    )
    return {(model, outcome): int(float(count)) for model, outcome, count in found}
