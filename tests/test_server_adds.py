"""The faults that benchmarks/server_adds.py finds, and how it shows its measurements."""

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ABOUT = {"date": "2026-11-22", "commit": "abc", "hardware": "a machine", "rounds": 3}


@pytest.fixture(autouse=True)
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def measured(*, share: float = 0.99, rate: float = 3000.0, times: float = 1.5) -> dict[str, Any]:
    """Three rounds in which all is well but what is given, and in each a round that is not, which a median bears."""
    scored = {"engine_s": [30.0] * 3, "seq_s": [29.7] * 3, "share": [share, share, 0.5], "computing": [0.99] * 3}
    times_of = {"p50_ms": [10.0] * 3, "p99_ms": [15.0] * 3, "p99/p50": [times, times, 9.0]}
    one, many = [1.0] * 3, [rate, rate, 1.0]
    return {
        "model": ABOUT | {"forms": {"gRPC, a request a prompt": scored | times_of | {"max_diff": [0.0, 2e-7, 1e-7]}}},
        "null": ABOUT | {"forms": {f"gRPC, {n} in flight": times_of | {"per_s": one if n == 1 else many}
                                   for n in (1, 64)}},
        "latency": ABOUT | {"forms": {"real text, closed": times_of | {"per_s": many},
                                      "real text, open": times_of | {"p99/p50": [5.0] * 3, "per_s": one}}},
    }  # fmt: skip


def test_medians_that_keep_the_promises_break_nothing_whatever_one_round_or_an_open_loop_did() -> None:
    from server_adds_report import broken_of

    assert broken_of(measured()) == []
    assert broken_of({}) == []


@pytest.mark.parametrize(
    ("found", "told"),
    [({"share": 0.96}, "gRPC, a request a prompt: 0.960 of the engine's rate"), ({"rate": 999.0}, "999 requests/s"),
     ({"times": 2.1}, "real text, closed: p99 is 2.10 times p50"), ({"share": float("nan")}, "nan of the engine's")],
)  # fmt: skip
def test_a_median_beyond_its_bound_is_reported(found: dict[str, float], told: str) -> None:
    from server_adds_report import broken_of

    (what,) = broken_of(measured(**found))

    assert told in what


def test_the_table_has_each_part_with_its_medians_ranges_and_the_largest_difference() -> None:
    from server_adds_report import table

    text = table(measured())

    assert "| gRPC, a request a prompt | 30.0 | 29.7 | 0.990 (0.500 to 0.990) | 0.990 | 10.0 | 15.0 | 2.0e-07 |" in text
    assert "| gRPC, 64 in flight | 3000 | 10.0 | 15.0 | 1.50 (1.50 to 9.00) |" in text
    assert text.count("2026-11-22, commit abc, a machine. Medians of 3 rounds.") == 3


def test_of_parts_not_measured_there_is_neither_table_nor_panel(tmp_path: Path) -> None:
    from server_adds_report import plot, table

    only = {"null": measured()["null"]}
    plot(only, tmp_path / "it.png")

    assert "engine" not in table(only)
    assert (tmp_path / "it.png").stat().st_size > 1000
