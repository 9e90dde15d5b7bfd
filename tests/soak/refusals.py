"""A database that refuses changes for a while: errors at COMMIT, and timeouts that an administrator sets.

A deferred constraint trigger reads a table of refusals when a transaction commits, so a fault needs no lock
on the table of tasks and outlives a restart of the server.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import psycopg
from psycopg import sql

SETUP = """
CREATE TABLE soak_refusals (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    statuses text[] NOT NULL,       -- refused are tasks that get one of these
    schedule_name text,             -- and that this schedule sends, where it is not null
    divisor integer NOT NULL,       -- and whose hash leaves the remainder, so the same ones each time
    remainder integer NOT NULL,
    chance double precision NOT NULL,
    state text NOT NULL
);
CREATE FUNCTION soak_refuse() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    refusal public.soak_refusals;
BEGIN
    FOR refusal IN SELECT * FROM public.soak_refusals LOOP
        IF NEW.status::text = ANY (refusal.statuses)
            AND (TG_OP = 'INSERT' OR OLD.status IS DISTINCT FROM NEW.status)
            AND (refusal.schedule_name IS NULL OR NEW.schedule_name = refusal.schedule_name)
            AND abs(hashtext(NEW.id::text)) % refusal.divisor = refusal.remainder
            AND random() < refusal.chance
        THEN
            RAISE EXCEPTION 'refused for a while' USING ERRCODE = refusal.state;
        END IF;
    END LOOP;
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER soak_refuse AFTER INSERT OR UPDATE ON horsies_tasks
    DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION soak_refuse();
"""
INSERT = """
INSERT INTO soak_refusals (statuses, schedule_name, divisor, remainder, chance, state)
VALUES (%s, %s, %s, %s, %s, %s) RETURNING id
"""
SESSIONS = """
SELECT pid FROM pg_stat_activity WHERE backend_type = 'client backend' AND pid <> pg_backend_pid()
    AND datname = current_database() ORDER BY pid
"""
END_SESSIONS = "SELECT pg_terminate_backend(pid) FROM unnest(%s::integer[]) AS pid"

ENDS, CLAIMS, SENDS = ["COMPLETED", "FAILED"], ["CLAIMED", "RUNNING"], ["PENDING"]
# Errors of the data: the same tasks are refused until the fault is over.
LASTING_STATES = ("P0001", "XX000", "23514", "54000", "42501")
# A repetition helps, and a producer learns that from the error.
PASSING_STATES = ("40001", "40P01", "53100", "53200", "57014")
TIMEOUTS = {
    "statement_timeout": "300ms",
    "lock_timeout": "50ms",
    "idle_in_transaction_session_timeout": "200ms",
    "idle_session_timeout": "1500ms",
}
# The sessions of faults themselves are exempt.
EXEMPT = " ".join(f"-c {name}=0" for name in TIMEOUTS)
REACH_SECONDS = 60.0


class Refusal(NamedTuple):
    """A row of the table of refusals."""

    statuses: list[str]
    schedule_name: str | None
    divisor: int
    remainder: int
    chance: float
    state: str


def lasting(dice: random.Random, schedule_name: str) -> Refusal:
    """Refuse the ends or the starts of a seventh of all tasks, or every slot of one schedule."""
    state = dice.choice(LASTING_STATES)
    if dice.random() < 0.25:
        return Refusal(SENDS, schedule_name, 1, 0, 1.0, state)
    return Refusal(dice.choice((ENDS, ENDS, CLAIMS)), None, 7, dice.randrange(7), 1.0, state)


def passing(dice: random.Random) -> Refusal:
    """Refuse one change in ten, whichever it is: sends, claims, ends and slots."""
    return Refusal(ENDS + CLAIMS + SENDS, None, 1, 0, 0.1, dice.choice(PASSING_STATES))


def execute(url: str, query: str | sql.Composed, values: Sequence[Any] = ()) -> list[Any]:
    """Execute a statement as soon as the server can be reached: other faults go on meanwhile."""
    deadline = time.monotonic() + REACH_SECONDS
    while True:
        try:
            with psycopg.connect(url, autocommit=True, options=EXEMPT) as connection:
                text = query.encode() if isinstance(query, str) else query
                done = connection.execute(text, values or None)
                return done.fetchall() if done.description else []
        except psycopg.OperationalError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


@contextmanager
def refused(url: str, refusal: Refusal) -> Iterator[None]:
    """Refuse the commits of these changes."""
    execute(url, INSERT, refusal)
    try:
        yield
    finally:
        execute(url, "DELETE FROM soak_refusals")


@contextmanager
def timed_out(url: str, setting: str) -> Iterator[None]:
    """Give all new sessions a short timeout, and make all sessions new, before and after."""
    name = sql.Identifier(setting)
    value = sql.Literal(TIMEOUTS[setting])
    execute(url, sql.SQL("ALTER DATABASE postgres SET {} = {}").format(name, value))
    end_sessions(url)
    try:
        yield
    finally:
        execute(url, sql.SQL("ALTER DATABASE postgres RESET {}").format(name))
        end_sessions(url)


def end_sessions(url: str, dice: random.Random | None = None) -> None:
    """End all sessions, or about half of them."""
    pids = [pid for (pid,) in execute(url, SESSIONS) if dice is None or dice.random() < 0.5]
    execute(url, END_SESSIONS, (pids,))


def backend_pids(url: str) -> list[int]:
    """The server's processes that serve a session."""
    return [pid for (pid,) in execute(url, SESSIONS)]
