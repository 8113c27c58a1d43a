"""Traces one request through guerdon: which of its functions stand on the stack when the request changes hands."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import guerdon

PACKAGE = Path(guerdon.__file__).parent

Station = tuple[str, str]
"""A function: its file under `src/guerdon` and its qualified name."""


class Trace:
    """What one request passes; `stacks` has, by moment, the functions on the stack, outermost first.

    A moment is the first call of a function, given as the end of its file's path and its qualified name.
    """

    def __init__(self, moments: dict[str, Station]) -> None:
        self.entered: set[Station] = set()
        self.stacks: dict[str, list[Station]] = {}
        self._moments = moments
        self._known: dict[CodeType, tuple[Station | None, str | None]] = {}

    def walk(self) -> list[Station]:
        """Every function on any of the stacks, once, in the order of the moments."""
        return list(dict.fromkeys(station for moment in self._moments for station in self.stacks[moment]))

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Takes a profiler's event."""
        if event != "call":
            return
        station, moment = self._lookup(frame.f_code)
        if station is not None:
            self.entered.add(station)
        if moment is not None and moment not in self.stacks:
            self.stacks[moment] = [*_stations(frame, self._lookup)][::-1]

    def _lookup(self, code: CodeType) -> tuple[Station | None, str | None]:
        known = self._known.get(code)
        if known is None:
            known = self._known[code] = (_station(code), self._moment(code))
        return known

    def _moment(self, code: CodeType) -> str | None:
        for moment, (file, name) in self._moments.items():
            if code.co_qualname == name and code.co_filename.endswith(file):
                return moment
        return None


def _stations(frame: FrameType | None, lookup: Callable[[CodeType], tuple[Station | None, Any]]) -> Iterator[Station]:
    while frame is not None:
        station, _ = lookup(frame.f_code)
        if station is not None:
            yield station
        frame = frame.f_back


def _station(code: CodeType) -> Station | None:
    """The function; comprehensions, lambdas and functions inside functions count as those that they stand in."""
    if not code.co_filename.startswith(f"{PACKAGE}/"):
        return None
    return str(Path(code.co_filename).relative_to(PACKAGE)), code.co_qualname.split(".<locals>")[0]


@contextmanager
def profiling() -> Iterator[Callable[[Trace | None], None]]:
    """A context in which all threads that start are profiled; yields the function that sets the current trace."""
    current: list[Trace | None] = [None]

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        if current[0] is not None:
            current[0].profile(frame, event, arg)

    def use(trace: Trace | None) -> None:
        current[0] = trace

    before = threading.getprofile(), sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        yield use
    finally:
        threading.setprofile(before[0])  # type: ignore[arg-type]
        sys.setprofile(before[1])
