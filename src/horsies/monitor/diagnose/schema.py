"""Schema checks: version, privileges, triggers, indexes, vacuum, statistics, sizes.

Each check reads its facts in a script and judges them in a pure function.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from horsies.db.migrate import (
    foreign_table,
    known_migrations,
    missing_migrations,
    schema_version,
)
from horsies.db.schema import MIGRATIONS_TABLE, in_schema, object_names
from horsies.db.statement import Script
from horsies.db.statements.doctor import (
    AppliedFile,
    ClaimIndex,
    IndexState,
    ServerState,
    Silencer,
    TableState,
    TriggerState,
    find_silencers,
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
from horsies.db.statements.monitor import Rights, read_rights
from horsies.findings import Finding, finding
from horsies.monitor.diagnose.checks import Check, red, yellow
from horsies.monitor.facts import Facts, Limits
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
    """Return the statements in the schema files that create an object, by the object's name."""
    return {
        found[1]: found[0] for file in known_migrations() for found in pattern.finditer(file.sql)
    }


def shipped_indexes() -> dict[str, str]:
    """Return the statements that create this release's indexes."""
    dropped = {name for file in known_migrations() for name in _DROPPED_INDEX.findall(file.sql)}
    created = shipped_sql(_INDEX)
    return {name: text for name, text in created.items() if name not in dropped}


def shipped_options() -> dict[str, set[str]]:
    """Return the storage parameters of this release's tables, in the form of pg_class."""
    return {
        found[1]: {
            part.replace(" ", "") for part in re.sub(r"--[^\n]*|\s*\n\s*", "", found[2]).split(",")
        }
        for file in known_migrations()
        for found in _OPTIONS.finditer(file.sql)
    }


def has_current_schema(applied: Sequence[AppliedFile]) -> bool:
    """Return whether this release's statements work with the database's tables."""
    return not missing_migrations(_versions(applied))


def _versions(applied: Iterable[AppliedFile]) -> set[int]:
    return {file.version for file in applied if file.kind == "migration"}


def read_applied(facts: Facts) -> Script[list[AppliedFile]]:
    """Return the applied schema files, or an empty result if the tables do not exist."""
    (found,) = yield from facts.read(find_table(facts.schema, "horsies_migrations"))
    if not found.is_there:
        return []
    return (yield from facts.read(read_migrations()))


def _schema(facts: Facts) -> Script[Iterable[Finding]]:
    applied = yield from read_applied(facts)
    tables = [] if applied else (yield from facts.read(list_tables(facts.schema)))
    ours = object_names() - {MIGRATIONS_TABLE}
    return judge_schema(applied, facts.schema, [one.name for one in tables if one.name in ours])


def judge_schema(
    applied: Sequence[AppliedFile], schema: str, foreign: Sequence[str] = ()
) -> Iterator[Finding]:
    versions = _versions(applied)
    version, own, missing = max(versions, default=0), schema_version(), missing_migrations(versions)
    if foreign:
        sentence, _, remedy = str(foreign_table(foreign[0])).partition("; ")
        yield red(f"{sentence}.", remedy.removesuffix("."))
    elif not applied:
        sentence = f"The schema {schema} of this database has no tables of horsies."
        yield red(sentence, "horsies migrate")
    elif holes := [file.title for file in missing if file.version < version]:
        sentence = f"The schema is version {version}, but lacks {len(holes)} of its migrations."
        yield red(sentence, "horsies migrate", holes)
    elif version < own:
        sentence = f"The schema is version {version}, this release of horsies needs version {own}."
        yield red(sentence, "horsies migrate")
    elif version > own:
        sentence = f"The schema is version {version}, newer than version {own} of this release."
        yield yellow(sentence, "upgrade horsies on this machine")
    elif differing := _differing_functions(applied):
        sentence = "The functions in the database differ from those of this release."
        yield yellow(sentence, "horsies migrate", differing)


def _differing_functions(applied: Iterable[AppliedFile]) -> list[str]:
    digests = {file.version: file.sha for file in applied if file.kind == "function"}
    functions = [file for file in known_migrations() if file.kind == "function"]
    return [file.title for file in functions if digests.get(file.version) != file.sha]


def _triggers(facts: Facts) -> Script[Iterable[Finding]]:
    triggers = yield from facts.read(list_triggers(facts.schema))
    functions = yield from facts.read(list_functions(facts.schema))
    silencers = yield from facts.read(find_silencers())
    names = {function.name for function in functions}
    return [
        *silent_triggers(silencers),
        *judge_triggers(triggers, names, facts.schema),
    ]


def silent_triggers(silencers: Iterable[Silencer]) -> Iterator[Finding]:
    for one in silencers:
        parts = [f"the role {one.role_name}"] if one.role_name else []
        parts += [f"the database {one.database_name}"] if one.is_of_database else []
        place = " in ".join(parts) or ("every database" if one.is_stored else "this session")
        yield finding(
            "TRIGGERS_SILENT",
            f"session_replication_role is replica for {place}, so triggers do not fire: workflow runs do not "
            "advance and nothing is notified.",
            remedy=_unset(one),
            is_sql=one.is_stored,
        )


def _unset(one: Silencer) -> str:
    if not one.is_stored:
        return (
            "remove session_replication_role from the server's configuration and the database URL"
        )
    role = f'ROLE "{one.role_name}"' if one.role_name else "ROLE ALL"
    within = f' IN DATABASE "{one.database_name}"' if one.is_of_database else ""
    if one.role_name is None and one.is_of_database:
        role, within = f'DATABASE "{one.database_name}"', ""
    return f"ALTER {role}{within} RESET session_replication_role; -- then restart the workers"


def judge_triggers(
    triggers: Iterable[TriggerState], functions: set[str], schema: str
) -> Iterator[Finding]:
    found = {trigger.name: trigger for trigger in triggers}
    for name, statement in shipped_sql(_TRIGGER).items():
        if name not in found:
            sentence = f"The trigger {name} is missing: notifications and runs do not advance."
            yield red(sentence, in_schema(statement, schema), is_sql=True)
        elif not found[name].is_enabled:
            table = found[name].table_name
            sentence = f"The trigger {name} on {table} is disabled."
            remedy = f"ALTER TABLE {schema}.{table} ENABLE TRIGGER {name};"
            yield red(sentence, remedy, is_sql=True)
    if missing := sorted(set(shipped_sql(_FUNCTION)) - functions):
        remedy = _FORGET_FUNCTIONS.format(in_schema(MIGRATIONS_TABLE, schema))
        sentence = f"{len(missing)} functions of horsies are missing."
        yield red(sentence, remedy, missing[:10], is_sql=True)


def _indexes(facts: Facts) -> Script[Iterable[Finding]]:
    indexes = yield from facts.read(list_indexes(facts.schema))
    return judge_indexes(indexes, facts.schema)


def judge_indexes(indexes: Iterable[IndexState], schema: str) -> Iterator[Finding]:
    found = {index.name: index for index in indexes}
    for index in found.values():
        if not index.is_valid:
            sentence = (
                f"The index {index.name} on {index.table_name} is invalid: queries ignore it."
            )
            remedy = f"REINDEX INDEX CONCURRENTLY {schema}.{index.name};"
            yield red(sentence, remedy, is_sql=True)
    for name, statement in shipped_indexes().items():
        if name not in found:
            remedy = in_schema(statement.replace(" INDEX ", " INDEX CONCURRENTLY ", 1), schema)
            sentence = f"The index {name} is missing."
            yield red(sentence, remedy, is_sql=True)


def _vacuum(facts: Facts) -> Script[Iterable[Finding]]:
    (server,) = yield from facts.read(read_server_state())
    tables = yield from facts.read(list_tables(facts.schema))
    return judge_vacuum(server, tables, facts.schema, facts.limits)


def judge_vacuum(
    server: ServerState, tables: Iterable[TableState], schema: str, limits: Limits
) -> Iterator[Finding]:
    if not server.has_autovacuum:
        remedy = "ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf();"
        yield red("autovacuum is off.", remedy, is_sql=True)
    shipped = shipped_options()
    for table in tables:
        name = f"{schema}.{table.name}"
        if "autovacuum_enabled=false" in table.options:
            remedy = f"ALTER TABLE {name} RESET (autovacuum_enabled);"
            sentence = f"autovacuum is switched off for {table.name}."
            yield red(sentence, remedy, is_sql=True)
        if missing := sorted(shipped.get(table.name, set()) - set(table.options)):
            sentence = f"The table {table.name} has lost storage parameters of this release."
            remedy = f"ALTER TABLE {name} SET ({', '.join(missing)});"
            yield yellow(sentence, remedy, missing, is_sql=True)
        if table.dead_rows > max(table.live_rows, limits.dead_rows):
            sentence = f"{table.name} has more dead rows than live ones."
            evidence = (f"{table.dead_rows:,} dead, {table.live_rows:,} live",)
            yield yellow(sentence, f"VACUUM {name};", evidence, is_sql=True)
        if table.is_unlogged:
            sentence = f"The table {table.name} is unlogged: a crash of the server empties it."
            remedy = f"ALTER TABLE {name} SET LOGGED;"
            yield red(sentence, remedy, is_sql=True)


def _claim_index(facts: Facts) -> Script[Iterable[Finding]]:
    found = yield from facts.read(measure_claim_index(facts.schema))
    return [one for index in found for one in judge_claim_index(index, facts)]


def judge_claim_index(index: ClaimIndex, facts: Facts) -> Iterator[Finding]:
    per_task = index.bytes / max(index.waiting, 1)
    if (
        index.bytes > facts.limits.claim_index_bytes
        and per_task > facts.limits.claim_index_bytes_per_task
    ):
        sentence = f"The claim index has {size(index.bytes)} for {index.waiting:,} waiting tasks."
        remedy = f"REINDEX INDEX CONCURRENTLY {facts.schema}.horsies_tasks_claim;"
        yield yellow(sentence, remedy, is_sql=True)


def _sizes(facts: Facts) -> Script[Iterable[Finding]]:
    tables = yield from facts.read(list_tables(facts.schema))
    (payload,) = yield from facts.read(measure_payload())
    return judge_sizes(tables, payload.bytes or 0.0, facts.limits)


def judge_sizes(tables: Iterable[TableState], payload: float, limits: Limits) -> Iterator[Finding]:
    for table in tables:
        if table.bytes > limits.table_bytes:
            sentence = f"The table {table.name} has {size(table.bytes)}."
            advice = "lower terminal_record_retention_hours, or store large values elsewhere"
            yield yellow(sentence, advice)
    if payload > limits.payload_bytes:
        sentence = f"Arguments and results have {size(payload)} per task on average."
        advice = "pass references to stored files instead of their contents"
        yield yellow(sentence, advice)


def _statistics(facts: Facts) -> Script[Iterable[Finding]]:
    tables = yield from facts.read(list_tables(facts.schema))
    return judge_statistics(tables, facts.schema, facts.limits)


def judge_statistics(
    tables: Iterable[TableState], schema: str, limits: Limits
) -> Iterator[Finding]:
    for table in tables:
        if table.analysed_at is None and table.live_rows >= limits.unanalysed_rows:
            sentence = f"The table {table.name} was never analysed: the planner guesses."
            evidence = [f"{table.live_rows:,} rows"]
            yield yellow(sentence, f"ANALYZE {schema}.{table.name};", evidence, is_sql=True)


def _privileges(facts: Facts) -> Script[Iterable[Finding]]:
    (rights,) = yield from facts.read(read_rights(facts.schema))
    (server,) = yield from facts.read(read_server_state())
    return judge_privileges(rights, server.sees_sessions, facts.schema)


def judge_privileges(rights: Rights, sees_sessions: bool, schema: str) -> Iterator[Finding]:
    role = rights.role_name
    if rights.has_schema and not rights.can_use:
        remedy = f"GRANT USAGE ON SCHEMA {schema} TO {role};"
        sentence = f"The role {role} must not use the schema {schema}."
        yield red(sentence, remedy, is_sql=True)
    unreadable = [right for right in rights.missing if right.startswith("SELECT ")]
    if unreadable:
        remedy = f"GRANT SELECT ON ALL TABLES IN SCHEMA {schema} TO {role};"
        sentence = f"The role {role} must not read all tables of horsies."
        yield red(sentence, remedy, unreadable, is_sql=True)
    if not sees_sessions:
        sentence = f"The role {role} does not see the transactions of other roles."
        remedy = f"GRANT pg_monitor TO {role};"
        yield yellow(sentence, remedy, is_sql=True)


SCHEMA_CHECKS = (
    Check(
        "schema",
        "version of the tables and functions",
        "the tables are newer than the code; functions differ",
        "the tables are missing or older than the code",
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
        "a trigger or function is disabled or missing; session_replication_role is replica",
        _triggers,
    ),
    Check(
        "indexes",
        "indexes on the tables of horsies",
        "",
        "an index is invalid or missing",
        _indexes,
    ),
    Check(
        "vacuum",
        "autovacuum, dead rows, storage parameters",
        "more dead rows than live rows; storage parameters changed",
        "autovacuum is off; a table is unlogged",
        _vacuum,
    ),
    Check(
        "claim-index",
        "size of the claim index",
        "the index is above 50 MB, and above 10 KB per waiting task",
        "",
        _claim_index,
    ),
    Check(
        "statistics",
        "statistics of the planner",
        "a table with rows was never analysed",
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
