"""Imports bitsandbytes, as peft does, without torch's compiler: it would take a second, and no test needs it."""

import contextlib
import importlib

import pytest


def import_bitsandbytes() -> None:
    with pytest.MonkeyPatch.context() as patch, contextlib.suppress(ImportError):
        patch.setenv("TORCHDYNAMO_DISABLE", "1")
        importlib.import_module("bitsandbytes")
