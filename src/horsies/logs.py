"""Log lines on standard error, for the command line's and workers' processes.

The library itself only writes to loggers below `horsies`. The command line attaches one handler, for
text or JSON. Lines logged while a task runs show the task, and passwords are masked. Control characters
are escaped, so that a message cannot control a terminal or imitate another line.

Lifecycle events, one JSON object per line, are for supervisors and tests. Log texts may be reworded;
event names are stable. An event is a log record with `extra=as_event(...)`. The command line writes only
those records to the descriptor named by HORSIES_EVENTS_FD.


"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from enum import StrEnum
from math import isfinite
from typing import Any, Literal, TextIO, TypeAlias

from horsies.current_task import CurrentTask, running_task
from horsies.database_url import mask_url
from horsies.errors import allows_colors

DESCRIPTOR_VARIABLE = "HORSIES_EVENTS_FD"

EventName: TypeAlias = Literal[
    "children_ready",
    "worker_ready",
    "metrics_served",
    "worker_stopping",
    "tasks_interrupted",
    "worker_stopped",
    "worker_failed",
    "worker_frozen",
    "worker_declared_lost",
    "tasks_stopped",
    "heartbeat_refused",
    "child_died",
    "loop_blocked",
    "database_lost",
    "database_back",
    "notifications_lost",
    "notifications_back",
    "workers_lost",
    "outcome_dropped",
    "claim_lost",
    "blocked",
    "database_refuses",
    "outcomes_lost",
    "claims_left",
    "unknown_task",
    "run_parked",
    "run_held",
    "run_cleaning",
    "scheduler_ready",
    "scheduler_database_lost",
    "scheduler_database_back",
    "scheduler_stopped",
    "slots_sent",
    "slots_dropped",
    "schedule_taken",
]

logger = logging.getLogger("horsies.events")

_TEXT_FORMAT = (
    "%(asctime)s %(levelname)-8s %(name)s [%(worker_label)s%(process)d]%(task_label)s %(message)s"
)
_OWN_ATTRIBUTES = {
    *vars(logging.makeLogRecord({})),
    *("message", "asctime", "taskName", "task_label", "worker_label"),
}
_OTEL = "opentelemetry.trace"
_FORCING_VARIABLES = ("HORSIES_FORCE_COLOR", "FORCE_COLOR")
# The characters to escape although JSON allows them: delete, the C1 controls, line separators and
# the marks that reorder text.
_HIDDEN = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069"
_HIDDEN_CHARACTERS = re.compile(f"[{_HIDDEN}\ud800-\udfff]")
_CONTROLS = re.compile(f"[\x00-\x08\x0a-\x1f{_HIDDEN}]")
_CONTROLS_IN_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_HIDDEN}]")
_RESET = "\x1b[0m"
_COLORS = {
    logging.DEBUG: "\x1b[2m",
    logging.WARNING: "\x1b[33m",
    logging.ERROR: "\x1b[31m",
    logging.CRITICAL: "\x1b[1;31m",
}


class LogLevel(StrEnum):
    """The lowest level to log."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"
    CRITICAL = "CRITICAL"


class LogFormat(StrEnum):
    """The format of log lines."""

    TEXT = "text"
    JSON = "json"


# The name of this process's worker, shown in every log line of the process.
_worker_name: str | None = None


def set_worker_name(name: str | None) -> None:
    """Set the worker name that log lines show."""
    global _worker_name
    _worker_name = name


# The names of the headers to show in every line about a task, and the function that returns a
# task's stored options by id.
_header_names: Sequence[str] = ()
_find_options: Callable[[str], str | None] | None = None


def set_log_headers(
    names: Sequence[str], find_options: Callable[[str], str | None] | None = None
) -> None:
    """Set the headers of a task to show in every line about the task."""
    global _header_names, _find_options
    _header_names, _find_options = tuple(names), find_options


def headers_to_log(task_options: str | None) -> dict[str, Any]:
    """Return the `extra` argument of a log line about the task with these stored options."""
    if not _header_names:
        return {}
    try:
        return {"headers": _chosen(json.loads(task_options or "{}")["headers"])}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _chosen(headers: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(headers[name]) for name in _header_names if name in headers}


def _headers_of(record: logging.LogRecord, task: CurrentTask | None) -> Mapping[str, str]:
    """Return the headers of a record's task."""
    if task is not None:
        return _chosen(task.headers)
    if isinstance(known := getattr(record, "headers", None), dict):
        return known
    event = getattr(record, "event", None)
    task_id = getattr(record, "task_id", None) or (event or {}).get("task_id")
    if task_id is None or _find_options is None:
        return {}
    found: Mapping[str, str] = headers_to_log(_find_options(task_id)).get("headers", {})
    return found


def attach_handler(level: LogLevel, log_format: LogFormat = LogFormat.TEXT) -> logging.Handler:
    """Log `horsies` to standard error from this level on; a second call replaces the handler."""
    detach_handler()
    handler = make_handler(log_format)
    logger = logging.getLogger("horsies")
    logger.addHandler(handler)
    logger.setLevel(level.value)
    return handler


def detach_handler() -> None:
    """Remove the handler that `attach_handler` added."""
    logger = logging.getLogger("horsies")
    for handler in [known for known in logger.handlers if isinstance(known, StderrHandler)]:
        logger.removeHandler(handler)


def make_handler(log_format: LogFormat) -> logging.Handler:
    """Return a handler that writes labelled lines in this format to standard error."""
    handler = StderrHandler(sys.stderr)
    is_json = log_format is LogFormat.JSON
    handler.setFormatter(
        JsonFormatter() if is_json else TextFormatter(colors=colors_wanted(sys.stderr))
    )
    handler.addFilter(TaskFilter())
    return handler


def colors_wanted(stream: TextIO | None) -> bool:
    """Return whether to colour log lines, by FORCE_COLOR, then NO_COLOR, then the type of standard
    error.
    """
    values = (os.environ.get(name, "").lower() for name in _FORCING_VARIABLES)
    return any(value not in ("", "0", "false") for value in values) or allows_colors(stream)


class StderrHandler(logging.StreamHandler[TextIO]):
    """The command line's handler. Its class distinguishes it from the application's handlers."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record.

        A value that nests without an end is reported like any other value that cannot be written; the
        standard library would raise this error in the task.
        """
        try:
            super().emit(record)
        except RecursionError:
            report_unwritten(self, record)


def report_unwritten(handler: logging.Handler, record: logging.LogRecord) -> None:
    """Report a record that cannot be written on standard error, as the standard library does. The report
    shows the record's arguments, whose representation may itself nest without an end.
    """
    with suppress(RecursionError):
        handler.handleError(record)


class TaskFilter(logging.Filter):
    """Adds the task with its queue, run and node to every record written while a task runs, and also the
    worker's name and the ids of the current OpenTelemetry span, if any. The configured headers are added
    to every record about a task, including a worker's own records. It is not a record factory, because
    attributes set before `extra` would make `logger.info(..., extra={"task_id": ...})` raise.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Label the record and let it pass."""
        task = running_task()
        words = [] if task is None else [f"{task.name} {task.id} #{task.attempt}"]
        record.worker_label = "" if _worker_name is None else f"{_worker_name} "
        fields: dict[str, object] = {} if task is None else _task_fields(task)
        if _header_names and (headers := _headers_of(record, task)):
            fields["headers"] = dict(headers)
            words += [f"{name}={value}" for name, value in headers.items()]
        record.task_label = f" [{' '.join(words)}]" if words else ""
        if _OTEL in sys.modules:
            fields |= _span_fields(sys.modules[_OTEL])
        for name, value in fields.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


def _task_fields(task: CurrentTask) -> dict[str, object]:
    fields = {
        "task_id": task.id,
        "task_name": task.name,
        "attempt": task.attempt,
        "queue": task.queue or None,
        "workflow_id": task.workflow_id,
        "node_id": task.node_id,
    }
    return {name: value for name, value in fields.items() if value is not None}


def _span_fields(trace: Any) -> dict[str, object]:
    """Return the ids of the current span, from the OpenTelemetry module if the application has imported
    it.
    """
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def escape_json(text: str) -> str:
    """Return JSON text with control characters and lone surrogates escaped; the JSON value stays the
    same.
    """
    return _HIDDEN_CHARACTERS.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def _escaped(controls: re.Pattern[str], text: str) -> str:
    """Return the text with passwords removed and control characters escaped as in Python."""
    return controls.sub(lambda found: repr(found[0])[1:-1], mask_url(text))


def _indented(lines: str) -> str:
    return "\n" + textwrap.indent(_escaped(_CONTROLS_IN_LINES, lines), "    ")


class TextFormatter(logging.Formatter):
    """Formats a record as one line, coloured by level if requested; tracebacks follow on indented lines."""

    def __init__(self, *, colors: bool = False) -> None:
        super().__init__(_TEXT_FORMAT, defaults={"task_label": "", "worker_label": ""})
        self._colors = colors

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, passwords masked and control characters escaped."""
        # Do not call the inherited method, which would cache the traceback text for other handlers'
        # formatters.
        record.message = record.getMessage()
        record.asctime = self.formatTime(record)
        text = _escaped(_CONTROLS, self.formatMessage(record))
        if record.exc_info:
            text += _indented(self.formatException(record.exc_info))
        if record.stack_info:
            text += _indented(self.formatStack(record.stack_info))
        color = _COLORS.get(record.levelno) if self._colors else None
        return text if color is None else f"{color}{text}{_RESET}"


class CaptureFormatter(logging.Formatter):
    """Formats a record for the stored log of its attempt: time, level, logger and message, followed by
    an indented traceback.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as text, passwords masked and control characters escaped."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        message = _escaped(_CONTROLS, record.getMessage())
        text = f"{at.removesuffix('+00:00')}Z {record.levelname} {record.name}: {message}"
        if record.exc_info:
            text += _indented(self.formatException(record.exc_info))
        if record.stack_info:
            text += _indented(self.formatStack(record.stack_info))
        return text


class JsonFormatter(logging.Formatter):
    """Formats a record as one JSON object per line, with the fields that a log call passed as ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the record as JSON text, passwords masked."""
        entry: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname,
            "logger": record.name,
            "pid": record.process,
            "message": mask_url(record.getMessage()),
        }
        if _worker_name is not None:
            entry["worker"] = _worker_name
        if record.exc_info:
            entry["exception"] = mask_url(self.formatException(record.exc_info))
        for name, value in vars(record).items():
            if name not in _OWN_ATTRIBUTES and value is not None:
                entry[f"extra_{name}" if name in entry else name] = _masked(value)
        return escape_json(json.dumps(entry, ensure_ascii=False))


def _masked(value: Any) -> Any:
    """Return a value from ``extra`` in a form that JSON can represent, with passwords masked."""
    match value:
        case None | bool() | int():
            return value
        case float() if isfinite(value):
            return value
        case dict():
            return {str(name): _masked(one) for name, one in value.items()}
        case list() | tuple():
            return [_masked(one) for one in value]
        case _:
            return mask_url(str(value))


def as_event(name: EventName, **fields: Any) -> dict[str, Any]:
    """Return the `extra` argument that turns a log record into an event."""
    return {"event": {"event": name, **fields}}


def attach_event_handler() -> None:
    """Write events to the descriptor in the environment variable, if set. The variable is removed, so
    that a process started by a task does not use the descriptor.
    """
    named = os.environ.pop(DESCRIPTOR_VARIABLE, None)
    if named is None:
        return
    try:
        handler = EventHandler(int(named))
    except (OSError, ValueError) as error:
        logger.warning("%s=%r is ignored: %s", DESCRIPTOR_VARIABLE, named, error)
        return
    root = logging.getLogger("horsies")
    # Events are independent of the log level, so move the level from the logger to its handlers.
    level = root.getEffectiveLevel()
    for known in root.handlers:
        known.setLevel(max(known.level, level))
    root.addHandler(handler)
    root.setLevel(min(level, logging.INFO))
    os.register_at_fork(after_in_child=handler.detach)


def event_descriptors() -> tuple[int, ...]:
    """Return the descriptor in the environment variable, to pass it to the process that writes the
    events. That process also warns about an unusable descriptor.
    """
    try:
        descriptor = int(os.environ[DESCRIPTOR_VARIABLE])
        os.fstat(descriptor)
    except (KeyError, ValueError, OSError):
        return ()
    return (descriptor,) if descriptor > 2 else ()


class EventHandler(logging.Handler):
    """Writes events to a descriptor. If the pipe is full, events are dropped instead of blocking the
    worker.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        if 0 <= descriptor <= 2:
            # Do not use a standard stream: children write to it too, so events would mix with
            # output or fail on a slow reader.
            raise ValueError("a standard stream is shared with child processes")
        os.set_inheritable(descriptor, False)
        os.set_blocking(descriptor, False)
        self._descriptor = descriptor

    def emit(self, record: logging.LogRecord) -> None:
        """Write the record's event, if it has one."""
        event = getattr(record, "event", None)
        if not isinstance(event, dict):
            return
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "pid": record.process, **event}, default=str)
        with suppress(OSError):
            os.write(self._descriptor, f"{line}\n".encode())

    def detach(self) -> None:
        """Remove the handler and close the descriptor in a forked child, because both belong to the
        parent.
        """
        root = logging.getLogger("horsies")
        if self in root.handlers:
            root.removeHandler(self)
            os.close(self._descriptor)
