"""Shared parts of the operator commands: the database they work on, their exit codes and options.

Operator commands need a database, not an application, and never create or change its tables. Exit
codes: 0 done, 1 failure or refusal, 4 not found; typer itself exits with 2 for arguments that it
rejects.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar, cast

import psycopg
import typer

from horsies.cli.options import EXIT_FAILED as EXIT_FAILED
from horsies.cli.options import EXIT_NOT_FOUND as EXIT_NOT_FOUND
from horsies.cli.options import exit_with as exit_with
from horsies.cli.options import named_database, open_app, refuse_both
from horsies.config.defaults import default_config
from horsies.database_url import database_name
from horsies.db.limits import READING as READING
from horsies.db.limits import Limits
from horsies.errors import ErrorCode, HorsiesError
from horsies.ids import stored_form
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.modules import Deferred, failure_at
from horsies.monitor.defaults import LIMIT_MAX
from horsies.result import Err, Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.recording import acting_as, process_user

if TYPE_CHECKING:
    from horsies.app import Horsies
    from horsies.config.postgres import PostgresConfig
    from horsies.monitor import queries, search
else:
    queries = Deferred("horsies.monitor.queries")
    search = Deferred("horsies.monitor.search")

T = TypeVar("T")

# The time limits of a command that changes rows or reads all of them. Other changes hold their
# locks for milliseconds, unless a session keeps its transaction open.
CHANGING = Limits(lock_ms=5_000, statement_ms=60_000, silence_seconds=70.0)
_CHANGES = frozenset(
    {
        "cancel",
        "retry",
        "delete",
        "redact",
        "export",
        "queues",
        "keys",
        "schedules",
        "workflow audit",
    }
    | {f"workflow {verb}" for verb in ("pause", "resume", "cancel", "retry", "signal")}
    | {f"durable {verb}" for verb in ("signal", "resume", "reset")}
)
_NOT_FOUND = (BrokerErrorCode.UNKNOWN_QUEUE, BrokerErrorCode.UNKNOWN_SCHEDULE)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ReasonOption = Annotated[
    str | None, typer.Option(help="The reason, recorded with your name; see `horsies history`.")
]
# The database is reachable, but a lock was not released in time or a statement took too long.
_LIMITED = ("55P03", "57014")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,63}")
_NAMED = re.compile(rf"({_NAME.pattern})=(.*)", re.DOTALL)
LimitOption = Annotated[int, typer.Option(min=1, max=LIMIT_MAX, help="Show at most this many.")]


@dataclass(frozen=True, slots=True)
class Session:
    """An open database, and the application if the user named one.

    ``name`` distinguishes several databases; for a single database it is empty.
    """

    broker: PostgresBroker
    app: Horsies | None
    name: str = ""

    @property
    def queue_caps(self) -> Mapping[str, int | None] | None:
        """The application's queues with their caps."""
        if self.app is None:
            return None
        return {queue.name: queue.max_concurrency for queue in self.app.config.queues()}

    @property
    def cluster_wide_cap(self) -> int | None:
        """The application's cap."""
        return None if self.app is None else self.app.config.cluster_wide_cap


@contextmanager
def open_session(command: str, locator: str | None, database_url: str | None) -> Iterator[Session]:
    """Open the database passed to a command, directly or through an application."""
    locators = [locator] if locator else []
    urls = [] if database_url is None else [database_url]
    with open_sessions(command, locators, urls) as (session,):
        yield session


@contextmanager
def open_sessions(
    command: str, locators: Sequence[str] | None, database_urls: Sequence[str] | None
) -> Iterator[list[Session]]:
    """Open every database passed to a command; without any, open the database from the environment."""
    attach_handler(LogLevel.WARNING, LogFormat.TEXT)
    refuse_both("LOCATOR", locators, "--database-url", database_urls)
    with ExitStack() as stack:
        sessions: list[Session] = []
        for target in named_targets(command, locators or (), database_urls or ()):
            limits = CHANGING if command in _CHANGES else READING
            broker = PostgresBroker(target.config, role="operator", migrates=False, limits=limits)
            stack.callback(broker.close)
            sessions.append(Session(broker, target.app, target.name))
        stack.enter_context(acting_as(process_user(), "cli"))
        yield sessions


@dataclass(frozen=True, slots=True)
class Target:
    """A database passed to a command: its name if there are several, and its application if the user
    named one.
    """

    name: str
    config: PostgresConfig
    app: Horsies | None


def named_targets(
    command: str,
    locators: Sequence[str],
    database_urls: Sequence[str],
    configured: Callable[[str | None], PostgresConfig] | None = None,
) -> list[Target]:
    """Load the applications, and name the databases if there are several.

    The name comes before the locator or the URL, as in ``east=shop.orders:app``; by default it is the
    database's name on its server. ``configured`` returns the configuration for a URL; None stands for
    the environment.
    """
    configured = configured or _quick_database
    found = [_target_of(open_app(command, rest), name) for name, rest in map(split_name, locators)]
    for name, url in map(split_name, database_urls):
        config = configured(url)
        found.append(Target(name or database_name(config.database_url), config, None))
    if len(found) <= 1:
        return [replace(one, name="") for one in found] or [Target("", configured(None), None)]
    for target in found:
        _refuse_name(target, [one.name for one in found])
    return found


def _target_of(app: Horsies, name: str) -> Target:
    config = app.config.broker
    return Target(name or database_name(config.database_url), config, app)


def _quick_database(url: str | None) -> PostgresConfig:
    return cast("PostgresConfig | None", default_config(url)) or named_database(url)


def split_name(text: str) -> tuple[str, str]:
    """Split NAME=LOCATOR or NAME=URL; without a NAME, the name is empty."""
    match = _NAMED.fullmatch(text)
    return (match[1], match[2]) if match else ("", text)


def _refuse_name(target: Target, names: Sequence[str]) -> None:
    help_text = "put a name before each, as in east=shop.east:app west=shop.west:app"
    if not _NAME.fullmatch(target.name):
        message = f"The database {target.name!r} needs a name of letters, digits, '.', '_' and '-'."
        raise failure_at(None, message, help_text=help_text)
    if names.count(target.name) > 1:
        message = f"Two of the databases are named {target.name!r}."
        raise failure_at(None, message, help_text=help_text)


def read_each(
    sessions: Sequence[Session], read: Callable[[Session], BrokerResult[T]]
) -> list[tuple[Session, BrokerResult[T]]]:
    """Read all databases concurrently, so that an unresponsive database does not delay the others."""
    if len(sessions) == 1:
        return [(sessions[0], read(sessions[0]))]
    with ThreadPoolExecutor(len(sessions)) as pool:
        return list(zip(sessions, pool.map(read, sessions), strict=True))


def require_one(found: Sequence[tuple[Session, BrokerResult[T]]]) -> None:
    """End the command if its only database cannot be read."""
    if len(found) == 1:
        unwrap_or_exit(found[0][1])


def report_unread(found: Sequence[tuple[Session, BrokerResult[T]]]) -> list[tuple[Session, T]]:
    """Print one sentence per unreadable database; return the values of the other databases."""
    for session, done in found:
        if isinstance(done, Err):
            place = f"database {session.name}: " if session.name else ""
            typer.echo(f"error: {place}{done.err_value.message}", err=True)
    return [(session, done.ok_value) for session, done in found if isinstance(done, Ok)]


def unwrap_or_exit(done: BrokerResult[T]) -> T:
    """Return the value, or end the command with the error."""
    if isinstance(done, Ok):
        return done.ok_value
    error = done.err_value
    if error.code in _NOT_FOUND:
        exit_with(error.message, EXIT_NOT_FOUND)
    raise _as_exception(error)


def _as_exception(error: BrokerOperationError) -> HorsiesError:
    if isinstance(error.exception, HorsiesError):
        error.exception.location = None  # The database URL is wrong, not the code.
        return error.exception
    if error.retryable and getattr(error.exception, "sqlstate", None) in _LIMITED:
        exit_with(error.message, EXIT_FAILED)
    unreachable = isinstance(error.exception, psycopg.OperationalError)
    code = ErrorCode.BROKER_INVALID_URL if unreachable else ErrorCode.BROKER_INIT_FAILED
    return failure_at(None, error.message, code=code)


def full_id(session: Session, text: str, kind: Literal["task", "run"] | None = None) -> str:
    """Return the id of the task or run that begins with this text, or the text itself if none does.

    If several match, print them and end the command. ``kind`` restricts the search to tasks or runs.
    """
    if stored_form(text) is not None or search.id_range(text) is None:
        return text
    script = search.prefix_script(text)
    rows = unwrap_or_exit(session.broker.perform(BrokerErrorCode.MONITORING_QUERY_FAILED, script))
    found = [row for row in rows if kind in (None, row.kind)]
    if len(found) > 1:
        names = "".join(f"\n  {one.id} {one.kind} {one.name}, {one.status}" for one in found)
        exit_with(f"Several ids begin with {text}; the newest are:{names}", EXIT_NOT_FOUND)
    return found[0].id if found else text


def fingerprint_option(fingerprint: str, option: str = "--fingerprint") -> str:
    """Convert a fingerprint to its stored form; reject any other text."""
    try:
        return queries.checked_fingerprint(fingerprint)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None


def parse_since(text: str | None, option: str = "--since") -> datetime | None:
    """Parse a time option: a duration before now, or a time. A time without an offset is local."""
    if text is None:
        return None
    try:
        return queries.parse_time(text, datetime.now(UTC))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
