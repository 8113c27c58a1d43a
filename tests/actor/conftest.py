"""Keeps runs from drawing curves, except those of module fixtures, as in test_training_run.py."""

import pytest

from actor.runs import without_curves


@pytest.fixture(autouse=True)
def _without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_curves(monkeypatch)
