"""Erasing: which of the tasks and runs that an order names may be erased, and one batch of it.

Only tasks and runs that have ended are erased. A task of a workflow goes with its whole run, because
its arguments and its result may be in any other node. Other tables lose what they say about the erased
tasks. If the order was found by a key or an argument, the limits of the tasks' keys go as well, once no
open task has the key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from horsies.db.statement import Script
from horsies.db.statements.erasing import (
    Erasable,
    ErasedId,
    ErasedPart,
    QueueKey,
    delete_runs,
    delete_tasks,
    forget_keys,
    forget_tasks,
    meet_erasures,
    read_erased_keys,
)
from horsies.db.statements.workflows import lock_runs
from horsies.monitor.order_plan import SCOPES, Order

# How many tasks one batch erases if filters choose them.
ERASE_BATCH = 1_000

NOT_ENDED = "not ended (cancel first)"
PART_OF_RUN = "part of a workflow (--with-runs takes whole runs)"
AWAITED = "awaited by an open durable run"
CHANGED = "changed meanwhile"


def erasure_refusal(order: Order, row: Erasable) -> str | None:
    """Return why an order must not erase a task or run."""
    if row.status not in {status.value for status in SCOPES[order.verb].allowed}:
        return NOT_ENDED
    if row.is_part:
        return PART_OF_RUN
    return AWAITED if row.is_awaited else None


def judge_erasures_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    """Count the tasks and runs that an order would refuse to erase, by reason."""
    rows: list[Erasable] = yield meet_erasures(ids)
    reasons = (erasure_refusal(order, row) for row in rows)
    return Counter(one for one in reasons if one is not None)


def erase_script(order: Order, ids: Sequence[str]) -> Script[Counter[str]]:
    """Erase the tasks and runs of one batch; return the refused ones, by reason."""
    if order.ids:  # tasks chosen by filters are never runs
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
    erased: list[ErasedId] = (yield delete_tasks(tasks)) if tasks else []
    parts: list[ErasedPart] = (yield delete_runs(runs)) if runs else []
    yield forget_tasks([*(one.id for one in erased), *(part.id for part in parts)])
    if keys:
        yield forget_keys([one.queue for one in keys], [one.key for one in keys])
    return len(erased) + sum(part.is_root for part in parts)
