"""What can be found wrong before anything runs: imports, error codes, the database itself.

Pure functions from what the application knows to a list of errors; `Horsies.check` calls them phase
by phase, and so do workers when they start. Stands before the line producer -> SQL -> turn -> child
-> report -> result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from pydantic import ValidationError

from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.errors import describe
from horsies.db.listen import receives_own_notification
from horsies.errors import ErrorCode, HorsiesError, MultipleValidationErrors, SourceLocation
from horsies.modules import failure_at, import_problem
from horsies.retry import (
    ExceptionMapper,
    RetryPolicy,
    reserved_code_collisions,
    validate_error_code_name,
    validate_exception_mapper,
)
from horsies.tasks.definition import TaskDefinition


def import_errors(
    entries: Iterable[str], import_entry: Callable[[str], object]
) -> list[HorsiesError]:
    """Import every entry and return what went wrong, one broken line reported once."""
    errors: list[HorsiesError] = []
    for entry in entries:
        try:
            import_entry(entry)
        except (Exception, SystemExit) as error:
            # A module that calls sys.exit would otherwise end the check, and successfully at that.
            errors += _flattened(import_problem(entry, error))
    return list(_without_repetition(errors))


def _flattened(error: HorsiesError) -> list[HorsiesError]:
    return error.report.errors if isinstance(error, MultipleValidationErrors) else [error]


def _without_repetition(errors: Iterable[HorsiesError]) -> Iterator[HorsiesError]:
    """Leave out what was met again through another module that imports the broken one."""
    seen: set[tuple[ErrorCode, SourceLocation]] = set()
    for error in errors:
        if error.location is None:
            yield error
        elif (error.code, error.location) not in seen:
            seen.add((error.code, error.location))
            yield error


@dataclass(frozen=True, slots=True)
class _Policies:
    """The error codes and retries that one place configures."""

    owner: str
    exception_mapper: ExceptionMapper
    default_code: str | None
    retry_policy: RetryPolicy | None
    location: SourceLocation | None


def policy_errors(config: AppConfig, definitions: Iterable[TaskDefinition]) -> list[HorsiesError]:
    """Return the mistakes in error codes (HRS-209, HRS-212) and retry policies (HRS-102)."""
    places = [_app_policies(config), *map(_task_policies, definitions)]
    return [error for place in places for error in _place_errors(place)]


def _app_policies(config: AppConfig) -> _Policies:
    default_code = config.default_unhandled_error_code
    return _Policies("AppConfig", config.exception_mapper, default_code, None, None)


def _task_policies(definition: TaskDefinition) -> _Policies:
    return _Policies(
        f"task {definition.name!r}",
        dict(definition.exception_mapper),
        definition.default_unhandled_error_code,
        definition.retry_policy,
        definition.location,
    )


def _place_errors(place: _Policies) -> list[HorsiesError]:
    malformed = validate_exception_mapper(place.exception_mapper)
    if place.default_code is not None:
        where = "default_unhandled_error_code"
        malformed += validate_error_code_name(place.default_code, where=where)
    # Names that are no names cannot be compared with the reserved ones.
    if malformed:
        return [_error(place, ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER, p) for p in malformed]
    collisions = reserved_code_collisions(place.exception_mapper, place.default_code)
    return [
        *(_error(place, ErrorCode.CHECK_RESERVED_CODE_COLLISION, p, _OWN_NAME) for p in collisions),
        *_retry_errors(place),
    ]


_OWN_NAME = "choose a name of your own: built-in codes say that horsies itself found the error"


def _retry_errors(place: _Policies) -> Iterator[HorsiesError]:
    """Validate again: a policy that was copied with changes has not been."""
    if place.retry_policy is None:
        return
    try:
        RetryPolicy.model_validate(place.retry_policy.to_json())
    except ValidationError as error:
        for detail in error.errors(include_url=False, include_input=False):
            problem = f"retry_policy is not valid: {detail['msg'].removeprefix('Value error, ')}"
            yield _error(place, ErrorCode.TASK_INVALID_OPTIONS, problem)


def _error(
    place: _Policies, code: ErrorCode, problem: str, help_text: str | None = None
) -> HorsiesError:
    message = f"In {place.owner}, {problem}."
    return failure_at(place.location, message, code=code, help_text=help_text)


def live_errors(config: PostgresConfig) -> list[HorsiesError]:
    """Return what keeps the database from serving: no connection, or LISTEN that hears nothing.

    Uses connections of its own and closes them; the application's broker is not touched.
    """
    database = Database(config, "check")
    error = _query_error(database) or _listen_error(database)
    return [] if error is None else [error]


def _query_error(database: Database) -> HorsiesError | None:
    try:
        with database.connect("check") as connection:
            connection.execute("SELECT 1")
    except HorsiesError as error:
        return error
    except Exception as error:
        return _live_error(f"The database does not answer. {describe(error)}")
    return None


def _listen_error(database: Database) -> HorsiesError | None:
    try:
        heard = receives_own_notification(lambda: database.connect("check", session=True))
    except HorsiesError as error:
        return error
    except Exception as error:
        name = "session_database_url" if database.config.session_database_url else "database_url"
        return _live_error(f"LISTEN does not work through {name}. {describe(error)}")
    return None if heard else _live_error(_DEAF, _DIRECT_ADDRESS)


_DEAF = "The database accepts LISTEN but delivers no notification, as behind a transaction pooler."
_DIRECT_ADDRESS = (
    "set session_database_url to an address that leads to PostgreSQL directly or through a session "
    "pooler"
)


def _live_error(message: str, help_text: str | None = None) -> HorsiesError:
    return failure_at(None, message, code=ErrorCode.BROKER_INVALID_URL, help_text=help_text)
