"""The one tree of errors. Each class says its HTTP status, its gRPC code and whether a retry can help.

GuerdonError
├── InvalidRequest          400 INVALID_ARGUMENT     the request is wrong; the same again fails again
│   └── UnknownModel        400 NOT_FOUND            no model of that name is served here
├── Unauthenticated         401 UNAUTHENTICATED      no key, or one that this server does not know
├── Forbidden               403 PERMISSION_DENIED    the key's role does not allow it
├── RouteNotFound           404 NOT_FOUND
├── MethodNotAllowed        405 UNIMPLEMENTED
├── PayloadTooLarge         413 RESOURCE_EXHAUSTED   larger than the server accepts; never read to its end
├── Cancelled               499 CANCELLED            the client left
├── SampleFailed            500 INTERNAL             the model gave no finite score for this sample
├── ServerFault             500 INTERNAL             a bug or a failed device, not the request
│   └── TrainFailed         500 INTERNAL             a train request broke off; the text says what of it stands
├── Unsupported             501 UNIMPLEMENTED        the protocol has it, this server does not
├── Unavailable             503 UNAVAILABLE          retry: not ready, stopping, or unreachable
│   ├── Overloaded          503 RESOURCE_EXHAUSTED   retry after `retry_after_s`: the queue is full
│   ├── RanksLost           503 UNAVAILABLE          retry: a rank was lost; the server ends, and may come back
│   ├── Offloaded           503 UNAVAILABLE          no retry: the weights are off the device until `onload`
│   └── Unreachable         503 UNAVAILABLE          raised by clients: no connection, or it broke before the answer
├── StorageFailed           507 RESOURCE_EXHAUSTED   the disk cannot take it; the text says what was not done
├── CriticReset             -                        raised by clients: the critic's weights are older than was seen
├── RunFailed               -                        raised by actors: the run cannot go on
│   └── RewardsFailed       -                        too many of a step's rewards failed; nothing was learnt of it
├── DeadlineExceeded        504 DEADLINE_EXCEEDED    not answered within the time that the request allowed
└── StartError              -                        the command cannot start; `help` says what to do
    ├── ConfigError
    └── CheckpointError
        └── TooLarge                                 its weights do not fit into the memory that is free
"""

from __future__ import annotations

import copy
from enum import IntEnum
from typing import Any

_INSTALL = "pip install '.{extra}' in a clone of guerdon"
"""guerdon is on no package index yet. The day that it is, this becomes "pip install 'guerdon{extra}'"."""


def install_command(extra: str = "") -> str:
    """Returns the command that installs guerdon with this extra of pyproject.toml."""
    return _INSTALL.format(extra=f"[{extra}]" if extra else "")


class Exit(IntEnum):
    """An exit status; `docs/cli.md` says when a command ends with which."""

    DONE = 0
    """All that was asked is done."""
    FAILED = 1
    """It began, and something of it failed."""
    CANNOT_START = 2
    """The command line, the settings, the installation or the machine do not allow it."""
    RANK_LOST = 70
    """Another of the processes that share the work was lost: EX_SOFTWARE of sysexits.h."""
    TRY_AGAIN = 75
    """It has saved and left as its time was up; the same command goes on: EX_TEMPFAIL of sysexits.h."""
    INTERRUPTED = 130
    """Ended by Ctrl-C, as a shell tells of SIGINT."""
    PIPE_CLOSED = 141
    """Nobody reads its output any more, as a shell tells of SIGPIPE."""
    TERMINATED = 143
    """Ended by SIGTERM, as a shell tells of it; what trains has saved before."""


class GuerdonError(Exception):
    """Base of all errors that guerdon raises on purpose; `str(error)` is fit for a user."""

    http: int = 500
    grpc: str = "INTERNAL"
    retryable: bool = False
    retry_after_s: float | None = None

    def __reduce__(self) -> Any:
        """Trainers carry errors from process to process: also those whose constructor takes more than the text."""
        return _unpickled, (type(self), *self.args), vars(self)


def named(what: str, error: GuerdonError) -> GuerdonError:
    """The same error as one of `what`, a row or a component; a new one, as others may be told of it, too."""
    told = copy.copy(error)
    told.args = (f"{what}: {error}",)
    return told


def _unpickled(cls: type[GuerdonError], *args: Any) -> GuerdonError:
    return cls.__new__(cls, *args)


class InvalidRequest(GuerdonError):
    """The request is wrong, and the same request will be wrong again."""

    http, grpc = 400, "INVALID_ARGUMENT"


class UnknownModel(InvalidRequest):
    """No model of that name (or version) is served here."""

    grpc = "NOT_FOUND"


class Unauthenticated(GuerdonError):
    """The request has no key, or one that is not known here."""

    http, grpc = 401, "UNAUTHENTICATED"


class Forbidden(GuerdonError):
    """The key is known, and does not allow what was asked."""

    http, grpc = 403, "PERMISSION_DENIED"


class RouteNotFound(GuerdonError):
    """No such path."""

    http, grpc = 404, "NOT_FOUND"


class MethodNotAllowed(GuerdonError):
    """The path exists, but not for this HTTP method."""

    http, grpc = 405, "UNIMPLEMENTED"


class PayloadTooLarge(GuerdonError):
    """The body, or what it decompresses to, is larger than the server accepts."""

    http, grpc = 413, "RESOURCE_EXHAUSTED"


class Cancelled(GuerdonError):
    """The client left before the answer."""

    http, grpc = 499, "CANCELLED"


class SampleFailed(GuerdonError):
    """The model gave no finite score for this sample."""


class ServerFault(GuerdonError):
    """Something failed inside the server; the request was fine."""


class TrainFailed(ServerFault):
    """A train request broke off; `num_steps` of its global batches stand, as `str(error)` says.

    The same id gets the same answer again.
    """

    def __init__(self, message: str, num_steps: int = 0) -> None:
        super().__init__(message)
        self.num_steps = num_steps


class Unsupported(GuerdonError):
    """The protocol has this, the server has not."""

    http, grpc = 501, "UNIMPLEMENTED"


class Unavailable(GuerdonError):
    """Not ready, stopping, or not reachable; the same request may succeed later."""

    http, grpc, retryable = 503, "UNAVAILABLE", True


class Overloaded(Unavailable):
    """The queue is full; try again after `retry_after_s` seconds."""

    grpc = "RESOURCE_EXHAUSTED"

    def __init__(self, message: str, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RanksLost(Unavailable):
    """A process that holds a part of the model has died or hangs: this server ends, and may be started again."""


class Offloaded(Unavailable):
    """The critic's weights are off the device; it answers again after `onload`."""

    retryable = False


class Unreachable(Unavailable):
    """Nothing answers at that address, or the connection broke before the answer; only clients raise it.

    `may_have_arrived` is False where there was no connection, so that the request cannot have reached the server.
    """

    def __init__(self, message: str, *, may_have_arrived: bool = True) -> None:
        super().__init__(message)
        self.may_have_arrived = may_have_arrived


class StorageFailed(GuerdonError):
    """The disk is full, read-only or broken; nothing was changed, unless the text says otherwise."""

    http, grpc = 507, "RESOURCE_EXHAUSTED"


class CriticReset(GuerdonError):
    """The critic has lost steps that this client had seen, and not by a `load` of its own; only clients raise it."""


class RunFailed(GuerdonError):
    """An actor's run cannot go on; only actors raise it."""


class RewardsFailed(RunFailed):
    """Too many of a step's responses got no reward to learn from the rest; the policy is as it was before the step."""


class DeadlineExceeded(GuerdonError):
    """The request allowed less time than it took."""

    http, grpc = 504, "DEADLINE_EXCEEDED"


class StartError(GuerdonError):
    """A command cannot start. `help` is one line on what to do."""

    def __init__(self, message: str, help: str) -> None:  # noqa: A002 - the word a user reads
        super().__init__(message)
        self.help = help


class ConfigError(StartError):
    """A setting is unknown, malformed, or contradicts another."""


class CheckpointError(StartError):
    """A checkpoint is missing, incomplete, or of a kind that cannot be served."""


class TooLarge(CheckpointError):
    """A checkpoint's weights do not fit into the memory that is free now."""
