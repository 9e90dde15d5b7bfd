"""The ledger: every task that this worker owns, from its claim until its outcome is recorded or lost.

Each task has one entry, which is in one state at a time. The ledger does no I/O: ``dispatcher.py`` gives
the tasks to children and enters their outcomes, and ``work.py`` records the outcomes in the database.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from operator import attrgetter
from typing import Protocol

from horsies.db.statements.turn import ClaimedTask
from horsies.logs import as_event, headers_to_log
from horsies.tasks.outcome import TOO_LATE, Outcome, as_completed
from horsies.worker.tally import End
from horsies.worker.turn import TurnResult

logger = logging.getLogger("horsies.worker")

# The maximum number of characters of outcomes in one turn. PostgreSQL rejects a statement of a gigabyte and
# reads an array of texts at about 60 MB/s, so recording more at once would delay the worker's heartbeat.
TURN_CHARACTERS_MAX = 16 * 1024 * 1024
# A worker with this many refused outcomes, or characters in them, claims no more tasks.
REFUSED_MAX = 1000
REFUSED_CHARACTERS_MAX = 256 * 1024 * 1024
# If an outcome has waited this long, the database counts as unresponsive.
LATE_SECONDS = 1.0


class State(IntEnum):
    """The state of a task that the worker owns."""

    # Claimed ahead of time, and not yet given to a child.
    WAITING = 0
    RUNNING = 1
    # Not called, because the call does not fit this release's function but may fit another release's.
    UNCALLED = 2
    # The next turn records its outcome.
    ENDED = 3
    # The database refused its outcome, which is tried again in its own transaction.
    REFUSED = 4


# Constants, because accessing an enum member takes 0.1 µs, and every task needs several accesses.
WAITING, RUNNING, UNCALLED, ENDED, REFUSED = State
# A turn reads these fields of all ended attempts; attrgetter and map avoid bytecodes for each of them.
_OUTCOME, _ENDED_AT = attrgetter("outcome"), attrgetter("ended_at")
_RESULT, _LOG = attrgetter("result"), attrgetter("log")
# The results of a turn that differ from the worker's decisions.
_DEVIATIONS = attrgetter("refused", "cleaning", "failed", "cancelled", "instead", "by_child")


@dataclass(eq=False)
class Owned:
    """An attempt that this worker owns. If it has ended, ``outcome``, ``run_seconds`` and ``ended_at``
    are set.
    """

    task: ClaimedTask
    state: State
    outcome: Outcome | None = None
    run_seconds: float | None = field(default=None, init=False)
    ended_at: float = field(default=0.0, init=False)


class Attempt(Protocol):
    """The assignment or the report of an attempt."""

    @property
    def task_id(self) -> str: ...
    @property
    def generation(self) -> int: ...


class _Doubt:
    """A context for code that claims tasks. If the code fails, its claim may still have been committed, so
    the worker may own tasks that no child has received.
    """

    __slots__ = ("is_raised",)

    def __init__(self) -> None:
        self.is_raised = False

    def __enter__(self) -> None:
        return None

    def __exit__(self, error_type: type[BaseException] | None, *_: object) -> None:
        if error_type is not None:
            self.is_raised = True


class Ledger:
    """One worker's tasks, each in its state."""

    def __init__(self) -> None:
        self._owned: dict[str, Owned] = {}
        # The same entries by state, in the order in which they entered the state. This is a list and not
        # a dict, because hashing an enum member takes 0.2 µs, and every task would need seven hashes.
        self._by_state: list[dict[str, Owned]] = [{} for _ in State]
        # Callers read these two mappings directly: the loop checks nine times per turn whether any task is in
        # a given state, and methods for this check took a tenth of all calls in a turn.
        self.owned: Mapping[str, Owned] = self._owned
        self.by_state: Sequence[Mapping[str, Owned]] = self._by_state
        # The tasks that no child has started and that are waiting to be released.
        self._returned: list[ClaimedTask] = []
        self._doubt = _Doubt()

    # Questions

    @property
    def is_empty(self) -> bool:
        return not self._owned

    def count(self, *states: State) -> int:
        """Count the tasks in these states; without an argument, all tasks."""
        if not states:
            return len(self._owned)
        total = 0
        for state in states:
            total += len(self._by_state[state])
        return total

    def tasks(self, state: State | None = None) -> list[ClaimedTask]:
        """Return the tasks in this state, in the order in which they entered it; without a state, all
        owned tasks.
        """
        entries = self._owned if state is None else self._by_state[state]
        return [owned.task for owned in entries.values()]

    def outcomes(self, state: State) -> list[tuple[ClaimedTask, Outcome]]:
        """Return the tasks in this state that have an outcome, each with its outcome."""
        entries = self._by_state[state].values()
        return [(one.task, one.outcome) for one in entries if one.outcome is not None]

    def has(self, task_id: str, *states: State) -> bool:
        """Return whether this worker owns the task; if states are passed, whether the task is
        in one of them.
        """
        owned = self._owned.get(task_id)
        return owned is not None and (not states or owned.state in states)

    def running(self, attempt: Attempt) -> ClaimedTask | None:
        """Return the running task of an attempt; None if the worker has lost the task since, even if it has
        claimed the task again.
        """
        owned = self._by_state[RUNNING].get(attempt.task_id)
        if owned is None or owned.task.generation != attempt.generation:
            return None
        return owned.task

    @property
    def is_full(self) -> bool:
        """Whether too many refused outcomes are kept in memory to run more tasks."""
        if not (refused := self._by_state[REFUSED]):
            return False
        size = sum(len(outcome.result) for _, outcome in self.outcomes(REFUSED))
        return len(refused) >= REFUSED_MAX or size >= REFUSED_CHARACTERS_MAX

    @property
    def ended_since(self) -> float | None:
        """Return when the earliest attempt ended whose outcome is still to be recorded; None if there is
        none.
        """
        first = next(iter(self._by_state[ENDED].values()), None)
        return None if first is None else first.ended_at

    # Changes of state

    def put(self, task: ClaimedTask, state: State, outcome: Outcome | None = None) -> None:
        """Enter an attempt, with its outcome if it ends without a child.

        An earlier attempt of the same task is void, because another worker has recovered it.
        """
        if (earlier := self._owned.get(task.id)) is not None:
            del self._by_state[earlier.state][task.id]
            if earlier.outcome is not None and earlier.task.generation != task.generation:
                _log_dropped(earlier.task)
        owned = self._owned[task.id] = Owned(task, state, outcome)
        if outcome is not None:
            owned.ended_at = time.monotonic()
        self._by_state[state][task.id] = owned

    def end(
        self,
        task: ClaimedTask,
        outcome: Outcome,
        run_seconds: float | None,
        ended_at: float,
        state: State = ENDED,
    ) -> None:
        """Note the end of an attempt, because its child has reported it or died."""
        owned = self._by_state[RUNNING].pop(task.id)
        owned.outcome, owned.run_seconds, owned.ended_at = outcome, run_seconds, ended_at
        owned.state = state
        self._by_state[state][task.id] = owned

    def forget(self, task_id: str) -> None:
        """Forget a task that this worker no longer owns, or never did."""
        owned = self._owned.pop(task_id, None)
        if owned is not None:
            del self._by_state[owned.state][task_id]

    def give_back(self, tasks: Iterable[ClaimedTask]) -> None:
        """Make the next release return these tasks to their queues, because no child has started them."""
        for task in tasks:
            self.forget(task.id)
            self._returned.append(task)

    # Recording

    def to_record(self) -> list[Outcome]:
        """Return the outcomes for the next turn: all of them, unless their texts are too long for one
        transaction.

        The database computes an attempt's start from its run time, so the time that the outcome has
        waited for the database is added to the run time.
        """
        ended, now = self._by_state[ENDED].values(), time.monotonic()
        found: list[Outcome] = list(map(_OUTCOME, ended))
        late_before = now - LATE_SECONDS
        if (
            all(map(late_before.__lt__, map(_ENDED_AT, ended)))
            and sum(map(len, map(_RESULT, found))) <= TURN_CHARACTERS_MAX
            and not any(map(_LOG, found))
        ):
            return found  # nearly always
        outcomes: list[Outcome] = []
        size = 0
        for owned, outcome in zip(ended, found, strict=True):
            size += len(outcome.result)
            if outcome.log is not None:
                size += len(outcome.log.body)
            if size > TURN_CHARACTERS_MAX and outcomes:
                break
            if owned.ended_at <= late_before and outcome.run_us is not None:
                waited_us = round((now - owned.ended_at) * 1e6)
                outcome = outcome._replace(run_us=outcome.run_us + waited_us)
            outcomes.append(outcome)
        return outcomes

    def close(self, outcomes: Sequence[Outcome], turned: TurnResult) -> list[End]:
        """Forget a turn's attempts that are recorded, or that another worker now owns; keep attempts whose
        outcome the database refused. Return the outcomes as they were recorded.
        """
        ends: list[End] = []
        recorded, refused = turned.recorded, turned.refused
        as_reported = not any(_DEVIATIONS(turned))
        for outcome in outcomes:
            task_id = outcome.task_id
            owned = self._owned.pop(task_id)
            del self._by_state[owned.state][task_id]
            if as_reported and outcome.park is None and task_id in recorded:
                ends.append((outcome, owned.task, owned.run_seconds))
            elif task_id in refused:
                owned.outcome, owned.state = outcome, REFUSED
                self._owned[task_id] = self._by_state[REFUSED][task_id] = owned
            elif task_id in turned.cleaning:
                _log_cleaning(owned.task)
            elif (
                outcome.park is not None and task_id not in turned.cancelled | turned.instead.keys()
            ):
                _log_parked(outcome, owned.task, task_id in recorded)
            elif task_id in recorded:
                ends.append((_as_recorded(outcome, turned), owned.task, owned.run_seconds))
            else:
                _log_dropped(owned.task)
        if turned.refused and self.is_full:
            logger.error("%d outcomes are refused; claiming no tasks", self.count(REFUSED))
        return ends

    # Claims in doubt

    def claim_in_doubt(self) -> _Doubt:
        """Return the context for code that claims tasks or gives them to children: ``with
        ledger.claim_in_doubt():``.
        """
        return self._doubt

    @property
    def needs_release(self) -> bool:
        """Return whether the database may assign tasks to this worker that it does not hold."""
        return self._doubt.is_raised or bool(self._returned)

    def release_again(self) -> None:
        """Make the next release include tasks that the database assigns to this worker but the worker does
        not hold, even refused tasks.
        """
        self._doubt.is_raised = True

    def note_released(self) -> Sequence[ClaimedTask]:
        """Note that the tasks were released; return the tasks that were waiting for this."""
        returned, self._returned = self._returned, []
        self._doubt.is_raised = False
        return returned


def freed_by_queue(owned: Mapping[str, Owned], outcomes: Iterable[Outcome]) -> Mapping[str, int]:
    """Count the places that these outcomes of owned tasks free in each queue."""
    return Counter(owned[one.task_id].task.queue_name for one in outcomes)


def freed_lanes(owned: Mapping[str, Owned], outcomes: Iterable[Outcome]) -> list[tuple[str, int]]:
    """Return the queues and lanes of the owned tasks with keys among these outcomes."""
    tasks = [owned[one.task_id].task for one in outcomes]
    return [(task.queue_name, task.lane) for task in tasks if task.lane is not None]


def options_of(owned: Mapping[str, Owned], task_id: str) -> str | None:
    """Return the stored options of a task, if this worker owns it."""
    found = owned.get(task_id)
    return None if found is None else found.task.task_options


def _as_recorded(outcome: Outcome, turned: TurnResult) -> Outcome:
    """Return the outcome that the database has stored instead of the worker's decision. It is a success that
    the child had recorded, an outcome without the texts that the database rejects, the outcome for an
    accepted cancellation, or a failure whose retry would be too late.
    """
    task_id = outcome.task_id
    if outcome.is_in_doubt and task_id in turned.by_child:
        return as_completed(outcome)
    if turned.instead:
        outcome = turned.instead.get(task_id, outcome)
    if outcome.if_cancelled is not None and task_id in turned.cancelled:
        return outcome.if_cancelled
    if outcome.delay_seconds is not None and task_id in turned.failed:
        return outcome._replace(delay_seconds=None, retry_reason=TOO_LATE)
    return outcome


def _log_parked(outcome: Outcome, task: ClaimedTask, is_recorded: bool) -> None:
    if not is_recorded:
        _log_dropped(task)
    elif outcome.park is not None and outcome.park.problem is not None:
        event = as_event("run_held", task_id=task.id, task_name=task.task_name)
        text = "%s %s is held until it is resumed: %s"
        extra = event | headers_to_log(task.task_options)
        logger.error(text, task.task_name, task.id, outcome.park.problem, extra=extra)
    else:
        event = as_event("run_parked", task_id=task.id, task_name=task.task_name)
        extra = event | headers_to_log(task.task_options)
        logger.debug("%s %s is parked", task.task_name, task.id, extra=extra)


def _log_cleaning(task: ClaimedTask) -> None:
    event = as_event("run_cleaning", task_id=task.id, task_name=task.task_name)
    text = "%s %s was cancelled and continues with its clean-up"
    logger.info(text, task.task_name, task.id, extra=event | headers_to_log(task.task_options))


def _log_dropped(task: ClaimedTask) -> None:
    extra = as_event("outcome_dropped", task_id=task.id) | headers_to_log(task.task_options)
    logger.warning("outcome of task %s dropped: its claim is no longer valid", task.id, extra=extra)
