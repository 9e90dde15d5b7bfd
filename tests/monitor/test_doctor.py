"""Each finding of `horsies doctor` made for real; after its remedy, the finding is gone."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.types.json import Jsonb

from horsies.config.postgres import PostgresConfig
from horsies.db.migrate import UnusableSchemaError, apply_migrations
from horsies.db.statements.doctor import (
    AppliedFile,
    ServerState,
    XminHolder,
    begin_reading,
)
from horsies.findings import Finding, Level
from horsies.monitor.diagnose.doctor import (
    CHEAP_IDS,
    CHECKS,
    READING_LIMITS_MS,
    doctor_script,
    run_doctor,
)
from horsies.monitor.diagnose.schema import judge_schema, shipped_indexes, shipped_options
from horsies.monitor.diagnose.server import (
    judge_clock,
    judge_connections,
    judge_notify_queue,
    judge_settings,
    judge_standby,
    judge_xmin,
)
from horsies.monitor.facts import Facts, Limits
from horsies.tasks.broker import BrokerErrorCode, PostgresBroker
from tests.support.command_line import Run
from tests.support.database import Database, created_database, lock_waiters, template_database
from tests.support.pgbouncer import find_pgbouncer, running_pgbouncer
from tests.support.rows import (
    add_attempt,
    add_heartbeat,
    add_run,
    add_snapshot,
    add_task,
    add_worker,
    ago,
)
from tests.support.wait import wait_until

RED, YELLOW, UNKNOWN = Level.RED, Level.YELLOW, Level.UNKNOWN
FRESH = "01a1dd00-0000-7000-8000-000000000001"
HANGING = "01a1dd00-0000-7000-8000-000000000002"
TABLES = "horsies_tasks, horsies_workers, horsies_worker_states, horsies_queues, horsies_workflows"


@pytest.fixture(scope="module")
def patient_url(server_url: str) -> Iterator[str]:
    """A migrated database of this module, whose schema the tests damage."""
    with created_database(server_url, template_database(server_url)) as url:
        yield url


@pytest.fixture
def patient(patient_url: str) -> Iterator[Database]:
    with psycopg.connect(patient_url, autocommit=True) as connection:
        yield connection
        connection.execute(f"TRUNCATE {TABLES}, horsies_schedule_state, horsies_blocked CASCADE")


@pytest.fixture
def broker(patient_url: str) -> Iterator[PostgresBroker]:
    broker = PostgresBroker(PostgresConfig(database_url=patient_url), migrates=False)
    yield broker
    broker.close()


def findings(broker: PostgresBroker, check: str, limits: Limits | None = None) -> list[Finding]:
    (report,) = run_doctor(broker, [check], limits).unwrap()
    assert report.level is min((one.level for one in report.findings), default=Level.GREEN)
    return list(report.findings)


@dataclass(frozen=True)
class Damage:
    """A check, the statements that give it reason, and whether its remedy is for psql."""

    check: str
    statements: tuple[str, ...]
    level: Level = RED
    limits: Limits | None = None


INVALID = (
    "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'horsies_tasks_lease'::regclass"
)
ON_DATABASE = "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET {}', current_database()); END $$"
REPLICA = "session_replication_role = replica"
DAMAGES = {
    "triggers silent in the database": Damage("triggers", (ON_DATABASE.format(REPLICA),)),
    "triggers silent for the role in the database": Damage(
        "triggers", (ON_DATABASE.format(REPLICA).replace("DATABASE", "ROLE postgres IN DATABASE"),)
    ),
    "trigger disabled": Damage(
        "triggers", ("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_inserted",)
    ),
    "trigger dropped": Damage("triggers", ("DROP TRIGGER horsies_task_changed ON horsies_tasks",)),
    "index invalid": Damage("indexes", (INVALID,)),
    "index dropped": Damage("indexes", ("DROP INDEX horsies_tasks_unique_key",)),
    "autovacuum off": Damage(
        "vacuum", ("ALTER TABLE horsies_tasks SET (autovacuum_enabled = false)",)
    ),
    "unlogged": Damage("vacuum", ("ALTER TABLE horsies_queues SET UNLOGGED",)),
    "parameters changed": Damage(
        "vacuum",
        ("ALTER TABLE horsies_tasks SET (fillfactor = 100)",),
        YELLOW,
    ),
    "dead rows": Damage(
        "vacuum",
        (
            "INSERT INTO horsies_queues (queue_name) SELECT 'q' || n FROM generate_series(1, 300) AS n",
            "DELETE FROM horsies_queues",
            "SELECT pg_stat_force_next_flush()",
        ),
        YELLOW,
        Limits(dead_rows=200),
    ),
    "never analysed": Damage(
        "statistics",
        (
            "INSERT INTO horsies_heartbeats (task_id, sender_id, role) "
            "SELECT gen_random_uuid(), 'w', 'runner' FROM generate_series(1, 500)",
            "SELECT pg_stat_force_next_flush()",
        ),
        YELLOW,
        Limits(unanalysed_rows=400),
    ),
    "claim index bloated": Damage(
        "claim-index",
        (
            "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha) "
            "SELECT gen_random_uuid(), 'work', 'mail', 'sha' FROM generate_series(1, 2000)",
            "DELETE FROM horsies_tasks",
        ),
        YELLOW,
        Limits(claim_index_bytes=32_768),
    ),
    "read only": Damage(
        "standby",
        (ON_DATABASE.format("default_transaction_read_only = on"),),
    ),
}


@contextmanager
def unattended(url: str) -> Iterator[None]:
    """Keep the server's own maintenance away from tables, where it would end the finding."""
    with psycopg.connect(url) as session:
        session.execute(
            "LOCK TABLE horsies_tasks, horsies_queues, horsies_heartbeats "
            "IN SHARE UPDATE EXCLUSIVE MODE"
        )
        yield


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=list(DAMAGES))
def test_a_pasted_statement_ends_the_finding(
    broker: PostgresBroker, patient: Database, patient_url: str, damage: Damage
) -> None:
    assert findings(broker, damage.check, damage.limits) == []
    with unattended(patient_url) if damage.limits else nullcontext():
        for statement in damage.statements:
            patient.execute(statement.encode())
        (found,) = findings(broker, damage.check, damage.limits)
    assert (found.level, found.is_sql) == (damage.level, True)
    assert found.remedy is not None
    patient.execute(found.remedy.encode())
    assert findings(broker, damage.check, damage.limits) == []


def test_missing_functions_come_back_with_a_migration(
    horsies: Run,
    broker: PostgresBroker,
    patient: Database,
    patient_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", patient_url)
    patient.execute("DROP FUNCTION horsies_blocked_v1()")
    (found,) = findings(broker, "triggers")
    assert found.evidence == ("horsies_blocked_v1",)
    assert found.remedy is not None
    statement, _, command = found.remedy.partition("-- then: ")
    patient.execute(statement.encode())
    assert horsies(*shlex.split(command)[1:]).code == 0
    assert findings(broker, "triggers") == []
    assert findings(broker, "schema") == []


def test_an_open_transaction_is_named_and_can_be_ended(
    broker: PostgresBroker, patient: Database, patient_url: str
) -> None:
    limits = Limits(xmin_seconds=(0.0, 0.0))
    name = "report of the month"
    open_one = psycopg.connect(patient_url, application_name=name)
    try:
        open_one.execute("SELECT pg_current_xact_id()")
        pid = open_one.info.backend_pid
        found = {one.remedy: one for one in findings(broker, "held-xmin", limits)}
        finding = found[f"SELECT pg_terminate_backend({pid});"]
        assert finding.level is RED
        assert f"pid {pid} ({name}, idle in transaction)" in finding.sentence
        assert findings(broker, "held-xmin") == []  # five minutes are not over
        assert finding.remedy is not None
        patient.execute(finding.remedy.replace(")", ", 5000)").encode())
    finally:
        open_one.close()
    # With limits of zero seconds, sessions of the server, such as one that starts, may be found too.
    assert finding.remedy not in {one.remedy for one in findings(broker, "held-xmin", limits)}


def test_a_running_schema_change_is_not_to_be_ended(
    broker: PostgresBroker, patient: Database, patient_url: str
) -> None:
    def found(pid: int) -> Finding:
        limits = Limits(xmin_seconds=(0.0, 0.0))
        held = findings(broker, "held-xmin", limits)
        return next(one for one in held if f"pid {pid} " in one.sentence)

    patient.execute("CREATE TABLE orders ()")
    with (
        psycopg.connect(patient_url) as reader,
        psycopg.connect(patient_url, application_name="deploy") as deploy,
        ThreadPoolExecutor(1) as pool,
    ):
        reader.execute("SELECT FROM orders")
        deploy.execute("SELECT pg_current_xact_id()")
        pid = deploy.info.backend_pid
        assert found(pid).is_sql
        change = "/* release 7 */ ALTER TABLE orders ADD COLUMN note text"
        running = pool.submit(deploy.execute, change)
        try:
            wait_until(lambda: lock_waiters(patient, pid) == 1)
            changing = found(pid)
        finally:
            reader.rollback()
            running.result()
            deploy.rollback()
            patient.execute("DROP TABLE orders")
    assert changing.level is RED
    assert changing.sentence.startswith(f"The schema change of pid {pid} (deploy, active) has")
    assert (changing.remedy or "").startswith("wait until the schema change has ended")
    assert not changing.is_sql


@pytest.mark.parametrize("role", ["migrate", "schema"])
def test_a_migration_of_horsies_is_not_to_be_ended(
    broker: PostgresBroker, patient_url: str, role: str
) -> None:
    with psycopg.connect(patient_url, application_name=f"horsies:{role}") as migration:
        migration.execute("SELECT pg_current_xact_id()")
        label = f"The schema change of pid {migration.info.backend_pid} "
        held = findings(broker, "held-xmin", Limits(xmin_seconds=(0.0, 0.0)))
    assert [one.is_sql for one in held if one.sentence.startswith(label)] == [False]


def test_an_empty_database_needs_a_migration(
    horsies: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    finished = horsies("doctor", "--only", "schema", "--only", "unserved", "--json")
    assert finished.code == 3
    schema, unserved = json.loads(finished.out)["checks"]
    assert (schema["level"], unserved["level"]) == ("red", "unknown")
    assert horsies(*shlex.split(schema["findings"][0]["remedy"])[1:]).code == 0
    assert horsies("doctor", "--only", "schema", "--only", "unserved").code == 0


def test_checks_that_need_the_tables_are_summed_up_in_one_line(
    horsies: Run, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", database_url)
    finished = horsies("doctor")
    assert finished.code == 3
    unread = sum(check.needs_tables for check in CHECKS)
    assert finished.out.count("Not checked") == 1
    assert f"unknown {unread} checks: Not checked, because the tables are missing" in finished.out
    assert finished.out.count("remedy: horsies migrate") == 2
    assert f", {unread} unknown." in finished.out


def test_the_most_serious_findings_come_first_and_the_same_failure_of_checks_is_one_entry(
    horsies: Run, patient: Database, patient_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", patient_url)
    add_task(patient, enqueued_at=ago(9))
    add_worker(patient, queues=["mail"], hears=False)
    listed = horsies("doctor", "--only", "workers", "--only", "unserved").out
    assert listed.index("yellow  workers") > listed.index("red     unserved")
    with psycopg.connect(patient_url) as holder:
        holder.execute("LOCK TABLE horsies_workers")
        out = horsies("doctor", "--only", "workers", "--only", "caps").out
    assert "unknown 2 checks: Not checked: canceling statement due to lock timeout\n" in out
    assert "        workers, caps\n" in out


Change = Callable[[Database], Any]


@dataclass(frozen=True)
class Trouble:
    """A check, rows that give it reason, and the change that an operator would cause."""

    check: str
    make: Change
    end: Change
    level: Level = RED
    says: str = ""
    limits: Limits | None = None


def occupy(connection: Database) -> None:
    """Have the only child of each of two workers run a task for 12 minutes or longer, while a task is due."""
    for hostname, age, task_id in (("a", 720, FRESH), ("b", 780, HANGING)):
        worker = add_worker(connection, queues=["mail"], hostname=hostname, processes=1)
        add_snapshot(connection, worker, tasks_running=1)
        flying = {"claimed_by_worker_id": worker, "claimed_at": ago(age), "started_at": ago(age)}
        add_task(connection, id=task_id, queue_name="mail", status="RUNNING", **flying)
    add_task(connection, queue_name="mail", enqueued_at=ago(400), sent_at=ago(400))


def two_workers(connection: Database, **other: Any) -> None:
    for caps in ({"mail": 3}, other["caps"]):
        worker = add_worker(connection, queues=["mail"], hostname=f"host-{caps['mail']}")
        add_snapshot(connection, worker, queue_max_concurrency=Jsonb(caps))


def agree(connection: Database) -> None:
    connection.execute("UPDATE horsies_worker_states SET queue_max_concurrency = '{\"mail\": 3}'")


def releases(connection: Database) -> None:
    for version in ("0.1.0", "0.2.0"):
        add_worker(connection, version=version, started_at=ago(7200), queues=["mail"])


def crash(connection: Database) -> None:
    task = add_task(connection, task_name="leak")
    for attempt in (1, 2, 3):
        add_attempt(connection, task, attempt=attempt, outcome="WORKER_FAILURE")


def block(connection: Database) -> None:
    task = add_task(connection)
    connection.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error) "
        "VALUES (%s, 'task', 'PENDING', 0, 'claim', 'check constraint')",
        (task,),
    )


def capped(connection: Database, cap: int) -> None:
    add_task(connection, queue_name="mail", enqueued_at=ago(400))
    worker = add_worker(connection, queues=["mail"])
    add_snapshot(connection, worker, queue_max_concurrency=Jsonb({"mail": cap}))


def measure(connection: Database, failed: int = 0, retried: int = 0, crashed: int = 0) -> None:
    connection.execute(
        "INSERT INTO horsies_measures VALUES "
        "(now(), 1, 'mail', 'pay', 0, %s, %s, %s, 0, 0, 0, '{}', '{}')",
        (failed, retried, crashed),
    )


def fail_often(connection: Database) -> None:
    measure(connection, failed=12)


def run_for_hours(connection: Database) -> None:
    task = add_task(connection, status="RUNNING", started_at=ago(30_000))
    add_heartbeat(connection, task, 1)


def overdue(connection: Database) -> None:
    connection.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, next_run_at, updated_at) "
        "VALUES ('nightly', now() - interval '1 hour', now() - interval '1 hour')"
    )


def keep_too_long(connection: Database) -> None:
    add_task(connection, status="COMPLETED", completed_at=ago(90_000))
    recovery = Jsonb({"terminal_record_retention_hours": 1})
    add_snapshot(connection, add_worker(connection), recovery_config=recovery)


def empty(connection: Database) -> None:
    connection.execute(f"TRUNCATE {TABLES}, horsies_schedule_state, horsies_measures CASCADE")


def serve(connection: Database) -> None:
    add_worker(connection, queues=["mail"])


def know(name: str) -> Change:
    tasks = Jsonb({"tasks": {name: "f"}, "workflows": {}})
    return lambda connection: add_worker(connection, queues=["mail"], known_tasks=tasks)


def ask_unknown(connection: Database) -> None:
    know("other")(connection)
    add_task(connection, queue_name="mail", task_name="charge")


def refuse_call(connection: Database) -> None:
    know("charge")(connection)
    connection.execute(
        "INSERT INTO horsies_refusals (task_id, fingerprint, message, until) VALUES "
        "(%s, 'f', 'It does not fit: there is no parameter ''title''. Deploy.', now())",
        (add_task(connection, queue_name="mail", task_name="charge"),),
    )


def deploy(connection: Database) -> None:
    tasks = Jsonb({"tasks": {"charge": "g"}, "workflows": {}})
    add_worker(connection, queues=["mail"], known_tasks=tasks)


def lose_several(connection: Database) -> None:
    for seconds in (60, 600, 7200):
        add_worker(connection, stopped_at=ago(seconds), was_lost=True)
    add_worker(connection, stopped_at=ago(30))


def retry_often(connection: Database) -> None:
    measure(connection, retried=1200)


def crash_often(connection: Database) -> None:
    measure(connection, crashed=15)


TROUBLES = {
    "lost worker": Trouble(
        "workers",
        lambda c: add_worker(c, seen_at=ago(3600)),
        empty,
        says="has been gone for 1 h",
    ),
    "worker lost within the hour": Trouble(
        "losses",
        lambda c: add_worker(c, name="alpha", stopped_at=ago(60), was_lost=True),
        empty,
        YELLOW,
        "Worker alpha was lost ",
    ),
    "several workers lost": Trouble(
        "losses",
        lose_several,
        empty,
        YELLOW,
        "2 workers were lost within the last hour, the last one ",
    ),
    "retry storm": Trouble(
        "retries",
        retry_often,
        empty,
        YELLOW,
        "task pay were retried 1,200 times in 10 minutes; usually 0.",
    ),
    "poison": Trouble(
        "failing-tasks",
        crash_often,
        empty,
        YELLOW,
        "15 failures in 10 minutes, 15 of them ended",
    ),
    "polling worker": Trouble(
        "workers", lambda c: add_worker(c, hears=False), empty, YELLOW, "Notifications do not reach"
    ),
    "caps differ": Trouble(
        "caps",
        lambda c: two_workers(c, caps={"mail": 5}),
        agree,
        says="max_concurrency of queue mail",
    ),
    "releases differ": Trouble("versions", releases, empty, YELLOW, "different releases"),
    "queue without worker": Trouble(
        "unserved",
        lambda c: add_task(c, queue_name="mail"),
        serve,
        says="No live worker serves queue 'mail'",
    ),
    "unknown task": Trouble(
        "unknown-tasks",
        ask_unknown,
        know("charge"),
        says="does not know these waiting tasks: 'charge'",
    ),
    "call that fits no worker": Trouble(
        "unknown-tasks",
        refuse_call,
        deploy,
        says="1 due task 'charge': It does not fit: there is no parameter 'title'.",
    ),
    "blocked": Trouble("blocked", block, empty, says="next change of 1 task(s)"),
    "abandoned": Trouble(
        "abandoned",
        lambda c: add_task(c, status="RUNNING", claimed_by_worker_id="x", started_at=ago(120)),
        empty,
        says="1 tasks are claimed or running at workers that are gone",
    ),
    "deadline passed": Trouble(
        "abandoned", lambda c: add_task(c, good_until=ago(120)), empty, says="past their good_until"
    ),
    "crashes": Trouble("crashes", crash, empty, says="Task leak ended its process 3 times"),
    "no heartbeat": Trouble(
        "long-running",
        lambda c: add_task(c, status="RUNNING", started_at=ago(400)),
        empty,
        YELLOW,
        "has sent no heartbeat for 6 min",
    ),
    "cap of 0": Trouble(
        "caps",
        lambda c: capped(c, 0),
        empty,
        says="max_concurrency of queue 'mail' is 0",
    ),
    "stuck queue": Trouble(
        "stuck-queues",
        lambda c: capped(c, 5),
        empty,
        YELLOW,
        "has been due for 6 min",
    ),
    "children that hang": Trouble(
        "stuck-queues",
        occupy,
        lambda c: c.execute("UPDATE horsies_tasks SET started_at = now() WHERE id = %s", (FRESH,)),
        YELLOW,
        "all children of its workers have run the same tasks for 12 min or longer; the oldest is "
        f"{HANGING}, for 13 min.",
    ),
    "failing task": Trouble(
        "failing-tasks", fail_often, empty, YELLOW, "Task pay has 12 failures in 10 minutes"
    ),
    "run paused by a failure": Trouble(
        "paused-runs",
        lambda c: add_run(c, status="PAUSED", paused_at=ago(540), error="{}"),
        empty,
        YELLOW,
        "Run orders was paused 9 min ago.",
    ),
    "long running": Trouble(
        "long-running",
        run_for_hours,
        empty,
        YELLOW,
        "has been running for 8 h",
    ),
    "broken run": Trouble("run-audit", add_run, empty, says="contradict each other"),
    "paused run": Trouble(
        "paused-runs",
        lambda c: add_run(c, status="PAUSED", paused_at=ago(200_000)),
        empty,
        YELLOW,
        "Run orders was paused 2 d 7 h ago.",
    ),
    "overdue schedule": Trouble(
        "schedules",
        overdue,
        empty,
        says="schedule nightly has been due for 1 h, and no scheduler is connected.",
    ),
    "kept too long": Trouble("retention", keep_too_long, empty, YELLOW, "the retention is 1 h"),
    "large payload": Trouble(
        "sizes",
        lambda c: add_task(c, args=json.dumps(["x" * 500])),
        empty,
        YELLOW,
        "per task on average",
        Limits(payload_bytes=50),
    ),
}


@pytest.mark.parametrize("trouble", TROUBLES.values(), ids=list(TROUBLES))
def test_a_finding_ends_with_its_cause(
    broker: PostgresBroker, patient: Database, trouble: Trouble
) -> None:
    assert findings(broker, trouble.check, trouble.limits) == []
    trouble.make(patient)
    (found,) = findings(broker, trouble.check, trouble.limits)
    assert found.level is trouble.level
    assert trouble.says in found.sentence
    assert found.remedy
    trouble.end(patient)
    assert findings(broker, trouble.check, trouble.limits) == []


def test_a_paused_queue_is_resumed_by_the_printed_command(
    horsies: Run,
    broker: PostgresBroker,
    patient: Database,
    patient_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DATABASE_URL", patient_url)
    add_task(patient, queue_name="mail")
    patient.execute("INSERT INTO horsies_queues VALUES ('mail', now() - interval '2 hours')")
    (found,) = findings(broker, "paused-queues")
    assert (found.level, found.evidence[0].split(",")[0]) == (RED, "1 due task")
    assert found.remedy is not None
    assert horsies(*shlex.split(found.remedy)[1:]).code == 0
    assert findings(broker, "paused-queues") == []


def test_a_pause_of_minutes_is_yellow(broker: PostgresBroker, patient: Database) -> None:
    add_task(patient, queue_name="mail")
    patient.execute("INSERT INTO horsies_queues VALUES ('mail', now())")
    (found,) = findings(broker, "paused-queues")
    assert found.level is YELLOW


def test_a_role_without_rights_is_told_which_to_grant(
    patient: Database, patient_url: str, server_url: str
) -> None:
    role = f"viewer_{patient.info.backend_pid}"
    patient.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(role)))
    url = psycopg.conninfo.make_conninfo(patient_url, user=role)
    broker = PostgresBroker(
        PostgresConfig(database_url=_as_role(patient_url, role)), migrates=False
    )
    try:
        with psycopg.connect(url):
            pass
        found = findings(broker, "privileges")
        assert {one.level for one in found} == {RED, YELLOW}
        (schema,) = findings(broker, "schema")
        assert (schema.level, "permission denied" in schema.sentence) == (UNKNOWN, True)
        for finding in found:
            assert finding.remedy is not None
            patient.execute(finding.remedy.encode())
        assert findings(broker, "privileges") == []
        assert findings(broker, "schema") == []
    finally:
        broker.close()
        patient.execute(sql.SQL("DROP OWNED BY {0}; DROP ROLE {0}").format(sql.Identifier(role)))


def _as_role(url: str, role: str) -> str:
    return url.replace("postgresql://postgres", f"postgresql://{role}", 1)


def test_a_pooler_in_session_mode_has_enough_connections_for_its_check(patient_url: str) -> None:
    """The pool of the test has four connections; a check that holds more would wait without end."""
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed")
    with running_pgbouncer(patient_url, "session") as url:
        broker = PostgresBroker(PostgresConfig(database_url=url), migrates=False)
        try:
            assert findings(broker, "pooler") == []
        finally:
            broker.close()


def test_an_undeclared_pooler_is_found(patient_url: str) -> None:
    if find_pgbouncer() is None:
        pytest.skip("pgbouncer is not installed")
    with running_pgbouncer(patient_url) as url:
        broker = PostgresBroker(PostgresConfig(database_url=url), migrates=False)
        try:
            (found,) = findings(broker, "pooler")
            assert (found.level, "not declared" in found.sentence) == (RED, True)
            (silent,) = findings(broker, "notifications")
            assert silent.level is RED
        finally:
            broker.close()
        declared = PostgresConfig(
            database_url=url, session_database_url=patient_url, pgbouncer_transaction_mode=True
        )
        broker = PostgresBroker(declared, migrates=False)
        try:
            assert findings(broker, "pooler") == findings(broker, "notifications") == []
            assert findings(broker, "triggers") == []
        finally:
            broker.close()


def test_a_pooler_that_is_declared_but_missing_is_yellow(patient_url: str) -> None:
    config = PostgresConfig(
        database_url=patient_url,
        session_database_url=f"{patient_url}&application_name=session",
        pgbouncer_transaction_mode=True,
    )
    broker = PostgresBroker(config, migrates=False)
    try:
        (found,) = findings(broker, "pooler")
        assert found.level is YELLOW
    finally:
        broker.close()


SERVER = ServerState(
    "17.2",
    170_002,
    "UTF8",
    "shop",
    True,
    "on",
    True,
    False,
    False,
    0.0,
    97,
    10,
    4,
    True,
    datetime.now(UTC),
)


@pytest.mark.parametrize(
    ("change", "level"),
    [
        ({}, None),
        ({"version_number": 140_009}, RED),
        ({"encoding": "SQL_ASCII"}, RED),
        ({"has_fsync": False}, RED),
        ({"synchronous_commit": "off"}, YELLOW),
        ({"is_standby": True}, RED),
        ({"notification_usage": 0.2}, YELLOW),
        ({"notification_usage": 0.6}, RED),
        ({"connections": 80}, YELLOW),
        ({"connections": 97}, RED),
    ],
)
def test_the_state_of_the_server_is_judged(change: dict[str, Any], level: Level | None) -> None:
    server = SERVER._replace(**change)
    found = [
        *judge_settings(server, Limits()),
        *judge_standby(server, Limits()),
        *judge_notify_queue(server, Limits()),
        *judge_connections(server, Limits()),
    ]
    assert [one.level for one in found] == ([] if level is None else [level])


@pytest.mark.parametrize(
    ("seconds", "round_trip", "level"),
    [(0.5, 0.1, None), (2.0, 0.1, YELLOW), (-2.0, 0.1, YELLOW), (40.0, 0.1, RED), (2.0, 5.0, None)],
)
def test_clocks_are_compared_within_the_round_trip(
    seconds: float, round_trip: float, level: Level | None
) -> None:
    before = datetime.now(UTC)
    after = before + timedelta(seconds=round_trip)
    middle = before + timedelta(seconds=round_trip / 2 + seconds)
    found = judge_clock(before, middle, after, Limits())
    assert [one.level for one in found] == ([] if level is None else [level])


def test_tasks_that_are_blocked_alike_point_to_the_database(
    broker: PostgresBroker, patient: Database
) -> None:
    block(patient)
    (alone,) = findings(broker, "blocked")
    block(patient)
    (alike,) = findings(broker, "blocked")
    assert "same error" not in alone.sentence
    assert "2 task(s) or run(s) with the same error" in alike.sentence
    assert "settings" in (alike.remedy or "")


def test_slots_and_prepared_transactions_hold_xmin_too() -> None:
    slot = XminHolder("slot", "standby_2", "inactive", None, 60_000_000)
    prepared = XminHolder("prepared", "tx-1", "app", 400.0, 10)
    young = XminHolder("session", "7", "psql, active", 2.0, 10)
    red, yellow = judge_xmin([slot, prepared, young], Limits())
    assert (red.level, red.remedy) == (RED, "SELECT pg_drop_replication_slot('standby_2');")
    assert (yellow.level, yellow.remedy) == (YELLOW, "ROLLBACK PREPARED 'tx-1';")


def test_versions_of_the_schema_are_judged(broker: PostgresBroker, patient: Database) -> None:
    rows = patient.execute("SELECT kind, version, sha FROM horsies_migrations")
    applied = [AppliedFile(*row) for row in rows]
    assert list(judge_schema(applied, "public")) == []
    newer = [*applied, AppliedFile("migration", 10_000, "")]
    older = [one for one in applied if one.kind == "function"]
    changed = [one._replace(sha="x") if one.kind == "function" else one for one in applied]
    found = [next(judge_schema(files, "public")).level for files in (newer, older, changed)]
    assert found == [YELLOW, RED, YELLOW]


def test_tables_of_another_program_are_not_to_be_migrated(server_url: str) -> None:
    with created_database(server_url) as url, psycopg.connect(url, autocommit=True) as other:
        other.execute("CREATE TABLE horsies_tasks (id varchar(36) PRIMARY KEY)")
        broker = PostgresBroker(PostgresConfig(database_url=url))
        (report,) = run_doctor(broker, {"schema"}).unwrap()
        with pytest.raises(UnusableSchemaError) as refused:
            apply_migrations(other)
    (finding,) = report.findings
    assert finding.level is RED
    assert f"{finding.sentence.removesuffix('.')}; {finding.remedy}." == str(refused.value)


def test_the_shipped_objects_are_those_of_a_fresh_schema(patient: Database) -> None:
    stored = patient.execute(
        "SELECT relname, coalesce(reloptions, '{}') FROM pg_class WHERE relname LIKE 'horsies%' "
        "AND relkind = 'r'"
    )
    options = {name: set(found) for name, found in stored if found}
    assert shipped_options() == options
    indexes = patient.execute(
        "SELECT indexname FROM pg_indexes WHERE indexname LIKE 'horsies%' AND NOT EXISTS ("
        "SELECT FROM pg_constraint WHERE conname = indexname)"
    )
    assert set(shipped_indexes()) == {name for (name,) in indexes}


def test_nothing_is_written(broker: PostgresBroker, patient: Database) -> None:
    with broker.database.connect("operator") as connection, connection.transaction():
        begin_reading.fetch(connection, *READING_LIMITS_MS)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            connection.execute("DELETE FROM public.horsies_tasks")


def test_the_cheap_checks_share_one_transaction_and_their_facts(
    broker: PostgresBroker, patient: Database
) -> None:
    add_task(patient, queue_name="mail")
    reports = broker.perform(
        BrokerErrorCode.MONITORING_QUERY_FAILED, doctor_script(Facts())
    ).unwrap()
    assert {report.id for report in reports} == CHEAP_IDS
    assert [report.id for report in reports if report.level is RED] == ["unserved"]


def test_commands_print_findings_and_statements(
    horsies: Run, patient: Database, patient_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", patient_url)
    patient.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_inserted")
    remedy = "ALTER TABLE public.horsies_tasks ENABLE TRIGGER horsies_task_inserted;"
    try:
        shown = horsies("doctor", "--only", "triggers", "--only", "indexes")
        assert (shown.code, shown.err) == (3, "")
        assert shown.out.splitlines()[0].split()[:2] == ["red", "triggers:"]
        assert shown.out.splitlines()[-1] == "1 of 2 checks green, 1 red."
        script = horsies("doctor", "--only", "triggers", "--fix-sql")
        assert script.out.splitlines() == [
            "-- triggers: The trigger horsies_task_inserted on horsies_tasks is disabled.",
            remedy,
        ]
    finally:
        patient.execute(remedy.encode())
    fine = horsies("doctor", "--only", "triggers")
    assert (fine.code, fine.out) == (0, "1 of 1 checks green.\n")
    nothing = horsies("doctor", "--only", "triggers", "--fix-sql")
    assert (nothing.out, nothing.err) == ("", "No finding has a remedy in SQL.\n")


def test_commands_refuse_unknown_checks_and_unreachable_databases(horsies: Run) -> None:
    refused = horsies("doctor", "--only", "everything")
    assert refused.code == 2
    assert "is not a check" in " ".join(refused.err.split())
    unreachable = horsies("doctor", "--database-url", "postgresql://app:hunter2@127.0.0.1:1/shop")
    assert (unreachable.code, unreachable.out) == (1, "")
    assert "hunter2" not in unreachable.err


def test_every_check_is_tried_by_the_command(horsies: Run, database: Database) -> None:
    document = json.loads(horsies("doctor", "--json").out)
    assert [one["id"] for one in document["checks"]] == [check.id for check in CHECKS]
    assert {one["level"] for one in document["checks"]} <= {"green", "yellow", "red"}


def test_wrapped_lines_keep_their_indent(
    horsies: Run, patient: Database, patient_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATABASE_URL", patient_url)
    monkeypatch.setenv("COLUMNS", "80")
    add_worker(patient, queues=["mail"], hears=False)
    add_task(patient, queue_name="a-queue-with-a-name-as-long-as-half-a-line", enqueued_at=ago(9))
    lines = horsies("doctor", "--only", "unserved", "--only", "workers").out.splitlines()
    assert len(lines) > 6
    assert all(
        line[:6].strip() in ("", "red", "yellow") and line[6:8] == "  " for line in lines[:-1]
    )
    assert max(map(len, (line for line in lines if "horsies worker" not in line))) <= 80
    explained = horsies("explain", "queue", "a-queue-with-a-name-as-long-as-half-a-line").out
    assert all(line[:4].strip() in ("", "!", "-", "ok") for line in explained.splitlines()[1:])
    monkeypatch.setenv("COLUMNS", "40")
    narrow = horsies("explain", "queue", "mail").out.splitlines()[1:]
    assert all(line[:4].strip() in ("", "!", "-", "ok") for line in narrow)
    assert max(map(len, narrow)) <= 40
