"""A real PgBouncer in transaction mode in front of the test server."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, LiteralString, TextIO
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import psycopg
from psycopg.conninfo import conninfo_to_dict

from tests.support.ports import free_port
from tests.support.wait import wait_until

SETTINGS = """
[databases]
{database} = {server}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {port}
unix_socket_dir =
auth_type = any
pool_mode = {pool_mode}
default_pool_size = 4
server_login_retry = 0.2
ignore_startup_parameters = extra_float_digits
"""


def find_pgbouncer() -> str | None:
    """Return the program's path, or None if it is not installed."""
    return shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin")


class PgBouncer:
    """A PgBouncer in front of one database, with the same port after a restart."""

    def __init__(
        self,
        database_url: str,
        directory: Path,
        pool_mode: str = "transaction",
        log: Path = Path(os.devnull),
    ) -> None:
        program = find_pgbouncer()
        assert program is not None, "pgbouncer is not installed"
        self._server = conninfo_to_dict(database_url)
        database, port = str(self._server["dbname"]), free_port()
        directory.chmod(0o755)  # The program reads its settings as a user other than root.
        settings = directory / "pgbouncer.ini"
        settings.write_text(
            SETTINGS.format(
                database=database, server=_server(self._server), port=port, pool_mode=pool_mode
            )
        )
        self._command = [program, str(settings)]
        self._log = log
        user = quote(str(self._server["user"]))
        self.url = f"postgresql://{user}@127.0.0.1:{port}/{quote(database)}"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start the program without waiting until it is ready."""
        with self._log.open("a") as log:
            self._process = _start(self._command, self._server, log)

    def wait_until_ready(self) -> None:
        wait_until(lambda: _answers(self.url, self.process))

    def kill(self) -> None:
        """Kill the program with SIGKILL, so that its clients lose their connections without notice."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> None:
        """Stop the program if it was started, even if it is frozen."""
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)
            self._process.terminate()
            self._process.wait()


@contextmanager
def started_pgbouncer(database_url: str, pool_mode: str = "transaction") -> Iterator[PgBouncer]:
    """Start PgBouncer in front of this database, and stop it afterwards."""
    with tempfile.TemporaryDirectory(prefix="horsies-pgbouncer-") as directory:
        pooler = PgBouncer(database_url, Path(directory), pool_mode)
        pooler.start()
        try:
            pooler.wait_until_ready()
            yield pooler
        finally:
            pooler.stop()


@contextmanager
def running_pgbouncer(database_url: str, pool_mode: str = "transaction") -> Iterator[str]:
    """Start PgBouncer in front of this database and yield the URL through PgBouncer."""
    with started_pgbouncer(database_url, pool_mode) as pooler:
        yield pooler.url


def client_names(pooled_url: str) -> list[str]:
    """Return the application names of all sessions connected to PgBouncer's database."""
    database = urlsplit(pooled_url).path.lstrip("/")
    return [row[-1] for row in _show(pooled_url, "CLIENTS") if row[2] == unquote(database)]


def server_pids(pooled_url: str) -> set[int]:
    """Return the server processes behind PgBouncer's own connections."""
    return {row[-3] for row in _show(pooled_url, "SERVERS")}


def _show(pooled_url: str, what: LiteralString) -> list[tuple[Any, ...]]:
    console = urlunsplit(urlsplit(pooled_url)._replace(path="/pgbouncer"))
    with psycopg.connect(console, autocommit=True) as connection:
        return connection.execute("SHOW " + what).fetchall()


def _start(
    command: list[str], server: Mapping[str, object], log: TextIO
) -> subprocess.Popen[bytes]:
    # PgBouncer refuses to run as root. The owner of the server's socket directory has access to it;
    # over TCP, any user works.
    user = None
    if os.geteuid() == 0:
        host = str(server.get("host") or "")
        user = Path(host).stat().st_uid if host.startswith("/") else 0
        user = user or pwd.getpwnam("nobody").pw_uid
    return subprocess.Popen(command, user=user, stderr=log)


def _server(server: Mapping[str, object]) -> str:
    names = ("host", "port", "dbname", "user", "password")
    found = {name: str(server[name]).replace("'", "''") for name in names if server.get(name)}
    return " ".join(f"{name}='{value}'" for name, value in found.items())


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    assert process.poll() is None, "pgbouncer ended at once"
    with suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=2):
        return True
    return False
