"""Processes that end, with their descendants, at the end of the block that started them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil


@contextmanager
def running(
    command: Sequence[str],
    environment: Mapping[str, str],
    log: Path,
    grace_seconds: float = 0.0,
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in a file until the block ends.

    Without a grace period it is killed immediately, because some workers first finish all fetched tasks.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(
            list(command),
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        stop(process, grace_seconds)


def stop(process: subprocess.Popen[bytes], grace_seconds: float) -> None:
    """Stop a process within its grace period, if any, then kill it and its descendants."""
    family = {*tree(process.pid)}
    if grace_seconds:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(grace_seconds)
    while left := [member for member in {*family, *session(process.pid)} if _is_alive(member)]:
        for member in left:
            with suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(left, timeout=1)
    process.wait()


def session(leader: int) -> list[psutil.Process]:
    """Return the processes of a session, which may outlive the process that started them."""
    members = []
    for pid in psutil.pids():
        with suppress(ProcessLookupError, PermissionError, psutil.NoSuchProcess):
            if os.getsid(pid) == leader:
                members.append(psutil.Process(pid))
    return members


def _is_alive(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def tree(pid: int) -> list[psutil.Process]:
    """Return a process with all its descendants, or none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def proportional_memory(pid: int) -> tuple[float, int]:
    """Return the PSS of a process and its descendants in MB, and the number of processes."""
    sizes = []
    for member in tree(pid):
        with suppress(psutil.NoSuchProcess):
            sizes.append(member.memory_full_info().pss / 1e6)
    return sum(sizes), len(sizes)


def last_line(log: Path) -> str:
    """Return the last line of a log, which is the likely reason of a failure."""
    lines = [
        line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    return lines[-1][:200] if lines else "no output"


def wait_until_alive(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process is still alive after this time."""
    time.sleep(seconds)
    return process.poll() is None
