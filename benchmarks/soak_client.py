"""A client process of a soak: mixed requests at a steady rate, some of them cut, slow, malformed or half open.

Checks every answer: its id, its scores against those of the version it names, its error's class.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import orjson
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

import soak_functions
import soak_samples
from guerdon.wire import kserve, kserve_grpc
from guerdon.wire.tensors import InferReply, InferRequest, Tensor
from soak_faults import Faults
from soak_ledger import Ledger
from soak_wire import Answer, Broken, Pool, post

TIMEOUT_S = 120.0
"""Time limit of any answer on a busy machine."""
BUSY = frozenset({"Overloaded"})
"""The errors that a valid request may get in place of scores."""


class Client:
    """Sends requests of all kinds; each kind is a method."""

    def __init__(self, args: argparse.Namespace, key: str) -> None:
        self.ledger = Ledger(args.ledger)
        self.pool = Pool(args.port)
        self.key = key
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{args.grpc_port}")
        self._infer = GRPCInferenceServiceStub(self._channel).ModelInfer
        self._samples = soak_samples.samples(args.folder)
        self._tag, self._count = args.ledger.stem, 0
        self._values: dict[str, np.ndarray] = {}

    def name(self) -> str:
        """Returns the next request's id."""
        self._count += 1
        return f"{self._tag}-{self._count}"

    async def close(self) -> None:
        self.pool.close()
        await self._channel.close()

    async def binary_tokens(self) -> None:
        picks = self._picks(8)
        await self._kserve("helpful", _tokens(picks), self._are_of("helpful", picks))

    async def texts(self) -> None:
        picks = self._picks(4)
        await self._kserve("helpful", [_texts([p["text"] for p in picks])], self._are_of("helpful", picks))

    async def json_tokens(self) -> None:
        picks, name = self._picks(3), self.name()
        inputs = [
            {"name": t.name, "datatype": t.datatype, "shape": t.shape, "data": np.ravel(t.data).tolist()}
            for t in _tokens(picks)
        ]
        request = post("/v2/models/helpful/infer", orjson.dumps({"id": name, "inputs": inputs}), self.key)
        await self._asked(name, "helpful", request, len(picks), self._are_of("helpful", picks))

    async def over_grpc(self, cut: bool = False) -> None:
        picks, name = self._picks(6), self.name()
        model = random.choice(("helpful", "total"))
        inputs = [_texts([p["text"] for p in picks])] if model == "total" else _tokens(picks)
        asked = InferRequest({t.name: t for t in inputs}, {"rewards": True}, name)
        self.ledger.sent(name, model, len(picks))
        call = self._infer(
            kserve_grpc.encode_request(asked, model),
            metadata=(("authorization", f"Bearer {self.key}"),),
            timeout=TIMEOUT_S,
        )
        if cut:
            await asyncio.sleep(random.uniform(0, 0.02))
            call.cancel()
        try:
            reply = kserve_grpc.decode_reply(await call)
        except asyncio.CancelledError:
            self.ledger.doubt(name)
            return
        except grpc.RpcError as e:
            trailing = dict(e.trailing_metadata() or ())
            kind = str(trailing.get("guerdon-error", ""))
            if cut or kind not in BUSY:
                self.ledger.doubt(name)
            else:
                self.ledger.done(name, kind)
            if not cut and kind not in BUSY:
                self.ledger.wrong(name, f"gRPC: {e.code()} {kind} {e.details()}")
            return
        self._check_reply(name, reply, self._are_of(model, picks), len(picks))

    async def openrlhf(self) -> None:
        picks = self._picks(5)
        body = {"model": "helpful", "query": [p["text"] for p in picks], "prompts": [p["text"][:3] for p in picks]}
        await self._form("/get_reward", body, picks, "helpful", lambda told: told["rewards"])

    async def slime(self) -> None:
        (pick,) = picks = self._picks(1)
        first, blank, rest = pick["text"].partition(" ")  # the two are tokenised apart
        body = {"model": "total", "prompt": first, "response": blank + rest}
        await self._form("/reward", body, picks, "total", lambda told: [told])

    async def tei(self) -> None:
        picks = self._picks(4)
        body = {"model": "helpful", "inputs": [[p["text"]] for p in picks], "raw_scores": True}
        await self._form("/predict", body, picks, "helpful", lambda told: [row[0]["score"] for row in told])

    async def spare(self) -> None:
        picks = self._picks(2)
        await self._kserve("spare", _tokens(picks), self._are_of("spare", picks), also=("Unavailable",))

    async def flaky(self) -> None:
        """Sends samples of which some have no score: the reply marks them, or all fail."""
        texts = [p["text"] for p in self._picks(4)]
        for i in range(len(texts)):
            texts[i] += random.choice(("", "", "", "", soak_functions.NO_SCORE, soak_functions.RAISES))
        name, with_errors = self.name(), random.random() < 0.7
        outputs = {"rewards": True, "errors": True} if with_errors else {"rewards": True}
        request = _binary("flaky", InferRequest({"sentences": _texts(texts)}, outputs, name), self.key)
        fails = [soak_functions.NO_SCORE in text or soak_functions.RAISES in text for text in texts]

        def check(reply: InferReply) -> tuple[int, int]:
            told = {t.name: np.ravel(np.asarray(t.data)) for t in reply.outputs}
            errors = [bytes(e).decode() for e in told["errors"]] if with_errors else [""] * len(texts)
            for text, fail, reward, error in zip(texts, fails, told["rewards"], errors, strict=True):
                # The function may also raise of itself, and then for a single sample no half is left to try.
                if error and np.isnan(reward) and (fail or "had enough" in error):
                    continue
                if fail or error or reward != len(text):
                    self.ledger.wrong(name, f"flaky: {text[-30:]!r} has {reward} {error!r}")
            num_failed = sum(map(bool, errors))
            return len(texts) - num_failed, num_failed

        also = () if with_errors else ("SampleFailed", "ServerFault")
        await self._asked(name, "flaky", request, len(texts), check, also=also)

    async def values(self) -> None:
        """Asks for the critic's values, which are constant for one version."""
        picks = [self._samples[0], *self._picks(3)]

        def check(reply: InferReply) -> tuple[int, int]:
            values = next(np.asarray(t.data) for t in reply.outputs if t.name == "values")
            version, length = str(reply.parameters["weights_version"]), len(picks[0]["tokens"])
            known = self._values.setdefault(version, values[0, :length].copy())
            if not np.isfinite(values).all() or np.abs(known - values[0, :length]).max() > 1e-3:
                self.ledger.wrong(reply.id, f"the values of version {version} changed")
            while len(self._values) > 8:
                self._values.pop(next(iter(self._values)))
            return len(picks), 0

        await self._kserve("critic_infer", _tokens(picks), check, output="values")

    def scoring(self, name: str, least: int = 1, most: int = 8) -> tuple[bytes, int, Callable[[Answer], Any]]:
        """Returns a valid request with that id: its bytes, its sequences, and the check of its answer."""
        picks = self._picks(most, least)
        asked = InferRequest({t.name: t for t in _tokens(picks)}, {"rewards": True}, name)
        check = self._are_of("helpful", picks)
        return (
            _binary("helpful", asked, self.key),
            len(picks),
            lambda answer: self.check_answer(name, answer, check, len(picks)),
        )

    async def exchange(self, request: bytes, timeout_s: float = TIMEOUT_S) -> Answer:
        """Sends one request over a connection of the pool; returns its answer."""
        connection = await self.pool.take()
        try:
            answer = await connection.ask(request, timeout_s)
        except BaseException:
            connection.cut()
            raise
        if connection.extra:
            self.ledger.wrong("-", f"bytes that nobody asked for: {connection.extra[:80]!r}")
        self.pool.give(connection)
        return answer

    def check_answer(
        self, name: str, answer: Answer, check: Callable[[InferReply], Any], count: int, also: tuple[str, ...] = ()
    ) -> None:
        """Records the answer of KServe's route in the ledger."""
        if answer.status == 200:
            self._check_reply(name, kserve.decode_reply(answer.body, answer.json_length), check, count)
            return
        kind = answer.kind
        self.ledger.done(name, kind)
        if kind not in BUSY and kind not in also:
            self.ledger.wrong(name, f"{answer.status}: {answer.body[:300]!r}")

    def _check_reply(self, name: str, reply: InferReply, check: Callable[[InferReply], Any], count: int) -> None:
        if reply.id != name:
            self.ledger.wrong(name, f"the answer's id is {reply.id!r}")
        ok, failed = check(reply) or (count, 0)
        self.ledger.done(name, "ok", ok, failed)

    def _picks(self, most: int, least: int = 1) -> list[dict[str, Any]]:
        return random.choices(self._samples, k=random.randint(least, most))

    def _are_of(self, model: str, picks: list[dict[str, Any]]) -> Callable[[InferReply], Any]:
        """Returns a check that all scores are those of one variant, that of the version the answer names."""

        def check(reply: InferReply) -> None:
            rewards = next(np.ravel(t.data) for t in reply.outputs if t.name == "rewards")
            self._check_rewards(reply.id, model, rewards, picks, str(reply.parameters.get("weights_version")))

        return check

    def _check_rewards(self, name: str, model: str, rewards: Any, picks: list[dict[str, Any]], version: str) -> None:
        extra = [len(p["text"]) if model == "total" else 0.0 for p in picks]
        for variant in soak_samples.VARIANTS:
            want = np.array([p[variant] for p in picks]) + extra
            if len(want) == len(rewards) and np.allclose(np.asarray(rewards, float), want, rtol=1e-5, atol=1e-3):
                self.ledger.seen(model, version, variant)
                return
        self.ledger.wrong(name, f"{model} of version {version} gave {list(rewards)} for {picks}")

    async def _kserve(
        self,
        model: str,
        inputs: list[Tensor],
        check: Callable[[InferReply], Any],
        also: tuple[str, ...] = (),
        output: str = "rewards",
    ) -> None:
        name, count = self.name(), inputs[0].shape[0]
        request = _binary(model, InferRequest({t.name: t for t in inputs}, {output: True}, name), self.key)
        await self._asked(name, model, request, count, check, also)

    async def _asked(
        self,
        name: str,
        model: str,
        request: bytes,
        count: int,
        check: Callable[[InferReply], Any],
        also: tuple[str, ...] = (),
    ) -> None:
        self.ledger.sent(name, model, count)
        self.check_answer(name, await self.exchange(request), check, count, also)

    async def _form(
        self, path: str, body: dict[str, Any], picks: list[dict[str, Any]], model: str, read: Callable[[Any], list]
    ) -> None:
        name = self.name()
        self.ledger.sent(name, model, len(picks))
        answer = await self.exchange(post(path, orjson.dumps(body), self.key))
        if answer.status != 200:
            kind = answer.kind
            self.ledger.done(name, kind)
            if kind not in BUSY:
                self.ledger.wrong(name, f"{path}: {answer.status}: {answer.body[:300]!r}")
            return
        version = answer.headers["guerdon-weights-version"]
        self._check_rewards(name, model, read(orjson.loads(answer.body)), picks, version)
        self.ledger.done(name, "ok", len(picks))


def _binary(model: str, request: InferRequest, key: str) -> bytes:
    body, json_length = kserve.encode_request(request)
    return post(f"/v2/models/{model}/infer", body, key, json_length)


def _texts(texts: list[str]) -> Tensor:
    return Tensor.of_texts("sentences", texts)


def _tokens(picks: list[dict[str, Any]]) -> list[Tensor]:
    lengths = np.array([len(p["tokens"]) for p in picks], np.int64)
    tokens = np.zeros((len(picks), lengths.max()), np.int64)
    for row, pick in zip(tokens, picks, strict=True):
        row[: len(pick["tokens"])] = pick["tokens"]
    return [Tensor.of("tokens", tokens), Tensor.of("sequence_lengths", lengths)]


async def run(args: argparse.Namespace) -> None:
    """Sends requests until SIGTERM, then waits for those in flight."""
    client = Client(args, args.keys.split(",")[0])
    faults = Faults(client, args.keys.split(",")[1])
    kinds: list[tuple[Callable[[], Awaitable[None]], float]] = [
        (client.binary_tokens, 24), (client.texts, 10), (client.json_tokens, 10), (client.over_grpc, 18),
        (client.openrlhf, 8), (client.slime, 6), (client.tei, 4), (client.flaky, 9), (client.values, 5),
        (client.spare, 3),
    ]  # fmt: skip
    if not args.sound:
        kinds += faults.kinds()
    stop, rest_s = asyncio.Event(), 1 / args.rate
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    calls, weights = [kind for kind, _ in kinds], [weight for _, weight in kinds]
    free, running = asyncio.Semaphore(args.concurrency), set()
    following = time.monotonic()

    async def one(call: Callable[[], Awaitable[None]]) -> None:
        try:
            await call()
        except (Broken, TimeoutError, OSError) as e:
            client.ledger.wrong(getattr(call, "__name__", "?"), f"{type(e).__name__}: {e}")
        except Exception as e:
            client.ledger.wrong(getattr(call, "__name__", "?"), f"the soak itself: {e!r}")
        finally:
            free.release()

    while not stop.is_set():
        # Late is late: what could not be asked in time is not asked in a burst afterwards.
        following = max(following + rest_s, time.monotonic() - 0.2)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), max(0.0, following - time.monotonic()))
        await free.acquire()
        task = asyncio.create_task(one(random.choices(calls, weights)[0]))
        running.add(task)
        task.add_done_callback(running.discard)
    if running:
        await asyncio.wait(running, timeout=TIMEOUT_S)
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--ledger", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--grpc-port", type=int, required=True)
    parser.add_argument("--keys", required=True, help="a key of the role score, and one that the server does not know")
    parser.add_argument("--rate", type=float, required=True, help="maximum requests per second")
    parser.add_argument("--concurrency", type=int, default=12)
    parser.add_argument("--sound", action="store_true", help="no faults")
    asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    main()
