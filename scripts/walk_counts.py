"""Counts the functions of guerdon that one request enters between its socket and the model's forward.

python scripts/walk_counts.py          prints how many of a score over HTTP
python scripts/walk_counts.py --list   prints each with its number of calls, too

A score of two rows of token ids is sent to a small model on the CPU. Counted are calls on all threads of the server,
from the bytes of the request to `Forward.run`. A coroutine that is resumed counts again; a comprehension is a part of
its function.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]

import served  # noqa: E402
from guerdon import RewardClient  # noqa: E402

SRC = f"{ROOT / 'src/guerdon'}/"
FIRST = ("server/front/connections.py", "HttpConnection.data_received")
LAST = ("engine/forward.py", "Forward.run")
COMPREHENSIONS = {"<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
ROWS = [np.array([5, 6, 7, 8, 9]), np.array([5, 6, 10])]


class Counting:
    """Counts calls of functions of guerdon from the first to the last of a walk; `use` on every thread."""

    def __init__(self) -> None:
        self.calls: Counter[tuple[str, str]] = Counter()
        self.is_on = self.has_begun = False
        self._known: dict[CodeType, tuple[str, str] | None] = {}

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Takes a profiler's event."""
        if event != "call" or not self.is_on:
            return
        code = frame.f_code
        if code not in self._known:
            is_ours = code.co_filename.startswith(SRC) and not code.co_filename.startswith(f"{SRC}client/")
            is_ours &= code.co_name not in COMPREHENSIONS
            self._known[code] = (code.co_filename.removeprefix(SRC), code.co_qualname) if is_ours else None
        if (name := self._known[code]) is None:
            return
        self.has_begun |= name == FIRST
        if self.has_begun:
            self.calls[name] += 1
            self.is_on = name != LAST


def count(ask: Callable[[], Any], counting: Counting) -> Counter[tuple[str, str]]:
    """Returns the calls of the third of three requests: what is loaded or measured once is left out."""
    ask()
    ask()
    counting.is_on = True
    ask()
    return counting.calls


def main() -> int:
    """Prints the number; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="print each function, too")
    args = parser.parse_args()
    counting = Counting()
    threading.setprofile(counting.profile)
    with (
        tempfile.TemporaryDirectory() as folder,
        served.plain(Path(folder)) as server,
        RewardClient(server.http_url) as client,
    ):
        calls = count(lambda: client.score(tokens=ROWS), counting)
    threading.setprofile(None)  # type: ignore[arg-type]
    if args.list:
        for (file, name), number in calls.items():
            sys.stdout.write(f"{number:4}  {file}  {name}\n")
    sys.stdout.write(f"functions entered from the socket to the forward: {calls.total()}, {len(calls)} different\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
