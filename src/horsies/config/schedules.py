"""Schedule configuration: tasks, workflows, and the `ScheduleConfig` that holds them.

A schedule that contradicts itself is rejected here (HRS-205). Its zone, task, workflow, queue and
arguments are checked later, before a scheduler starts, when the tasks are known.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias

from pydantic import Field, PlainSerializer, PlainValidator, model_validator

from horsies.timetable.next_run import GapRule
from horsies.timetable.patterns import SchedulePattern, refuse
from horsies.validation import SECONDS_MAX, FrozenModel, repeated_names

NAME_LENGTH_MAX = 255

# The limit keeps all computed times within Python's calendar: slots, and times up to a hundred
# years later.
_EARLIEST = datetime(2, 1, 1, tzinfo=UTC)
_LATEST = {
    "start_at": datetime.max.replace(year=9000, tzinfo=UTC),
    "end_at": datetime.max.replace(tzinfo=UTC),
}

Overlap: TypeAlias = Literal["allow", "skip", "queue"]


class KeyedWorkflow(Protocol):
    """A workflow definition class; the configuration needs only its key."""

    def own_key(self) -> str | None:
        """Return the key that the class declares, if it declares one."""


# Typed loosely, because the workflow module belongs to a layer above the configuration.
_AsItIs: TypeAlias = Annotated[
    KeyedWorkflow | str,
    PlainValidator(lambda definition: definition),
    PlainSerializer(
        lambda definition: definition if isinstance(definition, str) else definition.own_key(),
        return_type=str | None,
    ),
]


class Schedule(FrozenModel):
    """The fields that all schedules share: a name, a pattern, and rules for missed and late slots."""

    name: str
    """The name of the schedule, 1 to 255 printable characters, unique in the database. Required."""

    pattern: SchedulePattern
    """When the schedule's slots are due: an IntervalSchedule, HourlySchedule, DailySchedule,
    WeeklySchedule, MonthlySchedule or CronSchedule. Required.
    """

    enabled: bool = True
    """Whether schedulers send this schedule's slots. Defaults to True."""

    timezone: str = "UTC"
    """The IANA name of the pattern's time zone, such as Europe/Berlin. Intervals ignore it. Defaults to
    UTC.
    """

    on_dst_gap: GapRule = "skip"
    """The rule for a slot at a time that the clock skips: `skip` drops the slot, `shift` moves it to the
    first instant after the gap. Defaults to skip.
    """

    start_at: datetime | None = None
    """The earliest possible slot, in the years 2 to 9000; intervals count from this time. Needs a time
    zone. Defaults to None.
    """

    end_at: datetime | None = None
    """The latest possible slot. Needs a time zone. Defaults to None."""

    jitter_seconds: float = Field(default=0, ge=0, le=86_400)
    """The longest delay, in seconds, of a slot's task or run, from 0 to 86,400. Each slot has its own
    fixed delay. This spreads schedules that are due at the same time. Defaults to 0.
    """

    catch_up_missed: bool = False
    """Fire all slots that passed while no scheduler ran, in order. If this is off, fire only the latest
    missed slot. Defaults to False.
    """

    max_catch_up_runs: int = Field(default=100, ge=1, le=10_000)
    """The maximum number of missed slots to send in one tick, from 1 to 10,000; later ticks send the
    rest. Defaults to 100.
    """

    misfire_grace_seconds: float | None = Field(default=None, gt=0, le=SECONDS_MAX)
    """Drop slots that are late by more than this many seconds, above 0 and at most 100 years. None
    never drops a slot because of its age. Defaults to None.
    """

    overlap: Overlap = "allow"
    """The rule for a slot while the task or run of an earlier slot is unfinished: `allow` sends it
    anyway, `skip` drops it, `queue` keeps it until the earlier task or run has ended. Defaults to
    allow.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(f"{type(self).__name__} {self.name[:100]!r}", self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        name = self.name
        if not (name.strip() and name.isprintable() and len(name) <= NAME_LENGTH_MAX):
            yield f"name must be a text of 1 to {NAME_LENGTH_MAX} printable characters"
        if self.catch_up_missed and self.overlap == "skip":
            yield 'catch_up_missed contradicts overlap="skip"; use overlap="queue"'
        yield from self._bound_problems()

    def _bound_problems(self) -> Iterator[str]:
        bounds = {"start_at": self.start_at, "end_at": self.end_at}
        problems = [_bound_problem(name, at) for name, at in bounds.items() if at]
        yield from filter(None, problems)
        if not any(problems) and self.start_at and self.end_at and self.end_at < self.start_at:
            yield "end_at is before start_at"


def _bound_problem(name: str, at: datetime) -> str | None:
    if at.utcoffset() is None:
        return f"{name} has no time zone; write datetime(..., tzinfo=UTC)"
    # Compare the times without conversion, because times near the limits of the calendar cannot be
    # converted to UTC.
    if not _EARLIEST <= at <= _LATEST[name]:
        return f"{name} must be in the years 2 to {_LATEST[name].year}, counted in UTC"
    return None


class TaskSchedule(Schedule):
    """A task that is sent at every slot.

    Example:
        TaskSchedule(
            name="nightly-report",
            task_name="make_report",
            pattern=DailySchedule(time=time(3, 0)),
            timezone="Europe/Berlin",
        )
    """

    task_name: str
    """The registered task to send. Required."""

    args: tuple[Any, ...] = Field(default=(), repr=False)
    """Positional arguments of the task, stored by name. Defaults to ()."""

    kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Keyword arguments of the task. Defaults to {}."""

    queue_name: str | None = None
    """The queue to send to. None uses the task's own queue. Defaults to None."""

    priority: int | None = Field(default=None, ge=1, le=100)
    """The priority of the sent tasks, from 1 (first) to 100 (last). None uses the queue's priority.
    Defaults to None.
    """

    good_for_seconds: float | None = Field(default=None, gt=0, le=SECONDS_MAX)
    """How many seconds after its slot a task expires if it has not started, above jitter_seconds and at
    most 100 years. None sets no limit. Defaults to None.
    """

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.good_for_seconds is not None and self.jitter_seconds >= self.good_for_seconds:
            yield (
                "jitter_seconds must be below good_for_seconds, or tasks expire before they may "
                "start"
            )


class WorkflowSchedule(Schedule):
    """A workflow that is started at every slot.

    A definition whose nodes are tasks of the application can be created only after the application. The
    configuration then names it by its ``definition_key``.

    Example:
        WorkflowSchedule(
            name="nightly-books",
            definition="close-the-books.v1",
            kwargs={"branch": 7},
            pattern=DailySchedule(time=time(3, 0)),
            timezone="Europe/Berlin",
        )
    """

    definition: _AsItIs
    """The WorkflowDefinition to build and start: the class, or its `definition_key`. Required."""

    kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """The parameters of the definition's `build_with`. Defaults to {}."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        is_class = isinstance(self.definition, type) and hasattr(self.definition, "own_key")
        if not (is_class or isinstance(self.definition, str)):
            yield "definition must be a WorkflowDefinition, or the definition_key of one"


AnySchedule: TypeAlias = TaskSchedule | WorkflowSchedule


class ScheduleConfig(FrozenModel):
    """The schedules of an application, and its scheduler's settings.

    Example:
        ScheduleConfig(schedules=[nightly_report, nightly_books], check_interval_seconds=5)
    """

    enabled: bool = True
    """Whether `horsies scheduler` may run. Defaults to True."""

    schedules: Sequence[AnySchedule] = Field(default_factory=list)
    """The schedules, with unique names. `app.schedules` adds more at run time. Defaults to []."""

    check_interval_seconds: int = Field(default=1, ge=1, le=60)
    """The longest sleep of a scheduler in seconds, from 1 to 60. It always wakes up in time for the next
    slot. Defaults to 1.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        repeated = repeated_names(schedule.name for schedule in self.schedules)
        refuse("ScheduleConfig", (f"the name {name!r} is used twice" for name in repeated))
        return self
