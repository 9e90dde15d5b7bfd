"""Shared parts of the operator commands: the database they work on, their exit codes and options.

Operator commands need a database, not an application, and never create or change its tables. Exit codes:
0 done, 1 failure or refusal, 4 not found; typer itself exits with 2 for arguments that it refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, TypeVar, cast

import psycopg
import typer

from horsies.cli.options import EXIT_FAILED as EXIT_FAILED
from horsies.cli.options import EXIT_NOT_FOUND as EXIT_NOT_FOUND
from horsies.cli.options import exit_with as exit_with
from horsies.cli.options import named_database, open_app, refuse_both
from horsies.config.defaults import default_config
from horsies.errors import ErrorCode, HorsiesError
from horsies.logs import LogFormat, LogLevel, attach_handler
from horsies.modules import Deferred, failure_at
from horsies.monitor.defaults import LIMIT_MAX
from horsies.result import Ok
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult, PostgresBroker
from horsies.tasks.recording import acting_as, process_user

if TYPE_CHECKING:
    from horsies.app import Horsies
    from horsies.config.postgres import PostgresConfig
    from horsies.monitor import queries
else:
    queries = Deferred("horsies.monitor.queries")

T = TypeVar("T")

_NOT_FOUND = (BrokerErrorCode.UNKNOWN_QUEUE, BrokerErrorCode.UNKNOWN_SCHEDULE)

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of text.")]
ReasonOption = Annotated[
    str | None, typer.Option(help="Why; recorded with your name, see `horsies history`.")
]
LimitOption = Annotated[int, typer.Option(min=1, max=LIMIT_MAX, help="Show at most this many.")]


@dataclass(frozen=True, slots=True)
class Session:
    """An open database, and the application if one was named."""

    broker: PostgresBroker
    app: Horsies | None

    @property
    def queue_caps(self) -> Mapping[str, int | None] | None:
        """The queues of the application with their caps."""
        if self.app is None:
            return None
        return {queue.name: queue.max_concurrency for queue in self.app.config.queues()}

    @property
    def cluster_wide_cap(self) -> int | None:
        """The cap of the application."""
        return None if self.app is None else self.app.config.cluster_wide_cap


@contextmanager
def open_session(command: str, locator: str | None, database_url: str | None) -> Iterator[Session]:
    """Open the database that a command was given, directly or through an application."""
    attach_handler(LogLevel.WARNING, LogFormat.TEXT)
    refuse_both("LOCATOR", locator, "--database-url", database_url)
    app = open_app(command, locator) if locator else None
    if app is not None:
        config = app.config.broker
    else:
        quick = cast("PostgresConfig | None", default_config(database_url))
        config = quick or named_database(database_url)
    broker = PostgresBroker(config, role="operator", migrates=False)
    try:
        with acting_as(process_user(), "cli"):
            yield Session(broker, app)
    finally:
        broker.close()


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
        error.exception.location = None  # the database URL is wrong, not a line of code
        return error.exception
    unreachable = isinstance(error.exception, psycopg.OperationalError)
    code = ErrorCode.BROKER_INVALID_URL if unreachable else ErrorCode.BROKER_INIT_FAILED
    return failure_at(None, error.message, code=code)


def parse_since(text: str | None, option: str = "--since") -> datetime | None:
    """Parse a time option: a duration before now, or a time, which is local unless it has an offset."""
    if text is None:
        return None
    try:
        return queries.parse_time(text, datetime.now(UTC))
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint=option) from None
