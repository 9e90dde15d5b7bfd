"""The checks before the start of an application: imports, error codes, retry policies, the database.

`Horsies.check` runs them phase by phase, and so does a worker when it starts.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from difflib import get_close_matches
from enum import Enum
from types import CodeType, FunctionType, ModuleType
from typing import Any

from psycopg import Connection
from pydantic import ValidationError

from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.blockers import named
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.limits import READING
from horsies.db.listen import receives_own_notification
from horsies.db.migrate import UnusableSchemaError, pending_migrations, require_current_schema
from horsies.db.statements.monitor import read_rights
from horsies.error_codes import (
    BUILTIN_CODE_REGISTRY,
    OutcomeCode,
    RetrievalCode,
    error_code_text,
    reserved_code_collisions,
    validate_error_code_name,
    validate_exception_mapper,
)
from horsies.errors import ErrorCode, HorsiesError, MultipleValidationErrors, SourceLocation
from horsies.modules import failure_at, import_problem
from horsies.retry import RetryPolicy, rule_text
from horsies.tasks.definition import TaskDefinition

_OWN_NAME = "choose a name of your own: built-in codes mean that horsies itself found the error"
# Built-in codes that a failed attempt cannot have, because they belong to tasks that were not running or have
# not failed.
_UNRETRIED_CODES = {
    *RetrievalCode,
    OutcomeCode.TASK_CANCELLED,
    OutcomeCode.TASK_EXPIRED,
    OutcomeCode.DURABLE_MISMATCH,
    OutcomeCode.STEP_TIMEOUT,
}
_NO_DELIVERY = (
    "The database accepts LISTEN but delivers no notification, as behind a transaction pooler."
)
_DIRECT_ADDRESS = (
    "set session_database_url to an address that leads to PostgreSQL directly or through a session "
    "pooler"
)
_MIGRATE = (
    "run `horsies migrate` as the owner of the tables, or grant the role the right to create them"
)
# The privileges of the role horsies_producer in docs/security.md.
_PRODUCER_RIGHTS = frozenset(
    f"{right} ON horsies_{table}"
    for table, rights in {
        "migrations": ("SELECT",),
        "task_attempts": ("SELECT",),
        "webhooks": ("SELECT",),
        "task_defaults": ("SELECT",),
        "tasks": ("SELECT", "INSERT", "UPDATE"),
        "workflows": ("SELECT", "INSERT", "UPDATE"),
        "workflow_tasks": ("SELECT", "INSERT", "UPDATE"),
        "workflow_signals": ("SELECT", "INSERT", "DELETE"),
        "task_signals": ("SELECT", "INSERT"),
        "parked": ("SELECT",),
    }.items()
    for right in rights
)


def import_errors(
    entries: Iterable[str], import_entry: Callable[[str], object]
) -> list[HorsiesError]:
    """Import every entry and return the errors; a broken line that several entries import is listed once."""
    errors: dict[object, HorsiesError] = {}
    for entry in entries:
        try:
            import_entry(entry)
        except (Exception, SystemExit) as raised:
            # SystemExit is caught, because a module that calls sys.exit would end the check, possibly with a
            # success code.
            problem = import_problem(entry, raised)
            many = problem.report.errors if isinstance(problem, MultipleValidationErrors) else None
            for error in many or [problem]:
                place = id(error) if error.location is None else (error.code, error.location)
                errors.setdefault(place, error)
    return list(errors.values())


def policy_errors(config: AppConfig, definitions: Iterable[TaskDefinition]) -> list[HorsiesError]:
    """Return the errors in error codes (HRS-209, HRS-212) and retry policies (HRS-102)."""
    default_code = config.default_unhandled_error_code
    errors = _errors_of("AppConfig", None, config.exception_mapper, default_code, None)
    for definition in definitions:
        errors += _errors_of(
            f"task {definition.name!r}",
            definition.location,
            definition.exception_mapper,
            definition.default_unhandled_error_code,
            definition.retry_policy,
        )
    return errors


def _errors_of(
    owner: str,
    location: SourceLocation | None,
    mapper: Mapping[type[BaseException], str],
    default_code: str | None,
    retry_policy: RetryPolicy | None,
) -> list[HorsiesError]:
    def errors(
        code: ErrorCode, problems: Iterable[str], help_text: str | None = None
    ) -> list[HorsiesError]:
        messages = (f"In {owner}, {problem}." for problem in problems)
        return [failure_at(location, text, code=code, help_text=help_text) for text in messages]

    malformed = validate_exception_mapper(mapper)
    if default_code is not None:
        malformed += validate_error_code_name(default_code, where="default_unhandled_error_code")
    # A malformed name cannot be compared with the reserved names.
    if malformed:
        return errors(ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER, malformed)
    collisions = reserved_code_collisions(mapper, default_code)
    return [
        *errors(ErrorCode.CHECK_RESERVED_CODE_COLLISION, collisions, _OWN_NAME),
        *errors(ErrorCode.TASK_INVALID_OPTIONS, _policy_problems(retry_policy)),
    ]


def _policy_problems(policy: RetryPolicy | None) -> Iterator[str]:
    # `model_copy(update=...)` does not validate, so the policy is validated here.
    try:
        if policy is not None:
            RetryPolicy.model_validate(policy.to_json())
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            yield f"retry_policy is not valid: {detail['msg'].removeprefix('Value error, ')}"


def policy_warnings(config: AppConfig, definitions: Iterable[TaskDefinition]) -> list[str]:
    """Return a sentence for each entry of ``auto_retry_for`` that no code of the application produces.

    A code may come from exception mappers, default codes, and the functions and constants of every loaded
    module. Classes and enum members are not checked, because a misspelt class or member does not exist.
    """
    listed = [
        (task, rule_text(rule))
        for task in definitions
        for rule in (task.retry_policy.auto_retry_for if task.retry_policy else ())
        if not isinstance(rule, Enum | type) or rule in _UNRETRIED_CODES
    ]
    known = set(BUILTIN_CODE_REGISTRY) - _UNRETRIED_CODES
    owners: list[AppConfig | TaskDefinition] = [config, *(task for task, _ in listed)]
    for settings in owners:
        mapped = {*settings.exception_mapper.values(), settings.default_unhandled_error_code}
        known |= {code for code in map(error_code_text, mapped) if code is not None}
    known |= {rule for _, rule in listed if _is_loaded_class(rule)}
    if unsure := {code for _, code in listed if "." not in code} - known - _UNRETRIED_CODES:
        known |= _codes_in_modules(unsure, [task for task, _ in listed])
    return [_unknown_code(task, code, known) for task, code in listed if code not in known]


def _unknown_code(task: TaskDefinition, code: str, known: Iterable[str]) -> str:
    if code == OutcomeCode.STEP_TIMEOUT:
        rest = (
            "which only steps have; list it in the policy of the step, ctx.with_options(retry=...)"
        )
    elif code in _UNRETRIED_CODES:
        rest = "a built-in code that no failed attempt has; remove it"
    elif "." in code:
        rest = "but no loaded module has an exception class of that name; list the class itself"
    else:
        close = get_close_matches(code, known, n=1)
        advice = f"did you mean {close[0]}?" if close else "correct the code or remove it"
        rest = f"but no exception mapper, default code or function produces it; {advice}"
    place = f" ({task.location})" if task.location else ""
    return f"In task {task.name!r}{place}, auto_retry_for lists {code}, {rest}"


def _is_loaded_class(name: str) -> bool:
    """Return whether ``module.Class`` is an exception class in a loaded module."""
    parts = name.split(".")
    for size in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:size]))
        if found is not None:
            for part in parts[size:]:
                found = getattr(found, part, None)
            return isinstance(found, type) and issubclass(found, BaseException)
    return False


def _codes_in_modules(wanted: set[str], tasks: Iterable[TaskDefinition]) -> set[str]:
    """Return the wanted error codes that occur as strings in the code.

    It searches the tasks' modules first, because they usually contain the codes that tasks return. Only a
    code that is still missing, such as a misspelt code, requires a scan of all modules (0.4 s for 750).
    """
    functions = [task.function for task in tasks]
    own = [function.__module__ for function in functions]
    found = {text for function in functions for text in _texts(function)} & wanted
    seen: set[int] = set()  # most names in a module are imported
    for name in [*own, *sys.modules]:
        module = sys.modules.get(name)
        for value in list(vars(module).values()) if isinstance(module, ModuleType) else ():
            if found == wanted:
                return found
            if id(value) not in seen:
                seen.add(id(value))
                found |= wanted.intersection(_texts(value))
    return found


def _texts(value: object, *, in_class: bool = False) -> Iterator[str]:
    """Yield the string of a constant, or the strings that a function or class contains."""
    # isinstance() reads __class__, and a proxy such as Flask's `request` raises an exception for that
    # outside its context.
    kind = type(value)
    if issubclass(kind, str):
        yield str(value)
    elif issubclass(kind, FunctionType):
        yield from _texts_of_code(value.__code__)  # type: ignore[attr-defined]
        yield from _texts(vars(value).get("__wrapped__"))
    elif issubclass(kind, staticmethod | classmethod):
        yield from _texts(value.__func__)  # type: ignore[attr-defined]
    elif issubclass(kind, type) and not in_class:
        for member in list(vars(value).values()):
            yield from _texts(member, in_class=True)


def _texts_of_code(code: CodeType) -> Iterator[str]:
    constants = list(code.co_consts)
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, CodeType):
            yield from _texts_of_code(constant)
        elif isinstance(constant, tuple | frozenset):
            constants += constant


def live_errors(
    config: PostgresConfig, *, role: str = "producer", migrates: bool = True
) -> list[HorsiesError]:
    """Return the error that makes the database unusable, if there is one: no connection, no tables and no
    privilege to create them, no privileges on the tables, or no notifications.

    Uses its own connections and closes them; the application's broker is not touched. No table is
    created or changed.
    """
    database = Database(config, "check", limits=READING)
    failure = "The database is unreachable."
    try:
        with database.connect("check") as connection:
            connection.execute("SELECT 1")
            failure = "The tables of horsies cannot be used."
            if problem := _table_problem(connection, config.schema_name, role, migrates):
                return [_live_error(*problem, ErrorCode.BROKER_INIT_FAILED)]
        name = "session_database_url" if config.session_database_url else "database_url"
        failure = f"LISTEN does not work through {name}."
        delivered = receives_own_notification(lambda: database.connect("check", session=True))
    except HorsiesError as error:
        return [error]
    except UnusableSchemaError as error:
        return [_live_error(str(error), code=ErrorCode.BROKER_INIT_FAILED)]
    except Exception as error:
        return [_live_error(f"{failure} {describe(named(database, error))}")]
    return [] if delivered else [_live_error(_NO_DELIVERY, _DIRECT_ADDRESS)]


def live_notes(config: PostgresConfig, *, migrates: bool = True) -> list[str]:
    """Return remarks for a live check that found no errors: migrations that the next process will apply,
    and obstacles that concern only workers.
    """
    notes = [error.message for error in live_errors(config, role="worker", migrates=migrates)]
    with Database(config, "check", limits=READING).connect("check") as connection:
        pending = [one for one in pending_migrations(connection) if one.kind == "migration"]
    if pending:
        is_empty = pending[0].version == 1
        lacks = "has no tables of horsies yet"
        if not is_empty:
            lacks = f"lacks {len(pending)} migration(s), beginning with {pending[0].title}"
        notes.append(
            f"The schema {config.schema_name} of this database {lacks}; `horsies migrate` applies them, "
            "and so does the next process that uses it."
        )
    return notes


def _table_problem(
    connection: Connection[Any], schema: str, role: str, migrates: bool
) -> tuple[str, str] | None:
    """Return a problem and its remedy, as sentences, if the tables cannot be used, created or updated."""
    rights = read_rights.fetch(connection, schema)[0]
    name = rights.role_name
    if rights.has_schema and not rights.can_use:
        grant = f"GRANT USAGE ON SCHEMA {schema} TO {name}"
        return f"The role {name} has no right to use the schema {schema}.", _as_owner(grant)
    if "SELECT ON horsies_migrations" not in rights.missing:
        if not migrates:
            require_current_schema(connection)
        if pending_migrations(connection) and not (rights.can_create and rights.is_owner):
            message = (
                f"The tables of horsies are missing or outdated, and the role {name} must not "
            )
            return f"{message}create or change them in the schema {schema}.", _MIGRATE
    if missing := missing_rights(rights.missing, role):
        grants = (right.replace(" ON ", f" ON {schema}.") for right in missing)
        help_text = _as_owner("; ".join(f"GRANT {grant} TO {name}" for grant in grants))
        return f"The role {name} lacks rights of a {role}: {', '.join(missing)}.", help_text
    return None


def missing_rights(missing: Iterable[str], role: str) -> list[str]:
    """Return the privileges that the role needs but lacks, such as "INSERT ON horsies_tasks"."""
    if role == "producer":
        return [right for right in missing if right in _PRODUCER_RIGHTS]
    return [
        right
        for right in missing
        if not right.endswith(" ON horsies_migrations") or right.startswith("SELECT")
    ]


def _as_owner(grants: str) -> str:
    return f"run as the owner: {grants}; docs/security.md lists the rights of each role"


def _live_error(
    message: str, help_text: str | None = None, code: ErrorCode = ErrorCode.BROKER_INVALID_URL
) -> HorsiesError:
    return failure_at(None, message, code=code, help_text=help_text)
