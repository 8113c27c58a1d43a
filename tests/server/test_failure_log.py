"""Samples without a score are logged, one line a minute for each model, and without their texts."""

import logging

import numpy as np
import pytest

from guerdon import cli
from guerdon.client import RewardClient
from guerdon.core import Score
from guerdon.errors import InvalidRequest, NoVerdict
from guerdon.server import metrics
from guerdon.server.metrics import FailureLog
from scorers import NAN
from served import briefly


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.name == metrics.log.name]
    caplog.clear()
    return found


def test_a_minutes_failures_are_one_line(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    kept, failed = FailureLog(), NoVerdict("a secret")
    with caplog.at_level(logging.INFO):
        kept.note("judge", [Score(1.0)] * 3)
        assert lines(caplog) == []
        kept.note("judge", [failed, failed])
        (line,) = lines(caplog)
        assert line.startswith("judge: 2 of 5 samples have no score (NoVerdict 2);") and "secret" not in line
        for _ in range(100):
            now[0] += 0.5
            kept.note("judge", [failed, InvalidRequest("a secret"), Score(1.0)])
        assert lines(caplog) == []
        kept.note("other", [failed])
        assert len(lines(caplog)) == 1, "each model has its own"
        now[0] += 30
        kept.note("judge", [Score(1.0)])
        (line,) = lines(caplog)
        assert line.startswith("judge: 200 of 301 samples have no score (NoVerdict 100, InvalidRequest 100);")
        now[0] += 100
        kept.note("judge", [Score(1.0)])
        assert lines(caplog) == []


def test_a_server_that_stops_counts_them(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def ask(url: str) -> None:
        with RewardClient(url) as client:
            assert np.isnan(client.score(tokens=[[NAN], [1]]).rewards).sum() == 1

    monkeypatch.setattr("guerdon.server.runtime.run", briefly(ask))
    assert cli.main(["serve", "scorers:score", "--port", "0", "--no-grpc"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "guerdon: stopped; requests answered: 1, refused or failed: 0; samples without a score: 1"
    )
