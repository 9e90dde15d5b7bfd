"""How the operator's commands show what they found: tables for people, JSON for programs.

Only formatting; it asks nobody. Tables are made for 80 columns without a terminal, and no stored text
can control one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from enum import Enum
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from horsies.db.statements.monitor import TaskDetail, TaskSummary
from horsies.db.statements.schedules import ScheduleRun, ScheduleState
from horsies.db.statements.tasks import TaskAttemptInfo
from horsies.monitor.health import WorkerPong
from horsies.monitor.overview import QueueOverview, TaskPage, WorkerOverview, WorkerStanding

_QUEUE_COUNTS = ("DUE", "DELAYED", "CLAIMED", "RUNNING", "OLDEST", "DONE/MIN", "FAILED/MIN")
_WORKER_COLUMNS = ("WORKER", "STATE", "BUSY", "MEMORY", "SEEN")
_PAYLOAD_FIELDS = ("args", "kwargs", "result")
STATUS_STYLES = {"FAILED": "red", "EXPIRED": "yellow", "RUNNING": "green", "CANCELLED": "dim"}
_STANDING_STYLES = {"alive": "green", "silent": "yellow", "lost": "red", "stopped": "dim"}


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON document: stable keys, times in UTC, numbers rounded to thousandths."""
    # What replaces a character that standard output cannot write would not be JSON.
    is_plain = (sys.stdout.encoding or "utf-8").lower().replace("-", "") != "utf8"
    sys.stdout.write(json.dumps(_json_value(value), indent=2, ensure_ascii=is_plain) + "\n")


def _json_value(value: Any) -> Any:
    match value:
        case Enum():
            return value.value
        case datetime():
            return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
        case float():
            return round(value, 3)
        case dict():
            return {name: _json_value(part) for name, part in value.items()}
        case list() | tuple():
            return [_json_value(part) for part in value]
        case _:
            return value


def queue_document(queue: QueueOverview) -> dict[str, Any]:
    """Return a queue as a JSON object."""
    return {"name": queue.name, "paused": queue.paused_at is not None, **asdict(queue)}


def worker_document(overview: WorkerOverview, pong: WorkerPong | None = None) -> dict[str, Any]:
    """Return a worker as a JSON object; ``ping_ms`` is None unless it answered a ping."""
    document = {"state": overview.standing, "memory_mb": overview.memory_mb}
    document |= overview.worker._asdict()
    return document | {"ping_ms": pong.latency_ms if pong else None}


def page_document(page: TaskPage) -> dict[str, Any]:
    """Return a list of tasks as a JSON object; the age is left out, it differs with every look."""
    tasks = [task._asdict() for task in page.tasks]
    for task in tasks:
        del task["age_seconds"]
    return {
        "tasks": tasks,
        "next_before": page.next_before,
        "looked_at_all": page.looked_at_all,
    }


def task_document(task: TaskDetail, attempts: Iterable[TaskAttemptInfo], payload: bool) -> Any:
    """Return a task and its attempts as a JSON object; without payload it has no such keys."""
    document = task._asdict()
    document["options"] = stored_json(document.pop("task_options"))
    for name in _PAYLOAD_FIELDS:
        stored = stored_json(document.pop(name))
        if payload:
            document[name] = stored
    return document | {"attempts": [attempt._asdict() for attempt in attempts]}


def stored_json(text: str | None) -> Any:
    """Read stored JSON; what is none stays text."""
    try:
        return None if text is None else json.loads(text)
    except (ValueError, RecursionError):
        return text


def print_queues(queues: Sequence[QueueOverview]) -> None:
    """Print one line per queue."""
    if not queues:
        print_parts("No queue is in use: no task waits or runs, and no worker is there.")
        return
    table = plain_table("QUEUE", *_QUEUE_COUNTS, flexible="QUEUE")
    for queue in queues:
        name = safe_text(queue.name)
        if queue.paused_at is not None:
            name.append("\npaused", "yellow")
        counts = (queue.due, queue.delayed, queue.claimed, queue.running)
        rates = (queue.done_per_minute, queue.failed_per_minute)
        table.add_row(
            name,
            *(f"{count:,}" for count in counts),
            duration(queue.oldest_waiting_seconds),
            *(f"{rate:,.0f}" for rate in rates),
        )
    print_parts(table)


def print_worker_summary(workers: Sequence[WorkerOverview]) -> None:
    """Print in one line how many workers are there and how busy they are."""
    alive = [one for one in workers if one.standing is WorkerStanding.ALIVE]
    if not workers:
        print_parts("No worker is running.")
        return
    busy = sum(one.worker.tasks_running for one in alive)
    total = sum(one.worker.processes for one in alive)
    line = f"{len(alive)} worker(s) alive, {busy} of {total} children busy"
    known = [one.memory_mb for one in alive if one.memory_mb is not None]
    line += f", {memory(sum(known))} of memory" if known else ""
    deaf = sum(one.is_deaf for one in alive)
    line += f", {deaf} without notifications" if deaf else ""
    for standing in (WorkerStanding.SILENT, WorkerStanding.LOST):
        count = sum(one.standing is standing for one in workers)
        line += f", {count} {standing.value}" if count else ""
    print_parts(safe_text(f"{line}."))


def print_workers(
    workers: Sequence[WorkerOverview], pongs: dict[str, WorkerPong] | None = None
) -> None:
    """Print every worker: how it is on the first line, where it is on the next."""
    if not workers:
        print_parts("No worker is running.")
        return
    columns = _WORKER_COLUMNS if pongs is None else (*_WORKER_COLUMNS, "PING")
    table = plain_table(*columns, flexible="WORKER")
    for one in workers:
        worker = one.worker
        where = f"{worker.hostname}, pid {worker.pid}, queues {', '.join(worker.queues)}"
        name = safe_text(worker.worker_id).append_text(safe_text(f"\n{where}", "dim"))
        if one.is_deaf:
            name.append("\nhears no notifications, finds work by polling", "yellow")
        cells: list[Text | str] = [
            name,
            Text(one.standing.value, _STANDING_STYLES[one.standing.value]),
            f"{worker.tasks_running}/{worker.processes}",
            memory(one.memory_mb),
            duration(worker.seen_seconds_ago),
        ]
        if pongs is not None:
            pong = pongs.get(worker.worker_id)
            cells.append(f"{pong.latency_ms:.0f} ms" if pong else "none")
        table.add_row(*cells)
    print_parts(table)


def print_tasks(tasks: Sequence[TaskSummary]) -> None:
    """Print one line per task, and a second one for what went wrong."""
    if not tasks:
        print_parts("No task matches.")
        return
    table = plain_table("ID", "STATUS", "AGE", "TASK", flexible="TASK")
    for task in tasks:
        name = safe_text(f"{task.task_name} on {task.queue_name}")
        if task.error_code is not None:
            name.append_text(safe_text(f"\n{task.error_code}", "red"))
        status = Text(task.status, STATUS_STYLES.get(task.status, ""))
        table.add_row(task.id, status, duration(task.age_seconds), name)
    print_parts(table)


def print_task(task: TaskDetail, attempts: Sequence[TaskAttemptInfo], payload: bool) -> None:
    """Print one task: a line per fact, then its attempts."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in _facts(task, payload):
        if value is not None:
            table.add_row(name, safe_text(value))
    print_parts(table, *(_attempt_line(attempt) for attempt in attempts))


def _facts(task: TaskDetail, payload: bool) -> Iterable[tuple[str, str | None]]:
    yield "task", f"{task.task_name} on {task.queue_name}, priority {task.priority}"
    yield "id", task.id
    yield "status", task.status + (" (held)" if task.held else "")
    yield "error", task.error_code
    yield "reason", task.failed_reason
    for name in ("sent_at", "enqueued_at", "claimed_at", "started_at", "completed_at", "failed_at"):
        yield name.removesuffix("_at"), moment(getattr(task, name))
    yield "next retry", moment(task.next_retry_at)
    yield "cancel asked", moment(task.cancel_requested_at)
    yield "good until", moment(task.good_until)
    yield "retries", f"{task.retry_count} of {task.max_retries}"
    yield "time limit", None if task.timeout_ms is None else f"{task.timeout_ms:,} ms"
    yield "worker", task.claimed_by_worker_id
    yield "process", _process(task)
    yield "idempotency key", task.idempotency_key
    yield "retry of", task.retried_from_task_id
    yield "workflow", task.workflow_id
    yield "schedule", task.schedule_name
    yield "slot", moment(task.scheduled_for)
    yield "options", task.task_options
    for name in _PAYLOAD_FIELDS if payload else ():
        yield name, getattr(task, name)


def _process(row: TaskDetail | TaskAttemptInfo) -> str | None:
    return None if row.worker_hostname is None else f"{row.worker_hostname}, pid {row.worker_pid}"


def _attempt_line(attempt: TaskAttemptInfo) -> Text:
    ran = None
    if attempt.started_at is not None:
        ran = (attempt.finished_at - attempt.started_at).total_seconds()
    parts = [
        f"attempt {attempt.attempt}: {attempt.outcome} at {moment(attempt.finished_at)}",
        None if ran is None else f"after {ran:.3f} s",
        _process(attempt),
        "will be retried" if attempt.will_retry else None,
    ]
    line = safe_text(", ".join(part for part in parts if part))
    if attempt.error_code is not None:
        line.append_text(
            safe_text(f"\n  {attempt.error_code}: {attempt.error_message or ''}", "red")
        )
    return line


def schedule_document(state: ScheduleState) -> dict[str, Any]:
    """Return a schedule as a JSON object, its timing as JSON as well."""
    document = {"name": state.name, "paused": state.is_paused, **state._asdict()}
    return document | {"timing": stored_json(state.timing)}


def print_schedules(states: Sequence[ScheduleState]) -> None:
    """Print every schedule: when it is due on the first line, what it does on the next."""
    if not states:
        print_parts("No schedule is on record.")
        return
    table = plain_table(
        "SCHEDULE", "NEXT (UTC)", "LAST (UTC)", "STATUS", "RUNS", flexible="SCHEDULE"
    )
    for state in states:
        target = state.task_name or state.definition_key
        name = safe_text(state.name).append_text(safe_text(f"\n{target}", "dim"))
        if state.is_paused:
            name.append("\npaused", "yellow")
        status = state.last_status or "-"
        table.add_row(
            name,
            _second(state.next_run_at) or "never",
            _second(state.last_run_at) or "-",
            Text(status, STATUS_STYLES.get(status, "")),
            f"{state.run_count:,}",
        )
    print_parts(table)


def print_schedule_runs(runs: Sequence[ScheduleRun]) -> None:
    """Print the runs of a schedule, a line each."""
    if not runs:
        print_parts("No run is on record.")
        return
    table = plain_table("ID", "STATUS", "SLOT (UTC)", "ERROR", flexible="ERROR")
    for run in runs:
        status = Text(run.status, STATUS_STYLES.get(run.status, ""))
        slot = _second(run.scheduled_for) or "by order"
        table.add_row(run.task_id, status, slot, safe_text(run.error_code or "", "red"))
    print_parts(table)


def _second(value: datetime | None) -> str | None:
    return None if value is None else value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def duration(seconds: float | None) -> str:
    """Write a duration in the two units that matter: 42s, 4m12s, 3h05m, 5d04h."""
    if seconds is None:
        return "-"
    whole = max(int(seconds), 0)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86_400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86_400}d{whole % 86_400 // 3600:02d}h"


def memory(megabytes: float | None) -> str:
    """Write an amount of memory: 412 MB, 1.3 GB."""
    if megabytes is None:
        return "-"
    return f"{megabytes:.0f} MB" if megabytes < 1000 else f"{megabytes / 1024:.1f} GB"


def moment(value: datetime | None) -> str | None:
    """Write a moment in UTC to the millisecond."""
    if value is None:
        return None
    return value.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S.%f")[:-3] + " UTC"


def safe_text(text: str, style: str = "") -> Text:
    """Return stored text for display: no markup in it counts, and no control character survives."""
    visible = (
        character if character.isprintable() or character == "\n" else repr(character)[1:-1]
        for character in text
    )
    return Text("".join(visible), style)


def plain_table(*columns: str, flexible: str) -> Table:
    """Return a table in which one column takes the width that the others leave."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        if column == flexible:
            table.add_column(column, overflow="fold")
        else:
            is_text = column in ("ID", "STATUS")
            table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    return table


def print_parts(*parts: Table | Text | str) -> None:
    """Print to standard output, without the blanks that fill a table up to its width."""
    console = Console(highlight=False, markup=False)
    with console.capture() as captured:
        for part in parts:
            console.print(part)
    lines = captured.get().splitlines()
    sys.stdout.write("".join(f"{line.rstrip()}\n" for line in lines))
