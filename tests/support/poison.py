"""A trigger that rejects a chosen change of chosen tasks or runs, which makes their rows poisonous."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import LiteralString

from psycopg import sql

from tests.support.database import Database

# The DETAIL of the error contains this text, as a real DETAIL could contain a row.
SECRET = "contents of a row"

REFUSE = """
CREATE FUNCTION test_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'this row is poisonous' USING ERRCODE = TG_ARGV[0], DETAIL = {secret};
END
$$
"""
IMMEDIATE = """
CREATE TRIGGER test_poison BEFORE {event} ON {table} FOR EACH ROW WHEN ({condition})
EXECUTE FUNCTION test_refuse({state})
"""
# Raises at COMMIT, after every statement of the transaction has succeeded.
DEFERRED = """
CREATE CONSTRAINT TRIGGER test_poison AFTER {event} ON {table} DEFERRABLE INITIALLY DEFERRED
FOR EACH ROW WHEN ({condition}) EXECUTE FUNCTION test_refuse({state})
"""


@contextmanager
def poisoned(
    connection: Database,
    condition: LiteralString,
    *values: object,
    table: str = "horsies_tasks",
    state: str = "54000",
    event: LiteralString = "UPDATE",
    trigger: LiteralString = IMMEDIATE,
) -> Iterator[None]:
    """Reject every event for which the condition on OLD and NEW is true, with this SQLSTATE."""
    literals = [sql.Literal(value) for value in values]
    connection.execute(sql.SQL(REFUSE).format(secret=sql.Literal(SECRET)))
    try:
        connection.execute(
            sql.SQL(trigger).format(
                event=sql.SQL(event),
                table=sql.Identifier(table),
                condition=sql.SQL(condition).format(*literals),
                state=sql.Literal(state),
            )
        )
        yield
    finally:
        connection.execute("DROP FUNCTION test_refuse() CASCADE")


WAIT = """
CREATE FUNCTION test_wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_sleep(TG_ARGV[0]::float8);
    RETURN NEW;
END
$$
"""
SLOW_TRIGGER = """
CREATE {kind} test_slow AFTER UPDATE ON horsies_tasks {timing} FOR EACH ROW WHEN ({condition})
EXECUTE FUNCTION test_wait({seconds})
"""


@contextmanager
def slowed(
    connection: Database,
    condition: LiteralString,
    *values: object,
    seconds: float,
    deferred: bool = False,
) -> Iterator[None]:
    """Delay every update of a task for which the condition is true, or the COMMIT after it."""
    kind = sql.SQL("CONSTRAINT TRIGGER" if deferred else "TRIGGER")
    timing = sql.SQL("DEFERRABLE INITIALLY DEFERRED" if deferred else "")
    literals = [sql.Literal(value) for value in values]
    connection.execute(WAIT)
    try:
        connection.execute(
            sql.SQL(SLOW_TRIGGER).format(
                kind=kind,
                timing=timing,
                condition=sql.SQL(condition).format(*literals),
                seconds=sql.Literal(str(seconds)),
            )
        )
        yield
    finally:
        connection.execute("DROP FUNCTION test_wait() CASCADE")
