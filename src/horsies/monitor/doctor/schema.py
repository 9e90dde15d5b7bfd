"""Checks of the schema: version, rights, triggers, indexes, vacuum, statistics, sizes.

Each check reads its facts in a script and judges them in a pure function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from horsies.db.migrate import (
    foreign_table,
    known_migrations,
    missing_migrations,
    schema_version,
)
from horsies.db.schema import MIGRATIONS_TABLE, in_schema, object_names
from horsies.db.statement import Nothing, Script
from horsies.db.statements.doctor import (
    AppliedFile,
    ClaimIndex,
    IndexState,
    ServerState,
    TableName,
    TableState,
    TriggerState,
    find_table,
    list_functions,
    list_indexes,
    list_tables,
    list_triggers,
    measure_claim_index,
    measure_payload,
    read_migrations,
    read_server_state,
)
from horsies.db.statements.monitor import Rights, SchemaName, read_rights
from horsies.monitor.doctor.findings import Check, Facts, Finding, Level, Limits
from horsies.words import size

_FORGET_FUNCTIONS = "DELETE FROM {} WHERE kind = 'function'; -- then: horsies migrate"
_TRIGGER = re.compile(r"^CREATE OR REPLACE TRIGGER (horsies_\w+).*?;", re.MULTILINE | re.DOTALL)
_FUNCTION = re.compile(r"^CREATE OR REPLACE FUNCTION (horsies_\w+)", re.MULTILINE)
_INDEX = re.compile(r"^CREATE (?:UNIQUE )?INDEX (horsies_\w+).*?;", re.MULTILINE | re.DOTALL)
_DROPPED_INDEX = re.compile(r"^DROP INDEX (?:IF EXISTS )?(horsies_\w+)", re.MULTILINE)
_OPTIONS = re.compile(
    r"^CREATE TABLE (horsies_\w+) \((?:(?!^CREATE).)*?^\) WITH \((.*?)\);", re.MULTILINE | re.DOTALL
)


def shipped_sql(pattern: re.Pattern[str]) -> dict[str, str]:
    """Return the statements of the schema files that create an object, by its name."""
    return {
        found[1]: found[0] for file in known_migrations() for found in pattern.finditer(file.sql)
    }


def shipped_indexes() -> dict[str, str]:
    """Return the statements that create the indexes of this release."""
    dropped = {name for file in known_migrations() for name in _DROPPED_INDEX.findall(file.sql)}
    created = shipped_sql(_INDEX)
    return {name: text for name, text in created.items() if name not in dropped}


def shipped_options() -> dict[str, set[str]]:
    """Return the storage parameters of the tables of this release, as pg_class has them."""
    return {
        found[1]: {
            part.replace(" ", "") for part in re.sub(r"--[^\n]*|\s*\n\s*", "", found[2]).split(",")
        }
        for file in known_migrations()
        for found in _OPTIONS.finditer(file.sql)
    }


def has_current_schema(applied: Sequence[AppliedFile]) -> bool:
    """Tell whether the statements of this release can work on these tables."""
    return not missing_migrations(_versions(applied))


def _versions(applied: Iterable[AppliedFile]) -> set[int]:
    return {file.version for file in applied if file.kind == "migration"}


def read_applied(facts: Facts) -> Script[list[AppliedFile]]:
    """The applied files; none when the tables do not exist."""
    (found,) = yield from facts.read(find_table, TableName(facts.schema, "horsies_migrations"))
    if not found.is_there:
        return []
    return (yield from facts.read(read_migrations, Nothing()))


def _schema(facts: Facts) -> Script[list[Finding]]:
    applied = yield from read_applied(facts)
    tables = [] if applied else (yield from facts.read(list_tables, SchemaName(facts.schema)))
    ours = object_names() - {MIGRATIONS_TABLE}
    return judge_schema(applied, facts.schema, [one.name for one in tables if one.name in ours])


def judge_schema(
    applied: Sequence[AppliedFile], schema: str, foreign: Sequence[str] = ()
) -> list[Finding]:
    if foreign:
        sentence, _, remedy = str(foreign_table(foreign[0])).partition("; ")
        return [Finding(Level.RED, f"{sentence}.", remedy=remedy.removesuffix("."))]
    if not applied:
        sentence = f"The schema {schema} of this database has no tables of horsies."
        return [Finding(Level.RED, sentence, remedy="horsies migrate")]
    versions = _versions(applied)
    version, own, missing = max(versions, default=0), schema_version(), missing_migrations(versions)
    if holes := [file.title for file in missing if file.version < version]:
        sentence = f"The schema is version {version}, but lacks {len(holes)} of its migrations."
        return [Finding(Level.RED, sentence, tuple(holes), "horsies migrate")]
    if version < own:
        sentence = f"The schema is version {version}, this release of horsies needs version {own}."
        return [Finding(Level.RED, sentence, remedy="horsies migrate")]
    if version > own:
        sentence = f"The schema is version {version}, newer than version {own} of this release."
        return [Finding(Level.YELLOW, sentence, remedy="upgrade horsies on this machine")]
    digests = {file.version: file.sha for file in applied if file.kind == "function"}
    functions = [file for file in known_migrations() if file.kind == "function"]
    if differing := [file.title for file in functions if digests.get(file.version) != file.sha]:
        sentence = "The functions in the database differ from those of this release."
        return [Finding(Level.YELLOW, sentence, tuple(differing), "horsies migrate")]
    return []


def _triggers(facts: Facts) -> Script[list[Finding]]:
    triggers = yield from facts.read(list_triggers, SchemaName(facts.schema))
    functions = yield from facts.read(list_functions, SchemaName(facts.schema))
    return judge_triggers(triggers, {function.name for function in functions}, facts.schema)


def judge_triggers(
    triggers: Iterable[TriggerState], functions: set[str], schema: str
) -> list[Finding]:
    found = {trigger.name: trigger for trigger in triggers}
    findings = []
    for name, statement in shipped_sql(_TRIGGER).items():
        if name not in found:
            sentence = f"The trigger {name} is missing: notifications and runs do not advance."
            findings.append(Finding(Level.RED, sentence, (), in_schema(statement, schema), True))
        elif not found[name].is_enabled:
            table = found[name].table_name
            sentence = f"The trigger {name} on {table} is disabled."
            remedy = f"ALTER TABLE {schema}.{table} ENABLE TRIGGER {name};"
            findings.append(Finding(Level.RED, sentence, (), remedy, True))
    if missing := sorted(set(shipped_sql(_FUNCTION)) - functions):
        remedy = _FORGET_FUNCTIONS.format(in_schema(MIGRATIONS_TABLE, schema))
        sentence = f"{len(missing)} functions of horsies are missing."
        findings.append(Finding(Level.RED, sentence, tuple(missing[:10]), remedy, True))
    return findings


def _indexes(facts: Facts) -> Script[list[Finding]]:
    indexes = yield from facts.read(list_indexes, SchemaName(facts.schema))
    return judge_indexes(indexes, facts.schema)


def judge_indexes(indexes: Iterable[IndexState], schema: str) -> list[Finding]:
    found = {index.name: index for index in indexes}
    findings = []
    for index in found.values():
        if not index.is_valid:
            sentence = (
                f"The index {index.name} on {index.table_name} is invalid: queries ignore it."
            )
            remedy = f"REINDEX INDEX CONCURRENTLY {schema}.{index.name};"
            findings.append(Finding(Level.RED, sentence, (), remedy, True))
    for name, statement in shipped_indexes().items():
        if name not in found:
            remedy = in_schema(statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1), schema)
            sentence = f"The index {name} is missing."
            findings.append(Finding(Level.RED, sentence, (), remedy, True))
    return findings


def _vacuum(facts: Facts) -> Script[list[Finding]]:
    (server,) = yield from facts.read(read_server_state, Nothing())
    tables = yield from facts.read(list_tables, SchemaName(facts.schema))
    return judge_vacuum(server, tables, facts.schema, facts.limits)


def judge_vacuum(
    server: ServerState, tables: Iterable[TableState], schema: str, limits: Limits
) -> list[Finding]:
    findings = []
    if not server.has_autovacuum:
        remedy = "ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf();"
        findings.append(Finding(Level.RED, "autovacuum is off.", (), remedy, True))
    shipped = shipped_options()
    for table in tables:
        name = f"{schema}.{table.name}"
        if "autovacuum_enabled=false" in table.options:
            remedy = f"ALTER TABLE {name} RESET (autovacuum_enabled);"
            sentence = f"autovacuum is switched off for {table.name}."
            findings.append(Finding(Level.RED, sentence, (), remedy, True))
        if missing := sorted(shipped.get(table.name, set()) - set(table.options)):
            sentence = f"The table {table.name} has lost storage parameters of this release."
            remedy = f"ALTER TABLE {name} SET ({', '.join(missing)});"
            findings.append(Finding(Level.YELLOW, sentence, tuple(missing), remedy, True))
        if table.dead_rows > max(table.live_rows, limits.dead_rows):
            sentence = f"{table.name} has more dead rows than live ones."
            evidence = (f"{table.dead_rows:,} dead, {table.live_rows:,} live",)
            findings.append(Finding(Level.YELLOW, sentence, evidence, f"VACUUM {name};", True))
        if table.is_unlogged:
            sentence = f"The table {table.name} is unlogged: a crash of the server empties it."
            remedy = f"ALTER TABLE {name} SET LOGGED;"
            findings.append(Finding(Level.RED, sentence, (), remedy, True))
    return findings


def _claim_index(facts: Facts) -> Script[list[Finding]]:
    found = yield from facts.read(measure_claim_index, SchemaName(facts.schema))
    return [finding for index in found for finding in judge_claim_index(index, facts)]


def judge_claim_index(index: ClaimIndex, facts: Facts) -> list[Finding]:
    limits = facts.limits
    per_task = index.bytes / max(index.waiting, 1)
    if index.bytes <= limits.claim_index_bytes or per_task <= limits.claim_index_bytes_per_task:
        return []
    sentence = f"The claim index has {size(index.bytes)} for {index.waiting:,} waiting tasks."
    remedy = f"REINDEX INDEX CONCURRENTLY {facts.schema}.horsies_tasks_claim;"
    return [Finding(Level.YELLOW, sentence, (), remedy, True)]


def _sizes(facts: Facts) -> Script[list[Finding]]:
    tables = yield from facts.read(list_tables, SchemaName(facts.schema))
    (payload,) = yield from facts.read(measure_payload, Nothing())
    return judge_sizes(tables, payload.bytes or 0.0, facts.limits)


def judge_sizes(tables: Iterable[TableState], payload: float, limits: Limits) -> list[Finding]:
    findings = []
    for table in tables:
        if table.bytes > limits.table_bytes:
            sentence = f"The table {table.name} has {size(table.bytes)}."
            advice = "lower terminal_record_retention_hours, or store large values elsewhere"
            findings.append(Finding(Level.YELLOW, sentence, remedy=advice))
    if payload > limits.payload_bytes:
        sentence = f"Arguments and results have {size(payload)} per task on average."
        advice = "pass references to stored files instead of their contents"
        findings.append(Finding(Level.YELLOW, sentence, remedy=advice))
    return findings


def _statistics(facts: Facts) -> Script[list[Finding]]:
    tables = yield from facts.read(list_tables, SchemaName(facts.schema))
    return judge_statistics(tables, facts.schema, facts.limits)


def judge_statistics(tables: Iterable[TableState], schema: str, limits: Limits) -> list[Finding]:
    return [
        Finding(
            Level.YELLOW,
            f"The table {table.name} was never analysed: the planner guesses.",
            (f"{table.live_rows:,} rows",),
            f"ANALYZE {schema}.{table.name};",
            True,
        )
        for table in tables
        if table.analysed_at is None and table.live_rows >= limits.unanalysed_rows
    ]


def _privileges(facts: Facts) -> Script[list[Finding]]:
    (rights,) = yield from facts.read(read_rights, SchemaName(facts.schema))
    (server,) = yield from facts.read(read_server_state, Nothing())
    return judge_privileges(rights, server.sees_sessions, facts.schema)


def judge_privileges(rights: Rights, sees_sessions: bool, schema: str) -> list[Finding]:
    findings = []
    role = rights.role_name
    if rights.has_schema and not rights.can_use:
        remedy = f"GRANT USAGE ON SCHEMA {schema} TO {role};"
        sentence = f"The role {role} must not use the schema {schema}."
        findings.append(Finding(Level.RED, sentence, (), remedy, True))
    unreadable = [right for right in rights.missing if right.startswith("SELECT ")]
    if unreadable:
        remedy = f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role};"
        sentence = f"The role {role} must not read all tables of horsies."
        findings.append(Finding(Level.RED, sentence, tuple(unreadable), remedy, True))
    if not sees_sessions:
        sentence = f"The role {role} does not see the transactions of other roles."
        remedy = f"GRANT pg_monitor TO {role};"
        findings.append(Finding(Level.YELLOW, sentence, (), remedy, True))
    return findings


SCHEMA_CHECKS = (
    Check(
        "schema",
        "version of the tables and functions",
        "newer than the code; functions differ",
        "missing or older than the code",
        _schema,
        is_cheap=True,
        needs_tables=False,
    ),
    Check(
        "privileges",
        "rights of this role",
        "no pg_monitor: transactions of other roles are hidden",
        "a table cannot be read",
        _privileges,
        needs_tables=False,
    ),
    Check(
        "triggers",
        "triggers and functions of horsies",
        "",
        "one is disabled or missing",
        _triggers,
    ),
    Check("indexes", "indexes on the tables of horsies", "", "one is invalid or missing", _indexes),
    Check(
        "vacuum",
        "autovacuum, dead rows, storage parameters",
        "more dead rows than live ones; parameters changed",
        "autovacuum is off; a table is unlogged",
        _vacuum,
    ),
    Check(
        "claim-index",
        "size of the claim index",
        "above 50 MB and 10 KB per waiting task",
        "",
        _claim_index,
    ),
    Check(
        "statistics",
        "statistics of the planner",
        "a filled table was never analysed",
        "",
        _statistics,
    ),
    Check(
        "sizes",
        "sizes of tables and payloads",
        "a table above 50 GB; more than 100 KB per task",
        "",
        _sizes,
    ),
)
