"""`horsies check --live`: missing tables, rights and migrations."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import psycopg
import pytest

from horsies import AppConfig, Horsies, PostgresConfig
from horsies.db import migrate
from horsies.db.migrate import apply_migrations
from horsies.tasks.check import live_errors, live_notes
from tests.support.command_line import Run
from tests.support.migrations import following

PRODUCER = """
GRANT SELECT ON horsies_migrations, horsies_task_attempts, horsies_task_defaults, horsies_webhooks TO {role};
GRANT SELECT, INSERT, UPDATE ON horsies_tasks, horsies_workflows, horsies_workflow_tasks TO {role};
GRANT SELECT, INSERT, DELETE ON horsies_workflow_signals TO {role};
GRANT SELECT, INSERT ON horsies_task_signals TO {role};
GRANT SELECT ON horsies_parked TO {role};
"""


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """A role without rights on the fresh database."""
    name = f"newcomer_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name}".encode())
        yield name
        connection.execute(f"DROP OWNED BY {name}".encode())
        connection.execute(f"DROP ROLE {name}".encode())


@pytest.mark.parametrize(
    ("has_tables", "grants", "migrates", "message", "remedy"),
    [
        (
            False,
            "",
            True,
            "The tables of horsies are missing or outdated, and the role {role} must not create or "
            "change them in the schema public.",
            "run `horsies migrate` as the owner of the tables",
        ),
        (
            False,
            "",
            False,
            "The schema public of this database has no tables of horsies; "
            "create them with `horsies migrate`.",
            "",
        ),
        (False, "GRANT CREATE ON SCHEMA public TO {role}", True, None, ""),
        (
            False,
            "REVOKE USAGE ON SCHEMA public FROM PUBLIC",
            True,
            "The role {role} has no right to use the schema public.",
            "GRANT USAGE ON SCHEMA public TO {role}",
        ),
        (
            True,
            f"{PRODUCER} REVOKE SELECT ON horsies_migrations, horsies_task_attempts FROM {{role}}",
            True,
            "The role {role} lacks rights of a producer: SELECT ON horsies_migrations, SELECT ON "
            "horsies_task_attempts.",
            "GRANT SELECT ON public.horsies_migrations TO {role}; GRANT SELECT ON "
            "public.horsies_task_attempts TO {role}",
        ),
        (
            True,
            f"{PRODUCER} REVOKE INSERT ON horsies_tasks FROM {{role}}",
            False,
            "The role {role} lacks rights of a producer: INSERT ON horsies_tasks.",
            "GRANT INSERT ON public.horsies_tasks TO {role}",
        ),
        (True, PRODUCER, True, None, ""),
    ],
)
def test_a_live_check_finds_missing_tables_and_rights(
    database_url: str,
    role: str,
    has_tables: bool,
    grants: str,
    migrates: bool,
    message: str | None,
    remedy: str,
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        if has_tables:
            apply_migrations(connection)
        connection.execute(grants.format(role=role).encode())
    joint = "&" if "?" in database_url else "?"
    config = PostgresConfig(database_url=f"{database_url}{joint}options=-c%20role%3D{role}")
    errors = Horsies(AppConfig(broker=config), migrate=migrates).check(live=True)
    assert [error.message for error in errors] == (
        [] if message is None else [message.format(role=role)]
    )
    assert all(remedy.format(role=role) in (error.help_text or "") for error in errors)


def test_a_live_check_says_who_cannot_run_workers(database_url: str, role: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        apply_migrations(connection)
        connection.execute(PRODUCER.format(role=role).encode())
        names = [name for (name,) in connection.execute("SELECT tablename FROM pg_tables")]
        tables = ", ".join(name for name in names if name.startswith("horsies_"))
        config = PostgresConfig(
            database_url=f"{database_url}{'&' if '?' in database_url else '?'}options=-c%20role%3D{role}"
        )
        (error,) = live_errors(config, role="worker")
        assert error.message.startswith(f"The role {role} lacks rights of a worker: ")
        assert "horsies_migrations" not in error.message
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {role}".encode())
        connection.execute(f"REVOKE INSERT ON horsies_migrations FROM {role}".encode())
    assert live_errors(config, role="worker") == []
    assert live_notes(config) == []


def test_a_live_check_names_the_session_that_locks_a_table(database_url: str) -> None:
    with psycopg.connect(database_url) as holder:
        apply_migrations(holder)
        holder.commit()
        holder.execute("LOCK TABLE horsies_migrations IN ACCESS EXCLUSIVE MODE")
        config = PostgresConfig(database_url=database_url)
        (error,) = live_errors(config)
        pid = holder.info.backend_pid
    assert error.message.startswith(
        f"The tables of horsies cannot be used. Another session locks horsies_migrations: pid {pid} ("
    )
    assert error.message.endswith(f"to end it: SELECT pg_terminate_backend({pid})")


def test_a_live_check_says_that_migrations_are_missing(
    database_url: str, horsies: Run, tmp_path: Path
) -> None:
    path = tmp_path / f"live_{uuid.uuid4().hex}.py"
    path.write_text(f"from horsies import Horsies\n\napp = Horsies({database_url!r})\n")
    yet = "note: The schema public of this database has no tables of horsies yet; `horsies migrate`"
    assert yet in horsies("check", f"{path}:app", "--live").out
    with psycopg.connect(database_url, autocommit=True) as connection:
        apply_migrations(connection)
        assert live_notes(PostgresConfig(database_url=database_url)) == []
    newer, _ = following()
    with patch.object(migrate, "_MIGRATIONS", (*migrate._MIGRATIONS, newer)):
        (note,) = live_notes(PostgresConfig(database_url=database_url))
    assert f"lacks 1 migration(s), beginning with {newer.version:04d} " in note
