"""Runs task code in the test's own process, in the same way as a worker's child process.

Arguments and results pass through the codec, hooks and headers apply, and ``current_task()`` works.
Only one task runs at a time, as in a child process.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Literal, NamedTuple, Self

from horsies.app import Horsies
from horsies.current_task import CurrentTask, set_running_task, set_running_task_here
from horsies.db.statements.turn import ClaimedTask
from horsies.durable.leaving import Leaving
from horsies.states import TaskStatus
from horsies.tasks.outcome import Outcome, outcome_of_report
from horsies.tasks.waiters import is_loop_running
from horsies.worker.child.execute import AppProgram
from horsies.worker.protocol import (
    Assignment,
    ChildReport,
    NodePart,
    assignment_of,
    with_transaction,
)

AttemptOutcome = Literal["completed", "failed", "retried"]


@dataclass(frozen=True)
class Attempt:
    """One attempt that the test ran; ``number`` counts the attempts of a task from 1."""

    task: str
    """The name of the task."""
    task_id: str
    """The id of the task, the same for all its attempts."""
    number: int
    """The attempt's number, starting at 1."""
    outcome: AttemptOutcome
    """`completed`, `retried`, or `failed` without another attempt."""
    error_code: str | None = None
    """The error code of the failure; None after a success."""
    error_message: str | None = None
    """The message of the failure; None after a success."""

    @classmethod
    def of(cls, task: ClaimedTask, outcome: Outcome) -> Attempt:
        """Describe a recorded outcome."""
        verdict: AttemptOutcome = "retried" if outcome.delay_seconds is not None else "failed"
        return cls(
            task.task_name,
            task.id,
            task.retry_count + 1,
            "completed" if outcome.status is TaskStatus.COMPLETED else verdict,
            outcome.error_code,
            outcome.error_message,
        )


@dataclass
class Attempts:
    """The attempts that a test ran, in order."""

    attempts: list[Attempt] = field(default_factory=list)
    """One entry for each attempt, in execution order."""

    @property
    def completed(self) -> int:
        """The number of attempts that returned a success."""
        return self._count("completed")

    @property
    def failed(self) -> int:
        """The number of attempts that failed without a retry."""
        return self._count("failed")

    @property
    def retried(self) -> int:
        """The number of attempts that failed and were, or will be, retried."""
        return self._count("retried")

    def _count(self, outcome: AttemptOutcome) -> int:
        return sum(one.outcome == outcome for one in self.attempts)


class Ended(NamedTuple):
    """The outcome of an attempt, the exception that its function raised, and whether the function was
    called.
    """

    outcome: Outcome
    raised: BaseException | None = None
    was_called: bool = True


# The tasks running in this process, innermost last; a task that sends inline runs another task
# inside itself.
_running: list[CurrentTask | None] = [None]


class Execution:
    """Executes attempts of an application's tasks, with one event loop for the duration of the ``with``
    block.
    """

    def __init__(self, app: Horsies, worker_id: str = "") -> None:
        self._app = app
        self._program = AppProgram(app, worker_id)
        self._runner = asyncio.Runner()
        self._raised: dict[str, BaseException] = {}

    def __enter__(self) -> Self:
        # The last hook is the innermost, so it sees the exception before other hooks can replace
        # it.
        self._app.hooks.around.append(self._note_exception)
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._app.hooks.around.remove(self._note_exception)
        self._program.transactions.close()
        self._runner.close()

    def run(self, task: ClaimedTask, node: NodePart | None = None) -> Ended:
        """Execute one attempt; return its outcome, and the exception that the function raised."""
        return self._ended(task, self._execute(assignment_of(task, node)))

    async def run_async(self, task: ClaimedTask, node: NodePart | None = None) -> Ended:
        """Like ``run``, but an ``async def`` task runs on the caller's event loop."""
        if not self._is_async(task.task_name):
            return self.run(task, node)
        assignment = assignment_of(task, node)
        with _running_globally(None):
            # A separate asyncio task has its own context for the running task and its headers.
            report = await asyncio.create_task(self._attempt(assignment))
        return self._ended(task, report)

    def _execute(self, assignment: Assignment) -> ChildReport:
        """Execute an attempt in a thread without an event loop, as a child process does."""
        if is_loop_running():
            with ThreadPoolExecutor(1) as pool:
                return pool.submit(copy_context().run, self._execute, assignment).result()
        if not self._is_async(assignment.task_name):
            with _running_globally(CurrentTask(assignment, time.time())):
                return copy_context().run(_value_of, self._attempt(assignment))
        with _running_globally(None):
            if threading.current_thread() is threading.main_thread():
                return self._runner.run(self._attempt(assignment), context=copy_context())
            return asyncio.run(self._attempt(assignment))

    async def _attempt(self, assignment: Assignment) -> ChildReport:
        set_running_task_here(CurrentTask(assignment, time.time()))
        return await self._program.execute_async(assignment)

    def _is_async(self, task_name: str) -> bool:
        task = self._app.get_task(task_name)
        return task is not None and task.definition.is_async

    def _note_exception(self, task: CurrentTask) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._raised[task.id] = error
            raise

    def _ended(self, task: ClaimedTask, report: ChildReport) -> Ended:
        raised = self._raised.pop(task.id, None)
        if isinstance(raised, Leaving):
            raised = None  # The run of a durable function was parked, which is not a failure.
        if raised is not None and not isinstance(raised, Exception | SystemExit):
            raise raised  # Ctrl-C, a cancelled test, or an outcome of pytest such as pytest.fail()
        # No jitter: a test waits exactly as long as the policy specifies.
        outcome = outcome_of_report(task, report, random=lambda: 0.0)
        return Ended(with_transaction(outcome, report), raised, report.was_called)


@contextmanager
def _running_globally(task: CurrentTask | None) -> Iterator[None]:
    """Make this the process-wide running task for all threads; with None, use the context's running
    task.
    """
    _running.append(task)
    set_running_task(task)
    try:
        yield
    finally:
        _running.pop()
        set_running_task(_running[-1])


def _value_of(coroutine: Coroutine[Any, Any, ChildReport]) -> ChildReport:
    """Run a coroutine that awaits nothing, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as ended:
        report: ChildReport = ended.value
        return report
    raise AssertionError("a plain function awaits nothing")
