"""A soak run: start all processes, follow the plan of faults, let everything settle, compare."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psycopg

from horsies.db.migrate import apply_migrations
from tests.soak import journal
from tests.soak.checks import violations
from tests.soak.crew import Crew
from tests.soak.evidence import Evidence, gather
from tests.soak.faults import Saboteur
from tests.soak.limits import STOP_SECONDS
from tests.soak.plan import make_plan
from tests.soak.refusals import SETUP
from tests.soak.watch import Watch
from tests.support.replicated_server import ReplicatedServer
from tests.support.tables import WITNESS
from tests.support.workers import RunningWorker

SETTLE_SECONDS = 120.0
SHOWN = 10
OPEN = """
SELECT (SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')),
    (SELECT count(*) FROM horsies_workflows WHERE status IN ('PENDING', 'RUNNING', 'PAUSED'))
"""


@dataclass(slots=True)
class Report:
    """The outcome of a run: counts, and the violations by check."""

    seed: int
    seconds: float
    saboteur: Saboteur
    evidence: Evidence
    violations: dict[str, list[str]]
    settled_seconds: float

    @property
    def has_failed(self) -> bool:
        return any(self.violations.values())

    def lines(self) -> Iterator[str]:
        """The summary, with the evidence of violations."""
        yield f"soak: seed {self.seed}, {self.seconds:.0f} s of faults"
        yield f"settled after {self.settled_seconds:.1f} s"
        done, left_out = self.saboteur.done, self.saboteur.left_out
        yield f"faults: {sum(done.values())}"
        yield from (f"  {count:4} {kind}" for kind, count in sorted(done.items()))
        for kind, count in sorted(left_out.items()):
            yield f"  {count:4} LEFT OUT, pgbouncer is not installed: {kind}"
        yield from self._load()
        yield "checks:"
        for name, found in self.violations.items():
            yield f"  {'FAIL' if found else 'ok':4} {name}: {len(found)}"
            yield from (f"         {one}" for one in found[:SHOWN])
            if len(found) > SHOWN:
                yield f"         and {len(found) - SHOWN} more"
        verdict = "FAILED" if self.has_failed else "passed"
        yield f"soak {verdict}: python -m tests.soak --seconds {self.seconds:.0f} --seed {self.seed}"

    def _load(self) -> Iterator[str]:
        evidence = self.evidence
        statuses = Counter(row.status for row in evidence.tasks.values())
        yield f"tasks: {len(evidence.tasks)}, {dict(statuses)}"
        yield f"  acknowledged sends: {dict(Counter(one['kind'] for one in evidence.sent))}"
        yield f"  executions: {len(evidence.begins)}, {len(evidence.condemned)} workers declared lost"
        slots = Counter(row.schedule_name for row in evidence.tasks.values() if row.schedule_name)
        yield f"  scheduled: {dict(slots)}"
        yield f"runs: {dict(Counter(one['kind'] for one in evidence.started))}"


def soak(seconds: float, seed: int, directory: Path) -> Report:
    """Run for so long with faults and return the report; journal and logs stay in the directory."""
    with ReplicatedServer() as servers:
        with psycopg.connect(servers.url, autocommit=True) as connection:
            apply_migrations(connection)
            connection.execute(WITNESS.encode())
            connection.execute(SETUP.encode())
        with Crew(servers, directory) as crew, Watch(servers.url) as watch:
            _start(crew, seed)
            saboteur = Saboteur(crew)
            try:
                saboteur.follow(make_plan(seed, seconds), seconds)
                settled_seconds, endings = _settle(crew)
            finally:
                saboteur.stop()
            evidence = gather(crew, watch)
    found = violations(evidence) | endings
    found["faults that could not be carried out"] = saboteur.problems
    return Report(seed, seconds, saboteur, evidence, found, settled_seconds)


def _start(crew: Crew, seed: int) -> None:
    for member in crew.members:
        member.launch()
    for member in crew.members:
        member.wait_until_ready()
    crew.launch_producer(seed)


def _settle(crew: Crew) -> tuple[float, dict[str, list[str]]]:
    """End the load, wait until all work is done, stop every process in order, and look for orphans."""
    began = time.monotonic()
    assert crew.producer is not None
    for member in crew.members:
        # One that is starting does not handle signals yet; one that has ended is reported below.
        with suppress(AssertionError):
            member.wait_until_ready()
    badly = list(_stop("the producer", crew.producer))
    for member in crew.schedulers:
        badly += _stop(member.name, member.process)
    unsettled = _wait_for_work(crew)
    seconds = time.monotonic() - began
    for member in crew.workers:
        badly += _stop(member.name, member.process)
    return seconds, {
        "processes that ended by themselves or badly": badly,
        "work that did not settle": unsettled,
        "orphan processes": _orphans(crew),
    }


def _stop(name: str, process: RunningWorker) -> Iterator[str]:
    """Stop a process that should still run."""
    code = process.process.poll()
    if code is not None:
        yield f"{name} had ended by itself with exit code {code}: {process.log()[-1000:]}"
        return
    try:
        code = process.stop(STOP_SECONDS)
    except AssertionError:
        yield f"{name} did not end within {STOP_SECONDS:.0f} s of SIGTERM: {process.log()[-1000:]}"
        return
    journal.write("process", event="stopped", worker=name, exit_code=code)
    if code != 0:
        yield f"{name} stopped with exit code {code}: {process.log()[-1000:]}"


def _wait_for_work(crew: Crew) -> list[str]:
    """Wait until no task and no run is open."""
    deadline = time.monotonic() + SETTLE_SECONDS
    with psycopg.connect(crew.servers.url, autocommit=True) as connection:
        while (counts := connection.execute(OPEN.encode()).fetchone()) != (0, 0):
            are_gone = all(member.process.process.poll() is not None for member in crew.workers)
            if are_gone or time.monotonic() > deadline:
                return [f"tasks and runs still open: {counts}"]
            time.sleep(0.05)
    return []


def _orphans(crew: Crew) -> list[str]:
    """Processes that outlive their parents by more than a moment."""
    deadline = time.monotonic() + 2.0
    while (found := crew.remains()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found
