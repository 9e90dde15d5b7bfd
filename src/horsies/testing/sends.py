"""capture_sends: record an application's sends, without a worker or a database."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Any, NoReturn, overload

from horsies.app import Horsies
from horsies.db.statements.tasks import InsertTask
from horsies.task import AnyTask
from horsies.tasks.options import Uniqueness
from horsies.testing.broker import (
    InMemoryBroker,
    NoDatabaseError,
    Stored,
    in_place_of_broker,
    key_of,
)


@dataclass(frozen=True)
class CapturedSend:
    """A send in the form that a worker would receive: its arguments were encoded and decoded. The
    options have the names of ``with_options``; ``delay`` also has the delay of ``schedule``.
    """

    task: str
    """The name of the task."""
    args: tuple[Any, ...]
    """The positional arguments."""
    kwargs: Mapping[str, Any]
    """The keyword arguments."""
    task_id: str
    """The task id, which the handle also has."""
    queue_name: str
    """The queue of the send or, by default, of the task."""
    priority: int
    """The priority of the send or, by default, of the queue."""
    at: datetime | None = None
    """When the task becomes claimable, if the send set a time."""
    delay: timedelta | None = None
    """How long the task waits, from `delay` or `schedule`."""
    good_until: datetime | None = None
    """The latest time at which the task may start."""
    timeout_ms: int | None = None
    """The time limit of the send or, by default, of the task."""
    retention: timedelta | None = None
    """How long the row is kept after the task has ended, if the send set this."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """The headers, including headers set by hooks."""
    idempotency_key: str | None = None
    """The idempotency key."""
    unique: Uniqueness = "forever"
    """How long the idempotency key stays reserved."""
    transaction: object = None
    """The connection or session passed to the send."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """All arguments by parameter name, including arguments passed by position."""

    def __repr__(self) -> str:
        values = [
            *map(repr, self.args),
            *(f"{name}={value!r}" for name, value in self.kwargs.items()),
        ]
        return f"{self.task}({', '.join(values)}) [{self._options()}]"

    def _options(self) -> str:
        """Return the queue, the priority, and every option that was set."""
        given = {one.name: getattr(self, one.name) for one in fields(self)[4:-1]}
        always = ("queue_name", "priority")
        shown = {
            name: value
            for name, value in given.items()
            if name in always or value not in (None, {}, "forever")
        }
        return ", ".join(f"{name}={value!r}" for name, value in shown.items())


@dataclass(frozen=True)
class CapturedStart:
    """The start of a workflow run; ``nodes`` are its tasks by node id, with their encoded arguments."""

    workflow: str
    """The name of the workflow."""
    workflow_id: str
    """The id that the handle has."""
    workflow_key: str | None
    """The key of the run, if the caller set one."""
    definition_key: str | None
    """The identity of the workflow across deployments."""
    nodes: Mapping[str, str]
    """The name of each node's task, by node id."""
    transaction: object = None
    """The connection or session that was passed."""


class CapturedSends(Sequence[CapturedSend]):
    """The captured sends in order; ``workflows`` has the captured workflow starts."""

    name = "capture_sends"

    def __init__(self, app: Horsies) -> None:
        self._app = app
        self._sends: list[CapturedSend] = []
        self.workflows: list[CapturedStart] = []

    @overload
    def __getitem__(self, index: int) -> CapturedSend: ...
    @overload
    def __getitem__(self, index: slice) -> list[CapturedSend]: ...
    def __getitem__(self, index: int | slice) -> CapturedSend | list[CapturedSend]:
        return self._sends[index]

    def __len__(self) -> int:
        return len(self._sends)

    def __repr__(self) -> str:
        lines = [*map(repr, self._sends), *map(repr, self.workflows)]
        return "".join(["captured sends:", *(f"\n  {line}" for line in lines or ["none"])])

    def of(self, task: AnyTask | str) -> list[CapturedSend]:
        """Return the sends of one task, identified by its function or its name."""
        task_name = task if isinstance(task, str) else task.task_name
        return [one for one in self._sends if one.task == task_name]

    def clear(self) -> None:
        """Delete all captured sends and starts."""
        self._sends.clear()
        self.workflows.clear()

    def take(self, stored: Stored) -> None:
        """Record the requests of one operation."""
        for row in stored.tasks:
            self._sends.append(_captured(self._app, row, stored.transaction))
        self.workflows += [_captured_start(run, stored.transaction) for run in stored.runs]

    async def take_async(self, stored: Stored) -> None:
        """``take``."""
        self.take(stored)

    def end_of(self, task_id: str) -> NoReturn:
        """Reject a wait, because captured tasks never run."""
        raise NoDatabaseError(
            f"{task_id} was captured by capture_sends and never runs; use run_inline or run_pending."
        )


@contextmanager
def capture_sends(app: Horsies) -> Iterator[CapturedSends]:
    """Record all sends and workflow starts instead of storing them; no database is needed.

    Sends are checked and encoded as usual and return handles. A handle's ``get`` returns
    immediately with the error BROKER_ERROR, whose message names capture_sends.

    Example:
        with capture_sends(app) as sent:
            place_order(7)
        assert sent[0].task == "confirm" and sent[0].args == (7,)
    """
    captured = CapturedSends(app)
    with in_place_of_broker(app, InMemoryBroker(captured, takes_runs=True)):
        yield captured


def _captured(app: Horsies, row: InsertTask, transaction: object) -> CapturedSend:
    args, kwargs, arguments = _call_of(app, row)
    options = json.loads(row.task_options)
    return CapturedSend(
        row.task_name,
        args,
        kwargs,
        row.id,
        row.queue_name,
        row.priority,
        row.enqueue_at,
        timedelta(seconds=row.delay_seconds) if row.delay_seconds else None,
        row.good_until,
        row.timeout_ms,
        None if row.retention_seconds is None else timedelta(seconds=row.retention_seconds),
        options.get("headers") or {},
        key_of(row),
        _uniqueness(row),
        transaction,
        arguments,
    )


def _uniqueness(row: InsertTask) -> Uniqueness:
    if row.unique_while is None:
        return "forever"
    return "while_open" if row.unique_while == "open" else "while_waiting"


def _call_of(
    app: Horsies, row: InsertTask
) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
    """Return the arguments in the form in which the function receives them; for an unknown task, return
    plain JSON values.
    """
    task = app.get_task(row.task_name)
    if task is None:
        kwargs = json.loads(row.kwargs)
        return tuple(json.loads(row.args)), kwargs, kwargs
    signature = task.definition.signature
    call = signature.decode_call(row.args, row.kwargs).unwrap()
    kwargs = {name: value for name, value in call.kwargs.items() if name not in signature.injected}
    bound = _parameters(task.definition.function).bind_partial(*call.args, **kwargs)
    return call.args, kwargs, dict(bound.arguments)


@functools.lru_cache(maxsize=32)
def _parameters(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _captured_start(run: Mapping[str, Any], transaction: object) -> CapturedStart:
    nodes = {node["node_id"]: node["task_name"] for node in run["nodes"]}
    return CapturedStart(
        run["name"], run["id"], run["workflow_key"], run["definition_key"], nodes, transaction
    )
