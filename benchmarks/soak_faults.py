"""The faults of a soak's clients: they cut, stall, read slowly, vanish, and send malformed bytes."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import orjson

from guerdon.wire import kserve
from guerdon.wire.tensors import InferRequest, Tensor
from soak_report import HALF_OPEN, NOT_PERMITTED
from soak_wire import Broken, Connection, get, post

if TYPE_CHECKING:
    from soak_client import Client

ENDS_S = 60.0
"""The time within which the server must close a stalled connection; its own limits are a tenth of it."""
BAD_BODIES: tuple[Callable[[], bytes], ...] = (
    lambda: os.urandom(random.randint(0, 4000)),
    lambda: b'{"inputs": [',
    lambda: b"[" * 5000,
    lambda: orjson.dumps({"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [2, 2], "data": [1, 2, 3]}]}),
    lambda: orjson.dumps({"inputs": [{"name": "tokens", "datatype": "FP64", "shape": [1, 1], "data": [1.5]}]}),
    lambda: orjson.dumps({"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [2**40, 2**40], "data": []}]}),
    lambda: orjson.dumps({"inputs": [{"name": "sentences", "datatype": "BYTES", "shape": [0], "data": []}]}),
    lambda: orjson.dumps(_ids([10**9])),
    lambda: orjson.dumps(_ids([-5])),
    lambda: orjson.dumps(_ids([5] * 3000)),
    lambda: orjson.dumps({"inputs": "no", "outputs": 3}),
)


class Faults:
    """The kinds of faults of one client; the server does not know `wrong_key`."""

    def __init__(self, client: Client, wrong_key: str) -> None:
        self._client = client
        self._ledger = client.ledger
        self._wrong_key = wrong_key
        self._slow = asyncio.Semaphore(4)
        """How many of those that take seconds may be under way at once."""

    def kinds(self) -> list[tuple[Callable[[], Awaitable[None]], float]]:
        """Returns each kind with its weight; valid requests weigh about 100 in total."""
        slow = (self.slow_writer, self.slow_reader, self.stalled_body, self.stalled_head, self.never_reads)
        found: list[tuple[Callable[[], Awaitable[None]], float]] = [(self._one_of_few(kind), 0.25) for kind in slow]
        return [*found, (self.cut, 3), (self.cut_grpc, 2), (self.bad_body, 4), (self.no_http, 0.5),
                (self.refused, 2), (self.too_large, 0.5), (self.vanishes, 0.3)]  # fmt: skip

    def _one_of_few(self, kind: Callable[[], Awaitable[None]]) -> Callable[[], Awaitable[None]]:
        async def call() -> None:
            if self._slow.locked():
                return
            async with self._slow:
                await kind()

        call.__name__ = kind.__name__
        return call

    async def cut(self) -> None:
        """Sends a request, and disconnects before the answer."""
        name = self._client.name()
        request, count, _ = self._client.scoring(name)
        connection = await Connection.open(self._client.pool.port)
        self._ledger.sent(name, "helpful", count)
        connection.send(request[: random.choice((len(request), random.randint(1, len(request))))])
        await asyncio.sleep(random.uniform(0, 0.02))
        connection.cut()
        self._ledger.doubt(name)
        self._ledger.note("connections cut")

    async def cut_grpc(self) -> None:
        """Does the same over gRPC."""
        await self._client.over_grpc(cut=True)
        self._ledger.note("gRPC calls cancelled")

    async def bad_body(self) -> None:
        """Sends requests that must get status 400."""
        name = self._client.name()
        body = random.choice(BAD_BODIES)()
        self._ledger.sent(name, "helpful", 1)  # of some the one sample is refused, of others all
        headers = {"Content_Encoding": random.choice(("gzip", "deflate"))} if random.random() < 0.2 else {}
        answer = await self._client.exchange(post("/v2/models/helpful/infer", body, self._client.key, **headers))
        kind = answer.kind
        self._ledger.done(name, kind)
        if not 400 <= answer.status < 500:
            self._ledger.wrong(name, f"a bad body got {answer.status}: {answer.body[:200]!r} for {body[:100]!r}")
        self._ledger.note("bad bodies")

    async def too_large(self) -> None:
        """Announces a body above the limit: it is refused before it is sent."""
        name = self._client.name()
        self._ledger.sent(name, "helpful")
        connection = await Connection.open(self._client.pool.port)
        try:
            head = post("/v2/models/helpful/infer", b"{", self._client.key, Content_Length=str(1 << 30))
            answer = await connection.ask(head, ENDS_S)
        finally:
            connection.cut()
        self._ledger.done(name, answer.kind)
        if answer.status != 413:
            self._ledger.wrong(name, f"a body of a gigabyte got {answer.status}: {answer.body[:200]!r}")
        self._ledger.note("bodies too large")

    async def no_http(self) -> None:
        """Sends bytes that are no request: they are refused, and the connection closed."""
        connection = await Connection.open(self._client.pool.port)
        waiting = connection.expect()
        connection.send(b"\x16\x03\x01" + os.urandom(200) + b"\r\n\r\n")
        try:
            async with asyncio.timeout(ENDS_S):
                answer = await waiting
                if answer.status != 400:
                    self._ledger.wrong("no_http", f"noise got {answer.status}")
        except Broken:
            pass
        finally:
            connection.cut()
        self._ledger.note("no HTTP")

    async def refused(self) -> None:
        """Sends no key, a wrong key, a request beyond the key's role, or an unknown path."""
        key, name = self._client.key, self._client.name()
        self._ledger.sent(name, "critic_save")  # in doubt: whether a refusal counts as a request to it is not said
        self._ledger.doubt(name)
        request, wanted = random.choice((
            (get("/v2"), (401,)),
            (get("/metrics", self._wrong_key), (401,)),
            (post("/v2/models/critic_save/infer", b'{"inputs": []}', key), (403,)),
            (post("/v2/repository/models/helpful/load", b"{}", key), (403,)),
            (get("/v2/models/../../etc/passwd", key), (400, 404)),
            (get("/v2/models/%2e%2e%2fetc", key), (400, 404)),
        ))  # fmt: skip
        connection = await Connection.open(self._client.pool.port)
        try:
            answer = await connection.ask(request, ENDS_S)
        finally:
            connection.cut()
        if answer.status not in wanted:
            self._ledger.wrong("refused", f"{request[:60]!r} got {answer.status}, not {wanted}")
        self._ledger.note("refused for their key or path")

    async def slow_writer(self) -> None:
        """Sends a valid request in pieces, over seconds: it is answered."""
        name = self._client.name()
        request, count, check = self._client.scoring(name, least=8, most=24)
        connection = await Connection.open(self._client.pool.port)
        self._ledger.sent(name, "helpful", count)
        try:
            waiting = connection.expect()
            await connection.dribble(request, pieces=12, pause_s=0.3)
            async with asyncio.timeout(ENDS_S):
                check(await waiting)
        finally:
            connection.cut()
        self._ledger.note("slow writers")

    async def slow_reader(self) -> None:
        """Reads a large answer in small pieces: it arrives complete."""
        await self._large_answer(gives_up=False)
        self._ledger.note("slow readers")

    async def never_reads(self) -> None:
        """Does not read a large answer at all: the server closes the connection, and keeps nothing."""
        await self._large_answer(gives_up=True)
        self._ledger.note("readers that never read")

    async def stalled_body(self) -> None:
        """Sends half a request, and then nothing: the server closes the connection."""
        name = self._client.name()
        request, count, _ = self._client.scoring(name)
        self._ledger.sent(name, "helpful", count)
        await self._must_end(request[: len(request) // 2 + 100], "a body that stalls")
        self._ledger.doubt(name)
        self._ledger.note("stalled bodies")

    async def stalled_head(self) -> None:
        """Sends half a head, or nothing at all."""
        await self._must_end(
            random.choice((b"", b"POST /v2/models/helpful/infer HTTP/1.1\r\nHost: x")), "a stalled head"
        )
        self._ledger.note("stalled heads")

    async def vanishes(self) -> None:
        """Simulates a power loss of the client's host: during a request, or between two."""
        connection = await Connection.open(self._client.pool.port)
        name = self._client.name()
        request, count, _ = self._client.scoring(name)
        if random.random() < 0.7:
            self._ledger.sent(name, "helpful", count)
            connection.send(request[: random.choice((len(request), len(request) // 2))])
            await asyncio.sleep(0.01)
        self._ledger.note(HALF_OPEN if connection.vanish() else NOT_PERMITTED)
        self._ledger.doubt(name)

    async def _must_end(self, data: bytes, what: str) -> None:
        connection = await Connection.open(self._client.pool.port)
        try:
            waiting = connection.expect()
            if data:
                connection.send(data)
            async with asyncio.timeout(ENDS_S):
                answer = await waiting
                if answer.status < 400:
                    self._ledger.wrong(what, f"got {answer.status}")
        except Broken:
            pass
        except TimeoutError:
            self._ledger.wrong(what, f"is still connected after {ENDS_S:g} s")
        finally:
            connection.cut()

    async def _large_answer(self, *, gives_up: bool) -> None:
        name, (num_rows, width) = self._client.name(), (48, 1000)
        rng = np.random.default_rng()
        tensors = {
            "tokens": Tensor.of("tokens", rng.integers(3, 90, (num_rows, width))),
            "sequence_lengths": Tensor.of("sequence_lengths", np.full(num_rows, width)),
        }
        body, json_length = kserve.encode_request(InferRequest(tensors, {"values": False}, name))
        connection = await Connection.open(self._client.pool.port, buffer_bytes=4096)
        self._ledger.sent(name, "critic_infer", num_rows)
        waiting = connection.expect()
        connection.send(post("/v2/models/critic_infer/infer", body, self._client.key, json_length))
        try:
            async with asyncio.timeout(ENDS_S * 2):
                await asyncio.sleep(0.3)  # the request is away before the reading stops
                while not waiting.done():
                    connection.pause()
                    await asyncio.sleep(12.0 if gives_up else 0.3)
                    if gives_up:
                        break
                    connection.resume()
                    await asyncio.sleep(0.1)
                if not gives_up:
                    self._check_values(name, await waiting, num_rows, width)
        finally:
            connection.cut()
            if gives_up:
                self._ledger.doubt(name)

    def _check_values(self, name: str, answer: Any, num_rows: int, width: int) -> None:
        told = orjson.loads(answer.body)
        if answer.status != 200:
            self._ledger.done(name, answer.kind)
            if answer.status != 503:
                self._ledger.wrong(name, f"values: {answer.status}: {answer.body[:200]!r}")
            return
        data = next(output["data"] for output in told["outputs"] if output["name"] == "values")
        if told["id"] != name or len(data) != num_rows * width or None in data:
            self._ledger.wrong(name, "a slow reader's answer is not whole")
        self._ledger.done(name, "ok", num_rows)


def _ids(ids: list[int]) -> dict[str, Any]:
    lengths = {"name": "sequence_lengths", "datatype": "INT64", "shape": [1, 1], "data": [len(ids)]}
    return {"inputs": [{"name": "tokens", "datatype": "INT64", "shape": [1, len(ids)], "data": ids}, lengths]}
