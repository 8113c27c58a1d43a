"""The logs: one line per record, no secrets, text or JSON."""

import io
import json
import logging
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from guerdon import cli
from guerdon.cli import console
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.server.logs import Frames, JsonLines, OneLine, failure, take_over_libraries
from guerdon.server.runtime import RunningServer
from guerdon.settings.config import ServerConfig
from processes import environment
from server.echo_service import EchoService
from server.helpers import INFER

SECRET = "the text of a sample"


def logger_of(formatter: logging.Formatter) -> tuple[logging.Logger, io.StringIO]:
    """A logger, and the stream of its formatter."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = logging.Logger("guerdon.tried")
    logger.addHandler(handler)
    return logger, stream


@pytest.fixture
def written() -> tuple[logging.Logger, io.StringIO]:
    return logger_of(OneLine("%(levelname)s %(name)s: %(message)s"))


@pytest.fixture
def in_json() -> tuple[logging.Logger, io.StringIO]:
    """Of rank 3."""
    return logger_of(JsonLines(3))


def failed() -> Exception:
    try:
        try:
            raise KeyError(SECRET)
        except KeyError as e:
            raise ValueError(f"cannot score {SECRET}") from e
    except ValueError as e:
        return e


@pytest.mark.parametrize(
    "name", ["a\nERROR guerdon: forged", "a\r\nb", "a\x1b[2Jb", "a\u2028b", "a\x85b", "a\u202eb", "a\udc80b", "a\x00"]
)
def test_no_client_can_forge_a_line(written, name):
    logger, stream = written
    logger.warning("the model %s is unknown", name)
    try:
        raise ValueError(name)
    except ValueError:
        logger.exception("it failed")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("WARNING guerdon.tried: the model a")
    assert lines[1] == "ERROR guerdon.tried: it failed"
    assert all(line.startswith("  ") for line in lines[2:])
    assert all(line.isprintable() for line in lines)


@pytest.mark.parametrize("form", ["written", "in_json"])
def test_long_lines_are_cut(form, request):
    logger, stream = request.getfixturevalue(form)
    logger.warning("the model %r is unknown", "x" * 1_000_000)
    assert 9_000 < len(stream.getvalue()) < 11_000


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_failures_log_the_place_but_not_the_text(written, level):
    logger, stream = written
    logger.setLevel(level)
    failure(logger, logging.ERROR, "%s failed", "a batch", error=failed())
    told = stream.getvalue()
    assert told.startswith("ERROR guerdon.tried: a batch failed\n")
    assert "in failed" in told
    assert "ValueError" in told
    assert "KeyError" in told
    assert SECRET not in told


def test_errors_of_libraries_log_no_text_either(written):
    logger, stream = written
    logger.setLevel(logging.INFO)
    logger.addFilter(Frames())
    logger.error("Task exception was never retrieved", exc_info=failed())
    assert "ValueError" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_the_command_logs_one_line_per_record(monkeypatch):
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.getLogger("httpx"), "level", 0)
    console.set_up_logging("info")
    assert isinstance(root.handlers[0].formatter, OneLine)


def test_a_record_in_json(in_json):
    logger, stream = in_json
    before = datetime.now(UTC)
    logger.warning("%d models in %s", 2, "Köln")
    (line,) = stream.getvalue().splitlines()
    told = json.loads(line)
    assert list(told) == ["time", "level", "logger", "message", "rank"]
    assert (told["level"], told["logger"], told["rank"]) == ("warning", "guerdon.tried", 3)
    assert told["message"] == "2 models in Köln" and "Köln" in line
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told["time"])
    assert abs(datetime.fromisoformat(told["time"]) - before) < timedelta(seconds=5)


@pytest.mark.parametrize(
    "name",
    ['a"}\n{"level": "error"', "a\r\nb", "a\x1b[2Jb", "a\u2028b", "a\x85b", "a\u202eb", "a\udc80b", "a\x00", "a\\nb"],
)
def test_no_client_can_forge_a_line_of_json(in_json, name):
    logger, stream = in_json
    logger.warning("the model %s is unknown", name)
    try:
        raise ValueError(name)
    except ValueError:
        logger.exception("it failed")
    lines = stream.getvalue().splitlines()
    assert len(lines) == 2 and all(line.isprintable() for line in lines)
    first, second = map(json.loads, lines)
    assert first["message"].startswith("the model a") and first["message"].isprintable()
    assert second["traceback"][0] == "Traceback (most recent call last):"
    assert any("test_no_client_can_forge_a_line_of_json" in frame for frame in second["traceback"])
    assert all(frame.isprintable() for frame in second["traceback"])


def test_failures_in_json_log_the_place_but_not_the_text(in_json):
    logger, stream = in_json
    failure(logger, logging.ERROR, "%s failed", "a batch", error=failed())
    told = json.loads(stream.getvalue())
    assert told["message"] == "a batch failed"
    assert told["traceback"][-1] == "builtins.KeyError"
    assert any(frame.endswith("in failed") for frame in told["traceback"])
    assert SECRET not in stream.getvalue()


def test_libraries_with_their_own_handlers_are_redirected():
    logger = logging.getLogger("a_library_of_its_own")
    other = logging.StreamHandler(io.StringIO())
    logger.propagate = False
    logger.addHandler(logging.StreamHandler(sys.stderr))
    logger.addHandler(other)
    try:
        take_over_libraries()
        assert logger.handlers == [other] and logger.propagate
    finally:
        logger.handlers.clear()


SCORER = """
import threading, warnings

def score(texts):
    if texts == ["warn"]:
        warnings.warn("careful\\nthere")
    if texts == ["thread"]:
        thread = threading.Thread(target=lambda: 1 / 0)
        thread.start()
        thread.join()
    if texts == ["%s"]:
        raise ValueError(f"cannot score {texts}")
    return [1.0] * len(texts)
"""


def test_every_line_of_a_server_is_json(tmp_path: Path) -> None:
    (tmp_path / "noisy_scorer.py").write_text(SCORER % SECRET)
    command = [sys.executable, "-m", "guerdon", "serve", "noisy_scorer:score", "--port", "0", "--grpc-port", "0"]
    with (tmp_path / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--log-format", "json", "--log-level", "debug"],
            cwd=tmp_path, env=environment() | {"FORCE_COLOR": "1"}, stdout=subprocess.PIPE, stderr=stderr, text=True,
        )  # fmt: skip
    assert process.stdout is not None
    said = []
    try:
        for line in process.stdout:
            said.append(json.loads(line))
            if found := re.search(r"ready at (\S+)", said[-1]["message"]):
                break
        for text, status in (("fine", 200), ("warn", 200), ("thread", 200), (SECRET, 500)):
            body = {"inputs": [{"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": [text]}]}
            assert httpx.post(found[1] + INFER, json=body).status_code == status
        process.send_signal(signal.SIGTERM)
        assert process.wait(120) == 0
        said += [json.loads(line) for line in process.stdout]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    text = (tmp_path / "stderr").read_text()
    logged = [json.loads(line) for line in text.splitlines()]
    assert SECRET not in text
    assert {line["logger"] for line in said} == {"guerdon"}
    by_message = {line["message"]: line for line in logged}
    assert by_message["uncaught error"]["traceback"][-1] == "ZeroDivisionError: division by zero"
    assert by_message["reward_model failed on a sample"]["traceback"][-1] == "builtins.ValueError"
    assert any(line["logger"] == "py.warnings" and "careful" in line["message"] for line in logged)


@pytest.fixture
def text_format_after() -> Iterator[None]:
    yield
    console.set_format("text")


@pytest.mark.usefixtures("text_format_after")
def test_startup_errors_are_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert cli.main(["serve", "absent", "--log-format", "json", "--std", "0"]) == 2
    out, err = capsys.readouterr()
    (line,) = err.splitlines()
    told = json.loads(line)
    assert out == "" and list(told) == ["time", "level", "logger", "message", "rank", "help"]
    assert (told["level"], told["rank"]) == ("error", 1)
    assert told["message"] == "models[0].std is 0" and "above 0" in told["help"]


@pytest.mark.usefixtures("text_format_after")
@pytest.mark.parametrize("flags", [(), ("--log-format", "json")], ids=["only in the file", "by the flag"])
def test_a_mistake_in_the_file_is_json_if_the_flag_says_so(
    tmp_path: Path, flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("log_format: json\nnope: 1\n")
    assert cli.main(["serve", "--config", str(file), *flags]) == 2
    err = capsys.readouterr().err
    assert "nope" in err
    assert err.startswith("{") == bool(flags), "as docs/cli.md says"


def test_a_crash_is_logged_without_its_text(caplog):
    service = EchoService()

    async def crash(name: str, request: ScoreRequest, *_: object, **__: object) -> ScoreReply:
        raise ValueError(f"cannot score {request.texts}")

    service.score = crash
    body = {"inputs": [{"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": [SECRET]}]}
    with caplog.at_level(logging.INFO), RunningServer(service, ServerConfig(port=0, grpc_port=None)) as server:
        assert httpx.post(server.http_url + INFER, json=body).status_code == 500
    assert "unexpected error in POST" in caplog.text
    assert "builtins.ValueError" in caplog.text
    assert SECRET not in caplog.text
