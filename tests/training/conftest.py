"""One thread: the models are tiny, and results are compared bitwise."""

import contextlib
import importlib

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _without_compiler() -> None:
    """Imports bitsandbytes, as peft does, without torch's compiler: it would take a second, and nothing calls it."""
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        importlib.import_module("bitsandbytes")
