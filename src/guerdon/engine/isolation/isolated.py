"""The scorer of an isolated function: passes each sample to a child process, and says why one has no reward."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np

from guerdon.core import Score, Sequence
from guerdon.distributed.ranks import ALONE, Ranks
from guerdon.engine.functions import MAX_BATCH_TOKENS, FunctionForm, check_function_settings
from guerdon.engine.isolation import channel, process_tree
from guerdon.engine.isolation.channel import ChildLimits, Report
from guerdon.engine.isolation.keeper import END_S, fork_keeper
from guerdon.errors import CheckpointError, ChildEnded, ConfigError, InvalidRequest, SampleFailed, StartError
from guerdon.settings.config import ModelConfig

log = logging.getLogger(__name__)

_KEPT = {"PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ"}
"""Environment variables that child processes get, beside LC_*; no key of any service is among them."""
_SET = {
    "CUDA_VISIBLE_DEVICES": "",
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}
_SETTINGS = {
    "deadline": "sample_deadline_s",
    "cpu": "sample_cpu_s",
    "memory": "sample_memory_mb",
    "processes": "sample_processes",
}
"""The setting of each limit, by reason."""
_PATIENCE_S = 5.0
"""How much later than its deadline and the end of its child a keeper may answer."""
_LOOK_S = 0.5
"""How often a waiting thread looks whether the template is stopped."""
_MAX_LOGGED_CHARACTERS = 1_000
_MAIN = "from guerdon.engine.isolation import keeper; keeper.main(int(sys.argv[2]))"
_START = f"import json, sys; sys.path[:] = json.loads(sys.argv[1]); {_MAIN}"
_START_ELSEWHERE = f"import json, sys; sys.path[:0] = json.loads(sys.argv[1]); {_MAIN}"
_NEEDED = {"msgspec": "msgspec", "numpy": "numpy", "yaml": "pyyaml"}
"""What guerdon's part in child processes imports, and the packages that have it."""
_TRY_S = 60.0

_Result = Score | InvalidRequest | SampleFailed


class IsolatedScorer:
    """Scores by a function that is imported and called in child processes alone, each with one sample at a time.

    Thread-safe; as many threads compute at once as there are children. `discard` ends all processes, and so does the
    end of this process, however it ends.
    """

    encoder = None
    takes_all = False

    def __init__(self, config: ModelConfig, ranks: Ranks = ALONE) -> None:
        """Starts the template process, in which the function is imported.

        Raises CheckpointError if that fails or the function is not supported, ConfigError for a setting that does not
        apply and on a kernel without what isolation needs, StartError if the import passes its deadline.
        """
        check_function_settings(config)
        if config.max_batch_tokens is not None:
            raise ConfigError(
                f"max_batch_tokens is {config.max_batch_tokens}, but {config.model} is isolated",
                "leave it out: each child gets one sample at a time",
            )
        if not process_tree.can_watch():
            raise ConfigError(
                "isolate is on, but this kernel does not list the children of a process",
                "use one with CONFIG_PROC_CHILDREN, or leave it out",
            )
        limits = ChildLimits(
            config.sample_deadline_s,
            config.sample_cpu_s or config.sample_deadline_s,
            config.sample_memory_mb << 20,
            config.sample_processes,
        )
        self._memory_mb = config.sample_memory_mb
        self._pool = _Pool(config, limits)
        self._form = self._pool.start()
        self._finalizer = weakref.finalize(self, self._pool.close)
        try:
            info = self._form.info(config)
        except ConfigError:
            self.discard()
            raise
        self.info = dataclasses.replace(info, why=f"{info.why} in {config.num_children} child processes")
        self._is_computing = ranks.tensor_rank == 0
        self._threads = ThreadPoolExecutor(config.num_children, "guerdon-isolated")
        # Alone, a loop with a thread for each child asks for single samples.
        self.max_batch_tokens = 1 if ranks.size == 1 else MAX_BATCH_TOKENS

    def watch(self, tick: Callable[..., None]) -> bool:
        """Returns False: the progress of a function is unknown."""
        return False

    def score(self, sequences: list[Sequence]) -> list[_Result]:
        """Returns one result for each sequence, in order; several are computed at the same time."""
        if not self._is_computing:  # the results of tensor rank 0 count
            return [SampleFailed("this tensor-parallel rank does not compute functions") for _ in sequences]
        if len(sequences) == 1:
            return [self._score(sequences[0])]
        return list(self._threads.map(self._score, sequences))

    def discard(self) -> None:
        """Ends all child processes; what they compute fails. Idempotent."""
        self._finalizer()

    def _score(self, sequence: Sequence) -> _Result:
        sample = self._form.read(sequence, self.info.name)
        if isinstance(sample, InvalidRequest):
            return sample
        if isinstance(sample, np.ndarray):
            sample = sample.tolist()
        extra = {name: value for name, (value,) in self._form.read_extra([sequence]).items()}
        report = self._pool.ask(json.dumps({"sample": sample, **extra}).encode())
        name = self.info.name
        if report.printed:
            log.info("%s: a sample printed %r", name, report.printed[:_MAX_LOGGED_CHARACTERS])
        if report.num_left:
            log.warning("%s: a sample left %d processes running, which were killed", name, report.num_left)
        if report.reason:
            log.warning("%s: a sample %s", name, report.text)
            return self._ended(report.reason, report.text)
        answer = channel.decode_answer(report.answer)
        if answer is None:
            return self._ended("garbage", "had its child process send something else than an answer")
        if answer.is_out_of_memory:
            return self._ended("memory", f"used more than {self._memory_mb} MiB of memory")
        if answer.reward is None:
            return SampleFailed(answer.error)
        return Score(answer.reward)

    def _ended(self, reason: str, text: str) -> ChildEnded:
        advice = f"; {_SETTINGS[reason]} allows more" if reason in _SETTINGS else ""
        return ChildEnded(f"the function {text}, and its processes were ended{advice}", reason)


def check_python(python: str) -> None:
    """Raises ConfigError unless it is a Python in whose environment guerdon's part in child processes runs."""
    code = f"import sys; assert sys.version_info >= (3, 11), sys.version; import {', '.join(_NEEDED)}; print('fi' 'ne')"
    try:
        with tempfile.TemporaryFile() as file:  # a pipe would also wait for what the Python leaves running
            tried = subprocess.run(  # noqa: S603
                [python, "-c", code], stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                timeout=_TRY_S, env=_without_environment(os.environ),
            )  # fmt: skip
            file.seek(0)
            said = file.read().decode(errors="replace").split("\n")
        said = [line.strip() for line in said if line.strip()]
        why = ""
        if tried.returncode:
            why = f"it ended with status {tried.returncode}, {said[-1] if said else 'without a word'}"
        elif "fine" not in said:
            why = "it is no Python: it did not run a line of it"
    except (OSError, subprocess.SubprocessError) as e:
        why = str(e)
    if why:
        packages = " ".join(_NEEDED.values())
        raise ConfigError(
            f"isolate.python is {python}, which cannot be used: {why}",
            f"give a Python of at least 3.11, and there run: {python} -m pip install {packages}",
        )


def _without_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Returns the variables without those that name this process's own environment."""
    return {name: value for name, value in env.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}


class _Pool:
    """The template process, and the channels to the keepers that it has forked."""

    def __init__(self, config: ModelConfig, limits: ChildLimits) -> None:
        self._wanted = channel.Import(config.model, config.name, limits)
        self._limits = limits
        kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith("LC_")}
        if missing := [name for name in config.pass_env if name not in os.environ]:
            raise ConfigError(f"pass_env names {', '.join(missing)}, which is not set here", "set it, or leave it out")
        self._env = kept | _SET | {name: os.environ[name] for name in config.pass_env}
        self._import_s = config.import_deadline_s
        self._command = [sys.executable, "-u", "-c", _START, json.dumps(sys.path)]
        if config.isolate_python is not None:
            check_python(config.isolate_python)
            self._env = _without_environment(self._env)
            # With nothing else of this environment: guerdon's own code, from a folder that has only that.
            self._folder = tempfile.TemporaryDirectory(prefix="guerdon-code-")
            os.symlink(Path(__file__).parents[2], os.path.join(self._folder.name, "guerdon"))
            self._command = [config.isolate_python, "-u", "-c", _START_ELSEWHERE, json.dumps([self._folder.name])]
        self._lock = threading.Lock()
        self._idle: list[socket.socket] = []
        self._all: set[socket.socket] = set()
        self._is_closed = False
        self._template: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> FunctionForm:
        """Starts the template; returns the function's form. Raises CheckpointError and StartError."""
        own, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(  # noqa: S603
                [*self._command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL, stdout=2, env=self._env, pass_fds=[theirs.fileno()], start_new_session=True,
            )  # fmt: skip
        what = self._wanted.function
        try:
            own.settimeout(self._import_s)
            try:
                channel.send(own, channel.encode(self._wanted))
                said = channel.receive(own, channel.MAX_REPORT_BYTES)
            except TimeoutError as e:
                raise StartError(
                    f"{what} is not imported within {self._import_s:g} s",
                    "check what it waits for, or raise import_deadline_s",
                ) from e
            except OSError:
                said = None
            if said is None:
                raise CheckpointError(
                    f"importing {what} ended its process", "see above what it says; import it in a Python"
                )
            own.settimeout(None)
            imported = msgspec.json.decode(said, type=channel.Imported)
            if imported.form is None:
                raise CheckpointError(imported.error, imported.help)
        except BaseException:
            own.close()
            process.kill()  # what it started while it imported, it started for good
            process.wait()
            raise
        self._template, self._process = own, process
        return imported.form

    def ask(self, sample: bytes) -> Report:
        """Has a child compute the sample; returns a report in any case."""
        started = time.monotonic()
        try:
            line = self._take()
        except (OSError, StartError) as e:
            return Report(reason="start", text=f"has no child process any more, and none can be started: {e}")
        try:
            line.settimeout(self._limits.deadline_s + END_S + _PATIENCE_S)
            channel.send(line, sample)
            self._wait_for(line)
            body = channel.receive(line, channel.MAX_REPORT_BYTES)
            report = None if body is None else msgspec.json.decode(body, type=Report)
        except (OSError, ValueError):
            report = None
        if report is None:
            with self._lock:
                self._all.discard(line)
                line.close()
            if self._is_closed:
                return Report(reason="stop", text="had no answer when the server stopped")
            took_s = time.monotonic() - started
            return Report(
                reason="keeper", text=f"ended the process that watches it, or stopped it, after {took_s:.1f} s"
            )
        with self._lock:
            if not self._is_closed:
                self._idle.append(line)
        return report

    def _wait_for(self, line: socket.socket) -> None:
        """Waits until the keeper answers or has ended; resumes the template and keepers if a sample has stopped them.

        The template ends keepers that are stopped alone.
        """
        poll = select.poll()
        poll.register(line, select.POLLIN)
        ends = time.monotonic() + (line.gettimeout() or 0.0)
        while not poll.poll(_LOOK_S * 1000):
            if time.monotonic() > ends:
                raise TimeoutError
            assert self._process is not None
            with contextlib.suppress(OSError):  # it has ended, and another one may have started
                if os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WNOHANG):
                    log.warning("%s: a sample has stopped the template process, which is resumed", self._wanted.name)
                    os.killpg(self._process.pid, signal.SIGCONT)

    def _take(self) -> socket.socket:
        """Returns a channel to an idle keeper, a new one if there is none; starts an ended template again."""
        with self._lock:
            if self._is_closed:
                raise OSError("the server is stopping")
            if self._idle:
                return self._idle.pop()
            assert self._template is not None
            try:
                line = fork_keeper(self._template)
            except OSError:
                log.warning("%s: its template process has ended; another one starts", self._wanted.name)
                self._end_template()
                self.start()
                line = fork_keeper(self._template)
            self._all.add(line)
            return line

    def _end_template(self) -> None:
        assert self._template is not None and self._process is not None
        self._template.close()
        with contextlib.suppress(OSError):
            os.killpg(self._process.pid, signal.SIGCONT)
        try:
            self._process.wait(2 * END_S)  # it ends all that is below it before
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def close(self) -> None:
        """Ends all processes; idempotent."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for line in self._all:
                with contextlib.suppress(OSError):  # ended already
                    line.shutdown(socket.SHUT_RDWR)  # wakes a thread that waits for it
            for line in self._idle:
                line.close()
            self._end_template()
