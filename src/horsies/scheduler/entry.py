"""An entry: one schedule, checked against the application, with its timing and its target.

A scheduler builds entries from the configuration at its start, and from the stored JSON of schedules
added at run time. `horsies check` makes the same checks, in this order: zone, task or workflow, queue,
arguments. It also builds each workflow once.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Any, assert_never

from horsies.codec.calls import CallSignature
from horsies.config.app import AppConfig
from horsies.config.schedules import AnySchedule, Schedule, TaskSchedule, WorkflowSchedule
from horsies.encryption import missing_key
from horsies.errors import ConfigurationError, ErrorCode, HorsiesError
from horsies.modules import failure_at
from horsies.result import Err
from horsies.scheduler.targets import Target, TaskTarget, WorkflowTarget
from horsies.scheduler.timing import Timing, config_hash, timing_json
from horsies.tasks.definition import TaskDefinition
from horsies.workflow.checks import as_errors, spec_errors
from horsies.workflow.definition import (
    AnyDefinition,
    BuildsSpecs,
    WorkflowDefinition,
    definition_by_key,
)

Definitions = Mapping[str, TaskDefinition]

_STORED_APART = {"args", "kwargs", "definition"}


@dataclass(frozen=True, slots=True)
class Application:
    """The parts of an application that a schedule needs.

    ``app`` builds workflows; without it, a schedule for a workflow is an error.
    """

    config: AppConfig
    tasks: Definitions
    app: BuildsSpecs | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule that can be served: its timing, the timing's text and hash, and its target.

    The timing is the schedule's own, unless an operator has edited the stored timing.
    """

    schedule: AnySchedule
    timing: Timing
    timing_text: str
    hash: str
    target: Target

    @classmethod
    def of(cls, application: Application, schedule: AnySchedule) -> Entry:
        """Check a schedule against the application, and raise the first error."""
        try:
            timing = Timing.of(schedule)
            target = _read_target(application, schedule)
        except ValueError as error:  # An unknown zone, or an ArgumentProblem.
            raise schedule_error(schedule, str(error)) from error
        text = timing_json(schedule)
        return cls(schedule, timing, text, config_hash(text), target)

    def with_timing(self, text: str) -> Entry:
        """Return the entry with another stored timing; raise ValueError if this release cannot read the
        timing.
        """
        return replace(self, timing=Timing.read(text), timing_text=text, hash=config_hash(text))

    @property
    def task_name(self) -> str | None:
        return self.schedule.task_name if isinstance(self.schedule, TaskSchedule) else None

    @property
    def definition_key(self) -> str | None:
        target = self.target
        return target.definition.own_key() if isinstance(target, WorkflowTarget) else None


def schedule_errors(application: Application) -> list[HorsiesError]:
    """Return the errors of a configuration's enabled schedules."""
    if application.config.schedule is None:
        return []
    errors: list[HorsiesError] = []
    for schedule in application.config.schedule.schedules:
        try:
            if schedule.enabled:
                errors.extend(build_errors(Entry.of(application, schedule)))
        except HorsiesError as error:
            errors.append(error)
    return errors


def build_errors(entry: Entry) -> Iterator[HorsiesError]:
    """Build a schedule's workflow for its next slot, and yield the errors."""
    target = entry.target
    if not isinstance(target, WorkflowTarget):
        return
    now = datetime.now(UTC)
    try:
        spec = target.build(entry.timing.first_after(now) or now)
    except Exception as error:
        found = list(as_errors(error, target.definition.__name__, None))
    else:
        found = list(spec_errors(target.app, spec, None))
    for problem in found:
        problem.notes = (*problem.notes, f"in schedule {entry.schedule.name!r}")
        yield problem


def schedule_error(
    schedule: Schedule, problem: str, code: ErrorCode = ErrorCode.CONFIG_INVALID_SCHEDULE
) -> HorsiesError:
    return failure_at(None, f"Schedule {schedule.name!r}: {problem}.", code=code)


def _read_target(application: Application, schedule: AnySchedule) -> Target:
    match schedule:
        case TaskSchedule():
            definition = _find_task(application.tasks, schedule)
            return TaskTarget.of(application.config, definition, schedule)
        case WorkflowSchedule():
            workflow = _find_workflow(schedule)
            if application.app is None:
                problem = f"the workflow {workflow.__name__} cannot be built without an application"
                code = ErrorCode.WORKFLOW_SUBWORKFLOW_APP_MISSING
                raise schedule_error(schedule, problem, code)
            return WorkflowTarget.of(application.app, workflow, schedule)
        case _:
            assert_never(schedule)


def _find_task(definitions: Definitions, schedule: TaskSchedule) -> TaskDefinition:
    definition = definitions.get(schedule.task_name)
    if definition is None:
        close = get_close_matches(schedule.task_name, list(definitions), n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        problem = f"there is no task {schedule.task_name!r}{hint}"
        raise schedule_error(schedule, problem, ErrorCode.TASK_NOT_REGISTERED)
    return definition


def _find_workflow(schedule: WorkflowSchedule) -> AnyDefinition:
    named: Any = schedule.definition
    if isinstance(named, str):
        definition = definition_by_key(named)
        problem = f"there is no workflow with the definition_key {named!r}"
    else:
        is_definition = isinstance(named, type) and issubclass(named, WorkflowDefinition)
        definition = named if is_definition else None
        problem = "definition is not a WorkflowDefinition"
    if definition is None:
        raise schedule_error(schedule, problem)
    if definition.own_key() is None:
        problem = f"the workflow {definition.__name__} has no definition_key of its own"
        raise schedule_error(schedule, problem, ErrorCode.WORKFLOW_NO_DEFINITION_KEY)
    return definition


def definition_json(entry: Entry) -> str:
    """Return a whole schedule as JSON text, which the database stores for a schedule added at run time."""
    schedule, target = entry.schedule, entry.target
    fields = schedule.model_dump(mode="json", exclude=_STORED_APART, exclude_defaults=True)
    fields["pattern"] = schedule.pattern.model_dump(mode="json")
    stored: dict[str, Any] = {"schedule": fields}
    if isinstance(target, TaskTarget):
        signature = target.definition.signature
        stored["kwargs"] = signature.encode_keywords(target.kwargs).unwrap()
    if isinstance(target, WorkflowTarget):
        stored |= {"kwargs": target.kwargs_json, "definition_key": entry.definition_key}
    return json.dumps(stored, sort_keys=True)


def read_definition(application: Application, text: str) -> Entry:
    """Return the entry of a stored schedule; raise HorsiesError or ValueError if it no longer fits the
    application.
    """
    if (key_id := missing_key(text)) is not None:
        raise ConfigurationError(
            f"it is encrypted with key {key_id}, which this process does not have; add the key to the codec "
            "of its PostgresConfig",
            code=ErrorCode.CONFIG_INVALID_SCHEDULE,
        )
    stored: dict[str, Any] = json.loads(text)
    schedule: AnySchedule
    signature: CallSignature | None
    if "definition_key" in stored:
        schedule = WorkflowSchedule(**stored["schedule"], definition=stored["definition_key"])
        signature = _find_workflow(schedule).build_signature()
    else:
        schedule = TaskSchedule(**stored["schedule"])
        signature = _find_task(application.tasks, schedule).signature
    if signature is None:
        return Entry.of(application, schedule)
    kwargs = signature.decode_keywords(stored["kwargs"])
    if isinstance(kwargs, Err):
        raise schedule_error(schedule, kwargs.err_value.message.rstrip("."))
    return Entry.of(application, schedule.model_copy(update={"kwargs": kwargs.value}))
