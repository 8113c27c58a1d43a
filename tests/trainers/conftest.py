"""Writes which trainer each test ran, for `scripts/compatibility.py`."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainers import environments


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--ran", type=Path, metavar="FILE", help="append a line of JSON for each test that a trainer ran")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    report: Any = yield
    path = item.config.getoption("--ran")
    if path and report.when == "call" and not report.skipped:
        line = {"trainers": sorted(environments.USED), "test": item.name, "passed": report.passed}
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return report


@pytest.fixture(autouse=True)
def _used_by_this_test() -> None:
    environments.USED.clear()
