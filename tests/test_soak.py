"""The soaks of benchmarks: minutes of them, and that the ledger sees what is lost, doubled or made up."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from guerdon.engine.native.library import find
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


def checked(ledger: Any, notes: Counter[str], sizes: list[float]) -> list[str]:
    """What a report finds wrong that has so much happen, and a second's memory each."""
    import soak_report

    made = ledger.Account(notes=notes)
    made.sequences["flaky"]["failed"] = 1
    samples = [{"s": float(i), "rss_mb": size} for i, size in enumerate(sizes)]
    results = {"measured_from_s": 0.0, "measured_to_s": float(len(sizes))}
    return soak_report.check(results, samples, [(0.0, "client killed"), (1.0, "trainer killed")], made, "")


def test_a_report_asks_for_every_fault_and_flat_memory_all_along(ledger: Any) -> None:
    import soak_report

    notes = Counter([*soak_report.NEEDED, soak_report.HALF_OPEN])
    flat = [400.0] * 1200
    assert checked(ledger, notes, flat) == []
    for fault in notes:
        assert checked(ledger, notes - Counter([fault]), flat) == [f"none of the faults: {fault}"]
    assert checked(ledger, Counter([*soak_report.NEEDED, soak_report.NOT_PERMITTED]), flat) == []
    assert checked(ledger, notes, flat[:600] + [900.0] * 15 + flat[600:]) == []  # a load's moment
    assert checked(ledger, notes, flat[:510] + [430.0] * 180 + flat[:510]) == [
        "the memory went from 400 to 430 MiB between"
    ]
    (wrong,) = checked(ledger, notes, [430.0] * 600 + flat)
    assert wrong == "the memory went from 430 to 400 MiB (-7.0%)"


def test_an_overload_that_breaks_a_promise_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import promises

    flood = {"sent_per_s": 1000.0, "per_s": 95.0, "p99_s": 1.5, "limit_s": 1.0, "refused_p50_s": 0.01, "others": 0.0}
    small = flood | {"sent_per_s": 10.0, "per_s": 9.5, "refused_p50_s": float("nan")}
    good = {"peak": {"per_s": 100.0}, "overload": flood, "fair": flood, "fair small": small}
    assert promises.broken_of([good] * 3) == []
    for name, change, text in (
        ("overload", {"per_s": 80.0}, "overload: 80% of the peak"),
        ("fair", {"p99_s": 2.0}, "fair: the accepted wait 2.00 times"),
        ("fair", {"p99_s": float("nan")}, "fair: the accepted wait nan times"),
        ("overload", {"refused_p50_s": 0.2}, "overload: a refusal takes 0.200 s"),
        ("fair", {"others": 1.0}, "fair: 3 requests had another answer"),
        ("fair small", {"per_s": 5.0}, "the client beside the flood had 50%"),
    ):
        (broken,) = promises.broken_of([good | {name: good[name] | change}] * 3)
        assert broken.startswith(text)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(find()[0] is None, reason=f"no kernels: {find()[1]}")
def test_answers_of_a_server_have_the_same_bits_in_random_company(tmp_path: Path) -> None:
    command = [sys.executable, BENCHMARKS / "soak_bits.py", "--rewards", 300, "--logprobs", 2000, "--out", tmp_path]
    run = subprocess.run(list(map(str, command)), capture_output=True, text=True, env=environment(), check=False)
    assert run.returncode == 0 and "| 0 of " in run.stdout, (run.stdout, run.stderr[-3000:])


def test_a_number_with_another_bit_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from soak_bits import Found, table

    found, numbers = Found(), np.array([0.1, 2.0, 0.0], np.float32)
    found.compare("/reward", numbers.tolist(), numbers)
    assert found.different.total() == 0
    found.compare("/reward", [np.nextafter(numbers[0], np.float32(1)), 2.0, -0.0], numbers)
    assert "| /reward | 2 of 6 |" in table({"a server": found})
