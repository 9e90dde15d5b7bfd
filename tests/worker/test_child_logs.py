"""The log of a child process while it runs a task."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator

import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.current_task import CurrentTask, set_running_task
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.task_result import TaskError, TaskResult
from horsies.worker.child.execute import execute
from horsies.worker.child.process_state import configure_logging
from horsies.worker.protocol import Assignment

RUNNING = CurrentTask(Assignment("id-1", 1, "add", 2, "[]", "{}", None), 0.0)


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    loggers = [logging.getLogger(), logging.getLogger("horsies")]
    before = [(one, list(one.handlers), one.level) for one in loggers]
    yield
    set_running_task(None)
    for one, handlers, level in before:
        one.handlers[:] = handlers
        one.setLevel(level)


def json_lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def start_child_logging(log_format: str = "json") -> None:
    logging.getLogger().handlers[:] = []
    configure_logging("info", log_format)


def test_a_task_may_log_fields_named_like_ours(capsys: pytest.CaptureFixture[str]) -> None:
    start_child_logging()
    set_running_task(RUNNING)
    logging.getLogger("shop").info("working", extra={"task_id": "mine"})
    (entry,) = json_lines(capsys)
    assert (entry["task_id"], entry["task_name"], entry["attempt"]) == ("mine", "add", 2)


def test_threads_of_a_task_are_labelled_too(capsys: pytest.CaptureFixture[str]) -> None:
    start_child_logging()
    set_running_task(RUNNING)
    thread = threading.Thread(target=logging.getLogger("shop").warning, args=("from a thread",))
    thread.start()
    thread.join()
    assert [entry["task_id"] for entry in json_lines(capsys)] == ["id-1"]


def test_between_tasks_lines_name_no_task(capsys: pytest.CaptureFixture[str]) -> None:
    start_child_logging("text")
    set_running_task(RUNNING)
    set_running_task(None)
    logging.getLogger("shop").info("idle")
    assert "id-1" not in capsys.readouterr().err


def test_a_forked_worker_s_handler_gives_way_to_one_for_every_logger(
    capsys: pytest.CaptureFixture[str],
) -> None:
    logging.getLogger().handlers[:] = []
    attach_handler(LogLevel.INFO, LogFormat.JSON)
    configure_logging("INFO", "json")
    logging.getLogger("shop").info("from user code")
    logging.getLogger("horsies.child").info("from the library")
    assert [entry["message"] for entry in json_lines(capsys)] == [
        "from user code",
        "from the library",
    ]


def test_a_raised_exception_is_shown_with_its_traceback_and_a_returned_error_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start_child_logging()
    app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused")))

    @app.task("add")
    def fail_in_some_way(raises: bool) -> TaskResult[int, TaskError]:
        if raises:
            raise LookupError("no such customer")
        return TaskResult(err=TaskError(error_code="NO_CUSTOMER", message="there is none"))

    for argument in ("[true]", "[false]"):
        execute(app, Assignment("id-1", 1, "add", 1, argument, "{}", None))
    (entry,) = json_lines(capsys)
    assert entry["level"] == "ERROR"
    assert "LookupError: no such customer" in str(entry["exception"])


def test_what_the_library_finds_wrong_is_logged(capsys: pytest.CaptureFixture[str]) -> None:
    start_child_logging()
    app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused")))
    execute(app, Assignment("id-1", 1, "nobody", 1, "[]", "{}", None))
    (entry,) = json_lines(capsys)
    assert "Task 'nobody' is not registered" in str(entry["message"])


@pytest.mark.parametrize("log_format", ["text", "json"])
def test_a_record_that_nests_without_an_end_does_not_fail_the_task(
    capsys: pytest.CaptureFixture[str], log_format: str
) -> None:
    class Endless:
        def __str__(self) -> str:
            return str(self)

        __repr__ = __str__

    start_child_logging(log_format)
    circle: dict[str, object] = {}
    circle["circle"] = circle
    logger = logging.getLogger("shop")
    logger.warning("a circle", extra={"field": circle})
    logger.warning("no end: %s", Endless())
    logger.warning("the next line")
    shown = capsys.readouterr().err
    assert shown.count("Logging error") == (2 if log_format == "json" else 1)
    assert "the next line" in shown
