from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Iterator

import pytest

from horsies.logs import (
    JsonFormatter,
    LogFormat,
    LogLevel,
    TaskFilter,
    TaskLabel,
    TextFormatter,
    attach_handler,
    colors_wanted,
    set_current_task,
)

ADDRESS = "postgresql://app:hunter2@127.0.0.1:1/shop"


@pytest.fixture
def horsies_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("horsies")
    handlers, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = handlers
    logger.setLevel(level)


def record(message: str, **extra: object) -> logging.LogRecord:
    logger = logging.getLogger("horsies.sample")
    made = logger.makeRecord(
        logger.name, logging.WARNING, "f.py", 1, message, (), None, extra=extra
    )
    TaskFilter().filter(made)
    return made


def test_the_handler_is_attached_once(horsies_logger: logging.Logger) -> None:
    before = len(horsies_logger.handlers)
    attach_handler(LogLevel.INFO)
    attach_handler(LogLevel.ERROR, LogFormat.JSON)
    assert len(horsies_logger.handlers) == before + 1
    assert horsies_logger.level == logging.ERROR


def test_log_lines_name_the_task_they_were_written_for() -> None:
    set_current_task(TaskLabel("id-1", "add", 2))
    try:
        written = record("working")
    finally:
        set_current_task(None)
    assert "[add id-1 #2] working" in TextFormatter().format(written)
    entry = json.loads(JsonFormatter().format(written))
    assert (entry["task_id"], entry["task_name"], entry["attempt"]) == ("id-1", "add", 2)
    assert "task_id" not in json.loads(JsonFormatter().format(record("idle")))


def test_a_value_the_application_logs_itself_is_kept() -> None:
    set_current_task(TaskLabel("id-1", "add", 2))
    try:
        entry = json.loads(JsonFormatter().format(record("working", task_id="mine")))
    finally:
        set_current_task(None)
    assert (entry["task_id"], entry["task_name"]) == ("mine", "add")


def test_passwords_are_masked_in_messages_and_exceptions() -> None:
    try:
        raise RuntimeError(ADDRESS)
    except RuntimeError:
        failed = record(f"cannot reach {ADDRESS}")
        failed.exc_info = sys.exc_info()
    for formatter in (TextFormatter(), JsonFormatter()):
        text = formatter.format(failed)
        assert "hunter2" not in text
        assert "app:***@127.0.0.1" in text
    assert "RuntimeError" in json.loads(JsonFormatter().format(failed))["exception"]


def test_colours_follow_the_environment_before_the_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("HORSIES_FORCE_COLOR", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    stream = io.StringIO()
    assert not colors_wanted(stream)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(stream, "isatty", lambda: True)
    assert not colors_wanted(stream)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert colors_wanted(stream)
    assert "\x1b[" in TextFormatter(colors=True).format(record("loud"))
