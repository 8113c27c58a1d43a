"""`guerdon bench`: a run from the first look at the server to the exit status."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson

from guerdon.cli import console
from guerdon.cli.bench import checks, counters, plot, table
from guerdon.cli.bench.driving import Answer, Driver, Extent
from guerdon.cli.bench.fitting import fitted
from guerdon.cli.bench.flags import MOST_TOKENS, SECONDS, TIMES_MEAN, add, defaults
from guerdon.cli.bench.load import FromFile, Load, Shape
from guerdon.cli.bench.progress import Bar
from guerdon.cli.bench.summary import Summary, bounded, summarised
from guerdon.client.addresses import Address
from guerdon.client.calls import ModelSignature
from guerdon.client.clients import AsyncRewardClient
from guerdon.client.retry import RetryPolicy
from guerdon.errors import Exit, GuerdonError, StartError, StorageFailed, install_command
from guerdon.settings.access import strip_credentials

__all__ = ["add", "run"]


def run(args: argparse.Namespace) -> int:
    """Runs the load; returns the exit status. Raises StartError where it cannot start."""
    checks.check_options(args)
    checks.check_files(args)
    servers = checks.servers(args.URL)
    args = defaults(args)
    measured = asyncio.run(_measure(args, servers))
    summary = measured.summary
    urls = [strip_credentials(url) for url in args.URL]
    heading = f"guerdon bench: {args.model} at {', '.join(urls)}"
    if args.json == "-":
        sys.stdout.write(_json(args, measured, urls).decode())
    else:
        sys.stdout.write(table.written(summary, heading, measured.load, sys.stdout))
    sys.stdout.flush()
    if args.json and args.json != "-":
        with _writing(args.json):
            Path(args.json).write_bytes(_json(args, measured, urls))
    if args.plot:
        with _writing(args.plot):
            plot.save(measured.answers, summary, Path(args.plot), heading, measured.load)
    return Exit.FAILED if summary.has_failed else Exit.DONE


@contextlib.contextmanager
def _writing(path: str) -> Iterator[None]:
    """A context that raises StorageFailed, with the path, where the file cannot be written: an OSError may lack it."""
    try:
        yield
    except OSError as e:
        raise StorageFailed(f"cannot write {path}: {e.strerror}") from e


@dataclass(frozen=True, slots=True)
class _Measured:
    started: datetime
    answers: list[Answer]
    summary: Summary
    signature: ModelSignature
    shape: Shape | None
    load: str


async def _measure(args: argparse.Namespace, servers: list[Address]) -> _Measured:
    extent = Extent(args.seconds or (None if args.requests else SECONDS), args.requests)
    # What fails is told, and not tried again: a retry would hide it in a latency.
    policy = RetryPolicy(tries=1, timeout_s=args.timeout_s)
    async with AsyncRewardClient(args.URL, args.model, policy=policy, max_in_flight=1 << 20) as client:
        signature, load, shape = await _prepared(client, args)
        warmup = args.warmup if args.warmup is not None else args.concurrency
        if warmup:
            driver = Driver(client, load, args.timeout_s, lambda _: None)
            await driver.closed(args.concurrency, Extent(None, warmup))
        answers: list[Answer] = []
        before = await asyncio.to_thread(counters.read, servers)
        with Bar(extent, args.no_progress) as bar:
            driver = Driver(client, load, args.timeout_s, bar.also(answers.append))
            started = datetime.now(UTC)
            if args.rate is not None:
                await driver.open(args.rate, extent, args.seed, warmup)
            else:
                await driver.closed(args.concurrency, extent, warmup)
        after = await asyncio.to_thread(counters.read, servers)
    summary = summarised(answers, counters.work(before, after, args.model), driver.cores, args.rate)
    summary.checks = bounded(summary, args.fail_p99_ms, args.fail_below)
    return _Measured(started, answers, summary, signature, shape, _told(args, load, shape))


async def _prepared(client: AsyncRewardClient, args: argparse.Namespace) -> tuple[ModelSignature, Load, Shape | None]:
    """What the model takes, and a load that fits it; raises StartError where there is none."""
    try:
        await client.wait_ready(args.wait_s)
        signature = await client.info()
        if args.data:
            return signature, FromFile(Path(args.data), args.template, signature), None
        longest = min(MOST_TOKENS, math.ceil(TIMES_MEAN * (args.prompt_tokens + args.response_tokens)))
        longest = args.max_length or longest
        shape = Shape(args.prompt_tokens, args.response_tokens, args.responses, args.spread, longest)
        load, shape = await fitted(client, signature, shape, args.seed, args.vocab_size)
        return signature, load, shape
    except StartError:
        raise
    except ImportError as e:  # gRPC is an extra
        raise StartError("grpc:// needs gRPC, which is not installed", install_command("grpc")) from e
    except GuerdonError as e:
        raise StartError(str(e), console.help_for(e)) from e


def _told(args: argparse.Namespace, load: Load, shape: Shape | None) -> str:
    """The load in words."""
    pace = f"{args.rate:g} requests a second" if args.rate else f"{args.concurrency} at once"
    if shape is None:
        return f"rows of {args.data}, {pace}"
    kind = "token ids" if "tokens" in load.request(0).samples else "texts"
    about = "" if kind == "token ids" else "about "
    cut = f", cut at {about}{shape.max_length:,}"
    return (
        f"random {kind}, {shape.responses} responses a prompt, {about}{shape.prompt_tokens:g} + "
        f"{shape.response_tokens:g} tokens{cut}, seed {args.seed}, {pace}"
    )


def _json(args: argparse.Namespace, measured: _Measured, urls: list[str]) -> bytes:
    from guerdon import __version__

    load: dict[str, Any] = {
        "told": measured.load,
        "data": args.data,
        "seed": args.seed,
        "concurrency": None if args.rate else args.concurrency,
        "rate": args.rate,
        "shape": None if measured.shape is None else asdict(measured.shape),
    }
    told = {
        "guerdon": __version__,
        "started": measured.started.isoformat(timespec="seconds"),
        "urls": urls,
        "model": args.model,
        "platform": measured.signature.platform,
        "load": load,
        **measured.summary.as_json(),
        "notes": list(table.notes(measured.summary)),
    }
    return orjson.dumps(told, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)
