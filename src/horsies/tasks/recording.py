"""Records the changes that people make to queues, tasks, runs and schedules, with their authors and outcomes.
A row in ``horsies_actions`` is written in the change's own transaction, even for a refused change. After the
COMMIT, a line is written to the logger ``horsies.audit``. Rows and lines contain no task arguments or
results.
"""

from __future__ import annotations

import getpass
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Generic, Literal, NamedTuple, TypeAlias, TypeVar

from horsies.db.statement import Script
from horsies.modules import Deferred
from horsies.result import Err, Ok, Result
from horsies.tasks.broker import BrokerErrorCode, BrokerResult, PostgresBroker

if TYPE_CHECKING:
    from horsies import task_result
    from horsies.db.statements import actions
else:
    task_result = Deferred("horsies.task_result")
    actions = Deferred("horsies.db.statements.actions")

T = TypeVar("T")
E = TypeVar("E")

Source: TypeAlias = Literal["web", "cli", "program"]

# The lengths of the columns. The column of the reason has no limit, but longer reasons are not useful.
_NAME_MAX = 255
_DETAIL_MAX = 2_000

audit = logging.getLogger("horsies.audit")


class Actor(NamedTuple):
    """The author of a change: a dashboard user, a command-line user, or a program."""

    name: str
    source: Source = "program"

    @property
    def stored_name(self) -> str:
        """The name as stored in the column ``actor``."""
        return task_result.storable_text(self.name)[:_NAME_MAX]


class Action(NamedTuple):
    """A change to record: a verb, its subject such as ``queue mail``, and the author's reason."""

    verb: str
    subject: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Switched(Generic[T]):
    """The state after a change, whether the call changed anything, and a description of the change for
    its record.
    """

    state: T
    is_changed: bool
    detail: str | None = None


_actor: ContextVar[Actor | None] = ContextVar("horsies_actor", default=None)


@contextmanager
def acting_as(name: str, source: Source = "program") -> Iterator[None]:
    """Record the changes that are made inside the with block under this name.

    Outside such a block, a change is recorded under the process's operating-system user and host.

    Example:
        with acting_as("anna"):
            app.pause_queue("mail", reason="the provider is down").unwrap()
    """
    token = _actor.set(Actor(name, source))
    try:
        yield
    finally:
        _actor.reset(token)


def current_actor() -> Actor:
    """Return the author set by ``acting_as`` or, without one, the user of this process."""
    return _actor.get() or Actor(process_user())


@cache
def process_user() -> str:
    """Return user@host; in a container, the user may be a number without a name."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = f"uid-{os.getuid()}"
    return f"{user}@{socket.gethostname()}"


def perform_action(
    broker: PostgresBroker, code: BrokerErrorCode, action: Action, script: Script[Result[T, E]]
) -> BrokerResult[Result[T, E]]:
    """Run the script of a change and record the change, in one transaction."""
    recorded = _Recorded(action, current_actor())
    done = broker.perform(code, recorded.script(script), atomic=True)
    recorded.log(done)
    return done


async def perform_action_async(
    broker: PostgresBroker, code: BrokerErrorCode, action: Action, script: Script[Result[T, E]]
) -> BrokerResult[Result[T, E]]:
    recorded = _Recorded(action, current_actor())
    done = await broker.perform_async(code, recorded.script(script), atomic=True)
    recorded.log(done)
    return done


class Columns(NamedTuple):
    """Return the columns of a recorded change, with texts truncated to the column lengths."""

    actor: str
    source: str
    verb: str
    subject: str
    detail: str | None

    @classmethod
    def of(cls, action: Action, actor: Actor, detail: str | None) -> Columns:
        return cls(
            actor.stored_name,
            actor.source,
            action.verb,
            task_result.storable_text(action.subject)[:_NAME_MAX],
            None if detail is None else task_result.storable_text(detail)[:_DETAIL_MAX],
        )


def log_action(action: Action, actor: Actor, outcome: str, detail: str | None) -> None:
    """Log a change on one line; control characters in its texts are escaped."""
    line = f"{actor.name} ({actor.source}): {action.verb} {action.subject}: {outcome}"
    line += f", {detail}" if detail else ""
    audit.info("%s", "".join(one if one.isprintable() else ascii(one)[1:-1] for one in line))


class _Recorded:
    """One change of a person: it is recorded inside the transaction, and logged afterwards."""

    def __init__(self, action: Action, actor: Actor) -> None:
        if not isinstance(action.reason, str | None):
            kind = type(action.reason).__name__
            raise TypeError(f"{action.verb}: reason= takes a text or None, not {kind}")
        self._action = action
        self._actor = actor
        self._outcome = ""
        self._detail: str | None = None

    def script(self, script: Script[Result[T, E]]) -> Script[Result[T, E]]:
        answer = yield from script
        self._outcome, self._detail = _outcome(answer, self._action.reason)
        columns = Columns.of(self._action, self._actor, self._detail)
        yield actions.record_action(*columns, self._outcome)
        return answer

    def log(self, done: BrokerResult[object]) -> None:
        if isinstance(done, Err):
            log_action(self._action, self._actor, "failed", done.err_value.message)
        else:
            log_action(self._action, self._actor, self._outcome, self._detail)


def _outcome(answer: Result[T, E], reason: str | None) -> tuple[str, str | None]:
    """Return the outcome to record, and the author's reason or the sentence that explains the refusal."""
    match answer:
        case Ok(Switched(is_changed=True, detail=str(words))):
            return "done", f"{words}: {reason}" if reason else words
        case Ok(False) | Ok(Switched(is_changed=False)):
            return "unchanged", reason
        case Ok(_):
            return "done", reason
        case Err(refusal):
            return "refused", getattr(refusal, "message", str(refusal))
