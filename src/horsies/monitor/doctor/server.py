"""Checks of the server and the schema: settings, triggers, indexes, vacuum, held xmin, sizes, rights.

Each check reads its facts in a script and judges them in a pure function.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from horsies.db.statement import Nothing, Script
from horsies.db.statements.doctor import (
    ServerState,
    XminHolder,
    find_xmin_holders,
    read_server_state,
)
from horsies.monitor.doctor.findings import Check, Facts, Finding, Level, Limits, level_of
from horsies.words import lasting

OLDEST_SERVER = 150_000


def _settings(facts: Facts) -> Script[list[Finding]]:
    (server,) = yield from facts.read(read_server_state, Nothing())
    return judge_settings(server)


def judge_settings(server: ServerState) -> list[Finding]:
    findings = []
    if server.version_number < OLDEST_SERVER:
        sentence = f"PostgreSQL {server.version} is older than 15, the oldest supported version."
        findings.append(Finding(Level.RED, sentence, remedy="upgrade the server"))
    if server.encoding != "UTF8":
        sentence = f"The database {server.database_name} is encoded in {server.encoding}."
        findings.append(
            Finding(Level.RED, sentence, remedy="create a database with ENCODING 'UTF8'")
        )
    if not server.has_fsync:
        sentence = "fsync is off: a crash of the server can destroy the database."
        remedy = "ALTER SYSTEM SET fsync = on; SELECT pg_reload_conf();"
        findings.append(Finding(Level.RED, sentence, (), remedy, True))
    if server.synchronous_commit == "off":
        sentence = "synchronous_commit is off: a crash of the server loses tasks that were sent."
        remedy = f'ALTER DATABASE "{server.database_name}" SET synchronous_commit = on;'
        findings.append(Finding(Level.YELLOW, sentence, (), remedy, True))
    return findings


def _standby(facts: Facts) -> Script[list[Finding]]:
    (server,) = yield from facts.read(read_server_state, Nothing())
    return judge_standby(server)


def judge_standby(server: ServerState) -> list[Finding]:
    if server.is_standby:
        sentence = "The address leads to a standby, which refuses every write."
        advice = "name the primary in the database URL, or add target_session_attrs=read-write"
        return [Finding(Level.RED, sentence, remedy=advice)]
    if server.is_read_only:
        sentence = "default_transaction_read_only is on: workers and producers cannot write."
        remedy = (
            "SET default_transaction_read_only = off; "
            f'ALTER DATABASE "{server.database_name}" RESET default_transaction_read_only;'
        )
        return [Finding(Level.RED, sentence, (), remedy, True)]
    return []


def _held_xmin(facts: Facts) -> Script[list[Finding]]:
    holders = yield from facts.read(find_xmin_holders, Nothing())
    return judge_xmin(holders, facts.limits)


def judge_xmin(holders: Iterable[XminHolder], limits: Limits) -> list[Finding]:
    findings = []
    for holder in holders:
        level = level_of(holder.seconds or 0.0, limits.xmin_seconds)
        if holder.seconds is None:
            level = level_of(holder.transactions, limits.xmin_transactions)
        if level is not Level.GREEN:
            findings.append(_xmin_finding(holder, level))
    return findings


def _xmin_finding(holder: XminHolder, level: Level) -> Finding:
    detail = f" ({holder.detail})" if holder.detail else ""
    evidence = (f"{holder.transactions:,} transactions began since",)
    match holder.kind:
        case "slot":
            sentence = f"The replication slot {holder.name}{detail} keeps dead rows from vacuum."
            remedy = f"SELECT pg_drop_replication_slot('{holder.name}');"
        case "prepared":
            sentence = f"The prepared transaction {holder.name}{detail} keeps dead rows from vacuum"
            sentence += f" for {lasting(holder.seconds or 0)}."
            remedy = f"ROLLBACK PREPARED '{holder.name}';"
        case _:
            sentence = f"The transaction of pid {holder.name}{detail} keeps dead rows from vacuum"
            sentence += f" for {lasting(holder.seconds or 0)}."
            remedy = f"SELECT pg_terminate_backend({holder.name});"
    return Finding(level, sentence, evidence, remedy, True)


def _notify_queue(facts: Facts) -> Script[list[Finding]]:
    (server,) = yield from facts.read(read_server_state, Nothing())
    return judge_notify_queue(server, facts.limits)


def judge_notify_queue(server: ServerState, limits: Limits) -> list[Finding]:
    level = level_of(server.notification_usage, limits.notification_usage)
    if level is Level.GREEN:
        return []
    sentence = f"The notification queue of the server is {server.notification_usage:.0%} full."
    remedy = (
        "SELECT pid, application_name, xact_start FROM pg_stat_activity "
        "WHERE state <> 'idle' ORDER BY xact_start; -- a session in a long transaction listens"
    )
    return [Finding(level, sentence, (), remedy, True)]


def _connections(facts: Facts) -> Script[list[Finding]]:
    (server,) = yield from facts.read(read_server_state, Nothing())
    return judge_connections(server, facts.limits)


def judge_connections(server: ServerState, limits: Limits) -> list[Finding]:
    level = level_of(server.connections / server.connection_limit, limits.connection_share)
    if level is Level.GREEN:
        return []
    sentence = f"{server.connections} of {server.connection_limit} connections are in use."
    evidence = (f"{server.own_connections} of them belong to horsies",)
    advice = "lower pool_size and max_overflow of the producers, or raise max_connections"
    return [Finding(level, sentence, evidence, advice)]


def _clock(facts: Facts) -> Script[list[Finding]]:
    before = facts.now()
    (server,) = yield read_server_state, Nothing()
    return judge_clock(before, server.server_time, facts.now(), facts.limits)


def judge_clock(
    before: datetime, server_time: datetime, after: datetime, limits: Limits
) -> list[Finding]:
    """Compare the clocks, with half of the round trip allowed for."""
    middle = before + (after - before) / 2
    difference = (server_time - middle).total_seconds()
    certain = abs(difference) - (after - before).total_seconds() / 2
    level = level_of(certain, limits.clock_seconds)
    if level is Level.GREEN:
        return []
    word = "behind" if difference > 0 else "ahead of"
    sentence = f"The clock of this machine is {lasting(abs(difference))} {word} the server's."
    return [Finding(level, sentence, remedy="synchronise both clocks by NTP")]


SERVER_CHECKS = (
    Check(
        "standby",
        "whether the server accepts writes",
        "",
        "a standby; default_transaction_read_only is on",
        _standby,
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "settings",
        "version and encoding, fsync, synchronous_commit",
        "synchronous_commit is off",
        "older than PostgreSQL 15; not UTF8; fsync is off",
        _settings,
        needs_tables=False,
    ),
    Check(
        "held-xmin",
        "transactions, replication slots and prepared transactions that keep dead rows",
        "for 5 minutes",
        "for an hour",
        _held_xmin,
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "notify-queue",
        "notification queue of the server",
        "10 % full",
        "50 % full",
        _notify_queue,
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "connections",
        "connections in use",
        "80 % of the limit",
        "95 % of the limit",
        _connections,
        needs_tables=False,
    ),
    Check(
        "clock",
        "clock of this machine against the server's",
        "a second apart",
        "30 seconds apart",
        _clock,
        needs_tables=False,
    ),
)
