"""A strict stand-in for an OpenAI-compatible server, in a process of its own: over real HTTP, with a memory of calls.

It answers a question with the number behind `worth` in it. Words in the question make it do otherwise, each the given
number of times for that question, or always without a number: `<busy 2>` (429 with Retry-After), `<broken>` (500),
`<drop>`, `<hang>`, `<garbage>`, `<refuse>`, `<filter>`, `<cut>`, `<html>` (status 200), `<long>` (400). `<parts>` has
thinking and text in a list, `<open>` thinking that is not closed, `<two>` two choices.

Asked about two responses, as a preset asks, it prefers the one with the larger digit behind `worth`, in the preset's
form; of equals a tie, but RM-R1's form has none.

With `upstream`, a real server's base URL, it only counts, and passes requests and answers on.
"""

import contextlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx

from processes import environment

MODEL, KEY = "stand-in", "sk-secret-of-the-test"
_KNOWN = {"model", "messages", "temperature", "max_tokens", "reasoning_effort"}
_LOCK = threading.Lock()
_asked: Counter[str] = Counter()
_answered: Counter[str] = Counter()
_most_at_once = [0, 0]
_MAY_ANSWER = threading.Event()


def wrong(headers: Any, body: bytes) -> tuple[int, str]:
    """What is wrong with a request: a status and a message; 0 if nothing is."""
    if headers.get("Authorization") != f"Bearer {KEY}":
        return 401, f"Incorrect API key provided: {headers.get('Authorization', '')}"
    if headers.get("Content-Type") != "application/json":
        return 415, "send application/json"
    data = json.loads(body)
    if not isinstance(data, dict) or set(data) - _KNOWN or {"model", "messages"} - set(data):
        return 400, f"unknown or missing fields: {sorted(data)}"
    if data["model"] != MODEL:
        return 404, f"The model `{data['model']}` does not exist."
    roles = [message["role"] for message in data["messages"]]
    if "response_2" in roles:
        at = roles.index("response_1")
        before = [role for role in roles[:at] if role != "principle"]
        fine = roles[at:] == ["response_1", "response_2"] and before[-1:] == ["user"]
        roles = ["user"] if fine and roles[:at].count("principle") <= 1 else roles
    if roles not in (["user"], ["system", "user"]) or any(set(m) != {"role", "content"} for m in data["messages"]):
        return 400, f"messages are wrong: {roles}"
    return 0, ""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    delay_s, upstream = 0.0, ""

    def do_GET(self) -> None:
        with _LOCK:
            self._reply(200, {"asked": _asked, "answered": _answered, "most_at_once": _most_at_once[1]})

    def do_PUT(self) -> None:
        _MAY_ANSWER.clear()
        self._reply(200, {})

    def do_DELETE(self) -> None:
        _MAY_ANSWER.set()
        self._reply(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path != "/v1/chat/completions":
            self._reply(404, {"detail": "Not Found"})
            return
        status, message = (0, "") if self.upstream else wrong(self.headers, body)
        if status:
            self._reply(status, {"error": {"message": message, "type": "invalid_request_error"}})
            return
        messages = json.loads(body)["messages"]
        question = messages[-1]["content"]
        if messages[-1]["role"] == "response_2":
            question = "as roles: " + json.dumps([[one["role"], one["content"]] for one in messages])
        with _LOCK:
            _asked[question] += 1
            number = _asked[question]
            _most_at_once[0] += 1
            _most_at_once[1] = max(_most_at_once)
        try:
            time.sleep(self.delay_s)
            _MAY_ANSWER.wait()
            if self.upstream:
                self._pass_on(question, body)
            else:
                self._answer(question, number)
        finally:
            with _LOCK:
                _most_at_once[0] -= 1

    def _pass_on(self, question: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        reply = httpx.post(f"{self.upstream}/chat/completions", content=body, headers=headers, timeout=600)
        with _LOCK:
            _answered[question] += reply.status_code == 200
        self._reply(reply.status_code, reply.text)

    def _answer(self, question: str, number: int) -> None:
        found = re.search(r"<(\w+) ?(\d*)>", question)
        what = found[1] if found and (not found[2] or number <= int(found[2])) else ""
        worth = re.search(r"worth (\S+)", question)
        text, more = f"I think so. Score: {worth[1] if worth else 0}", {}
        if len(both := re.findall(r"worth (\d)", question)) == 2 and re.search(r"\[\[A\]\]|^as roles", question):
            gap = (both[0] > both[1]) - (both[0] < both[1])
            word = {1: "A", -1: "B", 0: "C" if "<answer>" not in question else "A"}[gap]
            text = f"So it is. [[{word}]]" if "<answer>" not in question else f"Well. <answer>[[{word}]]</answer>"
            if question.startswith("as roles"):
                told = {"score_1": 3 + gap, "score_2": 3 - gap, "ranking": 3.5 - 1.5 * gap}
                text = f"I compare.\n```json\n{json.dumps(told)}\n```"
        if what == "busy":
            self._reply(429, {"error": {"message": "Rate limit reached"}}, {"Retry-After": "0"})
        elif what == "broken":
            self._reply(500, {"object": "error", "message": "EngineDeadError"})
        elif what == "long":
            self._reply(400, {"error": {"message": "maximum context length is 10 tokens", "code": 400}})
        elif what == "drop":
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
        elif what == "hang":
            time.sleep(600)
        elif what == "html":
            self._reply(200, "<html>")
        else:
            finish = {"filter": "content_filter", "cut": "length"}.get(what, "stop")
            if what == "refuse":
                more = {"refusal": "I cannot judge that."}
            elif what == "garbage":
                text = "Splendid, simply splendid."
            with _LOCK:
                _answered[question] += 1
            if what == "open":
                text = f"<think>{text}"
            message: dict[str, Any] = {"role": "assistant", "content": None if more else text, **more}
            if what == "parts":
                thought = {"type": "thinking", "thinking": [{"type": "text", "text": "Score: 99"}]}
                message["content"] = [thought, {"type": "text", "text": text}]
            choice = {"index": 0, "message": message, "finish_reason": finish, "logprobs": None}
            usage = {"prompt_tokens": 100, "completion_tokens": 10, "total_tokens": 110}
            self._reply(
                200,
                {"id": "x", "object": "chat.completion", "choices": [choice] * (1 + (what == "two")), "usage": usage},
            )

    def _reply(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(OSError):  # the server under test was killed
            self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 1024

    def handle_error(self, *_: Any) -> None:
        """Says nothing: the server under test is killed."""


class StandIn:
    """A running stand-in."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}/v1"

    def counts(self) -> dict[str, Any]:
        """How often each question was `asked` and `answered`, and how many calls there were `most_at_once`."""
        return httpx.get(self.url).json()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Within it no question is answered."""
        httpx.put(self.url)
        try:
            yield
        finally:
            httpx.delete(self.url)


@contextlib.contextmanager
def stand_in(delay_s: float = 0.0, upstream: str = "") -> Iterator[StandIn]:
    """Runs one, which waits so long before each answer."""
    command = [sys.executable, __file__, str(delay_s), upstream]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        yield StandIn(int(process.stdout.readline()))
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


if __name__ == "__main__":
    _Handler.delay_s, _Handler.upstream = float(sys.argv[1]), sys.argv[2]
    server = _Server(("127.0.0.1", 0), _Handler)
    _MAY_ANSWER.set()
    print(server.server_address[1], flush=True)
    server.serve_forever()
