"""An entry: one schedule, read and checked, with all that firing it takes.

Made from the configuration when a scheduler starts, or from the JSON of a schedule that was added at
run time. The checks are those of `horsies check`: zone, task or workflow, queue, arguments, in this
order. There a workflow is also built once, to see whether it can be.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, assert_never

from horsies.codec.calls import CallSignature
from horsies.config.app import AppConfig
from horsies.config.schedules import AnySchedule, Schedule, TaskSchedule, WorkflowSchedule
from horsies.errors import ErrorCode, HorsiesError
from horsies.modules import failure_at
from horsies.result import Err
from horsies.scheduler.targets import (
    AnyDefinition,
    ArgumentProblem,
    Target,
    TaskTarget,
    WorkflowTarget,
    as_definition,
)
from horsies.scheduler.timing import Timing, config_hash, timing_json
from horsies.tasks.definition import TaskDefinition, choose_queue
from horsies.workflow.checks import as_errors, spec_errors
from horsies.workflow.definition import BuildsSpecs, definition_by_key

Definitions = Mapping[str, TaskDefinition]

_SOME_SLOT = datetime(2026, 1, 1, tzinfo=UTC)
_STORED_APART = {"args", "kwargs", "definition"}


@dataclass(frozen=True, slots=True)
class Known:
    """What schedules are read against: a configuration, tasks, and who builds workflows, if anybody."""

    config: AppConfig
    tasks: Definitions
    app: BuildsSpecs | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule that can be served: its timing, the text and hash of that, and its target."""

    schedule: AnySchedule
    timing: Timing
    timing_text: str
    hash: str
    target: Target

    @classmethod
    def of(cls, known: Known, schedule: AnySchedule) -> Entry:
        """Check a schedule against the application, or raise the first thing that is wrong."""
        timing = read_timing(schedule)
        target = _read_target(known, schedule)
        text = timing_json(schedule)
        return cls(schedule, timing, text, config_hash(text), target)

    @property
    def task_name(self) -> str | None:
        """The task it sends, if it sends one."""
        return self.schedule.task_name if isinstance(self.schedule, TaskSchedule) else None

    @property
    def definition_key(self) -> str | None:
        """The key of the workflow it starts, if it starts one."""
        target = self.target
        return target.definition.own_key() if isinstance(target, WorkflowTarget) else None


def schedule_errors(known: Known) -> list[HorsiesError]:
    """Return what is wrong with the enabled schedules of a configuration."""
    if known.config.schedule is None:
        return []
    errors: list[HorsiesError] = []
    for schedule in known.config.schedule.schedules:
        try:
            if schedule.enabled:
                errors.extend(build_errors(Entry.of(known, schedule)))
        except HorsiesError as error:
            errors.append(error)
    return errors


def build_errors(entry: Entry) -> Iterator[HorsiesError]:
    """Build the workflow of a schedule for its next slot, and tell why that is not possible."""
    target = entry.target
    if not isinstance(target, WorkflowTarget):
        return
    now = datetime.now(UTC)
    where = f"in schedule {entry.schedule.name!r}"
    try:
        spec = target.build(entry.timing.first_after(now) or now)
    except Exception as error:
        found = list(as_errors(error, target.definition.__name__, None))
    else:
        found = list(spec_errors(target.app, spec, None))
    for problem in found:
        problem.notes = (*problem.notes, where)
        yield problem


def read_timing(schedule: Schedule) -> Timing:
    """Return a schedule's timing, or raise HRS-205 for a zone that does not exist."""
    try:
        return Timing.of(schedule)
    except ValueError as error:
        raise schedule_error(schedule, str(error)) from error


def schedule_error(
    schedule: Schedule, problem: str, code: ErrorCode = ErrorCode.CONFIG_INVALID_SCHEDULE
) -> HorsiesError:
    """Return a mistake in a schedule as an error that names it."""
    return failure_at(None, f"In schedule {schedule.name!r}, {problem}.", code=code)


def _read_target(known: Known, schedule: AnySchedule) -> Target:
    match schedule:
        case TaskSchedule():
            definition = _find_task(known.tasks, schedule)
            _refuse_unknown_queue(known.config, schedule)
            return _task_target(known.config, definition, schedule)
        case WorkflowSchedule():
            return _workflow_target(known, _find_workflow(schedule), schedule)
        case _:
            assert_never(schedule)


def _find_task(definitions: Definitions, schedule: TaskSchedule) -> TaskDefinition:
    definition = definitions.get(schedule.task_name)
    if definition is None:
        problem = f"there is no task {schedule.task_name!r}"
        raise schedule_error(schedule, problem, ErrorCode.TASK_NOT_REGISTERED)
    return definition


def _find_workflow(schedule: WorkflowSchedule) -> AnyDefinition:
    named = schedule.definition
    definition = definition_by_key(named) if isinstance(named, str) else as_definition(named)
    if definition is None:
        is_key = isinstance(named, str)
        problem = f"there is no workflow with the definition_key {named!r}"
        raise schedule_error(schedule, problem if is_key else "definition is no WorkflowDefinition")
    if definition.own_key() is None:
        problem = f"the workflow {definition.__name__} has no definition_key of its own"
        raise schedule_error(schedule, problem, ErrorCode.WORKFLOW_NO_DEFINITION_KEY)
    return definition


def _refuse_unknown_queue(config: AppConfig, schedule: TaskSchedule) -> None:
    if schedule.queue_name is None:
        return
    try:
        choose_queue(config, schedule.queue_name, None)
    except HorsiesError as error:
        raise schedule_error(schedule, error.message.rstrip(".")) from error


def _task_target(
    config: AppConfig, definition: TaskDefinition, schedule: TaskSchedule
) -> TaskTarget:
    try:
        target = TaskTarget.of(config, definition, schedule)
    except ArgumentProblem as problem:
        raise schedule_error(schedule, str(problem)) from problem
    if isinstance(refused := target.for_slot(_SOME_SLOT), Err):
        raise schedule_error(schedule, refused.err_value.rstrip("."))
    return target


def _workflow_target(
    known: Known, definition: AnyDefinition, schedule: WorkflowSchedule
) -> WorkflowTarget:
    if known.app is None:
        problem = f"the workflow {definition.__name__} cannot be built without an application"
        raise schedule_error(schedule, problem, ErrorCode.WORKFLOW_SUBWORKFLOW_APP_MISSING)
    try:
        return WorkflowTarget.of(known.app, definition, schedule, _SOME_SLOT)
    except ArgumentProblem as problem:
        raise schedule_error(schedule, str(problem)) from problem


def definition_json(entry: Entry) -> str:
    """Return a whole schedule as the JSON text under which it is stored when added at run time."""
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


def read_definition(known: Known, text: str) -> Entry:
    """Return the entry of a stored schedule; HorsiesError or ValueError when it does not fit any more."""
    stored: dict[str, Any] = json.loads(text)
    if "definition_key" in stored:
        return _read_workflow(known, stored)
    schedule = TaskSchedule(**stored["schedule"])
    signature = _find_task(known.tasks, schedule).signature
    return _with_kwargs(known, schedule, signature, stored["kwargs"])


def _read_workflow(known: Known, stored: dict[str, Any]) -> Entry:
    schedule = WorkflowSchedule(**stored["schedule"], definition=stored["definition_key"])
    signature = _find_workflow(schedule).build_signature()
    if signature is None:
        return Entry.of(known, schedule)
    return _with_kwargs(known, schedule, signature, stored["kwargs"])


def _with_kwargs(
    known: Known, schedule: AnySchedule, signature: CallSignature, kwargs_json: str
) -> Entry:
    kwargs = signature.decode_keywords(kwargs_json)
    if isinstance(kwargs, Err):
        raise schedule_error(schedule, kwargs.err_value.message.rstrip("."))
    return Entry.of(known, schedule.model_copy(update={"kwargs": kwargs.value}))
