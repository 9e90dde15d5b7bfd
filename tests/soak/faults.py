"""The execution of faults: one thread per fault, and a line in the journal when it is over."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress

import psutil

from tests.soak import journal
from tests.soak.crew import Crew, Member
from tests.soak.plan import ONE_SCHEDULER, Fault, Kind


class Saboteur:
    """Carries out the faults of a plan and counts them."""

    def __init__(self, crew: Crew, seed: int) -> None:
        self._crew = crew
        self._dice = random.Random(seed)
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.done: Counter[Kind] = Counter()
        self.problems: list[str] = []

    def follow(self, plan: list[Fault], seconds: float) -> None:
        """Begin every fault at its time and return when all are over and the seconds have passed.

        Return early when a fault cannot be carried out: mostly its target has ended by itself.
        """
        began = time.monotonic()
        for fault in plan:
            self._hold(began + fault.at - time.monotonic())
            if self.problems:
                break
            thread = threading.Thread(target=self._carry_out, args=(fault,))
            thread.start()
            self._threads.append(thread)
        if not self.problems:
            self._hold(began + seconds - time.monotonic())
        for thread in self._threads:
            thread.join()

    def stop(self) -> None:
        """End all faults early."""
        self._stopping.set()
        for thread in self._threads:
            thread.join()

    def _hold(self, seconds: float) -> None:
        self._stopping.wait(max(0.0, seconds))

    def _carry_out(self, fault: Fault) -> None:
        try:
            self._begin_and_end(fault)
            self.done[fault.kind] += 1
        except Exception as error:
            self.problems.append(f"the fault {fault} could not be carried out: {error!r}")

    def _begin_and_end(self, fault: Fault) -> None:
        crew = self._crew
        began = time.monotonic()
        member = self._member(fault)
        # Taken now: a restart gives the member a new name.
        name = None if member is None else member.name
        match fault.kind:
            case Kind.KILL_WORKER | Kind.KILL_SCHEDULER:
                assert member is not None
                self._kill_and_restart(member)
            case Kind.KILL_CHILD:
                assert member is not None
                self._kill_child(member)
            case Kind.FREEZE_WORKER | Kind.FREEZE_SCHEDULER | Kind.FREEZE_HOST:
                assert member is not None
                member.check_alive()
                with frozen(member, with_children=fault.kind is Kind.FREEZE_HOST):
                    self._hold(fault.seconds)
            case Kind.RESTART_FAST:
                crew.servers.restart("fast")
            case Kind.RESTART_IMMEDIATE:
                crew.servers.restart("immediate")
            case Kind.FAIL_OVER:
                crew.servers.fail_over(self._dice.choice(("fast", "immediate")))
            case _:
                self._disturb(fault, crew.workers if member is None else [member])
        until = time.monotonic()
        journal.write("fault", kind=fault.kind, worker=name, began=began, until=until)

    def _member(self, fault: Fault) -> Member | None:
        if fault.target is None:
            return None
        crew = self._crew
        return (crew.schedulers if fault.kind in ONE_SCHEDULER else crew.workers)[fault.target]

    def _kill_and_restart(self, member: Member) -> None:
        member.kill()
        self._hold(self._dice.uniform(0.0, 1.5))
        member.launch()

    def _kill_child(self, member: Member) -> None:
        """Kill one of the processes that the worker has started, its fork server included.

        A worker whose first children do not start ends by itself, so it must have started.
        """
        member.wait_until_ready()
        family = member.process.family()
        if family:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(self._dice.choice(family)).kill()

    def _disturb(self, fault: Fault, members: list[Member]) -> None:
        """Break the way of these members to the database for a while."""
        word = fault.kind.value.split()[0]
        with ExitStack() as stack:
            for member in members:
                way = member.sidecar
                stack.enter_context(
                    way.cut() if word == "cut" else way.paused(is_lost=word == "lose")
                )
            self._hold(fault.seconds)


@contextmanager
def frozen(member: Member, *, with_children: bool) -> Iterator[None]:
    """Stop a process, and its children as a frozen host does."""
    pids = [member.process.pid, *(member.process.family() if with_children else ())]
    _send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        _send(pids, signal.SIGCONT)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)
