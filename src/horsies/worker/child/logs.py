"""Logging in a child process: the worker's own format, for the application's loggers as well.

A child writes what its tasks log to the standard error it inherited; every line written while a task
runs names the task. What cannot be written is lost and changes nothing else.
"""

from __future__ import annotations

import logging

from horsies.errors import TaskStopped
from horsies.logs import (
    LogFormat,
    TaskFilter,
    TaskLabel,
    detach_handler,
    make_handler,
    set_current_task,
)
from horsies.worker.protocol import Assignment


def configure_logging(log_level: str, log_format: str) -> None:
    """Send everything of `log_level` and above to standard error, unless the app set up logging.

    A forked process starts with the handler of the worker's command line, which shows our own
    loggers only.
    """
    detach_handler()
    root, own = logging.getLogger(), logging.getLogger("horsies")
    own.setLevel(log_level.upper())
    if not root.handlers and not own.handlers:
        root.addHandler(make_handler(LogFormat(log_format)))
        root.setLevel(log_level.upper())


def label_handlers() -> None:
    """Have the records of whatever handlers the app attached carry the running task."""
    for handler in (*logging.getLogger().handlers, *logging.getLogger("horsies").handlers):
        if not any(isinstance(known, TaskFilter) for known in handler.filters):
            handler.addFilter(TaskFilter())


def label_records(assignment: Assignment | None) -> None:
    """From now on records name this task; None ends it."""
    if assignment is None:
        set_current_task(None)
    else:
        label = TaskLabel(assignment.task_id, assignment.task_name, assignment.attempt)
        set_current_task(label)


def log_or_not(
    logger: logging.Logger,
    level: int,
    message: str,
    *args: object,
    error: BaseException | None = None,
) -> None:
    """Log, with the traceback of `error`; whatever handlers raise is no reason to lose an outcome."""
    try:
        logger.log(level, message, *args, exc_info=error, stacklevel=2)
    except TaskStopped:
        raise
    except BaseException:
        return
