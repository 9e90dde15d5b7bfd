"""The execution of faults: one thread per fault, and a line in the journal when it is over."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress

import psutil

from tests.soak import journal, refusals
from tests.soak.crew import Crew, Member
from tests.soak.limits import SCHEDULES
from tests.soak.plan import ONE_SCHEDULER, POOLER, SERVER, Fault, Kind
from tests.support.pgbouncer import find_pgbouncer
from tests.support.wait import wait_until


class Saboteur:
    """Carries out the faults of a plan and counts them."""

    def __init__(self, crew: Crew) -> None:
        self._crew = crew
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []
        self.done: Counter[Kind] = Counter()
        # A failover may take longer than planned, and copying the server does not survive a kill.
        self._server_lock = threading.Lock()
        self.problems: list[str] = []
        # Faults that this machine has no program for.
        self.left_out: Counter[Kind] = Counter()

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
        if fault.kind in POOLER and find_pgbouncer() is None:
            self.left_out[fault.kind] += 1
            return
        try:
            self._begin_and_end(fault)
            self.done[fault.kind] += 1
        except Exception as error:
            self.problems.append(f"the fault {fault} could not be carried out: {error!r:.300}")

    def _begin_and_end(self, fault: Fault) -> None:
        member = self._member(fault)
        with self._exclusion(fault, member):
            began = time.monotonic()
            # Taken now: a restart gives the member a new name.
            name = None if member is None else member.name
            if member is None:
                self._trouble_all(fault)
            else:
                self._trouble_one(fault, member)
            until = time.monotonic()
            journal.write("fault", kind=fault.kind, worker=name, began=began, until=until)

    def _exclusion(self, fault: Fault, member: Member | None) -> AbstractContextManager[object]:
        """Faults of one process, and faults of the server, follow each other."""
        if member is not None:
            return member.lock
        return self._server_lock if fault.kind in SERVER else nullcontext()

    def _trouble_one(self, fault: Fault, member: Member) -> None:
        match fault.kind:
            case Kind.KILL_WORKER | Kind.KILL_SCHEDULER:
                member.kill()
                self._restart(member, fault)
            case Kind.STOP_WORKER:
                member.stop()
                self._restart(member, fault)
            case Kind.KILL_CHILD:
                self._kill_child(member, fault)
            case Kind.FREEZE_WORKER | Kind.FREEZE_SCHEDULER | Kind.FREEZE_HOST:
                member.check_alive()
                with frozen(member, with_children=fault.kind is Kind.FREEZE_HOST):
                    self._hold(fault.seconds)
            case Kind.KILL_POOLER | Kind.FREEZE_POOLER:
                self._trouble_pooler(fault, member)
            case _:
                self._disturb(fault, [member])

    def _trouble_all(self, fault: Fault) -> None:
        servers, dice = self._crew.servers, _dice(fault)
        match fault.kind:
            case Kind.RESTART_FAST:
                servers.restart("fast")
            case Kind.RESTART_IMMEDIATE:
                servers.restart("immediate")
            case Kind.FAIL_OVER:
                servers.fail_over(dice.choice(("fast", "immediate")))
            case Kind.KILL_BACKEND:
                pids = refusals.backend_pids(servers.url)
                _send([dice.choice(pids)] if pids else [], signal.SIGKILL)
            case Kind.END_SESSIONS:
                refusals.end_sessions(servers.url, dice)
            case Kind.REFUSE_TASKS | Kind.FAIL_COMMITS | Kind.SET_TIMEOUTS:
                with self._refusal(fault):
                    self._hold(fault.seconds)
            case _:
                self._disturb(fault, self._crew.workers)
        if fault.kind in SERVER:
            servers.wait_until_whole()

    def _refusal(self, fault: Fault) -> AbstractContextManager[None]:
        url, dice = self._crew.servers.url, _dice(fault)
        if fault.kind is Kind.SET_TIMEOUTS:
            return refusals.timed_out(url, dice.choice(list(refusals.TIMEOUTS)))
        if fault.kind is Kind.FAIL_COMMITS:
            return refusals.refused(url, refusals.passing(dice))
        catching_up = [name for name, (_, catches_up) in SCHEDULES.items() if catches_up]
        return refusals.refused(url, refusals.lasting(dice, dice.choice(catching_up)))

    def _member(self, fault: Fault) -> Member | None:
        if fault.target is None:
            return None
        crew = self._crew
        return (crew.schedulers if fault.kind in ONE_SCHEDULER else crew.workers)[fault.target]

    def _restart(self, member: Member, fault: Fault) -> None:
        self._hold(_dice(fault).uniform(0.0, 1.5))
        member.launch()

    def _kill_child(self, member: Member, fault: Fault) -> None:
        """Kill one of the processes that the worker has started, its fork server included.

        A worker whose first children do not start ends by itself, so it must have started.
        """
        member.wait_until_ready()
        family = member.process.family()
        if family:
            with suppress(psutil.NoSuchProcess):
                psutil.Process(_dice(fault).choice(family)).kill()

    def _trouble_pooler(self, fault: Fault, member: Member) -> None:
        pooler = member.sidecar.pooler
        assert pooler is not None
        if fault.kind is Kind.KILL_POOLER:
            before = pooler.process
            before.kill()
            wait_until(lambda: pooler.process is not before, 30, "PgBouncer is started again")
            return
        frozen_one = pooler.process
        frozen_one.send_signal(signal.SIGSTOP)
        self._hold(fault.seconds)
        frozen_one.send_signal(signal.SIGCONT)

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


def _dice(fault: Fault) -> random.Random:
    """The details of a fault; the same ones for the same fault."""
    return random.Random(fault.at)


def _send(pids: list[int], number: signal.Signals) -> None:
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).send_signal(number)
