"""Judges' answers by content, on disk before they are used, so that no question is paid for twice.

The file has one line of JSON for each answer, after a checksum. A crash may leave the last lines torn: the next start
drops them, and nothing else of them was used. A damaged line between good ones is logged, and its question repeated.
"""

from __future__ import annotations

import asyncio
import logging
import os
import zlib
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import orjson

from guerdon.durable import locked, make_folder, storing, sync
from guerdon.errors import StartError
from guerdon.wire.chat_completions import ChatAnswer

log = logging.getLogger(__name__)

FILE = "answers.jsonl"
_LOCK = "lock"
_HEAD = b'{"crc32":"%08x",'
_HEAD_BYTES = len(_HEAD % 0)


@dataclass(slots=True)
class Spent:
    """A judge's usage over the life of the folder."""

    calls: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0

    def add(self, answer: ChatAnswer) -> None:
        """Counts one answer."""
        self.calls += 1
        self.prompt_tokens += answer.prompt_tokens
        self.completion_tokens += answer.completion_tokens


class Flight:
    """A question that is being asked, for `num_waiting` samples.

    A call in progress (`is_calling`) completes even without waiters: the answer is paid for, and cached.
    """

    def __init__(self) -> None:
        self.num_waiting = 0
        self.is_calling = False
        self.task: asyncio.Task[ChatAnswer] | None = None

    @property
    def is_wanted(self) -> bool:
        """Whether anybody waits for the answer."""
        return self.num_waiting > 0


Fetch = Callable[[Flight], Awaitable[ChatAnswer]]


class AnswerCache:
    """The answers in a folder, which it locks until `close`; `spent` is by judge.

    All but the constructor belongs to one asyncio loop. Raises StartError if another server has the folder, or it
    cannot be used.
    """

    def __init__(self, folder: Path) -> None:
        self.spent: dict[str, Spent] = {}
        self._flights: dict[bytes, Flight] = {}
        self._places: dict[bytes, tuple[int, int]] = {}
        self._waiting: list[tuple[bytes, bytes, asyncio.Future[None]]] = []
        self._writer: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="guerdon-answers")
        try:
            make_folder(folder)
            self._lock = locked(folder / _LOCK)
            self._path = folder / FILE
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
            sync(folder)
            self._size = self._read_all()
        except BlockingIOError:
            raise StartError(
                f"another server keeps its judges' answers in {folder}",
                "give this one another `cache:`, or stop the other",
            ) from None
        except OSError as e:
            raise StartError(
                f"cannot keep answers in {folder}: {e.strerror}", "give a `cache:` folder that can be written"
            ) from e

    def __len__(self) -> int:
        return len(self._places)

    async def get(self, key: bytes, judge: str, fetch: Fetch) -> tuple[ChatAnswer, bool]:
        """Returns the answer of that key, and whether it was kept already; else fetches it, once for all who ask.

        A fetched answer is durable on return. Raises what `fetch` raises, and StorageFailed.
        """
        flight = self._flights.get(key)
        if flight is None:
            if (found := self._find(key)) is not None:
                return found, True
            flight = self._flights[key] = Flight()
            flight.task = asyncio.create_task(self._fetch(key, judge, fetch, flight))
            flight.task.add_done_callback(_retrieve)
        assert flight.task is not None
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task), False
        finally:
            flight.num_waiting -= 1
            if not flight.is_wanted and not flight.is_calling:
                flight.task.cancel()
                self._flights.pop(key, None)

    async def finish(self) -> None:
        """Waits until no question is being asked."""
        while tasks := [flight.task for flight in self._flights.values() if flight.task is not None]:
            await asyncio.wait(tasks)

    async def abandon(self) -> None:
        """Cancels the calls in progress; complete answers are kept."""
        tasks = [flight.task for flight in self._flights.values() if flight.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._writer is not None:
            await asyncio.wait([self._writer])

    def close(self) -> None:
        """Unlocks the folder."""
        self._thread.shutdown()
        os.close(self._file)
        self._lock.close()

    async def _fetch(self, key: bytes, judge: str, fetch: Fetch, flight: Flight) -> ChatAnswer:
        try:
            if self._waiting and self._writer is None:  # what the disk has refused; it may still do so
                await self._store(b"", b"")
            if (found := self._find(key)) is not None:
                return found
            answer = await fetch(flight)
            self.spent.setdefault(judge, Spent()).add(answer)
            data = orjson.dumps({"key": key.hex(), "judge": judge, **asdict(answer)})
            await self._store(key, _HEAD % zlib.crc32(data) + data[1:] + b"\n")
            return answer
        finally:
            if self._flights.get(key) is flight:
                del self._flights[key]

    async def _store(self, key: bytes, line: bytes) -> None:
        """Writes a line after all that wait, without a key only these; raises StorageFailed."""
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((key, line, done))
        if self._writer is None:
            self._writer = asyncio.create_task(self._write())
        await done

    async def _write(self) -> None:
        """Writes all that waits, in one go; what arrives meanwhile waits for the next."""
        try:
            while self._waiting:
                batch, data = list(self._waiting), b"".join(line for _, line, _ in self._waiting)
                try:
                    with storing("the judge's answers cannot be kept, so that they are not used"):
                        await asyncio.get_running_loop().run_in_executor(self._thread, self._append, data)
                except Exception as e:
                    for _, _, done in self._waiting:  # the lines stay, to be written before the next call
                        if not done.done():
                            done.set_exception(e)
                    self._waiting = [one for one in self._waiting if one[0]]
                    return
                del self._waiting[: len(batch)]
                for key, line, done in batch:
                    if key:
                        self._places[key] = (self._size, len(line))
                        self._size += len(line)
                    if not done.done():
                        done.set_result(None)
        finally:
            self._writer = None

    def _append(self, data: bytes) -> None:
        at = self._size  # the same place again if the disk refused a part of it
        while data:
            written = os.pwrite(self._file, data, at)
            at, data = at + written, data[written:]
        os.fsync(self._file)

    def _find(self, key: bytes) -> ChatAnswer | None:
        place = self._places.get(key)
        if place is None:
            return None
        read = _read(os.pread(self._file, place[1], place[0]))
        if read is None or read[0] != key:
            log.error("%s: the answer at byte %d is damaged; its question is repeated", self._path, place[0])
            del self._places[key]
            return None
        return read[2]

    def _read_all(self) -> int:
        """Indexes the file, truncates it after its last good line, and returns that line's end."""
        at = end = num_damaged = num_bad = 0
        with open(self._path, "rb") as file:
            for line in file:
                if (read := _read(line)) is None:
                    num_bad += 1
                else:
                    num_damaged, num_bad, end = num_damaged + num_bad, 0, at + len(line)
                    key, judge, answer = read
                    self._places[key] = (at, len(line))
                    self.spent.setdefault(judge, Spent()).add(answer)
                at += len(line)
        if num_damaged:
            log.error(
                "%s: %d of its lines are damaged: these answers are lost; their questions are repeated",
                self._path,
                num_damaged,
            )
        if end < at:
            log.warning(
                "%s: the last %d bytes are of an answer that was not used, and are cut off", self._path, at - end
            )
            os.ftruncate(self._file, end)
            os.fsync(self._file)
        return end


def _retrieve(task: asyncio.Task[ChatAnswer]) -> None:
    if not task.cancelled():
        task.exception()  # else asyncio would log it if nobody waits any more


def _read(line: bytes) -> tuple[bytes, str, ChatAnswer] | None:
    """Returns key, judge and answer of a line; None if it is damaged."""
    record = b"{" + line[_HEAD_BYTES:-1]
    if line[:_HEAD_BYTES] != _HEAD % zlib.crc32(record) or not line.endswith(b"\n"):
        return None
    fields = orjson.loads(record)
    return (
        bytes.fromhex(fields["key"]),
        fields["judge"],
        ChatAnswer(**{k: v for k, v in fields.items() if k in ChatAnswer.__slots__}),
    )
