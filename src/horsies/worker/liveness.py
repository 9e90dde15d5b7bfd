"""Liveness: how others know that this worker lives, and what it shows of itself.

Three signs, from fast to slow: a session advisory lock on the listening connection, which the server
frees the moment the process is gone; the ``seen_at`` of the worker's row, renewed every few seconds;
and heartbeat rows for tasks that run longer than an interval. Snapshots and pongs are for people.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psutil
import psycopg
from psycopg import Connection

from horsies.config.app import AppConfig
from horsies.db.pipeline import Together
from horsies.db.statement import Step
from horsies.db.statements.workers import (
    LockKey,
    Notification,
    Presence,
    RegisterWorker,
    SeeWorker,
    SignOff,
    WorkerState,
    register_worker,
    see_worker,
    send_notification,
    sign_off_worker,
    store_worker_state,
    take_worker_lock,
)
from horsies.worker.config import WorkerConfig

logger = logging.getLogger("horsies.worker")

PING_CHANNEL = "horsies_worker_ping"
PONG_CHANNEL_PREFIX = "horsies_worker_pong_"
# The channels on which horsies.health waits for answers, and no other name, however it is spelled.
_PONG_CHANNEL = re.compile(PONG_CHANNEL_PREFIX + "[0-9a-f]{32}")
ECHO_CHANNEL_PREFIX = "horsies_echo_"
_MEGABYTE = 1024 * 1024


def lock_key(worker_id: str) -> int:
    """The advisory lock of a worker: 63 bits of its random id."""
    return UUID(worker_id).int & (1 << 63) - 1


def echo_channel(worker_id: str) -> str:
    """The channel on which a worker, and nobody else, hears its own signs of life."""
    return f"{ECHO_CHANNEL_PREFIX}{worker_id}"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who this worker is, the same for its whole life."""

    worker_id: str
    hostname: str
    pid: int

    @classmethod
    def of(cls, worker_id: str) -> Identity:
        """The identity of this process."""
        return cls(worker_id, socket.gethostname(), os.getpid())


class Liveness:
    """Registers the worker, keeps its row fresh, and describes it."""

    def __init__(self, app_config: AppConfig, config: WorkerConfig, identity: Identity) -> None:
        self._app_config = app_config
        self._config = config
        self._identity = identity
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only sets the starting point
        self._is_registered = False
        # A listening connection that has not got the lock yet.
        self._lockless: Connection[Any] | None = None

    def lock(self, connection: Connection[Any]) -> None:
        """Take the lock that says we live, on the connection that listens."""
        (answer,) = take_worker_lock.run(connection, LockKey(lock_key(self._identity.worker_id)))
        # A session of ours that the server has not buried yet may still hold it: we count as alive
        # while it does, and take it over afterwards.
        self._lockless = None if answer.held else connection

    def lock_if_missing(self) -> None:
        """Ask again for a lock that an earlier connection of ours still held."""
        connection = self._lockless
        if connection is not None and not connection.closed:
            with suppress(psycopg.Error):  # whoever listens on it notices by itself
                self.lock(connection)

    def steps(self, hears: bool) -> list[Step]:
        """The statements that keep this worker's row fresh, say whether it hears notifications, and
        call it by one.
        """
        identity = self._identity
        seen = SeeWorker(identity.worker_id, hears, echo_channel(identity.worker_id))
        if self._is_registered:
            return [(see_worker, seen)]
        row = RegisterWorker(
            identity.worker_id,
            lock_key(identity.worker_id),
            identity.hostname,
            identity.pid,
            self._config.processes,
            self._config.queues,
        )
        return [(register_worker, row), (see_worker, seen)]

    def note_seen(self, rows: Sequence[Presence]) -> bool:
        """The row was renewed; False when others have declared this worker lost."""
        # A row somebody deleted says nothing about us: it is written again next time.
        self._is_registered = bool(rows)
        return not any(row.was_stopped for row in rows)

    def forget(self) -> None:
        """The row of this worker was closed by others; it is registered anew."""
        self._is_registered = False

    def snapshot(self, running: int, waiting: int, children_memory_mb: float) -> Step:
        """The statement that appends a snapshot of this worker."""
        config = self._app_config
        queues = config.queues()
        with self._process.oneshot():
            state = WorkerState(
                worker_id=self._identity.worker_id,
                tasks_running=running,
                tasks_claimed=waiting,
                memory_usage_mb=self._process.memory_info().rss / _MEGABYTE,
                cpu_percent=self._process.cpu_percent(),
                memory_percent=self._process.memory_percent(),
                children_memory_mb=children_memory_mb,
                max_claim_batch=self._config.max_claim_batch,
                max_claim_per_worker=self._config.effective_claims,
                cluster_wide_cap=config.cluster_wide_cap,
                queue_priorities=json.dumps({queue.name: queue.priority for queue in queues}),
                queue_max_concurrency=json.dumps(
                    {
                        queue.name: queue.max_concurrency
                        for queue in queues
                        if queue.max_concurrency is not None
                    }
                ),
                recovery_config=config.recovery.model_dump_json(),
            )
        return store_worker_state, state

    def pongs(self, payloads: Iterable[str]) -> list[Step]:
        """The answers to these pings; a payload that is none of ours is ignored."""
        return [(send_notification, pong) for payload in payloads if (pong := self._pong(payload))]

    def _pong(self, payload: str) -> Notification | None:
        try:
            ping = json.loads(payload)
            channel, correlation = str(ping["reply_channel"]), str(ping["correlation_id"])
            target = ping.get("target_worker_id")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        identity = self._identity
        if target not in (None, identity.worker_id) or not _PONG_CHANNEL.fullmatch(channel):
            return None
        # JSON escapes whatever the asker calls its question by; cut, it fits into a notification.
        answer = {
            "correlation_id": correlation[:100],
            "worker_id": identity.worker_id,
            "hostname": identity.hostname,
            "pid": identity.pid,
        }
        return Notification(channel, json.dumps(answer))

    def sign_off(self, together: Together) -> None:
        """Say goodbye, so that nobody looks for tasks of ours."""
        together.run([(sign_off_worker, SignOff([self._identity.worker_id], False))])
