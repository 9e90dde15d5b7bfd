"""Lifecycle events: records that carry one become JSON lines on a descriptor, whatever the log level."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest

from horsies.logs import (
    DESCRIPTOR_VARIABLE,
    EventHandler,
    EventName,
    LogLevel,
    as_event,
    attach_event_handler,
    attach_handler,
    detach_handler,
    event_descriptors,
)

LOGS_PAGE = Path(__file__).parents[2] / "docs" / "logs.md"


@pytest.fixture
def logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("horsies")
    level = logger.level
    yield logger
    for handler in [one for one in logger.handlers if isinstance(one, EventHandler)]:
        logger.removeHandler(handler)
    detach_handler()
    logger.setLevel(level)


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The end to read of a pipe whose other end the environment names."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    monkeypatch.setenv(DESCRIPTOR_VARIABLE, str(write_end))
    yield read_end
    os.close(read_end)
    os.close(write_end)


def test_records_with_an_event_are_written_and_others_are_not(
    logger: logging.Logger, reader: int
) -> None:
    attach_event_handler()
    logger.info("plain")
    logger.info("child died", extra=as_event("child_died", child_pid=7, task_id=None))
    (line,) = os.read(reader, 4096).decode().splitlines()
    event = json.loads(line)
    assert (event["event"], event["child_pid"], event["task_id"]) == ("child_died", 7, None)
    assert event["pid"] == os.getpid()


def test_events_do_not_depend_on_the_log_level(
    logger: logging.Logger, reader: int, capsys: pytest.CaptureFixture[str]
) -> None:
    attach_handler(LogLevel.ERROR)
    attach_event_handler()
    logger.info("worker ready", extra=as_event("worker_ready"))
    logger.error("broken")
    assert b"worker_ready" in os.read(reader, 4096)
    written = capsys.readouterr().err
    assert "broken" in written
    assert "worker ready" not in written


def test_a_full_pipe_loses_events_and_stops_nothing(logger: logging.Logger, reader: int) -> None:
    attach_event_handler()
    for _ in range(2_000):
        logger.info("ready", extra=as_event("worker_ready"))
    assert os.read(reader, 1 << 20).endswith(b"\n")


def test_a_forked_child_has_neither_the_handler_nor_the_descriptor(
    logger: logging.Logger, reader: int
) -> None:
    descriptor = int(os.environ[DESCRIPTOR_VARIABLE])
    attach_event_handler()
    pid = os.fork()
    if pid == 0:
        try:
            os.fstat(descriptor)
            os._exit(1)
        except OSError:
            os._exit(2 if any(isinstance(one, EventHandler) for one in logger.handlers) else 0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_a_process_the_worker_starts_finds_no_descriptor_named(
    logger: logging.Logger, reader: int
) -> None:
    attach_event_handler()
    assert DESCRIPTOR_VARIABLE not in os.environ


@pytest.mark.parametrize("named", ["nine", "-1", "987654"])
def test_a_descriptor_that_is_not_open_is_ignored_with_a_warning(
    logger: logging.Logger,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv(DESCRIPTOR_VARIABLE, named)
    attach_event_handler()
    assert f"{DESCRIPTOR_VARIABLE}='{named}' is ignored" in caplog.text


@pytest.mark.parametrize("descriptor", [0, 1, 2])
def test_a_standard_stream_is_refused_and_left_as_it_is(
    logger: logging.Logger,
    descriptor: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    before = os.get_inheritable(descriptor), os.get_blocking(descriptor)
    monkeypatch.setenv(DESCRIPTOR_VARIABLE, str(descriptor))
    try:
        attach_event_handler()
        after = os.get_inheritable(descriptor), os.get_blocking(descriptor)
    finally:
        os.set_inheritable(descriptor, before[0])
        os.set_blocking(descriptor, before[1])
    assert after == before
    assert f"{DESCRIPTOR_VARIABLE}='{descriptor}' is ignored" in caplog.text


def test_every_event_is_documented() -> None:
    page = LOGS_PAGE.read_text("utf-8")
    assert [name for name in get_args(EventName) if f"| `{name}` |" not in page] == []


def test_only_an_open_descriptor_is_passed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with (tmp_path / "events").open("wb") as file:
        number = file.fileno()
        monkeypatch.setenv(DESCRIPTOR_VARIABLE, str(number))
        assert event_descriptors() == (number,)
    for unusable in ("99999", "1", "-1", "nonsense", ""):
        monkeypatch.setenv(DESCRIPTOR_VARIABLE, unusable)
        assert event_descriptors() == ()
    monkeypatch.delenv(DESCRIPTOR_VARIABLE)
    assert event_descriptors() == ()
