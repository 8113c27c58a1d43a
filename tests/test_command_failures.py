"""A command that fails ends with its error and what to do: nothing stands behind, and no traceback before it."""

import contextlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import served
import zoo
from client.echo_server import EchoProcess
from forks import Forks
from guerdon.errors import Exit
from processes import environment

ROWS = [{"text": f"text {i}"} for i in range(300)]
SLOW = "import time\n\n\ndef score(texts):\n    time.sleep(0.2)\n    return [float(len(text)) for text in texts]\n"
BROKEN = "def score(texts):\n    raise RuntimeError('broken inside')\n"
REINFORCE = "policy: {model: nowhere}\ndata: {prompts: prompts.jsonl}\nremote_rm: {reward_model: {port: 1}}\n"


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The command in a fork that has imported torch."""
    program = tmp_path_factory.mktemp("bin") / "guerdon"
    program.write_text(FORKS.wrapper("guerdon"))
    program.chmod(0o755)
    return program


FORKS = Forks()


@pytest.fixture(scope="module")
def echo() -> Iterator[EchoProcess]:
    with EchoProcess() as server:
        yield server


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory of the commands, with what they read."""
    monkeypatch.chdir(tmp_path)
    zoo.tokenizer(zoo.checkpoint("llama", tmp_path / "model"))
    zoo.language_model("llama", tmp_path / "policy")
    write(tmp_path / "in.jsonl", ROWS)
    write(tmp_path / "crash.jsonl", [*ROWS[:100], {"text": "<crash>"}, *ROWS])
    write(tmp_path / "slow.jsonl", [{"text": "<slow>"}, *ROWS])
    write(tmp_path / "prompts.jsonl", [{"prompt": "a"}])
    for name, rows in (("whole", ROWS), ("part", ROWS[:20])):
        write(tmp_path / f"{name}.jsonl", [{**row, "rewards": [1.0], "weights_version": "another"} for row in rows])
    (tmp_path / "slow_scorer.py").write_text(SLOW)
    (tmp_path / "broken_scorer.py").write_text(BROKEN)
    (tmp_path / "reinforce.yaml").write_text(REINFORCE)
    (tmp_path / "bad.yaml").write_text("models: [{model: x, nmae: y}]\n")
    return tmp_path


def check(process: subprocess.Popen[str], status: int, num_lines: int = 2) -> None:
    """Checks the status, and that stderr has the error and the advice as its last lines, of `num_lines`."""
    _, err = process.communicate(timeout=100)
    lines = [line for line in err.splitlines() if not line.startswith("  ")]  # without notes
    assert (process.returncode, len(lines)) == (status, num_lines), err
    if num_lines:
        assert lines[-2].startswith("guerdon: ") and lines[-1].startswith("help: "), err


def start(program: list[str], *argv: str, stdout: Any = subprocess.DEVNULL) -> subprocess.Popen[str]:
    env = environment() | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*program, *argv], stdout=stdout, stderr=subprocess.PIPE, text=True, env=env)


QUICK = ("another model's whole file", "a row that the server fails at")


CLIENT = {  # of commands without torch, each in a Python of its own, whose end is its own as well
    "another model's whole file": (["score", "--server", "URL", "in.jsonl", "-o", "whole.jsonl"], Exit.CANNOT_START),
    "another model's part": (["score", "--server", "URL", "in.jsonl", "-o", "part.jsonl"], Exit.CANNOT_START),
    "a row that the server fails at": (["score", "--server", "URL", "crash.jsonl", "-o", "out.jsonl"], Exit.FAILED),
    "no server": (["score", "--server", "DEAD", "in.jsonl", "-o", "out.jsonl"], Exit.FAILED),
    "no such model": (["score", "--server", "URL", "--name", "x", "in.jsonl", "-o", "out.jsonl"], Exit.FAILED),
    "a full disk": (["score", "--server", "URL", "in.jsonl", "-o", "-"], Exit.FAILED),
    "a mistyped setting": (["serve", "--config", "bad.yaml"], Exit.CANNOT_START),
    "no such file": (["convert", "nowhere.gguf", "out"], Exit.CANNOT_START),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow) for n in CLIENT])
def test_a_command_without_torch_ends_with_its_error(name: str, folder: Path, echo: EchoProcess) -> None:
    argv, status = CLIENT[name]
    urls = {"URL": echo.http_url, "DEAD": f"http://127.0.0.1:{served.free_port()}"}
    with open("/dev/full", "w") as full:
        stdout = full if name == "a full disk" else subprocess.DEVNULL
        check(start([sys.executable, "-m", "guerdon"], *(urls.get(word, word) for word in argv), stdout=stdout), status)
    assert (folder / "out.jsonl").exists() == (name == "a row that the server fails at")


MODEL = {
    "another model's whole file": (["score", "--model", "model", "in.jsonl", "-o", "whole.jsonl"], Exit.CANNOT_START),
    "another model's part": (["score", "--model", "model", "in.jsonl", "-o", "part.jsonl"], Exit.CANNOT_START),
    "no model": (["score", "--model", "nowhere/", "in.jsonl", "-o", "out.jsonl"], Exit.CANNOT_START),
    "a function that is not there": (["score", "--model", "slow_scorer:x", "in.jsonl", "-o", "-"], Exit.CANNOT_START),
    "a policy to serve": (["serve", "policy", "--port", "0"], Exit.CANNOT_START),
    "a taken port": (["serve", "model", "--port", "PORT", "--no-grpc"], Exit.CANNOT_START),
    "no critic": (["serve-critic", "nowhere/", "--port", "0"], Exit.CANNOT_START),
    "no teacher": (["serve-teacher", "nowhere/", "--port", "0"], Exit.CANNOT_START),
    "no rubric": (["serve-judge", "policy", "--rubric", "none.yaml", "--port", "0"], Exit.CANNOT_START),
    "no policy": (["reinforce", "reinforce.yaml"], Exit.CANNOT_START),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODEL)
def test_a_command_with_a_model_ends_with_its_error(name: str, folder: Path, forked: Path, echo: EchoProcess) -> None:
    argv, status = MODEL[name]
    port = echo.http_url.rpartition(":")[2]
    check(start([str(forked)], *(port if word == "PORT" else word for word in argv)), status)


@pytest.mark.slow
def test_a_function_that_fails_on_every_row_shows_one_traceback(folder: Path, forked: Path) -> None:
    process = start([str(forked)], "score", "--model", "broken_scorer:score", "in.jsonl", "-o", "out.jsonl")
    _, err = process.communicate(timeout=100)
    assert process.returncode == Exit.FAILED
    assert err.count("failed on a sample") == err.count("broken_scorer.py") == 1
    assert "300 failed, the first: the model failed on this sample: RuntimeError: broken" in err.splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["server", "model"])
def test_ctrl_c_says_nothing(where: str, folder: Path, forked: Path) -> None:
    with contextlib.ExitStack() as stack:
        if where == "server":
            server = stack.enter_context(EchoProcess(slow_s=60.0))
            process = start(
                [sys.executable, "-m", "guerdon"], "score", "--server", server.http_url, "slow.jsonl", "-o", "out.jsonl"
            )
            while not server.num_requests():
                time.sleep(0.02)
        else:
            process = start([str(forked)], "score", "--model", "slow_scorer:score", "in.jsonl", "-o", "out.jsonl")
            while not (folder / "out.jsonl").exists():
                time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        check(process, Exit.INTERRUPTED, num_lines=0)
