"""What the command says to its user, and what it needs before it begins."""

from __future__ import annotations

import logging
import os
import sys
import time
from typing import TextIO

from guerdon import errors
from guerdon.cli.colours import coloured
from guerdon.core import ModelInfo
from guerdon.critic_core import CriticState
from guerdon.distributed.ranks import num_started
from guerdon.errors import ConfigError, GuerdonError, StartError, install_command
from guerdon.server import logs
from guerdon.server.logs import JsonLines, LogFormat, OneLine
from guerdon.settings.config import CriticConfig

_format: LogFormat = "text"
"""Of what `say` and `fail` write, as of the log; a process has one."""


_ADVICE: dict[type[GuerdonError], str] = {
    errors.UnknownModel: "`guerdon doctor URL` lists what a server has",
    errors.InvalidRequest: "correct what is named above; the same again would fail again",
    errors.Unauthenticated: "set GUERDON_API_KEY to a key that the server knows",
    errors.Forbidden: "set GUERDON_API_KEY to a key whose role allows it",
    errors.RouteNotFound: "check the URL: it is that of the server, without a path",
    errors.PayloadTooLarge: "send less at once, or give the server more --max-body-mb",
    errors.SampleFailed: "the server's log has the cause",
    errors.ServerFault: "the server's log has the cause; with its --log-level debug, more of it",
    errors.Unsupported: "`guerdon doctor URL` tells what that server is",
    errors.Unreachable: "check that the server runs and the URL is its own: `guerdon doctor URL` tries it",
    errors.RanksLost: "the same command again starts all ranks, and goes on from what was saved",
    errors.Offloaded: "have whoever offloaded the critic send `onload`",
    errors.Overloaded: "try again when the server has less to do, or share the load between several",
    errors.Unavailable: "try again when the server is ready: `guerdon doctor URL` tells",
    errors.StorageFailed: "make room, or give a path on another disk; then give the same command again",
    errors.CriticReset: "start the run again from its newest checkpoint, or from one of both that fit",
    errors.RunFailed: "mend what is named above; the same command goes on from the newest checkpoint",
    errors.DeadlineExceeded: "see with `guerdon doctor URL` whether the server is ready; it may have too much to do",
    GuerdonError: "the same command again goes on where it stopped, once the cause is gone",
}
"""What to do about an error where it does not say so itself."""


def described(info: ModelInfo) -> str:
    """A served model in one line."""
    if info.kind == "sum":
        return f"{info.name}: {info.kind} of {info.why}, weights {info.weights_version}"
    path = info.path + (f" ({info.why})" if info.why else "")
    parts = [info.kind, f"{info.dtype} on {info.device}", f"weights {info.weights_version}"]
    if info.pooling:
        parts.append(f"pooling {info.pooling}")
    if info.lacks_tokenizer:
        parts.append(f"no tokenizer in {info.source}: takes token ids only")
    return f"{info.name}: {', '.join([*parts, path])}"


def kept(critic: CriticConfig) -> str:
    """What becomes of what a critic learns."""
    if critic.checkpoint_dir is None:
        return "WHAT IT LEARNS IS LOST WITH THIS SERVER: give --checkpoint-dir to keep it"
    return f"what it learns is kept in {critic.checkpoint_dir}"


def describe_stopped(critic: CriticConfig, state: CriticState) -> str:
    """Returns the step at which a critic stopped, and what is saved and journalled."""
    where = f"{critic.name} was stopped at step {state.step}"
    if not state.is_durable:
        return f"{where}, AND WHAT IT LEARNT IS LOST: there is no --checkpoint-dir"
    saved = f"step {state.checkpoints[-1].step} is saved as {state.checkpoints[-1].name}" if state.checkpoints else ""
    return (
        f"{where}: in {critic.checkpoint_dir} {saved or 'no checkpoint is saved'}, train requests journalled since "
        f"then: {state.num_unsaved}; the same command goes on from there"
    )


def need(*modules: str) -> None:
    """Raises StartError where the optional parts of the installation are missing, without importing them."""
    from importlib.util import find_spec

    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        extra = "actor" if "matplotlib" in modules else "server"
        raise StartError(f"{', '.join(missing)} is not installed", install_command(extra))


def check_alone(command: str) -> None:
    """Raises ConfigError where torchrun has started several processes of a command that is one."""
    if num_started() > 1:
        raise ConfigError(
            f"guerdon {command} is one process, and torchrun has started {num_started()}",
            "run it without torchrun (or with WORLD_SIZE unset); `guerdon serve` shares a model between processes",
        )


def speak(log_format: LogFormat) -> None:
    """Sets how `say` and `fail` write from now on."""
    global _format
    _format = log_format


def set_up(log_level: str, log_format: LogFormat = "text") -> None:
    """The log, and where users' modules are looked for."""
    speak(log_format)
    rank, level = "", log_level.upper()
    if num_started() > 1:
        rank = f" rank {os.environ.get('RANK', '?')}"
        if not _is_first("RANK") and level in ("DEBUG", "INFO"):
            level = "WARNING"  # the others do what rank 0 does, which says it
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(_rank())
        if log_format == "json"
        else OneLine(f"%(asctime)s %(levelname)s{rank} %(name)s: %(message)s")
    )
    logging.basicConfig(level=level, handlers=[handler])
    for chatty in ("httpx", "httpcore", "urllib3", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if log_format == "json":
        logs.take_over()
    # A scorer given as module:function is looked for where the command is run, as `python -m` would.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def loaded() -> None:
    """All libraries are there: where lines are JSON, so are theirs."""
    if _format == "json":
        logs.take_over_libraries()


def _is_first(rank: str) -> bool:
    """Whether this process is the one that speaks, of all that torchrun has started, or of this host's (LOCAL_RANK)."""
    return os.environ.get(rank, "0") == "0"


def _rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def say(text: str) -> None:
    """Tells the user, once for all ranks."""
    if not _is_first("RANK"):
        return
    if _format == "json":
        _write_json(sys.stdout, "info", text)
        return
    print(f"{coloured('guerdon:', 'bold', sys.stdout)} {text}", flush=True)


def fail(what: object, help_text: str, status: int) -> int:
    """Tells the user what is wrong and what to do, once a host; returns `status`."""
    if not _is_first("LOCAL_RANK"):  # all ranks raise the same, and a file may be missing on one host alone
        return status
    notes = getattr(what, "__notes__", ())
    if _format == "json":
        _write_json(sys.stderr, "error", "; ".join([str(what), *notes]), help=help_text)
        return status
    print(f"{coloured('guerdon:', 'red', sys.stderr)} {what}", file=sys.stderr)
    for note in notes:
        print(f"  {note}", file=sys.stderr)
    print(f"{coloured('help:', 'cyan', sys.stderr)} {help_text}", file=sys.stderr)
    return status


def help_for(error: GuerdonError) -> str:
    """One line on what to do: that of the nearest class which has one."""
    return next(_ADVICE[cls] for cls in type(error).__mro__ if cls in _ADVICE)


def _write_json(stream: TextIO, level: str, text: str, **more: str) -> None:
    print(logs.json_line(time.time(), level, "guerdon", text, _rank(), **more), file=stream, flush=True)
