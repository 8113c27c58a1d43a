"""Measures a running server under the load of an RLHF trainer: prompts with several responses each.

examples:
  # as many requests as it handles in half a minute
  python benchmarks/server_load.py http://127.0.0.1:5555 --seconds 30
  # your own data, results as JSON and as a plot
  python benchmarks/server_load.py http://127.0.0.1:5555 --data in.jsonl \\
      --json load.json --plot load.png
  # fail, as in CI, if the 99th percentile is above 200 ms
  python benchmarks/server_load.py http://127.0.0.1:5555 --requests 500 --fail-p99-ms 200

docs/bench.md describes the load and the results.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from guerdon import __version__
from guerdon.cli import console, score_plot
from guerdon.cli.parser import Parser
from guerdon.client.addresses import Address, addresses
from guerdon.client.calls import ModelSignature
from guerdon.client.retry import RetryPolicy
from guerdon.client.reward_client import AsyncRewardClient
from guerdon.errors import (
    ConfigError,
    Exit,
    GuerdonError,
    InvalidRequest,
    StartError,
)
from guerdon.settings.access import strip_credentials
from load_generator import Answer, Bar, ClientLoad, Extent, poisson
from load_requests import FromFile, Load, Shape, fit
from load_summary import Summary, check_bounds, notes, plot, read_counters, summarise, table, work_between

_SECONDS = 30.0
_MOST_TOKENS = 1_000_000
"""Bounds the length of a sequence, against mistakes that fill the memory."""
_MOST = 1_000_000
"""Bounds all other counts and durations."""
_CONCURRENCY = 16
_TIMES_MEAN = 4
"""Default of the maximum length, in mean lengths."""
_SHAPE: dict[str, Any] = {
    "responses": 8,
    "prompt_tokens": 256.0,
    "response_tokens": 256.0,
    "spread": 0.6,
    "max_length": None,
    "vocab_size": None,
}
"""The random load's settings with their defaults; None is found by trial."""
_SEED = 0


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Returns the arguments with defaults for missing ones; None marks these until the checks are done."""
    filled = vars(args).copy()
    for name, value in (_SHAPE | {"seed": _SEED}).items():
        if filled[name] is None:
            filled[name] = value
    return argparse.Namespace(**filled)


def make_parser() -> Parser:
    """Returns the parser of the command line."""
    parser = Parser("python benchmarks/server_load.py", description=__doc__)
    parser.add_argument("URL", nargs="+", help="URL of a server, http:// or grpc://; several share the load.")
    server = parser.add_argument_group("server")
    server.add_argument(
        "--model", default="reward_model", metavar="NAME", help="Name of the served model. (default: %(default)s)"
    )
    server.add_argument(
        "--timeout-s",
        type=_duration,
        default=60.0,
        metavar="X",
        help="Timeout of a request, in seconds. (default: %(default)g)",
    )
    server.add_argument(
        "--wait-s",
        type=_wait,
        default=5.0,
        metavar="X",
        help="Timeout until the model is ready, in seconds. (default: %(default)g)",
    )

    load = parser.add_argument_group("load")
    load.add_argument(
        "--responses", type=_places, metavar="N",
        help=f"Responses per prompt, sent in one request. (default: {_SHAPE['responses']})",
    )  # fmt: skip
    load.add_argument(
        "--prompt-tokens", type=_length, metavar="X",
        help=f"Mean length; lengths are log-normal. (default: {_SHAPE['prompt_tokens']:g})",
    )  # fmt: skip
    load.add_argument(
        "--response-tokens",
        type=_length,
        metavar="X",
        help=f"Mean length; lengths are log-normal. (default: {_SHAPE['response_tokens']:g})",
    )
    load.add_argument(
        "--spread", type=_spread, metavar="X",
        help=f"Standard deviation of the log lengths; 0: equal lengths. (default: {_SHAPE['spread']:g})",
    )  # fmt: skip
    load.add_argument(
        "--max-length", type=_count, metavar="N",
        help=f"Maximum tokens of a sequence. (default: {_TIMES_MEAN} times both means, or the model's limit)",
    )  # fmt: skip
    load.add_argument("--vocab-size", type=_count, metavar="N", help="Token ids are below N. (default: found by trial)")
    load.add_argument(
        "--seed", type=_seed, metavar="N", help=f"Seed of texts, lengths and send times. (default: {_SEED})"
    )
    load.add_argument(
        "--data", metavar="FILE", help="JSONL or .jsonl.gz file, one row per request, instead of the random load."
    )
    load.add_argument(
        "--template", action="store_true", help="Apply the chat template to prompts and responses of FILE."
    )

    extent = parser.add_argument_group("how much")
    pace = extent.add_mutually_exclusive_group()
    pace.add_argument(
        "--concurrency",
        type=_places,
        default=_CONCURRENCY,
        metavar="N",
        help="Requests in flight. (default: %(default)s)",
    )
    pace.add_argument(
        "--rate",
        type=_duration,
        metavar="X",
        help="Send X requests per second at random times, without waiting for answers.",
    )
    extent.add_argument(
        "--seconds", type=_duration, metavar="X", help=f"Duration in seconds. (default: {_SECONDS:g} unless --requests)"
    )
    extent.add_argument("--requests", type=_requests, metavar="N", help="Maximum number of requests.")
    extent.add_argument(
        "--warmup", type=_natural, metavar="N", help="Requests before the measurement. (default: --concurrency)"
    )

    output = parser.add_argument_group("output")
    output.add_argument("--json", metavar="FILE", help="Write the results as JSON; - prints it instead of the table.")
    output.add_argument("--plot", metavar="FILE.png", help="Draw latencies and throughput.")
    output.add_argument("--no-progress", action="store_true", help="Hide the progress bar.")
    output.add_argument("--fail-p99-ms", type=_positive, metavar="X", help="Exit 1 if the p99 latency is above X.")
    output.add_argument(
        "--fail-below", type=_positive, metavar="X", help="Exit 1 if there are fewer than X sequences per second."
    )
    return parser


def _number_type(kind: Callable[[str], Any], least: float, most: float, wanted: str) -> Callable[[str], Any]:
    """Returns an argparse type for numbers from `least` to `most`."""

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
    return _number_type(int, least, most, f"a whole number from {least} to {most}")


_ABOVE_0 = math.ulp(0.0)
_FINITE = sys.float_info.max

_places = _whole(1, 65_536)
_count = _whole(1, _MOST_TOKENS)
_requests = _whole(1, 1_000 * _MOST)
_natural = _whole(0, _MOST)
_seed = _whole(0, 2**63 - 1)
_length = _number_type(float, _ABOVE_0, _MOST_TOKENS, f"a number above 0, at most {_MOST_TOKENS}")
_duration = _number_type(float, _ABOVE_0, _MOST, f"a number above 0, at most {_MOST}")
_wait = _number_type(float, 0, _MOST, f"a number from 0 to {_MOST}")
_spread = _number_type(float, 0, 10, "a number from 0 to 10")
_positive = _number_type(float, _ABOVE_0, _FINITE, "a number above 0")


def _check_options(args: argparse.Namespace) -> None:
    """Raises ConfigError for an option without effect."""
    if args.data is None:
        if args.template:
            raise ConfigError("--template is given, and --data is not", "leave it out, or give rows with --data")
        return
    unused = [name for name in _SHAPE if getattr(args, name) is not None]
    if args.seed is not None and args.rate is None:
        unused.append("seed")
    if unused:
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        raise ConfigError(
            f"{flags} {'is' if len(unused) == 1 else 'are'} for the random load, which --data replaces",
            "leave out one of them",
        )


def _check_files(args: argparse.Namespace) -> None:
    """Raises StartError if an output file cannot be written, before the load runs."""
    if args.plot:
        score_plot.check_plot(args.plot)
    if args.json and args.json != "-":
        score_plot.check_writable(Path(args.json))


def _server_addresses(urls: list[str]) -> list[Address]:
    """Parses the URLs; raises ConfigError for an invalid one."""
    try:
        return addresses(urls, None)
    except InvalidRequest as e:
        raise ConfigError(str(e), "give each URL as its server printed it") from e


def run(argv: Sequence[str] | None = None) -> int:
    """Runs the load of a command line; returns the exit status."""
    args = make_parser().parse_args(argv)
    _check_options(args)
    _check_files(args)
    console.require_grpc(args.URL)
    servers = _server_addresses(args.URL)
    args = _with_defaults(args)
    measured = asyncio.run(_measure(args, servers))
    summary = measured.summary
    urls = [strip_credentials(url) for url in args.URL]
    heading = f"load test: {args.model} at {', '.join(urls)}"
    if args.json == "-":
        sys.stdout.write(_json(args, measured, urls).decode())
    else:
        sys.stdout.write(table(summary, heading, measured.load, sys.stdout))
    sys.stdout.flush()
    if args.json and args.json != "-":
        with score_plot.writing(args.json):
            Path(args.json).write_bytes(_json(args, measured, urls))
    if args.plot:
        with score_plot.writing(args.plot):
            plot(measured.answers, summary, Path(args.plot), heading, measured.load)
    return Exit.FAILED if summary.has_failed else Exit.DONE


@dataclass(frozen=True, slots=True)
class _Measured:
    started: datetime
    answers: list[Answer]
    summary: Summary
    signature: ModelSignature
    shape: Shape | None
    load: str


async def _measure(args: argparse.Namespace, servers: list[Address]) -> _Measured:
    extent = Extent(args.seconds or (None if args.requests else _SECONDS), args.requests)
    # No retries: they would hide failures in the latency.
    policy = RetryPolicy(tries=1, timeout_s=args.timeout_s)
    async with AsyncRewardClient(args.URL, args.model, policy=policy, max_in_flight=1 << 20) as client:
        signature, load, shape = await _prepare(client, args)
        warmup = args.warmup if args.warmup is not None else args.concurrency
        if warmup:
            await ClientLoad(client, load, args.timeout_s).closed(args.concurrency, Extent(None, warmup))
        answers: list[Answer] = []
        before = await asyncio.to_thread(read_counters, servers)
        with Bar(extent, args.no_progress) as bar:

            def on_answer(answer: Answer) -> None:
                answers.append(answer)
                bar.show(answer)

            driver = ClientLoad(client, load, args.timeout_s, on_answer)
            started = datetime.now(UTC)
            if args.rate is not None:
                await driver.open(poisson(args.rate, extent, args.seed), warmup)
            else:
                await driver.closed(args.concurrency, extent, warmup)
        after = await asyncio.to_thread(read_counters, servers)
    work = work_between(before, after, args.model)
    summary = summarise(answers, work, driver.cores, args.rate)
    summary.checks = check_bounds(summary, args.fail_p99_ms, args.fail_below)
    return _Measured(started, answers, summary, signature, shape, _describe(args, load, shape))


async def _prepare(client: AsyncRewardClient, args: argparse.Namespace) -> tuple[ModelSignature, Load, Shape | None]:
    """Waits for the model; returns its signature and a load that fits it."""
    try:
        await client.wait_ready(args.wait_s)
        signature = await client.info()
        if args.data:
            return signature, FromFile(Path(args.data), args.template, signature), None
        longest = min(_MOST_TOKENS, math.ceil(_TIMES_MEAN * (args.prompt_tokens + args.response_tokens)))
        longest = args.max_length or longest
        shape = Shape(args.prompt_tokens, args.response_tokens, args.responses, args.spread, longest)
        load, shape = await fit(client, signature, shape, args.seed, args.vocab_size)
        return signature, load, shape
    except StartError:
        raise
    except GuerdonError as e:
        raise StartError(str(e), console.advise(e)) from e


def _describe(args: argparse.Namespace, load: Load, shape: Shape | None) -> str:
    pace = f"{args.rate:g} requests per second" if args.rate else f"{args.concurrency} in flight"
    if shape is None:
        return f"rows of {args.data}, {pace}"
    kind = "token ids" if "tokens" in load.request(0).samples else "texts"
    about = "" if kind == "token ids" else "about "
    cut = f", cut at {about}{shape.max_length:,}"
    return (
        f"random {kind}, {shape.responses} responses per prompt, {about}{shape.prompt_tokens:g} + "
        f"{shape.response_tokens:g} tokens{cut}, seed {args.seed}, {pace}"
    )


def _json(args: argparse.Namespace, measured: _Measured, urls: list[str]) -> bytes:
    load: dict[str, Any] = {
        "told": measured.load,
        "data": args.data,
        "seed": args.seed,
        "concurrency": None if args.rate else args.concurrency,
        "rate": args.rate,
        "shape": None if measured.shape is None else asdict(measured.shape),
    }
    results = {
        "guerdon": __version__,
        "started": measured.started.isoformat(timespec="seconds"),
        "urls": urls,
        "model": args.model,
        "platform": measured.signature.platform,
        "load": load,
        **measured.summary.as_json(),
        "notes": list(notes(measured.summary)),
    }
    return orjson.dumps(results, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


if __name__ == "__main__":
    sys.exit(console.exit_status(run))
