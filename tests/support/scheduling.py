"""Applications with schedules, the parts of their scheduler, and the rows that it writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any, TypeAlias

import psycopg
from psycopg import sql

from horsies.app import Horsies
from horsies.config.schedules import TaskSchedule, WorkflowSchedule
from horsies.db.pipeline import Pipeline
from horsies.db.statement import run_script
from horsies.db.statements.schedules import find_due_schedules
from horsies.retry import RetryPolicy
from horsies.scheduler import tick as tick_module
from horsies.scheduler.registry import Registry, store_configured
from horsies.scheduler.tick import TickResult
from horsies.task_result import TaskError, TaskResult
from horsies.timetable.patterns import IntervalSchedule
from horsies.workflow.definition import WorkflowDefinition
from horsies.workflow.nodes.nodes import SignalNode, SleepNode
from horsies.workflow.spec import WorkflowSpec
from tests.support.database import Database

MakeApp: TypeAlias = Callable[..., Horsies]

OWNER = "tests:app"
# A minute in the distant past, so that no second slot becomes due by accident.
LONG_AGO = datetime(2026, 6, 1, 12, tzinfo=UTC)


def schedule(name: str = "report", **fields: Any) -> TaskSchedule:
    defaults: dict[str, Any] = {
        "name": name,
        "task_name": "note",
        "pattern": IntervalSchedule(hours=1),
    }
    return TaskSchedule(**(defaults | fields))


def workflow_schedule(name: str = "books", **fields: Any) -> WorkflowSchedule:
    defaults: dict[str, Any] = {
        "name": name,
        "definition": "scheduled.books",
        "pattern": IntervalSchedule(hours=1),
    }
    return WorkflowSchedule(**(defaults | fields))


def define_tasks(app: Horsies) -> None:
    @app.task("note", queue_name="plain")
    def note(text: str = "") -> TaskResult[str, TaskError]:
        return TaskResult(ok=text)

    @app.task("dated", queue_name="plain")
    def dated(text: str, scheduled_for: datetime | None = None) -> TaskResult[str, TaskError]:
        return TaskResult(ok=f"{text} {scheduled_for}")

    @app.task(
        "careful",
        queue_name="plain",
        retry_policy=RetryPolicy.fixed([7, 8], auto_retry_for=["WORKER_CRASHED"]),
        timeout_ms=5_000,
    )
    def careful(a: int, b: int = 2) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    @app.task("picky", queue_name="plain")
    def picky(first: int, /, second: int = 0) -> TaskResult[int, TaskError]:
        return TaskResult(ok=first + second)


def define_workflows(app: Horsies) -> None:
    note = app.tasks()["note"]

    class Books(WorkflowDefinition[str]):
        name = "books"
        definition_key = "scheduled.books"
        count = note.node()(text="count")
        close = note.node(waits_for=[count])(text="close")

        class Meta:
            output = "close"

    class Dated(WorkflowDefinition[str]):
        name = "dated"
        definition_key = "scheduled.dated"

        @classmethod
        def build_with(
            cls, app: Horsies, *, label: str, days: list[int], scheduled_for: datetime
        ) -> WorkflowSpec[str]:
            if label == "broken":
                raise RuntimeError("no data of that day")
            days.append(1)
            text = f"{label} {len(days)} {scheduled_for.astimezone(UTC).isoformat()}"
            only = note.node(node_id="only")(text=text)
            return app.workflow(cls.name, [only], output=only, definition_key=cls.definition_key)

    class Waiting(WorkflowDefinition[Any]):
        name = "waiting"
        definition_key = "scheduled.waiting"

        @classmethod
        def build_with(cls, app: Horsies) -> WorkflowSpec[Any]:
            return app.workflow(
                cls.name,
                [
                    note.node(node_id="plain")(text="plain"),
                    note.node(node_id="urgent", expires_in=timedelta(minutes=1))(text="urgent"),
                    SleepNode(100, node_id="sleep"),
                    SleepNode(until=datetime(2090, 1, 1, tzinfo=UTC), node_id="until"),
                    SignalNode("go", node_id="signal"),
                ],
                definition_key=cls.definition_key,
            )


def registry_of(app: Horsies, owner: str = OWNER) -> Registry:
    return Registry.of(app.config, app.definitions(), owner, app)


def enter(connection: Database, app: Horsies, *, at_start: bool = True) -> Registry:
    """Store the schedules of an application, as its scheduler does when it starts."""
    registry = registry_of(app)
    run_script(connection, store_configured(registry, at_start=at_start))
    return registry


def refresh(connection: Database, registry: Registry, *, has_watched: bool = True) -> None:
    """Run a scheduler's minutely job."""
    script = store_configured(registry, at_start=False, has_watched=lambda: has_watched)
    run_script(connection, script)


def tick(
    connection: Database, registry: Registry, refused: tick_module.Refused | None = None
) -> TickResult:
    """Run one tick of a scheduler, on a connection of the test."""
    return tick_module.tick(Pipeline(connection, prepared=False), registry, refused)


def tick_at_once(url: str, registry: Registry, schedulers: int, times: int) -> None:
    """Tick this many times in each of several schedulers that start at the same time."""
    gate = threading.Barrier(schedulers)

    def serve(_: int) -> None:
        with psycopg.connect(url, autocommit=True) as own:
            gate.wait(30)
            for _ in range(times):
                tick(own, registry)

    with ThreadPoolExecutor(schedulers) as threads:
        list(threads.map(serve, range(schedulers)))  # Raise the first exception of a scheduler.


def state(connection: Database, name: str = "report") -> dict[str, Any]:
    """Return the stored state of a schedule, with times in UTC."""
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        row = cursor.execute(
            "SELECT * FROM horsies_schedule_state WHERE schedule_name = %s", (name,)
        ).fetchone()
    assert row is not None
    return {key: in_utc(value) for key, value in row.items()}


def in_utc(value: Any) -> Any:
    return value.astimezone(UTC) if isinstance(value, datetime) else value


def make_due(connection: Database, due_at: datetime, *names: str) -> None:
    """Set the next slot of these schedules, or of all schedules, to this time."""
    connection.execute(
        "UPDATE horsies_schedule_state SET next_run_at = %s "
        "WHERE %s::text[] = '{}' OR schedule_name = ANY(%s)",
        (due_at, list(names), list(names)),
    )


def database_now(connection: Database) -> datetime:
    row = connection.execute("SELECT clock_timestamp()").fetchone()
    assert row is not None
    return row[0].astimezone(UTC)  # type: ignore[no-any-return]


def ago(connection: Database, seconds: float) -> datetime:
    return database_now(connection) - timedelta(seconds=seconds)


def tasks(connection: Database, name: str | None = "report") -> list[dict[str, Any]]:
    """Return the tasks of a schedule, or of all schedules, by slot."""
    return _by_slot(connection, "horsies_tasks", name)


def runs(connection: Database, name: str | None = "books") -> list[dict[str, Any]]:
    """Return the runs of a schedule, or of all schedules, by slot."""
    return _by_slot(connection, "horsies_workflows", name)


def _by_slot(connection: Database, table: str, name: str | None) -> list[dict[str, Any]]:
    query = sql.SQL(
        "SELECT *, id::text AS id FROM {} WHERE %(name)s::text IS NULL OR schedule_name = %(name)s "
        "ORDER BY scheduled_for, schedule_name"
    )
    with connection.cursor(row_factory=psycopg.rows.dict_row) as cursor:
        rows = cursor.execute(query.format(sql.Identifier(table)), {"name": name}).fetchall()
    return [{key: in_utc(value) for key, value in row.items()} for row in rows]


def stored_schedule(connection: Database, app: Horsies) -> TaskSchedule | WorkflowSchedule:
    """Make the only schedule due, and return it as a scheduler reads it from the database."""
    make_due(connection, LONG_AGO)
    registry = registry_of(app)
    (due,) = find_due_schedules.run(connection, registry.find_due()[1])
    entry = registry.entry_of(due)
    assert entry is not None
    return entry.schedule


def run_slots(connection: Database, name: str | None = "books") -> list[datetime]:
    return [row["scheduled_for"] for row in runs(connection, name)]


def slots(connection: Database, name: str | None = "report") -> list[datetime]:
    return [row["scheduled_for"] for row in tasks(connection, name)]
