"""The windows of a real child against a plain model, with every event at every point of a window."""

from __future__ import annotations

import os
import selectors
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.events import Died, PoolEvent, Reported, Stopped, TakenBack
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildPool
from tests.support.examples import examples
from tests.support.pool import BOOT, assignment
from tests.support.wait import wait_until

PATIENT = 60.0


class WindowOfOneChild(RuleBasedStateMachine):
    """A child runs tasks that end when this machine lets them; the pool hears of it when it collects."""

    def __init__(self) -> None:
        super().__init__()
        self.selector = selectors.DefaultSelector()
        self.directory = tempfile.TemporaryDirectory()
        self.journal = Path(self.directory.name, "journal")
        self.gate = Path(self.directory.name, "gate")
        os.mkfifo(self.gate)
        self.gate_fd = os.open(self.gate, os.O_RDWR)
        settings = PoolSettings(1, start_method=StartMethod.FORK, has_windows=True)
        self.pool = ChildPool(settings, BOOT, self.selector)
        self.pool.start()
        self.pids = self.pool.pids()
        # The model: what the child runs and what it holds behind that, and how every task ended.
        self.running: str | None = None
        self.behind: list[str] = []
        self.begun = 0
        self.expected: dict[str, str] = {}
        self.ended: dict[str, str] = {}
        # Tasks that ended, of which the pool has not read the report.
        self.unread: list[str] = []

    def teardown(self) -> None:
        self.pool.kill_all()
        self.pool.shutdown()
        os.close(self.gate_fd)
        self.selector.close()
        self.directory.cleanup()

    def _begin_next(self) -> None:
        """The child begins the next task that it holds, and says so in its journal."""
        self.running = self.behind.pop(0) if self.behind else None
        if self.running is not None:
            self.begun += 1
            wait_until(lambda: self._journal_length() == self.begun)

    def _journal_length(self) -> int:
        return self.journal.read_bytes().count(b"\n") if self.journal.exists() else 0

    def _absorb(self, events: list[PoolEvent]) -> None:
        for event in events:
            match event:
                case Reported(report=report):
                    self._end(report.task_id, "reported")
                case TakenBack(assignments=assignments):
                    for one in assignments:
                        self._end(one.task_id, "returned")
                case Stopped(assignment=one):
                    self._end(one.task_id, "stopped")
                case Died(assignment=one) if one is not None:
                    self._end(one.task_id, "died")

    def _end(self, task_id: str, how: str) -> None:
        assert task_id not in self.ended, (task_id, how, self.ended[task_id])
        self.ended[task_id] = how

    def _collect_until(self, wanted: Callable[[], bool]) -> None:
        def collected() -> bool:
            self._absorb(self.pool.collect(0.01))
            return wanted()

        wait_until(collected)

    def _return_the_rest(self) -> None:
        self.expected |= dict.fromkeys(self.behind, "returned")
        self.behind = []

    def _lose_child(self, how: str) -> None:
        """The child ends, and another one takes its place."""
        (lost,) = self.pids
        if self.running is not None:
            self.expected[self.running] = how
        self._return_the_rest()
        self.running, self.unread = None, []
        self._collect_until(
            lambda: (
                self.ended == self.expected
                and self.pool.places.idle_count == 1
                and len(self.pool.pids()) == 1
                and lost not in self.pool.pids()
            )
        )
        self.pids = self.pool.pids()

    @rule(count=st.integers(1, 6))
    def give(self, count: int) -> None:
        given = [
            assignment("gated", str(self.journal), str(self.gate), "begun") for _ in range(count)
        ]
        (pid,) = self.pids
        self.pool.dispatch_window(pid, [(one, PATIENT) for one in given])
        self.behind += [one.task_id for one in given]
        if self.running is None:
            self._begin_next()

    @precondition(lambda self: self.running is not None)
    @rule()
    def end_front(self) -> None:
        assert self.running is not None
        self.expected[self.running] = "reported"
        self.unread.append(self.running)
        os.write(self.gate_fd, b"x")
        self._begin_next()
        if self.running is None:
            self.collect()  # only the start of the next task shows that the report is on its way

    @rule()
    def collect(self) -> None:
        self._collect_until(lambda: self.ended == self.expected)
        self.unread = []

    @rule()
    def take_back(self) -> None:
        self.pool.return_unstarted()
        self._return_the_rest()
        self.unread = []  # the pool has read all reports, so as to know which task runs

    @precondition(lambda self: self.behind)
    @rule(data=st.data())
    def cancel_one_behind(self, data: st.DataObject) -> None:
        task_id = self.behind.pop(data.draw(st.integers(0, len(self.behind) - 1)))
        self.expected[task_id] = "returned"
        assert self.pool.stop_task(task_id, "cancel")

    @precondition(lambda self: self.running is not None)
    @rule()
    def cancel_front(self) -> None:
        assert self.running is not None
        assert self.pool.stop_task(self.running, "cancel")
        self._lose_child("stopped")

    @precondition(lambda self: self.unread)
    @rule(data=st.data())
    def cancel_too_late(self, data: st.DataObject) -> None:
        place = data.draw(st.integers(0, len(self.unread) - 1))
        self.pool.stop_task(self.unread[place], "cancel")
        if place == 0:
            # The pool took it for the front, and emptied the window before it looked closer.
            self._return_the_rest()
        self.collect()

    @precondition(lambda self: self.running is not None)  # after an idle one the next comes late
    @rule()
    def kill(self) -> None:
        (pid,) = self.pids
        os.kill(pid, signal.SIGKILL)
        self._lose_child("died")

    @invariant()
    def nothing_ended_otherwise(self) -> None:
        assert self.ended.items() <= self.expected.items()
        assert self._journal_length() == self.begun


TestWindowOfOneChild = WindowOfOneChild.TestCase
TestWindowOfOneChild.settings = settings(
    max_examples=examples(16),
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
