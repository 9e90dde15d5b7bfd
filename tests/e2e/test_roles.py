"""The roles of docs/security.md: each can do its work, and has no right beyond it."""

from __future__ import annotations

import re
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit, urlunsplit

import psycopg
import pytest

from horsies import (
    AppConfig,
    Horsies,
    OnError,
    PostgresConfig,
    SignalNode,
    TaskError,
    TaskResult,
)
from horsies.cli import main
from horsies.codec.calls import EncodedCall
from horsies.db.database import Database as Connections
from horsies.db.migrate import prepare_schema
from horsies.monitor.actions import retry_task
from tests.support.routes import FLEETS
from tests.support.schedulers import every, slots
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, REPOSITORY, Fleet, RunningWorker

PAGE = REPOSITORY / "docs" / "security.md"
OWNER, WORKER, PRODUCER, VIEWER = (
    f"horsies_{role}" for role in ("owner", "worker", "producer", "viewer")
)
RIGHTS = ("SELECT", "INSERT", "UPDATE", "DELETE", "TRUNCATE", "REFERENCES", "TRIGGER")
OF_PRODUCERS = {
    "horsies_migrations": {"SELECT"},
    "horsies_task_attempts": {"SELECT"},
    "horsies_task_progress": {"SELECT"},
    "horsies_task_defaults": {"SELECT"},
    "horsies_lanes": {"SELECT"},
    "horsies_webhooks": {"SELECT"},
    "horsies_workers": {"SELECT"},
    "horsies_refusals": {"SELECT"},
    "horsies_deadlines": {"SELECT"},
    "horsies_tasks": {"SELECT", "INSERT", "UPDATE"},
    "horsies_workflows": {"SELECT", "INSERT", "UPDATE"},
    "horsies_workflow_tasks": {"SELECT", "INSERT", "UPDATE"},
    "horsies_workflow_signals": {"SELECT", "INSERT", "DELETE"},
    "horsies_task_signals": {"SELECT", "INSERT"},
    "horsies_steps": {"SELECT", "INSERT"},
    "horsies_payloads": {"SELECT", "INSERT"},
    "horsies_payload_owners": {"SELECT", "INSERT", "DELETE"},
    "horsies_parked": {"SELECT", "UPDATE", "DELETE"},
    "horsies_actions": {"INSERT"},
}
COMMANDS = (
    ("health",),
    ("history",),
    ("status",),
    ("workers",),
    ("queues",),
    ("tasks",),
    ("workflows",),
    ("workflow", "audit"),
    ("schedules",),
)


@dataclass(frozen=True)
class Installed:
    """A database with the roles and grants of the documentation, under names of this test's own."""

    url: str
    names: dict[str, str]

    def url_of(self, role: str) -> str:
        parts = urlsplit(self.url)
        option = f"options=-c%20role%3D{self.names[role]}"
        return urlunsplit(parts._replace(query="&".join(filter(None, [parts.query, option]))))

    def config(self, role: str) -> PostgresConfig:
        return PostgresConfig(database_url=self.url_of(role), schema="horsies")

    def rights(self, role: str, table: str) -> set[str]:
        with psycopg.connect(self.url) as connection:
            found = connection.execute(
                "SELECT right_name FROM unnest(%s::text[]) AS right_name "
                "WHERE has_table_privilege(%s, 'horsies.' || %s, right_name)",
                (list(RIGHTS), self.names[role], table),
            )
            return {right for (right,) in found}

    def tables(self) -> list[str]:
        with psycopg.connect(self.url) as connection:
            query = "SELECT tablename FROM pg_tables WHERE schemaname = 'horsies'"
            return [name for (name,) in connection.execute(query)]


@pytest.fixture
def installed(database_url: str) -> Iterator[Installed]:
    names = {role: f"{role}_{uuid.uuid4().hex[:8]}" for role in (OWNER, WORKER, PRODUCER, VIEWER)}
    text = "\n".join(re.findall(r"```sql\n(.*?)```", PAGE.read_text(), re.DOTALL))
    for role, name in names.items():
        text = re.sub(rf"\b{role}\b", name, text)
    roles_sql, grants_sql = text.split("-- horsies migrate\n")
    found = Installed(database_url, names)
    with psycopg.connect(database_url, autocommit=True) as admin:
        try:
            admin.execute(roles_sql.encode())
            prepare_schema(Connections(found.config(OWNER)))
            admin.execute(grants_sql.encode())
            yield found
        finally:
            for name in names.values():
                admin.execute(f"DROP OWNED BY {name} CASCADE; DROP ROLE {name}".encode())


def test_no_role_has_more_rights_than_documented(installed: Installed) -> None:
    for table in installed.tables():
        writes = set() if table == "horsies_migrations" else {"INSERT", "UPDATE", "DELETE"}
        assert installed.rights(WORKER, table) == {"SELECT"} | writes, table
        assert installed.rights(PRODUCER, table) == OF_PRODUCERS.get(table, set()), table
        assert installed.rights(VIEWER, table) == {"SELECT"}, table
    with psycopg.connect(installed.url) as connection:
        for role in (WORKER, PRODUCER, VIEWER):
            query = "SELECT has_schema_privilege(%s, 'horsies', 'CREATE')"
            assert connection.execute(query, (installed.names[role],)).fetchone() == (False,)


def producer_of(installed: Installed) -> tuple[Horsies, Any]:
    app = Horsies(AppConfig(broker=installed.config(PRODUCER)), migrate=False)

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    return app, add


def registered_tasks(installed: Installed) -> list[str]:
    """The tasks that a worker has registered for sends from SQL."""
    with psycopg.connect(installed.url) as connection:
        query = "SELECT task_name FROM horsies.horsies_task_defaults"
        return [name for (name,) in connection.execute(query)]


Command: TypeAlias = Callable[..., tuple[int, str]]


@pytest.fixture
def command(
    installed: Installed, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Command:
    """Run a command as a role, inside this process; its exit code and its complaint."""
    monkeypatch.setenv("HORSIES_SCHEMA", "horsies")

    def run(role: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(
            sys, "argv", ["horsies", *arguments, "--database-url", installed.url_of(role)]
        )
        with pytest.raises(SystemExit) as left:
            main.main()
        assert isinstance(left.value.code, int)
        return left.value.code, capsys.readouterr().err

    return run


def test_producers_workers_and_viewers_do_their_work(
    installed: Installed, command: Command, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    fleet = Fleet(installed.url, tmp_path)
    request.node.stash.setdefault(FLEETS, []).append(fleet)
    app, add = producer_of(installed)
    try:
        config = {"broker": {"schema": "horsies"}}
        worker = fleet.start(
            database_url=installed.url_of(WORKER),
            config=config,
            environment={"HORSIES_MIGRATE": "0"},
        )
        handle = add.send(1, 2).unwrap()
        assert handle.get(30_000).ok_value == 3
        assert len(handle.info(include_attempts=True).unwrap().attempts) == 1
        with psycopg.connect(installed.url_of(PRODUCER)) as producer:
            wait_until(lambda: "add" in registered_tasks(installed))
            producer.execute("""SELECT horsies.horsies_send_v1('add', '{"a": 1, "b": 2}')""")
            # Whether a queue is fifo is looked up for a call that chooses its place and has a key.
            producer.execute(
                """SELECT horsies.horsies_send_v1(
                    'add', '{"a": 1, "b": 2}', p_delay => '1 hour', p_options => '{"key": "acme"}')"""
            )
        later = add.schedule(600, 1, 2).unwrap()
        assert later.cancel().unwrap()
        cleaning = add.schedule(600, 1, 2).unwrap()
        with psycopg.connect(installed.url, autocommit=True) as owner:
            owner.execute(
                "INSERT INTO horsies.horsies_steps (task_id, name, position, kind, attempt, started_at, "
                "ended_at) VALUES (%s, '!cancel', 1, 'cancel', 1, now(), now())",
                (cleaning.task_id,),
            )
        # Whether a live worker can do the clean-up is looked up for a second cancel.
        assert cleaning.cancel().is_ok()
        first = add.node()(a=1, b=2)
        gate = SignalNode("go", value_type=int, waits_for=[first])
        last = add.node(waits_for=[gate])(a=3, b=4)
        run = (
            app.workflow("w", [first, gate, last], definition_key="w", output=last).start().unwrap()
        )
        assert run.pause().is_ok()
        assert run.resume().is_ok()
        assert run.signal("go", 1).is_ok()
        assert run.get(30_000).ok_value == 7
        other = app.workflow("w", [add.node()(a=1, b=2)], definition_key="x").start().unwrap()
        assert other.cancel().is_ok()
        for arguments in (
            *COMMANDS,
            ("show", handle.task_id),
            ("workflow", "show", run.workflow_id),
        ):
            code, complaint = command(VIEWER, *arguments)
            assert code == 0, (arguments, complaint)
        code, complaint = command(VIEWER, "cancel", handle.task_id)
        assert code == 1
        assert "permission denied" in complaint
        assert worker.stop() == 0
    finally:
        app.close()
        fleet.destroy()


@pytest.fixture
def fleet_of_roles(
    installed: Installed, tmp_path: Path, request: pytest.FixtureRequest
) -> Iterator[Fleet]:
    """Workers that act as the role for them, in the schema of the installation."""
    fleet = Fleet(installed.url_of(WORKER), tmp_path)
    request.node.stash.setdefault(FLEETS, []).append(fleet)
    yield fleet
    fleet.destroy()


def start_worker(fleet: Fleet, *options: str, ready: bool = True, **config: Any) -> RunningWorker:
    settings = {"broker": {"schema": "horsies"}, **QUICK_RECOVERY, **config}
    environment = {"HORSIES_MIGRATE": "0"}
    return fleet.start(*options, config=settings, environment=environment, ready=ready)


OLD = """
UPDATE horsies_tasks SET completed_at = now() - interval '2 years' WHERE id = %(id)s;
UPDATE horsies_workflows SET completed_at = now() - interval '2 years' WHERE id = %(run_id)s;
INSERT INTO horsies_heartbeats (task_id, sender_id, role, sent_at)
    VALUES (%(id)s, 'w', 'runner', now() - interval '2 years');
UPDATE horsies_worker_states SET snapshot_at = now() - interval '2 years';
UPDATE horsies_workers SET stopped_at = now() - interval '2 years' WHERE stopped_at IS NOT NULL;
UPDATE horsies_tasks SET id = (repeat('0', 12) || '7000' || right(replace(id::text, '-', ''), 16))::uuid
    WHERE id = %(id)s;
"""
LEFT = """
SELECT (SELECT count(*) FROM horsies_tasks WHERE completed_at < now() - interval '1 year'),
    (SELECT count(*) FROM horsies_workflows WHERE completed_at < now() - interval '1 year'),
    (SELECT count(*) FROM horsies_heartbeats WHERE sent_at < now() - interval '1 year'),
    (SELECT count(*) FROM horsies_worker_states WHERE snapshot_at < now() - interval '1 year'),
    (SELECT count(*) FROM horsies_workers WHERE stopped_at < now() - interval '1 year')
"""


def test_the_role_of_workers_is_enough_for_recovery_retention_and_schedules(
    installed: Installed, fleet_of_roles: Fleet
) -> None:
    fleet = fleet_of_roles
    app, add = producer_of(installed)
    try:
        first = start_worker(fleet)
        old = add.send(1, 2).unwrap()
        run = app.workflow("w", [add.node()(a=1, b=2)], definition_key="w").start().unwrap()
        assert old.get(30_000).ok_value == 3
        assert run.get(30_000).is_ok()
        assert first.stop() == 0
        with psycopg.connect(
            installed.url, autocommit=True, options="-c search_path=horsies"
        ) as admin:
            for statement in OLD.split(";")[:-1]:
                values = {"id": old.task_id, "run_id": run.workflow_id}
                admin.execute(statement.encode(), values)
            doomed = start_worker(fleet)
            left = long_one(app).send(600).unwrap()
            wait_until(lambda: fleet.journal.lines("start", left.task_id))
            doomed.signal(signal.SIGKILL)
            schedule = {"schedules": [every(1, "often")], "check_interval_seconds": 1}
            heir = start_worker(fleet, "--with-scheduler", schedule=schedule)
            assert left.get(30_000).err_value.error_code == "WORKER_CRASHED"
            wait_until(lambda: admin.execute(LEFT.encode()).fetchone() == (0,) * 5)
            wait_until(lambda: len(slots(admin, "often")) >= 2)
        assert heir.stop() == 0
        for worker in (first, heir):
            assert "permission denied" not in worker.log()
    finally:
        app.close()


def long_one(app: Horsies) -> Any:
    @app.task("sleep")
    def sleep(seconds: float) -> TaskResult[str, TaskError]:
        raise NotImplementedError

    return sleep


def test_producers_retry_failed_tasks_and_runs(
    installed: Installed, fleet_of_roles: Fleet, command: Command
) -> None:
    app, add = producer_of(installed)
    try:

        @app.task("refuse")
        def refuse(code: str = "X") -> TaskResult[int, TaskError]:
            raise NotImplementedError

        failing = refuse.node(node_id="failing")(code="NO")
        last = add.node(waits_for=[failing], node_id="last")(a=1, b=2)
        spec = app.workflow("w", [failing, last], definition_key="w", on_error=OnError.PAUSE)
        worker = start_worker(fleet_of_roles)
        run = spec.start().unwrap()
        failed = refuse.send().unwrap()
        assert failed.get(30_000).is_err()
        wait_until(lambda: run.status().unwrap().name == "PAUSED")
        assert run.resume(retry_failed=True).is_ok()
        wait_until(lambda: run.status().unwrap().name == "PAUSED")
        assert run.retry("failing").is_ok()
        wait_until(lambda: run.status().unwrap().name == "PAUSED")
        for arguments in (
            ("retry", failed.task_id),
            ("workflow", "retry", run.workflow_id),
            ("workflow", "cancel", run.workflow_id),
        ):
            code, complaint = command(PRODUCER, *arguments)
            assert code == 0, (arguments, complaint)
        edited = EncodedCall("[]", '{"code": "Y"}')
        assert retry_task(app.get_broker(), failed.task_id, call=edited).is_ok()
        assert worker.stop() == 0
    finally:
        app.close()


def test_row_level_security_needs_policies_that_show_all_rows(
    installed: Installed, fleet_of_roles: Fleet
) -> None:
    app, add = producer_of(installed)
    tables = [table for table in installed.tables() if table != "horsies_migrations"]
    try:
        with psycopg.connect(installed.url, autocommit=True) as admin:
            for table in tables:
                admin.execute(f"ALTER TABLE horsies.{table} ENABLE ROW LEVEL SECURITY".encode())
            refused = add.send(1, 2).unwrap_err()
            assert not refused.retryable
            assert "row-level security" in refused.message
            worker = start_worker(fleet_of_roles, ready=False)
            assert worker.wait(30) == 1
            assert "row-level security" in worker.log()
            for table in tables:
                admin.execute(f"CREATE POLICY everybody ON horsies.{table} USING (true)".encode())
            worker = start_worker(fleet_of_roles)
            assert add.send(1, 2).unwrap().get(30_000).ok_value == 3
            run = app.workflow("w", [add.node()(a=1, b=2)], definition_key="w").start().unwrap()
            assert run.get(30_000).is_ok()
        assert worker.stop() == 0
    finally:
        app.close()


@pytest.mark.parametrize("role", [WORKER, PRODUCER])
def test_a_record_of_migrations_that_is_hidden_is_not_taken_for_a_foreign_table(
    installed: Installed, role: str
) -> None:
    with psycopg.connect(installed.url, autocommit=True) as admin:
        admin.execute("ALTER TABLE horsies.horsies_migrations ENABLE ROW LEVEL SECURITY")
    app = Horsies(AppConfig(broker=installed.config(role)), migrate=False)
    error = app.get_broker().ensure_schema_initialized().unwrap_err()
    app.close()
    assert "Row-level security hides" in error.message
    assert "drop" not in error.message


@pytest.mark.parametrize("role", [WORKER, PRODUCER])
def test_a_role_that_may_not_migrate_names_the_command(installed: Installed, role: str) -> None:
    with psycopg.connect(installed.url, autocommit=True) as admin:
        admin.execute(
            "DELETE FROM horsies.horsies_migrations WHERE kind = 'function' AND version = 20"
        )
    app = Horsies(AppConfig(broker=installed.config(role)), migrate=False)
    error = app.get_broker().ensure_schema_initialized().unwrap_err()
    app.close()
    assert "bring them up to date with `horsies migrate`" in error.message
