"""The evidence of a soak run: the journal, the tables, and the events of all processes, read at the end."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, NamedTuple, TypeAlias

import psycopg
from psycopg.rows import namedtuple_row

from tests.soak import journal
from tests.soak.crew import Crew
from tests.soak.journal import Entry
from tests.soak.limits import LOST_AFTER_SECONDS, RETURN_SECONDS, SLACK_SECONDS
from tests.soak.plan import LASTING, REST_SECONDS, Kind
from tests.soak.watch import Watch

Row: TypeAlias = Any  # a named tuple of the columns of its query

TASKS = """
SELECT id::text, task_name, status, error_code, result, retry_count, created_at, schedule_name, scheduled_for
FROM horsies_tasks ORDER BY created_at
"""
ATTEMPTS = """
SELECT task_id::text, attempt, outcome, will_retry, error_code, started_at, finished_at, worker_id
FROM horsies_task_attempts ORDER BY task_id, attempt
"""
RUNS = """
SELECT run.id::text, run.name, run.status, run.error, task.result
FROM horsies_workflows AS run
LEFT JOIN horsies_workflow_tasks AS node
    ON node.workflow_id = run.id AND node.task_index = run.output_task_index
LEFT JOIN horsies_tasks AS task ON task.id = node.result_task_id
"""
TRANSITIONS = "SELECT task_id::text, was, became FROM e2e_transitions ORDER BY number"
WORKERS = "SELECT worker_id, pid FROM horsies_workers"
SCHEDULES = "SELECT schedule_name, next_run_at FROM horsies_schedule_state"


NEAR_SECONDS = 20.0


class Window(NamedTuple):
    """The time of a fault that happened to one worker."""

    kind: Kind
    began: float
    until: float

    @property
    def is_long(self) -> bool:
        """Whether other workers may have taken this one for lost meanwhile."""
        seconds = self.until - self.began
        return self.kind in LASTING and seconds >= LOST_AFTER_SECONDS - SLACK_SECONDS


class Condemned(NamedTuple):
    """A worker that another one has declared lost, and when."""

    worker: str
    observer: str
    at: float


@dataclass(slots=True)
class Evidence:
    """All that is known about a run."""

    sent: list[Entry] = field(default_factory=list)
    started: list[Entry] = field(default_factory=list)
    begins: list[Entry] = field(default_factory=list)
    ends: dict[tuple[str, int], Entry] = field(default_factory=dict)
    crowded: list[Entry] = field(default_factory=list)
    launched_at: dict[str, float] = field(default_factory=dict)
    killed_at: dict[str, float] = field(default_factory=dict)
    stopped_at: dict[str, float] = field(default_factory=dict)
    # When workers wrote their last event; one that leaves tasks behind does not record its stop.
    ended_at: dict[str, float] = field(default_factory=dict)
    # Faults of the server and of all workers.
    common: list[Window] = field(default_factory=list)
    faults: dict[str, list[Window]] = field(default_factory=lambda: defaultdict(list))
    tasks: dict[str, Row] = field(default_factory=dict)
    attempts: dict[str, list[Row]] = field(default_factory=lambda: defaultdict(list))
    transitions: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    runs: dict[str, Row] = field(default_factory=dict)
    next_slots: dict[str, datetime] = field(default_factory=dict)
    worker_names: dict[str, str] = field(default_factory=dict)
    condemned: list[Condemned] = field(default_factory=list)
    # The heartbeats of each worker, and the time of the last query.
    signs: dict[str, list[float]] = field(default_factory=dict)
    watched_until: float = 0.0
    # Processes in which a hostile task ran: the worker and the process number.
    harmed: set[tuple[str, int]] = field(default_factory=set)
    # Tasks whose outcome a worker that was stopped could not record.
    given_up: set[str] = field(default_factory=set)
    clock_offset: float = 0.0

    def monotonic(self, moment: datetime) -> float:
        """A time of the database, or of an event, on the clock of the journal."""
        return moment.timestamp() - self.clock_offset

    def faults_near(self, worker: str, at: float) -> str:
        """The faults of a worker around this time, for the report."""
        near = [
            f"{window.kind} at {window.began:.1f} for {window.until - window.began:.1f} s"
            for window in self.faults.get(worker, ())
            if window.began - NEAR_SECONDS <= at <= window.until + NEAR_SECONDS
        ]
        return f"faults of {worker}: {', '.join(near) or 'none'}"

    def quiet_seconds(self, worker: str, began: float, until: float) -> float:
        """The part of this time in which no fault hit the worker, nor all of them."""
        spans = quiet_spans(began, until, [*self.faults.get(worker, ()), *self.common])
        return sum(end - start for start, end in spans)

    def may_be_lost(self, worker: str, at: float) -> bool:
        """Whether a worker was out of touch for so long that it could count as lost at this time."""
        enough = LOST_AFTER_SECONDS - SLACK_SECONDS
        return any(
            window.is_long and window.began + enough <= at <= window.until + RETURN_SECONDS
            for window in self.faults.get(worker, ())
        )

    def was_harmed(self, task_id: str, attempt: int) -> bool:
        """Whether a hostile task ran in the same process as this attempt, at its time or before."""
        return any(
            entry["task_id"] == task_id
            and entry["attempt"] == attempt
            and (entry["worker"], entry["pid"]) in self.harmed
            for entry in self.begins
        )

    def may_have_crashed(self, worker: str, began: float, recorded: float) -> bool:
        """Whether a fault of its worker excuses an attempt between these times that was lost."""
        first, last = began - 1.0, recorded + 1.0
        # A claimed task that had not begun when its worker died has the time of its recovery for both.
        if self.killed_at.get(worker, last + 1.0) <= last:
            return True
        return any(
            first <= window.began <= last
            if window.kind is Kind.KILL_CHILD
            else window.is_long and window.began <= last and first <= window.until + RETURN_SECONDS
            for window in self.faults.get(worker, ())
        )


def quiet_spans(
    began: float, until: float, faults: Iterable[Window]
) -> Iterator[tuple[float, float]]:
    """The parts of this time that are outside of these faults, and of the rest after each."""
    at = began
    for fault in sorted(faults, key=lambda one: one.began):
        if at < min(fault.began, until):
            yield at, min(fault.began, until)
        at = max(at, fault.until + REST_SECONDS)
    if at < until:
        yield at, until


def gather(crew: Crew, watch: Watch) -> Evidence:
    """Read everything once the processes are idle."""
    evidence = Evidence(clock_offset=time.time() - time.monotonic(), watched_until=time.monotonic())
    pids = _read_journal(evidence, journal.read(crew.journal_path))
    with psycopg.connect(crew.servers.url, autocommit=True) as connection:
        _read_tables(evidence, connection, pids)
    evidence.condemned = list(_condemned(evidence, crew))
    for pid, signs in watch.signs.items():
        evidence.signs[pids[pid]] = sorted(map(evidence.monotonic, signs))
    for process in crew.fleet.workers:
        for event in process.events("outcomes_lost"):
            evidence.given_up.update(event["task_ids"])
        for event in process.events("worker_stopped"):
            ended = evidence.monotonic(datetime.fromisoformat(event["time"]))
            evidence.ended_at[pids[event["pid"]]] = ended
    return evidence


def _read_journal(evidence: Evidence, entries: Iterable[Entry]) -> dict[int, str]:
    """Sort the lines by kind; the names of processes by pid."""
    pids: dict[int, str] = {}
    for entry in entries:
        match entry["what"]:
            case "sent":
                evidence.sent.append(entry)
            case "started":
                evidence.started.append(entry)
            case "begin":
                evidence.begins.append(entry)
                if "how" in entry:
                    evidence.harmed.add((entry["worker"], entry["pid"]))
            case "end":
                evidence.ends[entry["task_id"], entry["attempt"]] = entry
            case "crowded":
                evidence.crowded.append(entry)
            case "fault":
                window = Window(Kind(entry["kind"]), entry["began"], entry["until"])
                worker = entry["worker"]
                (evidence.common if worker is None else evidence.faults[worker]).append(window)
            case "process":
                _note_process(evidence, pids, entry)
    return pids


def _note_process(evidence: Evidence, pids: dict[int, str], entry: Entry) -> None:
    name = entry["worker"]
    match entry["event"]:
        case "launched":
            pids[entry["pid"]] = name
            evidence.launched_at[name] = entry["at"]
        case "killed":
            evidence.killed_at[name] = entry["at"]
        case "stopped":
            evidence.stopped_at[name] = entry["at"]


def _read_tables(
    evidence: Evidence, connection: psycopg.Connection[Any], pids: dict[int, str]
) -> None:
    with connection.cursor(row_factory=namedtuple_row) as cursor:

        def rows(query: str) -> list[Row]:
            return list(cursor.execute(query.encode()))

        evidence.tasks = {row.id: row for row in rows(TASKS)}
        for row in rows(ATTEMPTS):
            evidence.attempts[row.task_id].append(row)
        for row in rows(TRANSITIONS):
            evidence.transitions[row.task_id].append(row.became)
        evidence.runs = {row.id: row for row in rows(RUNS)}
        evidence.next_slots = dict(rows(SCHEDULES))
        for worker_id, pid in rows(WORKERS):
            evidence.worker_names[worker_id] = pids.get(pid, f"pid {pid}")


def _condemned(evidence: Evidence, crew: Crew) -> Iterator[Condemned]:
    """All declarations of loss, from the events of all workers of the run."""
    for process in crew.fleet.workers:
        for event in process.events("workers_lost"):
            at = evidence.monotonic(datetime.fromisoformat(event["time"]))
            for worker_id in event["worker_ids"]:
                name = evidence.worker_names.get(worker_id, worker_id)
                yield Condemned(name, process.log_path.stem, at)
