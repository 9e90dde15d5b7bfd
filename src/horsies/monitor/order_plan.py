"""Bulk order plans: an order's verb, filters and bounds, as values and as text. ``orders.py`` executes
them in the database.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, NamedTuple, TypeAlias

from pydantic import TypeAdapter

from horsies.ids import new_id, stored_form
from horsies.monitor.queries import RunFilters, TaskFilters
from horsies.result import Err, Ok
from horsies.states import TaskStatus, WorkflowStatus
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError, BrokerResult

ORDER_MAX = 10_000
# The `limit` of orders without a list of ids, practically unlimited.
ENDLESS = 2**31 - 1
# The number of rows that a dry run reads per page.
PAGE = 1_000

Counts: TypeAlias = Mapping[str, int]


class OrderVerb(StrEnum):
    """The change that an order makes to every task or run."""

    RETRY_TASKS = "retry_tasks"
    CANCEL_TASKS = "cancel_tasks"
    PURGE_QUEUE = "purge_queue"
    DELETE_TASKS = "delete_tasks"
    REDACT_TASKS = "redact_tasks"
    RETRY_RUNS = "retry_runs"
    RESUME_RUNS = "resume_runs"
    PAUSE_RUNS = "pause_runs"
    CANCEL_RUNS = "cancel_runs"

    @property
    def is_of_runs(self) -> bool:
        return self.value.endswith("_runs")

    @property
    def erases(self) -> bool:
        """Whether the order removes data permanently."""
        return self in (OrderVerb.DELETE_TASKS, OrderVerb.REDACT_TASKS)


_ENDED = (TaskStatus.FAILED, TaskStatus.CANCELLED, TaskStatus.EXPIRED, TaskStatus.COMPLETED)
_OPEN = (TaskStatus.PENDING, TaskStatus.CLAIMED, TaskStatus.RUNNING)
_OPEN_RUNS = (WorkflowStatus.PENDING, WorkflowStatus.RUNNING, WorkflowStatus.PAUSED)

Statuses: TypeAlias = Sequence[TaskStatus | WorkflowStatus]


class Scope(NamedTuple):
    """The statuses to which a verb applies, and the statuses that it selects without a status filter."""

    default: Statuses
    allowed: Statuses


SCOPES: Mapping[OrderVerb, Scope] = {
    OrderVerb.RETRY_TASKS: Scope((TaskStatus.FAILED,), _ENDED),
    OrderVerb.CANCEL_TASKS: Scope(_OPEN, _OPEN),
    OrderVerb.PURGE_QUEUE: Scope(_OPEN[:2], _OPEN[:2]),
    OrderVerb.DELETE_TASKS: Scope(_ENDED, _ENDED),
    OrderVerb.REDACT_TASKS: Scope(_ENDED, _ENDED),
    OrderVerb.RETRY_RUNS: Scope((WorkflowStatus.FAILED,), (WorkflowStatus.FAILED,)),
    OrderVerb.RESUME_RUNS: Scope((WorkflowStatus.PAUSED,), (WorkflowStatus.PAUSED,)),
    OrderVerb.PAUSE_RUNS: Scope((WorkflowStatus.RUNNING,), (WorkflowStatus.RUNNING,)),
    OrderVerb.CANCEL_RUNS: Scope(_OPEN_RUNS, _OPEN_RUNS),
}


class Wording(NamedTuple):
    """A verb's wording: its title, the confirmation question, and the state of a task or run after the
    change.
    """

    title: str
    question: str
    done: str


WORDS: Mapping[OrderVerb, Wording] = {
    OrderVerb.RETRY_TASKS: Wording("Send again", "Send {} again?", "sent again"),
    OrderVerb.CANCEL_TASKS: Wording("Cancel", "Cancel {}?", "cancelled"),
    OrderVerb.PURGE_QUEUE: Wording("Purge", "Cancel {}?", "cancelled"),
    OrderVerb.DELETE_TASKS: Wording("Delete", "Delete {} permanently?", "deleted"),
    OrderVerb.REDACT_TASKS: Wording("Redact", "Redact {} permanently?", "redacted"),
    OrderVerb.RETRY_RUNS: Wording("Retry", "Retry {}?", "retried"),
    OrderVerb.RESUME_RUNS: Wording("Resume", "Resume {}?", "resumed"),
    OrderVerb.PAUSE_RUNS: Wording("Pause", "Pause {}?", "paused"),
    OrderVerb.CANCEL_RUNS: Wording("Cancel", "Cancel {}?", "cancelled"),
}


@dataclass(frozen=True, slots=True)
class Order:
    """A verb, the tasks or runs it applies to, and the bounds that a dry run has fixed.

    ``newest`` is the cursor at which the batches begin, and ``oldest`` is the cursor of the last row.
    Tasks may also be named by id.
    """

    id: str
    verb: OrderVerb
    tasks: TaskFilters | None = None
    runs: RunFilters | None = None
    ids: tuple[str, ...] = ()
    include_running: bool = True
    reason: str | None = None
    # Whether to skip tasks that have already been retried.
    once: bool = True
    at: datetime | None = None
    newest: str | None = None
    oldest: str | None = None
    matching: int = 0
    # How the ids of an order were found, without the searched value.
    found_by: str | None = None
    # The most rows.
    limit: int = ORDER_MAX

    @property
    def subject(self) -> str:
        """Describe the tasks or runs, as in ``tasks FAILED on mail, CARD_REFUSED``."""
        if self.tasks is not None and self.verb is OrderVerb.PURGE_QUEUE:
            return f"queue {', '.join(self.tasks.queues)}"
        if self.ids and self.verb.erases:
            found = f" found by {self.found_by}" if self.found_by else ""
            return f"{len(self.ids):,} tasks and runs{found}"
        if self.ids:
            return f"{len(self.ids):,} selected tasks"
        return " ".join(_filter_words(self.tasks or self.runs or TaskFilters()))

    @property
    def words(self) -> Wording:
        return WORDS[self.verb]

    def counted(self, count: int) -> str:
        """Return the number of tasks or runs with their noun, as in ``12 tasks``."""
        noun = "run" if self.verb.is_of_runs else "task or run" if self.found_by else "task"
        plural = "tasks and runs" if self.found_by else f"{noun}s"
        return f"{count:,} {noun if count == 1 else plural}"


@dataclass(frozen=True, slots=True)
class Preview:
    """The result of a dry run. ``has_more`` means that older rows match as well."""

    order: Order
    matching: int
    eligible: int
    refused: Counts
    newest_at: datetime | None
    oldest_at: datetime | None
    has_more: bool
    newest_id: str | None = None

    @property
    def summary(self) -> str:
        possible = f"{self.eligible:,} can be {self.order.words.done}"
        return f"{self.matching:,} matching, {possible}{_refused_words(self.refused)}."

    def document(self) -> dict[str, Any]:
        """Return the dry run as JSON values for the command line and the JSON API."""
        return {
            "order_id": self.order.id,
            "verb": self.order.verb.value,
            "subject": self.order.subject,
            "matching": self.matching,
            "eligible": self.eligible,
            "refused": dict(self.refused),
            "newest_id": self.newest_id,
            "newest_at": self.newest_at,
            "oldest_at": self.oldest_at,
            "has_more": self.has_more,
        }


def merged(previews: Sequence[Preview]) -> Preview:
    """Combine the dry runs of several orders that belong together."""
    first, *others = previews
    if not others:
        return first
    refused: Counter[str] = Counter()
    for one in previews:
        refused.update(one.refused)
    return replace(
        first,
        matching=sum(one.matching for one in previews),
        eligible=sum(one.eligible for one in previews),
        refused=dict(refused),
        oldest_at=previews[-1].oldest_at,
    )


@dataclass(frozen=True, slots=True)
class Progress:
    """An order's progress: the position of its next batch, and the counts so far."""

    cursor: str | None = None
    done: int = 0
    refused: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class OrderState:
    """A stored order; its outcome is ``draft``, ``running``, ``stopping``, ``stopped`` or ``done``."""

    order: Order
    outcome: str
    progress: Progress
    actor: str
    at: datetime

    @property
    def is_open(self) -> bool:
        return self.outcome in ("running", "stopping")

    def document(self) -> dict[str, Any]:
        """Return the order as JSON values for the command line and the JSON API."""
        return {
            "order_id": self.order.id,
            "verb": self.order.verb.value,
            "subject": self.order.subject,
            "outcome": self.outcome,
            "matching": self.order.matching,
            "done": self.progress.done,
            "refused": self.progress.refused,
            "actor": self.actor,
            "at": self.at,
        }

    @property
    def seen(self) -> int:
        """Return the number of rows that the batches so far have changed or rejected."""
        return self.progress.done + sum(self.progress.refused.values())

    @property
    def summary(self) -> str:
        words = f"{self.progress.done:,} of {self.order.matching:,} changed"
        return f"{words}{_refused_words(self.progress.refused)}."


def _refused_words(refused: Counts) -> str:
    if not refused:
        return ""
    reasons = ", ".join(f"{count:,} {reason}" for reason, count in refused.items())
    return f", {sum(refused.values()):,} refused: {reasons}"


# The progress text of an order before its first batch.
NO_PROGRESS = "{}"

_ORDERS = TypeAdapter(Order)
_PROGRESS = TypeAdapter(Progress)


def order_text(order: Order) -> str:
    """Return an order as JSON text for the database."""
    return _ORDERS.dump_json(order).decode()


def read_order_text(text: str) -> Order:
    """Parse the text that ``order_text`` returned."""
    return _ORDERS.validate_json(text)


def progress_text(progress: Progress) -> str:
    """Return an order's progress as JSON text for the database."""
    return _PROGRESS.dump_json(progress).decode()


def read_progress_text(text: str) -> Progress:
    """Parse the text that ``progress_text`` returned."""
    return _PROGRESS.validate_json(text)


def draft_order(
    verb: OrderVerb,
    filters: TaskFilters | RunFilters,
    *,
    ids: Iterable[str] = (),
    include_running: bool = True,
    reason: str | None = None,
    order_id: str | None = None,
    found_by: str | None = None,
    limit: int = ORDER_MAX,
) -> BrokerResult[Order]:
    """Check an order's status filter before the dry run."""
    scope = SCOPES[verb]
    wrong = [status.value for status in filters.statuses if status not in scope.allowed]
    if wrong:
        known = ", ".join(status.value for status in scope.allowed)
        subject = f"An order to {verb.value.replace('_', ' ')}"
        message = f"{subject} applies to the statuses {known}, not to {', '.join(wrong)}."
        return Err(BrokerOperationError(BrokerErrorCode.INVALID_QUERY, message))
    named = tuple(dict.fromkeys(stored_form(one) or one for one in ids))
    if named and verb.is_of_runs:
        message = f"{verb.value} applies to runs by filters; ids are those of tasks."
        return Err(BrokerOperationError(BrokerErrorCode.INVALID_QUERY, message))
    if len(named) > ORDER_MAX:
        message = f"An order takes at most {ORDER_MAX:,} tasks, not {len(named):,}."
        return Err(BrokerOperationError(BrokerErrorCode.INVALID_QUERY, message))
    statuses = filters.statuses or scope.default
    running = include_running and verb is not OrderVerb.PURGE_QUEUE
    order = Order(
        order_id or new_id(),
        verb,
        ids=named,
        include_running=running,
        reason=reason,
        found_by=found_by,
        limit=limit,
    )
    if isinstance(filters, TaskFilters):
        chosen = [TaskStatus(status) for status in statuses]
        return Ok(replace(order, tasks=replace(filters, statuses=chosen, limit=PAGE, after=None)))
    runs = [WorkflowStatus(status) for status in statuses]
    return Ok(replace(order, runs=replace(filters, statuses=runs, limit=PAGE, after=None)))


def _filter_words(filters: TaskFilters | RunFilters) -> Iterable[str]:
    is_of_tasks = isinstance(filters, TaskFilters)
    yield "tasks" if is_of_tasks else "runs"
    yield "/".join(status.value for status in filters.statuses)
    if filters.names:
        yield f"named {'/'.join(filters.names)}"
    if isinstance(filters, TaskFilters):
        if filters.queues:
            yield f"on {'/'.join(filters.queues)}"
        if filters.error_codes:
            yield f"with {'/'.join(filters.error_codes)}"
        if filters.fingerprint:
            yield f"with fingerprint {filters.fingerprint}"
    if filters.since:
        yield f"since {filters.since.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
    if filters.until:
        yield f"until {filters.until.astimezone(UTC):%Y-%m-%d %H:%M:%S}"
