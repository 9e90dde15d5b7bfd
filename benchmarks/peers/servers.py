"""The peers' private servers, with their own ports and directories, which are removed afterwards.
PostgreSQL is embedded, or the server in HORSIES_TEST_DATABASE_URL; all peers share it, and each workload
has its own database. Redis and RabbitMQ are the binaries of the system.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import psutil
import psycopg
from psycopg.sql import SQL, Identifier

from benchmarks.peers.processes import last_line, running
from horsies.db.embedded import start_or_join, url_of

RABBITMQ = "/usr/lib/rabbitmq/bin/rabbitmq-server"
START_SECONDS = 60.0
GRACE_SECONDS = 15.0
REDIS_DATABASES = 64
# Copies every key of one Redis database to another one, after emptying the other one.
COPY = """
redis.call('SELECT', ARGV[2]) redis.call('FLUSHDB') redis.call('SELECT', ARGV[1])
for _, key in ipairs(redis.call('KEYS', '*')) do redis.call('COPY', key, key, 'DB', ARGV[2]) end
"""


@dataclass
class Servers:
    """The addresses and settings of the servers, and the reasons for missing servers."""

    postgres: str
    redis: str = ""
    amqp: str = ""
    described: list[str] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    _kept: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def lend(self, state: str) -> Iterator[str]:
        """Yield a new database and Redis, in a stored state or empty."""
        template = _database_of(state) if self.has(state) else "template1"
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            _copy_database(connection, template, _database_of(""))
            try:
                self._redis("EVAL", COPY, "0", str(self._kept.get(state, len(self._kept) + 1)), "0")
                connection.execute("CHECKPOINT")
                yield urlunsplit(urlsplit(self.postgres)._replace(path=f"/{_database_of('')}"))
            finally:
                _drop_database(connection, _database_of(""))

    def has(self, state: str) -> bool:
        """Return whether this state is stored."""
        return state in self._kept

    def keep(self, state: str) -> None:
        """Store a copy of the current database and of Redis."""
        number = len(self._kept) + 1
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            _copy_database(connection, _database_of(""), _database_of(state))
        self._redis("EVAL", COPY, "0", "0", str(number))
        self._kept[state] = number

    def forget(self) -> None:
        """Drop the copies, because the PostgreSQL server may outlive the benchmark."""
        with psycopg.connect(self.postgres, autocommit=True) as connection:
            for state in self._kept:
                _drop_database(connection, _database_of(state))

    def _redis(self, *words: str) -> None:
        if not self.redis:
            return
        address = urlsplit(self.redis)
        command = "".join(f"${len(word)}\r\n{word}\r\n" for word in words)
        with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
            connection.sendall(f"*{len(words)}\r\n{command}".encode())
            answer = connection.recv(1024).decode()
        if answer.startswith("-"):
            raise RuntimeError(f"Redis refused a command: {answer.strip()}")


def _database_of(state: str) -> str:
    return f"peers_{os.getpid()}_{state}".rstrip("_")


def _copy_database(connection: psycopg.Connection[Any], source: str, target: str) -> None:
    statement = SQL("CREATE DATABASE {} TEMPLATE {}")
    connection.execute(statement.format(Identifier(target), Identifier(source)))


def _drop_database(connection: psycopg.Connection[Any], name: str) -> None:
    statement = SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
    connection.execute(statement.format(Identifier(name)))


@contextmanager
def all_servers(place: Path, wanted: set[str]) -> Iterator[Servers]:
    """Start PostgreSQL, and start Redis and RabbitMQ if they are needed and installed."""
    with _postgres(place) as url:
        servers = Servers(url)
        servers.described.append(_describe_postgres(url))
        redis = _redis(place, servers, "Redis" in wanted)
        with redis, _rabbitmq(place, servers, "RabbitMQ" in wanted):
            try:
                yield servers
            finally:
                servers.forget()


@contextmanager
def _postgres(place: Path) -> Iterator[str]:
    """Yield the named server, or a private server that is stopped before its directory is deleted."""
    if named := os.environ.get("HORSIES_TEST_DATABASE_URL"):
        yield named
        return
    data = place / "postgres"
    try:
        yield start_or_join(url_of(data), keep_data=False)
    finally:
        with suppress(FileNotFoundError, psutil.Error):
            server = psutil.Process(int((data / "postmaster.pid").read_text().split()[0]))
            server.send_signal(signal.SIGINT)  # a fast shutdown
            server.wait(30)


def _describe_postgres(url: str) -> str:
    with psycopg.connect(url) as connection:
        settings = {
            name: connection.execute(f"SHOW {name}".encode()).fetchone()
            for name in ("server_version", "fsync", "synchronous_commit", "full_page_writes")
        }
    shown = {name: row[0] if row else "?" for name, row in settings.items()}
    release = shown.pop("server_version")
    return f"PostgreSQL {release} ({', '.join(f'{name} {value}' for name, value in shown.items())})"


@contextmanager
def _redis(place: Path, servers: Servers, is_wanted: bool) -> Iterator[None]:
    program = shutil.which("redis-server")
    if not is_wanted or program is None:
        servers.missing["Redis"] = "redis-server is not installed: apt-get install redis-server"
        yield
        return
    port = free_port()
    command = [
        *(program, "--port", str(port), "--bind", "127.0.0.1", "--dir", str(place)),
        *("--save", "", "--appendonly", "no", "--databases", str(REDIS_DATABASES)),
    ]
    with running(command, os.environ, place / "redis.log", GRACE_SECONDS):
        _wait_for_port(port, place / "redis.log")
        servers.redis = f"redis://127.0.0.1:{port}/0"
        release = re.search(r"v=(\S+)", _output(program, "--version"))
        servers.described.append(
            f"Redis {release[1] if release else '?'} (in memory: no snapshots, no append-only file)"
        )
        yield


@contextmanager
def _rabbitmq(place: Path, servers: Servers, is_wanted: bool) -> Iterator[None]:
    if not is_wanted or not Path(RABBITMQ).exists():
        servers.missing["RabbitMQ"] = (
            "rabbitmq-server is not installed: apt-get install rabbitmq-server"
        )
        yield
        return
    port, base = free_port(), place / "rabbitmq"
    base.mkdir()
    (base / "plugins").write_text("[].\n")
    environment = {
        **os.environ,
        "HOME": str(base),
        "ERL_EPMD_PORT": str(free_port()),
        "RABBITMQ_NODENAME": f"peers{os.getpid()}@localhost",
        "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
        "RABBITMQ_NODE_PORT": str(port),
        "RABBITMQ_DIST_PORT": str(free_port()),
        "RABBITMQ_MNESIA_BASE": str(base),
        "RABBITMQ_LOG_BASE": str(base),
        "RABBITMQ_PID_FILE": str(base / "pid"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(base / "plugins"),
        "RABBITMQ_CONF_ENV_FILE": str(base / "none"),
    }
    try:
        with running([RABBITMQ], environment, base / "log", GRACE_SECONDS):
            _wait_for_port(port, base / "log")
            servers.amqp = f"amqp://guest:guest@127.0.0.1:{port}//"
            servers.described.append(f"RabbitMQ {_rabbitmq_release()} (durable queue)")
            yield
    finally:
        if daemon := shutil.which("epmd"):
            subprocess.run([daemon, "-kill"], env=environment, check=False, capture_output=True)


def _rabbitmq_release() -> str:
    found = sorted(Path("/usr/lib/rabbitmq/lib").glob("rabbitmq_server-*"))
    return found[-1].name.partition("-")[2] if found else "?"


def free_port() -> int:
    """Return a port that was just free."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _wait_for_port(port: int, log: Path) -> None:
    ends_at = time.monotonic() + START_SECONDS
    while time.monotonic() < ends_at:
        with socket.socket() as attempt:
            if attempt.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise TimeoutError(f"The server on port {port} did not start: {last_line(log)}")


def _output(*command: str) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout
