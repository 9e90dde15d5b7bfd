"""Log lines on standard error, for processes whose output is ours: the command line and workers.

The library itself only writes to loggers below `horsies`. The command line attaches the one handler
made here, as text for people or JSON for machines; whatever runs for a task says which one, and no
line shows a password.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple, TextIO

from horsies.database_url import mask_url

_TEXT_FORMAT = "%(asctime)s %(levelname)-8s %(name)s [%(process)d]%(task_label)s %(message)s"
_TASK_FIELDS = ("task_id", "task_name", "attempt")
_FORCING_VARIABLES = ("HORSIES_FORCE_COLOR", "FORCE_COLOR")
_RESET = "\x1b[0m"
_COLORS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}


class LogLevel(StrEnum):
    """How much is logged."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


class LogFormat(StrEnum):
    """What a log line looks like."""

    TEXT = "text"
    JSON = "json"


class TaskLabel(NamedTuple):
    """The attempt that log lines belong to."""

    task_id: str
    task_name: str
    attempt: int

    def __str__(self) -> str:
        return f" [{self.task_name} {self.task_id} #{self.attempt}]"


# One value for the process, not a context variable: a child runs one task at a time, and threads and
# event loops of that task must find it too.
_current_task: TaskLabel | None = None


def set_current_task(label: TaskLabel | None) -> None:
    """From now on log lines name this attempt; None ends it."""
    global _current_task
    _current_task = label


def get_current_task() -> TaskLabel | None:
    """Return the attempt this process is running, None between tasks and outside of workers."""
    return _current_task


def attach_handler(level: LogLevel, log_format: LogFormat = LogFormat.TEXT) -> logging.Handler:
    """Send what `horsies` logs from this level on to standard error; a second call replaces it."""
    detach_handler()
    handler = make_handler(log_format)
    logger = logging.getLogger("horsies")
    logger.addHandler(handler)
    logger.setLevel(level.value)
    return handler


def detach_handler() -> None:
    """Take back what `attach_handler` attached."""
    logger = logging.getLogger("horsies")
    for handler in [known for known in logger.handlers if isinstance(known, StderrHandler)]:
        logger.removeHandler(handler)


def make_handler(log_format: LogFormat) -> logging.Handler:
    """Return a handler that writes labelled lines of this format to standard error."""
    handler = StderrHandler(sys.stderr)
    handler.setFormatter(formatter_for(log_format, sys.stderr))
    handler.addFilter(TaskFilter())
    return handler


class StderrHandler(logging.StreamHandler[TextIO]):
    """The handler of the command line, told apart from handlers the application attached."""


def formatter_for(log_format: LogFormat, stream: TextIO) -> logging.Formatter:
    """Return the formatter for this format, coloured where the stream's readers are people."""
    if log_format is LogFormat.JSON:
        return JsonFormatter()
    return TextFormatter(colors=colors_wanted(stream))


def colors_wanted(stream: TextIO) -> bool:
    """Tell whether to write colours: FORCE_COLOR, then NO_COLOR, then whether it is a terminal."""
    if any(
        os.environ.get(name, "").lower() not in ("", "0", "false") for name in _FORCING_VARIABLES
    ):
        return True
    return "NO_COLOR" not in os.environ and stream.isatty()


class TaskFilter(logging.Filter):
    """Adds task_id, task_name and attempt to every record written while a task runs.

    A filter and not a record factory: attributes that exist before `extra` is applied would make
    `logger.info(..., extra={"task_id": ...})` raise.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Label the record and let it pass."""
        label = _current_task
        record.task_label = "" if label is None else str(label)
        for name in _TASK_FIELDS if label is not None else ():
            if not hasattr(record, name):
                setattr(record, name, getattr(label, name))
        return True


class TextFormatter(logging.Formatter):
    """One line per record, the level in colour if wanted."""

    def __init__(self, *, colors: bool = False) -> None:
        super().__init__(_TEXT_FORMAT, defaults={"task_label": ""})
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, passwords masked."""
        text = mask_url(super().format(record))
        color = _COLORS.get(record.levelno) if self._colors else None
        return text if color is None else f"{color}{text}{_RESET}"


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON text, passwords masked."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": mask_url(record.getMessage()),
        }
        known = vars(record)
        entry |= {name: known[name] for name in _TASK_FIELDS if known.get(name) is not None}
        if record.exc_info:
            entry["exception"] = mask_url(self.formatException(record.exc_info))
        return json.dumps(entry, default=str, ensure_ascii=False)
