"""A server of a judge in words, which kills itself with SIGKILL where it is told to."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import httpx
import orjson

from guerdon import assembly
from guerdon.server import runtime
from guerdon.server.chat_judge import answer_cache
from guerdon.server.chat_judge.answer_cache import AnswerCache
from guerdon.server.chat_judge.calling import ChatCaller
from guerdon.settings.chat_judges import ChatJudgeConfig
from guerdon.settings.config import ServerConfig
from killing import Points, kill_at

AMID = "amid a write"
POINTS: Points = {
    "before a call": (ChatCaller, "_call", True),
    "between an answer and the disk": (AnswerCache, "_append", True),
    "between the write and its fsync": (os, "pwrite", False),  # type: ignore[dict-item]
    "between the disk and the sample": (AnswerCache, "_append", False),
}
STARTS = "starts.jsonl"


def recorded(folder: Path) -> list[str]:
    """The keys of the whole answers in a folder."""
    file = folder / answer_cache.FILE
    lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    return [read[0].hex() for line in lines if (read := answer_cache._read(line)) is not None]


def serve(config: ServerConfig, point: str | None, nth: int) -> None:
    """Notes what was recorded and asked until now; then serves until it is stopped or kills itself."""
    (judge,) = config.models
    assert isinstance(judge, ChatJudgeConfig)
    folder = Path(judge.cache)
    counts = httpx.get(judge.url).json()
    with (folder.parent / STARTS).open("ab") as file:
        file.write(orjson.dumps({"recorded": recorded(folder), "asked": counts["asked"]}) + b"\n")
    if point == AMID:
        kill_amid_a_write(nth)
    else:
        kill_at(POINTS, point, nth)
    runtime.run(assembly.build_service(config), config)


def kill_amid_a_write(nth: int) -> None:
    """Makes this process die when it has written half of the n-th batch of answers."""
    write, count = os.pwrite, [0]

    def half(file: int, data: bytes, at: int) -> int:
        count[0] += 1
        if count[0] == nth:
            write(file, data[: max(1, len(data) - 40)], at)
            os.kill(os.getpid(), signal.SIGKILL)
        return write(file, data, at)

    os.pwrite = half  # type: ignore[assignment]
