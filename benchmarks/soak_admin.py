"""The admin of a soak: switches the reward model between two checkpoints, and tries to load invalid ones."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson

import soak_samples
from soak_ledger import Ledger
from soak_wire import Answer, Connection, post

LOAD_S = 120.0
REFUSED = ("broken", "other", "cut", "missing", "../critic", "/etc")
"""Folders under the repository that must not serve, and paths out of it."""


class Admin:
    """Makes one change at a time, and checks the model after each."""

    def __init__(self, key: str, port: int, ledger: Ledger, folder: Path, on_event: Callable[[str], None]) -> None:
        self._key, self._port, self._ledger, self._on_event = key, port, ledger, on_event
        self._serves = "a"
        self._samples = soak_samples.samples(folder)
        self._count = 0
        self._is_unloaded = False

    async def act(self, what: str) -> None:
        """Does `swap`, `bad swap`, or `spare`, which unloads or reloads the second model."""
        if what == "swap":
            variant = "b" if self._serves == "a" else "a"
            answer = await self._post("helpful/load", variant)
            if answer.status == 200:
                self._serves = variant
            else:
                self._ledger.wrong("swap", f"got {answer.status}: {answer.body[:300]!r}")
            await self._check()
        elif what == "bad swap":
            folder = random.choice(REFUSED)
            answer = await self._post("helpful/load", folder)
            if not 400 <= answer.status < 500:
                self._ledger.wrong("bad swap", f"{folder} got {answer.status}: {answer.body[:300]!r}")
            await self._check()
        elif self._is_unloaded:
            await self._wanted("spare/load")
            self._is_unloaded = False
        else:
            await self._wanted("spare/unload")
            self._is_unloaded = True
        self._ledger.note(f"{what}s" if what != "spare" else "unloads and loads")
        self._on_event(what)

    async def close(self) -> None:
        """Reloads the second model if it is unloaded."""
        if self._is_unloaded:
            await self._wanted("spare/load")

    async def _wanted(self, what: str) -> None:
        answer = await self._post(what)
        if answer.status != 200:
            self._ledger.wrong(what, f"got {answer.status}: {answer.body[:300]!r}")

    async def _post(self, what: str, folder: str | None = None) -> Answer:
        body = b"" if folder is None else orjson.dumps({"parameters": {"model": folder}})
        return await self._exchange(post(f"/v2/repository/models/{what}", body, self._key))

    async def _check(self) -> None:
        """Checks that requests after an acknowledged load are scored by the loaded checkpoint."""
        self._count += 1
        pick, name = random.choice(self._samples), f"admin-{self._count}"
        inputs: list[Any] = [{"name": "sentences", "datatype": "BYTES", "shape": [1], "data": [pick["text"]]}]
        body = orjson.dumps({"id": name, "inputs": inputs})
        self._ledger.sent(name, "helpful", 1)
        answer = await self._exchange(post("/v2/models/helpful/infer", body, self._key))
        if answer.status != 200:
            self._ledger.done(name, answer.kind)
            self._ledger.wrong(name, f"after a load: {answer.status}: {answer.body[:200]!r}")
            return
        told = orjson.loads(answer.body)
        reward = next(output["data"] for output in told["outputs"] if output["name"] == "rewards")[0]
        if not np.isclose(reward, pick[self._serves], rtol=1e-5, atol=1e-3):
            self._ledger.wrong(name, f"{reward} is not the score of {self._serves}, which was loaded last")
        self._ledger.seen("helpful", str(told["parameters"]["weights_version"]), self._serves)
        self._ledger.done(name, "ok", 1)

    async def _exchange(self, request: bytes) -> Answer:
        connection = await Connection.open(self._port)
        try:
            return await connection.ask(request, LOAD_S)
        finally:
            connection.cut()
