"""Run horsies commands as processes: ``Supervisor`` restarts them when the project's code changes, and
``Group`` serves several applications with one worker each.

`horsies worker --reload` and `horsies dev` use ``Supervisor``. A change is first tried with `horsies
check`: if the code cannot be imported, the running processes are left alone until the next change.
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
# How long processes may take to end after an immediate stop before they are killed.
_KILL_SECONDS = 5.0
# The pauses before a group's failed worker is started again: doubled from the first to the longest. A
# worker that ran longer than the longest pause starts over with the first.
_PAUSE_SECONDS = (1.0, 60.0)

# A part shuts down cleanly if the supervisor dies.
PART_ENTRY = (
    "from horsies.worker.os_process import stop_with_parent; stop_with_parent({}); "
    "from horsies.cli.main import main; main()"
)

Action = Literal["none", "stop", "try_change", "report_end"]


@dataclass(eq=False, slots=True)
class Part:
    """One command in its own process.

    With ``shares_terminal`` it stays in the foreground process group, so that a debugger can read from
    the terminal. In that case Ctrl-C reaches it without the supervisor. It inherits ``descriptors``.
    """

    name: str
    arguments: Sequence[str]
    shares_terminal: bool = False
    descriptors: Sequence[int] = ()
    process: subprocess.Popen[bytes] | None = None
    is_reported: bool = False

    @property
    def exit_code(self) -> int | None:
        """The exit code of its last process; None while it is running."""
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
            self.process.send_signal(number)  # not sent to a process that has ended


def decide(*, stops: int, has_changed: bool, has_ended: bool) -> Action:
    """Decide what to do with the parts: a stop has priority, and a change replaces a part that has
    ended.
    """
    if stops:
        return "stop"
    if has_changed:
        return "try_change"
    return "report_end" if has_ended else "none"


def first_failure(exit_codes: Iterable[int | None]) -> int:
    """Return the first exit code that is a failure, or 0.

    SIGTERM is not a failure, because a process that the supervisor stops while Python is starting has
    no handler for it yet.
    """
    return next((code for code in exit_codes if code and code != -signal.SIGTERM), 0)


class Supervisor:
    """Starts parts, restarts them after a change below `folders`, and stops them one after the other.

    Without folders it does not restart, and when one part ends it stops the others.
    """

    def __init__(self, parts: Sequence[Part], locator: str, folders: Sequence[str] = ()) -> None:
        self._parts = parts
        self._locator = locator
        self._folders = folders
        self._stops: list[int] = []

    def is_set(self) -> bool:
        """Whether a stop was requested; called by the file watcher."""
        return bool(self._stops)

    def run(self) -> int:
        """Run the parts until a stop signal; return their ``first_failure``."""
        changes = self._changes()
        with counted_stops(self._stops):
            next(changes, None)  # a change during the start counts
            try:
                self._start()
                for changed in changes:
                    if not self._act(changed):
                        break
            finally:
                self._stop()
        return first_failure(part.exit_code for part in self._parts)

    def _act(self, changed: Sequence[str]) -> bool:
        """Act on the state of the parts; return False to end."""
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
            logger.error("%s changed, but cannot be used; the next change tries again", names)
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
            # the terminal has already sent it the signal
            if not (part.shares_terminal and is_of_terminal):
                part.send(signal.SIGTERM)
            while part.process is not None and part.exit_code is None:
                if len(self._stops) > 1 and not part.shares_terminal:
                    self._stop_at_once()
                    return
                time.sleep(_POLL_SECONDS / 2)

    def _stop_at_once(self) -> None:
        # A worker exits immediately after its third stop signal. Two signals of the same number may
        # arrive as one.
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
        """Yield changed Python files, or nothing for a while, until a stop is requested."""
        if self._folders:
            watchfiles = _require_watchfiles()
            is_python = watchfiles.PythonFilter()
            for changes in watchfiles.watch(
                *self._folders,
                watch_filter=None,  # changes to other files must not delay the next check of the parts
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
    """Whether the code can be imported. A stop ends the check, because an import may take forever."""
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
    """Add stop signals to the list, until the process ends.

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
    """Runs one worker per application until a stop signal or until all have ended.

    The workers are independent: a worker that fails is started again after a pause, while the others
    keep working. Every stop signal goes to all of them at once, so the second interrupts tasks as in a
    single worker.
    """

    def __init__(self, parts: Sequence[Part], *, restarts: bool = True) -> None:
        self._members = [_Member(part) for part in parts]
        self._restarts = restarts
        self._stops: list[int] = []

    def run(self) -> int:
        """Start the workers once all applications can be imported; return the worst exit code."""
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
        """Start the workers that are due; return whether one runs or will run again."""
        if self._stops:
            return any(member.is_running for member in self._members)
        now = time.monotonic()
        wanted = [member.keep_up(now, restarts=self._restarts) for member in self._members]
        return any(wanted)


@dataclass(eq=False, slots=True)
class _Member:
    """One worker of a group, and when to start it again."""

    part: Part
    pause: float = 0.0
    started_at: float = 0.0
    starts_at: float | None = 0.0

    @property
    def is_running(self) -> bool:
        return self.part.process is not None and self.part.exit_code is None

    def keep_up(self, now: float, *, restarts: bool) -> bool:
        """Start the worker when it is due, even after a failure; return False once it has ended
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
            "the worker of %s ended (%s); it is started again in %g s",
            *(self.part.name, reason, self.pause),
        )


def next_pause(last: float, ran_seconds: float) -> float:
    """Return the pause before a worker that ran this long is started again.

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
    """Whether file changes can be detected: the extra ``dev`` is installed."""
    return find_spec("watchfiles") is not None


def watched_folders(locator: str) -> list[str]:
    """Return a project's folders: the working directory, and an application's directory outside it."""
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
