"""Read-only statements for the checks of ``horsies doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import Nothing, StatementFile
from horsies.db.statements.monitor import SchemaName

DOCTOR = StatementFile("doctor.sql")


class TableName(NamedTuple):
    schema: str
    table: str


class TableFound(NamedTuple):
    is_there: bool


class AppliedFile(NamedTuple):
    """A file of the schema as the database recorded it: a migration, or functions."""

    kind: str
    version: int
    sha: str


class TriggerState(NamedTuple):
    name: str
    table_name: str
    is_enabled: bool


class FunctionName(NamedTuple):
    name: str


class IndexState(NamedTuple):
    name: str
    table_name: str
    is_valid: bool


class ServerState(NamedTuple):
    """Settings, role and load of the server."""

    version: str
    version_number: int
    encoding: str
    database_name: str
    has_fsync: bool
    synchronous_commit: str
    has_autovacuum: bool
    is_standby: bool
    is_read_only: bool
    # The filled part of the notification queue, from 0 to 1.
    notification_usage: float
    connection_limit: int
    connections: int
    own_connections: int
    # Whether this role sees the transactions of other roles.
    sees_sessions: bool
    server_time: datetime


class TableState(NamedTuple):
    """Size and statistics of one table; ``options`` are its storage parameters."""

    name: str
    is_unlogged: bool
    options: Sequence[str]
    row_estimate: float
    bytes: int
    live_rows: int
    dead_rows: int
    analysed_at: datetime | None


class XminHolder(NamedTuple):
    """A session, replication slot or prepared transaction that keeps dead rows from vacuum."""

    kind: str
    name: str
    detail: str
    # None for a replication slot.
    seconds: float | None
    transactions: int


class ClaimIndex(NamedTuple):
    bytes: int
    waiting: int


class WorkerRelease(NamedTuple):
    """The release of one worker and the names of its tasks; None when it has not registered them."""

    worker_id: str
    version: str | None
    started_seconds_ago: float
    task_names: Sequence[str] | None


class DueWindow(NamedTuple):
    """How many due tasks to read per queue."""

    window: int


class DueQueue(NamedTuple):
    """A queue with due tasks: their number up to the window, and the names among them."""

    name: str
    due: int
    oldest_seconds: float
    task_names: Sequence[str]
    paused_seconds: float | None


class Seconds(NamedTuple):
    """An age in seconds."""

    seconds: float


class Abandoned(NamedTuple):
    """Numbers of tasks: at workers that are gone, with a lapsed lease, past their deadline."""

    ownerless: int
    lapsed: int
    late: int


class Crashes(NamedTuple):
    task_name: str
    crashes: int
    most_of_one_task: int


class LongRunning(NamedTuple):
    id: str
    task_name: str
    seconds: float


class LongPaused(NamedTuple):
    id: str
    name: str
    seconds: float


class OverdueSchedule(NamedTuple):
    name: str
    seconds: float
    # Connected schedulers, of any schedule.
    schedulers: int


class OldestEnded(NamedTuple):
    seconds: float | None


class PayloadSize(NamedTuple):
    bytes: float | None


class ReadingLimits(NamedTuple):
    """How long a statement may take, and how long it may wait for a lock."""

    statement_ms: int
    lock_ms: int


class ReadingSettings(NamedTuple):
    is_read_only: str
    statement_timeout: str
    lock_timeout: str


class Backend(NamedTuple):
    pid: int


find_table = DOCTOR.declare("find_table", TableName, TableFound)
read_migrations = DOCTOR.declare("read_migrations", Nothing, AppliedFile)
list_triggers = DOCTOR.declare("list_triggers", SchemaName, TriggerState)
list_functions = DOCTOR.declare("list_functions", SchemaName, FunctionName)
list_indexes = DOCTOR.declare("list_indexes", SchemaName, IndexState)
read_server_state = DOCTOR.declare("read_server_state", Nothing, ServerState)
list_tables = DOCTOR.declare("list_tables", SchemaName, TableState)
find_xmin_holders = DOCTOR.declare("find_xmin_holders", Nothing, XminHolder)
measure_claim_index = DOCTOR.declare("measure_claim_index", SchemaName, ClaimIndex)
list_worker_releases = DOCTOR.declare("list_worker_releases", Nothing, WorkerRelease)
list_due_queues = DOCTOR.declare("list_due_queues", DueWindow, DueQueue)
count_abandoned = DOCTOR.declare("count_abandoned", Seconds, Abandoned)
list_crashes = DOCTOR.declare("list_crashes", DueWindow, Crashes)
find_long_running = DOCTOR.declare("find_long_running", Seconds, LongRunning)
find_long_paused = DOCTOR.declare("find_long_paused", Seconds, LongPaused)
find_overdue_schedules = DOCTOR.declare("find_overdue_schedules", Seconds, OverdueSchedule)
read_oldest_ended = DOCTOR.declare("read_oldest_ended", Nothing, OldestEnded)
measure_payload = DOCTOR.declare("measure_payload", Nothing, PayloadSize)
begin_reading = DOCTOR.declare("begin_reading", ReadingLimits, ReadingSettings)
read_backend = DOCTOR.declare("read_backend", Nothing, Backend)

DOCTOR.complete()
