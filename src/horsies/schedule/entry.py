"""An entry: one schedule, read and checked, with all that firing it takes.

Made from the configuration when a scheduler starts, or from the JSON of a schedule that was added at
run time. The checks are those of `horsies check`: zone, task, queue, arguments, in this order.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from horsies.config import AppConfig
from horsies.definition import TaskDefinition, choose_queue
from horsies.errors import ErrorCode, HorsiesError
from horsies.modules import failure_at
from horsies.result import Err
from horsies.schedule.target import ArgumentProblem, Target, TaskTarget
from horsies.timetable.settings import TaskSchedule
from horsies.timetable.timing import Timing, config_hash, timing_json

Definitions = Mapping[str, TaskDefinition]

_SOME_SLOT = datetime(2026, 1, 1, tzinfo=UTC)
_ARGUMENTS = {"args", "kwargs"}


@dataclass(frozen=True, slots=True)
class Entry:
    """A schedule that can be served: its timing, the text and hash of that, and its target."""

    schedule: TaskSchedule
    timing: Timing
    timing_text: str
    hash: str
    target: Target

    @classmethod
    def of(cls, config: AppConfig, definitions: Definitions, schedule: TaskSchedule) -> Entry:
        """Check a schedule against the application, or raise the first thing that is wrong."""
        timing = read_timing(schedule)
        definition = _find_task(definitions, schedule)
        _refuse_unknown_queue(config, schedule)
        target = _read_target(config, definition, schedule)
        text = timing_json(schedule)
        return cls(schedule, timing, text, config_hash(text), target)


def schedule_errors(config: AppConfig, definitions: Definitions) -> list[HorsiesError]:
    """Return what is wrong with the enabled schedules of a configuration, one error each."""
    if config.schedule is None:
        return []
    errors = []
    for schedule in config.schedule.schedules:
        try:
            if schedule.enabled:
                Entry.of(config, definitions, schedule)
        except HorsiesError as error:
            errors.append(error)
    return errors


def read_timing(schedule: TaskSchedule) -> Timing:
    """Return a schedule's timing, or raise HRS-205 for a zone that does not exist."""
    try:
        return Timing.of(schedule)
    except ValueError as error:
        raise schedule_error(schedule, str(error)) from error


def schedule_error(
    schedule: TaskSchedule, problem: str, code: ErrorCode = ErrorCode.CONFIG_INVALID_SCHEDULE
) -> HorsiesError:
    """Return a mistake in a schedule as an error that names it."""
    return failure_at(None, f"In schedule {schedule.name!r}, {problem}.", code=code)


def _find_task(definitions: Definitions, schedule: TaskSchedule) -> TaskDefinition:
    definition = definitions.get(schedule.task_name)
    if definition is None:
        problem = f"there is no task {schedule.task_name!r}"
        raise schedule_error(schedule, problem, ErrorCode.TASK_NOT_REGISTERED)
    return definition


def _refuse_unknown_queue(config: AppConfig, schedule: TaskSchedule) -> None:
    if schedule.queue_name is None:
        return
    try:
        choose_queue(config, schedule.queue_name, None)
    except HorsiesError as error:
        raise schedule_error(schedule, error.message.rstrip(".")) from error


def _read_target(
    config: AppConfig, definition: TaskDefinition, schedule: TaskSchedule
) -> TaskTarget:
    try:
        target = TaskTarget.of(config, definition, schedule)
    except ArgumentProblem as problem:
        raise schedule_error(schedule, str(problem)) from problem
    if isinstance(refused := target.row_for(_SOME_SLOT), Err):
        raise schedule_error(schedule, refused.err_value.message.rstrip("."))
    return target


def definition_json(definition: TaskDefinition, entry: Entry) -> str:
    """Return a whole schedule as the JSON text under which it is stored when added at run time."""
    schedule, target = entry.schedule, entry.target
    assert isinstance(target, TaskTarget)
    kwargs_json = definition.signature.encode_keywords(target.kwargs).unwrap()
    fields = schedule.model_dump(mode="json", exclude=_ARGUMENTS, exclude_defaults=True)
    fields["pattern"] = schedule.pattern.model_dump(mode="json")
    return json.dumps({"schedule": fields, "kwargs": kwargs_json}, sort_keys=True)


def read_definition(config: AppConfig, definitions: Definitions, text: str) -> Entry:
    """Return the entry of a stored schedule; HorsiesError or ValueError when it does not fit any more."""
    stored: dict[str, Any] = json.loads(text)
    schedule = TaskSchedule(**stored["schedule"])
    definition = _find_task(definitions, schedule)
    kwargs = definition.signature.decode_keywords(stored["kwargs"])
    if isinstance(kwargs, Err):
        raise schedule_error(schedule, kwargs.err_value.message.rstrip("."))
    return Entry.of(config, definitions, schedule.model_copy(update={"kwargs": kwargs.value}))
