"""The flags of `guerdon bench`."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any

SECONDS = 30.0
MOST_TOKENS = 1_000_000
"""Of a sequence: more are made by mistake only, and take the memory of this machine."""
_MOST = 1_000_000
"""Of all else that is counted or lasts."""
_CONCURRENCY = 16
TIMES_MEAN = 4
"""Sequences are cut at this many times their mean length, unless --max-length says otherwise."""
SHAPE: dict[str, Any] = {
    "responses": 8,
    "prompt_tokens": 256.0,
    "response_tokens": 256.0,
    "spread": 0.6,
    "max_length": None,
    "vocab_size": None,
}
"""What shapes the random load, and what each is unless it is given; None is found out."""
_SEED = 0


def defaults(args: argparse.Namespace) -> argparse.Namespace:
    """The same with the defaults of what is not given, which is None until here."""
    filled = vars(args).copy()
    for name, value in (SHAPE | {"seed": _SEED}).items():
        if filled[name] is None:
            filled[name] = value
    return argparse.Namespace(**filled)


def add(parser: argparse.ArgumentParser) -> None:
    """Adds the command's flags."""
    parser.add_argument("URL", nargs="+", help="http:// or grpc:// address; several share the load")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--model", default="reward_model", metavar="NAME", help="as it is served (default: %(default)s)"
    )
    server.add_argument(
        "--timeout-s", type=_duration, default=60.0, metavar="X", help="a request's time (default: %(default)g)"
    )
    server.add_argument(
        "--wait-s",
        type=_wait,
        default=5.0,
        metavar="X",
        help="time for the model to be ready (default: %(default)g)",
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--responses", type=_places, metavar="N",
        help=f"responses to a prompt, sent in one request (default: {SHAPE['responses']})",
    )  # fmt: skip
    load.add_argument(
        "--prompt-tokens", type=_length, metavar="X",
        help=f"mean of a log-normal (default: {SHAPE['prompt_tokens']:g})",
    )  # fmt: skip
    load.add_argument(
        "--response-tokens", type=_length, metavar="X", help=f"likewise (default: {SHAPE['response_tokens']:g})"
    )
    load.add_argument(
        "--spread", type=_spread, metavar="X",
        help=f"standard deviation of the lengths' logarithms; 0: all alike (default: {SHAPE['spread']:g})",
    )  # fmt: skip
    load.add_argument(
        "--max-length", type=_count, metavar="N",
        help=f"most tokens of a sequence (default: {TIMES_MEAN} times both means, or what the model takes)",
    )  # fmt: skip
    load.add_argument(
        "--vocab-size", type=_count, metavar="N", help="token ids are below it (default: found by trying)"
    )
    load.add_argument("--seed", type=_seed, metavar="N", help=f"of texts, lengths and times (default: {_SEED})")
    load.add_argument(
        "--data", metavar="FILE", help="JSONL or .jsonl.gz of rows in place of the random load, one a request"
    )
    load.add_argument(
        "--template", action="store_true", help="put prompts and responses of FILE through the chat template"
    )

    extent = parser.add_argument_group("how much")
    pace = extent.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency", type=_places, default=_CONCURRENCY, metavar="N", help="requests at once (default: %(default)s)"
    )
    pace.add_argument(
        "--rate", type=_duration, metavar="X", help="send X requests a second at random times, answered or not"
    )
    extent.add_argument(
        "--seconds", type=_duration, metavar="X", help=f"for how long (default: {SECONDS:g}, or --requests)"
    )
    extent.add_argument("--requests", type=_requests, metavar="N", help="at most so many")
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


def _number(kind: Callable[[str], Any], least: float, most: float, wanted: str) -> Callable[[str], Any]:
    """What reads a number from `least` to `most`."""

    def read(text: str) -> Any:
        try:
            value = kind(text)
            if least <= value <= most:
                return value
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")

    return read


def _whole(least: int, most: int) -> Callable[[str], Any]:
    return _number(int, least, most, f"a whole number from {least} to {most}")


_ABOVE_0 = math.ulp(0.0)
_FINITE = sys.float_info.max

_places = _whole(1, 65_536)
_count = _whole(1, MOST_TOKENS)
_requests = _whole(1, 1_000 * _MOST)
_natural = _whole(0, _MOST)
_seed = _whole(0, 2**63 - 1)
_length = _number(float, _ABOVE_0, MOST_TOKENS, f"a number above 0, at most {MOST_TOKENS}")
_duration = _number(float, _ABOVE_0, _MOST, f"a number above 0, at most {_MOST}")
_wait = _number(float, 0, _MOST, f"a number from 0 to {_MOST}")
_spread = _number(float, 0, 10, "a number from 0 to 10")
_positive = _number(float, _ABOVE_0, _FINITE, "a number above 0")
