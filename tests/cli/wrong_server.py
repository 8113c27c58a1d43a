"""A reward server that is right, or has one of the faults that such servers have had: a switch for each trap.

It takes vLLM's `/classify`, and scores a small checkpoint by plain transformers. With a fault it answers as servers did
that users have complained about; `docs/conformance.md` names the traps.
"""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import zoo
from stand_in import serving_http

FAULTS = {
    "": "",
    "busy at times": "",
    "constant": "answers",
    "drifting": "repeat",
    "sigmoid": "reference",
    "mean of the batch": "batch",
    "pads are read": "padding",
    "neighbours leak": "neighbours",
    "sorted by length": "order",
    "answers mixed up": "concurrency",
    "EOS stripped": "endings",
    "BOS doubled": "BOS",
    "ASCII only": "unicode",
    "long is 500": "long inputs",
    "window ignored": "long inputs",
    "cut at the right": "truncation",
    "cut at the left": "truncation",
    "empty is 0.0": "empty",
    "ids clamped": "unknown ids",
    "traceback": "malformed",
    "any name": "names",
    "bad is 0.0": "one bad",
    "bad spoils others": "one bad",
    "one at a time": "time-outs",
    "NaN": "NaN",
    "no version": "versions",
    "two versions": "versions",
}
"""Each switch, and the trial that is to find it, if it is a fault."""

LIMIT = 200


class Refused(Exception):
    """A request that gets a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class WrongServer:
    """The scores of a checkpoint, spoilt by `fault`; "" spoils nothing."""

    def __init__(self, folder: Path, fault: str) -> None:
        self.fault = fault
        self.model = AutoModelForSequenceClassification.from_pretrained(folder, attn_implementation="eager").eval()
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.lock = threading.Lock()
        self.num_asked = 0
        self.inside: list[list[Any]] = []

    @torch.no_grad()
    def score(self, ids: list[int]) -> float:
        with self.lock:
            score = self.model(input_ids=torch.tensor([ids])).logits.item()
        return 1.1 * score if self.fault == "window ignored" and len(ids) > 100 else score

    def tokens(self, sample: Any) -> list[int]:
        """The sample's ids; raises Refused."""
        if isinstance(sample, str):
            if self.fault == "ASCII only":
                sample = sample.encode("ascii", "replace").decode()
            special = self.fault == "BOS doubled" or not sample.startswith("<s>")
            sample = self.tokenizer(sample.encode("utf-8", "replace").decode(), add_special_tokens=special).input_ids
        if not isinstance(sample, list) or not all(type(token) is int for token in sample):
            raise Refused(400, "a sample is a text or a list of ids")
        return sample

    def prepared(self, sample: Any) -> list[int]:
        """The ids that are scored; raises Refused."""
        ids = self.tokens(sample)
        if not ids:
            raise Refused(400, "a sample is empty")
        if min(ids) < 0 or max(ids) >= zoo.VOCAB_SIZE:
            if self.fault != "ids clamped":
                raise Refused(400, "an id is outside of the vocabulary")
            ids = [min(max(token, 0), zoo.VOCAB_SIZE - 1) for token in ids]
        if self.fault == "long is 500" and 100 < len(ids) <= LIMIT:
            raise Refused(500, "out of memory")
        if len(ids) > LIMIT:
            if not self.fault.startswith("cut"):
                raise Refused(400, f"{len(ids)} tokens, at most {LIMIT} are taken")
            ids = ids[:LIMIT] if self.fault.endswith("right") else ids[-LIMIT:]
        while self.fault == "EOS stripped" and ids[-1] == zoo.EOS:
            ids = ids[:-1]
        return ids

    def scores(self, samples: list[Any]) -> list[float]:
        """The numbers of a request's samples; raises Refused."""
        rows: list[list[int] | None] = []
        for sample in samples:
            try:
                rows.append(self.prepared(sample))
            except Refused:
                is_zero = (
                    len(samples) > 1 if self.fault == "bad is 0.0" else self.fault == "empty is 0.0" and not sample
                )
                if not is_zero:
                    raise
                rows.append(None)
        if self.fault == "pads are read":
            width = max(len(row or ()) for row in rows)
            rows = [row and [*row, *[zoo.PAD + 3] * (width - len(row))] for row in rows]
        made = [0.0 if row is None else self.score(row) for row in rows]
        if self.fault == "sorted by length":
            order = sorted(range(len(made)), key=lambda i: len(rows[i] or ()))
            made = [made[i] for i in order]
        if self.fault == "mean of the batch" and len(made) > 4:
            made = [one - sum(made) / len(made) for one in made]
        if self.fault == "neighbours leak" and len(made) > 1:
            total = sum(map(sum, filter(None, rows)))
            made = [one + 5e-5 * math.sin(total) for one in made]
        return made

    def answer(self, body: bytes) -> tuple[int, dict[str, Any], str]:
        """The status, the reply and the version of a request."""
        self.num_asked += 1
        if self.fault.startswith("stuck") and self.num_asked > int(self.fault.removeprefix("stuck after ")):
            time.sleep(60)
        if self.fault == "busy at times" and self.num_asked % 20 == 0:
            return 503, {"error": "come back"}, "1"
        try:
            asked = json.loads(body)
            samples = asked["input"]
            if asked["model"] != "m" and self.fault != "any name":
                raise Refused(404, "no such model")
            if samples and type(samples[0]) is int:
                samples = [samples]
            if not samples and self.fault != "empty is 0.0":
                raise Refused(400, "no samples")
            made = self.spoilt(self.scores(samples or [[]]))
        except Refused as e:
            self.spoil_others(e)
            return e.status, {"error": str(e)}, "1"
        except (ValueError, KeyError, TypeError) as e:
            traces = self.fault == "traceback"
            return (500 if traces else 400), {"error": f"{'Traceback: ' * traces}{type(e).__name__}"}, "1"
        rows = [{"index": i, "probs": [one]} for i, one in enumerate(made)]
        return 200, {"data": rows}, str(self.num_asked % 2) if self.fault == "two versions" else "1"

    def spoilt(self, made: list[float]) -> list[float]:
        """The scores with the faults that look at the whole server."""
        if self.fault == "constant":
            return [0.5] * len(made)
        if self.fault == "drifting":
            return [one + 0.1 * self.num_asked for one in made]
        if self.fault == "sigmoid":
            return torch.sigmoid(torch.tensor(made, dtype=torch.float64)).tolist()
        if self.fault == "NaN":
            return [float("nan") if len(made) == 8 else one for one in made]
        if self.fault in ("answers mixed up", "bad spoils others"):
            mine: list[Any] = [made, None]
            self.inside.append(mine)
            time.sleep(0.1)  # what comes meanwhile meets this one
            self.inside.remove(mine)
            if self.fault == "bad spoils others":
                if mine[1]:
                    raise Refused(500, "a neighbour failed")
            elif self.inside:
                return self.inside[0][0] if len(self.inside[0][0]) == len(made) else made
        return made

    def spoil_others(self, error: Refused) -> None:
        if self.fault == "bad spoils others":
            for _ in range(50):  # until a good one is there
                for other in self.inside:
                    other[1] = error
                if self.inside:
                    return
                time.sleep(0.02)


@contextmanager
def serving(folder: Path, fault: str = "") -> Iterator[str]:
    """The URL of the server, which runs in threads of this process."""
    scorer = WrongServer(folder, fault)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            known = self.path == "/v1/models"
            self.reply(200 if known else 404, {"data": [{"id": "m", "max_model_len": LIMIT}]} if known else {}, "")

        def do_POST(self) -> None:
            size = int(self.headers.get("Content-Length", 0))
            body = self.rfile.read(size)
            if self.path != "/classify":
                self.reply(404, {}, "")
            elif len(body) == size:
                self.reply(*scorer.answer(body))

        def reply(self, status: int, told: dict[str, Any], version: str) -> None:
            data = json.dumps(told).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            if version and fault != "no version":
                self.send_header("my-weights-version", version)
            if fault == "one at a time":
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None: ...

    kind = HTTPServer if fault == "one at a time" else ThreadingHTTPServer

    class Server(kind):  # type: ignore[misc, valid-type]
        request_queue_size = 128
        daemon_threads = True

        def handle_error(self, *_: Any) -> None: ...

    with serving_http(Handler, Server) as url:
        yield url
