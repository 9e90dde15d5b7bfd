"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from horsies import AppConfig, Err, Ok, PostgresConfig
from horsies.app import Horsies
from horsies.check import live_errors
from horsies.db.migrate import apply_migrations
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError
from horsies.tasks.handle import TaskHandle
from tests.support.applications import Call
from tests.support.database import Database
from tests.support.doc_pages import REPOSITORY
from tests.support.proxy import Proxy
from tests.support.rows import finish

# Results


def test_a_get_after_an_outage_connects_by_itself(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    @distant_app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    handle = add.send(1).unwrap()
    finish(connection, handle.task_id)
    proxy.stop()
    # Failed reconnects: the next one by the clock alone is seconds away.
    for _ in range(6):
        assert distant_app.handle(handle.task_id).get(timeout_ms=0).is_err()
    proxy.start()
    for timeout_ms in (0, 20_000):
        assert call(distant_app, distant_app.handle(handle.task_id), "get", timeout_ms).is_ok()


# Examples of the documentation

RUN_PAGE = """
from tests.project.test_docs import _run_page
app = _run_page("sending.md")["app"]
print(app.database_url)
app.close()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path that the user of an embedded server may enter."""
    parent = Path(tempfile.mkdtemp(prefix="horsies-embedded-"))
    parent.chmod(0o755)
    yield parent / "data"
    shutil.rmtree(parent)


def test_the_examples_of_sends_run_with_the_embedded_database(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE],
        cwd=REPOSITORY,
        env=os.environ | {"HORSIES_DATABASE_URL": f"embedded://{directory}"},
        timeout=120,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = done.stdout.splitlines()[-1]
    assert address.startswith("postgresql://")
    assert str(directory) in address


def test_the_address_for_other_libraries_is_one_that_libpq_reads() -> None:
    app = Horsies("postgresql+psycopg://app:hunter2@127.0.0.1:1/shop")
    assert app.database_url == "postgresql://app:hunter2@127.0.0.1:1/shop"


# Forgotten unwraps

FAILED = Err(BrokerOperationError(BrokerErrorCode.NO_BROKER, "no database"))


@pytest.mark.parametrize("result", [Ok(1), Ok(False), FAILED])
def test_ok_and_err_are_neither_true_nor_false(result: Any) -> None:
    with pytest.raises(TypeError, match=r"is neither true nor false; call is_ok\(\) or is_err\(\)"):
        bool(result)


@pytest.mark.parametrize(
    ("result", "name", "hint"),
    [
        (Ok(TaskHandle("x", None)), "get", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "task_id", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "result_of", ""),
        (FAILED, "message", "; call .unwrap_err() first"),
        (
            FAILED,
            "get",
            "; it holds the error of a failed call: match it, or call .unwrap() to raise it",
        ),
    ],
)
def test_an_attribute_of_the_value_says_unwrap_first(result: Any, name: str, hint: str) -> None:
    kind = type(result).__name__
    with pytest.raises(AttributeError) as refused:
        getattr(result, name)
    assert str(refused.value) == f"'{kind}' object has no attribute '{name}'{hint}"


# A live check of tables and rights

PRODUCER = """
GRANT SELECT ON horsies_migrations, horsies_task_attempts TO {role};
GRANT SELECT, INSERT, UPDATE ON horsies_tasks, horsies_workflows, horsies_workflow_tasks TO {role};
GRANT SELECT, INSERT, DELETE ON horsies_workflow_signals TO {role};
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
            "This database has no tables of horsies; create them with `horsies migrate`.",
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
