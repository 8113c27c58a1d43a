"""The soak of benchmarks/soak.py: five minutes of it, and that its ledger sees what is lost, doubled or made up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from processes import environment

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
MINUTES = 5


@pytest.fixture
def ledger(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import soak_ledger

    return soak_ledger


GOOD = """\
sent\ta-1\thelpful\t3
sent\ta-2\thelpful\t2
sent\ta-3\ttotal\t1
done\ta-1\tok\t3\t0
seen\thelpful\tv1\ta
done\ta-3\tok\t1\t0
trains\t0
trained\t0\t2\t2
"""
METRICS = """\
# HELP guerdon_requests_total Requests
guerdon_requests_total{model="helpful",outcome="ok"} 1.0
guerdon_requests_total{model="helpful",outcome="Cancelled"} 1.0
guerdon_requests_total{model="total",outcome="ok"} 1.0
guerdon_sequences_total{model="helpful",outcome="ok"} 5.0
guerdon_sequences_total{model="length",outcome="ok"} 1.0
guerdon_sequences_total{model="total",outcome="ok"} 1.0
guerdon_train_requests_total{critic="critic",outcome="ok"} 1.0
guerdon_train_requests_total{critic="critic",outcome="known"} 4.0
guerdon_train_steps_total{critic="critic",outcome="done"} 2.0
"""


def found(ledger: Any, lines: str, metrics: str, step: int = 2) -> list[str]:
    made = ledger.account(lines.splitlines(keepends=True))
    return ledger.compare(made, metrics) + ledger.compare_trains(made, metrics, step)


def test_a_ledger_that_agrees_has_nothing_wrong(ledger: Any) -> None:
    assert found(ledger, GOOD, METRICS) == []
    cut_short = GOOD + "sent\ta-4\thelp"
    assert found(ledger, cut_short, METRICS) == []


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda g, m: (g + "done\ta-1\tok\t3\t0\n", m), "a-1: answered twice"),
        (lambda g, m: (g + "sent\ta-1\thelpful\t3\n", m), "a-1: sent twice"),
        (lambda g, m: (g + "done\tb-9\tok\t1\t0\n", m), "b-9: answered and never sent"),
        (lambda g, m: (g + "wrong\ta-2\tthe answer's id is ''\n", m), "a-2: the answer's id is ''"),
        (lambda g, m: (g + "seen\thelpful\tv1\tb\n", m), "version v1 had the scores of a and of b"),
        (lambda g, m: (g, m.replace('ful",outcome="ok"} 1.0', 'ful",outcome="ok"} 0.0')), "helpful: ok: the clients"),
        (lambda g, m: (g, m.replace('"Cancelled"} 1.0', '"Cancelled"} 2.0')), "counted 2 more than the clients know"),
        (lambda g, m: (g, m.replace('"ok"} 5.0', '"ok"} 7.0')), "sequences of helpful: the server has counted 3 more"),
        (lambda g, m: (g, m.replace('length",outcome="ok"} 1.0', 'length",outcome="ok"} 0.0')), "sequences of length"),
        (lambda g, m: (g + "trains\t1\n", m), r"never acknowledged: [1]"),
        (lambda g, m: (g + "trained\t0\t2\t4\n", m), "train 0: acknowledged twice"),
        (lambda g, m: (g, m.replace('critic",outcome="ok"} 1.0', 'critic",outcome="ok"} 2.0')), "and 2 were applied"),
        (lambda g, m: (g, m.replace('outcome="done"} 2.0', 'outcome="done"} 4.0')), "its metrics 4"),
    ],
)
def test_the_ledger_sees_what_is_lost_doubled_or_made_up(
    ledger: Any, change: Callable[[str, str], tuple[str, str]], text: str
) -> None:
    wrong = found(ledger, *change(GOOD, METRICS))
    assert any(text in line for line in wrong), wrong


@pytest.mark.slow
@pytest.mark.timeout(MINUTES * 60 + 900)
def test_a_soak_of_five_minutes(tmp_path: Path) -> None:
    out = tmp_path / "soak"
    command = [sys.executable, BENCHMARKS / "soak.py", "--minutes", MINUTES, "--out", out, "--every-s", 4]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment(), check=False)
    results = json.loads((out / "soak.json").read_text())
    assert results["passed"], (results["wrong"], run.stdout[-3000:], run.stderr[-3000:])
    assert run.returncode == 0 and (out / "soak.png").stat().st_size > 10_000
    assert results["ledger"]["answered"] > 1000 and results["ledger"]["faults"]["swaps"] > 5
