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


class Silencer(NamedTuple):
    """A place where session_replication_role is replica: a role, the database, both, or neither."""

    role_name: str | None
    is_of_database: bool
    is_stored: bool
    database_name: str


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


class Window(NamedTuple):
    """How many of the newest attempts to read."""

    window: int


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


class Older(NamedTuple):
    """An age in seconds, and the most rows."""

    seconds: float
    limit: int


class OverlongTask(NamedTuple):
    """A task that runs past its time limit, for hours without one, or without heartbeats."""

    id: str
    task_name: str
    timeout_ms: int | None
    started_at: datetime
    heartbeat_at: datetime | None
    looked_at: datetime


class PausedRun(NamedTuple):
    """A run that an error paused, with the node that failed, or one that has been paused for long."""

    id: str
    name: str
    paused_at: datetime | None
    error_code: str | None
    failed_node: str | None
    looked_at: datetime


class OverdueSchedule(NamedTuple):
    name: str


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
find_silencers = DOCTOR.declare("find_silencers", Nothing, Silencer)
list_functions = DOCTOR.declare("list_functions", SchemaName, FunctionName)
list_indexes = DOCTOR.declare("list_indexes", SchemaName, IndexState)
read_server_state = DOCTOR.declare("read_server_state", Nothing, ServerState)
list_tables = DOCTOR.declare("list_tables", SchemaName, TableState)
find_xmin_holders = DOCTOR.declare("find_xmin_holders", Nothing, XminHolder)
measure_claim_index = DOCTOR.declare("measure_claim_index", SchemaName, ClaimIndex)
list_worker_releases = DOCTOR.declare("list_worker_releases", Nothing, WorkerRelease)
count_abandoned = DOCTOR.declare("count_abandoned", Seconds, Abandoned)
list_crashes = DOCTOR.declare("list_crashes", Window, Crashes)
find_overlong_tasks = DOCTOR.declare("find_overlong_tasks", Older, OverlongTask)
find_long_pauses = DOCTOR.declare("find_long_pauses", Older, PausedRun)
find_overdue_schedules = DOCTOR.declare("find_overdue_schedules", Older, OverdueSchedule)
read_oldest_ended = DOCTOR.declare("read_oldest_ended", Nothing, OldestEnded)
measure_payload = DOCTOR.declare("measure_payload", Nothing, PayloadSize)
begin_reading = DOCTOR.declare("begin_reading", ReadingLimits, ReadingSettings)
read_backend = DOCTOR.declare("read_backend", Nothing, Backend)

DOCTOR.complete()
