"""The short way of a send: the same rows as by psycopg, and sessions that lose their statements."""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest

from horsies.app import Horsies
from tests.support.applications import Call, Task, store_task
from tests.support.database import Database, lock_waiters
from tests.support.rows import stored
from tests.support.wait import wait_until

ODD_ZONE = timezone(timedelta(hours=-5, minutes=-45, seconds=-7))
OPTIONS: list[dict[str, Any]] = [
    {},
    {"priority": 7, "timeout_ms": 1_500, "retention": timedelta(seconds=1.5)},
    {"good_until": datetime(2999, 12, 31, 23, 59, 59, 999_999, tzinfo=ODD_ZONE)},
    {"at": datetime(9998, 1, 2, 3, 4, 5, 6, tzinfo=ODD_ZONE), "idempotency_key": "a\\b'c\"d\ne\tf"},
    {
        "headers": {"ténant": 'blue "quoted" \\ \u2028'},
        "idempotency_key": "NULL",
        "unique": "while_open",
    },
]
OWN = ("id", "sent_at", "created_at", "updated_at", "enqueue_sha")


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("value", ["", "\\N \\x41 {} \x1f\n", "é\U0001f40e\u2028", 1e300, None])
def test_the_row_is_the_one_that_psycopg_would_write(
    app: Horsies,
    connection: Database,
    process_url: str,
    call: Call,
    options: dict[str, Any],
    value: Any,
) -> None:
    store, rows = store_task(app), []
    call(app, store.with_options(**options), "send", value).unwrap()
    rows += stored(connection)
    connection.execute("TRUNCATE horsies_tasks CASCADE")
    with psycopg.connect(process_url) as callers:
        store.with_options(**options, transaction=callers).send(value).unwrap()
    rows += stored(connection)
    for row in rows:
        if "at" not in options:
            assert row.pop("enqueued_at") == row["created_at"]
        for name in OWN:
            del row[name]
    assert rows[0] == rows[1]


def test_a_session_that_has_lost_its_statements_is_no_failure(
    app: Horsies, add: Task, connection: Database
) -> None:
    add.send(1).unwrap()
    with app.get_broker().database.connection() as ours:
        ours.execute("DEALLOCATE ALL")
    add.send(2).unwrap()
    add.send(3).unwrap()
    assert len(stored(connection)) == 3


def test_a_send_that_is_cancelled_ends_its_statement(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    with (
        psycopg.connect(process_url) as blocker,
        psycopg.connect(process_url, autocommit=True) as watcher,
    ):

        async def main() -> None:
            (await add.send_async(1)).unwrap()
            blocker.execute("LOCK TABLE horsies_tasks IN EXCLUSIVE MODE")
            sending = asyncio.create_task(add.send_async(2))
            await asyncio.to_thread(wait_until, lambda: lock_waiters(watcher))
            sending.cancel()
            with pytest.raises(asyncio.CancelledError):
                await sending
            await asyncio.to_thread(wait_until, lambda: not lock_waiters(watcher))
            blocker.rollback()
            (await add.send_async(3)).unwrap()
            await app.get_broker().close_async()

        asyncio.run(main())
    assert [row["args"] for row in stored(connection)] == ["[1]", "[3]"]


READS_ONLY = "SET default_transaction_read_only = on"


def test_a_session_that_only_reads_is_not_used_again(
    app: Horsies, add: Task, connection: Database
) -> None:
    """A standby reached during a failover: the next send may find the new primary."""
    database = app.get_broker().database

    async def send_async() -> None:
        async with database.connection_async() as own:
            await own.execute(READS_ONLY)
        assert (await add.send_async(1, 2)).unwrap_err().retryable
        (await add.send_async(1, 2)).unwrap()
        await app.close_async()

    for send in (lambda: add.send(1, 2), lambda: add.send_many([add.bind(1, 2)] * 2)):
        with database.connection() as own:
            own.execute(READS_ONLY)
        assert send().unwrap_err().retryable
        send().unwrap()
    asyncio.run(send_async())
