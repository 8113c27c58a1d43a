"""`guerdon bench`: a run from the first look at the server to the exit status."""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson

from guerdon.access import without_key
from guerdon.bench import counters, plot, table
from guerdon.bench.driving import Answer, Driver, Extent
from guerdon.bench.fitting import fitted
from guerdon.bench.flags import SECONDS, TIMES_MEAN, add
from guerdon.bench.load import FromFile, Load, Shape
from guerdon.bench.progress import Bar
from guerdon.bench.summary import Summary, bounded, summarised
from guerdon.client.addresses import addresses
from guerdon.client.calls import ModelSignature
from guerdon.client.clients import AsyncRewardClient
from guerdon.client.retry import RetryPolicy
from guerdon.errors import ConfigError, GuerdonError, StartError, StorageFailed
from guerdon.exits import Exit

__all__ = ["add", "run"]


def run(args: argparse.Namespace) -> int:
    """Runs the load; returns the exit status. Raises StartError where it cannot start."""
    _check_files(args)
    measured = asyncio.run(_measure(args))
    summary = measured.summary
    urls = [without_key(url) for url in args.URL]
    heading = f"guerdon bench: {args.model} at {', '.join(urls)}"
    told = _json(args, measured, urls)
    if args.json == "-":
        sys.stdout.write(told.decode())
    else:
        sys.stdout.write(table.written(summary, heading, measured.load, sys.stdout))
    sys.stdout.flush()
    try:
        if args.json and args.json != "-":
            Path(args.json).write_bytes(told)
        if args.plot:
            plot.save(measured.answers, summary, Path(args.plot), heading, measured.load)
    except OSError as e:
        raise StorageFailed(f"cannot write {e.filename}: {e.strerror}") from e
    return Exit.FAILED if summary.has_failed else Exit.DONE


def _check_files(args: argparse.Namespace) -> None:
    """Raises StartError where what is asked for cannot be written: before the load, not behind it."""
    if args.plot:
        if find_spec("matplotlib") is None:
            raise StartError("matplotlib is not installed, which --plot needs", "pip install 'guerdon[plot]'")
        if Path(args.plot).suffix.lower() != ".png":
            raise ConfigError(f"--plot {args.plot} is no PNG", "give a name that ends in .png")
    for path in filter(None, (args.json, args.plot)):
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"there is no folder {folder} to write {Path(path).name} into", "make it first")


@dataclass(frozen=True, slots=True)
class _Measured:
    started: datetime
    answers: list[Answer]
    summary: Summary
    signature: ModelSignature
    shape: Shape | None
    load: str


async def _measure(args: argparse.Namespace) -> _Measured:
    servers = addresses(args.URL, None)
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
            started, cpu_s = datetime.now(UTC), time.process_time()
            if args.rate is not None:
                await driver.open(args.rate, extent, args.seed, warmup)
            else:
                await driver.closed(args.concurrency, extent, warmup)
            cpu_s = time.process_time() - cpu_s
        after = await asyncio.to_thread(counters.read, servers)
    summary = summarised(answers, counters.work(before, after, args.model), cpu_s)
    summary.checks = bounded(summary, args.fail_p99_ms, args.fail_below)
    return _Measured(started, answers, summary, signature, shape, _told(args, load, shape))


async def _prepared(client: AsyncRewardClient, args: argparse.Namespace) -> tuple[ModelSignature, Load, Shape | None]:
    """What the model takes, and a load that fits it; raises StartError where there is none."""
    try:
        await client.wait_ready(args.wait_s)
        signature = await client.info()
        if args.data:
            return signature, FromFile(Path(args.data), args.template, signature), None
        longest = args.max_length or math.ceil(TIMES_MEAN * (args.prompt_tokens + args.response_tokens))
        shape = Shape(args.prompt_tokens, args.response_tokens, args.responses, args.spread, longest)
        load, shape = await fitted(client, signature, shape, args.seed, args.vocab_size)
        return signature, load, shape
    except StartError:
        raise
    except ImportError as e:  # gRPC is an extra
        raise StartError("grpc:// needs gRPC, which is not installed", "pip install 'guerdon[grpc]'") from e
    except GuerdonError as e:
        raise StartError(str(e), "`guerdon doctor URL` tells what is there, and --model names one") from e


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
