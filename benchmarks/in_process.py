"""Scores without a server: guerdon's engine, transformers, OpenVINO and ONNX Runtime, each in a process of its own."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forms import HERE
from servers import ENVIRONMENT
from workload import Group


@dataclass(frozen=True)
class InProcess:
    """A row of the table; `library` and `way` are the worker's, and `environment` has the library, if named."""

    name: str
    library: str
    way: str
    pads: bool = False
    environment: str = ""

    def python(self, environments: Path) -> Path:
        """Returns the Python that has the library."""
        return environments.absolute() / self.environment / "bin/python" if self.environment else Path(sys.executable)


ENGINE = InProcess("in process: guerdon's engine", "guerdon", "")
ONE_BY_ONE = InProcess("in process: transformers, one by one", "transformers", "one by one")
SORTED = InProcess("in process: transformers, sorted by length and padded", "transformers", "sorted", pads=True)
REFERENCES = [
    ENGINE,
    InProcess("in process: transformers, padded as they come", "transformers", "padded", pads=True),
    SORTED,
    ONE_BY_ONE,
]
IN_PROCESS = [
    *REFERENCES,
    InProcess("in process: OpenVINO, one by one", "openvino", "one by one", environment="openvino"),
    InProcess("in process: OpenVINO, queued", "openvino", "queued", environment="openvino"),
    InProcess("in process: ONNX Runtime, one by one", "onnxruntime", "one by one", environment="openvino"),
]


class Worker:
    """A process that has loaded the model by one library, and scores on request.

    Never two libraries in one process: none may profit from another's settings, such as the allocator's.
    """

    def __init__(self, python: Path, library: str, folder: Path) -> None:
        """Loads `folder/model`; output is appended to `worker.log` there. Raises RuntimeError if it does not load."""
        self._library, self._log = library, folder / "worker.log"
        self._mine, theirs = multiprocessing.Pipe()
        number, script = theirs.fileno(), HERE / "peers" / "in_process_worker.py"
        with self._log.open("ab") as log, theirs:
            self._process = subprocess.Popen(
                [python, script, library, folder / "model", str(number)],
                env=os.environ | ENVIRONMENT, pass_fds=[number], stdout=log, stderr=log,
            )  # fmt: skip
        self._receive()

    def run(self, way: str, groups: list[Group]) -> tuple[float, list[float]]:
        """Returns the seconds, and the scores in the groups' order; raises RuntimeError if the process ends."""
        with suppress(BrokenPipeError):
            self._mine.send((way, [row for group in groups for row in group.rows]))
        return self._receive()

    def stop(self) -> None:
        """Ends the process."""
        with suppress(BrokenPipeError):
            self._mine.send(None)
        self._process.wait()

    def _receive(self) -> Any:
        try:
            return self._mine.recv()
        except (EOFError, ConnectionResetError):
            raise RuntimeError(f"{self._library} ended in process; see {self._log}") from None
