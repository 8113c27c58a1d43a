"""Less work at a start."""

from collections.abc import Iterator
from pathlib import Path

import pytest

import same_self_checks
import zoo
from light_peft import import_bitsandbytes


@pytest.fixture(autouse=True, scope="module")
def _same_self_checks() -> Iterator[None]:
    import_bitsandbytes()
    yield from same_self_checks.once()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return zoo.checkpoint("llama", tmp_path / "llama")
