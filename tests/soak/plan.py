"""The plan of a soak run: which fault happens when, to whom, for how long. A pure function of the seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import StrEnum

from tests.soak.limits import (
    LOST_AFTER_SECONDS,
    POOLED_WORKER,
    SCHEDULERS,
    SLACK_SECONDS,
    WORKERS,
)


class Kind(StrEnum):
    """A fault; the first word of its name is the kind of fault."""

    KILL_WORKER = "kill a worker"
    KILL_CHILD = "kill a child"
    STOP_WORKER = "stop a worker with SIGTERM"
    FREEZE_WORKER = "freeze a worker"
    FREEZE_HOST = "freeze a worker with its children"
    CUT_WORKER = "cut a worker off"
    PAUSE_WORKER = "hold a worker's traffic"
    LOSE_WORKER = "lose a worker's traffic"
    CUT_ALL = "cut all workers off"
    PAUSE_ALL = "hold all workers' traffic"
    LOSE_ALL = "lose all workers' traffic"
    KILL_SCHEDULER = "kill a scheduler"
    FREEZE_SCHEDULER = "freeze a scheduler"
    CUT_SCHEDULER = "cut a scheduler off"
    RESTART_FAST = "restart PostgreSQL, fast"
    RESTART_IMMEDIATE = "restart PostgreSQL, immediate"
    FAIL_OVER = "promote the standby"
    KILL_BACKEND = "kill a process of PostgreSQL"
    END_SESSIONS = "end half of the sessions"
    KILL_POOLER = "kill PgBouncer"
    FREEZE_POOLER = "freeze PgBouncer"
    REFUSE_TASKS = "refuse some tasks at COMMIT"
    FAIL_COMMITS = "fail commits at random"
    SET_TIMEOUTS = "set short timeouts on the database"


POOLER = (Kind.KILL_POOLER, Kind.FREEZE_POOLER)
ONE_WORKER = (
    *(Kind.KILL_WORKER, Kind.KILL_CHILD, Kind.STOP_WORKER),
    *(Kind.FREEZE_WORKER, Kind.FREEZE_HOST),
    *(Kind.CUT_WORKER, Kind.PAUSE_WORKER, Kind.LOSE_WORKER),
    *POOLER,
)
ALL_WORKERS = (Kind.CUT_ALL, Kind.PAUSE_ALL, Kind.LOSE_ALL)
ONE_SCHEDULER = (Kind.KILL_SCHEDULER, Kind.FREEZE_SCHEDULER, Kind.CUT_SCHEDULER)
SERVER = (
    *(Kind.RESTART_FAST, Kind.RESTART_IMMEDIATE, Kind.FAIL_OVER),
    *(Kind.KILL_BACKEND, Kind.END_SESSIONS),
)
# The database refuses something for a while; other faults happen meanwhile.
DATABASE = (Kind.REFUSE_TASKS, Kind.FAIL_COMMITS, Kind.SET_TIMEOUTS)
OVER_AT_ONCE = (
    *(Kind.KILL_WORKER, Kind.KILL_CHILD, Kind.STOP_WORKER, Kind.KILL_POOLER, Kind.KILL_SCHEDULER),
    *SERVER,
)
LASTING = tuple(kind for kind in Kind if kind not in OVER_AT_ONCE)
WEIGHTS = dict.fromkeys(ONE_WORKER, 4) | {Kind.KILL_WORKER: 8, Kind.KILL_CHILD: 6}
WEIGHTS |= dict.fromkeys((*ALL_WORKERS, *ONE_SCHEDULER, *SERVER, *DATABASE, *POOLER), 2)

SHORT_SECONDS = (0.1, LOST_AFTER_SECONDS - SLACK_SECONDS - 1.0)
LONG_SECONDS = (LOST_AFTER_SECONDS + 1.0, LOST_AFTER_SECONDS + 4.0)
# A target is left alone for this long after a fault: a restarted process starts, a cut one
# reconnects.
REST_SECONDS = 4.0
FIRST_AT = 1.0
MEAN_INTERVAL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, its time after the start of the run, and its target: the number of a process, or all."""

    at: float
    kind: Kind
    target: int | None
    seconds: float

    @property
    def is_long(self) -> bool:
        """Whether other workers may take a worker for lost that it happens to."""
        return self.seconds >= LONG_SECONDS[0]


def make_plan(seed: int, seconds: float) -> list[Fault]:
    """Faults in the order of time; none begins after these seconds. Every kind happens first once."""
    dice = random.Random(seed)
    faults: list[Fault] = []
    missing = list(Kind)
    dice.shuffle(missing)
    at = FIRST_AT
    while at < seconds:
        by_weight = dice.choices(list(WEIGHTS), list(WEIGHTS.values()))
        drawn = [_draw(dice, kind, at) for kind in [*missing, *by_weight]]
        possible = [fault for fault in drawn if _is_possible(faults, fault)]
        if possible:
            faults.append(possible[0])
            missing = [kind for kind in missing if kind is not possible[0].kind]
        at += dice.expovariate(1 / MEAN_INTERVAL_SECONDS)
    return faults


def _draw(dice: random.Random, kind: Kind, at: float) -> Fault:
    count = SCHEDULERS if kind in ONE_SCHEDULER else WORKERS
    drawn = dice.randrange(count)
    target = POOLED_WORKER if kind in POOLER else drawn
    is_long = dice.random() < 0.35
    seconds = dice.uniform(*LONG_SECONDS if is_long else SHORT_SECONDS)
    is_single = kind in ONE_WORKER or kind in ONE_SCHEDULER
    return Fault(at, kind, target if is_single else None, seconds if kind in LASTING else 0.0)


def _is_possible(faults: list[Fault], new: Fault) -> bool:
    """Whether the target has recovered from earlier faults, and a worker is left to go on."""
    recent = [fault for fault in faults if fault.at + fault.seconds + REST_SECONDS > new.at]
    if _target(new) in map(_target, recent):
        return False
    hit = {fault.target for fault in [*recent, new] if fault.kind in ONE_WORKER}
    return new.kind not in ONE_WORKER or len(hit) < WORKERS


def _target(fault: Fault) -> tuple[str, int | None]:
    """The part that a fault breaks; faults of the server and of all workers exclude each other."""
    if fault.kind in DATABASE:
        return "database", None
    if fault.target is None:
        return "all", None
    return ("scheduler" if fault.kind in ONE_SCHEDULER else "worker"), fault.target
