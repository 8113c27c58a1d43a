"""The flags of `guerdon bench`."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

SECONDS = 30.0
_CONCURRENCY = 16
TIMES_MEAN = 4
"""Sequences are cut at this many times their mean length, unless --max-length says otherwise."""


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("URL", nargs="+", help="http:// or grpc:// address; several share the load")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--model", default="reward_model", metavar="NAME", help="as it is served (default: %(default)s)"
    )
    server.add_argument(
        "--timeout-s", type=_positive, default=60.0, metavar="X", help="a request's time (default: %(default)g)"
    )
    server.add_argument(
        "--wait-s",
        type=_not_negative,
        default=5.0,
        metavar="X",
        help="time for the model to be ready (default: %(default)g)",
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--responses", type=_count, default=8, metavar="N", help="a prompt, one request together (default: %(default)s)"
    )
    load.add_argument(
        "--prompt-tokens",
        type=_positive,
        default=256.0,
        metavar="X",
        help="mean of a log-normal (default: %(default)g)",
    )
    load.add_argument(
        "--response-tokens", type=_positive, default=256.0, metavar="X", help="likewise (default: %(default)g)"
    )
    load.add_argument(
        "--spread", type=_not_negative, default=0.6, metavar="X",
        help="standard deviation of the lengths' logarithms; 0: all alike (default: %(default)g)",
    )  # fmt: skip
    load.add_argument(
        "--max-length", type=_count, metavar="N",
        help=f"most tokens of a sequence (default: {TIMES_MEAN} times both means, or what the model takes)",
    )  # fmt: skip
    load.add_argument(
        "--vocab-size", type=_count, metavar="N", help="token ids are below it (default: found by trying)"
    )
    load.add_argument("--seed", type=_natural, default=0, metavar="N", help="of texts, lengths and times (default: 0)")
    load.add_argument(
        "--data", metavar="FILE", help="JSONL or .jsonl.gz of rows in place of the random load, one a request"
    )
    load.add_argument(
        "--template", action="store_true", help="put prompts and responses of FILE through the chat template"
    )

    extent = parser.add_argument_group("how much")
    pace = extent.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=_count, default=_CONCURRENCY, metavar="N", help="requests at once (default: %(default)s)"
    )
    pace.add_argument(
        "--rate", type=_positive, metavar="X", help="send X requests a second at random times, answered or not"
    )
    extent.add_argument(
        "--seconds", type=_positive, metavar="X", help=f"for how long (default: {SECONDS:g}, or --requests)"
    )
    extent.add_argument("--requests", type=_count, metavar="N", help="at most so many")
    extent.add_argument(
        "--warmup", type=_natural, metavar="N", help="requests before, not counted (default: --concurrency)"
    )

    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", metavar="FILE", help="write the numbers as JSON; - for the terminal, in place of the table"
    )
    output.add_argument("--plot", metavar="FILE.png", help="draw latencies, and the throughput over time")
    output.add_argument("--no-progress", action="store_true", help="no progress bar")
    output.add_argument("--fail-p99-ms", type=_positive, metavar="X", help="exit 1 where the p99 latency is above")
    output.add_argument("--fail-below", type=_positive, metavar="X", help="exit 1 below so many sequences a second")


def _number(kind: type, text: str, is_right: Callable[[Any], bool], wanted: str) -> Any:
    try:
        value = kind(text)
        if is_right(value):
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")


def _count(text: str) -> int:
    return int(_number(int, text, lambda n: n >= 1, "a whole number of at least 1"))


def _natural(text: str) -> int:
    return int(_number(int, text, lambda n: n >= 0, "a whole number of at least 0"))


def _positive(text: str) -> float:
    return float(_number(float, text, lambda x: 0 < x < math.inf, "a number above 0"))


def _not_negative(text: str) -> float:
    return float(_number(float, text, lambda x: 0 <= x < math.inf, "a number of at least 0"))
