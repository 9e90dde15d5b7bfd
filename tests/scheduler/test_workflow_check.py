"""Schedules of workflows: accepted definitions, and mistakes found before a scheduler starts."""

from __future__ import annotations

from typing import Any

import pytest

from horsies.config.schedules import ScheduleConfig, WorkflowSchedule
from horsies.errors import ErrorCode, HorsiesError
from horsies.scheduler.registry import Registry
from horsies.workflow.definition import WorkflowDefinition
from tests.support.scheduling import MakeApp, schedule, workflow_schedule

INVALID = ErrorCode.CONFIG_INVALID_SCHEDULE
FITTING = {"label": "a", "days": [1]}


class Abstract(WorkflowDefinition[None]):
    name = "abstract"


class Unusable(WorkflowDefinition[None]):
    name = "unusable"
    definition_key = "scheduled.unusable"

    @classmethod
    def build_with(cls, app: Any, *, where: complex) -> Any:
        raise AssertionError("never called")


def dated(**fields: Any) -> WorkflowSchedule:
    return workflow_schedule(**{"definition": "scheduled.dated", "kwargs": FITTING} | fields)


@pytest.mark.parametrize(
    ("one", "code", "message"),
    [
        (
            dated(timezone="Mars/Olympus", definition="nothing"),
            INVALID,
            "Schedule 'books': unknown time zone 'Mars/Olympus'; use an IANA name such as "
            "Europe/Berlin, and install the tzdata package if this machine has no time zones.",
        ),
        (
            dated(definition="nothing", kwargs={}),
            INVALID,
            "Schedule 'books': there is no workflow with the definition_key 'nothing'.",
        ),
        (
            workflow_schedule(definition=Abstract),
            ErrorCode.WORKFLOW_NO_DEFINITION_KEY,
            "Schedule 'books': the workflow Abstract has no definition_key of its own.",
        ),
        (
            workflow_schedule(kwargs={"label": "a"}),
            INVALID,
            "Schedule 'books': Books has no build_with to take kwargs.",
        ),
        (
            dated(kwargs={"days": [1]}),
            INVALID,
            "Schedule 'books': Dated cannot be built: argument 'label' is "
            "missing; the parameters are label, days, scheduled_for.",
        ),
        (
            dated(kwargs=FITTING | {"labels": "b"}),
            INVALID,
            "Schedule 'books': Dated cannot be built: there is no parameter "
            "'labels'; the parameters are label, days, scheduled_for.",
        ),
        (
            dated(kwargs=FITTING | {"scheduled_for": None}),
            INVALID,
            "Schedule 'books': 'scheduled_for' is filled in by the scheduler; leave it out.",
        ),
        (
            dated(kwargs=FITTING | {"label": "broken"}),
            ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION,
            "Dated raised RuntimeError: no data of that day",
        ),
    ],
)
def test_the_first_thing_that_is_wrong_with_a_schedule_of_a_workflow_is_reported(
    make_app: MakeApp, one: WorkflowSchedule, code: ErrorCode, message: str
) -> None:
    (error,) = make_app(one).check()
    assert (error.code, error.message) == (code, message)


def test_a_workflow_that_cannot_be_built_names_its_schedule(make_app: MakeApp) -> None:
    (error,) = make_app(dated(kwargs=FITTING | {"label": "broken"})).check()
    assert "in schedule 'books'" in error.notes


def test_values_that_do_not_fit_a_builder_are_refused(make_app: MakeApp) -> None:
    (error,) = make_app(dated(kwargs=FITTING | {"label": 5})).check()
    assert error.code is INVALID
    assert "Schedule 'books': Dated cannot be built" in error.message


def test_parameters_that_cannot_be_stored_are_refused(make_app: MakeApp) -> None:
    (error,) = make_app(workflow_schedule(definition=Unusable, kwargs={"where": "x"})).check()
    assert error.code is INVALID
    assert "Schedule 'books': Unusable" in error.message


def test_check_collects_the_errors_of_all_schedules(make_app: MakeApp) -> None:
    app = make_app(
        schedule(task_name="nothing"),
        workflow_schedule("a", definition=Abstract),
        workflow_schedule("b", definition="nothing"),
        workflow_schedule("c", definition="nothing", enabled=False),
        workflow_schedule("d"),
        dated(name="e"),
    )
    codes = [error.code for error in app.check()]
    no_key = ErrorCode.WORKFLOW_NO_DEFINITION_KEY
    assert codes == [ErrorCode.TASK_NOT_REGISTERED, no_key, INVALID]


def test_a_scheduler_does_not_start_with_a_schedule_it_cannot_serve(make_app: MakeApp) -> None:
    app = make_app(workflow_schedule(definition=Abstract))
    with pytest.raises(HorsiesError) as raised:
        Registry.of(app.config, app.definitions(), "tests", app)
    assert raised.value.code is ErrorCode.WORKFLOW_NO_DEFINITION_KEY
    app = make_app(workflow_schedule())
    with pytest.raises(HorsiesError) as raised:
        Registry.of(app.config, app.definitions(), "tests")
    assert raised.value.code is ErrorCode.WORKFLOW_SUBWORKFLOW_APP_MISSING


def test_a_workflow_that_fails_to_be_built_today_does_not_keep_a_scheduler_from_starting(
    make_app: MakeApp,
) -> None:
    app = make_app(dated(kwargs=FITTING | {"label": "broken"}))
    registry = Registry.of(app.config, app.definitions(), "tests", app)
    assert list(registry.entries) == ["books"]


def test_checking_builds_with_sends_suppressed(make_app: MakeApp) -> None:
    app = make_app()
    seen = []

    class Curious(WorkflowDefinition[None]):
        name = "curious"
        definition_key = "scheduled.curious"

        @classmethod
        def build_with(cls, app: Any, *, label: str) -> Any:
            seen.append((label, app.are_sends_suppressed()))
            raise RuntimeError

    app = make_app(workflow_schedule(definition=Curious, kwargs={"label": "a"}))
    assert len(app.check()) == 1
    assert seen == [("a", True)]


@pytest.mark.parametrize("definition", [5, None, int, object()])
def test_a_definition_is_a_class_or_a_key(definition: object) -> None:
    with pytest.raises(HorsiesError) as raised:
        workflow_schedule(definition=definition)
    assert raised.value.code is INVALID
    assert raised.value.message == (
        "WorkflowSchedule 'books': definition must be a WorkflowDefinition, or the definition_key "
        "of one"
    )


def test_the_rules_of_all_schedules_hold_for_workflows() -> None:
    with pytest.raises(HorsiesError) as raised:
        workflow_schedule(catch_up_missed=True, overlap="skip")
    assert "WorkflowSchedule 'books': catch_up_missed contradicts" in raised.value.message
    with pytest.raises(HorsiesError, match="the name 'a' is used twice"):
        ScheduleConfig(schedules=[schedule("a"), workflow_schedule("a")])


def test_a_configuration_can_be_written_and_logged_without_the_arguments(
    caplog: pytest.LogCaptureFixture, make_app: MakeApp
) -> None:
    secret = workflow_schedule(definition=Unusable, kwargs={"where": "hunter2"})
    assert secret.model_dump(mode="json")["definition"] == "scheduled.unusable"
    with caplog.at_level("INFO"):
        make_app(secret).config.log_config()
    assert "name='books'" in caplog.text
    assert "hunter2" not in caplog.text
