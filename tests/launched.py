"""Runs scripts as real ranks, by torchrun or forked; no process outlives its test."""

import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil

import guerdon

MARK = "GUERDON_LAUNCH"
"""An environment variable that tells a launch's processes from all others, whatever session they moved to."""


@dataclass(frozen=True)
class Launched:
    """How a launch ended: torchrun's exit code, and what all ranks wrote, both streams in one."""

    code: int
    output: str


@dataclass(frozen=True)
class Launch:
    """A launch under way: torchrun itself, the file that all ranks write to, and what marks its processes."""

    torchrun: subprocess.Popen[bytes]
    log: Path
    mark: str

    def output(self) -> str:
        """What all ranks have written so far."""
        return self.log.read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[psutil.Process]:
        """All living processes of the launch, torchrun's among them."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def rank(self, number: int) -> psutil.Process:
        """Returns the process of that rank; raises LookupError if there is none."""
        for process in self.processes():
            try:
                if process.environ().get("RANK") == str(number) and process.ppid() == self.torchrun.pid:
                    return process
            except psutil.NoSuchProcess:
                continue
        raise LookupError(f"no process of rank {number}")

    def wait_ended(self) -> None:
        """Returns once no process of the launch lives; a rank's own processes end after torchrun does."""
        until = time.monotonic() + 120
        while left := self.processes():
            assert time.monotonic() < until, f"left behind: {left}\n{self.output()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Ends every process of the launch, those that were stopped and those that torchrun left behind as well."""
        while found := self.processes():
            for process in found:
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
            psutil.wait_procs(found, timeout=5)
        self.torchrun.wait(120)


@contextmanager
def launching(
    target: str | Path, nproc: int, *args: object, options: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[Launch]:
    """Starts `target`, a module's name or a script's path, in `nproc` processes; ends them all on leaving.

    `options` are torchrun's own, in place of `--standalone`. Modules of `tests/` and guerdon's sources can be imported.
    """
    what = [str(target)] if str(target).endswith(".py") else ["-m", str(target)]
    command = [sys.executable, "-m", "torch.distributed.run", *(options or ("--standalone",))]
    command += ["--nproc-per-node", str(nproc), *what, *map(str, args)]
    with started(command, env, str(Path(guerdon.__file__).parents[1])) as launch:
        yield launch


@contextmanager
def started(command: list[str], env: dict[str, str] | None, source: str) -> Iterator[Launch]:
    """The command with a mark and a log of its own, and `source` and this folder to import from; ended on leaving."""
    mark = uuid.uuid4().hex
    paths = os.pathsep.join([source, str(Path(__file__).parent)])
    own = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", MARK: mark}
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                env=os.environ | own | (env or {}),
                start_new_session=True,
            )
        launch = Launch(process, log, mark)
        try:
            yield launch
        finally:
            launch.kill()


def launched(
    target: str | Path,
    nproc: int,
    *args: object,
    timeout_s: float = 250.0,
    options: tuple[str, ...] = (),
    env: dict[str, str] | None = None,
) -> Launched:
    """Runs `target` to its end as `launching` does; raises AssertionError with all output if it takes too long."""
    with launching(target, nproc, *args, options=options, env=env) as launch:
        return _ended(launch, str(target), timeout_s)


def forked(
    target: str | Path, nproc: int, *args: object, timeout_s: float = 250.0, python: str = sys.executable
) -> Launched:
    """Runs `target` as `launched` does, but by `forked_ranks`, for tests of ranks that are none of torchrun."""
    command = [python, "-m", "forked_ranks", str(nproc), str(target), *map(str, args)]
    with started(command, None, str(Path(guerdon.__file__).parents[1])) as launch:
        return _ended(launch, str(target), timeout_s)


def _ended(launch: Launch, target: str, timeout_s: float) -> Launched:
    try:
        code = launch.torchrun.wait(timeout_s)
    except subprocess.TimeoutExpired:
        launch.kill()
        raise AssertionError(f"{target} did not end within {timeout_s:g} s:\n{launch.output()}") from None
    return Launched(code, launch.output())
