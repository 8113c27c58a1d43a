"""Which members of a family of tests `make test` runs; the slow tests run all of them."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

QUICK = ("llama", "gemma3", "gpt2", "mixtral", "bert")
"""An architecture of each kind of layer. Layers with a state are slow on a CPU: test_engine.py and test_continuing.py
try some, and the first more kinds of attention."""


def slow_but(quick: Collection[Any], members: Iterable[Any]) -> list[Any]:
    """Returns parameters for a test, a tuple's as several; those whose first is not in `quick` are slow."""
    every = [member if isinstance(member, tuple) else (member,) for member in members]
    return [pytest.param(*one, marks=[] if one[0] in quick else pytest.mark.slow) for one in every]


def of_each_kind(names: Iterable[str]) -> list[Any]:
    """Returns parameters for a test of architectures: one of each kind is quick."""
    return slow_but(QUICK, names)


def asked(request: pytest.FixtureRequest, names: Iterable[str], always: Collection[str] = ()) -> list[str]:
    """Returns the names that a test of this file has as its parameter `name` in this run, and those in `always`."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    wanted = {item.callspec.params.get("name") for item in own}
    return [name for name in names if name in wanted or name in always]
