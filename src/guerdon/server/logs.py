"""Formats the server's logs: no sample texts, no keys, no log injection."""

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
"""Limit per line, because clients control parts of it."""


class OneLine(logging.Formatter):
    """Formats a record as one line; traceback lines follow it, indented."""

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's text, with unprintable characters escaped."""
        record.message = _printable(record.getMessage())
        record.asctime = self.formatTime(record)
        return "\n  ".join([self.formatMessage(record), *map(_printable, _trace_lines(self, record))])


class JsonLines(logging.Formatter):
    """Formats a record as a JSON line (`json_line`), with `traceback` if it has one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self._rank = rank

    def format(self, record: logging.LogRecord) -> str:
        """Returns the record's line."""
        trace = _trace_lines(self, record)
        more: dict[str, str | list[str]] = {"traceback": trace} if trace else {}
        level = record.levelname.lower()
        return json_line(record.created, level, record.name, record.getMessage(), self._rank, **more)


def json_line(time: float, level: str, logger: str, message: str, rank: int, **more: str | list[str]) -> str:
    """Returns one JSON object on one line; `time` is Unix time. Unprintable characters are escaped, as by `OneLine`."""
    told = datetime.fromtimestamp(time, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    line: dict[str, Any] = {"time": told, "level": level, "logger": logger, "message": _printable(message)}
    line["rank"] = rank
    for name, value in more.items():
        line[name] = _printable(value) if isinstance(value, str) else [_printable(item) for item in value]
    return orjson.dumps(line).decode()


def take_over() -> None:
    """Logs Python's warnings and uncaught exceptions instead of printing them to stderr."""
    logging.captureWarnings(True)
    log = logging.getLogger("guerdon")

    def uncaught(cls: type[BaseException], error: BaseException | None, trace: Any) -> None:
        log.critical("uncaught error", exc_info=(cls, error or cls(), trace))

    sys.excepthook = uncaught
    threading.excepthook = lambda args: uncaught(args.exc_type, args.exc_value, args.exc_traceback)


def take_over_libraries() -> None:
    """Logs the records of libraries that have their own handlers for stdout or stderr."""
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    for logger in loggers:
        for handler in list(logger.handlers):
            if isinstance(handler, logging.StreamHandler) and handler.stream in (sys.stdout, sys.stderr):
                logger.removeHandler(handler)
                logger.propagate = True


class Frames(logging.Filter):
    """Strips the messages from libraries' exceptions, as `failure` does from ours."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Replaces the exception by its trace; passes every record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None:
            record.exc_info, record.exc_text = None, _trace(error)
        return True


def failure(logger: logging.Logger, level: int, text: str, *args: object, error: BaseException) -> None:
    """Logs `text` with its `args`, and the classes and stack traces of the error and its causes.

    The errors' own messages may contain a sample's text, so they are sent to its client and never logged.
    """
    if not logger.isEnabledFor(level):
        return
    file, line, function, _ = logger.findCaller(stacklevel=2)
    record = logger.makeRecord(logger.name, level, file, line, text, args, None, function)
    record.exc_text = _trace(error)
    logger.handle(record)


def without_frames(error: T) -> T:
    """Returns the error without traceback and causes, whose frames would keep a request's body in memory."""
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
    """Escapes and truncates the text: no newlines, no terminal escape codes, no bidirectional overrides."""
    if len(text) > _MOST_CHARACTERS:
        text = text[:_MOST_CHARACTERS] + " ..."
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
