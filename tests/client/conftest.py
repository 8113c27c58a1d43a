"""A fixture for tests that collect garbage."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def young_objects() -> Iterator[None]:
    """Has the collector look at objects of this test only: torch and its like make a collection take half a second."""
    gc.freeze()
    yield
    gc.unfreeze()
