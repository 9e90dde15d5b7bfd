"""Deletes or redacts tasks and runs: decides which rows an order may erase, and erases one batch. Only
ended tasks and runs are erased. A workflow task is erased with its whole run, because its arguments and
its result may be in any other node. Data about the erased tasks in other tables is erased too. An order
for a key or an argument also erases the limits of the tasks' keys, once no open task has the key. A key
that is the same for all calls of a task keeps its limits.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from horsies.db.statement import Script, Step
from horsies.db.statements.erasing import (
    Erasable,
    ErasedId,
    ErasedPart,
    QueueKey,
    RunKey,
    delete_runs,
    delete_tasks,
    find_key_queues,
    forget_keys,
    forget_run_keys,
    forget_tasks,
    meet_erasures,
    read_erased_keys,
    read_run_keys,
    redact_runs,
    redact_tasks,
)
from horsies.db.statements.workflows import lock_runs
from horsies.monitor.diagnose.queues import key_opening
from horsies.monitor.order_plan import SCOPES, Order, OrderVerb
from horsies.result import Ok
from horsies.tasks.broker import BrokerResult

# The number of tasks per batch if filters select the tasks.
ERASE_BATCH = 1_000

NOT_ENDED = "not ended (cancel first)"
PART_OF_RUN = "part of a workflow (--with-runs takes whole runs)"
AWAITED = "awaited by an open durable run"
REDACTED = "redacted"
CHANGED = "changed meanwhile"


def erasure_refusal(order: Order, row: Erasable) -> str | None:
    """Return the reason why an order must not erase a task or run."""
    if row.status not in {status.value for status in SCOPES[order.verb].allowed}:
        return NOT_ENDED
    if row.is_part:
        return PART_OF_RUN
    if row.is_awaited:
        return AWAITED
    return REDACTED if row.is_redacted and order.verb is OrderVerb.REDACT_TASKS else None


def judge_erasures_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    """Count the tasks and runs that an order would refuse to erase, per reason."""
    rows: list[Erasable] = yield meet_erasures(ids)
    reasons = (erasure_refusal(order, row) for row in rows)
    return Counter(one for one in reasons if one is not None)


def erase_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    """Erase the tasks and runs of one batch; return the refused ones, per reason."""
    if order.ids:  # Filters select tasks, never runs.
        yield lock_runs(ids)
    rows: list[Erasable] = yield meet_erasures(ids)
    refused: Counter[str] = Counter()
    fitting: list[Erasable] = []
    for row in rows:
        if (reason := erasure_refusal(order, row)) is None:
            fitting.append(row)
        else:
            refused[reason] += 1
    erased = yield from _erase_fitting_script(order, fitting)
    refused[CHANGED] += len(fitting) - erased
    return +refused


def _erase_fitting_script(order: Order, fitting: Sequence[Erasable]) -> Script[int]:
    tasks = [row.id for row in fitting if not row.is_run]
    runs = [row.id for row in fitting if row.is_run]
    keys: list[QueueKey] = []
    if order.found_by is not None:
        keys = yield read_erased_keys([*tasks, *runs])
    statements = _STATEMENTS[order.verb]
    rows: list[ErasedId] = (yield statements.tasks(tasks)) if tasks else []
    parts: list[ErasedPart] = []
    if runs:
        run_keys: list[RunKey] = yield read_run_keys(runs)
        parts = yield statements.runs(runs)
        yield forget_run_keys([one.key for one in run_keys])
    yield forget_tasks([*(row.id for row in rows), *(part.id for part in parts)])
    if keys:
        yield _forgetting(keys)
    return len(rows) + sum(part.is_root for part in parts)


def key_queues_script(key: str) -> Script[list[str]]:
    """Find the queues in which a key has limits, a pause or a history."""
    found: list[QueueKey] = yield find_key_queues(key)
    return [one.queue for one in found]


def forget_key_script(key: str) -> Script[BrokerResult[bool]]:
    """Delete a key's limits, pause and history in every queue where no open task uses the key; return
    whether all queues were cleared.
    """
    found: list[QueueKey] = yield find_key_queues(key)
    kept: list[QueueKey] = yield _forgetting(found)
    return Ok(not kept)


def _forgetting(keys: Sequence[QueueKey]) -> Step:
    return forget_keys(
        [one.queue for one in keys],
        [one.key for one in keys],
        [key_opening(one.queue, one.key) for one in keys],
    )


class _Statements(NamedTuple):
    """The statements that erase tasks and runs for one verb."""

    tasks: Callable[[Sequence[str]], Step]
    runs: Callable[[Sequence[str]], Step]


_STATEMENTS: Mapping[OrderVerb, _Statements] = {
    OrderVerb.DELETE_TASKS: _Statements(delete_tasks, delete_runs),
    OrderVerb.REDACT_TASKS: _Statements(redact_tasks, redact_runs),
}
