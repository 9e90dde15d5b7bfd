"""Statements for the scheduler and for ``app.schedules``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId
from horsies.encryption import Payload

SCHEDULES = StatementFile("schedules.sql")
SCHEDULES_CHANNEL = "horsies_schedules"


class DueSchedule(NamedTuple):
    name: str
    due_at: datetime
    hash: str
    definition: Payload | None
    edited_timing: str | None
    edited_at: datetime | None
    resumed_at: datetime | None
    looked_at: datetime
    is_unfinished: bool


class FireSlots(NamedTuple):
    """Decisions about schedules, the tasks to send and the workflow runs to start, each as a group of
    columns.

    The columns of a run are its id, its plan as JSON text, and its schedule, slot and delay.
    """

    names: Sequence[str]
    due_at: Sequence[datetime]
    hashes: Sequence[str]
    next_run_at: Sequence[datetime | None]
    last_task_ids: Sequence[str | None]
    run_counts: Sequence[int]
    skipped_at: Sequence[datetime | None]
    skip_reasons: Sequence[str | None]
    ids: Sequence[str]
    schedule_names: Sequence[str]
    slots: Sequence[datetime]
    task_names: Sequence[str]
    queue_names: Sequence[str]
    priorities: Sequence[int]
    kwargs: Sequence[Payload]
    delay_seconds: Sequence[float]
    good_until: Sequence[datetime | None]
    max_retries: Sequence[int]
    task_options: Sequence[str]
    timeouts_ms: Sequence[int | None]
    retention_seconds: Sequence[float | None]
    enqueue_shas: Sequence[str]
    lane_keys: Sequence[str | None]
    lanes: Sequence[int | None]
    run_ids: Sequence[str]
    plans: Sequence[str]
    run_schedule_names: Sequence[str]
    run_slots: Sequence[datetime]
    run_delay_seconds: Sequence[float]


class ScheduleName(NamedTuple):
    name: str


class NextSlot(NamedTuple):
    """Seconds until the next slot; None if no schedule has a next slot."""

    seconds: float | None


# If a slot is overdue by more than this time, its schedule is considered unserved.
LATE_SECONDS = 60.0


class ScheduleRecord(NamedTuple):
    """A schedule's stored row, or nulls if there is no row, and the time on the database's clock.

    ``definition`` is the JSON of a schedule added at run time; for a configured schedule it is null.
    ``stored_definition`` is the same JSON as it is stored, which may be encrypted.
    ``original_timing`` is the timing before a person edited it; if no person has edited it, it is null.
    """

    name: str
    is_stored: bool
    hash: str | None
    next_run_at: datetime | None
    task_name: str | None
    definition_key: str | None
    owner: str | None
    definition: Payload | None
    stored_definition: str | None
    timing: str | None
    original_timing: str | None
    is_paused: bool
    looked_at: datetime
    was_disabled: bool
    is_unserved: bool
    is_unfinished: bool


class StoreSchedules(NamedTuple):
    """A configuration's schedules that are to be stored, as columns."""

    names: Sequence[str]
    next_run_at: Sequence[datetime | None]
    hashes: Sequence[str]
    timings: Sequence[str]
    task_names: Sequence[str | None]
    definition_keys: Sequence[str | None]
    owners: Sequence[str]


class ScheduleState(NamedTuple):
    """The state of a schedule: its next slot, its newest run, and whether the schedule is paused.

    A schedule that sends a task has a ``task_name``; one that starts a workflow has a ``definition_key``.
    ``last_task_id`` is the id of the newest task or workflow run. ``next_run_at`` is None once the
    schedule has ended. ``skipped_at`` is the time up to which slots were skipped most recently, and
    ``skip_reason`` is the reason.
    """

    name: str
    """The name of the schedule."""
    task_name: str | None
    """The name of the task that the schedule sends; None if the schedule starts a workflow."""
    definition_key: str | None
    """The key of the workflow that the schedule starts; None if the schedule sends a task."""
    is_dynamic: bool
    """Whether the schedule was added at run time and not by a configuration."""
    owner: str | None
    """The scheduler that stored the schedule, or None if a program added it."""
    timing: str | None
    """The pattern, time zone and bounds of the schedule, as stored JSON."""
    original_timing: str | None
    """The timing from the configuration or program, if a person has edited it since."""
    next_run_at: datetime | None
    """The next slot of the schedule, or None once the schedule has ended."""
    last_run_at: datetime | None
    """The newest slot for which a task was sent or a run was started."""
    last_task_id: str | None
    """The id of the newest task or workflow run."""
    last_status: str | None
    """The status of the newest task or workflow run."""
    run_count: int
    """For how many slots a task was sent or a run was started."""
    paused_at: datetime | None
    """When the schedule was paused; None if it is not paused."""
    skipped_at: datetime | None
    """The time up to which slots were skipped most recently."""
    skip_reason: str | None
    """Why slots were most recently skipped."""

    @property
    def is_paused(self) -> bool:
        """Whether the schedule is paused."""
        return self.paused_at is not None

    @property
    def is_edited(self) -> bool:
        """Whether a person's edit of the timing is in force."""
        return self.original_timing is not None


class ScheduleRun(NamedTuple):
    """One run of a schedule; ``scheduled_for`` is None for a manual run. ``task_id`` is the id of the
    task, or the id of the workflow run if ``is_workflow`` is set.
    """

    task_id: str
    """The id of the task, or of the workflow run."""
    is_workflow: bool
    """Whether ``task_id`` is the id of a workflow run."""
    scheduled_for: datetime | None
    """The slot of the run, or None for a manual run."""
    status: str
    """The status of the task or run."""
    enqueued_at: datetime
    """When the task became due, or when the run was started."""
    error_code: str | None
    """The error code of the task or run, or None."""


class TimedScheduleRun(NamedTuple):
    """One run of a schedule, like ``ScheduleRun``; ``took_seconds`` is set once the run has ended."""

    name: str
    task_id: str
    is_workflow: bool
    scheduled_for: datetime | None
    status: str
    sent_at: datetime
    error_code: str | None
    took_seconds: float | None


class Schedulers(NamedTuple):
    """How many sessions of schedulers are connected."""

    sessions: int
    looked_at: datetime


@SCHEDULES.statement
def find_due_schedules(
    names: str, hashes: str, task_names: Sequence[str], definition_keys: Sequence[str], limit: int
) -> DueSchedule: ...


fire_slots = SCHEDULES.declare("fire_slots", FireSlots, ScheduleName)


@SCHEDULES.statement
def seconds_until_next_slot(
    names: str,
    hashes: str,
    task_names: Sequence[str],
    definition_keys: Sequence[str],
    looked_at: datetime | None,
) -> NextSlot: ...
@SCHEDULES.statement
def read_schedule_records(
    names: Sequence[str], late_seconds: float = LATE_SECONDS
) -> ScheduleRecord: ...


store_schedules = SCHEDULES.declare("store_schedules", StoreSchedules, ScheduleName)


@SCHEDULES.statement
def note_disabled_schedules(
    owner: str, names: Sequence[str], disabled: Sequence[str], late_seconds: float = LATE_SECONDS
) -> ScheduleName: ...
@SCHEDULES.statement
def list_orphaned_schedules(owner: str, names: Sequence[str]) -> ScheduleName: ...
@SCHEDULES.statement
def add_schedule(
    name: str,
    next_run_at: datetime | None,
    hash: str,
    timing: str,
    task_name: str | None,
    definition_key: str | None,
    definition: Payload,
    replace: bool,
    same_as: str | None,
) -> ScheduleName: ...
@SCHEDULES.statement
def edit_schedule(
    name: str,
    hash_before: str | None,
    due_before: datetime | None,
    timing: str,
    hash: str,
    edited_at: datetime,
    next_run_at: datetime | None,
    skipped_at: datetime | None,
    skip_reason: str | None,
) -> ScheduleName: ...
@SCHEDULES.statement
def remove_schedule(name: str) -> ScheduleName: ...
@SCHEDULES.statement
def pause_schedule(name: str) -> ScheduleName: ...
@SCHEDULES.statement
def resume_schedule(name: str) -> ScheduleName: ...
@SCHEDULES.statement
def run_schedule(
    id: str,
    task_name: str,
    queue_name: str,
    priority: int,
    kwargs: Payload,
    sent_at: datetime,
    good_until: datetime | None,
    max_retries: int,
    task_options: str,
    timeout_ms: int | None,
    retention_seconds: float | None,
    enqueue_sha: str,
    schedule_name: str,
    lane_key: str | None,
    lane: int | None,
) -> TaskId: ...
@SCHEDULES.statement
def start_schedule(id: str, plan: str, schedule_name: str) -> TaskId: ...
@SCHEDULES.statement
def list_schedules(
    name: str | None, after: str = "", limit: int | None = None
) -> ScheduleState: ...
@SCHEDULES.statement
def list_schedule_runs(name: str, limit: int) -> ScheduleRun: ...
@SCHEDULES.statement
def list_newest_schedule_runs(names: Sequence[str], limit: int) -> TimedScheduleRun: ...
@SCHEDULES.statement
def find_schedulers() -> Schedulers: ...


SCHEDULES.complete()
