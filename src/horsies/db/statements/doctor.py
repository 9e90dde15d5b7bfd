"""Read-only statements for the checks of ``horsies doctor``."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from horsies.db.statement import StatementFile

DOCTOR = StatementFile("doctor.sql")


class TableFound(NamedTuple):
    is_there: bool


class AppliedFile(NamedTuple):
    """A schema file that was applied, as recorded in the database: a migration or a function file."""

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
    """A place where session_replication_role = replica is set: for a role, for a database, for both, or
    for neither.
    """

    role_name: str | None
    is_of_database: bool
    is_stored: bool
    database_name: str


class ServerState(NamedTuple):
    """The server's settings and load, and the role of this session."""

    version: str
    version_number: int
    encoding: str
    database_name: str
    has_fsync: bool
    synchronous_commit: str
    has_autovacuum: bool
    is_standby: bool
    is_read_only: bool
    # How full the notification queue is, as a number from 0 to 1.
    notification_usage: float
    connection_limit: int
    connections: int
    own_connections: int
    # Whether this role sees other roles' transactions.
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
    """A session, replication slot or prepared transaction that keeps vacuum from removing dead rows."""

    kind: str
    name: str
    detail: str
    # None for a replication slot, which has no start time.
    seconds: float | None
    transactions: int
    # Whether the session is changing the schema, so that it must not be ended.
    changes_schema: bool = False


class ClaimIndex(NamedTuple):
    bytes: int
    waiting: int


class WorkerRelease(NamedTuple):
    """The release that one worker runs, and the age of the worker."""

    worker_id: str
    version: str | None
    started_seconds_ago: float


class Abandoned(NamedTuple):
    """How many tasks belong to dead workers, have a lapsed lease, or are past their deadline."""

    ownerless: int
    lapsed: int
    late: int


class Loss(NamedTuple):
    """A worker that another worker declared lost."""

    worker_id: str
    label: str
    lost_at: datetime
    looked_at: datetime
    queues: list[str]


class Crashes(NamedTuple):
    task_name: str
    crashes: int
    most_of_one_task: int


class OverlongTask(NamedTuple):
    """A task that has exceeded its time limit, has been running for hours without a limit, or sends no
    heartbeats.
    """

    id: str
    task_name: str
    timeout_ms: int | None
    started_at: datetime
    heartbeat_at: datetime | None
    looked_at: datetime


class PausedRun(NamedTuple):
    """A run paused by an error, with the node that failed, or a run that has been paused for a long time."""

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


class ReadingSettings(NamedTuple):
    is_read_only: str
    statement_timeout: str
    lock_timeout: str


class Backend(NamedTuple):
    pid: int


@DOCTOR.statement
def find_table(schema: str, table: str) -> TableFound: ...
@DOCTOR.statement
def read_migrations() -> AppliedFile: ...
@DOCTOR.statement
def list_triggers(schema: str) -> TriggerState: ...
@DOCTOR.statement
def find_silencers() -> Silencer: ...
@DOCTOR.statement
def list_functions(schema: str) -> FunctionName: ...
@DOCTOR.statement
def list_indexes(schema: str) -> IndexState: ...
@DOCTOR.statement
def read_server_state() -> ServerState: ...
@DOCTOR.statement
def list_tables(schema: str) -> TableState: ...
@DOCTOR.statement
def find_xmin_holders() -> XminHolder: ...
@DOCTOR.statement
def measure_claim_index(schema: str) -> ClaimIndex: ...
@DOCTOR.statement
def list_worker_releases() -> WorkerRelease: ...
@DOCTOR.statement
def count_abandoned(seconds: float) -> Abandoned: ...
@DOCTOR.statement
def list_crashes(window: int) -> Crashes: ...
@DOCTOR.statement
def list_losses(seconds: float, limit: int) -> Loss: ...


@DOCTOR.statement
def find_overlong_tasks(seconds: float, limit: int) -> OverlongTask: ...
@DOCTOR.statement
def find_long_pauses(seconds: float, limit: int) -> PausedRun: ...
@DOCTOR.statement
def find_overdue_schedules(seconds: float, limit: int) -> OverdueSchedule: ...
@DOCTOR.statement
def read_oldest_ended() -> OldestEnded: ...
@DOCTOR.statement
def measure_payload() -> PayloadSize: ...
@DOCTOR.statement
def begin_reading(statement_ms: int, lock_ms: int) -> ReadingSettings: ...
@DOCTOR.statement
def read_backend() -> Backend: ...


DOCTOR.complete()
