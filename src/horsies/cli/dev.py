"""`horsies dev`: a project's database, tables, worker, scheduler and dashboard in one terminal."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import suppress
from importlib.util import find_spec
from typing import Annotated

import typer

from horsies.cli.migrate import schema_connection
from horsies.cli.options import (
    LocatorArgument,
    LogFormatOption,
    LogLevelOption,
    ModuleOption,
    open_app,
)
from horsies.cli.supervise import Part, Supervisor, can_watch, watched_folders
from horsies.cli.web import PORT, REQUIRED
from horsies.cli.worker import OPTIONAL_SCHEDULER_VARIABLE
from horsies.database_url import EMBEDDED_SCHEME, URL_VARIABLES, mask_url
from horsies.db.migrate import apply_migrations
from horsies.logs import LogFormat, LogLevel, attach_handler, event_descriptors

logger = logging.getLogger("horsies.dev")

DEFAULT_GRACE_SECONDS = 10.0


def dev(
    locator: LocatorArgument = None,
    module: ModuleOption = None,
    web: Annotated[
        bool, typer.Option("--web/--no-web", help="Serve the dashboard, with actions and payload.")
    ] = True,
    reload: Annotated[
        bool,
        typer.Option(
            "--reload/--no-reload", help="Restart when one of the project's Python files changes."
        ),
    ] = True,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65_535,
            help=f"The dashboard's port; default: {PORT}, or a free one if it is taken.",
            show_default=False,
        ),
    ] = None,
    processes: Annotated[
        int | None,
        typer.Option("--processes", "-c", min=1, help="Number of the worker's child processes."),
    ] = None,
    shutdown_grace: Annotated[
        float,
        typer.Option(
            metavar="SECONDS", help="Interrupt tasks still running this long after a stop."
        ),
    ] = DEFAULT_GRACE_SECONDS,
    loglevel: LogLevelOption = LogLevel.INFO,
    log_format: LogFormatOption = LogFormat.TEXT,
) -> None:
    """Run a project in this terminal: worker, scheduler and dashboard, restarted when its code changes.

    Without a database URL it starts a private PostgreSQL (embedded://). It creates and updates the
    tables. Ctrl-C shuts everything down cleanly; a second Ctrl-C does so immediately. Exit codes: 0
    clean shutdown, 1 error, 3 running tasks were interrupted.

    Example:
        horsies dev shop.py
        horsies dev shop.background:app --processes 2 --no-web
    """
    attach_handler(loglevel, log_format)
    _name_database()
    named = module or locator
    _prepare_database(named)
    assert named is not None
    os.environ[OPTIONAL_SCHEDULER_VARIABLE] = "1"
    log = f"--log-format={log_format.value}"
    worker = ["worker", named, "--with-scheduler", log, f"--loglevel={loglevel.value}"]
    limits = {"shutdown-grace": shutdown_grace, "processes": processes}
    worker += [f"--{name}={value}" for name, value in limits.items() if value is not None]
    parts = [Part("worker", worker, descriptors=event_descriptors())]
    if web and _has_dashboard():
        flags = [f"--port={port or _free_port()}", "--enable-actions", "--payload", log]
        parts.append(Part("dashboard", ["web", named, *flags]))
    folders = watched_folders(named) if reload and _can_reload() else ()
    raise typer.Exit(Supervisor(parts, named, folders).run())


def _name_database() -> None:
    """Choose a private PostgreSQL if the environment names no database."""
    if not any(os.environ.get(name, "").strip() for name in URL_VARIABLES):
        variable, url = URL_VARIABLES[0], EMBEDDED_SCHEME
        os.environ[variable] = url
        logger.info(
            "no database URL is set; using %s=%s: export it in other terminals", variable, url
        )


def _prepare_database(locator: str | None) -> None:
    """Import the application once, connect to its database and bring the tables up to date.

    This process then owns a private PostgreSQL, which keeps running when the worker restarts.
    """
    app = open_app("dev", locator)
    with schema_connection(app.config.broker) as connection:
        applied = apply_migrations(connection, replaces=True)
    database = mask_url(app.config.broker.database_url)
    logger.info("database %s: %d migration(s) applied", database, len(applied))
    app.close()


def _has_dashboard() -> bool:
    missing = [name for name in REQUIRED if find_spec(name) is None]
    if missing:
        logger.warning(
            "no dashboard: %s is missing; pip install '/path/to/horsies[web]'", missing[0]
        )
    return not missing


def _can_reload() -> bool:
    if not can_watch():
        logger.warning(
            "no restart on changes: watchfiles is missing; pip install '/path/to/horsies[dev]'"
        )
        return False
    return True


def _free_port() -> int:
    """Return the dashboard's usual port, or a free port if another process uses it."""
    for port in (PORT, 0):
        with socket.socket() as probe, suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(("127.0.0.1", port))
            return int(probe.getsockname()[1])
    return PORT
