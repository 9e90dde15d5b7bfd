"""Processes that end with the block that started them, with everything they started themselves."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

GRACE_SECONDS = 15.0


@contextmanager
def running(
    command: Sequence[str], environment: Mapping[str, str], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a command with its output in a file until the block ends."""
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
        stop(process)


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask a process to end, then kill what is left of it and of its descendants."""
    family = tree(process.pid)
    with suppress(ProcessLookupError):
        process.send_signal(signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    _, left = psutil.wait_procs(family, timeout=2)
    for member in {*left, *tree(process.pid)}:
        with suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


def tree(pid: int) -> list[psutil.Process]:
    """Return a process with all its descendants; none if it has ended."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    return []


def proportional_memory(pid: int) -> tuple[float, int]:
    """Return the PSS of a process and its descendants in MB, and how many processes they are."""
    sizes = []
    for member in tree(pid):
        with suppress(psutil.NoSuchProcess):
            sizes.append(member.memory_full_info().pss / 1e6)
    return sum(sizes), len(sizes)


def last_line(log: Path) -> str:
    """Return the last line of a log, as the likely reason of a failure."""
    lines = [
        line.strip() for line in log.read_text("utf-8", "replace").splitlines() if line.strip()
    ]
    return lines[-1][:200] if lines else "no output"


def wait_until_alive(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether a process is still there after that long."""
    time.sleep(seconds)
    return process.poll() is None
