"""Catalogue of the scheduler's statements; ``scheduler/decide.py`` decides between reads and writes."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId

SCHEDULES = StatementFile("schedules.sql")
SCHEDULES_CHANNEL = "horsies_schedules"


class FindDue(NamedTuple):
    """The schedules a scheduler serves, one per line, and the size of a batch."""

    names: str
    hashes: str
    task_names: Sequence[str]
    definition_keys: Sequence[str]
    limit: int


class DueSchedule(NamedTuple):
    """A schedule whose next slot has come."""

    name: str
    due_at: datetime
    hash: str
    definition: str | None
    resumed_at: datetime | None
    looked_at: datetime
    is_unfinished: bool


class FireSlots(NamedTuple):
    """Decisions, one column per fact about a schedule, and their tasks and runs, also in columns.

    ``plans`` are the JSON texts of runs; the ``run_...`` columns are stored beside them.
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
    kwargs: Sequence[str]
    delay_seconds: Sequence[float]
    good_until: Sequence[datetime | None]
    max_retries: Sequence[int]
    task_options: Sequence[str]
    timeouts_ms: Sequence[int | None]
    enqueue_shas: Sequence[str]
    run_ids: Sequence[str]
    plans: Sequence[str]
    run_schedule_names: Sequence[str]
    run_slots: Sequence[datetime]
    run_delay_seconds: Sequence[float]


class ScheduleName(NamedTuple):
    name: str


class LookAhead(NamedTuple):
    """The schedules a scheduler serves, one per line, and the time of its last check, None when
    nothing at all was due.
    """

    names: str
    hashes: str
    task_names: Sequence[str]
    definition_keys: Sequence[str]
    looked_at: datetime | None


class NextSlot(NamedTuple):
    """Seconds until the next slot; None without one."""

    seconds: float | None


class ScheduleNames(NamedTuple):
    names: Sequence[str]


class ScheduleStanding(NamedTuple):
    """The stored state of a schedule, if there is any."""

    name: str
    is_stored: bool
    hash: str | None
    next_run_at: datetime | None
    task_name: str | None
    definition_key: str | None
    owner: str | None
    definition: str | None
    looked_at: datetime


class StoreSchedules(NamedTuple):
    """Schedules of a configuration to store, in columns."""

    names: Sequence[str]
    next_run_at: Sequence[datetime | None]
    hashes: Sequence[str]
    timings: Sequence[str]
    task_names: Sequence[str | None]
    definition_keys: Sequence[str | None]
    owners: Sequence[str]


class OwnedSchedules(NamedTuple):
    """An owner, and its current schedules."""

    owner: str
    names: Sequence[str]


class AddSchedule(NamedTuple):
    """A schedule that exists in the database only."""

    name: str
    next_run_at: datetime | None
    hash: str
    timing: str
    task_name: str | None
    definition_key: str | None
    definition: str
    replace: bool


class RunSchedule(NamedTuple):
    """The row of one manual run."""

    id: str
    task_name: str
    queue_name: str
    priority: int
    kwargs: str
    sent_at: datetime
    good_until: datetime | None
    max_retries: int
    task_options: str
    timeout_ms: int | None
    enqueue_sha: str
    schedule_name: str


class StartSchedule(NamedTuple):
    """The workflow of one manual run: its id and the JSON text of its plan."""

    id: str
    plan: str
    schedule_name: str


class ScheduleFilter(NamedTuple):
    """One schedule, or None for all."""

    name: str | None


class ScheduleState(NamedTuple):
    """The state of a schedule: its next slot, its newest run, and whether it is paused.

    A schedule that sends a task has a ``task_name``, one that starts a workflow a ``definition_key``.
    ``last_task_id`` is the id of the newest task, or of the newest workflow run. ``next_run_at`` is
    None after the last slot. ``skipped_at`` is the end of the last skipped slots, ``skip_reason`` the
    reason.
    """

    name: str
    task_name: str | None
    definition_key: str | None
    is_dynamic: bool
    owner: str | None
    timing: str | None
    next_run_at: datetime | None
    last_run_at: datetime | None
    last_task_id: str | None
    last_status: str | None
    run_count: int
    paused_at: datetime | None
    skipped_at: datetime | None
    skip_reason: str | None

    @property
    def is_paused(self) -> bool:
        """Whether its slots pass without a task."""
        return self.paused_at is not None


class ScheduleDefinition(NamedTuple):
    """The JSON of a schedule added at run time, None for one of a configuration."""

    definition: str | None


class ListRuns(NamedTuple):
    name: str
    limit: int


class ScheduleRun(NamedTuple):
    """One run of a schedule; ``scheduled_for`` is None for a manual run.

    ``task_id`` is the id of its task, or with ``is_workflow`` that of the workflow run.
    """

    task_id: str
    is_workflow: bool
    scheduled_for: datetime | None
    status: str
    enqueued_at: datetime
    error_code: str | None


find_due_schedules = SCHEDULES.declare("find_due_schedules", FindDue, DueSchedule)
fire_slots = SCHEDULES.declare("fire_slots", FireSlots, ScheduleName)
seconds_until_next_slot = SCHEDULES.declare("seconds_until_next_slot", LookAhead, NextSlot)
read_schedule_standings = SCHEDULES.declare(
    "read_schedule_standings", ScheduleNames, ScheduleStanding
)
store_schedules = SCHEDULES.declare("store_schedules", StoreSchedules, ScheduleName)
list_orphaned_schedules = SCHEDULES.declare("list_orphaned_schedules", OwnedSchedules, ScheduleName)
add_schedule = SCHEDULES.declare("add_schedule", AddSchedule, ScheduleName)
remove_schedule = SCHEDULES.declare("remove_schedule", ScheduleName, ScheduleName)
pause_schedule = SCHEDULES.declare("pause_schedule", ScheduleName, ScheduleName)
resume_schedule = SCHEDULES.declare("resume_schedule", ScheduleName, ScheduleName)
run_schedule = SCHEDULES.declare("run_schedule", RunSchedule, TaskId)
start_schedule = SCHEDULES.declare("start_schedule", StartSchedule, TaskId)
list_schedules = SCHEDULES.declare("list_schedules", ScheduleFilter, ScheduleState)
read_schedule_definition = SCHEDULES.declare(
    "read_schedule_definition", ScheduleName, ScheduleDefinition
)
list_schedule_runs = SCHEDULES.declare("list_schedule_runs", ListRuns, ScheduleRun)

SCHEDULES.complete()
