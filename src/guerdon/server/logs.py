"""What a server logs: no sample's text, no key, and no line that a client could forge."""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from datetime import UTC, datetime
from typing import Any, Literal, TypeVar

import orjson

T = TypeVar("T", bound=BaseException)
LogFormat = Literal["text", "json"]

_MOST_CHARACTERS = 10_000
"""Of one line; a client may have given a part of it."""


class OneLine(logging.Formatter):
    """A record is one line; only a traceback's lines follow it, each of them indented."""

    def format(self, record: logging.LogRecord) -> str:
        """The record's text, in which what does not print is written as an escape."""
        record.message = _printable(record.getMessage())
        record.asctime = self.formatTime(record)
        return "\n  ".join([self.formatMessage(record), *map(_printable, _trace_lines(self, record))])


class JsonLines(logging.Formatter):
    """A record is one line with one JSON object: `json_line`, with `traceback` where there is one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """The record's line."""
        trace = _trace_lines(self, record)
        more: dict[str, str | list[str]] = {"traceback": trace} if trace else {}
        level = record.levelname.lower()
        return json_line(record.created, level, record.name, record.getMessage(), self._rank, **more)


def json_line(time: float, level: str, logger: str, message: str, rank: int, **more: str | list[str]) -> str:
    """One JSON object, on one line; `time` in seconds since 1970.

    Its strings have escapes in place of what does not print, as `OneLine` has.
    """
    told = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line: dict[str, Any] = {"time": told, "level": level, "logger": logger, "message": _printable(message)}
    line["rank"] = rank
    for name, value in more.items():
        line[name] = _printable(value) if isinstance(value, str) else [_printable(item) for item in value]
    return orjson.dumps(line).decode()


def take_over() -> None:
    """Sends to the log what Python itself writes to stderr: warnings, and errors that nobody has caught."""
    logging.captureWarnings(True)
    log = logging.getLogger("guerdon")

    def uncaught(cls: type[BaseException], error: BaseException | None, trace: Any) -> None:
        log.critical("uncaught error", exc_info=(cls, error or cls(), trace))

    sys.excepthook = uncaught
    threading.excepthook = lambda args: uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def take_over_libraries() -> None:
    """Sends to the log what libraries with handlers of their own would write to stdout or stderr."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in loggers:
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr):
                logger.removeHandler(handler)
                logger.propagate = True


class Frames(logging.Filter):
    """Leaves of a library's errors what `failure` leaves of ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Lets every record pass."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.exc_info, record.exc_text = None, _trace(error)
        return True


def failure(logger: logging.Logger, level: int, text: str, *args: object, error: BaseException) -> None:
    """Logs `text` with its `args`, the error's class and where it was raised, and the same of its causes.

    What the errors say themselves may hold a sample's text: it is for whoever sent that, and never logged.
    """
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    record = logger.makeRecord(logger.name, level, file, line, text, args, None, function)
    record.exc_text = _trace(error)
    logger.handle(record)


def without_frames(error: T) -> T:
    """The error without where it was raised, or by what: frames that hold a body would, while it is told, hold it."""
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


def _trace(error: BaseException) -> str:
    parts: list[str] = []
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        if parts:
            parts.append("caused by, or raised amid:\n")
        parts += traceback.format_tb(cause.__traceback__)
        parts.append(f"{type(cause).__module__}.{type(cause).__qualname__}\n")
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return "".join(parts)


def _trace_lines(formatter: logging.Formatter, record: logging.LogRecord) -> list[str]:
    trace = record.exc_text or (formatter.formatException(record.exc_info) if record.exc_info else "")
    return [line for line in trace.split("\n") if line]


def _printable(text: str) -> str:
    """The text on one line, cut where it is long, without what would move a terminal's cursor or turn its writing."""
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + " ..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
