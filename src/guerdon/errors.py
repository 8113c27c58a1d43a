"""All errors of guerdon in one tree, with their HTTP status, gRPC code and whether a retry can help.

GuerdonError
├── InvalidRequest          400 INVALID_ARGUMENT     the request is wrong; the same again fails again
│   ├── UnknownModel        400 NOT_FOUND            no model of that name is served here
│   └── EmptyBatch          400 INVALID_ARGUMENT     TEI's form asks for no sample
├── Unauthenticated         401 UNAUTHENTICATED      no key, or an unknown one
├── Forbidden               403 PERMISSION_DENIED    the key's role does not allow it
├── RouteNotFound           404 NOT_FOUND
├── MethodNotAllowed        405 UNIMPLEMENTED
├── PayloadTooLarge         413 RESOURCE_EXHAUSTED   larger than the server accepts; never read to its end
├── Cancelled               499 CANCELLED            the client disconnected
├── SampleFailed            500 INTERNAL             the model gave no score for this sample
│   ├── NoVerdict           500 INTERNAL             a judge said no label, or nothing from which a number can be read
│   └── ChildEnded          500 INTERNAL             the child process that computed it was ended; `reason` says why
├── ServerFault             500 INTERNAL             a bug or a failed device, not the request
│   └── TrainFailed         500 INTERNAL             a train request broke off; the text says what stands
├── Unsupported             501 UNIMPLEMENTED        part of the protocol, but not of this server
├── Unavailable             503 UNAVAILABLE          retry: not ready, stopping, or unreachable
│   ├── Overloaded          503 RESOURCE_EXHAUSTED   retry after `retry_after_s`: the queue is full
│   ├── RanksLost           503 UNAVAILABLE          retry: a rank was lost; the server ends, and may come back
│   ├── Offloaded           503 UNAVAILABLE          no retry: the weights are off the device until `onload`
│   └── Unreachable         503 UNAVAILABLE          raised by clients: no connection, or it broke before the answer
├── StorageFailed           507 RESOURCE_EXHAUSTED   the disk refused; the text says what was not done
├── CriticReset             -                        raised by clients: the critic was set back
├── RunFailed               -                        raised by actors: the run cannot go on
│   └── RewardsFailed       -                        too many rewards of a step failed; it was skipped
├── DeadlineExceeded        504 DEADLINE_EXCEEDED    not done within the request's time-out
└── StartError              -                        the command cannot start; `help` says what to do
    ├── ConfigError
    └── CheckpointError
        └── TooLarge                                 its weights exceed the free memory
"""

from __future__ import annotations

import copy
from enum import IntEnum
from importlib.util import find_spec
from typing import Any

_INSTALL = "pip install '.{extra}' in a clone of guerdon"
"""guerdon is not on a package index yet; then this becomes "pip install 'guerdon{extra}'"."""

_MAX_CHARACTERS = 2_000

_OUT_OF_MEMORY = (
    "out of memory", "_STATUS_ALLOC_FAILED", "not enough memory", "allocate memory", "bad_alloc", "OutOfMemoryError",
    "could not create a primitive", "could not create a memory",
)  # fmt: skip
"""Found in the texts of errors: of CUDA and its libraries, of torch on a CPU, of C++, of oneDNN, and of another rank's
error, which arrives as text."""


def install_command(extra: str = "") -> str:
    """Returns the command that installs guerdon with an extra of pyproject.toml."""
    return _INSTALL.format(extra=f"[{extra}]" if extra else "")


SERVER_MODULES = (
    "torch", "transformers", "safetensors", "starlette", "uvicorn", "httptools", "prometheus_client", "tritonclient"
)  # fmt: skip
"""Modules of the extra `server`."""


def require_modules(*modules: str, extra: str) -> None:
    """Raises StartError that names the modules of an extra that are missing; imports none."""
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        names = " and ".join([*([", ".join(missing[:-1])] if missing[1:] else []), missing[-1]])
        raise StartError(f"{names} {'are' if missing[1:] else 'is'} not installed", install_command(extra))


class Exit(IntEnum):
    """An exit status of a command; see `docs/cli.md`."""

    DONE = 0
    """All that was asked is done."""
    FAILED = 1
    """It started, and something failed."""
    CANNOT_START = 2
    """The command line, the settings, the installation or the machine do not allow it."""
    RANK_LOST = 70
    """Another rank was lost: EX_SOFTWARE of sysexits.h."""
    TRY_AGAIN = 75
    """Its time was up, and it has saved; the same command resumes: EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ended by Ctrl-C; a shell's status for SIGINT."""
    PIPE_CLOSED = 141
    """Nobody reads its output; a shell's status for SIGPIPE."""
    TERMINATED = 143
    """Ended by SIGTERM, a shell's status for it; a training run has saved before."""


class GuerdonError(Exception):
    """Base of all errors that guerdon raises deliberately; `str(error)` is a message for users."""

    http: int = 500
    grpc: str = "INTERNAL"
    retryable: bool = False
    retry_after_s: float | None = None

    def __str__(self) -> str:
        """Returns the text with lone surrogates escaped, because JSON and protobuf cannot carry them."""
        return super().__str__().encode("utf-8", "backslashreplace").decode()

    def __reduce__(self) -> Any:
        """Pickles errors whose constructor takes more than the text; trainers send them between processes."""
        return _unpickled, (type(self), *self.args), vars(self)


def named(what: str, error: GuerdonError) -> GuerdonError:
    """Returns a copy of the error with `what`, a row or a component, before its text."""
    renamed = copy.copy(error)
    renamed.args = (f"{what}: {error}",)
    return renamed


def describe(error: BaseException) -> str:
    """Returns the error's class and text, at most 2,000 characters of valid UTF-8, even if its `__str__` raises."""
    try:
        text = str.__getitem__(str(error), slice(_MAX_CHARACTERS))
    except BaseException as e:
        text = f"(its text cannot be read: {type(e).__name__})"
    described = f"{type(error).__name__}: {text}"
    return described[:_MAX_CHARACTERS].encode("utf-8", "backslashreplace").decode()


def first_line(error: BaseException) -> str:
    """Returns the first line of the error's text, the name of its class if it has none."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether the error reports a lack of memory; torch has a class of its own only for GPUs."""
    return isinstance(error, MemoryError) or any(text in describe(error) for text in _OUT_OF_MEMORY)


def _unpickled(cls: type[GuerdonError], *args: Any) -> GuerdonError:
    return cls.__new__(cls, *args)


class InvalidRequest(GuerdonError):
    """The request is wrong, and would be again."""

    http, grpc = 400, "INVALID_ARGUMENT"


class UnknownModel(InvalidRequest):
    """No model of that name (or version) is served here."""

    grpc = "NOT_FOUND"


class EmptyBatch(InvalidRequest):
    """The batch has no samples, for which TEI has an error of its own."""


class Unauthenticated(GuerdonError):
    """The request has no key, or an unknown one."""

    http, grpc = 401, "UNAUTHENTICATED"


class Forbidden(GuerdonError):
    """The key's role does not allow the request."""

    http, grpc = 403, "PERMISSION_DENIED"


class RouteNotFound(GuerdonError):
    """No such path."""

    http, grpc = 404, "NOT_FOUND"


class MethodNotAllowed(GuerdonError):
    """The path exists, but not with this HTTP method."""

    http, grpc = 405, "UNIMPLEMENTED"


class PayloadTooLarge(GuerdonError):
    """The body, compressed or decompressed, is larger than the server accepts."""

    http, grpc = 413, "RESOURCE_EXHAUSTED"


class Cancelled(GuerdonError):
    """The client disconnected before the answer."""

    http, grpc = 499, "CANCELLED"


class SampleFailed(GuerdonError):
    """The model gave no score for this sample; its error says why."""


class NoVerdict(SampleFailed):
    """The judge said no label, or nothing from which a number can be read; the sample's error shows what it said."""


class ChildEnded(SampleFailed):
    """The child process of an isolated function ended with this sample: `reason` is a word for the metrics."""

    def __init__(self, message: str, reason: str = "") -> None:
        super().__init__(message)
        self.reason = reason


class ServerFault(GuerdonError):
    """Something failed inside the server; the request was fine."""


class TrainFailed(ServerFault):
    """A train request broke off; `num_steps` counts its leading global batches, which stand.

    The same id gets this error again; if nothing stands, only until a restart.
    """

    def __init__(self, message: str, num_steps: int = 0) -> None:
        super().__init__(message)
        self.num_steps = num_steps


class Unsupported(GuerdonError):
    """The protocol has this feature, the server does not."""

    http, grpc = 501, "UNIMPLEMENTED"


class Unavailable(GuerdonError):
    """Not ready, stopping, or not reachable; the same request may succeed later."""

    http, grpc, retryable = 503, "UNAVAILABLE", True


class Overloaded(Unavailable):
    """The queue is full; retry after `retry_after_s` seconds."""

    grpc = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RanksLost(Unavailable):
    """A process that holds a part of the model died or hangs; this server ends, and its launcher may restart it."""


class Offloaded(Unavailable):
    """The critic's weights are off the device until `onload`."""

    retryable = False


class Unreachable(Unavailable):
    """No connection to the server, or it broke before the answer; only clients raise it.

    `may_have_arrived` is False if there was no connection, so that the request cannot have reached the server.
    """

    def __init__(self, message: str, *, may_have_arrived: bool = True) -> None:
        super().__init__(message)
        self.may_have_arrived = may_have_arrived


class StorageFailed(GuerdonError):
    """The disk is full, read-only or broken; nothing was changed, unless the text says otherwise."""

    http, grpc = 507, "RESOURCE_EXHAUSTED"


class CriticReset(GuerdonError):
    """The critic lost steps that this client had seen, without a `load` by it; only clients raise it."""


class RunFailed(GuerdonError):
    """An actor's run cannot continue; only actors raise it."""


class RewardsFailed(RunFailed):
    """Too many responses of a step have no reward; the policy is unchanged."""


class DeadlineExceeded(GuerdonError):
    """The request took longer than its time-out."""

    http, grpc = 504, "DEADLINE_EXCEEDED"


class StartError(GuerdonError):
    """A command cannot start; `help` says in one line what to do."""

    def __init__(self, message: str, help: str) -> None:  # noqa: A002 - the word a user reads
        super().__init__(message)
        self.help = help


class ConfigError(StartError):
    """A setting is unknown, malformed, or contradicts another."""


class CheckpointError(StartError):
    """A checkpoint is missing, incomplete or unsupported."""


class TooLarge(CheckpointError):
    """A checkpoint's weights exceed the free memory."""
