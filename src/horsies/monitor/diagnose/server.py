"""Server checks: version and settings, writes, held xmin, notifications, connections, clocks.

Each check reads its facts in a script and judges them in a pure function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime

from horsies.db.blockers import READERS_WAIT, blocker_sentence, remedy_of
from horsies.db.statement import Script
from horsies.db.statements.doctor import (
    ServerState,
    XminHolder,
    find_xmin_holders,
    read_server_state,
)
from horsies.db.statements.locks import Blocker, find_blockers
from horsies.findings import Finding
from horsies.monitor.diagnose.checks import Check, Rule, graded, red, yellow
from horsies.monitor.facts import Facts, Limits
from horsies.words import lasting

OLDEST_SERVER = 150_000


def _of_server(judge: Callable[[ServerState, Limits], Iterable[Finding]]) -> Rule:
    def find(facts: Facts) -> Script[Iterable[Finding]]:
        (server,) = yield from facts.read(read_server_state())
        return judge(server, facts.limits)

    return find


def judge_settings(server: ServerState, limits: Limits) -> Iterator[Finding]:
    if server.version_number < OLDEST_SERVER:
        sentence = f"PostgreSQL {server.version} is older than 15, the oldest supported version."
        yield red(sentence, "upgrade the server")
    if server.encoding != "UTF8":
        sentence = f"The database {server.database_name} is encoded in {server.encoding}."
        yield red(sentence, "create a database with ENCODING 'UTF8'")
    if not server.has_fsync:
        sentence = "fsync is off: a crash of the server can destroy the database."
        yield red(sentence, "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();", is_sql=True)
    if server.synchronous_commit == "off":
        sentence = "synchronous_commit is off: a crash of the server loses tasks that were sent."
        remedy = f'ALTER DATABASE "{server.database_name}" SET synchronous_commit = on;'
        yield yellow(sentence, remedy, is_sql=True)


def judge_standby(server: ServerState, limits: Limits) -> Iterator[Finding]:
    if server.is_standby:
        advice = "name the primary in the database URL, or add target_session_attrs=read-write"
        yield red("The address leads to a standby, which refuses every write.", advice)
    elif server.is_read_only:
        sentence = "default_transaction_read_only is on: workers and producers cannot write."
        remedy = (
            "SET default_transaction_read_only = off; "
            f'ALTER DATABASE "{server.database_name}" RESET default_transaction_read_only;'
        )
        yield red(sentence, remedy, is_sql=True)


def _held_xmin(facts: Facts) -> Script[Iterable[Finding]]:
    holders = yield from facts.read(find_xmin_holders())
    return judge_xmin(holders, facts.limits)


def judge_xmin(holders: Iterable[XminHolder], limits: Limits) -> Iterator[Finding]:
    for holder in holders:
        grade = graded(holder.seconds or 0.0, limits.xmin_seconds)
        if holder.seconds is None:
            grade = graded(holder.transactions, limits.xmin_transactions)
        if grade is not None:
            sentence, remedy = _xmin_words(holder)
            evidence = [f"{holder.transactions:,} transactions began since"]
            yield grade(sentence, remedy, evidence, is_sql=not holder.changes_schema)


def _xmin_words(holder: XminHolder) -> tuple[str, str]:
    detail = f" ({holder.detail})" if holder.detail else ""
    removing = "vacuum from removing dead rows"
    keeps = f"{holder.name}{detail} prevents {removing}"
    age = lasting(holder.seconds or 0)
    since = f"{holder.name}{detail} has prevented {removing} for {age}."
    match holder.kind:
        case "slot":
            remedy = f"SELECT pg_drop_replication_slot('{holder.name}');"
            return f"The replication slot {keeps}.", remedy
        case "prepared":
            return f"The prepared transaction {since}", f"ROLLBACK PREPARED '{holder.name}';"
        case _ if holder.changes_schema:
            advice = "wait until the schema change has ended; if you end its session, it is undone"
            return f"The schema change of pid {since}", advice
        case _:
            return f"The transaction of pid {since}", f"SELECT pg_terminate_backend({holder.name});"


def _locks(facts: Facts) -> Script[Iterable[Finding]]:
    seconds = facts.limits.lock_seconds
    return judge_locks((yield from facts.read(find_blockers(facts.schema, READERS_WAIT, seconds))))


def judge_locks(blockers: Sequence[Blocker]) -> Iterator[Finding]:
    if blockers:
        first, *others = blockers
        evidence = [blocker_sentence(one) for one in others]
        yield red(blocker_sentence(first), remedy_of(first), evidence, is_sql=True)


def judge_notify_queue(server: ServerState, limits: Limits) -> Iterator[Finding]:
    if grade := graded(server.notification_usage, limits.notification_usage):
        sentence = f"The notification queue of the server is {server.notification_usage:.0%} full."
        remedy = (
            "SELECT pid, application_name, xact_start FROM pg_stat_activity "
            "WHERE state <> 'idle' ORDER BY xact_start; -- a session in a long transaction listens"
        )
        yield grade(sentence, remedy, is_sql=True)


def judge_connections(server: ServerState, limits: Limits) -> Iterator[Finding]:
    if grade := graded(server.connections / server.connection_limit, limits.connection_share):
        sentence = f"{server.connections} of {server.connection_limit} connections are in use."
        advice = "lower pool_size and max_overflow of the producers, or raise max_connections"
        yield grade(sentence, advice, [f"{server.own_connections} of them belong to horsies"])


def _clock(facts: Facts) -> Script[Iterable[Finding]]:
    before = facts.now()
    (server,) = yield read_server_state()
    return judge_clock(before, server.server_time, facts.now(), facts.limits)


def judge_clock(
    before: datetime, server_time: datetime, after: datetime, limits: Limits
) -> Iterator[Finding]:
    """Compare the clocks, with a tolerance of half the round trip."""
    middle = before + (after - before) / 2
    difference = (server_time - middle).total_seconds()
    certain = abs(difference) - (after - before).total_seconds() / 2
    if grade := graded(certain, limits.clock_seconds):
        word = "behind" if difference > 0 else "ahead of"
        sentence = f"The clock of this machine is {lasting(abs(difference))} {word} the server's."
        yield grade(sentence, "synchronise both clocks by NTP")


SERVER_CHECKS = (
    Check(
        "standby",
        "whether the server accepts writes",
        "",
        "the server is a standby; default_transaction_read_only is on",
        _of_server(judge_standby),
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "settings",
        "version and encoding, fsync, synchronous_commit",
        "synchronous_commit is off",
        "the server is older than PostgreSQL 15; the encoding is not UTF8; fsync is off",
        _of_server(judge_settings),
        needs_tables=False,
    ),
    Check(
        "locks",
        "locks that delay sessions of Horsies, now or soon",
        "",
        "a session has waited for a second",
        _locks,
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "held-xmin",
        "transactions, replication slots and prepared transactions that keep vacuum from removing dead rows",
        "a transaction or slot has held vacuum back for 5 minutes",
        "a transaction or slot has held vacuum back for an hour",
        _held_xmin,
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "notify-queue",
        "notification queue of the server",
        "the queue is 10 % full",
        "the queue is 50 % full",
        _of_server(judge_notify_queue),
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "connections",
        "connections in use",
        "80 % of the limit are in use",
        "95 % of the limit are in use",
        _of_server(judge_connections),
        needs_tables=False,
    ),
    Check(
        "clock",
        "difference between the clocks of this machine and the server",
        "the clocks differ by a second",
        "the clocks differ by 30 seconds",
        _clock,
        needs_tables=False,
    ),
)
