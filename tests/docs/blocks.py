"""Runs a page's fenced blocks in order, as a reader would: commands, servers, files and Python."""

from __future__ import annotations

import json
import re
import shlex
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from forks import Forks
from ports import free_port
from processes import environment

ROOT = Path(__file__).parents[2]
PORTS = {**dict.fromkeys(("serve", "serve-teacher", "serve-judge"), ("5555", "5557")), "serve-critic": ("5556", "5558")}
"""HTTP and gRPC ports by command, as on the pages."""
SHORTER = {
    "guerdon reinforce": "--run.steps 2 --rollouts.max-new-tokens 16 --data.num-validation 4",
    "guerdon ppo": "--run.steps 2 --rollouts.max-new-tokens 16 --data.num-validation 4",
    "guerdon distill": "--run.steps 2 --rollouts.max-new-tokens 16 --data.num-validation 4",
    "python -m guerdon.adapters.rewardbench": "--dataset pairs.json --load_json --not_quantized --torch_dtype float32",
}
"""Flags appended to commands that would take minutes or download a data set."""
SHORTER_PYTHON = {
    **{
        f"{name}Config(": f"{name}Config(max_steps=1, max_completion_length=8, report_to='none', "
        for name in ("GRPO", "Distillation")
    },
    "RewardConfig(": "RewardConfig(max_steps=2, report_to='none', ",
    "PolicyRecipe(": "PolicyRecipe(num_steps=2, ",
    "DPOConfig(": "DPOConfig(max_steps=1, report_to='none', ",
    # TRL insists on vLLM, of which it uses nothing there.
    "trainer = ServerDist": "import trl.generation.vllm_client as client\n"
    "client.is_vllm_available = lambda: True\ntrainer = ServerDist",
}
"""Replaces text in Python that would take minutes, or needs what is not installed."""
START_S, COMMAND_S = 120.0, 200.0
FORKS = Forks()


@dataclass(frozen=True)
class Block:
    """A fenced block, and the line on which it begins."""

    language: str
    text: str
    line: int
    why_not: str = ""
    """The page's reason why no test runs it: `<!-- not run: REASON -->` before the block, unseen by readers."""


def blocks_of(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page, in order."""
    text = page.read_text(encoding="utf-8")
    mark = r"(?:^<!-- not run: ([^\n]+) -->\n+)?"
    found = re.finditer(mark + r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [Block(match[2], match[3], text.count("\n", 0, match.start(2)) + 1, match[1] or "") for match in found]


def commands(text: str) -> list[str]:
    """Returns the commands of a shell block: one per line, unless a backslash or a here-document joins lines."""
    found: list[str] = []
    end = None  # of the here-document that is open
    for line in text.splitlines():
        is_more = bool(found) and (end is not None or found[-1].endswith("\\"))
        if is_more:
            found[-1] += "\n" + line
        elif line.strip() and not line.startswith("#"):
            found.append(line)
        if end is None and (opened := re.search(r"<<'?(\w+)'?", line)):
            end = opened[1]
        elif line == end:
            end = None
    return found


class Reader:
    """Runs a page's blocks in a folder, on free ports in place of the page's, so that pages can run in parallel.

    `not_run` has patterns of commands that are only checked, each with its check, which raises AssertionError. A block
    whose first line is `# NAME.py`, or the same with .yaml or .toml, is that file, `POST /PATH BODY` and a line with a
    status and an answer is an exchange with the last server that was started. A block of `text` is what the block
    before it prints, but for the numbers; with a line of `...` it is an excerpt that is not checked. A `guerdon serve`
    and a `guerdon serve-critic` go on until another server takes their port, or the reader leaves; the same command
    with the same folders finds them running.
    """

    def __init__(self, folder: Path, not_run: dict[str, Callable[[str], None]]) -> None:
        self.folder, self.not_run = folder, not_run
        self.ports = {port: str(free_port()) for ports in (*PORTS.values(), ("5559", "5560", "8000")) for port in ports}
        self.servers: dict[str, subprocess.Popen[bytes]] = {}
        self.started: dict[str, list[str]] = {}
        self.last = self.printed = ""
        self.bin = folder / ".bin"
        self.bin.mkdir()
        self._put("guerdon", FORKS.wrapper("guerdon"))
        self.use(Path(sys.executable))
        env = environment()
        self.env = env | {"PATH": f"{self.bin}:{env['PATH']}", "OMP_NUM_THREADS": "1"}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        for port in list(self.servers):
            self._stop(port)

    def use(self, python: Path, source: Path | None = None) -> None:
        """Makes this interpreter `python` from now on; it also imports from the folder `source`."""
        is_own = python == Path(sys.executable)
        found = f"PYTHONPATH={source}:$PYTHONPATH " if source else ""
        self._put("python", FORKS.wrapper("python") if is_own else f'#!/bin/sh\n{found}exec {python} "$@"\n')

    def read(self, block: Block) -> None:
        """Runs one block, unless the page says why not; raises AssertionError with its line if it fails."""
        if block.why_not:
            return
        where = f"the block at line {block.line}"
        named = re.match(r"# (\w+\.(?:py|yaml|toml))\b", block.text.splitlines()[0])
        if block.text.startswith("POST /"):
            self._exchange(block.text, where)
        elif block.language == "text":
            is_excerpt = "\n...\n" in block.text  # of the output of minutes' work, which is not run here
            assert is_excerpt or _masked(self.printed) == _masked(block.text), f"{where}: {self.printed}"
        elif named is not None:
            (self.folder / named[1]).write_text(self._with_ports(block.text), encoding="utf-8")
        elif block.language == "python":
            text = self._with_ports(block.text)
            for long, shorter in SHORTER_PYTHON.items():
                text = text.replace(long, shorter)
            self._run(["python", "-c", text], where)
        else:
            assert block.language in ("", "bash"), f"{where} is {block.language}, and says by no first line which file"
            for command in commands(block.text):
                self._do(command, f"{where}: {command}")

    def _do(self, command: str, where: str) -> None:
        for pattern, check in self.not_run.items():
            if re.fullmatch(pattern, command):
                check(command)
                return
        serve = re.match(r"guerdon (serve(?:-critic|-teacher|-judge)?) ", command)
        if serve is not None:
            self._serve(command, *PORTS[serve[1]], where)
            return
        if (exported := re.match(r"export (\w+)=", command)) is not None:
            told = subprocess.run(
                ["bash", "-euc", f'{command}\nprintf %s "${exported[1]}"'],
                cwd=self.folder, env=self.env, capture_output=True, text=True, check=True,
            )  # fmt: skip
            self.env = self.env | {exported[1]: told.stdout}
            return
        more = next((flags for start, flags in SHORTER.items() if command.startswith(start)), "")
        self._run(["bash", "-euo", "pipefail", "-c", self._with_ports(f"{command} {more}".rstrip())], where)

    def _exchange(self, text: str, where: str) -> None:
        """Sends the request, and checks that the answer has the form of the block's."""
        asked, answered = text.splitlines()
        (_, path, body), (status, form) = asked.split(None, 2), answered.split(None, 1)
        request = urllib.request.Request(f"http://127.0.0.1:{self.last}{path}", body.encode(), method="POST")
        with urllib.request.urlopen(request, timeout=120) as answer:
            got = json.loads(answer.read())
            assert (answer.status, _form(got)) == (int(status), _form(json.loads(form))), f"{where}: {got}"

    def _put(self, name: str, program: str) -> None:
        (self.bin / name).write_text(program)
        (self.bin / name).chmod(0o755)

    def _serve(self, command: str, http: str, grpc: str, where: str) -> None:
        words = shlex.split(command, comments=True)
        if "--port" not in words:
            words += ["--port", http]
        if not {"--grpc-port", "--no-grpc"} & {*words}:
            words += ["--grpc-port", grpc if http in words else "0"]  # not 2 above: another test may have that one
        words = [self.ports.get(word, word) for word in words]
        self.last = port = words[words.index("--port") + 1]
        same = sorted(str(path.resolve()) if (path := self.folder / word).is_dir() else word for word in words)
        if port in self.servers and self.started[port] == same:
            return
        self._stop(port)
        self.started[port] = same
        log = self.folder / f"server-{port}.log"
        with log.open("wb") as file:
            self.servers[port] = subprocess.Popen(words, cwd=self.folder, env=self.env, stdout=file, stderr=file)
        end = time.monotonic() + START_S
        while not _is_ready(port, "--tls-cert" in words):
            assert self.servers[port].poll() is None and time.monotonic() < end, f"{where}\n{log.read_text()}"
            time.sleep(0.1)

    def _stop(self, port: str) -> None:
        if (server := self.servers.pop(port, None)) is not None:
            server.send_signal(signal.SIGINT)
            try:
                server.wait(120)
            finally:
                server.kill()

    def _run(self, command: list[str], where: str) -> None:
        done = subprocess.run(
            command, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert done.returncode == 0, f"{where} ended with {done.returncode}\n{done.stdout}{done.stderr}"
        self.printed = done.stdout

    def _with_ports(self, text: str) -> str:
        return re.sub(r"\b(?:55[56]\d|8000)\b", lambda match: self.ports.get(match[0], match[0]), text)


def _form(value: Any) -> Any:
    """Returns what a page can promise of an answer: names and types, but no numbers."""
    if isinstance(value, dict):
        return {name: _form(part) for name, part in value.items()}
    return [_form(part) for part in value] if isinstance(value, list) else type(value).__name__


def _masked(text: str) -> list[str]:
    """Returns the words without their numbers, which differ from model to model."""
    return re.sub(r"-?\d+(\.\d*)?(e-?\d+)?", "0", re.sub(r"(\[) *| *(\])", r"\1\2", text)).split()


def _is_ready(port: str, has_tls: bool) -> bool:
    url = f"{'https' if has_tls else 'http'}://127.0.0.1:{port}/v2/health/ready"
    try:
        with urllib.request.urlopen(url, timeout=5, context=ssl._create_unverified_context()) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False
