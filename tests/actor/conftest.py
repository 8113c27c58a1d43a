"""Runs of these tests draw no curves, but where a fixture of a whole module runs them, as in test_run.py."""

import pytest

from actor.runs import without_curves


@pytest.fixture(autouse=True)
def _without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_curves(monkeypatch)
