"""Operating system calls: process groups, parentage, memory, exit statuses.

Both parent and children use this module. On Linux a child dies with its parent, and the worker adopts orphans
of its children. On other systems, the end-of-file on the socket replaces both mechanisms.
"""

from __future__ import annotations

import ctypes
import os
import random
import resource
import signal
import sys
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial

if sys.platform != "linux":
    # psutil is imported only on systems without /proc, which provides the same figures on Linux: the import
    # costs every process 11 ms and 0.7 MB.
    import psutil

IS_LINUX = sys.platform == "linux"
HAS_PIDFD = hasattr(os, "pidfd_open")

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MEGABYTE = 1024 * 1024

# libc is opened before any fork, because a fresh child needs a few µs for every memory page that it
# touches for the first time.
_library = ctypes.CDLL(None, use_errno=True)
_library_prctl = _library.prctl if IS_LINUX else None


def die_with_parent(parent_pid: int) -> None:
    """Make the kernel kill this process when its parent dies; exit now if the parent is already dead."""
    if IS_LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:
        os._exit(0)


def stop_with_parent(parent_pid: int) -> None:
    """Make the kernel send SIGTERM to this process when its parent dies; exit now if the parent is
    already dead.
    """
    if IS_LINUX:
        _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(0)


def death_signal_setter() -> Callable[[], object]:
    """Sets the signal of ``die_with_parent`` without a Python frame, because it is called after
    every task.
    """
    if _library_prctl is None:
        return int
    return partial(_library_prctl, _PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def new_mark() -> int:
    """Return a random mark for ``set_mark``, so that no two workers on a host have the same mark; 0 if
    processes cannot be marked. As a time limit the mark is 70,000 years or more.
    """
    if not IS_LINUX:
        return 0
    limits = resource.getrlimit(resource.RLIMIT_RTTIME)
    if limits[1] != resource.RLIM_INFINITY:
        return 0
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, limits)
    except (OSError, ValueError):  # some sandboxes do not permit changes to this limit
        return 0
    return random.SystemRandom().randrange(1 << 61, 1 << 62)


def set_mark(mark: int) -> None:
    """Mark this process and all processes that it starts for the guard; see ``child/guard.py``."""
    if mark:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, resource.RLIM_INFINITY))


def schedule_as_batch() -> None:
    """Make the kernel schedule this process as batch work: waking it does not preempt the waker.

    So the parent hands out a whole batch before the first child runs. This saves a tenth of the processor
    time per short task, in the parent and in the children.
    """
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))


def adopt_orphans() -> None:
    """Make this process the parent of orphaned descendants, so that it can reap them."""
    if IS_LINUX:
        _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def fork() -> int:
    """Flush the standard streams, then fork; otherwise both processes would write the buffered text."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    return os.fork()


def start_interpreter(entry_module: str, socket_fd: int, *, keeps_input: bool = False) -> int:
    """Start a fresh interpreter that runs `entry_module`'s ``main(socket_fd)``, and return its pid.

    The interpreter inherits standard output, standard error and this socket; with `keeps_input`, also
    standard input.
    """
    os.set_inheritable(socket_fd, True)
    code = f"from {entry_module} import main; main({socket_fd})"
    return _spawn("-c", code, keeps_input=keeps_input)


def start_script(path: str, *arguments: str) -> int:
    """Start an interpreter that runs a file without site packages, and return its pid."""
    # -I is not used, because some installations need PYTHONHOME.
    return _spawn("-S", "-P", path, *arguments)


def _spawn(*arguments: str, keeps_input: bool = False) -> int:
    no_input = (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0)
    return os.posix_spawn(
        sys.executable,
        [sys.executable, *arguments],
        os.environ,
        file_actions=[] if keeps_input else [no_input],
    )


def open_process(pid: int) -> int | None:
    """Return a descriptor that becomes readable when `pid` ends; None if the system does not support this."""
    if not HAS_PIDFD:
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None


def terminate(pid: int) -> None:
    """Send SIGTERM to a process that has not been reaped yet, even if it has just ended."""
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGTERM)


def kill_group(pid: int) -> None:
    """Kill a child and its process group. Must be called before the child is reaped.

    Until the child is reaped, its pid cannot be reused. A child leads its own process group once it has
    sent its first frame; before that, only the child itself is killed.
    """
    with suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def has_ended(pid: int) -> bool:
    """Return whether a child has ended but has not been reaped yet; for systems without pid descriptors."""
    if sys.platform == "linux":
        with suppress(OSError), open(f"/proc/{pid}/stat", "rb") as stat:
            return stat.read().rpartition(b") ")[2].startswith(b"Z")
    else:
        with suppress(psutil.Error):
            return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    return True


def reap(pid: int) -> int | None:
    """Return the exit code of `pid`, negative for a signal; None while the process is running.

    A process whose status was collected by other code counts as exited with code 0.
    """
    try:
        reaped, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return 0
    # A process may make its parent its tracer. waitpid() then also reports when the process is stopped.
    has_ended = reaped == pid and not os.WIFSTOPPED(status)
    return os.waitstatus_to_exitcode(status) if has_ended else None


def wait_for_exit(pid: int) -> None:
    with suppress(ChildProcessError):
        os.waitpid(pid, 0)


def describe_exit(exit_code: int) -> str:
    """Return an exit code in words: ``exit code 3`` or ``signal 9 (SIGKILL)``."""
    if exit_code >= 0:
        return f"exit code {exit_code}"
    try:
        return f"signal {-exit_code} ({signal.Signals(-exit_code).name})"
    except ValueError:
        return f"signal {-exit_code}"


def reap_orphans(known_pids: Collection[int]) -> int:
    """Reap orphaned processes of children that have ended, and return how many there were.

    Only processes outside this process's own session are reaped: they descend from a child. Processes
    that this process has started for other purposes keep their exit status.
    """
    own_session = os.getsid(0)
    reaped = 0
    for pid in _direct_children():
        if pid in known_pids:
            continue
        with suppress(OSError):
            if _session_of(pid) != own_session and os.waitpid(pid, os.WNOHANG)[0] == pid:
                reaped += 1
    return reaped


def end_session(session_id: int) -> None:
    """Kill the members of a session whose leader has ended, and wait for them.

    Killing the leader's group alone would miss members that have joined other groups.
    """
    while pids := [
        pid for pid in _direct_children() if _session_of(pid) == session_id and _kill(pid)
    ]:
        for pid in pids:
            wait_for_exit(pid)


def own_rss_bytes() -> int:
    return _rss_bytes(os.getpid())


def rss_megabytes(pids: Collection[int]) -> float:
    """Return the sum of the processes' resident memory; a process that has ended counts as 0."""
    return sum(_rss_bytes(pid) for pid in pids) / _MEGABYTE


def private_megabytes(pids: Collection[int]) -> float:
    """Return the total private memory of the processes; for a process where it is unknown, the resident
    memory.
    """
    return sum(_private_bytes(pid) for pid in pids) / _MEGABYTE


def _private_bytes(pid: int) -> int:
    # This takes 0.3 ms for a child of 45 MB.
    with suppress(OSError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        lines = [line.split() for line in file if line.startswith(b"Private_")]
        return 1024 * sum(int(kilobytes) for _, kilobytes, _ in lines)
    return _rss_bytes(pid)


def _rss_bytes(pid: int) -> int:
    if sys.platform == "linux":
        with suppress(OSError), open(f"/proc/{pid}/statm", "rb") as statm:
            return int(statm.read().split()[1]) * _PAGE_BYTES
    else:
        with suppress(psutil.Error, OSError):
            return int(psutil.Process(pid).memory_info().rss)
    return 0


def _prctl(option: int, value: int) -> None:
    if _library_prctl is None or _library_prctl(option, value, 0, 0, 0) != 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))


def _kill(pid: int) -> bool:
    """Kill a process; return False if it belongs to another user, because it must not be waited for."""
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        return False
    return True


def _session_of(pid: int) -> int | None:
    try:
        return os.getsid(pid)
    except OSError:
        return None


def _direct_children() -> list[int]:
    own_pid = os.getpid()
    try:
        with open(f"/proc/{own_pid}/task/{own_pid}/children", encoding="ascii") as children:
            return [int(pid) for pid in children.read().split()]
    except OSError:
        return []


def process_space() -> str | None:
    """Return the ids of the kernel's boot and of this process's pid namespace; together they make a pid
    unambiguous.
    """
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot_id = file.read().strip()
        return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return None


def process_started(pid: int) -> int | None:
    """Return the start time of a process, in clock ticks since boot; None if it cannot be read.

    A later process with the same pid has a different value.
    """
    stat = _read_stat(pid)
    return None if stat is None else int(stat[19])


def is_process_gone(pid: int, started: int) -> bool:
    """Return whether a process in this pid namespace has provably ended; return False if this is in doubt."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # the process exists, but belongs to another user
    # Where /proc hides other users' processes, nothing is proved.
    stat = _read_stat(pid)
    return stat is not None and (int(stat[19]) != started or stat[0] in ("Z", "X"))


def _read_stat(pid: int) -> list[str] | None:
    """Return the fields of /proc/PID/stat from the state onwards. The name before them may contain any
    characters.
    """
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return None
