"""Console output: status lines, errors with advice, and logs; coloured on terminals."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Literal, TextIO

from guerdon import errors
from guerdon.core import ModelInfo
from guerdon.critic_core import CriticState
from guerdon.distributed.ranks import num_started
from guerdon.endings import Ending
from guerdon.errors import ConfigError, Exit, GuerdonError, StartError, require_modules
from guerdon.kinds import all_kinds
from guerdon.server import logs
from guerdon.server.logs import JsonLines, LogFormat, OneLine
from guerdon.settings.config import CriticConfig

NEEDS_ENDING = (
    "conversations get it, texts need it: guerdon's functions for TRL, verl, AReaL, NeMo-RL and trlX, and slime's "
    "/reward, append it; OpenRLHF's does with ending=None, /get_reward with ?ending=true"
)

Style = Literal["bold", "faint", "red", "green", "yellow", "cyan"]

_CODES: dict[Style, str] = {"bold": "1", "faint": "2", "red": "1;31", "green": "32", "yellow": "33", "cyan": "36"}

_format: LogFormat = "text"
"""The format of `say` and `fail`, for the whole process."""

_ADVICE: dict[type[GuerdonError], str] = {
    errors.UnknownModel: "`guerdon doctor URL` lists the models of a server",
    errors.InvalidRequest: "correct the request; retrying it would fail again",
    errors.Unauthenticated: "set GUERDON_API_KEY to a key that the server knows",
    errors.Forbidden: "set GUERDON_API_KEY to a key whose role permits it",
    errors.RouteNotFound: "check the URL: it is the server's, without a path",
    errors.PayloadTooLarge: "send less at once, or raise the server's --max-body-mb",
    errors.SampleFailed: "the server's log shows the cause",
    errors.ServerFault: "the server's log shows the cause; --log-level debug adds details",
    errors.Unsupported: "`guerdon doctor URL` shows what the server is",
    errors.Unreachable: "check the URL and that the server runs: `guerdon doctor URL` tries it",
    errors.RanksLost: "run the same command again: it restarts all ranks and resumes from the last save",
    errors.Offloaded: "have the client that offloaded the critic send `onload`",
    errors.Overloaded: "retry when the server has less load, or share the load between several",
    errors.Unavailable: "retry when the server is ready: `guerdon doctor URL` shows it",
    errors.StorageFailed: "free disk space or give a path on another disk; then run the same command again",
    errors.CriticReset: "restart the run from its newest checkpoint, or from a checkpoint that matches the critic's",
    errors.RunFailed: "fix the cause; the same command then resumes from the newest checkpoint",
    errors.DeadlineExceeded: "check with `guerdon doctor URL` whether the server is ready; it may be overloaded",
    GuerdonError: "fix the cause and run the same command again: it continues where it stopped",
}
"""Remedies for errors without one."""


def describe_model(info: ModelInfo) -> str:
    """Returns a served model's description, in one line."""
    return f"{info.name}: {all_kinds.of(info).describe(info)}"


def describe_ending(name: str, ending: Ending | None, outputs: Collection[str]) -> str:
    """Returns how a model's chat template ends an answer, and who has to append it; empty without a template."""
    if ending is None or not {"rewards", "logprobs"} & {*outputs}:
        return ""
    what = f"{name}: the chat template ends an answer with {ending}"
    if "rewards" in outputs:
        return f"{what}; {NEEDS_ENDING}"
    return f"{what}; it is asked as a part of a conversation's answer, and not after a response to messages"


def describe_places(places: Mapping[str, Iterable[str]]) -> str:
    """Returns which devices compute at the same time, each with its models."""
    return "at the same time compute: " + ", ".join(f"{place} ({', '.join(names)})" for place, names in places.items())


def describe_persistence(critic: CriticConfig) -> str:
    """Returns where a critic's updates are saved, if anywhere."""
    if critic.checkpoint_dir is None:
        return f"{critic.name} learns; WHAT IT LEARNS IS LOST AT EXIT: give --checkpoint-dir to save it"
    return f"{critic.name} learns; what it learns is saved in {critic.checkpoint_dir}"


def describe_stopped(critic: CriticConfig, state: CriticState) -> str:
    """Returns the step at which a critic stopped, with its saved and journalled state."""
    stopped = f"{critic.name} stopped at step {state.step}"
    if not state.is_durable:
        return f"{stopped}; WHAT IT LEARNED IS LOST, because there is no --checkpoint-dir"
    saved = f"step {state.checkpoints[-1].step} is saved as {state.checkpoints[-1].name}" if state.checkpoints else ""
    return (
        f"{stopped}: in {critic.checkpoint_dir} {saved or 'no checkpoint is saved'}, train requests journalled since "
        f"then: {state.num_unsaved}; the same command resumes there"
    )


def require_grpc(urls: Iterable[str]) -> None:
    """Raises StartError if one of the URLs needs gRPC, which is an extra, and it is not installed."""
    if any(url.startswith(("grpc://", "grpcs://")) for url in urls):
        require_modules("tritonclient", "grpc", extra="grpc")


def check_single_process(command: str) -> None:
    """Raises ConfigError if a launcher has started several processes of a command that needs one."""
    if num_started() > 1:
        raise ConfigError(
            f"guerdon {command} is one process, but torchrun started {num_started()}",
            "run it without torchrun (or unset WORLD_SIZE); `guerdon serve` shares a model between processes",
        )


def set_format(log_format: LogFormat) -> None:
    """Sets the format in which `say` and `fail` write from now on."""
    global _format
    _format = log_format


def _drop_repeats() -> Callable[[logging.LogRecord], bool]:
    """Returns a filter that passes the first of all records with the same message."""
    seen: set[tuple[str, str]] = set()

    def is_new(record: logging.LogRecord) -> bool:
        num_before = len(seen)
        seen.add((record.name, str(record.msg)))
        return len(seen) > num_before

    return is_new


def set_up_logging(log_level: str, log_format: LogFormat = "text", *, once: bool = False) -> None:
    """Sets up the log, each message `once` at most, and adds the working directory to the module search path."""
    set_format(log_format)
    rank, level = "", log_level.upper()
    if num_started() > 1:
        rank = f" rank {os.environ.get('RANK', '?')}"
        if not _is_first("RANK") and level in ("DEBUG", "INFO"):
            level = "WARNING"  # the other ranks do the same as rank 0, which logs it
    handler = logging.StreamHandler()
    handler.setFormatter(
        JsonLines(_rank())
        if log_format == "json"
        else OneLine(f"%(asctime)s %(levelname)s{rank} %(name)s: %(message)s")
    )
    if once:
        handler.addFilter(_drop_repeats())
    logging.basicConfig(level=level, handlers=[handler])
    for chatty in ("httpx", "httpcore", "urllib3", "huggingface_hub"):
        logging.getLogger(chatty).setLevel(logging.WARNING)
    if log_format == "json":
        logs.take_over()
    # Like `python -m`, find a scorer given as module:function in the working directory.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def redirect_library_logs() -> None:
    """With JSON logs, redirects the logs of the libraries, all of which are imported by now."""
    if _format == "json":
        logs.take_over_libraries()


def coloured(text: str, style: Style, stream: TextIO) -> str:
    """Returns the text in the style if the stream shows colours, else unchanged."""
    return f"\033[{_CODES[style]}m{text}\033[0m" if shows_colours(stream) else text


def shows_colours(stream: TextIO) -> bool:
    """Returns whether the stream is a terminal that shows colours.

    NO_COLOR disables and FORCE_COLOR enables colours on any stream; an empty variable has no effect, and NO_COLOR takes
    precedence.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return os.environ.get("TERM") != "dumb" and stream.isatty()


_FIRST_FAILS_S = 10.0
"""How long another rank of a host waits for the first one to print the same error, in seconds."""


def _is_first(variable: str) -> bool:
    """Returns whether this is rank 0 of the launch (RANK) or of this host (LOCAL_RANK)."""
    return os.environ.get(variable, "0") == "0"


def _rank() -> int:
    rank = os.environ.get("RANK", "")
    return int(rank) if rank.isdecimal() else 0


def say(text: str) -> None:
    """Prints a status line, on rank 0 only."""
    if not _is_first("RANK"):
        return
    if _format == "json":
        _write_json(sys.stdout, "info", text)
        return
    print(f"{coloured('guerdon:', 'bold', sys.stdout)} {text}", flush=True)


def fail(what: object, help_text: str, status: int) -> int:
    """Prints the error and its remedy, usually once per host; returns `status`."""
    if not _is_first("LOCAL_RANK"):
        # As a rule the host's first rank fails likewise and prints it, and the launcher then ends this one. If this one
        # left earlier, the launcher would end the first one before it printed anything.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a rank that ends ignores it
        time.sleep(_FIRST_FAILS_S)
    notes = getattr(what, "__notes__", ())
    if _format == "json":
        _write_json(sys.stderr, "error", "; ".join([str(what), *notes]), help=help_text)
        return status
    print(f"{coloured('guerdon:', 'red', sys.stderr)} {what}", file=sys.stderr)
    for note in notes:
        print(f"  {note}", file=sys.stderr)
    print(f"{coloured('help:', 'cyan', sys.stderr)} {help_text}", file=sys.stderr)
    return status


def exit_status(work: Callable[[], int | None]) -> int:
    """Does the work of a command; prints its error if it has one, and returns the exit status, one of `Exit`."""
    try:
        status = int(work() or Exit.DONE)
        sys.stdout.flush()
        return status
    except StartError as e:
        return fail(e, e.help, Exit.CANNOT_START)
    except GuerdonError as e:
        return fail(e, advise(e), Exit.FAILED)
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:  # as with `| head`; Python would report it again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.PIPE_CLOSED


def advise(error: GuerdonError) -> str:
    """Returns what to do about an error, by its class or the nearest base class with advice."""
    return next(_ADVICE[cls] for cls in type(error).__mro__ if cls in _ADVICE)


def _write_json(stream: TextIO, level: str, text: str, **more: str) -> None:
    print(logs.json_line(time.time(), level, "guerdon", text, _rank(), **more), file=stream, flush=True)
