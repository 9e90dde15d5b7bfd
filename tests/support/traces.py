"""Writes a person's data into every column that may contain it, and searches for it in a dump of every
table.
"""

from __future__ import annotations

import json
from collections.abc import Iterator

from psycopg import sql

from horsies.ids import new_id
from tests.support.database import Database
from tests.support.rows import add_attempt, add_run, add_task

PERSON = "anna-1984"

# Columns with names, codes, places and process identities, which are not personal data. All other
# text columns get the person's data, so that a new column must be erased or listed here.
_KEPT: dict[str, set[str]] = {
    "horsies_tasks": {
        *("task_name", "queue_name", "status", "error_code", "fingerprint", "schedule_name"),
        *("claimed_by_worker_id", "worker_hostname", "worker_process_name", "workflow_inputs"),
    },
    "horsies_task_attempts": {
        *("outcome", "error_code", "fingerprint", "exception_type", "raised_in", "traceparent"),
        *("worker_id", "worker_hostname", "worker_process_name"),
    },
    "horsies_task_progress": set(),
    "horsies_task_logs": set(),
    "horsies_steps": {"kind"},
    "horsies_task_signals": set(),
    "horsies_parked": set(),
    "horsies_deadlines": set(),
    "horsies_blocked": {"kind", "status", "action", "worker_id"},
    "horsies_refusals": {"fingerprint", "worker_id"},
    "horsies_workflows": {"name", "status", "on_error", "definition_key", "schedule_name"},
    "horsies_workflow_tasks": {
        *("node_id", "kind", "status", "join_type", "task_name", "queue_name", "inputs"),
        *("signal_name", "map_parameter", "sub_definition_key", "sub_workflow_name"),
    },
    "horsies_workflow_signals": {"name"},
}
_NODE = """
INSERT INTO horsies_workflow_tasks (workflow_id, task_index, node_id, kind, status, dependencies, dependents,
    context_dependents, join_type, allow_failed_deps, pauses, deps_open, task_name, task_kwargs, queue_name,
    priority, task_options, max_retries, propagated)
VALUES (%s, 0, 'greet', 'task', 'FAILED', '{}', '{}', '{}', 'all', false, false, 0, 'work', '{}', 'default',
    100, '{}', 0, true)
"""


def tables(database: Database) -> list[str]:
    found = database.execute(
        "SELECT relname::text FROM pg_class WHERE relkind = 'r' AND relname LIKE 'horsies\\_%' "
        "AND relnamespace = 'public'::regnamespace ORDER BY relname"
    )
    return [name for (name,) in found.fetchall()]


def traces(database: Database, person: str = PERSON) -> list[str]:
    """Return the rows of all tables that mention the person, as table and text."""
    return [
        f"{table}: {text}"
        for table in tables(database)
        for (text,) in database.execute(
            sql.SQL("SELECT row::text FROM {} AS row").format(sql.Identifier(table))
        ).fetchall()
        # Dumps show bytes as hexadecimal digits.
        if person in text or person.encode().hex() in text
    ]


def tables_with(database: Database, person: str = PERSON) -> set[str]:
    return {trace.partition(":")[0] for trace in traces(database, person)}


def add_person(database: Database) -> str:
    """Insert an ended task with a row in every table about tasks; return its id."""
    task_id = add_task(database, status="FAILED", task_name=f"work-{new_id()}", lane=7)
    _add_records(database, task_id)
    database.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail) "
        "VALUES ('bert', 'cli', 'cancel_task', %s, 'done', %s)",
        [f"task {task_id}", PERSON],
    )
    database.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, detail) "
        "VALUES ('bert', 'cli', 'pause_key', %s, 'done', %s)",
        [f"key {PERSON} of queue default", PERSON],
    )
    database.execute(
        "INSERT INTO horsies_lanes (queue_name, lane, lane_key, paused_at, pause_reason) "
        "VALUES ('default', horsies_lane_v1('default', %s), %s, now(), %s)",
        [PERSON] * 3,
    )
    for code, subject, sentence in (
        ("BLOCKED", f"task {task_id}", f"The database refuses {PERSON}."),
        ("KEY_PAUSED", "queue default", f"Key {PERSON!r} of queue 'default' was paused."),
    ):
        database.execute(
            "INSERT INTO horsies_findings (code, subject, check_id, level, sentence, remedy) "
            "VALUES (%s, %s, 'tests', 'red', %s, %s)",
            [code, subject, sentence, PERSON],
        )
    plant(database)
    return task_id


def add_personal_run(database: Database) -> str:
    """Insert an ended run with a run below it; return its id."""
    root = add_run(database, status="FAILED", completed_at=sql.SQL("now()"))
    below = add_run(
        database,
        status="FAILED",
        completed_at=sql.SQL("now()"),
        root_workflow_id=root,
        parent_workflow_id=root,
    )
    for run_id in (root, below):
        database.execute(_NODE.encode(), [run_id])
        task = add_task(
            database,
            status="FAILED",
            task_name=f"work-{new_id()}",
            workflow_id=run_id,
            workflow_node_index=0,
        )
        _add_records(database, task)
        database.execute(
            "INSERT INTO horsies_workflow_signals (workflow_id, name, value) VALUES (%s, 's', 'v')",
            [run_id],
        )
    plant(database)
    return root


def _add_records(database: Database, task_id: str) -> None:
    add_attempt(database, task_id, outcome="FAILED")
    for statement in (
        "INSERT INTO horsies_task_progress (task_id, attempt, done, reported_at) VALUES (%s, 1, 1, now())",
        "INSERT INTO horsies_task_logs (task_id, generation, attempt, body, dropped, cut_after) "
        "VALUES (%s, 1, 1, '', 0, 1)",
        "INSERT INTO horsies_steps (task_id, name, position, kind, attempt, started_at, ended_at) "
        "VALUES (%s, 'n', 1, 'step', 1, now(), now())",
        "INSERT INTO horsies_task_signals (task_id, name, value) VALUES (%s, 'n', 'v')",
        "INSERT INTO horsies_parked (task_id, generation, since, signals, children) "
        "VALUES (%s, 1, now(), '{}', '{}')",
        "INSERT INTO horsies_blocked (id, kind, status, action, error) "
        "VALUES (%s, 'task', 'FAILED', 'end', 'e')",
        "INSERT INTO horsies_refusals (task_id, fingerprint, message, until) VALUES (%s, 'f', 'm', now())",
    ):
        database.execute(statement.encode(), [task_id])


def plant(database: Database) -> None:
    """Write the person's data into every column that may contain personal data."""
    for table, column, kind in _personal_columns(database):
        value = PERSON if column.endswith("_key") else json.dumps({"customer": PERSON})
        written = sql.Literal([value] if kind == "ARRAY" else value)
        names = sql.Identifier(table), sql.Identifier(column), written
        database.execute(sql.SQL("ALTER TABLE {} DISABLE TRIGGER USER").format(names[0]))
        database.execute(sql.SQL("UPDATE {} SET {} = {}").format(*names))
        database.execute(sql.SQL("ALTER TABLE {} ENABLE TRIGGER USER").format(names[0]))


def _personal_columns(database: Database) -> Iterator[tuple[str, str, str]]:
    found = database.execute(
        "SELECT table_name::text, column_name::text, data_type::text FROM information_schema.columns "
        "WHERE table_schema = 'public' AND udt_name IN ('text', 'varchar', 'jsonb', '_text', '_varchar')"
    )
    for table, column, kind in found.fetchall():
        if table in _KEPT and column not in _KEPT[table] and column != "success_policy":
            yield table, column, kind
