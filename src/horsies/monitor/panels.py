"""The data for one queue or worker, and the rates that charts show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from horsies.db.statement import Script, one_or_none
from horsies.db.statements.dashboard import (
    DueTask,
    HistoryPoint,
    WorkerDetail,
    WorkerTask,
    next_in_queue,
    read_worker_detail,
    tasks_of_worker,
    thinned_worker_history,
)
from horsies.db.statements.keys import KeyState, list_keys
from horsies.db.statements.monitor import WorkerSummary, list_workers
from horsies.monitor.action_log import ActionRow, list_actions_script
from horsies.monitor.keys import COUNT_MOST
from horsies.monitor.measures import (
    Series,
    done_by_minute_script,
    read_measures_script,
    read_split_measures_script,
)
from horsies.monitor.overview import (
    QueueOverview,
    arrivals_script,
    overview_script,
    servers_of,
)

NEXT_SHOWN = 25
CHANGES_SHOWN = 10
KEYS_SHOWN = 25
TASKS_SHOWN = 200
HISTORY = timedelta(hours=24)
_HISTORY_STEP = timedelta(minutes=10)
_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class Rates:
    """The series of all attempts, the last hour's completed attempts of some queues by minute, and, for
    a single queue, the sums by task.
    """

    total: Series
    by_queue: Mapping[str, Sequence[int]] = field(default_factory=dict)
    by_task: Mapping[str, Series] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class QueuePanel:
    """A queue's data: the workers that serve it, the tasks that start next, its newest changes and its
    keys.
    """

    queue: QueueOverview
    servers: Sequence[WorkerSummary]
    front: Sequence[DueTask]
    changes: Sequence[ActionRow]
    arrivals: float = 0.0
    keys: Sequence[KeyState] = ()


@dataclass(frozen=True, slots=True)
class WorkerPanel:
    """A worker's data: its tasks in flight, its children at the last snapshot, and its last 24 hours."""

    worker: WorkerSummary
    detail: WorkerDetail
    tasks: Sequence[WorkerTask]
    history: Sequence[HistoryPoint]


def rates_script(since: timedelta, step: timedelta, queues: Sequence[str]) -> Script[Rates]:
    """Read the rates and waiting times of the whole system, and the last hour of these queues."""
    total = yield from read_measures_script(since, step, durations=["waited"])
    return Rates(total, (yield from done_by_minute_script(queues)))


def queue_rates_script(name: str, since: timedelta, step: timedelta) -> Script[Rates]:
    total = yield from read_measures_script(since, step, [name], durations=["waited"])
    return Rates(total, by_task=(yield from read_split_measures_script("task", _HOUR, [name])))


def queue_script(name: str, configured: Mapping[str, int | None]) -> Script[QueuePanel | None]:
    """Read one queue; return None if it is neither in use nor configured."""
    overview = yield from overview_script(configured)
    queue = next((one for one in overview.queues if one.name == name), None)
    if queue is None:
        return None
    servers = servers_of(name, overview.workers)
    front: list[DueTask] = yield next_in_queue(name, NEXT_SHOWN)
    changes = yield from list_actions_script(f"queue {name}", limit=CHANGES_SHOWN)
    arrivals = yield from arrivals_script()
    keys: list[KeyState] = yield list_keys(name, KEYS_SHOWN, COUNT_MOST)
    return QueuePanel(queue, servers, front, changes, arrivals.get(name, 0.0), keys)


def worker_script(worker_id: str) -> Script[WorkerPanel | None]:
    """Read one worker, running or stopped; return None if it is not on record."""
    worker = one_or_none((yield list_workers(True, worker_id)))
    if worker is None:
        return None
    (detail,) = yield read_worker_detail(worker_id)
    tasks: list[WorkerTask] = yield tasks_of_worker(worker_id, TASKS_SHOWN)
    since = datetime.now(UTC) - HISTORY
    history: list[HistoryPoint] = yield thinned_worker_history(worker_id, since, _HISTORY_STEP)
    return WorkerPanel(worker, detail, tasks, history)
