"""The guard: a small process that kills the processes of tasks when their worker was killed.

The kernel kills the children of a dead worker, but not the programs that tasks started. The guard finds
them by a mark that the children set on themselves before any user code runs: an unusual soft limit of
RLIMIT_RTTIME. The limit concerns real-time scheduling only, every process may read it, and unlike the
parent, the session or the environment it survives setsid, a double fork, exec and a change of user.

This file runs as a script of its own, in an interpreter that imports nothing but the modules below: the
guard shares neither memory nor descriptors nor user code with the processes that it outlives.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from contextlib import suppress

_PR_SET_PDEATHSIG = 1
_LAST_SECONDS = 10.0
_PAUSE_SECONDS = 0.02


def main(worker_pid: int, mark: int) -> None:
    """Wait for the end of the worker, then kill every process with `mark`.

    A worker that ends in order kills its guard first.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    with suppress(PermissionError):
        os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # A worker may run inside a task of another worker: that one's guard must not end this guard early.
    resource.setrlimit(resource.RLIMIT_RTTIME, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    while os.getppid() == worker_pid:
        signal.sigwait({signal.SIGHUP})
    remaining = kill_marked(mark)
    if remaining:
        pids = ", ".join(map(str, remaining))
        sys.stderr.write(f"horsies guard: processes of tasks could not be killed: {pids}\n")


def kill_marked(mark: int) -> list[int]:
    """Kill the processes with `mark` until none is left; returns those that cannot be killed.

    One pass is not enough: a process may fork while the list is read.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    while (pids := find_marked(mark)) and time.monotonic() < deadline:
        for pid in pids:
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)
    return pids


def find_marked(mark: int) -> list[int]:
    """The pids of living processes with `mark`. Reading a process's limits takes about 15 µs."""
    text = b" %d " % mark
    pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    return [pid for pid in pids if text in _read(pid, "limits") and _is_alive(pid)]


def _is_alive(pid: int) -> bool:
    state = _read(pid, "stat").rpartition(b") ")[2][:1]
    return state not in (b"", b"Z", b"X")


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
