"""Keeps runs from drawing curves, except those of module fixtures, as in test_training_run.py; less work at a start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import same_self_checks
from actor.runs import tiny_policy, without_curves
from light_peft import import_bitsandbytes


@pytest.fixture(autouse=True, scope="module")
def _same_self_checks() -> Iterator[None]:
    import_bitsandbytes()
    yield from same_self_checks.once()


@pytest.fixture(autouse=True)
def _without_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    without_curves(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_policy(tmp_path_factory.mktemp("policy"))
