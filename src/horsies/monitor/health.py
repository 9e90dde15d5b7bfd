"""Health: is the database there, do the workers answer, how are they.

Beside the line producer -> SQL -> turn -> child -> report -> result. A ping goes through the same
LISTEN connection and the same loop as a worker's work, so an answer proves both. Everything returns
a value; nothing here changes a task.
"""

from __future__ import annotations

import asyncio
import functools
import json
import selectors
import time
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from horsies.db.listen import Listener
from horsies.db.statement import Script, one_or_none
from horsies.db.statements.monitor import (
    Nothing,
    WorkerStateHistory,
    WorkerStateRow,
    newest_worker_states,
    read_server,
    worker_state_history,
)
from horsies.db.statements.workers import Notification, send_notification
from horsies.ids import new_id
from horsies.result import Err, Ok
from horsies.tasks.broker import (
    BrokerErrorCode,
    BrokerOperationError,
    BrokerResult,
    PostgresBroker,
    failure,
)

PING_CHANNEL = "horsies_worker_ping"
PONG_CHANNEL_PREFIX = "horsies_worker_pong_"
PING_TIMEOUT_SECONDS = 2.0

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class DatabasePing:
    """The database answered: how fast, and which server it is."""

    latency_ms: float
    server_version: str


@dataclass(frozen=True, slots=True)
class WorkerPong:
    """A worker answered a ping; ``latency_ms`` is the way there and back."""

    worker_id: str
    hostname: str
    pid: int
    latency_ms: float


@dataclass(frozen=True, slots=True)
class WorkerStateSnapshot:
    """How a worker was at one moment, in its own words.

    ``memory_usage_mb`` is the parent process alone, ``children_memory_mb`` all its children together.
    Without ``hears`` no notifications reached the worker: it lived on polling.
    """

    id: int
    worker_id: str
    snapshot_at: datetime
    hostname: str
    pid: int
    processes: int
    queues: list[str]
    tasks_running: int
    tasks_claimed: int
    memory_usage_mb: float | None
    cpu_percent: float | None
    memory_percent: float | None
    children_memory_mb: float | None
    max_claim_batch: int
    max_claim_per_worker: int
    cluster_wide_cap: int | None
    queue_priorities: dict[str, Any] | None
    queue_max_concurrency: dict[str, Any] | None
    recovery_config: dict[str, Any] | None
    hears: bool
    worker_started_at: datetime


def ping_database(broker: PostgresBroker) -> BrokerResult[DatabasePing]:
    """Ask the server for its version; needs no table of ours."""
    try:
        with broker.database.connection() as connection:
            started = time.perf_counter()
            (server,) = read_server.run(connection, Nothing())
            return Ok(DatabasePing(_milliseconds_since(started), server.server_version))
    except Exception as error:
        return Err(failure(BrokerErrorCode.DB_PING_FAILED, error))


async def ping_database_async(broker: PostgresBroker) -> BrokerResult[DatabasePing]:
    """The same without blocking the event loop."""
    try:
        async with broker.database.connection_async() as connection:
            started = time.perf_counter()
            (server,) = await read_server.run_async(connection, Nothing())
            return Ok(DatabasePing(_milliseconds_since(started), server.server_version))
    except Exception as error:
        return Err(failure(BrokerErrorCode.DB_PING_FAILED, error))


def ping_workers(
    broker: PostgresBroker,
    target_worker_id: str | None = None,
    timeout_seconds: float = PING_TIMEOUT_SECONDS,
    min_responses: int | None = None,
) -> BrokerResult[list[WorkerPong]]:
    """Call all workers, or one, and return the answers in the order they came.

    Ends when the target has answered, when ``min_responses`` have, or when the time is up; that
    nobody answered is an empty list.
    """
    if problem := _ping_problem(timeout_seconds, min_responses):
        return Err(BrokerOperationError(BrokerErrorCode.WORKER_PING_FAILED, problem))
    call = _Call(target_worker_id, min_responses)
    connect = functools.partial(broker.database.connect, "ping", session=True)
    listener = Listener(connect, (call.reply_channel,))
    try:
        listener.open()
        call.send(listener)
        call.collect(listener, timeout_seconds)
    except Exception as error:
        return Err(failure(BrokerErrorCode.WORKER_PING_FAILED, error))
    finally:
        listener.close()
    return Ok(list(call.pongs.values()))


async def ping_workers_async(
    broker: PostgresBroker,
    target_worker_id: str | None = None,
    timeout_seconds: float = PING_TIMEOUT_SECONDS,
    min_responses: int | None = None,
) -> BrokerResult[list[WorkerPong]]:
    """The same without blocking the event loop."""
    return await asyncio.to_thread(
        ping_workers, broker, target_worker_id, timeout_seconds, min_responses
    )


def _ping_problem(timeout_seconds: float, min_responses: int | None) -> str | None:
    if not 0 < timeout_seconds <= 3600:
        return f"timeout_seconds must be above 0 and at most 3600, not {timeout_seconds!r}."
    if min_responses is not None and min_responses < 1:
        return f"min_responses must be at least 1 or None, not {min_responses!r}."
    return None


@dataclass(slots=True)
class _Call:
    """One call to the workers, and the answers to it."""

    target_worker_id: str | None
    min_responses: int | None
    correlation_id: str = field(default_factory=new_id)
    pongs: dict[str, WorkerPong] = field(default_factory=dict)
    called_at: float = 0.0

    @property
    def reply_channel(self) -> str:
        return PONG_CHANNEL_PREFIX + self.correlation_id.replace("-", "")

    def send(self, listener: Listener) -> None:
        question = {"correlation_id": self.correlation_id, "reply_channel": self.reply_channel}
        if self.target_worker_id is not None:
            question["target_worker_id"] = self.target_worker_id
        assert listener.connection is not None
        self.called_at = time.perf_counter()
        send_notification.run(listener.connection, Notification(PING_CHANNEL, json.dumps(question)))

    def collect(self, listener: Listener, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._is_complete():
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                return
            if not listener.has_heard():
                _wait_for_input(listener.fileno(), remaining)
            for _, payload in listener.receive().notifications:
                self._take(payload)
            if listener.failure is not None:
                raise listener.failure

    def _is_complete(self) -> bool:
        if self.target_worker_id is not None:
            return bool(self.pongs)
        return self.min_responses is not None and len(self.pongs) >= self.min_responses

    def _take(self, payload: str) -> None:
        pong = read_pong(payload, self.correlation_id, _milliseconds_since(self.called_at))
        if pong is None or self.target_worker_id not in (None, pong.worker_id):
            return
        self.pongs.setdefault(pong.worker_id, pong)


def _wait_for_input(socket_number: int, seconds: float) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(socket_number, selectors.EVENT_READ)
        selector.select(seconds)


def read_pong(payload: str, correlation_id: str, latency_ms: float) -> WorkerPong | None:
    """Read an answer; anybody may write to the channel, so what does not fit is no answer."""
    try:
        answer = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict) or answer.get("correlation_id") != correlation_id:
        return None
    match answer:
        case {"worker_id": str(worker_id), "hostname": str(hostname), "pid": int(pid)}:
            return WorkerPong(worker_id, hostname, pid, latency_ms)
        case _:
            return None


def list_worker_states(broker: PostgresBroker) -> BrokerResult[list[WorkerStateSnapshot]]:
    """Return the newest snapshot of every worker on record, the most recent first."""
    return broker.perform(_READING, _newest_states())


async def list_worker_states_async(
    broker: PostgresBroker,
) -> BrokerResult[list[WorkerStateSnapshot]]:
    """The same without blocking the event loop."""
    return await broker.perform_async(_READING, _newest_states())


def get_worker_state(
    broker: PostgresBroker, worker_id: str
) -> BrokerResult[WorkerStateSnapshot | None]:
    """Return the newest snapshot of one worker, or None when it left none."""
    return broker.perform(_READING, _newest_state(worker_id))


async def get_worker_state_async(
    broker: PostgresBroker, worker_id: str
) -> BrokerResult[WorkerStateSnapshot | None]:
    """The same without blocking the event loop."""
    return await broker.perform_async(_READING, _newest_state(worker_id))


def get_worker_state_history(
    broker: PostgresBroker, worker_id: str, limit: int | None = None
) -> BrokerResult[list[WorkerStateSnapshot]]:
    """Return the snapshots of one worker, newest first; all of them without a limit."""
    if problem := _limit_problem(limit):
        return Err(BrokerOperationError(_READING, problem))
    return broker.perform(_READING, _state_history(worker_id, limit))


async def get_worker_state_history_async(
    broker: PostgresBroker, worker_id: str, limit: int | None = None
) -> BrokerResult[list[WorkerStateSnapshot]]:
    """The same without blocking the event loop."""
    if problem := _limit_problem(limit):
        return Err(BrokerOperationError(_READING, problem))
    return await broker.perform_async(_READING, _state_history(worker_id, limit))


def _limit_problem(limit: int | None) -> str | None:
    if limit is None or limit >= 1:
        return None
    return f"limit must be at least 1 or None, not {limit!r}."


def _newest_states() -> Script[list[WorkerStateSnapshot]]:
    rows = yield newest_worker_states, Nothing()
    return [snapshot_of(row) for row in rows]


def _newest_state(worker_id: str) -> Script[WorkerStateSnapshot | None]:
    row = one_or_none((yield worker_state_history, WorkerStateHistory(worker_id, 1)))
    return None if row is None else snapshot_of(row)


def _state_history(worker_id: str, limit: int | None) -> Script[list[WorkerStateSnapshot]]:
    rows = yield worker_state_history, WorkerStateHistory(worker_id, limit)
    return [snapshot_of(row) for row in rows]


def snapshot_of(row: WorkerStateRow) -> WorkerStateSnapshot:
    """Turn a stored snapshot into the one programs get: JSON columns read, arrays as lists."""
    values = row._asdict()
    for name in ("queue_priorities", "queue_max_concurrency", "recovery_config"):
        values[name] = None if values[name] is None else json.loads(values[name])
    return WorkerStateSnapshot(**{**values, "queues": list(row.queues)})


def _milliseconds_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
