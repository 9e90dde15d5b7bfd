"""Workers as forks of an interpreter that has already imported the package.

The imports of `python -m horsies worker` take most of the processor time of a short end-to-end test. A
prepared interpreter does these imports once per test process. Each worker is a fork of it, with its own
session, environment and files, and a child of the test process. Tests of start-up run the command.
"""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import runpy
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import NoReturn

from horsies.logs import DESCRIPTOR_VARIABLE

REPOSITORY = Path(__file__).parents[2]
# An environment variable of every process of a test's workers.
DATABASE_VARIABLE = "HORSIES_E2E_DATABASE_URL"
_COMMAND = [sys.executable, "-m", "horsies"]
_COMMANDS = ("worker", "scheduler")
_MODULES = (
    "horsies.cli.main",
    "horsies.cli.worker",
    "horsies.cli.scheduler",
    "horsies.worker.loop",
)
# Libraries and the interpreter read these variables at start-up.
_READ_AT_START = ("PYTHON", "LD_", "LC_", "LANG", "TZ", "PYDANTIC", "MALLOC")
_PR_SET_CHILD_SUBREAPER = 36
_REQUEST_BYTES = 1_000_000


def can_fork(command: Sequence[str], environment: Mapping[str, str]) -> bool:
    """Return whether a fork of the prepared interpreter is equivalent to this command."""
    return (
        sys.platform == "linux"
        and [*command[:3]] == _COMMAND
        and command[3] in _COMMANDS
        and _read_at_start(environment) == _STARTED_WITH
    )


def _read_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: text for name, text in environment.items() if name.startswith(_READ_AT_START)}


_STARTED_WITH = _read_at_start(os.environ)


class ForkedProcess(subprocess.Popen[bytes]):
    """A child of this process that another process forked on its behalf."""

    def __init__(self, args: Sequence[str], pid: int) -> None:
        self.args = args
        self.pid = pid
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()


def fork(
    command: Sequence[str], environment: Mapping[str, str], log: int, events: int
) -> subprocess.Popen[bytes]:
    """Start the command as `WorkerProcess.launch` does, in the directory of the repository."""
    request = json.dumps([command, dict(environment)]).encode()
    connection = _prepared_interpreter()
    _adopt_orphans(True)
    try:
        socket.send_fds(connection, [request], [log, events])
        answer = connection.recv(64)
    finally:
        _adopt_orphans(False)
    if not answer:
        raise RuntimeError("The prepared interpreter has ended.")
    return ForkedProcess(command, int(answer))


def _adopt_orphans(is_wanted: bool) -> None:
    """Make orphaned descendants children of this process, such as forks whose parent has ended."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, int(is_wanted), 0, 0, 0):
        raise OSError("This process cannot adopt the processes of its descendants.")


@cache
def _prepared_interpreter() -> socket.socket:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            cwd=REPOSITORY,
            env={**os.environ, DATABASE_VARIABLE: "that of each worker"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            pass_fds=[theirs.fileno()],
        )
    atexit.register(_end, ours, process)
    return ours


def _end(connection: socket.socket, process: subprocess.Popen[bytes]) -> None:
    connection.close()
    process.wait()


# The prepared interpreter


def _serve(descriptor: int) -> None:
    """Fork for each request until the test process has ended."""
    for name in _MODULES:
        import_module(name)
    connection = socket.socket(fileno=descriptor)
    while True:
        request, descriptors, _, _ = socket.recv_fds(connection, _REQUEST_BYTES, 2)
        if not request:
            return
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            if os.fork():
                os._exit(0)  # The worker is then a child of the test process.
            for one in (descriptor, reading):
                os.close(one)
            log, events = descriptors
            command, environment = json.loads(request)
            _become(command, environment, log, events, writing)
        for one in (writing, *descriptors):
            os.close(one)
        os.waitpid(between, 0)
        connection.send(os.read(reading, 64))
        os.close(reading)


def _become(
    command: Sequence[str], environment: Mapping[str, str], log: int, events: int, answer: int
) -> NoReturn:
    """Run the command as a new interpreter would."""
    os.setsid()
    os.write(answer, str(os.getpid()).encode())
    os.close(answer)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.close(log)
    os.set_inheritable(events, True)
    os.environ.clear()
    os.environ.update(environment, **{DESCRIPTOR_VARIABLE: str(events)})
    sys.argv = list(command[2:])
    runpy.run_module("horsies", run_name="__main__", alter_sys=True)
    sys.exit(0)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
