"""Run horsies commands as processes: ``Supervisor`` restarts them when the project's code changes, and
``Group`` serves several applications with one worker each.

`horsies worker --reload` and `horsies dev` use ``Supervisor``. `horsies check` tests a change first: if
the code cannot be imported, the running processes continue until the next change.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import FrameType, ModuleType
from typing import Literal

from horsies.modules import failure_at, names_file
from horsies.worker import os_process

logger = logging.getLogger("horsies.dev")

_POLL_SECONDS = 0.1
# The time that processes have to exit after an immediate stop before they are killed.
_KILL_SECONDS = 5.0
# The pauses before a failed worker of a group is restarted: doubled each time from the first to the
# longest. A worker that ran longer than the longest pause starts again at the first pause.
_PAUSE_SECONDS = (1.0, 60.0)

# The kernel sends this signal to a part if the supervisor dies, so that the part shuts down
# cleanly.
PART_ENTRY = (
    "from horsies.worker.os_process import stop_with_parent; stop_with_parent({}); "
    "from horsies.cli.main import main; main()"
)

Action = Literal["none", "stop", "try_change", "report_end"]


@dataclass(eq=False, slots=True)
class Part:
    """One command in its own process.

    With ``shares_terminal`` it stays in the foreground process group, so that a debugger can read from
    the terminal. Ctrl-C then reaches it directly from the terminal. The process inherits
    ``descriptors``.
    """

    name: str
    arguments: Sequence[str]
    shares_terminal: bool = False
    descriptors: Sequence[int] = ()
    process: subprocess.Popen[bytes] | None = None
    is_reported: bool = False

    @property
    def exit_code(self) -> int | None:
        """The exit code of the part's last process; None while the process is running."""
        return None if self.process is None else self.process.poll()

    def start(self) -> None:
        self.is_reported = False
        self.process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-c", PART_ENTRY.format(os.getpid()), *self.arguments],
            stdin=None if self.shares_terminal else subprocess.DEVNULL,
            process_group=None if self.shares_terminal else 0,
            pass_fds=self.descriptors,
        )

    def send(self, number: int) -> None:
        if self.process is not None:
            self.process.send_signal(number)  # Popen does nothing if the process has ended.


def decide(*, stops: int, has_changed: bool, has_ended: bool) -> Action:
    """Return the next action: a stop comes before a restart, and a change replaces an ended part."""
    if stops:
        return "stop"
    if has_changed:
        return "try_change"
    return "report_end" if has_ended else "none"


def first_failure(exit_codes: Iterable[int | None]) -> int:
    """Return the first exit code that is a failure, or 0.

    SIGTERM is not a failure, because a process stopped during Python's start has no signal handler yet.
    """
    return next((code for code in exit_codes if code and code != -signal.SIGTERM), 0)


class Supervisor:
    """Starts parts, restarts them after a change below `folders`, and stops them one after the other.

    Without folders, nothing is restarted: when one part ends, the supervisor stops the others.
    """

    def __init__(self, parts: Sequence[Part], locator: str, folders: Sequence[str] = ()) -> None:
        self._parts = parts
        self._locator = locator
        self._folders = folders
        self._stops: list[int] = []

    def is_set(self) -> bool:
        """Return whether a stop was requested; the file watcher calls this method."""
        return bool(self._stops)

    def run(self) -> int:
        """Run the parts until a stop signal; return their ``first_failure``."""
        changes = self._changes()
        with counted_stops(self._stops):
            next(changes, None)  # Start watching first, to see a change during the start.
            try:
                self._start()
                for changed in changes:
                    if not self._act(changed):
                        break
            finally:
                self._stop()
        return first_failure(part.exit_code for part in self._parts)

    def _act(self, changed: Sequence[str]) -> bool:
        """Restart or stop the parts if needed; return False to end the supervisor."""
        ended = [one for one in self._parts if one.exit_code is not None and not one.is_reported]
        action = decide(stops=len(self._stops), has_changed=bool(changed), has_ended=bool(ended))
        if action == "try_change":
            self._try_change(changed)
        elif action == "report_end":
            for part in ended:
                part.is_reported = True
                reason = os_process.describe_exit(part.exit_code or 0)
                rest = "waiting for a change" if self._folders else "stopping"
                logger.error("the %s ended (%s); %s", part.name, reason, rest)
            return bool(self._folders)
        return action != "stop"

    def _try_change(self, changed: Sequence[str]) -> None:
        names = ", ".join(sorted({os.path.relpath(path) for path in changed})[:3])
        is_usable = is_importable(self._locator, self.is_set)
        if self._stops:
            return
        if not is_usable:
            logger.error(
                "%s changed, but the code cannot be imported; it is tried again after the "
                "next change",
                names,
            )
            return
        logger.info("%s changed; restarting", names)
        self._stop()
        if not self._stops:
            self._start()

    def _start(self) -> None:
        for part in self._parts:
            part.start()

    def _stop(self) -> None:
        """Stop the parts one after the other; a second signal stops all of them immediately."""
        is_of_terminal = self._stops[:1] in ([signal.SIGINT], [signal.SIGHUP])
        for part in self._parts:
            # The terminal has already sent the signal to this part.
            if not (part.shares_terminal and is_of_terminal):
                part.send(signal.SIGTERM)
            while part.process is not None and part.exit_code is None:
                if len(self._stops) > 1 and not part.shares_terminal:
                    self._stop_at_once()
                    return
                time.sleep(_POLL_SECONDS / 2)

    def _stop_at_once(self) -> None:
        # A worker exits immediately on its third stop signal. Two pending signals of the same number
        # may arrive as one.
        for number in (signal.SIGTERM, signal.SIGINT):
            for part in self._parts:
                part.send(number)
        deadline = time.monotonic() + _KILL_SECONDS
        for part in self._parts:
            if part.process is not None:
                with suppress(subprocess.TimeoutExpired):
                    part.process.wait(max(0.0, deadline - time.monotonic()))
                part.process.kill()
                part.process.wait()

    def _changes(self) -> Iterator[Sequence[str]]:
        """Yield the changed Python files, or an empty set after a timeout, until a stop is requested."""
        if self._folders:
            watchfiles = _require_watchfiles()
            is_python = watchfiles.PythonFilter()
            for changes in watchfiles.watch(
                *self._folders,
                # Filter here, because changes to other files must not delay the next check of the
                # parts.
                watch_filter=None,
                debounce=200,
                rust_timeout=round(_POLL_SECONDS * 1000),
                yield_on_timeout=True,
                stop_event=self,
                raise_interrupt=False,
                ignore_permission_denied=True,
            ):
                yield [path for change, path in changes if is_python(change, path)]
        while not self._stops:
            time.sleep(_POLL_SECONDS)
            yield ()


def is_importable(locator: str, should_stop: Callable[[], bool]) -> bool:
    """Return whether the code can be imported. A stop request ends the check, because an import can
    hang.
    """
    command = [sys.executable, "-c", PART_ENTRY.format(os.getpid()), "check", locator]
    null = subprocess.DEVNULL
    with subprocess.Popen(command, stdin=null, stdout=null) as check:  # noqa: S603
        while check.poll() is None:
            if should_stop():
                check.kill()
            time.sleep(_POLL_SECONDS / 2)
    return check.returncode == 0


@contextmanager
def counted_stops(stops: list[int]) -> Iterator[None]:
    """Add stop signals to the list, for the rest of the process's life.

    SIGHUP counts once, because a closed terminal may send it twice. Under ``nohup`` it is ignored.
    """

    def stop(number: int, _frame: FrameType | None) -> None:
        stops.append(number)
        if number == signal.SIGHUP:
            signal.signal(number, signal.SIG_IGN)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, stop)
    yield


class Group:
    """Runs one worker per application until a stop signal or until all workers have ended. A failed
    worker is restarted after a pause, while the others keep working. Every stop signal is sent to all
    workers, and the second signal interrupts running tasks.
    """

    def __init__(self, parts: Sequence[Part], *, restarts: bool = True) -> None:
        self._members = [_Member(part) for part in parts]
        self._restarts = restarts
        self._stops: list[int] = []

    def run(self) -> int:
        """Start the workers once all applications can be imported; return the most severe exit code."""
        with counted_stops(self._stops):
            for member in self._members:
                if not is_importable(member.part.name, lambda: bool(self._stops)):
                    return 0 if self._stops else 1
            passed_on = 0
            while self._keep_up():
                for number in self._stops[passed_on:]:
                    passed_on += 1
                    for member in self._members:
                        member.part.send(number)
                time.sleep(_POLL_SECONDS)
        return worst(member.part.exit_code for member in self._members)

    def _keep_up(self) -> bool:
        """Start the workers that are due; return whether any worker runs or will be restarted."""
        if self._stops:
            return any(member.is_running for member in self._members)
        now = time.monotonic()
        wanted = [member.keep_up(now, restarts=self._restarts) for member in self._members]
        return any(wanted)


@dataclass(eq=False, slots=True)
class _Member:
    """One worker of a group, and the time of its next start."""

    part: Part
    pause: float = 0.0
    started_at: float = 0.0
    starts_at: float | None = 0.0

    @property
    def is_running(self) -> bool:
        return self.part.process is not None and self.part.exit_code is None

    def keep_up(self, now: float, *, restarts: bool) -> bool:
        """Start the worker when it is due, including after a failure; return False once it has ended
        permanently.
        """
        if self.is_running:
            return True
        if self.starts_at is None:
            code = self.part.exit_code or 0
            if not restarts or worst([code]) != 1:
                return False
            self._plan_restart(now, os_process.describe_exit(code))
        if self.starts_at is not None and now >= self.starts_at:
            self.started_at, self.starts_at = now, None
            self.part.start()
        return True

    def _plan_restart(self, now: float, reason: str) -> None:
        self.pause = next_pause(self.pause, now - self.started_at)
        self.starts_at = now + self.pause
        logger.error(
            "the worker of %s ended (%s); it is restarted in %g s",
            *(self.part.name, reason, self.pause),
        )


def next_pause(last: float, ran_seconds: float) -> float:
    """Return the pause before a worker that ran this long is restarted.

    >>> [next_pause(0, 3), next_pause(1, 3), next_pause(60, 3), next_pause(60, 3600)]
    [1.0, 2.0, 60.0, 1.0]
    """
    shortest, longest = _PAUSE_SECONDS
    return min(2.0 * last, longest) if last and ran_seconds < longest else shortest


def worst(exit_codes: Iterable[int | None]) -> int:
    """Return a group's exit code: 1 if a worker failed, else 3 if tasks were interrupted, else 0."""
    codes = {code for code in exit_codes if code and code != -signal.SIGTERM}
    return 0 if not codes else 3 if codes == {3} else 1


def can_watch() -> bool:
    """Return whether file changes can be detected, which needs the extra ``dev``."""
    return find_spec("watchfiles") is not None


def watched_folders(locator: str) -> list[str]:
    """Return the folders to watch: the working directory and each application directory outside it."""
    project = os.getcwd()
    module_name = locator.rpartition(":")[0] or locator
    if not names_file(module_name):
        return [project]
    folder = os.path.dirname(os.path.abspath(module_name))
    is_inside = os.path.commonpath([project, folder]) == project
    return [project] if is_inside or not os.path.isdir(folder) else [project, folder]


def _require_watchfiles() -> ModuleType:
    try:
        return import_module("watchfiles")
    except ImportError:
        message = "Restarting on changes needs the package watchfiles, which is not installed."
        raise failure_at(None, message, help_text="pip install '/path/to/horsies[dev]'") from None
