"""Catalogue of the statements of durable functions."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile
from horsies.db.statements.tasks import TaskId
from horsies.encryption import Owner, Payload, ShownPayload

DURABLE = StatementFile("durable.sql")


class RecordStep(NamedTuple):
    """A step to record, and the attempt that must still own the run."""

    worker_id: str
    task_id: Owner
    generation: int
    name: str
    position: int
    kind: str
    result: Payload | None = None
    error: Payload | None = None
    due_seconds: float | None = None
    run_us: int = 0


class HoldRun(NamedTuple):
    """The attempt that must own the run."""

    worker_id: str
    task_id: str
    generation: int


class RecordedStep(NamedTuple):
    """A stored step; ``left_seconds`` is the time from now until its ``due_at``."""

    name: str
    position: int
    kind: str
    result: Payload | None
    error: Payload | None
    left_seconds: float | None = None


class StepName(NamedTuple):
    name: str


class ParkTasks(NamedTuple):
    """Runs to park, as columns; each request is JSON and describes what the run waits for."""

    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]
    requests: Sequence[str]


class ParkedTask(NamedTuple):
    task_id: str


class CleanUpRuns(NamedTuple):
    """Attempts that an accepted cancellation may have ended, as columns."""

    worker_id: str | None
    ids: Sequence[str]
    generations: Sequence[int]


class CleanedRun(NamedTuple):
    """A run that was cancelled and continues with its clean-up."""

    task_id: str


class TakeSignal(NamedTuple):
    worker_id: str
    task_id: str
    generation: int
    step: str
    position: int
    names: Sequence[str]


class TakenSignal(NamedTuple):
    """The recorded step of a signal. If ``kind`` is None, the run belongs to another attempt."""

    kind: str | None
    result: Payload | None
    error: Payload | None


class RunAnswer(NamedTuple):
    """The effect of a change, or the status that prevents the change; None if the task does not exist."""

    answer: str | None


class RunRow(NamedTuple):
    """A run of a durable function. The fields from ``since`` to ``problem`` are None unless the run is
    parked.

    ``is_durable`` and ``declared`` are the settings of the function that a worker has registered. Both
    are None if no worker has registered it; ``declared`` is also None if the function accepts signals of
    any name.
    """

    task_name: str
    status: str
    generation: int
    held: bool
    since: datetime | None
    until: datetime | None
    signals: Sequence[str] | None
    children: Sequence[str] | None
    problem: str | None
    is_durable: bool | None
    declared: Sequence[str] | None
    encrypts: bool
    args_start: str | None
    kwargs_start: str | None
    deadline: datetime | None


class CallRow(NamedTuple):
    task_name: str
    status: str
    args: Payload
    kwargs: Payload


class StepRow(NamedTuple):
    name: str
    position: int
    kind: str
    result: Payload | None
    error: Payload | None
    due_at: datetime | None
    attempt: int
    started_at: datetime
    ended_at: datetime


class ShownStep(NamedTuple):
    """A step as a page shows it; ``result`` is None if the result is hidden, too large or missing."""

    name: str
    position: int
    kind: str
    result_bytes: int | None
    result: ShownPayload | None
    error: ShownPayload | None
    due_at: datetime | None
    attempt: int
    started_at: datetime
    ended_at: datetime


class ParkedCount(NamedTuple):
    """The number of parked runs, and of runs that are held because their code does not fit their recorded
    steps.
    """

    parked: int
    held: int


class LimitedRun(NamedTuple):
    """Whether a run was cancelled because of its deadline."""

    is_late: bool


class HeldRun(NamedTuple):
    id: str
    task_name: str
    problem: str
    since: datetime
    total: int


hold_run = DURABLE.declare("hold_run", HoldRun, ParkedTask)
record_step = DURABLE.declare("record_step", RecordStep, StepName)
park_tasks = DURABLE.declare("park_tasks", ParkTasks, ParkedTask)
clean_up_runs = DURABLE.declare("clean_up_runs", CleanUpRuns, CleanedRun)
take_signal = DURABLE.declare("take_signal", TakeSignal, TakenSignal)


@DURABLE.statement
def limit_run(worker_id: str, task_id: str, generation: int, seconds: float) -> LimitedRun: ...


@DURABLE.statement
def end_late_runs(
    limit: int, excluded: Sequence[str], only: Sequence[str] | None = None
) -> TaskId: ...


@DURABLE.statement
def load_steps(task_id: str, generation: int) -> RecordedStep: ...


@DURABLE.statement
def read_step(worker_id: str, task_id: str, generation: int, name: str) -> RecordedStep: ...


@DURABLE.statement
def find_events(task_id: str, children: Sequence[str], signals: Sequence[str]) -> StepName: ...


@DURABLE.statement
def signal_task(task_id: Owner, name: str, value: Payload) -> RunAnswer: ...


@DURABLE.statement
def resume_task(task_id: str) -> RunAnswer: ...


@DURABLE.statement
def reset_task(task_id: str, step: str) -> RunAnswer: ...


@DURABLE.statement
def read_run(task_id: str) -> RunRow: ...


@DURABLE.statement
def list_steps(task_id: str) -> StepRow: ...


@DURABLE.statement
def list_newest_steps(task_id: str, payload: bool, max_bytes: int, limit: int) -> ShownStep: ...


@DURABLE.statement
def find_held_runs(limit: int) -> HeldRun: ...


@DURABLE.statement
def count_parked(most: int) -> ParkedCount: ...


@DURABLE.statement
def list_newest_runs(failed_only: bool, limit: int, window: int) -> ParkedTask: ...


@DURABLE.statement
def read_call(task_id: str) -> CallRow: ...


DURABLE.complete()
