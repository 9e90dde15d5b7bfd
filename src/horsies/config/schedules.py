"""What a user writes down about schedules: tasks, workflows, and `ScheduleConfig` around them.

Part of the configuration; `horsies.config` holds a ScheduleConfig. A schedule that contradicts itself
is refused here (HRS-205); whether its zone, task, workflow, queue and arguments exist is known only
once the tasks are, and checked before a scheduler starts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal, Protocol, Self, TypeAlias

from pydantic import BaseModel, Field, PlainSerializer, PlainValidator, model_validator

from horsies.timetable.next_run import GapRule
from horsies.timetable.patterns import SchedulePattern, refuse
from horsies.validation import FROZEN_MODEL, SECONDS_MAX

NAME_LENGTH_MAX = 255

# A slot and what is counted from it, up to a hundred years, must have a place in Python's calendar.
_EARLIEST = datetime(2, 1, 1, tzinfo=UTC)
_LATEST = {
    "start_at": datetime.max.replace(year=9000, tzinfo=UTC),
    "end_at": datetime.max.replace(tzinfo=UTC),
}

Overlap: TypeAlias = Literal["allow", "skip", "queue"]


class KeyedWorkflow(Protocol):
    """The class of a workflow definition, of which a configuration knows only that it has a key."""

    def own_key(self) -> str | None:
        """Return the key the class declares, if any."""


def _key(definition: KeyedWorkflow | str) -> str | None:
    return definition if isinstance(definition, str) else definition.own_key()


# Workflows stand above the configuration: it holds the class and asks nothing else of it.
_AsItIs: TypeAlias = Annotated[
    KeyedWorkflow | str,
    PlainValidator(lambda definition: definition),
    PlainSerializer(_key, return_type=str | None),
]


class Schedule(BaseModel):
    """What all schedules have in common: a name, a timetable, and rules for slots that cannot fire."""

    model_config = FROZEN_MODEL

    name: str
    """What the schedule is called, 1 to 255 printable characters, unique in the database.
    Required."""

    pattern: SchedulePattern
    """When: an IntervalSchedule, HourlySchedule, DailySchedule, WeeklySchedule, MonthlySchedule or
    CronSchedule. Required."""

    enabled: bool = True
    """Whether schedulers serve it. Defaults to True."""

    timezone: str = "UTC"
    """The IANA name of the zone whose clock counts, such as Europe/Berlin. Intervals ignore it.
    Defaults to UTC."""

    on_dst_gap: GapRule = "skip"
    """What becomes of a time that the clock leaps over: `skip` drops it, `shift` takes the first
    instant after the gap. Defaults to skip."""

    start_at: datetime | None = None
    """The earliest slot, in the years 2 to 9000; intervals count from it. Needs a time zone.
    Defaults to None."""

    end_at: datetime | None = None
    """No slot is later than this. Needs a time zone. Defaults to None."""

    jitter_seconds: float = Field(default=0, ge=0, le=86_400)
    """Let what each slot sends wait for up to this long, from 0 to 86,400, always the same for the
    same slot. Spreads schedules that are due together. Defaults to 0."""

    catch_up_missed: bool = False
    """Make up for all slots that passed while no scheduler ran, in order; otherwise only for the
    latest. Defaults to False."""

    max_catch_up_runs: int = Field(default=100, ge=1, le=10_000)
    """How many missed slots are made up for at once, from 1 to 10,000; the rest follows. Defaults to
    100."""

    misfire_grace_seconds: float | None = Field(default=None, gt=0, le=SECONDS_MAX)
    """Drop slots that are older than this when a scheduler comes to them, above 0 and at most 100
    years. None drops none for its age. Defaults to None."""

    overlap: Overlap = "allow"
    """What to do while the task or run of an earlier slot is unfinished: `allow` sends the next
    anyway, `skip` drops the slot, `queue` keeps it until the other has ended. Defaults to allow."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(f"{type(self).__name__} {self.name[:100]!r}", self._problems())
        return self

    def _problems(self) -> Iterator[str]:
        if not (
            self.name.strip() and self.name.isprintable() and len(self.name) <= NAME_LENGTH_MAX
        ):
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
    # Compared as they are: to be written in UTC, a time may lie too near to the end of the calendar.
    if not _EARLIEST <= at <= _LATEST[name]:
        return f"{name} must be in the years 2 to {_LATEST[name].year}, counted in UTC"
    return None


class TaskSchedule(Schedule):
    """A task to be sent again and again.

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
    """Positional arguments of the task; they are stored by name. Defaults to ()."""

    kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """Keyword arguments of the task. Defaults to {}."""

    queue_name: str | None = None
    """The queue to send to. None takes the task's own. Defaults to None."""

    priority: int | None = Field(default=None, ge=1, le=100)
    """The priority of the tasks, from 1 (first) to 100 (last). None takes the queue's. Defaults to
    None."""

    good_for_seconds: float | None = Field(default=None, gt=0, le=SECONDS_MAX)
    """Seconds after its slot until which a task may still start, above jitter_seconds and at most
    100 years; later it expires. None sets no limit. Defaults to None."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        if self.good_for_seconds is not None and self.jitter_seconds >= self.good_for_seconds:
            yield (
                "jitter_seconds must be below good_for_seconds, or tasks expire before they may "
                "start"
            )


class WorkflowSchedule(Schedule):
    """A workflow to be started again and again.

    A definition whose nodes are tasks of the application cannot exist before the application does;
    the configuration then names it by its ``definition_key``.

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
    """The WorkflowDefinition to build and start, the class or its `definition_key`. Required."""

    kwargs: dict[str, Any] = Field(default_factory=dict, repr=False)
    """The parameters of its `build_with`. Defaults to {}."""

    def _problems(self) -> Iterator[str]:
        yield from super()._problems()
        is_class = isinstance(self.definition, type) and hasattr(self.definition, "own_key")
        if not (is_class or isinstance(self.definition, str)):
            yield "definition must be a WorkflowDefinition, or the definition_key of one"


AnySchedule: TypeAlias = TaskSchedule | WorkflowSchedule


class ScheduleConfig(BaseModel):
    """The schedules of an application, and how its scheduler looks after them.

    Example:
        ScheduleConfig(schedules=[TaskSchedule(...), WorkflowSchedule(...)])
    """

    model_config = FROZEN_MODEL

    enabled: bool = True
    """Whether `horsies scheduler` may run. Defaults to True."""

    schedules: Sequence[AnySchedule] = Field(default_factory=list)
    """The schedules, with unique names. More can be added at run time with `app.schedules`. Defaults
    to []."""

    check_interval_seconds: int = Field(default=1, ge=1, le=60)
    """The longest a scheduler sleeps, from 1 to 60; it wakes up in time for every slot. Defaults to
    1."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        names = [schedule.name for schedule in self.schedules]
        repeated = sorted({name for name in names if names.count(name) > 1})
        refuse("ScheduleConfig", (f"the name {name!r} is used twice" for name in repeated))
        return self
