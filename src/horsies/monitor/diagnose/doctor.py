"""``horsies doctor``: runs the checks of the server, the schema and the work, and reports findings. Each
check has its own read-only transaction with short timeouts, so that a failed or slow check does not hide
the others.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from psycopg import Connection
from psycopg.errors import LockNotAvailable

from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.listen import receives_own_notification
from horsies.db.statement import Script, run_script
from horsies.db.statements.doctor import begin_reading, read_backend
from horsies.findings import Finding, Level
from horsies.monitor.diagnose.checks import Check, red, yellow
from horsies.monitor.diagnose.schema import SCHEMA_CHECKS, has_current_schema, read_applied
from horsies.monitor.diagnose.server import SERVER_CHECKS
from horsies.monitor.diagnose.work import WORK_CHECKS
from horsies.monitor.facts import Facts, Limits
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker, failure

READING_LIMITS_MS = 10_000, 1_000
# The time limit of all checks together. After one check has timed out on a lock, the other checks
# wait only IMPATIENT_LOCK_MS, because most checks read the same tables.
PATIENCE_SECONDS = 15.0
IMPATIENT_LOCK_MS = 50
ECHO_SECONDS = 2.0
# The number of comparisons of two connections' process ids, which detect a pooler in transaction
# mode.
POOLER_TRIES = 10
# The finding of all checks that need the tables, while the tables cannot be read.
NOT_READ = Finding(
    "NOT_CHECKED",
    "Not checked, because the tables are missing or outdated.",
    Level.UNKNOWN,
    remedy="horsies migrate",
)
_WORST_FIRST = (Level.RED, Level.UNKNOWN, Level.YELLOW, Level.GREEN)


@dataclass(frozen=True, slots=True)
class CheckReport:
    """The findings of one check; without findings, the check is green."""

    id: str
    looks_at: str
    findings: tuple[Finding, ...] = ()

    @property
    def level(self) -> Level:
        return worst(finding.level for finding in self.findings)


def worst(levels: Iterable[Level]) -> Level:
    """Return the most serious level, or green without findings."""
    return min(levels, key=seriousness, default=Level.GREEN)


def seriousness(level: Level) -> int:
    """Return a number for sorting findings: the most serious level has the lowest."""
    return _WORST_FIRST.index(level)


def judge_pooler(shares_server: bool, is_declared: bool) -> Iterator[Finding]:
    if shares_server and not is_declared:
        sentence = "database_url leads through a pooler in transaction mode that is not declared."
        yield red(
            sentence, "PostgresConfig(pgbouncer_transaction_mode=True, session_database_url=...)"
        )
    if is_declared and not shares_server:
        sentence = "pgbouncer_transaction_mode is on, but connections keep their server process."
        yield yellow(sentence, "leave out pgbouncer_transaction_mode")


def _probe_pooler(database: Database) -> Iterator[Finding]:
    return judge_pooler(_shares_server(database), database.config.pgbouncer_transaction_mode)


def _shares_server(database: Database) -> bool:
    """Return whether connections share server processes between their transactions.

    A pooler reports an invented process id at login. In transaction mode, a client's server process
    changes, or two clients share a server process. No transaction stays open between the comparisons,
    because behind a small pool the next transaction would wait for it indefinitely.
    """
    with database.connect("operator") as first, database.connect("operator") as other:
        if _server_pid(first) == first.info.backend_pid:
            return False
        for _ in range(POOLER_TRIES):
            before, after, others = (_server_pid(client) for client in (first, first, other))
            if before != after or others == after:
                return True
    return False


def _server_pid(client: Connection[Any]) -> int:
    return read_backend.fetch(client)[0].pid


def _probe_notifications(database: Database) -> Iterator[Finding]:
    if not receives_own_notification(
        lambda: database.connect("operator", session=True), timeout_seconds=ECHO_SECONDS
    ):
        advice = "set session_database_url to an address that bypasses the pooler"
        yield red(f"A notification did not arrive within {ECHO_SECONDS:.0f} s.", advice)


PROBES = (
    Check(
        "pooler",
        "server processes behind database_url",
        "a transaction pooler is declared, but there is none",
        "a transaction pooler is in use, but not declared",
        None,
        needs_tables=False,
        probe=_probe_pooler,
    ),
    Check(
        "notifications",
        "arrival of a notification through session_database_url",
        "",
        "no notification arrives within 2 seconds",
        None,
        needs_tables=False,
        probe=_probe_notifications,
    ),
)
CHECKS = (*SCHEMA_CHECKS, *SERVER_CHECKS, *PROBES, *WORK_CHECKS)
CHEAP_IDS = frozenset(check.id for check in CHECKS if check.is_cheap)
SLOW_IDS = frozenset(check.id for check in CHECKS) - CHEAP_IDS


def doctor_script(facts: Facts, ids: Collection[str] = CHEAP_IDS) -> Script[list[CheckReport]]:
    """Run the checks with these ids, except probes, in one transaction; without ids, run the cheap
    checks.
    """
    reports = []
    for check in _chosen(ids):
        if check.find is not None:
            reports.append((yield from _check_script(check, facts)))
    return reports


def _chosen(ids: Collection[str] | None) -> list[Check]:
    return [check for check in CHECKS if ids is None or check.id in ids]


def _check_script(check: Check, facts: Facts) -> Script[CheckReport]:
    assert check.find is not None
    if check.needs_tables and not has_current_schema((yield from read_applied(facts))):
        return _report(check, [NOT_READ])
    return _report(check, (yield from check.find(facts)))


def _report(check: Check, findings: Iterable[Finding]) -> CheckReport:
    coded = (one if one.code else replace(one, code=check.code) for one in findings)
    return CheckReport(check.id, check.looks_at, tuple(coded))


def run_doctor(
    broker: PostgresBroker, ids: Collection[str] | None = None, limits: Limits | None = None
) -> BrokerResult[list[CheckReport]]:
    """Run all checks, or the checks with these ids; return Err if the database cannot be reached."""
    facts = Facts(broker.config.schema_name, limits or Limits())
    try:
        with broker.database.connect("operator") as connection:
            run = _Run(broker, connection, facts, time.monotonic() + PATIENCE_SECONDS)
            reports = [run.check(check) for check in _chosen(ids)]
    except Exception as error:
        return Err(failure(BrokerErrorCode.MONITORING_QUERY_FAILED, error))
    return Ok(reports)


@dataclass(slots=True)
class _Run:
    """One run of the checks on one connection, with one deadline for all checks."""

    broker: PostgresBroker
    connection: Connection[Any]
    facts: Facts
    deadline: float
    lock_ms: int = READING_LIMITS_MS[1]

    def check(self, check: Check) -> CheckReport:
        """Run one check; if it cannot read its facts, report that and continue with the other checks."""
        try:
            if check.probe is not None:
                return _report(check, check.probe(self.broker.database))
            script = _check_script(check, self.facts)
            with self._reading():
                return run_script(self.connection, script, logged=self.broker.config.echo)
        except Exception as error:
            if self.connection.closed:
                raise
            if isinstance(error, LockNotAvailable):
                self.lock_ms = IMPATIENT_LOCK_MS
            sentence = f"Not checked: {describe(error)}"
            return _report(check, [Finding("NOT_CHECKED", sentence, Level.UNKNOWN)])

    @contextmanager
    def _reading(self) -> Iterator[None]:
        left_ms = round((self.deadline - time.monotonic()) * 1000)
        statement_ms = max(1, min(READING_LIMITS_MS[0], left_ms))
        with self.connection.transaction():
            begin_reading.fetch(self.connection, statement_ms, self.lock_ms)
            yield


def doctor_document(reports: Iterable[CheckReport]) -> dict[str, Any]:
    """Return the reports as a JSON object, for ``--json`` and the API."""
    shown = list(reports)
    return {
        "level": worst(report.level for report in shown),
        "checks": [
            {
                "id": report.id,
                "looks_at": report.looks_at,
                "findings": [_finding_document(one) for one in report.findings],
                "level": report.level,
            }
            for report in shown
        ],
    }


def _finding_document(one: Finding) -> dict[str, Any]:
    fields = ("level", "code", "sentence", "since", "evidence", "remedy", "is_sql")
    return {name: getattr(one, name) for name in fields} | {"subject": str(one.subject)}
