"""The guard: a small process that kills tasks' processes when their worker is killed.

The kernel kills a dead worker's children, but not the programs that tasks have started. The guard finds those
programs by a mark that children set on themselves before any user code runs: an unusual soft limit of
RLIMIT_RTTIME. This limit only concerns real-time scheduling, and any process may read it. The mark survives
setsid, a double fork, exec and a change of user, whereas the parent, the session or the environment may
change.

This file runs as a script in its own interpreter, which imports only the modules below. So the guard
shares no memory, descriptors or user code with the processes that it outlives.
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
_EMPTY_PASSES = 3


def main(worker_pid: int, mark: int) -> None:
    """Wait until the worker has ended, then kill every process with `mark`.

    A worker that shuts down cleanly kills its guard first.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    worker_group = os.getpgrp()
    with suppress(PermissionError):
        os.setsid()
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    # This worker may run inside a task of another worker, whose guard must not kill this guard early.
    resource.setrlimit(resource.RLIMIT_RTTIME, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP, 0, 0, 0)
    while os.getppid() == worker_pid:
        signal.sigwait({signal.SIGHUP})
    remaining = kill_marked(mark, worker_group)
    if remaining:
        pids = ", ".join(map(str, remaining))
        sys.stderr.write(f"horsies guard: processes of tasks could not be killed: {pids}\n")


def kill_marked(mark: int, spared_group: int = 0) -> list[int]:
    """Kill the processes with `mark` until none is left, and return those that cannot be killed.

    One pass is not enough, because a process may fork while the list is being read. A process that
    continuously forks and exits can only be killed through its process group. Children are marked shortly
    before they leave the worker's group. That group also contains other programs, so it is not killed.
    """
    deadline = time.monotonic() + _LAST_SECONDS
    empty_passes = 0
    while empty_passes < _EMPTY_PASSES and time.monotonic() < deadline:
        groups = find_marked(mark)
        empty_passes = 0 if groups else empty_passes + 1
        targets = [*groups, *(-group for group in set(groups.values()) - {spared_group})]
        killed = [target for target in targets if _kill(target)]
        if groups and not killed:
            break
        time.sleep(_PAUSE_SECONDS)
    return list(groups)


def find_marked(mark: int) -> dict[int, int]:
    """Return the live processes with `mark`, and their process groups. Reading a process's limits takes
    about 15 µs.
    """
    text = b" %d " % mark
    # Newest processes first, because they are the most likely to fork.
    pids = [int(name) for name in reversed(os.listdir("/proc")) if name.isdecimal()]
    found = {pid: _group(pid) for pid in pids if text in _read(pid, "limits")}
    return {pid: group for pid, group in found.items() if group}


def _group(pid: int) -> int:
    """Return a process's group; 0 if the process has ended."""
    fields = _read(pid, "stat").rpartition(b") ")[2].split()
    return int(fields[2]) if fields and fields[0] not in (b"Z", b"X") else 0


def _kill(target: int) -> bool:
    """Kill a process or, for a negative number, a process group; return False if this is not permitted."""
    try:
        with suppress(ProcessLookupError):
            os.kill(target, signal.SIGKILL)
    except PermissionError:
        return False
    return True


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
        return file.read()
    return b""


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
