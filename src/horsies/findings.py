"""Findings: reasons why tasks, runs, queues or workers are stuck or about to stop, with cause and remedy.

``CATALOGUE`` has the general meaning and remedy of every code; `docs/explain.md` is generated from it.
Explanations, `horsies doctor`, the overview's attention list and the messages of timed-out waits show
the same findings.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import IntEnum, StrEnum
from functools import partial
from typing import Any, NamedTuple

from horsies.words import lasting


class Level(StrEnum):
    """How serious a finding is for the installation; UNKNOWN if its facts could not be read."""

    GREEN = "green"
    YELLOW = "yellow"
    RED = "red"
    UNKNOWN = "unknown"


class Urgency(IntEnum):
    """The order of findings on the overview: stopped work comes first."""

    STOPPED = 0
    FAILING = 1
    SUSPICIOUS = 2


class Subject(NamedTuple):
    """The subject of a finding.

    ``key`` is the subject's name or id in a path, and ``label`` is its name in a sentence.
    """

    kind: str
    key: str = ""
    label: str = ""

    def __str__(self) -> str:
        return f"{self.kind} {self.label or self.key}".rstrip()


SERVER = Subject("the database server")


@dataclass(frozen=True, slots=True)
class Finding:
    """One reason why something is not making progress, a remark about it, or a problem with the
    installation.

    ``code`` is an entry in the documented catalogue, or the id of a check in capitals. ``subjects`` are
    the names in the sentence: tasks, workers, queues, runs, nodes. ``evidence`` lists the facts behind
    the finding. ``remedy`` is a command or a step that helps, or a statement for psql if ``is_sql`` is
    set.
    """

    code: str
    sentence: str
    level: Level = Level.GREEN
    since: datetime | None = None
    subjects: tuple[str, ...] = ()
    remedy: str | None = None
    evidence: tuple[str, ...] = ()
    is_sql: bool = False
    subject: Subject = SERVER

    @property
    def blocks(self) -> bool:
        """True for an obstacle, False for a remark."""
        return self.code in CATALOGUE and CATALOGUE[self.code].blocks

    @property
    def is_command(self) -> bool:
        """True for a remedy to copy and run, False for advice."""
        return self.is_sql or (self.remedy or "").startswith(("horsies ", "SELECT ", "app."))

    @property
    def urgency(self) -> Urgency | None:
        """The finding's position in the overview's list, or None if the list omits it."""
        if (entry := CATALOGUE.get(self.code)) is not None and entry.urgency is not None:
            return entry.urgency
        return Urgency.FAILING if self.level is Level.RED else None


@dataclass(frozen=True, slots=True)
class Explanation:
    """All reasons why a task, node, run, queue or schedule is not making progress, obstacles first.

    ``subject`` is its kind and name, as in "task 01a1…" or "queue mail". ``status`` is None if the
    subject does not exist. ``holds`` lists the checked conditions that are met.
    """

    subject: str
    status: str | None
    reasons: tuple[Finding, ...]
    holds: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the document that the command line and the JSON API print."""
        fields = ("code", "blocks", "sentence", "since", "subjects", "remedy")
        reasons = [{name: getattr(one, name) for name in fields} for one in self.reasons]
        return {
            "subject": self.subject,
            "status": self.status,
            "reasons": reasons,
            "holds": self.holds,
        }


class Entry(NamedTuple):
    """One code of the catalogue.

    ``level`` is its level in `horsies doctor`. Findings of an entry with an ``urgency`` are always on the
    overview. ``clause`` describes why slots were skipped.
    """

    blocks: bool
    meaning: str
    remedy: str
    level: Level = Level.GREEN
    urgency: Urgency | None = None
    clause: str = ""


_obstacle = partial(Entry, True)
_remark = partial(Entry, False)

# Grouped by the state in which the code occurs.
GROUPS: dict[str, dict[str, Entry]] = {
    "missing": {
        "NOT_FOUND_YET": _obstacle(
            "There is no such row, but an open transaction may have inserted it without committing "
            "yet.",
            "Commit the sender's transaction, or end its session.",
        ),
        "NOT_FOUND_DELETED": _obstacle(
            "There is no such row, and its id is older than the retention period of finished tasks "
            "and runs.",
            "Keep records longer: raise `terminal_record_retention_hours`, or pass `retention` when "
            "sending.",
        ),
        "NOT_FOUND": _obstacle(
            "There is no such row: the send was rolled back, or the command uses another database.",
            "Check the id, `--database-url` and the schema.",
        ),
    },
    "task, waiting": {
        "BLOCKED": _obstacle(
            "The database refuses the next change to the task or run; a worker keeps trying.",
            "Remove the cause named in the error, such as a trigger.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "HELD_BY_RUN": _obstacle(
            "The task belongs to a paused run.",
            "`horsies workflow resume RUN`, with `--retry-failed` after a failure.",
        ),
        "HELD_BY_RECORD": _obstacle(
            "The code of a durable function requests a step that is missing from the run's record.",
            "Deploy the code that wrote the record, or guard the change; then run "
            "`horsies durable resume ID`. Or go back with `horsies durable reset ID STEP`.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "PARKED_RUN": _obstacle(
            "The run of a durable function waits for a time, a signal or the end of a task.",
            "Wait, send the signal with `horsies durable signal ID NAME VALUE APP`, or explain "
            "the awaited task.",
        ),
        "PARKED_SIGNAL": _obstacle(
            "The task is a signal node that waits for its signal.",
            "`horsies workflow signal RUN NAME VALUE`.",
        ),
        "PARKED_MAP": _obstacle(
            "The task is an item of a map, and the number of running items has reached "
            "`max_parallel`.",
            "Wait for these items, explain one of them, or start runs with a higher `max_parallel`.",
        ),
        "SLEEPS": _obstacle("The task is a sleep node whose time has not passed yet.", "Wait."),
        "RETRY_LATER": _obstacle(
            "The last attempt failed, and the next one is due later.", "Wait."
        ),
        "SENT_FOR_LATER": _obstacle("The task was sent with a delay.", "Wait."),
        "EXPIRED_UNSWEPT": _obstacle(
            "The deadline `good_until` has passed; a worker's next turn ends the task as EXPIRED.",
            "Send the task again with a later `good_until`, and start a worker if none is running.",
        ),
        "QUEUE_PAUSED": _obstacle(
            "An operator paused the queue.",
            "`horsies queues resume NAME`.",
            urgency=Urgency.STOPPED,
        ),
        "QUEUE_UNSERVED": _obstacle(
            "No live worker serves the queue.",
            "Start a worker with `--queues NAME`, or send to a queue that is served.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "TASK_UNKNOWN": _obstacle(
            "Live workers serve the queue, but no worker has this task or sub-workflow; after "
            "`unknown_task_grace_ms` the task fails with `WORKER_RESOLUTION_ERROR`. The run of a durable "
            "function waits instead.",
            "Deploy workers that have the task's module, or add the module to `discover_tasks`.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "CALL_DOES_NOT_FIT": _obstacle(
            "The stored call fits the parameters of no live worker on the queue; after "
            "`unknown_task_grace_ms` the task fails with `WORKER_SERIALIZATION_ERROR`. The run of a "
            "durable function with recorded steps waits instead.",
            "Deploy workers of the release that sent the call, or cancel the task and send it with "
            "the parameters that the workers have.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "PAYLOAD_UNREADABLE": _obstacle(
            "No live worker of the queue can read the payload: the workers lack the encryption key or the "
            "store, or the store does not return the payload. The task is held until a worker can read it.",
            "Add the key or the store to the workers, or start a worker that has it. Cancel a task whose "
            "payload was damaged.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "PARAMETERS_DIFFER": _remark(
            "Workers on the queue have different parameters for the task. Each worker leaves calls that "
            "do not fit its parameters to the other workers.",
            "Deploy the same release to every worker on the queue.",
        ),
        "CLUSTER_CAP": _obstacle(
            "The number of tasks in flight has reached `cluster_wide_cap`.",
            "Wait until a task in flight ends, or raise the cap.",
        ),
        "QUEUE_CAP": _obstacle(
            "The number of running tasks of the queue has reached its `max_concurrency`.",
            "Wait until a running task of the queue ends, or raise the cap.",
        ),
        "QUEUE_CAP_ZERO": _obstacle(
            "The queue's `max_concurrency` is 0, so none of its tasks starts.",
            "Raise the cap and restart the workers.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "QUEUE_RATE": _obstacle(
            "The tasks of the queue that started recently have used up its `rate`.",
            "Wait for the next start, or raise the rate.",
        ),
        "KEY_PAUSED": _obstacle(
            "An operator paused the task's key.",
            "`horsies keys resume QUEUE KEY`.",
            urgency=Urgency.STOPPED,
        ),
        "KEY_HALTED": _obstacle(
            'A task of the key failed, and `on_failure="halt"` paused the key.',
            "Fix the cause, send the failed task again if it has to run, then run `horsies keys resume "
            "QUEUE KEY`.",
            urgency=Urgency.STOPPED,
        ),
        "KEY_CAP": _obstacle(
            "The number of tasks of the key in flight has reached its `max_concurrency`.",
            "Wait until a task of the key ends, or run `horsies keys set QUEUE KEY "
            "--max-concurrency N`.",
        ),
        "KEY_RATE": _obstacle(
            "The tasks of the key that started recently have used up its `rate`.",
            "Wait for the next start, or run `horsies keys set QUEUE KEY --rate COUNT/SECONDS`.",
        ),
        "KEY_ORDER": _obstacle(
            'The key has `order="fifo"`, and tasks that were sent before this one have not ended.',
            "Wait, or explain the first task of the key.",
        ),
        "CAPS_DISAGREE": _remark(
            "Workers on the queue apply different caps.",
            "Deploy the same configuration to all workers on the queue.",
            level=Level.RED,
            urgency=Urgency.SUSPICIOUS,
        ),
        "CHILDREN_BUSY": _obstacle(
            "All children of the workers that could run the task are running other tasks.",
            "Wait, or start more workers or processes.",
        ),
        "BEHIND": _remark(
            "Other tasks of the queue or the task's key start first, because of a better "
            "priority or an earlier due time.",
            "Wait, send with a better priority, or start more workers.",
        ),
        "BETTER_QUEUES_FIRST": _remark(
            "The task's workers serve queues with a better priority first, and tasks are due in those "
            "queues.",
            "Wait, or start a worker for this queue alone.",
        ),
        "WORKERS_POLL": _remark(
            "Notifications do not reach a worker of the queue, so it finds tasks by polling.",
            "See [PgBouncer](pgbouncer.md): set `session_database_url`.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
        "ROW_LOCKED": _obstacle(
            "Another transaction has locked the row; claims skip it until that transaction ends.",
            "End the transaction: `SELECT pg_terminate_backend(PID)`.",
        ),
        "WORKER_LOST_RECENTLY": _remark(
            "The worker of the last attempt was lost, and the retry policy runs the task again.",
            "Check that worker's log to see how it ended.",
        ),
        "RETURNED": _remark(
            'The worker of the last attempt stopped and returned the task (`on_stop="requeue"`).',
            "No action is needed.",
        ),
        "SHOULD_START_NOW": _remark(
            "No obstacle was found: a worker will claim the task on its next turn.",
            "Explain the task again; if it still has not started, run `horsies workers --ping`.",
        ),
    },
    "task, claimed": {
        "PREFETCHED": _remark(
            "A worker has claimed the task ahead of time (`prefetch_buffer`) and starts it when a child "
            "is free.",
            "Wait; if the worker does not renew the lease, the task returns to the queue.",
        ),
        "LEASE_LAPSED": _obstacle(
            "The claim's lease has run out; a worker's next turn returns the task to the queue.",
            "Start a worker if none is running.",
        ),
        "CLAIMER_LOST": _obstacle(
            "The worker that claimed the task is gone; recovery returns the task to the queue.",
            "Start a worker if none is running, or call `requeue_stale_claimed`.",
        ),
    },
    "task, running": {
        "RUNS": _remark("A child process is running the task.", "No action is needed."),
        "IN_TRANSACTION": _remark(
            "The task writes in its own transaction (`tx`), which commits its rows and its outcome "
            "together.",
            "No action is needed.",
        ),
        "STOPPING": _remark(
            "Cancellation was requested; the worker is stopping the task.", "No action is needed."
        ),
        "RUNNER_LOST": _obstacle(
            "The worker that ran the task is gone; recovery retries or fails the task according to its "
            "policy.",
            "Start a worker if none is running, or call `mark_stale_tasks_as_failed`.",
        ),
        "OVER_LIMIT": _obstacle(
            "The task has run for longer than its `timeout_ms`; its worker should have stopped it.",
            "Check the worker's host.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
        "NO_HEARTBEAT": _obstacle(
            "The task is running, but has sent no heartbeat for five minutes.",
            "Check the worker's host.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
    },
    "task, claimed or running": {
        "SILENT": _obstacle(
            "The task's worker has sent no heartbeat for a while but is still connected: it is frozen, or "
            "cut off.",
            "Check the worker's host.",
            level=Level.YELLOW,
            urgency=Urgency.FAILING,
        ),
    },
    "task, ended": {
        "ENDED": _remark(
            "The task has ended: it completed, failed, expired or was cancelled.",
            "If it failed, `horsies show ID --payload` shows why; `horsies retry ID`, or `horsies "
            "workflow retry RUN`, runs it again.",
        ),
        "NOT_RETRIED_UNLISTED": _remark(
            "The retry policy lists neither the error code nor the exception.",
            "Add the code or the exception to `auto_retry_for`.",
        ),
        "NOT_RETRIED_STEP": _remark(
            "A step of the durable function failed, and its failure is recorded: another attempt of the run "
            "would only read the recorded failure again.",
            "Add the code to `auto_retry_for` of the step's own policy, `ctx.with_options(retry=...)`.",
        ),
        "NOT_RETRIED_USED_UP": _remark(
            "All retries have been used.", "Raise `max_retries`, or retry the task manually."
        ),
        "NOT_RETRIED_TOO_LATE": _remark(
            "The next attempt would start after `good_until`.", "Send the task again."
        ),
        "NOT_RETRIED_CANCELLED": _remark(
            "Cancellation was requested before the attempt failed.", "Send the task again."
        ),
        "NOT_RETRIED_NO_POLICY": _remark(
            "The task has no retry policy.", "Give the task a `retry_policy`."
        ),
    },
    "run": {
        "RUN_PAUSED": _obstacle(
            "The run is paused, either by an operator or because a node failed.",
            "`horsies workflow resume RUN`, with `--retry-failed` after a failure.",
            level=Level.YELLOW,
            urgency=Urgency.FAILING,
        ),
        "TRIGGERS_SILENT": _obstacle(
            "`session_replication_role` is `replica` for the database or a role: triggers do not "
            "fire, so runs stop after a node and notifications are not sent.",
            "Reset the setting with the statement that `horsies doctor` prints, and restart the "
            "workers.",
            level=Level.RED,
            urgency=Urgency.STOPPED,
        ),
        "RUN_ENDED": _remark("The run has ended.", "`horsies workflow retry RUN` after a failure."),
        "NODE_OPEN": _remark(
            "A node that has started has not ended; its own obstacles are listed as well.",
            "`horsies explain RUN NODE`.",
        ),
    },
    "node": {
        "SUB_RUN_PAUSED": _obstacle(
            "The node's child run is paused.", "`horsies workflow resume CHILD`."
        ),
        "SUB_RUN_OPEN": _remark("The node's child run has not ended.", "`horsies explain CHILD`."),
        "MAP_OPEN": _remark(
            "Items of the map have not ended.", "`horsies explain ITEM` for one of them."
        ),
        "WAITS_FOR": _obstacle(
            "Nodes that this node depends on have not ended.", "`horsies explain RUN NODE`."
        ),
        "NEVER": _remark(
            "The node was skipped: its dependencies failed, or the run ended before it could start.",
            "`horsies workflow retry RUN`.",
        ),
    },
    "queue": {
        "NO_WINDOWS": _remark(
            "Because of a cap, tasks of the queue go to children one at a time, even very short ones.",
            "See [Windows](concurrency.md#windows): send very short tasks to a queue without a cap.",
        ),
        "QUEUE_STUCK": _remark(
            "A task has been due for five minutes although its workers have idle children and no cap "
            "is reached.",
            "`horsies explain ID` for the task; `horsies workers --ping`.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
        "QUEUE_STALLED": _remark(
            "A task has been due for five minutes, and all children of the queue's workers have run the same "
            "tasks for as long. These tasks may hang.",
            "`horsies cancel ID` for a task that hangs; give it a time limit. Otherwise start more workers.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
        "QUEUE_EMPTY": _remark("No task is waiting in the queue.", "No action is needed."),
        "ALL_DELAYED": _remark(
            "Tasks are waiting in the queue, but none of them is due yet.", "Wait."
        ),
        "TASKS_DUE": _remark(
            "Tasks of the queue are due; obstacles, if any, are listed as well.",
            "`horsies explain ID` for one of the tasks.",
        ),
    },
    "worker": {
        "WORKER_LOST": _remark(
            "The worker has disappeared without a shutdown.",
            "Start a worker: it recovers the tasks of lost workers.",
            level=Level.RED,
            urgency=Urgency.FAILING,
        ),
        "WORKERS_LOST": _remark(
            "Workers were lost within the last hour; other workers have recovered their tasks.",
            "Find out from the logs of the process and of its host how the worker ended: for example out of "
            "memory, by `kill -9`, or because a node was removed.",
            level=Level.YELLOW,
            urgency=Urgency.FAILING,
        ),
        "TASK_RETRYING": _remark(
            "Tasks with one name are retried five times as often as usual, and at least fifty times in "
            "ten minutes.",
            "`horsies tasks --name NAME`, then `horsies show ID` for one of the tasks.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
        "TASK_FAILING": _remark(
            "Tasks with one name fail five times as often as usual, and at least ten times in ten "
            "minutes.",
            "`horsies tasks --name NAME --status failed`.",
            level=Level.YELLOW,
            urgency=Urgency.FAILING,
        ),
        "WEBHOOK_FAILING": _remark(
            "The receiver of a webhook does not accept its deliveries: deliveries of the last ten minutes "
            "are being retried, or have failed finally.",
            "`horsies tasks --name horsies.webhook.NAME`; `horsies show ID` has the receiver's answer.",
            level=Level.YELLOW,
            urgency=Urgency.FAILING,
        ),
    },
    "schedule": {
        "PAUSED": _obstacle("An operator paused the schedule.", "`horsies schedules resume NAME`."),
        "NOT_DUE": _obstacle(
            "The schedule's next slot is in the future.",
            "Wait, or run the schedule now, which does not change its next slot: `horsies schedules "
            "run NAME LOCATOR`.",
        ),
        "NO_SCHEDULER": _obstacle(
            "A slot is overdue, and no scheduler is connected to the database.",
            "Start `horsies scheduler`, or a worker with `--with-scheduler`.",
            level=Level.RED,
            urgency=Urgency.FAILING,
        ),
        "NOT_SERVED": _obstacle(
            "A slot is overdue, and no connected scheduler serves the schedule: it is switched off, "
            "or missing from the schedulers' configuration.",
            "Start a scheduler for the application that defines it.",
            level=Level.RED,
            urgency=Urgency.FAILING,
        ),
        "OVERLAP": _obstacle(
            'A slot is due, but a task or run of the schedule is unfinished (`overlap="queue"`).',
            "`horsies explain ID` for that task or run.",
            level=Level.YELLOW,
            urgency=Urgency.SUSPICIOUS,
        ),
        "SHOULD_FIRE_NOW": _remark(
            "A slot is due; a scheduler fires it on its next tick.",
            "Explain the schedule again.",
            urgency=Urgency.SUSPICIOUS,
        ),
        "SCHEDULE_ENDED": _obstacle("The schedule has no further slot.", "Extend its `end_at`."),
        **{
            f"SKIPPED_{reason}": _remark(f"Slots were skipped: {cause}.", remedy, clause=cause)
            for reason, cause, remedy in (
                (
                    "MISSED",
                    "no scheduler ran at their time",
                    "Set `catch_up_missed` to fire them later.",
                ),
                (
                    "MISFIRE",
                    "they were older than `misfire_grace_seconds`",
                    "Raise `misfire_grace_seconds`.",
                ),
                ("PAUSED", "the schedule was paused", "No action is needed."),
                (
                    "OVERLAP",
                    "an earlier task or run of the schedule was unfinished",
                    "Change the schedule's `overlap` if skipped slots are not acceptable.",
                ),
                (
                    "REFUSED",
                    "the task or run could not be created",
                    "Look for the error in the scheduler's log.",
                ),
            )
        },
    },
}
CATALOGUE = {code: entry for entries in GROUPS.values() for code, entry in entries.items()}


def finding(
    code: str,
    sentence: str,
    *,
    level: Level | None = None,
    since: datetime | None = None,
    subjects: Iterable[str] = (),
    remedy: str | None = None,
    evidence: Iterable[str] = (),
    is_sql: bool = False,
    subject: Subject = SERVER,
) -> Finding:
    """Return a finding from the catalogue, at its catalogued level unless another level is passed."""
    known = CATALOGUE[code].level if level is None else level
    names, facts = tuple(subjects), tuple(evidence)
    return Finding(code, sentence, known, since, names, remedy, facts, is_sql, subject)


def obstacles_first(reasons: Iterable[Finding]) -> tuple[Finding, ...]:
    """Order the reasons: obstacles before remarks, otherwise unchanged."""
    return tuple(sorted(reasons, key=lambda one: not one.blocks))


def between(start: datetime, end: datetime) -> str:
    """Format the time between two points for a sentence."""
    return lasting((end - start).total_seconds())


def at_and_ago(time: datetime | None, looked_at: datetime) -> str:
    """Format the end time for a sentence: " at 2026-03-01 12:00:00 UTC, 4 min ago"."""
    if time is None:
        return ""
    return f" at {time.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC, {between(time, looked_at)} ago"


def command(*words: str) -> str:
    """Return a horsies command line, quoted for a shell."""
    return shlex.join(("horsies", *words))
