"""Mistakes in schedules that are found before a scheduler starts."""

from __future__ import annotations

from typing import Any

import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.config.schedules import ScheduleConfig, TaskSchedule
from horsies.errors import ErrorCode, HorsiesError
from horsies.scheduler.registry import Registry
from tests.support.scheduling import MakeApp, schedule

INVALID = ErrorCode.CONFIG_INVALID_SCHEDULE
MISSING = ErrorCode.TASK_NOT_REGISTERED


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        (
            {"timezone": "Mars/Olympus", "task_name": "nothing"},
            INVALID,
            "Schedule 'report': unknown time zone 'Mars/Olympus'; use an IANA name such as "
            "Europe/Berlin, and install the tzdata package if this machine has no time zones.",
        ),
        (
            {"task_name": "nothing", "queue_name": "slow"},
            MISSING,
            "Schedule 'report': there is no task 'nothing'.",
        ),
        (
            {"queue_name": "slow", "args": (1, 2, 3)},
            INVALID,
            "Schedule 'report': There is no queue 'slow'.",
        ),
        (
            {"args": ("a", "b")},
            INVALID,
            "Schedule 'report': 2 positional arguments are too many; the parameters are text.",
        ),
        (
            {"args": ("a",), "kwargs": {"text": "b"}},
            INVALID,
            "Schedule 'report': argument 'text' is given twice.",
        ),
        (
            {"kwargs": {"texts": "b"}},
            INVALID,
            "Schedule 'report': Task 'note' was not sent: there is no "
            "parameter 'texts'; the parameters are text.",
        ),
        (
            {"task_name": "careful"},
            INVALID,
            "Schedule 'report': Task 'careful' was not sent: argument 'a' is "
            "missing; the parameters are a, b.",
        ),
        (
            {"task_name": "picky", "args": (1,)},
            INVALID,
            "Schedule 'report': parameter 'first' cannot be passed by name, as schedules do.",
        ),
        (
            {"task_name": "dated", "kwargs": {"text": "a", "scheduled_for": None}},
            INVALID,
            "Schedule 'report': 'scheduled_for' is filled in by the scheduler; leave it out.",
        ),
    ],
)
def test_the_first_thing_that_is_wrong_with_a_schedule_is_reported(
    make_app: MakeApp, fields: dict[str, Any], code: ErrorCode, message: str
) -> None:
    app = make_app(schedule(**fields))
    (error,) = app.check()
    assert (error.code, error.message) == (code, message)
    with pytest.raises(HorsiesError) as raised:
        Registry.of(app.config, app.definitions(), "tests")
    assert raised.value.message == message


def test_values_that_do_not_fit_the_annotation_are_refused(make_app: MakeApp) -> None:
    (error,) = make_app(schedule(task_name="careful", args=("one",))).check()
    assert error.code is INVALID
    assert "Schedule 'report': Task 'careful' was not sent" in error.message


def test_check_reports_one_error_for_every_schedule(make_app: MakeApp) -> None:
    app = make_app(
        schedule("a", task_name="nothing"),
        schedule("b", timezone="Mars/Olympus", task_name="nothing"),
        schedule("c", task_name="nothing", enabled=False),
        schedule("d"),
    )
    assert [error.code for error in app.check()] == [MISSING, INVALID]


def test_workers_do_not_care_about_schedules(make_app: MakeApp) -> None:
    app = make_app(schedule(task_name="nothing"))
    app.set_role("worker")
    assert app.check() == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, "This application has no schedules."),
        (ScheduleConfig(enabled=False), "The schedules of this application are switched off."),
    ],
)
def test_without_schedules_there_is_no_scheduler(
    config: ScheduleConfig | None, message: str
) -> None:
    broker = PostgresConfig(database_url="postgresql://localhost/unused")
    app = Horsies(AppConfig(broker=broker, schedule=config))
    with pytest.raises(HorsiesError) as raised:
        Registry.of(app.config, {}, "tests")
    assert (raised.value.code, raised.value.message) == (INVALID, message)


def test_the_logged_configuration_shows_schedules_without_their_arguments(
    caplog: pytest.LogCaptureFixture, make_app: MakeApp
) -> None:
    secret = TaskSchedule(
        name="report",
        task_name="note",
        pattern=schedule().pattern,
        kwargs={"text": "hunter2"},
    )
    with caplog.at_level("INFO"):
        make_app(secret).config.log_config()
    assert "name='report'" in caplog.text
    assert "hunter2" not in caplog.text
