"""Every hostile act of a task, with innocent tasks before and behind it: which of these it costs."""

from __future__ import annotations

import os
import selectors
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from horsies.worker.pool.children import PoolSettings
from horsies.worker.pool.events import Died, PoolEvent, Reported, Stopped, TakenBack
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildPool
from horsies.worker.protocol import Assignment
from tests.support.apps.hostile import KINDS, LOOP_KINDS
from tests.support.pool import BOOT, DEADLINE_SECONDS, MakePool, assignment
from tests.support.wait import wait_until

PATIENT = 60.0
INNOCENT = 6
# What ends a process, or takes its descriptors or its memory away, costs all coroutines in it.
COSTS_THE_PROCESS = {
    "shut_writing",
    "shut_sockets",
    "shut_reading",
    "close_descriptors",
    "replace_descriptors",
    "limit_descriptors",
    "limit_memory",
    "limit_memory_softly",
    "limit_files",
    "exit_at_once",
    "kill_itself",
    "become_another_program",
    "stop_itself",
    "mask_signals",
}


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    return tmp_path / "journal"


def begun(journal: Path) -> list[str]:
    return journal.read_text().splitlines() if journal.exists() else []


class Outcomes:
    """Runs tasks as a worker does: those that come back are given to a child again."""

    def __init__(self, pool: ChildPool, *, has_windows: bool = False) -> None:
        self.pool = pool
        self.has_windows = has_windows
        self.waiting: list[Assignment] = []
        self.ended: dict[str, PoolEvent] = {}

    def run(self, tasks: Sequence[Assignment]) -> None:
        self.begin(tasks)
        wanted = {task.task_id for task in tasks}
        self.step_until(lambda: wanted <= set(self.ended))

    def begin(self, tasks: Sequence[Assignment]) -> None:
        self.waiting = list(tasks)
        self._hand_out()

    def step_until(self, wanted: Callable[[], bool]) -> None:
        """Take steps without pauses, because each waits for the pool itself: a result of 20 MB arrives in
        130 steps, to which the pauses of `wait_until` added 4 seconds.
        """
        deadline = time.monotonic() + DEADLINE_SECONDS
        while not wanted():
            assert time.monotonic() < deadline, f"it did not happen; so far: {self.ended}"
            self.step()

    def step(self) -> None:
        for event in self.pool.collect(0.01):
            match event:
                case TakenBack(assignments=assignments):
                    self.waiting += assignments
                case Reported(report=report):
                    self.ended[report.task_id] = event
                case Died(assignment=one) | Stopped(assignment=one) if one is not None:
                    self.ended[one.task_id] = event
        self._hand_out()

    def _hand_out(self) -> None:
        if self.pool.places.has_async:
            for pid in self.pool.places.next_async(len(self.waiting)):
                self.pool.dispatch(self.waiting.pop(0), pid)
            return
        for pid in self.pool.places.idle(self.pool.places.idle_count):
            if self.has_windows and self.waiting:
                self.pool.dispatch_window(pid, [(one, PATIENT) for one in self.waiting])
                self.waiting = []
            elif self.waiting:
                self.pool.dispatch(self.waiting.pop(0), pid)

    def harmed(self, tasks: Sequence[Assignment]) -> list[PoolEvent]:
        ends = [self.ended[task.task_id] for task in tasks]
        return [end for end in ends if not (isinstance(end, Reported) and end.report.ok)]


@pytest.mark.parametrize("has_windows", [True, False], ids=["window", "strict"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_hostile_act_costs_no_other_task(
    make_pool: MakePool, journal: Path, kind: str, has_windows: bool
) -> None:
    pool = make_pool(1, has_windows=has_windows, stop_grace_seconds=0.1)
    outcomes = Outcomes(pool, has_windows=has_windows)
    notes = [assignment("note", str(journal), str(number)) for number in range(2 * INNOCENT)]
    large = assignment("note_and_return_much", str(journal), "large")
    attack = assignment("attack", str(journal), "attack", kind, timeout_ms=1_000)
    outcomes.run([*notes[:INNOCENT], attack, *notes[INNOCENT:], large])
    harmed = outcomes.harmed([*notes, large])
    cancel_in_the_same_child(outcomes, journal)
    assert harmed == []
    counts = Counter(begun(journal))
    assert set(counts.values()) == {1}, "a task ran twice"
    assert len(counts) == 2 * INNOCENT + 3


def cancel_in_the_same_child(outcomes: Outcomes, journal: Path) -> None:
    """The worker reads permits when it cancels, whatever state a task has left them in."""
    front = assignment("note_and_sleep", str(journal), "long", 600.0)
    outcomes.begin([front])
    outcomes.step_until(lambda: "long" in begun(journal))
    assert outcomes.pool.stop_task(front.task_id, "cancel")
    outcomes.step_until(lambda: front.task_id in outcomes.ended)
    assert isinstance(outcomes.ended[front.task_id], Stopped)


@pytest.mark.parametrize("kind", [*KINDS, *LOOP_KINDS])
def test_a_hostile_coroutine_costs_no_task_that_comes_after_it(journal: Path, kind: str) -> None:
    with selectors.DefaultSelector() as selector:
        settings = PoolSettings(
            0, StartMethod.FORK, stop_grace_seconds=0.1, async_children=1, async_slots=20
        )
        pool = ChildPool(settings, BOOT, selector)
        try:
            assert pool.start()
            check_among_coroutines(Outcomes(pool), journal, kind)
        finally:
            pool.kill_all()
            pool.shutdown()


def check_among_coroutines(outcomes: Outcomes, journal: Path, kind: str) -> None:
    sharing = [assignment("note_twice", str(journal), 0.5) for _ in range(INNOCENT)]
    outcomes.begin(sharing)
    outcomes.step_until(lambda: begun(journal).count("begun") == INNOCENT)
    function = "attack" if kind in KINDS else "attack_loop"
    attack = assignment(function, str(journal), "attack", kind, timeout_ms=1_000)
    sharing += [assignment("note", str(journal), str(number)) for number in range(INNOCENT)]
    outcomes.run([attack, *sharing[INNOCENT:]])
    later = [assignment("note", str(journal), f"later {number}") for number in range(INNOCENT)]
    outcomes.run(later)
    outcomes.step_until(lambda: len(outcomes.ended) == 3 * INNOCENT + 1)
    harmed = outcomes.harmed(sharing)
    assert not harmed or kind in COSTS_THE_PROCESS, harmed
    assert outcomes.harmed(later) == []
    counts = Counter(line for line in begun(journal) if line not in ("begun", "ended"))
    assert begun(journal).count("begun") == INNOCENT, "a task ran twice"
    assert set(counts.values()) == {1}, "a task ran twice"


# All of it; the beginning, the head and the middle of the first message.
STOLEN_BYTES = [1 << 20, 5, 69, 150]


@pytest.mark.parametrize("count", STOLEN_BYTES)
@pytest.mark.parametrize("has_windows", [True, False], ids=["window", "async"])
def test_a_message_that_a_task_has_read_costs_no_other_task(
    make_pool: MakePool, journal: Path, tmp_path: Path, count: int, has_windows: bool
) -> None:
    """Later messages arrive: their tasks run once, and the task of the lost one is run by another child."""
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    options = {} if has_windows else {"async_children": 1, "async_slots": 20}
    pool = make_pool(1 if has_windows else 0, has_windows=has_windows, **options)
    outcomes = Outcomes(pool, has_windows=has_windows)
    thief = assignment("note_and_steal", str(journal), "thief", str(gate), count)
    outcomes.begin([thief])
    (pid,) = pool.pids()
    wait_until(lambda: begun(journal) == ["thief"])
    notes = [assignment("note", str(journal), str(number)) for number in range(INNOCENT)]
    pool.dispatch_window(pid, [(notes[0], PATIENT)])
    gate.write_bytes(b"x")
    wait_until(lambda: "thief has stolen" in begun(journal))
    pool.dispatch_window(pid, [(one, PATIENT) for one in notes[1:]])
    gate.write_bytes(b"x")
    wanted = {one.task_id for one in (thief, *notes)}
    outcomes.step_until(lambda: wanted <= set(outcomes.ended))
    assert outcomes.harmed([thief, *notes]) == []
    assert Counter(begun(journal)).most_common(1)[0][1] == 1, "a task ran twice"
    assert pid not in pool.pids() or not has_windows
