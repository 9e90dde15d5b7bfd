"""An application's configuration: queues, claiming, recovery, resilience, payload limits.

The objects are frozen and checked when they are built. A value out of range is a pydantic error; values
that contradict each other are HRS errors, and one report lists all contradictions in an object.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, PlainValidator, model_validator

from horsies.captured_log import LOG_BYTES_MAX, LOG_LINES_MAX, LogLimits
from horsies.config.postgres import PostgresConfig
from horsies.config.tracing import TracingConfig
from horsies.database_url import channel_prefix, mask_url
from horsies.error_codes import validate_error_code_name, validate_exception_mapper
from horsies.errors import ConfigurationError, ErrorCode
from horsies.retry import ExceptionMapper
from horsies.validation import (
    SECONDS_MAX,
    Check,
    FrozenModel,
    raise_failed,
    raise_problems,
    repeated_names,
)

if TYPE_CHECKING:
    from horsies.config.schedules import ScheduleConfig
    from horsies.config.webhooks import Webhook
# Import these models lazily: few processes use schedules or webhooks, and pydantic builds models
# slowly.
else:
    ScheduleConfig = Annotated[Any, PlainValidator(lambda value: _schedules_of(value))]
    Webhook = Annotated[Any, PlainValidator(lambda value: _webhook_of(value))]

DEFAULT_QUEUE_NAME = "default"
DEFAULT_PRIORITY = 100
QUEUE_CHANNEL_PREFIX = "task_queue_"
DEFAULT_CLAIM_LEASE_MS = 60_000

# PostgreSQL silently truncates identifiers, including channel names, to 63 bytes.
MAX_QUEUE_NAME_BYTES = 63 - len(QUEUE_CHANNEL_PREFIX)

_SAFE_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MIN_HEARTBEAT_INTERVAL_MS = 1_000


class QueueMode(StrEnum):
    """Whether all tasks share one queue, or each task names its queue."""

    DEFAULT = "default"
    """All tasks share a single queue, named ``default``."""
    CUSTOM = "custom"
    """The configuration lists the queues, and each task names one of them."""


def queue_name_problem(name: str) -> str | None:
    """Explain in one sentence why a queue cannot have this name, or return None if it can."""
    if not _SAFE_QUEUE_NAME.fullmatch(name):
        return (
            f"the queue name {name[:100]!r} must consist of letters A-Z and a-z, digits, "
            "'_', '.' and '-', and must not be empty"
        )
    if len(name) > MAX_QUEUE_NAME_BYTES:
        return (
            f"the queue name {name[:100]!r} is {len(name)} bytes long, at most "
            f"{MAX_QUEUE_NAME_BYTES} bytes fit into a PostgreSQL channel name; shorten it"
        )
    return None


class Rate(FrozenModel):
    """How many tasks of a queue may start per period, in the whole cluster.

    Example:
        Rate(count=100, per_seconds=60, burst=5)
    """

    count: int = Field(ge=1, le=1_000_000, strict=True)
    """How many tasks may start in a period of `per_seconds`, from 1 to 1,000,000. Required."""

    per_seconds: float = Field(default=1.0, ge=0.001, le=31_622_400.0)
    """The length of the period in seconds, from a millisecond to 366 days. Defaults to 1."""

    burst: int = Field(default=1, ge=1, le=1_000_000, strict=True)
    """How many tasks may start at once after a pause, from 1 to 1,000,000. With 1, starts are evenly
    spaced. Defaults to 1.
    """

    def __str__(self) -> str:
        return f"{self.count:,} per {self.per_seconds:g} s"

    @property
    def seconds_per_start(self) -> float:
        """The seconds between two starts."""
        return self.per_seconds / self.count


class PerKey(FrozenModel):
    """Limits that apply to each key of a queue, in the whole cluster; see [keys](concurrency.md#keys).

    Example:
        PerKey(max_concurrency=2, rate=Rate(count=100, per_seconds=60, burst=5))
    """

    max_concurrency: int | None = Field(default=None, ge=0, le=2_147_483_647, strict=True)
    """The maximum number of tasks of one key in flight, at least 0. 0 pauses all keys. None sets no
    limit. Defaults to None.
    """

    rate: Rate | None = None
    """How many tasks of one key may start per period. None sets no limit. Defaults to None."""

    order: Literal["parallel", "fifo"] = "parallel"
    """`fifo` runs the tasks of one key one at a time, in the order of their sends: a task waits until the
    previous task has ended, including its retries. Defaults to `parallel`.
    """

    weight: float = Field(default=1.0, ge=0.01, le=100.0)
    """How many tasks of a key start, on average, each time the key is served, from 0.01 to 100. Defaults
    to 1.
    """

    on_failure: Literal["go_on", "halt"] = "go_on"
    """Whether a key with `order="fifo"` continues (`go_on`) or is paused (`halt`) after one of its tasks
    has failed. Defaults to `go_on`.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.on_failure == "halt" and self.order != "fifo":
            problem = 'on_failure="halt" needs order="fifo": only then does a task wait for the one before it'
            raise_problems("PerKey", [(ErrorCode.CONFIG_INVALID_QUEUE_MODE, problem)])
        return self


class CustomQueueConfig(FrozenModel):
    """One queue of an app in CUSTOM mode.

    Example:
        CustomQueueConfig(name="api_calls", priority=1, max_concurrency=5)
    """

    name: str
    """The name of the queue: 1 to 52 letters (A-Z, a-z), digits, `_`, `.` and `-`. Unique in the
    app. Required."""

    priority: int = Field(default=1, ge=1, le=100)
    """The order in which workers serve queues, from 1 (first) to 100 (last). Defaults to 1."""

    max_concurrency: int | None = Field(default=None, ge=0)
    """The maximum number of tasks of this queue in flight in the whole cluster, at least 0. 0 pauses the
    queue: tasks stay pending. None sets no limit and avoids the cost of counting. Defaults to None.
    """

    rate: Rate | None = None
    """How many tasks of this queue may start per period, counted over the whole cluster; see
    [rates](concurrency.md#rates). None sets no limit. Defaults to None.
    """

    per_key: PerKey | None = None
    """Limits that apply to each key of this queue; see [keys](concurrency.md#keys). None sets no limits.
    Defaults to None.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        problem = queue_name_problem(self.name)
        if problem is not None:
            raise_problems("CustomQueueConfig", [(ErrorCode.CONFIG_INVALID_QUEUE_MODE, problem)])
        return self


class RecoveryConfig(FrozenModel):
    """Settings for heartbeats, for the recovery of tasks from dead workers, and for the retention of
    records.
    """

    auto_requeue_stale_claimed: bool = True
    """Return the claimed tasks of a silent worker to their queue if they have not started. Defaults to
    True.
    """

    auto_fail_stale_running: bool = True
    """End the attempts of a silent worker: their task fails with WORKER_CRASHED, or is retried if its
    policy lists that code. Defaults to True.
    """

    claimed_stale_threshold_ms: int = Field(default=120_000, ge=1_000, le=3_600_000)
    """Milliseconds of silence after which a claimed task counts as abandoned, from 1,000 to
    3,600,000 (an hour) and at least twice claimer_heartbeat_interval_ms. Defaults to 120,000."""

    running_stale_threshold_ms: int = Field(default=300_000, ge=1_000, le=7_200_000)
    """Milliseconds of silence after which a running task counts as crashed, from 1,000 to
    7,200,000 (two hours) and at least twice runner_heartbeat_interval_ms. Defaults to 300,000."""

    worker_lost_after_ms: int = Field(default=10_000, ge=1_000, le=3_600_000)
    """How many milliseconds another worker must observe a worker without a connection before it recovers
    that worker's tasks, from 1,000 to 3,600,000 (an hour). A worker on the same host whose process has
    ended is declared lost immediately. Defaults to 10,000.
    """

    stop_tasks_after_silence_ms: int | None = Field(default=None, ge=1_000, le=3_600_000)
    """Milliseconds without a successful heartbeat after which a worker kills its own running tasks, from
    1,000 to 3,600,000 and below both worker_lost_after_ms and the larger stale threshold, so that these
    tasks have ended before another worker runs them again. With None, tasks keep running through any
    outage. Defaults to None.
    """

    check_interval_ms: int = Field(default=30_000, ge=1_000, le=600_000)
    """Milliseconds between two searches for abandoned tasks, from 1,000 to 600,000 (ten minutes).
    Defaults to 30,000."""

    runner_heartbeat_interval_ms: int = Field(default=30_000, ge=1_000, le=120_000)
    """Milliseconds between two heartbeats of a running task, from 1,000 to 120,000 (two minutes).
    Defaults to 30,000."""

    claimer_heartbeat_interval_ms: int = Field(default=30_000, ge=1_000, le=120_000)
    """Milliseconds between two renewals of the leases on claimed tasks, from 1,000 to 120,000 (two
    minutes). If it is not set and the lease is below a minute, half of the lease is used. Defaults
    to 30,000.
    """

    worker_state_snapshot_interval_ms: int = Field(default=30_000, ge=1_000, le=300_000)
    """Milliseconds between two state snapshots of a worker, from 1,000 to 300,000 (five minutes).
    Defaults to 30,000."""

    heartbeat_retention_hours: int | None = Field(default=24, ge=1, le=8_760)
    """Hours to keep heartbeat rows, from 1 to 8,760 (a year). None keeps them forever. Defaults to 24."""

    worker_state_retention_hours: int | None = Field(default=168, ge=1, le=8_760)
    """Hours to keep worker snapshots, from 1 to 8,760 (a year). None keeps them forever. Defaults to 168
    (a week).
    """

    terminal_record_retention_hours: int | None = Field(default=720, ge=1, le=43_800)
    """Hours to keep finished tasks and workflows, from 1 to 43,800 (five years). None keeps them
    forever. Defaults to 720 (thirty days).
    """

    log_retention_hours: int | None = Field(default=168, ge=1, le=43_800)
    """Hours to keep the logs of attempts (log_capture), from 1 to 43,800 (five years). A task's logs are
    deleted with the task at the latest; with None, only then. Defaults to 168 (a week).
    """

    measure_retention_hours: int | None = Field(default=336, ge=7, le=8_760)
    """Hours to keep the attempt counts for the dashboard's charts, from 7 to 8,760 (a year).
    None keeps them forever. Defaults to 336 (two weeks).
    """

    queue_retention: dict[str, timedelta | None] = Field(default_factory=dict)
    """Retention for finished tasks of individual queues, from one second to 100 years; None keeps them
    forever. The value at the time of the send applies. Defaults to {}.
    """

    unknown_task_grace_ms: int = Field(default=600_000, ge=1_000, le=86_400_000)
    """Milliseconds that a task waits for a worker that can run it, from 1,000 to 86,400,000 (a day).
    After that time a task whose name no worker knows fails with WORKER_RESOLUTION_ERROR, a sub-workflow
    with SUBWORKFLOW_LOAD_FAILED, and a call that fits no worker's parameters with
    WORKER_SERIALIZATION_ERROR. A run of a durable function waits instead. Defaults to 600,000 (ten
    minutes).
    """

    paused_workflow_auto_cancel_after: timedelta | None = None
    """The longest time a workflow may stay paused before it ends as EXPIRED, above 0 and at most 100
    years. None sets no limit. Defaults to None."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_failed("RecoveryConfig", [*self._silence_checks(), *self._time_checks()])
        return self

    def _silence_checks(self) -> Iterator[Check]:
        code = ErrorCode.CONFIG_INVALID_RECOVERY
        for state, sender in (("running", "runner"), ("claimed", "claimer")):
            threshold: int = getattr(self, f"{state}_stale_threshold_ms")
            interval: int = getattr(self, f"{sender}_heartbeat_interval_ms")
            yield (
                threshold < 2 * interval,
                code,
                f"{state}_stale_threshold_ms ({threshold}) must be at least twice "
                f"{sender}_heartbeat_interval_ms ({interval}), or one late heartbeat looks like a crash",
            )
        silence, lost = self.stop_tasks_after_silence_ms, self.worker_lost_after_ms
        stale = max(self.claimed_stale_threshold_ms, self.running_stale_threshold_ms)
        yield (
            silence is not None and silence >= min(lost, stale),
            code,
            f"stop_tasks_after_silence_ms ({silence}) must be below worker_lost_after_ms ({lost}) and the "
            f"larger stale threshold ({stale}), or another worker may run a task before this one has "
            "stopped it",
        )

    def _time_checks(self) -> Iterator[Check]:
        code, longest = ErrorCode.CONFIG_INVALID_RECOVERY, timedelta(seconds=SECONDS_MAX)
        allowed = self.paused_workflow_auto_cancel_after
        yield (
            allowed is not None and not timedelta(0) < allowed <= longest,
            code,
            "paused_workflow_auto_cancel_after must be above 0 and at most 100 years, or None",
        )
        for name, kept in self.queue_retention.items():
            yield (
                kept is not None and not timedelta(seconds=1) <= kept <= longest,
                code,
                f"queue_retention[{name!r}] must be from one second to 100 years, or None",
            )


class WorkerResilienceConfig(FrozenModel):
    """Settings for the behaviour of a worker while the database is unavailable or does not respond."""

    db_retry_initial_ms: int = Field(default=500, ge=100, le=60_000)
    """Milliseconds before the first retry after a database error, from 100 to 60,000. Each further wait
    is twice as long as the previous one, plus or minus up to 25 %. Defaults to 500.
    """

    db_retry_max_ms: int = Field(default=30_000, ge=500, le=300_000)
    """The maximum wait between two retries in milliseconds, from 500 to 300,000 and not below
    db_retry_initial_ms. Defaults to 30,000.
    """

    db_retry_max_attempts: int = Field(default=0, ge=0, le=10_000)
    """The number of consecutive retries before a worker gives up and stops, from 0 to 10,000. 0 retries
    forever. Defaults to 0."""

    notify_poll_interval_ms: int = Field(default=5_000, ge=1_000, le=300_000)
    """Milliseconds between two polls for tasks while no notification arrives, from 1,000 to 300,000.
    Defaults to 5,000."""

    statement_timeout_ms: int = Field(default=60_000, ge=1_000, le=3_600_000)
    """The time limit of a worker's or scheduler's statements in milliseconds, from 1,000 to 3,600,000.
    It overrides the statement_timeout, transaction_timeout and idle_in_transaction_session_timeout of
    the database and the role. The effective limit is at most 0.8 of tcp_user_timeout_ms behind
    PgBouncer, and at most half of recovery.stop_tasks_after_silence_ms if that is set. Defaults to
    60,000.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        initial, largest = self.db_retry_initial_ms, self.db_retry_max_ms
        problem = f"db_retry_max_ms ({largest}) must not be below db_retry_initial_ms ({initial})"
        check = (largest < initial, ErrorCode.CONFIG_INVALID_RESILIENCE, problem)
        raise_failed("WorkerResilienceConfig", [check])
        return self


class PayloadConfig(FrozenModel):
    """Size limits for a task's stored arguments and result, and for workflows."""

    warn_bytes: int = Field(default=1_048_576, ge=1)
    """Size in bytes of the JSON text of arguments or of a result above which a warning is logged, at
    least 1 and at most reject_bytes. Defaults to 1,048,576 (1 MiB).
    """

    reject_bytes: int | None = Field(default=16_777_216, ge=1)
    """Size in bytes of the JSON text of arguments above which a send is rejected, at least 1. None sets
    no limit. Defaults to 16,777,216 (16 MiB).
    """

    max_result_bytes: int | None = Field(default=None, ge=1)
    """The maximum size in bytes of a result's JSON text, at least 1. A task with a larger result fails
    with PAYLOAD_TOO_LARGE, and the result is lost. None sets no limit. Defaults to None.
    """

    max_input_bytes: int = Field(default=268_435_456, ge=1, le=805_306_368)
    """The maximum total size in bytes of the results that a workflow node takes from other nodes, from 1
    to 805,306,368 (768 MiB); a node that would take more fails with PAYLOAD_TOO_LARGE. The results of a
    map's items count together. Defaults to 268,435,456 (256 MiB).
    """

    max_map_items: int | None = Field(default=100_000, ge=1)
    """The maximum number of items of a map node, at least 1; a node with more items fails with
    PAYLOAD_TOO_LARGE. The configuration of the program that starts a run determines the run's limit.
    None sets no limit. Defaults to 100,000.
    """

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reject_bytes is not None and self.warn_bytes > self.reject_bytes:
            raise ValueError(
                f"warn_bytes ({self.warn_bytes}) must not exceed reject_bytes "
                f"({self.reject_bytes}); lower warn_bytes as well"
            )
        return self


class LogCapture(FrozenModel):
    """The limits for the stored log of a task. If an attempt logs more lines, its first and last lines
    are kept; the lines in between are counted and dropped.

    Example:
        AppConfig(broker=PostgresConfig.from_env(), log_capture=LogCapture(max_lines=200))
    """

    level: Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"] = "INFO"
    """The lowest level of the lines to keep; each logger's own level is applied first. Defaults to
    INFO.
    """

    max_lines: int = Field(default=1_000, ge=2, le=LOG_LINES_MAX)
    """The maximum number of lines to keep per attempt, from 2 to 100,000. Defaults to 1,000."""

    max_bytes: int = Field(default=65_536, ge=1_024, le=LOG_BYTES_MAX)
    """The maximum number of bytes to keep per attempt, from 1,024 to 1,048,576. A worker allocates this
    much shared memory per child, or per slot of an async child. Defaults to 65,536.
    """

    @property
    def limits(self) -> LogLimits:
        """The limits for the log of one attempt."""
        return LogLimits(self.max_bytes, self.max_lines)


def _copied_mapper(value: object) -> object:
    # Check the entries here: pydantic's report of a bad entry would have no error code and omit
    # other problems.
    return dict(value) if isinstance(value, Mapping) else value


PayloadPolicy = PayloadConfig
"""Another name for ``PayloadConfig``."""


class AppConfig(FrozenModel):
    """The configuration of an app.

    Example:
        AppConfig(broker=PostgresConfig.from_env(), cluster_wide_cap=50)
    """

    broker: PostgresConfig
    """The database. Required."""

    queue_mode: QueueMode = QueueMode.DEFAULT
    """DEFAULT puts all tasks into one queue named `default`; in CUSTOM mode every task names one of
    custom_queues. Defaults to DEFAULT.
    """

    custom_queues: list[CustomQueueConfig] | None = None
    """The queues of CUSTOM mode, at least one, with unique names. Must be None in DEFAULT mode.
    Defaults to None."""

    cluster_wide_cap: int | None = None
    """The maximum number of tasks in flight, running or claimed, in the whole cluster, at least 1.
    Cannot be combined with prefetch_buffer. None sets no limit. Defaults to None.
    """

    prefetch_buffer: int = 0
    """The number of tasks that a worker may claim beyond those that its processes can run at the same
    time, at least 0. Above 0, claim_lease_ms is required and concurrency limits become soft: they count
    running tasks only. Defaults to 0.
    """

    claim_lease_ms: int | None = None
    """The lease of a claimed task in milliseconds: how long the task stays with its worker if it has not
    started and the lease is not renewed, at least 2,000, and at least twice
    recovery.claimer_heartbeat_interval_ms if that is set. Required and used only with a prefetch_buffer
    above 0; without one, tasks start when they are claimed. While it is None, max_claim_renew_age_ms and
    recovery.claimer_heartbeat_interval_ms are checked against 60,000. Defaults to None.
    """

    max_claim_renew_age_ms: int = 180_000
    """Milliseconds after the claim during which the lease of a task that has not started is renewed,
    at least one lease. Defaults to 180,000."""

    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    """Heartbeats, recovery of abandoned tasks, retention. Defaults to RecoveryConfig()."""

    resilience: WorkerResilienceConfig = Field(default_factory=WorkerResilienceConfig)
    """Behaviour of workers while the database is unavailable. Defaults to
    WorkerResilienceConfig()."""

    payload: PayloadConfig = Field(default_factory=PayloadConfig)
    """Size limits for arguments and results. Defaults to PayloadConfig()."""

    schedule: ScheduleConfig | None = None
    """The schedules that a scheduler serves. None means that no scheduler may run. Defaults to None."""

    release: str | None = Field(default=None, min_length=1, max_length=255)
    """The release of the application, such as a version or a commit, of 1 to 255 characters. Workers
    register this release, and `horsies failures` and the dashboard name the releases in which a failure
    was first and last seen. Defaults to None.
    """

    exception_mapper: Annotated[ExceptionMapper, PlainValidator(_copied_mapper)] = Field(
        default_factory=dict
    )
    """The error codes for exceptions that a task function raises, by class of the exception; a class
    covers its subclasses too. A task's own mapper takes precedence. Defaults to {}.
    """

    default_unhandled_error_code: Annotated[str, PlainValidator(lambda value: value)] = (
        "UNHANDLED_EXCEPTION"
    )
    """The error code for an exception that no mapper lists. Defaults to UNHANDLED_EXCEPTION."""

    hook_timeout_seconds: float = Field(default=10.0, gt=0, le=3_600)
    """Seconds that each start and stop hook of a child process may take, at most 3,600. Defaults to
    10."""

    tracing: TracingConfig | None = None
    """OpenTelemetry spans for sends, starts and attempts. None creates no spans, stores nothing and
    imports nothing. Defaults to None.
    """

    log_capture: LogCapture | None = None
    """Keep the log lines of tasks, for `horsies logs` and the dashboard. None keeps no lines. Defaults to
    None.
    """

    log_headers: list[str] = Field(default_factory=list)
    """The headers, such as a request id, that every log line about a task shows, including the lines of
    the worker's parent process. Defaults to [].
    """

    webhooks: list[Webhook] = Field(default_factory=list)
    """The webhooks, which send a request to an address when tasks or runs end; see
    [webhooks](webhooks.md). Defaults to [].
    """

    resend_on_transient_err: bool = False
    """Repeat a send up to three times after a transient database error, before the error is returned.
    Defaults to False.
    """

    @property
    def hard_cap_mode(self) -> bool:
        """Whether claimed tasks count against concurrency limits as running tasks do."""
        return self.prefetch_buffer == 0

    @property
    def effective_claim_lease_ms(self) -> int:
        """The lease of every claim: claim_lease_ms, or one minute if that is not set."""
        return DEFAULT_CLAIM_LEASE_MS if self.claim_lease_ms is None else self.claim_lease_ms

    @property
    def effective_claimer_heartbeat_interval_ms(self) -> int:
        """The interval between lease renewals: the configured one, or short enough for two renewals per
        lease.
        """
        interval = self.recovery.claimer_heartbeat_interval_ms
        if "claimer_heartbeat_interval_ms" in self.recovery.model_fields_set:
            return interval
        return min(interval, max(self.effective_claim_lease_ms // 2, _MIN_HEARTBEAT_INTERVAL_MS))

    def queues(self) -> list[CustomQueueConfig]:
        """Return this app's queues in the order in which workers serve them."""
        if self.queue_mode is QueueMode.CUSTOM:
            return sorted(self.custom_queues or [], key=lambda queue: queue.priority)
        name, priority = DEFAULT_QUEUE_NAME, DEFAULT_PRIORITY
        return [CustomQueueConfig(name=name, priority=priority)]

    def log_config(self, logger: logging.Logger | None = None) -> None:
        """Log the effective configuration with passwords masked; do nothing in a child process."""
        if os.environ.get("HORSIES_CHILD_PROCESS") == "1":
            return
        lines = "\n".join(f"  {name} = {value}" for name, value in _settings(self))
        (logger or logging.getLogger("horsies.config")).info("Configuration:\n%s", lines)

    @model_validator(mode="before")
    @classmethod
    def _refuse_url(cls, fields: Any) -> Any:
        if isinstance(fields, Mapping) and "database_url" in fields:
            raise ConfigurationError(
                "AppConfig takes the database as broker=PostgresConfig(database_url=...), not as "
                "database_url.",
                code=ErrorCode.BROKER_INVALID_URL,
                help_text='or write Horsies("postgresql://...") if you need no other setting',
            )
        return fields

    @model_validator(mode="after")
    def _check(self) -> Self:
        checks = [
            *self._queue_checks(),
            *self._claim_checks(),
            *self._exception_checks(),
            *self._webhook_checks(),
        ]
        raise_failed("AppConfig", checks)
        return self

    def _queue_checks(self) -> Iterator[Check]:
        mode, cap = ErrorCode.CONFIG_INVALID_QUEUE_MODE, ErrorCode.CONFIG_INVALID_CLUSTER_CAP
        is_custom = self.queue_mode is QueueMode.CUSTOM
        names = [queue.name for queue in self.custom_queues or []]
        yield (
            not is_custom and self.custom_queues is not None,
            mode,
            "custom_queues only counts in CUSTOM mode: set queue_mode=QueueMode.CUSTOM or leave "
            "custom_queues out",
        )
        yield (
            is_custom and not names,
            mode,
            "custom_queues must name at least one queue in CUSTOM mode",
        )
        for name in self.recovery.queue_retention.keys() - {queue.name for queue in self.queues()}:
            yield True, mode, f"recovery.queue_retention names {name!r}, which is not a queue"
        for name in repeated_names(names):
            yield is_custom, mode, f"custom_queues names the queue {name!r} more than once"
        longest = MAX_QUEUE_NAME_BYTES - len(channel_prefix(self.broker.schema_name))
        for name in (name for name in names if len(name) > longest):
            yield (
                is_custom,
                mode,
                f"custom_queues names the queue {name!r}, but with a schema other than public at most "
                f"{longest} bytes fit into a channel name; shorten it",
            )
        limit = 1 if self.cluster_wide_cap is None else self.cluster_wide_cap
        yield limit < 1, cap, "cluster_wide_cap must be at least 1, or None for no limit"
        yield (
            self.cluster_wide_cap is not None and limit >= 1 and self.prefetch_buffer > 0,
            cap,
            "cluster_wide_cap cannot be combined with prefetch_buffer: set prefetch_buffer=0 or "
            "leave the cap out",
        )

    def _claim_checks(self) -> Iterator[Check]:
        code = ErrorCode.CONFIG_INVALID_PREFETCH
        lease, age = self.effective_claim_lease_ms, self.max_claim_renew_age_ms
        yield self.prefetch_buffer < 0, code, "prefetch_buffer must be at least 0"
        lease_problem = self._lease_problem()
        yield lease_problem is not None, code, lease_problem or ""
        yield age < 1, code, "max_claim_renew_age_ms must be at least 1"
        yield (
            # Skip the comparison if the lease itself is invalid, because it would report the same
            # mistake again.
            1 <= age < lease and lease_problem is None,
            code,
            f"max_claim_renew_age_ms ({age}) must not be below the claim lease ({lease})",
        )

    def _lease_problem(self) -> str | None:
        lease = self.effective_claim_lease_ms
        smallest = 2 * self.effective_claimer_heartbeat_interval_ms
        if self.claim_lease_ms is None and self.prefetch_buffer > 0:
            return "prefetch_buffer above 0 needs claim_lease_ms to be set"
        if lease < 1:
            return "claim_lease_ms must be above 0, or None for 60,000"
        if lease < smallest:
            return (
                f"claim_lease_ms ({lease} in effect) must be at least {smallest}, twice the interval "
                "of the claimer heartbeat that renews it"
            )
        return None

    def _exception_checks(self) -> Iterator[Check]:
        default = self.default_unhandled_error_code
        for problem in (
            *validate_exception_mapper(self.exception_mapper),
            *validate_error_code_name(default, where="default_unhandled_error_code"),
        ):
            yield True, ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER, problem

    def _webhook_checks(self) -> Iterator[Check]:
        code, queues = ErrorCode.CONFIG_INVALID_WEBHOOK, [queue.name for queue in self.queues()]
        for name in repeated_names(hook.name for hook in self.webhooks):
            yield True, code, f"webhooks has the name {name!r} more than once"
        is_custom = self.queue_mode is QueueMode.CUSTOM
        for hook in self.webhooks:
            where = f"webhooks: the webhook {hook.name!r}"
            yield (
                is_custom and hook.queue_name not in queues,
                code,
                f"{where} needs a queue_name in CUSTOM mode: one of {', '.join(queues)}",
            )
            yield (
                not is_custom and hook.queue_name is not None,
                code,
                f"{where} has a queue_name, which needs queue_mode CUSTOM; leave it out",
            )


def _webhook_of(value: object) -> Webhook:
    from horsies.config.webhooks import Webhook

    return Webhook.model_validate(value)


def _schedules_of(value: object) -> ScheduleConfig:
    from horsies.config.schedules import ScheduleConfig

    return ScheduleConfig.model_validate(value)


def _settings(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        match value:
            case BaseModel() if name == "schedule":
                yield f"{prefix}{name}", mask_url(str(value))
            case BaseModel():
                yield from _settings(value, f"{prefix}{name}.")
            case [BaseModel(), *_] if name == "webhooks":
                yield f"{prefix}{name}", "; ".join(map(str, value))
            case [BaseModel(), *_]:
                for position, entry in enumerate(value):
                    yield from _settings(entry, f"{prefix}{name}[{position}].")
            case dict():
                shown = {kind.__name__: str(code) for kind, code in value.items()}
                yield f"{prefix}{name}", str(shown)
            case _:
                yield f"{prefix}{name}", mask_url(str(value))
