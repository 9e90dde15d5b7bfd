"""Health checks: ping the database, ping the workers, read workers' snapshots.

A ping goes through a worker's LISTEN connection and main loop, so a pong proves that both work. Errors
are returned as values, and no function changes a task.
"""

from __future__ import annotations

import asyncio
import functools
import json
import selectors
import time
from collections.abc import Collection
from dataclasses import dataclass, field

from horsies.db.listen import Listener
from horsies.db.statement import Script, read_rows, run_script, run_script_async
from horsies.db.statements.monitor import (
    WorkerStateSnapshot,
    newest_worker_states,
    read_server,
    worker_state_history,
)
from horsies.db.statements.queues import send_notification
from horsies.ids import new_id
from horsies.monitor.defaults import PING_TIMEOUT_SECONDS
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

_READING = BrokerErrorCode.MONITORING_QUERY_FAILED


@dataclass(frozen=True, slots=True)
class DatabasePing:
    """The round-trip time to the database, and the server's version."""

    latency_ms: float
    """The round-trip time."""
    server_version: str
    """The version of PostgreSQL."""


@dataclass(frozen=True, slots=True)
class WorkerPong:
    """A worker's reply to a ping; ``latency_ms`` is the round-trip time."""

    worker_id: str
    """The id of the worker that responded."""
    hostname: str
    """Its host."""
    pid: int
    """The process id of the worker's parent process."""
    latency_ms: float
    """The time until the response arrived."""


def ping_database(broker: PostgresBroker) -> BrokerResult[DatabasePing]:
    """Ask the server for its version; works without the horsies tables."""
    try:
        with broker.database.connection() as connection:
            return Ok(run_script(connection, _database_script()))
    except Exception as error:
        return Err(failure(BrokerErrorCode.DB_PING_FAILED, error))


async def ping_database_async(broker: PostgresBroker) -> BrokerResult[DatabasePing]:
    try:
        async with broker.database.connection_async() as connection:
            return Ok(await run_script_async(connection, _database_script()))
    except Exception as error:
        return Err(failure(BrokerErrorCode.DB_PING_FAILED, error))


def _database_script() -> Script[DatabasePing]:
    started = time.perf_counter()
    (server,) = yield read_server()
    return DatabasePing(_milliseconds_since(started), server.server_version)


def ping_workers(
    broker: PostgresBroker,
    target_worker_id: str | None = None,
    timeout_seconds: float = PING_TIMEOUT_SECONDS,
    min_responses: int | None = None,
    among: Collection[str] | None = None,
) -> BrokerResult[list[WorkerPong]]:
    """Ping all workers, or one, and return the pongs in order of arrival.

    Returns when the target or ``min_responses`` workers have replied, or after the timeout; the list is
    empty if no worker replied. With ``among``, only pongs from these worker ids count.
    """
    if problem := _ping_problem(timeout_seconds, min_responses):
        return Err(BrokerOperationError(BrokerErrorCode.WORKER_PING_FAILED, problem))
    ping = _Ping(target_worker_id, min_responses, among)
    connect = functools.partial(broker.database.connect, "ping", session=True)
    listener = Listener(connect, (ping.reply_channel,))
    try:
        listener.open()
        ping.send(listener)
        ping.collect(listener, timeout_seconds)
    except Exception as error:
        return Err(failure(BrokerErrorCode.WORKER_PING_FAILED, error))
    finally:
        listener.close()
    return Ok(list(ping.pongs.values()))


async def ping_workers_async(
    broker: PostgresBroker,
    target_worker_id: str | None = None,
    timeout_seconds: float = PING_TIMEOUT_SECONDS,
    min_responses: int | None = None,
) -> BrokerResult[list[WorkerPong]]:
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
class _Ping:
    """One ping to the workers, and the pongs so far."""

    target_worker_id: str | None
    min_responses: int | None
    among: Collection[str] | None = None
    correlation_id: str = field(default_factory=new_id)
    pongs: dict[str, WorkerPong] = field(default_factory=dict)
    sent_at: float = 0.0

    @property
    def reply_channel(self) -> str:
        return PONG_CHANNEL_PREFIX + self.correlation_id.replace("-", "")

    def send(self, listener: Listener) -> None:
        request = {"correlation_id": self.correlation_id, "reply_channel": self.reply_channel}
        if self.target_worker_id is not None:
            request["target_worker_id"] = self.target_worker_id
        assert listener.connection is not None
        self.sent_at = time.perf_counter()
        send_notification.fetch(listener.connection, PING_CHANNEL, json.dumps(request))

    def collect(self, listener: Listener, timeout_seconds: float) -> None:
        deadline = time.monotonic() + timeout_seconds
        while not self._is_complete() and (remaining := deadline - time.monotonic()) > 0:
            if not listener.has_notifications():
                with selectors.DefaultSelector() as selector:
                    selector.register(listener.fileno(), selectors.EVENT_READ)
                    selector.select(remaining)
            for _, payload in listener.receive().notifications:
                self._take(payload)
            if listener.failure is not None:
                raise listener.failure

    def _is_complete(self) -> bool:
        if self.target_worker_id is not None:
            return bool(self.pongs)
        return self.min_responses is not None and len(self.pongs) >= self.min_responses

    def _take(self, payload: str) -> None:
        pong = read_pong(payload, self.correlation_id, _milliseconds_since(self.sent_at))
        if pong is None or self.target_worker_id not in (None, pong.worker_id):
            return
        if self.among is not None and pong.worker_id not in self.among:
            return
        self.pongs.setdefault(pong.worker_id, pong)


def read_pong(payload: str, correlation_id: str, latency_ms: float) -> WorkerPong | None:
    """Parse a pong. Any client may write to the channel, so other payloads are ignored."""
    try:
        reply = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    if not isinstance(reply, dict) or reply.get("correlation_id") != correlation_id:
        return None
    match reply:
        case {"worker_id": str(worker_id), "hostname": str(hostname), "pid": int(pid)}:
            return WorkerPong(worker_id, hostname, pid, latency_ms)
        case _:
            return None


def list_worker_states(broker: PostgresBroker) -> BrokerResult[list[WorkerStateSnapshot]]:
    """Return the newest snapshot of every worker on record, most recent first."""
    return broker.perform(_READING, read_rows(newest_worker_states()))


async def list_worker_states_async(
    broker: PostgresBroker,
) -> BrokerResult[list[WorkerStateSnapshot]]:
    return await broker.perform_async(_READING, read_rows(newest_worker_states()))


def get_worker_state_history(
    broker: PostgresBroker, worker_id: str, limit: int | None = None
) -> BrokerResult[list[WorkerStateSnapshot]]:
    """Return one worker's snapshots, newest first; without a limit, return all of them."""
    if problem := _limit_problem(limit):
        return Err(problem)
    history = worker_state_history(worker_id, limit)
    return broker.perform(_READING, read_rows(history))


async def get_worker_state_history_async(
    broker: PostgresBroker, worker_id: str, limit: int | None = None
) -> BrokerResult[list[WorkerStateSnapshot]]:
    if problem := _limit_problem(limit):
        return Err(problem)
    history = worker_state_history(worker_id, limit)
    return await broker.perform_async(_READING, read_rows(history))


def _limit_problem(limit: int | None) -> BrokerOperationError | None:
    if limit is None or limit >= 1:
        return None
    return BrokerOperationError(_READING, f"limit must be at least 1 or None, not {limit!r}.")


def _milliseconds_since(started: float) -> float:
    return (time.perf_counter() - started) * 1000
