from __future__ import annotations

import io
import json
import logging
import os
import sys
from collections.abc import Iterator
from datetime import date

import pytest

from horsies.current_task import CurrentTask, set_running_task
from horsies.logs import (
    JsonFormatter,
    LogFormat,
    LogLevel,
    TaskFilter,
    TextFormatter,
    attach_handler,
    colors_wanted,
    set_worker_name,
)
from horsies.worker.protocol import Assignment

RUNNING = CurrentTask(Assignment("id-1", 1, "add", 2, "[]", "{}", None), 0.0)
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
    set_running_task(RUNNING)
    try:
        written = record("working")
    finally:
        set_running_task(None)
    assert "[add id-1 #2] working" in TextFormatter().format(written)
    entry = json.loads(JsonFormatter().format(written))
    assert (entry["task_id"], entry["task_name"], entry["attempt"]) == ("id-1", "add", 2)
    assert "task_id" not in json.loads(JsonFormatter().format(record("idle")))


def test_a_value_the_application_logs_itself_is_kept() -> None:
    set_running_task(RUNNING)
    try:
        entry = json.loads(JsonFormatter().format(record("working", task_id="mine")))
    finally:
        set_running_task(None)
    assert (entry["task_id"], entry["task_name"]) == ("mine", "add")


def test_json_keeps_the_fields_of_extra() -> None:
    given = {"order": 7, "parts": ("a", {"url": ADDRESS}), "level": "high", "rate": float("nan")}
    entry = json.loads(JsonFormatter().format(record("paid", **given, at=date(2026, 3, 1))))
    assert (entry["order"], entry["at"], entry["rate"]) == (7, "2026-03-01", "nan")
    assert entry["parts"][0] == "a"
    assert "hunter2" not in str(entry)
    assert (entry["level"], entry["extra_level"]) == ("WARNING", "high")
    assert "task_label" not in entry


def test_every_line_of_a_named_worker_has_its_name() -> None:
    set_worker_name("post")
    try:
        assert f" [post {os.getpid()}] " in TextFormatter().format(record("ready"))
        assert json.loads(JsonFormatter().format(record("ready")))["worker"] == "post"
    finally:
        set_worker_name(None)
    assert f" [{os.getpid()}] " in TextFormatter().format(record("ready"))


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


HOSTILE = "\x1b[2J\x00\r\x7f\x9b31m\u061c\u200f\u2028\u202e\u2066"


@pytest.mark.parametrize("formatter", [TextFormatter(), JsonFormatter()], ids=["text", "json"])
def test_a_record_cannot_control_the_terminal(formatter: logging.Formatter) -> None:
    hostile = record(HOSTILE)
    hostile.name = HOSTILE
    try:
        raise RuntimeError(HOSTILE)
    except RuntimeError:
        hostile.exc_info = sys.exc_info()
    hostile.stack_info = HOSTILE
    text = formatter.format(hostile)
    assert all(character.isprintable() or character == "\n" for character in text)


def test_json_keeps_the_characters_that_it_escapes() -> None:
    entry = json.loads(JsonFormatter().format(record(f"caf\u00e9 {HOSTILE}\n")))
    assert entry["message"] == f"caf\u00e9 {HOSTILE}\n"


def test_a_message_is_one_line_and_a_traceback_is_indented() -> None:
    forged = "2026-01-01 00:00:00,000 CRITICAL horsies.worker [1] forged"
    failed = record(f"first\tline\n{forged}")
    try:
        raise RuntimeError(f"no\n{forged}")
    except RuntimeError:
        failed.exc_info = sys.exc_info()
    first, *others = TextFormatter().format(failed).split("\n")
    assert first.endswith(f"first\tline\\n{forged}")
    assert others[0] == "    Traceback (most recent call last):"
    assert others[-2:] == ["    RuntimeError: no", f"    {forged}"]
    assert all(line.startswith("    ") for line in others)


def test_the_text_of_an_exception_is_not_kept_for_other_handlers() -> None:
    failed = record("failed")
    try:
        raise RuntimeError("no")
    except RuntimeError:
        failed.exc_info = sys.exc_info()
    TextFormatter().format(failed)
    assert (
        logging.Formatter().format(failed).splitlines()[1] == "Traceback (most recent call last):"
    )
    assert TextFormatter().format(failed).splitlines()[-1] == "    RuntimeError: no"


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
