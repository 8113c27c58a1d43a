from __future__ import annotations

import io
import logging

import httpx
import pytest

from guerdon import console
from guerdon.config import ServerConfig
from guerdon.core import ScoreReply, ScoreRequest
from guerdon.logs import Frames, OneLine, failure
from guerdon.server.runtime import RunningServer
from server.echo_service import EchoService
from server.helpers import INFER

SECRET = "the text of a sample"


@pytest.fixture
def written() -> tuple[logging.Logger, io.StringIO]:
    """A logger, and what the server's formatter writes of it."""
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLine("%(levelname)s %(name)s: %(message)s"))
    logger = logging.Logger("guerdon.tried")
    logger.addHandler(handler)
    return logger, stream


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


def test_a_line_is_not_as_long_as_a_client_likes(written):
    logger, stream = written
    logger.warning("the model %r is unknown", "x" * 1_000_000)
    assert len(stream.getvalue()) < 11_000


@pytest.mark.parametrize("level", [logging.DEBUG, logging.INFO])
def test_failures_tell_where_and_not_what(written, level):
    logger, stream = written
    logger.setLevel(level)
    failure(logger, logging.ERROR, "%s failed", "a batch", error=failed())
    told = stream.getvalue()
    assert told.startswith("ERROR guerdon.tried: a batch failed\n")
    assert "in failed" in told
    assert "ValueError" in told
    assert "KeyError" in told
    assert SECRET not in told


def test_libraries_errors_are_told_likewise(written):
    logger, stream = written
    logger.setLevel(logging.INFO)
    logger.addFilter(Frames())
    logger.error("Task exception was never retrieved", exc_info=failed())
    assert "ValueError" in stream.getvalue()
    assert SECRET not in stream.getvalue()


def test_the_command_logs_one_line_a_record(monkeypatch):
    root = logging.Logger("root")
    monkeypatch.setattr(logging, "root", root)
    monkeypatch.setattr(logging.getLogger("httpx"), "level", 0)
    console.set_up("info")
    assert isinstance(root.handlers[0].formatter, OneLine)


def test_a_crash_is_logged_without_what_it_says(caplog):
    service = EchoService()

    async def crash(name: str, request: ScoreRequest, *_: object) -> ScoreReply:
        raise ValueError(f"cannot score {request.texts}")

    service.score = crash
    body = {"inputs": [{"name": "sentences", "datatype": "BYTES", "shape": [1, 1], "data": [SECRET]}]}
    with caplog.at_level(logging.INFO), RunningServer(service, ServerConfig(port=0, grpc_port=None)) as server:
        assert httpx.post(server.http_url + INFER, json=body).status_code == 500
    assert "unexpected error in POST" in caplog.text
    assert "builtins.ValueError" in caplog.text
    assert SECRET not in caplog.text
