"""WorkerConfig: one worker's settings, from the command line's flags and the application's configuration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from horsies.app import Horsies
from horsies.config.postgres import PostgresConfig
from horsies.db.database import pool_sizes
from horsies.modules import failure_at
from horsies.worker.pool.launcher import StartMethod, default_start_method
from horsies.worker.pool.window import WIDTH_MAX

DEFAULT_MAX_TASKS_PER_CHILD = 100
DEFAULT_ASYNC_SLOTS = 100
NAME_CHARACTERS_MAX = 100
DEFAULT_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The settings of one worker: the flags of `horsies worker`, and the application's settings for
    connections.

    For the two claim limits, zero means "as many as fit". The seven fields about connections are copies; set
    them in ``PostgresConfig``.
    """

    app_locator: str
    """The path to the application, as passed to the command; empty if the command found the application
    itself.
    """
    processes: int
    """The number of child processes."""
    queues: Sequence[str]
    """The names of the queues to serve, in order."""
    imports: Sequence[str] = ()
    """The task modules, as passed to ``discover_tasks``."""
    max_claim_batch: int = 0
    """The maximum number of tasks to claim from a queue at a time; 0 means as many as the
    children can take.
    """
    max_claim_per_worker: int = 0
    """The maximum number of tasks to hold at a time; 0 means as many as fit."""
    dsn: str | None = field(default=None, repr=False)
    """The address of the database: ``database_url``."""
    session_dsn: str | None = field(default=None, repr=False)
    """The address for LISTEN and migrations: ``session_database_url``. If None, ``dsn`` is used."""
    pgbouncer_transaction_mode: bool = False
    """Whether prepared statements are off, for PgBouncer in transaction mode."""
    parent_pool_size: int | None = None
    """How many connections the parent process keeps open for application code: ``worker_pool_size``."""
    parent_max_overflow: int | None = None
    """How many connections the parent process may open beyond ``pool_size``: ``worker_max_overflow``."""
    child_pool_min_size: int | None = None
    """How many connections a child keeps open after it has sent its first task:
    ``worker_child_pool_min_size``.
    """
    child_pool_max_size: int | None = None
    """How many connections a child may have open: ``worker_child_pool_max_size``."""
    window: int = WIDTH_MAX
    """The maximum number of short tasks that a child may hold; 0 means one task at a time."""
    max_tasks_per_child: int = DEFAULT_MAX_TASKS_PER_CHILD
    """The number of tasks after which a child is replaced; 0 means never."""
    max_memory_per_child_mb: int | None = None
    """The resident memory, in megabytes, above which a child is replaced after its task."""
    start_method: StartMethod = field(default_factory=default_start_method)
    """How children are started."""
    shutdown_grace_seconds: float | None = None
    """How long a stopping worker waits for running tasks."""
    loglevel: str = "INFO"
    """The lowest level of log lines."""
    log_format: str = "text"
    """The format of log lines: text or JSON."""
    prefetch_buffer: int = 0
    """How many tasks to claim beyond the running tasks; copied from ``AppConfig``."""
    name: str | None = None
    """The name of the worker, shown to operators."""
    metrics_host: str = DEFAULT_HOST
    """The address on which metrics are served."""
    metrics_port: int | None = None
    """The port for metrics; None serves no metrics."""
    async_children: int = 0
    """The number of children for ``async def`` tasks."""
    async_slots: int = DEFAULT_ASYNC_SLOTS
    """How many tasks each async child runs at a time."""
    burst: bool = False
    """Whether the worker stops when no task is due."""
    debug: bool = False
    """Whether the worker runs one task at a time, in a child that shares the worker's terminal."""

    @property
    def places(self) -> int:
        """How many tasks may run at a time."""
        return self.processes + self.async_children * self.async_slots

    @property
    def effective_claims(self) -> int:
        """The maximum number of tasks that this worker may hold at a time, running or claimed ahead of time.

        Tasks that wait in a window behind another task count only against an explicit limit.
        """
        return self.held_max if self.max_claim_per_worker else self.places + self.prefetch_buffer

    @property
    def window_width(self) -> int:
        """The maximum number of tasks that a child may hold; 0 with prefetching, which requires one task per
        child.
        """
        return 0 if self.prefetch_buffer else self.window

    @property
    def held_max(self) -> int:
        """The number of tasks that this worker holds when all windows are full."""
        behind = self.processes * (max(1, self.window_width) - 1)
        most = self.places + behind + self.prefetch_buffer
        return min(self.max_claim_per_worker or most, most)


def with_connections(config: WorkerConfig, broker: PostgresConfig) -> WorkerConfig:
    """Return the settings with the connections that this worker and its children will open."""
    size, most = pool_sizes(broker, "worker")
    return replace(
        config,
        dsn=broker.database_url,
        session_dsn=broker.session_database_url,
        pgbouncer_transaction_mode=broker.pgbouncer_transaction_mode,
        parent_pool_size=size,
        parent_max_overflow=most - size,
        child_pool_min_size=broker.worker_child_pool_min_size,
        child_pool_max_size=broker.worker_child_pool_max_size,
    )


def refuse_bad_limits(config: WorkerConfig) -> None:
    """Raise HRS-206 for flags with unusable values."""
    memory_mb, grace = config.max_memory_per_child_mb, config.shutdown_grace_seconds
    problems = {
        "--processes must be at least 1, or 0 with --async-children": config.processes < 0
        or config.places < 1,
        "--async-children must be 0 (none) or more": config.async_children < 0,
        "--async-slots must be at least 1": config.async_slots < 1,
        "--max-claim-batch must be 0 (fill all children) or more": config.max_claim_batch < 0,
        "--max-claim-per-worker must be 0 (all children) or more": config.max_claim_per_worker < 0,
        f"--window must be 0 (one task at a time) to {WIDTH_MAX}": not 0
        <= config.window
        <= WIDTH_MAX,
        "--max-tasks-per-child must be 0 (never) or at least 2": config.max_tasks_per_child < 0
        or config.max_tasks_per_child == 1,
        "--max-memory-per-child-mb must be above 0": memory_mb is not None and memory_mb <= 0,
        "--shutdown-grace must be 0 or more seconds": grace is not None and grace < 0,
        f"--name must be 1 to {NAME_CHARACTERS_MAX} printable characters": config.name is not None
        and not (config.name.isprintable() and 0 < len(config.name.strip()) <= NAME_CHARACTERS_MAX),
    }
    for problem, is_present in problems.items():
        if is_present:
            raise failure_at(None, f"{problem}.")


def served_queues(
    app: Horsies, only: Sequence[str] | None = None, excluded: Sequence[str] | None = None
) -> list[str]:
    """Return a worker's queues in the order in which it serves them: by priority, then as configured.

    Each item in ``only`` (--queues) and ``excluded`` (--exclude-queues) has names separated by commas.
    Raises HRS-206 for an unknown name, or if no queue remains.
    """
    known = [queue.name for queue in app.config.queues()]
    chosen = _named_queues("--queues", only, known)
    left_out = _named_queues("--exclude-queues", excluded, known) or ()
    served = [name for name in known if (chosen is None or name in chosen) and name not in left_out]
    if not served:
        raise failure_at(
            None,
            "--queues and --exclude-queues leave no queue to serve.",
            help_text=f"the queues of this application are: {', '.join(known)}",
        )
    return served


def _named_queues(
    flag: str, values: Sequence[str] | None, known: Sequence[str]
) -> Sequence[str] | None:
    if not values:
        return None
    names = [name.strip() for value in values for name in value.split(",") if name.strip()]
    if unknown := [name for name in names if name not in known]:
        raise failure_at(
            None,
            f"{flag} names {', '.join(map(repr, unknown))}, which this application does not have.",
            help_text=f"choose from: {', '.join(known)}",
        )
    return names


def describe_caps(app: Horsies) -> str:
    """Describe every cap that limits the claims of this application's workers."""
    cap = app.config.cluster_wide_cap
    parts = [] if cap is None else [f"cluster {cap}"]
    parts += [f"{name} {cap}" for name, cap in _queue_caps(app)]
    parts += [f"{queue.name} {queue.rate}" for queue in app.config.queues() if queue.rate]
    return ", ".join(parts) or "none"


def _queue_caps(app: Horsies) -> list[tuple[str, int]]:
    queues = app.config.queues()
    return [(one.name, one.max_concurrency) for one in queues if one.max_concurrency is not None]


def describe_concurrency(app: Horsies, config: WorkerConfig) -> str:
    cap, claims = app.config.cluster_wide_cap, config.effective_claims
    lowered = f" (lowered from {config.max_claim_per_worker} to the most that the worker can hold)"
    shared = f", async_children={config.async_children}, async_slots={config.async_slots}"
    return (
        f"Concurrency config: processes={config.processes}, "
        f"cluster_wide_cap={'unlimited' if cap is None else cap}, "
        f"max_claim_per_worker={claims}{lowered if config.max_claim_per_worker > claims else ''}, "
        f"max_claim_batch={config.max_claim_batch}, "
        f"queue_caps={','.join(f'{name}:{cap}' for name, cap in _queue_caps(app)) or 'none'}"
        f"{shared if config.async_children else ''}"
    )
