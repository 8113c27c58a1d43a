"""One thread: the models are tiny, and results are compared bitwise; less work at a start."""

from collections.abc import Iterator

import pytest
import torch

import same_self_checks
from light_peft import import_bitsandbytes


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="module")
def _same_self_checks() -> Iterator[None]:
    import_bitsandbytes()
    yield from same_self_checks.once()
