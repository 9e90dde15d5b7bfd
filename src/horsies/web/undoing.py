"""Describes how to undo a change. The text ends the notice about the change, and is shown on the pages of
a bulk order.
"""

from __future__ import annotations

import shlex
from datetime import timedelta
from typing import NamedTuple

from horsies.ids import first_id_at
from horsies.monitor.order_plan import Order, OrderVerb
from horsies.monitor.queries import TaskFilters, sent_time

# The maximum number of tasks that a command lists.
IDS_MAX = 20
_MILLISECOND = timedelta(milliseconds=1)
_FORM = "%Y-%m-%dT%H:%M:%S.%fZ"
_FINAL = " This cannot be undone."
_EACH_RUN = ", for each run"


class Undoing(NamedTuple):
    """A sentence of ``undo_order`` in its parts, so that a page can set its command apart."""

    words: str
    command: str
    rest: str

    @classmethod
    def of(cls, sentence: str) -> Undoing:
        words, _, command = sentence.partition(": horsies ")
        bare = command.removesuffix(_EACH_RUN)
        return cls(words, bare and f"horsies {bare}", command[len(bare) :])


def undo(command: str) -> str:
    """Return the end of a notice: the command that undoes the change."""
    return f" To undo it: {command}"


def cannot_undo(again: str | None = None, what: str = "it") -> str:
    """Return the end of a notice about a change that is final; the command ``again`` sends the same
    tasks again.
    """
    return f" This cannot be undone; to send {what} again: {again}" if again else _FINAL


def undo_order(order: Order) -> str:
    """Describe how to undo a bulk order, in the words used for a single change."""
    match order.verb:
        case OrderVerb.RETRY_TASKS if order.at is not None:
            # The ids of the new tasks contain the time of the dry run.
            first = first_id_at(order.at)
            command = shlex.join(["horsies", "cancel", *_sent_between(first, first)])
            return f" To undo it, and cancel any other task sent in that millisecond: {command}"
        case OrderVerb.CANCEL_TASKS | OrderVerb.PURGE_QUEUE:
            return _undo_cancel(order)
        case OrderVerb.PAUSE_RUNS:
            return undo(f"horsies workflow resume ID{_EACH_RUN}")
        case OrderVerb.RESUME_RUNS:
            return undo(f"horsies workflow pause ID{_EACH_RUN}")
        case OrderVerb.RETRY_RUNS:
            return f" To stop it: horsies workflow pause ID{_EACH_RUN}"
        case _:
            return _FINAL


def _undo_cancel(order: Order) -> str:
    if len(order.ids) > IDS_MAX:
        return cannot_undo("horsies retry ID", "one of them")
    if order.ids:
        return cannot_undo(shlex.join(["horsies", "retry", *order.ids]), "them")
    tasks = order.tasks or TaskFilters()
    if order.oldest is None or order.newest is None or _is_narrow(tasks):
        return cannot_undo("horsies retry ID", "one of them")
    words = ["horsies", "retry", "--status", "CANCELLED"]
    for option, values in (("--queue", tasks.queues), ("--name", tasks.names)):
        words += [word for value in values for word in (option, value)]
    words += _sent_between(order.oldest, order.newest)
    return cannot_undo(shlex.join(words), "all cancelled tasks of that time")


def _is_narrow(tasks: TaskFilters) -> bool:
    """Return whether the order's filters would no longer find its tasks, because the tasks are cancelled
    now.
    """
    return bool(
        tasks.error_codes
        or tasks.workers
        or tasks.retried_only
        or tasks.search is not None
        or tasks.fingerprint is not None
    )


def _sent_between(oldest: str, newest: str) -> list[str]:
    """Return the options for tasks sent between the milliseconds of two ids, both included. The times
    are in the middle of a millisecond, so that rounding does not change the millisecond.
    """
    since, until = sent_time(oldest) + _MILLISECOND / 2, sent_time(newest) + _MILLISECOND * 1.5
    return ["--since", f"{since:{_FORM}}", "--until", f"{until:{_FORM}}"]
