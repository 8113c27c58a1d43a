"""Functions that are served isolated; a word in a text says what trouble it makes, other texts give their length."""

import ctypes
import mmap
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from guerdon.errors import SampleFailed

FORKS = 6
"""How often each process of the fork bomb forks: at most 2 to the power of it, if nobody stops it."""


def _hang() -> None:
    while True:
        pass


def _hang_in_c() -> None:
    re.match(r"(a+)+$", "a" * 60 + "b")


def _pause() -> None:
    ctypes.CDLL(None).pause()


def _ignore_and_hang() -> None:
    for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP}:
        signal.signal(number, signal.SIG_IGN)
    os.setpgid(0, 0) if os.getsid(0) != os.getpid() else None
    _hang()


def _bomb() -> None:
    for _ in range(FORKS):
        os.fork()
    os.setsid() if os.getpgid(0) != os.getpid() else None
    time.sleep(60)


def _orphans() -> None:
    for _ in range(3):  # daemons: their parents end, in sessions of their own
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(600)
            os._exit(0)
    time.sleep(60)


def _many() -> None:
    for _ in range(40):
        subprocess.Popen(["sleep", "60"], start_new_session=True)
    time.sleep(60)


def _take_2_gb() -> None:
    np.ones(2 << 30, dtype=np.uint8)


def _take_2_gb_in_parts() -> None:
    for _ in range(8):
        if os.fork() == 0:
            kept = np.ones(256 << 20, dtype=np.uint8)
            time.sleep(60)
            os._exit(int(kept[0]))
    time.sleep(60)


def _take_2_gb_shared() -> None:
    shared = mmap.mmap(-1, 2 << 30)
    for start in range(0, 2 << 30, 1 << 20):
        shared[start : start + (1 << 20)] = b"x" * (1 << 20)
    time.sleep(60)


def _garbage() -> None:
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\x00\x00\x00\x20" + b"{}" * 100)
        except OSError:
            continue
    time.sleep(60)


def _close_all() -> None:
    os.closerange(0, 64)


def _print_much() -> None:
    for _ in range(64):
        print("x" * (1 << 20))


def _write_file() -> None:
    with tempfile.TemporaryFile() as file:
        file.seek(2 << 30)
        file.write(b"x")
        file.flush()


def _leave_behind() -> None:
    subprocess.Popen(["sleep", "600"], start_new_session=True)


def _kill_keeper() -> None:
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def _stop_keeper() -> None:
    os.kill(os.getppid(), signal.SIGSTOP)
    time.sleep(60)


def _stop_self() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _stop_all() -> None:
    os.killpg(os.getpgid(os.getppid()), signal.SIGSTOP)


def _stop_template() -> None:
    os.kill(os.getpgid(os.getppid()), signal.SIGSTOP)
    _kill_keeper()


def _close_stdout() -> None:
    print("to be flushed", end="")
    sys.stdout.close()


def _replace_stderr() -> None:
    sys.stderr = None  # type: ignore[assignment]


class _Odd(Exception):
    """What is raised by its name in `RAISED`."""


class _Unreadable(_Odd):
    def __str__(self) -> str:
        raise SystemExit(3)


class _Endless(_Odd):
    def __str__(self) -> str:
        return str(self)


class _NoText(_Odd):
    def __str__(self) -> str:
        return 3  # type: ignore[return-value] # noqa: PLE0307


class _Word(str):
    def __getitem__(self, key: object) -> str:
        raise KeyError(key)

    def __format__(self, spec: str) -> str:
        raise KeyError(spec)


class _Rebel(_Odd):
    def __str__(self) -> str:
        return _Word("a word of its own class")


def _noted() -> BaseException:
    error = ValueError("noted")
    for _ in range(20):
        error.add_note("x" * 1_000_000)
    return error


class _Hostile:
    """Answers nothing that an array asks."""

    def __len__(self) -> int:
        raise _Odd("no length")

    def __getitem__(self, key: object) -> Any:
        raise _Odd("no item")

    def __float__(self) -> float:
        raise _Odd("no number")


def _local_class() -> BaseException:
    class Local(BaseException):
        pass

    return Local("cannot be imported")


RAISED: dict[str, tuple[Callable[[], BaseException], str]] = {
    "surrogate": (lambda: ValueError("half \ud83d of a pair"), r"ValueError: half \ud83d of a pair"),
    "long": (lambda: ValueError("x" * 100_000_000), "ValueError: " + "x" * 1_988),
    "unreadable": (_Unreadable, "_Unreadable: (its text cannot be read: SystemExit)"),
    "endless": (_Endless, "_Endless: (its text cannot be read: RecursionError)"),
    "no text": (_NoText, "_NoText: (its text cannot be read: TypeError)"),
    "rebel": (_Rebel, "_Rebel: a word of its own class"),
    "notes": (_noted, "ValueError: noted"),
    "local": (_local_class, "Local: cannot be imported"),
    "exit": (lambda: SystemExit("half \ud83d"), r"SystemExit: half \ud83d"),
    "interrupt": (lambda: KeyboardInterrupt("now"), "KeyboardInterrupt: now"),
    "generator": (lambda: GeneratorExit("gone"), "GeneratorExit: gone"),
    "group": (lambda: BaseExceptionGroup("many", [ValueError("x" * 1_000_000)]), "ExceptionGroup: many (1 sub-"),
    "ours": (lambda: SampleFailed("half \ud83d"), r"half \ud83d"),
}
"""What to raise, and what the sample's error has to say."""


def raising(texts: list[str]) -> Any:
    """Raises what the text names in `RAISED`; else returns its length, or an object that answers nothing."""
    for text in texts:
        if text in RAISED:
            raise RAISED[text][0]()
    if "hostile" in texts:
        return _Hostile()
    return [_Hostile() if text == "number" else float(len(text)) for text in texts]


TROUBLES: dict[str, Callable[[], None]] = {
    "HANG": _hang,
    "HANG_IN_C": _hang_in_c,
    "PAUSE": _pause,
    "IGNORE": _ignore_and_hang,
    "BOMB": _bomb,
    "MANY": _many,
    "ORPHANS": _orphans,
    "2GB": _take_2_gb,
    "2GB_IN_PARTS": _take_2_gb_in_parts,
    "2GB_SHARED": _take_2_gb_shared,
    "SEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "READ_NULL": lambda: ctypes.string_at(0) and None,
    "KILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "EXIT": lambda: os._exit(3),
    "SYS_EXIT": lambda: sys.exit(4),
    "RAISE": lambda: int("no number") and None,
    "GARBAGE": _garbage,
    "CLOSE": _close_all,
    "FILE": _write_file,
    "KILL_KEEPER": _kill_keeper,
    "STOP_KEEPER": _stop_keeper,
    "STOP_SELF": _stop_self,
    "STOP_ALL": _stop_all,
    "STOP_TEMPLATE": _stop_template,
    "CLOSE_STDOUT": _close_stdout,
    "NO_STDERR": _replace_stderr,
    "PRINT": _print_much,
    "LEAVE": _leave_behind,
}


def trouble(texts: list[str]) -> list[float]:
    """Does what the text names, then returns its length; NaN for "NAN", two numbers for "TWO"."""
    (text,) = texts
    TROUBLES.get(text, lambda: None)()
    if text == "NAN":
        return [float("nan")]
    return [1.0, 2.0] if text == "TWO" else [float(len(text))]


def whole(responses: list[str], prompts: Any = None, *, labels: Any) -> list[float]:
    """Returns a number that every argument changes."""
    return [
        len(response) + 100 * len(prompt or "") + 10_000 * len(repr(label))
        for response, prompt, label in zip(responses, prompts, labels, strict=True)
    ]


def total(tokens: list[np.ndarray]) -> list[float]:
    """Returns the sums of ids."""
    return [float(row.sum()) for row in tokens]


def environment(texts: list[str]) -> list[float]:
    """Returns 1.0 for a text that is the name of an environment variable, and prints what TMPDIR is."""
    return [float(text in os.environ) for text in texts]


def temporary(texts: list[str]) -> list[float]:
    """Leaves a temporary file behind, in a folder whose path is raised."""
    _, path = tempfile.mkstemp()
    raise ValueError(path)
