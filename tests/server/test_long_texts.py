"""Texts far longer than a model takes: the memory that they take, and who waits for them."""

import asyncio
import contextlib
import gzip
import os
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import orjson
import psutil
import pytest

import zoo
from guerdon.assembly import build_service
from guerdon.core import ScoreRequest
from guerdon.engine.checkpoint import cuts
from guerdon.engine.checkpoint.text import TextEncoder
from guerdon.errors import InvalidRequest, Overloaded
from guerdon.server.service import Service
from guerdon.settings.config import ModelConfig, ServerConfig

LONG = "the ring of the reader " * 40_000
"""920,000 characters, 14 steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return zoo.tokenizer(zoo.checkpoint("llama", tmp_path_factory.mktemp("long")))


def test_a_small_body_that_holds_a_long_text_takes_little_memory(folder: Path) -> None:
    command = [sys.executable, "-m", "guerdon", "serve", str(folder), "--port", "0", "--no-grpc"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    try:
        assert process.stdout is not None
        found = re.search(r":(\d+)", next(line for line in process.stdout if "ready at" in line))
        assert found is not None
        body = gzip.compress(orjson.dumps({"input": "the ring of a reader " * 1_150_000}))
        assert len(body) < 100_000
        peaks = []
        for text in (orjson.dumps({"input": "the ring"}), body):
            headers = {"Content-Encoding": "gzip"} if text is body else {}
            answer = httpx.post(f"http://127.0.0.1:{found[1]}/classify", content=text, headers=headers, timeout=120)
            peaks.append(psutil.Process(process.pid).memory_info().rss)
        assert answer.status_code == 400 and f"has more than {zoo.MAX_LENGTH} tokens" in answer.text
        status = Path(f"/proc/{process.pid}/status")
        if status.exists():
            peaks.append(1024 * int(re.search(r"VmHWM:\s+(\d+)", status.read_text())[1]))  # type: ignore[index]
        # The body and its text are held a few times over; tokenised whole it took 3 GB.
        assert max(peaks) - peaks[0] < 400e6
    finally:
        process.terminate()
        assert process.wait(30) == 0


@contextlib.asynccontextmanager
async def serving(folder: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Service, list[int]]]:
    """A service that truncates on the left, so that a long prompt's length is counted; and what it tokenised."""
    ids, seen = TextEncoder._ids, []

    def counting(self: TextEncoder, texts: list[str], add_special_tokens: bool = False) -> list[list[int]]:
        seen.append(sum(map(len, texts)))
        return ids(self, texts, add_special_tokens)

    monkeypatch.setattr(TextEncoder, "_ids", counting)
    service = build_service(ServerConfig(models=[ModelConfig(model=str(folder))]))
    seen.clear()
    service.start()
    try:
        yield service, seen
    finally:
        await asyncio.to_thread(service.stop)


def many(count: int) -> ScoreRequest:
    """Texts that are tokenised for as long as `count` steps take."""
    return ScoreRequest(texts=[LONG[:60_000]] * count)


async def test_one_clients_texts_do_not_starve_anothers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder, monkeypatch) as (service, seen):
        flood = [asyncio.create_task(service.score("reward_model", many(15), "a")) for _ in range(3)]
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        before = len(seen)
        await service.score("reward_model", ScoreRequest(texts=["the ring"]), "b")
        # Two threads, on which the clients alternate.
        assert sum(seen[before : seen.index(len("the ring"))]) <= 4 * cuts.PIECE
        for task in flood:
            assert all(isinstance(row, InvalidRequest) for row in (await task).results)


async def test_nothing_more_is_tokenised_for_who_has_left(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(folder, monkeypatch) as (service, seen):
        leaves = asyncio.create_task(service.score("reward_model", many(200), "a"))
        while len(seen) < 2:
            await asyncio.sleep(0.001)
        leaves.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaves
        before = len(seen)
        for _ in range(5):
            await service.score("reward_model", ScoreRequest(texts=["the ring"]), "a")
        assert len(seen) - before <= 5 + 1


async def test_a_text_is_tokenised_no_further_than_its_model_reads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, monkeypatch) as (service, seen):
        reply = await service.score("reward_model", ScoreRequest(texts=[LONG]))
        assert f"has more than {zoo.MAX_LENGTH} tokens" in str(reply.results[0])
        assert len(seen) == 1 and seen[0] < len(LONG) / 10


async def test_texts_are_not_tokenised_if_the_queue_has_no_room_for_them(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(folder, monkeypatch) as (service, seen):
        room = service.loops.of["reward_model"]._schedulers["reward_model"].room
        room.take(waiting := room.sequences.total - 1, 1, "")
        with pytest.raises(Overloaded):
            await service.score("reward_model", ScoreRequest(texts=["the ring"] * 2))
        assert not seen
        room.give(waiting, 1, "")
        await service.score("reward_model", ScoreRequest(texts=["the ring"] * 2))
        assert seen
