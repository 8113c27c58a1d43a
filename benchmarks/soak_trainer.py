"""The trainer of a soak: sends train requests in order, each until it is answered, through kills and cuts.

A new process resumes where the killed one stopped: it resends the unanswered request under its id.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
from pathlib import Path

import orjson

import soak_samples
from guerdon.wire import kserve
from guerdon.wire.tensors import InferReply, InferRequest, Tensor
from soak_client import TIMEOUT_S
from soak_ledger import Ledger
from soak_wire import Answer, Broken, Connection, post

GLOBAL_BATCH_SIZE = 4
CUT_SHARE, TWICE_SHARE, CHANGED_SHARE, SAVE_SHARE = 0.15, 0.1, 0.03, 0.01
"""Shares of train requests: cut and resent, sent twice at once, resent with other content, followed by a save."""


class Trainer:
    """One process's part of the critic's training; `number` is the next request's."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.number, self._step = _before(args.ledger.parent)
        self._ledger = Ledger(args.ledger)
        self._port, self._key = args.port, args.key
        self._tag, self._count = args.ledger.stem, 0

    async def train(self) -> None:
        """Sends the next request until it is acknowledged; it must be applied once, after all before it."""
        number = self.number
        self._ledger.trains(number)
        if random.random() < CUT_SHARE:
            await self._cut(number)
        if random.random() < TWICE_SHARE:
            answers = await asyncio.gather(self._ask(number), self._ask(number))
            if orjson.loads(answers[0]) != orjson.loads(answers[1]):
                self._ledger.wrong(f"train {number}", f"one id was answered {answers[0]!r} and {answers[1]!r}")
            answer = answers[0]
        else:
            answer = await self._ask(number)
        report = orjson.loads(answer)
        num_steps = -(-len(soak_samples.rows(number)["tokens"]) // GLOBAL_BATCH_SIZE)
        self._step += num_steps
        if report["step"] != self._step or report["num_steps"] != num_steps:
            self._ledger.wrong(
                f"train {number}",
                f"made step {report['step']} by {report['num_steps']}, not {self._step} by {num_steps}",
            )
        self._ledger.trained(number, num_steps, self._step)
        self.number += 1
        if random.random() < CHANGED_SHARE:
            await self._changed(number)
        if random.random() < SAVE_SHARE:
            await self._save()

    async def _ask(self, number: int) -> bytes:
        """Returns the report that answers it; resends it while the refusal is temporary."""
        while True:
            name, request = self._request(number)
            answer = await self._exchange(name, "critic_train", request)
            if answer.status == 200:
                return self._report(name, answer)
            if answer.status != 503:
                raise RuntimeError(f"train {number} got {answer.status}: {answer.body[:300]!r}")
            await asyncio.sleep(0.5)

    async def _cut(self, number: int) -> None:
        """Sends it, or a part of it, and disconnects."""
        name, request = self._request(number)
        connection = await Connection.open(self._port)
        self._ledger.sent(name, "critic_train")
        connection.send(request[: random.choice((len(request), len(request) // 2))])
        await asyncio.sleep(random.uniform(0, 0.05))
        connection.cut()
        self._ledger.doubt(name)
        self._ledger.note("trains cut")

    async def _changed(self, number: int) -> None:
        """Sends a used id with other content: it is refused."""
        name, request = self._request(number + 1, number)
        answer = await self._exchange(name, "critic_train", request)
        self._ledger.done(name, answer.kind)
        if answer.status != 400:
            self._ledger.wrong(name, f"other content under a known id got {answer.status}")
        self._ledger.note("trains with other content")

    async def _save(self) -> None:
        name = self._name()
        body = orjson.dumps({"id": name, "inputs": []})
        answer = await self._exchange(name, "critic_save", post("/v2/models/critic_save/infer", body, self._key))
        if answer.status == 200:
            self._ledger.done(name, "ok")
        else:
            self._ledger.done(name, answer.kind)
            self._ledger.wrong(name, f"save: {answer.status}: {answer.body[:300]!r}")
        self._ledger.note("saves")

    def _request(self, number: int, under: int | None = None) -> tuple[str, bytes]:
        name, train_id = self._name(), f"soak-{number if under is None else under}"
        inputs = {key: Tensor.of(key, values) for key, values in soak_samples.rows(number).items()}
        asked = InferRequest(inputs, {"report": True}, name, {"train_id": train_id})
        body, json_length = kserve.encode_request(asked)
        return name, post("/v2/models/critic_train/infer", body, self._key, json_length)

    def _report(self, name: str, answer: Answer) -> bytes:
        reply: InferReply = kserve.decode_reply(answer.body, answer.json_length)
        if reply.id != name:
            self._ledger.wrong(name, f"the answer's id is {reply.id!r}")
        self._ledger.done(name, "ok")
        return bytes(next(t.data[0] for t in reply.outputs if t.name == "report"))

    async def _exchange(self, name: str, model: str, request: bytes) -> Answer:
        """Tries once on a connection of its own; records statuses other than 200, except for other content."""
        connection = await Connection.open(self._port)
        self._ledger.sent(name, model)
        try:
            answer = await connection.ask(request, TIMEOUT_S)
        finally:
            connection.cut()
        if answer.status == 503:
            self._ledger.done(name, answer.kind)
        return answer

    def _name(self) -> str:
        self._count += 1
        return f"{self._tag}-{self._count}"


def _before(folder: Path) -> tuple[int, int]:
    """Returns the number of the first unacknowledged request, and the step of the one before it."""
    number, step = 0, 0
    for path in folder.glob("trainer-*.ledger"):
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            words = line.split()
            if line.endswith("\n") and words[0] == "trained" and int(words[1]) >= number:
                number, step = int(words[1]) + 1, int(words[3])
    return number, step


async def run(args: argparse.Namespace) -> None:
    """Trains until SIGTERM, then until the request in flight is acknowledged."""
    trainer, stop = Trainer(args), asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    while not stop.is_set():
        try:
            await trainer.train()
        except Exception as e:  # the run goes on, and its verdict is that this happened
            kind = type(e).__name__ if isinstance(e, Broken | TimeoutError | OSError) else "the soak itself"
            trainer._ledger.wrong(f"train {trainer.number}", f"{kind}: {e!r}")
            await asyncio.sleep(1.0)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), args.rest_s * random.uniform(0.5, 1.5))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--key", required=True, help="a key of the role train")
    parser.add_argument("--rest-s", type=float, default=1.0, help="mean seconds between two requests")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
