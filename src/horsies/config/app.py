"""The configuration of an app: queues, claiming, recovery, resilience, payload limits.

Read by every station of the line producer -> SQL -> turn -> child -> report -> result and changed
by none: the objects are frozen and checked when they are built. A value out of its range is a
pydantic error; values that contradict each other are HRS errors, all of one object together.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from enum import StrEnum
from typing import Annotated, Self, assert_never

from pydantic import BaseModel, Field, PlainValidator, model_validator

from horsies.config.postgres import PostgresConfig
from horsies.config.schedules import ScheduleConfig
from horsies.database_url import mask_url
from horsies.errors import ErrorCode
from horsies.retry import ExceptionMapper, validate_error_code_name, validate_exception_mapper
from horsies.validation import FROZEN_MODEL, SECONDS_MAX, Problem, raise_problems

__all__ = [
    "DEFAULT_CLAIM_LEASE_MS",
    "DEFAULT_PRIORITY",
    "DEFAULT_QUEUE_NAME",
    "QUEUE_CHANNEL_PREFIX",
    "AppConfig",
    "CustomQueueConfig",
    "PayloadConfig",
    "PostgresConfig",
    "QueueMode",
    "RecoveryConfig",
    "WorkerResilienceConfig",
    "queue_name_problem",
]

DEFAULT_QUEUE_NAME = "default"
DEFAULT_PRIORITY = 100
QUEUE_CHANNEL_PREFIX = "task_queue_"
DEFAULT_CLAIM_LEASE_MS = 60_000

# PostgreSQL cuts identifiers, channel names included, after 63 bytes without a word.
MAX_QUEUE_NAME_BYTES = 63 - len(QUEUE_CHANNEL_PREFIX)

_SAFE_QUEUE_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_MIN_HEARTBEAT_INTERVAL_MS = 1_000


class QueueMode(StrEnum):
    """Whether tasks share one queue or name one of their own."""

    DEFAULT = "default"
    CUSTOM = "custom"


def queue_name_problem(name: str) -> str | None:
    """Return one sentence saying why a queue cannot have this name, or None when it can."""
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


class CustomQueueConfig(BaseModel):
    """One queue of an app in CUSTOM mode.

    Example:
        CustomQueueConfig(name="api_calls", priority=1, max_concurrency=5)
    """

    model_config = FROZEN_MODEL

    name: str
    """What tasks call the queue: 1 to 52 letters (A-Z, a-z), digits, `_`, `.` and `-`. Unique in
    the app. Required."""

    priority: int = Field(default=1, ge=1, le=100)
    """The order in which workers serve queues, from 1 (first) to 100 (last). Defaults to 1."""

    max_concurrency: int | None = Field(default=5, ge=0)
    """How many tasks of this queue may be in flight in the whole cluster, at least 0. 0 pauses the
    queue: tasks wait, none is claimed. None sets no limit and spares the counting. Defaults to
    5."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problem = queue_name_problem(self.name)
        if problem is not None:
            raise_problems("CustomQueueConfig", [(ErrorCode.CONFIG_INVALID_QUEUE_MODE, problem)])
        return self


class RecoveryConfig(BaseModel):
    """How the fleet notices a dead worker, and how long finished records are kept."""

    model_config = FROZEN_MODEL

    auto_requeue_stale_claimed: bool = True
    """Give tasks back to their queue when the worker that claimed them went silent before starting
    them. Defaults to True."""

    auto_fail_stale_running: bool = True
    """End attempts whose worker went silent: the task fails with WORKER_CRASHED, or is retried when
    its policy lists that code. Defaults to True."""

    claimed_stale_threshold_ms: int = Field(default=120_000, ge=1_000, le=3_600_000)
    """Milliseconds of silence after which a claimed task counts as abandoned, from 1,000 to
    3,600,000 (an hour) and at least twice claimer_heartbeat_interval_ms. Defaults to 120,000."""

    running_stale_threshold_ms: int = Field(default=300_000, ge=1_000, le=7_200_000)
    """Milliseconds of silence after which a running task counts as crashed, from 1,000 to
    7,200,000 (two hours) and at least twice runner_heartbeat_interval_ms. Defaults to 300,000."""

    check_interval_ms: int = Field(default=30_000, ge=1_000, le=600_000)
    """Milliseconds between two looks for abandoned work, from 1,000 to 600,000 (ten minutes).
    Defaults to 30,000."""

    runner_heartbeat_interval_ms: int = Field(default=30_000, ge=1_000, le=120_000)
    """Milliseconds between two signs of life of a running task, from 1,000 to 120,000 (two
    minutes). Defaults to 30,000."""

    claimer_heartbeat_interval_ms: int = Field(default=30_000, ge=1_000, le=120_000)
    """Milliseconds between two renewals of the leases on claimed tasks, from 1,000 to 120,000 (two
    minutes). When left out, a lease below a minute makes it half of that lease. Defaults to
    30,000."""

    worker_state_snapshot_interval_ms: int = Field(default=30_000, ge=1_000, le=300_000)
    """Milliseconds between two snapshots a worker stores of itself, from 1,000 to 300,000 (five
    minutes). Defaults to 30,000."""

    heartbeat_retention_hours: int | None = Field(default=24, ge=1, le=8_760)
    """Hours heartbeat rows are kept, from 1 to 8,760 (a year). None keeps them for ever. Defaults
    to 24."""

    worker_state_retention_hours: int | None = Field(default=168, ge=1, le=8_760)
    """Hours worker snapshots are kept, from 1 to 8,760 (a year). None keeps them for ever.
    Defaults to 168 (a week)."""

    terminal_record_retention_hours: int | None = Field(default=720, ge=1, le=43_800)
    """Hours finished tasks and workflows are kept, from 1 to 43,800 (five years). None keeps them
    for ever. Defaults to 720 (thirty days)."""

    paused_workflow_auto_cancel_after: timedelta | None = None
    """How long a workflow may stay paused before it ends as EXPIRED, above 0 and at most 100 years.
    None lets it wait for ever. Defaults to None."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        problems = [*self._threshold_problems("running", "runner")]
        problems += self._threshold_problems("claimed", "claimer")
        allowed = self.paused_workflow_auto_cancel_after
        if allowed is not None and not timedelta(0) < allowed <= timedelta(seconds=SECONDS_MAX):
            message = (
                "RecoveryConfig.paused_workflow_auto_cancel_after must be above 0 and at most 100 "
                "years, or None"
            )
            problems.append((ErrorCode.CONFIG_INVALID_RECOVERY, message))
        raise_problems("RecoveryConfig", problems)
        return self

    def _threshold_problems(self, state: str, who: str) -> Iterator[Problem]:
        threshold: int = getattr(self, f"{state}_stale_threshold_ms")
        interval: int = getattr(self, f"{who}_heartbeat_interval_ms")
        if threshold < 2 * interval:
            yield (
                ErrorCode.CONFIG_INVALID_RECOVERY,
                f"RecoveryConfig.{state}_stale_threshold_ms ({threshold}) must be at least twice "
                f"{who}_heartbeat_interval_ms ({interval}), or one late heartbeat looks like a "
                "crash",
            )


class WorkerResilienceConfig(BaseModel):
    """How a worker behaves while the database is away or silent."""

    model_config = FROZEN_MODEL

    db_retry_initial_ms: int = Field(default=500, ge=100, le=60_000)
    """Milliseconds before the first new try after a database error, from 100 to 60,000. Every
    further wait is doubled, varied by up to 25 %. Defaults to 500."""

    db_retry_max_ms: int = Field(default=30_000, ge=500, le=300_000)
    """Milliseconds no wait is meant to exceed, from 500 to 300,000 and not below
    db_retry_initial_ms. Defaults to 30,000."""

    db_retry_max_attempts: int = Field(default=0, ge=0, le=10_000)
    """How many new tries in a row a worker makes before it gives up and stops, from 0 to 10,000.
    0 never gives up. Defaults to 0."""

    notify_poll_interval_ms: int = Field(default=5_000, ge=1_000, le=300_000)
    """Milliseconds after which a worker looks for tasks although no notification came, from 1,000
    to 300,000. Defaults to 5,000."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        initial, largest = self.db_retry_initial_ms, self.db_retry_max_ms
        if largest < initial:
            message = (
                f"WorkerResilienceConfig.db_retry_max_ms ({largest}) must not be below "
                f"db_retry_initial_ms ({initial})"
            )
            problem = (ErrorCode.CONFIG_INVALID_RESILIENCE, message)
            raise_problems("WorkerResilienceConfig", [problem])
        return self


class PayloadConfig(BaseModel):
    """How large the stored arguments or the stored result of one task may be."""

    model_config = FROZEN_MODEL

    warn_bytes: int = Field(default=1_048_576, ge=1)
    """Bytes of JSON text above which a warning is logged, at least 1 and at most reject_bytes.
    Defaults to 1,048,576 (1 MiB)."""

    reject_bytes: int | None = Field(default=16_777_216, ge=1)
    """Bytes of JSON text above which the payload is refused, at least 1. None sets no limit.
    Defaults to 16,777,216 (16 MiB)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.reject_bytes is not None and self.warn_bytes > self.reject_bytes:
            raise ValueError(
                f"warn_bytes ({self.warn_bytes}) must not exceed reject_bytes "
                f"({self.reject_bytes}); lower warn_bytes as well"
            )
        return self


def _copied_mapper(value: object) -> object:
    # Pydantic would report a bad entry in its own words; ours carry a code and come with the rest.
    return dict(value) if isinstance(value, Mapping) else value


class AppConfig(BaseModel):
    """Everything an app needs to know.

    Example:
        AppConfig(broker=PostgresConfig.from_env(), cluster_wide_cap=50)
    """

    model_config = FROZEN_MODEL

    broker: PostgresConfig
    """The database. Required."""

    queue_mode: QueueMode = QueueMode.DEFAULT
    """DEFAULT puts all tasks into one queue named `default`; CUSTOM makes every task name one of
    custom_queues. Defaults to DEFAULT."""

    custom_queues: list[CustomQueueConfig] | None = None
    """The queues of CUSTOM mode, at least one, with unique names. Must be None in DEFAULT mode.
    Defaults to None."""

    cluster_wide_cap: int | None = None
    """How many tasks may be in flight in the whole cluster, running and claimed ones together, at
    least 1. Cannot be combined with prefetch_buffer. None sets no limit. Defaults to None."""

    prefetch_buffer: int = 0
    """How many tasks a worker may claim beyond those its processes can run at once, at least 0.
    Above 0 claim_lease_ms is required and concurrency limits become soft: they count running tasks
    only. Defaults to 0."""

    claim_lease_ms: int | None = None
    """Milliseconds a claimed task that has not started belongs to its worker unless renewed, at
    least 2,000 and at least twice recovery.claimer_heartbeat_interval_ms where that is set. None
    means 60,000. Defaults to None."""

    max_claim_renew_age_ms: int = 180_000
    """Milliseconds after its claim until which a waiting task's lease is renewed, at least one
    lease. Defaults to 180,000."""

    recovery: RecoveryConfig = Field(default_factory=RecoveryConfig)
    """Heartbeats, recovery of abandoned work, retention. Defaults to RecoveryConfig()."""

    resilience: WorkerResilienceConfig = Field(default_factory=WorkerResilienceConfig)
    """Behaviour of workers without a database. Defaults to WorkerResilienceConfig()."""

    payload: PayloadConfig = Field(default_factory=PayloadConfig)
    """Size limits of arguments and results. Defaults to PayloadConfig()."""

    schedule: ScheduleConfig | None = None
    """The schedules a scheduler serves. None means that none may run. Defaults to None."""

    exception_mapper: Annotated[ExceptionMapper, PlainValidator(_copied_mapper)] = Field(
        default_factory=dict
    )
    """The error codes exceptions of task functions stand for, by exact class. A task's own mapper
    comes first. Defaults to {}."""

    default_unhandled_error_code: Annotated[str, PlainValidator(lambda value: value)] = (
        "UNHANDLED_EXCEPTION"
    )
    """The error code of an exception no mapper names. Defaults to UNHANDLED_EXCEPTION."""

    resend_on_transient_err: bool = False
    """Let a send that met a passing database failure try again up to three times before it
    returns its error. Defaults to False."""

    @property
    def hard_cap_mode(self) -> bool:
        """Whether claimed tasks count against concurrency limits like running ones."""
        return self.prefetch_buffer == 0

    @property
    def effective_claim_lease_ms(self) -> int:
        """The lease every claim gets: claim_lease_ms, or a minute."""
        return DEFAULT_CLAIM_LEASE_MS if self.claim_lease_ms is None else self.claim_lease_ms

    @property
    def effective_claimer_heartbeat_interval_ms(self) -> int:
        """How often leases are renewed: as configured, or else at least twice per lease."""
        interval = self.recovery.claimer_heartbeat_interval_ms
        if "claimer_heartbeat_interval_ms" in self.recovery.model_fields_set:
            return interval
        return min(interval, max(self.effective_claim_lease_ms // 2, _MIN_HEARTBEAT_INTERVAL_MS))

    def queues(self) -> list[CustomQueueConfig]:
        """Return the queues of this app in the order workers serve them."""
        match self.queue_mode:
            case QueueMode.DEFAULT:
                return [
                    CustomQueueConfig(
                        name=DEFAULT_QUEUE_NAME, priority=DEFAULT_PRIORITY, max_concurrency=None
                    )
                ]
            case QueueMode.CUSTOM:
                return sorted(self.custom_queues or [], key=lambda queue: queue.priority)
            case _:
                assert_never(self.queue_mode)

    def log_config(self, logger: logging.Logger | None = None) -> None:
        """Log the configuration in effect, passwords masked; silent in child processes."""
        if os.environ.get("HORSIES_CHILD_PROCESS") == "1":
            return
        lines = "\n".join(f"  {name} = {value}" for name, value in _settings(self))
        (logger or logging.getLogger("horsies.config")).info("Configuration:\n%s", lines)

    @model_validator(mode="after")
    def _check(self) -> Self:
        raise_problems("AppConfig", self._problems())
        return self

    def _problems(self) -> Iterator[Problem]:
        for message in self._queue_problems():
            yield ErrorCode.CONFIG_INVALID_QUEUE_MODE, message
        for message in self._cap_problems():
            yield ErrorCode.CONFIG_INVALID_CLUSTER_CAP, message
        for message in self._claim_problems():
            yield ErrorCode.CONFIG_INVALID_PREFETCH, message
        for message in self._exception_problems():
            yield ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER, message

    def _queue_problems(self) -> Iterator[str]:
        if self.queue_mode is QueueMode.DEFAULT:
            if self.custom_queues is not None:
                yield (
                    "AppConfig.custom_queues only counts in CUSTOM mode: set "
                    "queue_mode=QueueMode.CUSTOM or leave custom_queues out"
                )
            return
        names = [queue.name for queue in self.custom_queues or []]
        if not names:
            yield "AppConfig.custom_queues must name at least one queue in CUSTOM mode"
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"AppConfig.custom_queues names the queue {name!r} more than once"

    def _cap_problems(self) -> Iterator[str]:
        if self.cluster_wide_cap is None:
            return
        if self.cluster_wide_cap < 1:
            yield "AppConfig.cluster_wide_cap must be at least 1, or None for no limit"
        elif self.prefetch_buffer > 0:
            yield (
                "AppConfig.cluster_wide_cap cannot be combined with prefetch_buffer: "
                "set prefetch_buffer=0 or leave the cap out"
            )

    def _claim_problems(self) -> Iterator[str]:
        if self.prefetch_buffer < 0:
            yield "AppConfig.prefetch_buffer must be at least 0"
        lease_problem = self._lease_problem()
        if lease_problem is not None:
            yield lease_problem
        if self.max_claim_renew_age_ms < 1:
            yield "AppConfig.max_claim_renew_age_ms must be at least 1"
        # Against a lease that is wrong itself the comparison would only repeat the mistake.
        elif lease_problem is None and self.max_claim_renew_age_ms < self.effective_claim_lease_ms:
            yield (
                f"AppConfig.max_claim_renew_age_ms ({self.max_claim_renew_age_ms}) must not be "
                f"below the claim lease ({self.effective_claim_lease_ms})"
            )

    def _lease_problem(self) -> str | None:
        lease = self.effective_claim_lease_ms
        if self.claim_lease_ms is None and self.prefetch_buffer > 0:
            return "AppConfig.prefetch_buffer above 0 needs claim_lease_ms to be set"
        if lease < 1:
            return "AppConfig.claim_lease_ms must be above 0, or None for 60,000"
        smallest = 2 * self.effective_claimer_heartbeat_interval_ms
        if lease < smallest:
            return (
                f"AppConfig.claim_lease_ms ({lease} in effect) must be at least {smallest}, twice "
                "the interval of the claimer heartbeat that renews it"
            )
        return None

    def _exception_problems(self) -> Iterator[str]:
        yield from validate_exception_mapper(
            self.exception_mapper, where="AppConfig.exception_mapper"
        )
        yield from validate_error_code_name(
            self.default_unhandled_error_code, where="AppConfig.default_unhandled_error_code"
        )


def _settings(model: BaseModel, prefix: str = "") -> Iterator[tuple[str, str]]:
    for name in type(model).model_fields:
        value = getattr(model, name)
        match value:
            case ScheduleConfig():
                yield f"{prefix}{name}", mask_url(str(value))
            case BaseModel():
                yield from _settings(value, f"{prefix}{name}.")
            case [BaseModel(), *_]:
                for position, entry in enumerate(value):
                    yield from _settings(entry, f"{prefix}{name}[{position}].")
            case dict():
                shown = {kind.__name__: str(code) for kind, code in value.items()}
                yield f"{prefix}{name}", str(shown)
            case _:
                yield f"{prefix}{name}", mask_url(str(value))
