"""The page about sends from SQL: a worker runs the tasks that its trigger and its clients send."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path

import psycopg
import pytest

from tests.support.commands import running_worker
from tests.support.database import Database
from tests.support.doc_pages import blocks, files, page, rows, section
from tests.support.wait import wait_until

PAGE = page("sending-from-sql.md")
FILES = files(PAGE)
GO_PACKAGES = Path("/usr/share/gocode")


def wait_for_result(connection: Database, order_id: int, text: str) -> None:
    query = "SELECT result FROM horsies_tasks WHERE kwargs::jsonb ->> 'order_id' = %s"
    wait_until(
        lambda: (
            [text in (result or "") for (result,) in connection.execute(query, (str(order_id),))]
            == [True]
        ),
        what=f"the result of order {order_id}",
    )


def registered(connection: Database) -> bool:
    found = connection.execute("SELECT FROM horsies_task_defaults WHERE task_name = 'confirm'")
    return found.rowcount == 1


def node_modules() -> str | None:
    if not (shutil.which("tsx") and shutil.which("npm")):
        return None
    found = subprocess.run(["npm", "root", "-g"], capture_output=True, text=True, check=False)
    directory = Path(found.stdout.strip())
    return str(directory) if (directory / "pg").is_dir() else None


def run_client(command: list[str], directory: Path, url: str, **variables: str) -> str:
    finished = subprocess.run(
        command,
        cwd=directory,
        env={**os.environ, "DATABASE_URL": url, **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return finished.stdout.strip()


def send_with_psql(directory: Path, url: str) -> str:
    if shutil.which("psql") is None:
        pytest.skip("psql is not installed: apt-get install postgresql-client")
    output = run_client(["sh", "send.sh"], directory, url)
    return output.split()[2]


def send_with_typescript(directory: Path, url: str) -> str:
    modules = node_modules()
    if modules is None:
        pytest.skip("tsx or pg is not installed: npm install -g tsx pg")
    return run_client(["tsx", "send.ts"], directory, url, NODE_PATH=modules)


def send_with_go(directory: Path, url: str) -> str:
    if shutil.which("go") is None or not (GO_PACKAGES / "src/github.com/lib/pq").is_dir():
        pytest.skip(
            "Go or its driver is not installed: apt-get install golang-go golang-github-lib-pq-dev"
        )
    variables = {
        "GO111MODULE": "off",
        "GOPATH": str(GO_PACKAGES),
        "GOCACHE": str(directory / "cache"),
    }
    return run_client(["go", "run", "send.go"], directory, go_url(url), **variables)


def go_url(url: str) -> str:
    """Return the address as the driver reads it: no TLS on a Unix socket."""
    return f"{url}{'&' if '?' in url else '?'}sslmode=disable"


CLIENTS: Mapping[str, tuple[Callable[[Path, str], str], int, str]] = {
    "psql": (send_with_psql, 21, "order 21 in en"),
    "typescript": (send_with_typescript, 22, "order 22 in de"),
    "go": (send_with_go, 23, "order 23 in fr"),
}


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("client", CLIENTS)
def test_a_worker_runs_the_task_of_another_language(
    client: str, directory: Path, migrated_url: str
) -> None:
    send, order_id, text = CLIENTS[client]
    with (
        psycopg.connect(migrated_url, autocommit=True) as connection,
        running_worker(directory, migrated_url),
    ):
        connection.execute("CREATE SCHEMA shop; CREATE TABLE shop.archive (order_id integer)")
        wait_until(lambda: registered(connection))
        task_id = send(directory, migrated_url)
        wait_for_result(connection, order_id, text)
        found = connection.execute("SELECT id::text, timeout_ms, max_retries FROM horsies_tasks")
        assert found.fetchall() == [(task_id, 60_000, 2)]


def test_a_trigger_in_another_schema_sends_tasks_and_a_rollback_sends_none(
    directory: Path, migrated_url: str
) -> None:
    insert = "INSERT INTO shop.orders (language) SELECT unnest(%s::text[])"
    with (
        psycopg.connect(migrated_url, autocommit=True) as connection,
        running_worker(directory, migrated_url),
    ):
        connection.execute(FILES["trigger.sql"].encode())
        wait_until(lambda: registered(connection))
        with connection.transaction(force_rollback=True):
            connection.execute(insert, (["xx"],))
        connection.execute(insert, ([],))
        connection.execute(insert, (["en", "de"],))
        wait_for_result(connection, 2, "order 2 in en")
        wait_for_result(connection, 3, "order 3 in de")
        (count,) = connection.execute("SELECT count(*) FROM horsies_tasks").fetchone() or (0,)
        assert count == 2


def test_a_role_that_does_nothing_but_send_needs_no_more_than_the_page_says(
    migrated_url: str,
) -> None:
    (grants,) = (block.text for block in blocks(section(PAGE, "Rights")))
    role = f"sender_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(migrated_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {role}".encode())
        try:
            grants = grants.replace("shop_trigger", role).replace("SCHEMA horsies", "SCHEMA public")
            connection.execute(grants.replace("horsies.", "public.").encode())
            connection.execute(f"SET ROLE {role}".encode())
            send = "SELECT horsies_send_v1('a', p_queue => 'q', p_idempotency_key => 'k')"
            assert connection.execute(send).fetchall() == connection.execute(send).fetchall()
        finally:
            connection.execute(f"RESET ROLE; DROP OWNED BY {role}; DROP ROLE {role}".encode())


def test_the_statements_and_the_table_of_refusals_are_true(connection: Database) -> None:
    defaults = """INSERT INTO horsies_task_defaults VALUES ('confirm', 'default',
        '{"default": {"priority": 100, "retention_seconds": null}}', NULL, 0, NULL, false, false, 16777216)"""
    connection.execute(defaults)
    statements = [block.text for block in blocks(PAGE) if block.language == "sql"]
    sends = [text for text in statements if text.startswith("SELECT")]
    assert len(sends) == 3
    for text in sends:
        assert connection.execute(text.encode()).fetchall()
    refused = list(rows(section(PAGE, "What is refused")))
    assert len(refused) >= 10
    for call, sentence in refused:
        with pytest.raises(psycopg.errors.InvalidParameterValue) as caught:
            connection.execute(f"SELECT {call.strip('`')}".encode())
        assert caught.value.diag.message_primary == sentence
