"""A server that speaks another language: nothing but the words of messages changes."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType

import pytest

from horsies import AppConfig, Horsies, PostgresConfig, TaskError, TaskResult
from tests.support.database import Database, terminate
from tests.support.poison import poisoned
from tests.support.proxy import Proxy, RefusingServer
from tests.support.wait import wait_until
from tests.support.workers import Fleet, Journal

pytestmark = pytest.mark.direct("the proxy translates what the server says, not what a pooler says")

ENDS = "NEW.id = {} AND NEW.status IN ('COMPLETED', 'FAILED')"
QUICK_RETRIES = {"resilience": {"db_retry_initial_ms": 100, "db_retry_max_ms": 500}}


def in_german(message: bytes) -> bytes:
    """Translate the words of an error or a notice; codes, names and the rest stay."""
    if message[:1] not in (b"E", b"N"):
        return message
    fields = [_translated(field) for field in message[5:].split(b"\0") if field]
    body = b"\0".join([*fields, b"", b""])
    return message[:1] + (len(body) + 4).to_bytes(4, "big") + body


def _translated(field: bytes) -> bytes:
    match field[:1]:
        case b"S":
            return b"SFEHLER"
        case b"M":
            return b"MEtwas ging schief, und das hier sagt niemandem auf Englisch, was"
        case b"D" | b"H":
            return field[:1] + "Näheres auf Anfrage".encode()
        case b"W":
            return field.replace(b"PL/pgSQL function", b"PL/pgSQL-Funktion").replace(
                b" line ", b" Zeile "
            )
        case _:
            return field


@pytest.fixture
def translated(fleet: Fleet) -> Iterator[Proxy]:
    """The way to a server that answers in German."""
    with Proxy(fleet.database_url) as proxy:
        proxy.rewrite = in_german
        yield proxy


def test_a_worker_tells_errors_apart_by_their_codes(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, translated: Proxy
) -> None:
    worker = fleet.start(database_url=translated.url, config=QUICK_RETRIES)
    refused = programs.add.send(1, 1).unwrap()
    with poisoned(connection, ENDS, refused.task_id):
        # A data error: that task is blocked, the others continue.
        assert worker.wait_for("blocked")["id"] == refused.task_id
        assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert refused.get(30_000).ok_value == 2
    # A session that is ended: the task that runs is not affected.
    running = programs.rest_until_released.send("session").unwrap()
    wait_until(lambda: journal.lines("start", running.task_id))
    terminate(connection, "horsies:turn")
    worker.wait_for("database_back")
    journal.release("session")
    assert running.get(30_000).is_ok()
    assert "Etwas ging schief" in worker.log()
    assert worker.stop() == 0


def test_a_producer_tells_errors_apart_by_their_codes(
    connection: Database, translated: Proxy
) -> None:
    app = Horsies(AppConfig(broker=PostgresConfig(database_url=translated.url)))

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        raise NotImplementedError

    try:
        keyed = add.with_options(idempotency_key="once")
        assert keyed.send(1, 2).unwrap().task_id == keyed.send(1, 2).unwrap().task_id
        connection.execute("ALTER TABLE horsies_tasks ADD CONSTRAINT e2e CHECK (args <> '[5,5]')")
        error = add.send(5, 5).unwrap_err()
        assert not error.retryable
        terminate(connection, "horsies:%")
        assert add.send(1, 2).is_ok()
    finally:
        connection.execute("ALTER TABLE horsies_tasks DROP CONSTRAINT IF EXISTS e2e")
        app.close()


def test_a_refused_login_is_told_apart_by_its_english_words_only(fleet: Fleet) -> None:
    """The library gives no code for a failed login: in another language a worker waits and says why."""
    with RefusingServer() as server:
        url = f"postgresql://app@127.0.0.1:{server.port}/app?sslmode=disable"
        worker = fleet.start(database_url=url, ready=False)
        assert worker.wait(30) == 1
    with RefusingServer("Passwort-Authentifizierung für Benutzer »app« fehlgeschlagen") as server:
        url = f"postgresql://app@127.0.0.1:{server.port}/app?sslmode=disable"
        worker = fleet.start(database_url=url, ready=False, config=QUICK_RETRIES)
        worker.wait_for("database_lost", times=2)
        assert "Passwort-Authentifizierung" in worker.log()
