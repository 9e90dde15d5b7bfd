"""Windows: how many short tasks a child may hold, which child gets the next ones, and when a turn is due.
When a task ends, a child with a window finds the next task in its socket, so neither the child nor the
database waits for the other. This module only makes decisions, without I/O; ``assignments.py`` carries them
out.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from horsies.db.statements.turn import ClaimedTask
from horsies.worker.agenda import RunTimes

WIDTH_MAX = 32
# How much work may wait in a child behind the running task: 5 ms, plus the overhead of a 5 ms task.
AHEAD_SECONDS = 0.006
# The run times of a task are used after the task has ended this many times.
ENDS_MIN = 10
# How long tasks wait behind a running task before they are taken back: a number of seconds, or a multiple of
# the running task's typical run time.
PATIENCE_SECONDS = 0.01
PATIENCE_FACTOR = 4
# The longest time that a report waits for further reports, so that one turn records them together.
LINGER_SECONDS = 0.002


def width(typical_seconds: float, widest: int) -> int:
    """Return how many tasks with this run time a child may hold, including the running task."""
    if typical_seconds * (widest - 1) <= AHEAD_SECONDS:
        return widest
    return 1 + int(AHEAD_SECONDS / typical_seconds)


def fill_order(rooms: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return the children that get the next tasks behind other tasks. `rooms` lists for each child its pid,
    the number of tasks that it holds, and the maximum number. The children get tasks in turn, starting with
    the child that holds the fewest, so that a few tasks are spread over all children.
    """
    places = [(at, pid) for pid, held, most in rooms for at in range(held, most)]
    places.sort(key=lambda place: place[0])
    return [pid for _, pid in places]


def linger_seconds(free: int, room: int, waiting_since: float, now: float) -> float:
    """Return how long a turn waits for more reports: until half of all slots are free, or the first
    report has waited long enough.
    """
    if 2 * free >= room:
        return 0.0
    return max(0.0, waiting_since + LINGER_SECONDS - now)


class Windows:
    """Keeps the run times of a worker's tasks, and the depth to which the next claim fills the windows.

    `widest` is the configured limit; below 2 there are no windows. Tasks named in `apart` are never in a
    window: they take a transaction, are durable or batched, or have a memory limit.
    """

    __slots__ = ("_apart", "_next_depth", "_run_times", "depth", "is_on", "is_open", "widest")

    def __init__(self, widest: int = 0, apart: Collection[str] = ()) -> None:
        self.widest = widest
        self._apart = frozenset(apart)
        self.is_on = widest > 1
        # How many tasks the next claim may give to each child, including the task that runs first.
        self.depth = 1
        # The lowest depth after the next full claim, unless double the current depth is more.
        self._next_depth = 1
        # Whether one of these depths is more than 1. Until then, a claim without short tasks changes
        # nothing, and need not be noted.
        self.is_open = False
        self._run_times: dict[str, RunTimes] = {}

    def takes(self, task: ClaimedTask) -> bool:
        """Return whether a task with `burst` may be in a window."""
        return self.is_on and task.task_name not in self._apart

    def note_end(self, task_name: str, run_seconds: float) -> None:
        """Record a task's run time, as measured by its child."""
        if task_name in self._run_times:
            self._run_times[task_name].note(run_seconds)
        else:
            self._run_times[task_name] = RunTimes.of(run_seconds)

    def width(self, task_name: str) -> int:
        """Return how many tasks with that name a child may hold; 1 until enough of them have ended."""
        times = self._run_times.get(task_name)
        if times is None or times.count < ENDS_MIN:
            return 1
        return width(times.typical_seconds, self.widest)

    def short_names(self) -> list[str]:
        """Return the names of the tasks that may be in windows of the depth of the next claim."""
        least = max(2, self.depth)
        return [name for name in self._run_times if self.width(name) >= least]

    def patience_seconds(self, task_name: str) -> float:
        """Return how many seconds other tasks may wait behind a task with that name; 0 if none may wait."""
        if self.width(task_name) < 2:
            return 0.0
        return max(PATIENCE_SECONDS, PATIENCE_FACTOR * self._run_times[task_name].typical_seconds)

    def note_claim(self, asked: int, names: Sequence[str], *, is_drained: bool) -> None:
        """Adjust the depth of windows after a claim that requested up to `asked` tasks and got tasks with
        these names.

        Windows grow while claims return the requested number of short tasks. When the queues are drained,
        windows start small again, so that other workers get a share of the few tasks. Otherwise the next task
        needs its own child or a shallower window, and the claim has locked the rows behind that task without
        effect: windows are filled again after a child has taken that task, and then only to half the depth.
        """
        if not self.is_on or is_drained:
            self.depth = self._next_depth = 1
        elif len(names) < asked:
            if self.depth > 1:
                self._next_depth = self.depth // 2
            self.depth = 1
        else:
            grown = max(2 * self.depth, self._next_depth)
            self.depth = min(grown, *map(self.width, set(names)))
            self._next_depth = 1
        self.is_open = self.depth > 1 or self._next_depth > 1
