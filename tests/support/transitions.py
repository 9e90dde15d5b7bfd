"""The state machine of task rows as data.

Every verb is one guarded SQL statement. Tests compare the guards with this table, and the documentation
is generated from the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from horsies.states import TaskStatus

TaskVerb: TypeAlias = Literal[
    "claim_and_start",
    "claim",
    "start",
    "complete",
    "fail",
    "retry",
    "park",
    "release",
    "expire",
    "cancel",
]


@dataclass(frozen=True, slots=True)
class Transition:
    """One verb: the statuses to which it applies and the resulting status."""

    verb: TaskVerb
    from_statuses: frozenset[TaskStatus]
    to_status: TaskStatus


_PENDING = frozenset({TaskStatus.PENDING})
_CLAIMED = frozenset({TaskStatus.CLAIMED})
_RUNNING = frozenset({TaskStatus.RUNNING})

# A claimed task goes straight to an idle child, so claim and start are one verb; CLAIMED is the status
# of tasks prefetched ahead of a free child. Release returns tasks that no child received: such a
# row may be RUNNING although no user code ran. Cancelling a RUNNING task takes two steps: the
# request, and the outcome that the worker records. A crash has no verb of its own: it leads to fail
# or retry like any other failed attempt.
TASK_TRANSITIONS: tuple[Transition, ...] = (
    Transition("claim_and_start", _PENDING, TaskStatus.RUNNING),
    Transition("claim", _PENDING, TaskStatus.CLAIMED),
    Transition("start", _CLAIMED, TaskStatus.RUNNING),
    Transition("complete", _RUNNING, TaskStatus.COMPLETED),
    Transition("fail", _RUNNING, TaskStatus.FAILED),
    Transition("retry", _RUNNING, TaskStatus.PENDING),
    Transition("park", _RUNNING, TaskStatus.PENDING),
    Transition("release", _CLAIMED | _RUNNING, TaskStatus.PENDING),
    Transition("expire", _PENDING, TaskStatus.EXPIRED),
    Transition("cancel", _PENDING | _CLAIMED | _RUNNING, TaskStatus.CANCELLED),
)

_BY_VERB: dict[TaskVerb, Transition] = {item.verb: item for item in TASK_TRANSITIONS}


def allowed(verb: TaskVerb, status: TaskStatus) -> TaskStatus | None:
    """Return the resulting status of the verb, or None if the verb does not apply."""
    transition = _BY_VERB[verb]
    return transition.to_status if status in transition.from_statuses else None
