"""Liveness: how other workers detect that this worker is alive, and the state that it publishes. There are
three indicators, from fast to slow: a session advisory lock on the listening connection, which the server
frees as soon as the process ends; ``seen_at`` in the worker's row, renewed every few seconds; and heartbeat
rows for tasks that run longer than an interval. Snapshots and pongs are for operators.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from uuid import UUID

import psutil

from horsies._version import __version__
from horsies.config.app import AppConfig
from horsies.db.statement import Step
from horsies.db.statements.queues import send_notification
from horsies.db.statements.workers import (
    Presence,
    WatchedWorker,
    record_worker_stop,
    register_worker,
    see_worker,
    store_worker_state,
)
from horsies.worker import os_process
from horsies.worker.config import WorkerConfig
from horsies.worker.pool.pool import ChildSummary

logger = logging.getLogger("horsies.worker")

PONG_CHANNEL_PREFIX = "horsies_worker_pong_"
# The channels on which monitor/health.py waits for pongs; pongs are sent only on these channels.
_PONG_CHANNEL = re.compile(PONG_CHANNEL_PREFIX + "[0-9a-f]{32}")
_MEGABYTE = 1024 * 1024


def lock_key(worker_id: str) -> int:
    """Return the key of a worker's advisory lock: 63 bits of the worker's random id."""
    return UUID(worker_id).int & (1 << 63) - 1


def _child_document(child: ChildSummary) -> dict[str, object]:
    since = None if child.since is None else child.since.isoformat(timespec="milliseconds")
    memory = {
        "rss_mb": round(child.rss_mb, 1),
        "private_mb": round(os_process.private_megabytes([child.pid]), 1),
    }
    document = {**child._asdict(), **memory, "since": since}
    if child.tasks is None:
        del document["tasks"]
    return document


@dataclass(frozen=True, slots=True)
class Identity:
    """A worker's id, host, process and tasks (as JSON), which never change."""

    worker_id: str
    hostname: str
    pid: int
    process_space: str | None = None
    process_started: int | None = None
    known_tasks: str | None = None
    task_defaults: str | None = None
    webhooks: str = "[]"
    # The statement that requests the check for findings that webhooks report.
    findings: Step | None = None

    @classmethod
    def of(
        cls,
        worker_id: str,
        known_tasks: str | None = None,
        task_defaults: str | None = None,
        webhooks: str = "[]",
        findings: Step | None = None,
    ) -> Identity:
        pid = os.getpid()
        return cls(
            worker_id,
            socket.gethostname(),
            pid,
            os_process.process_space(),
            os_process.process_started(pid),
            known_tasks,
            task_defaults,
            webhooks,
            findings,
        )

    def sees_gone(self, other: WatchedWorker) -> bool:
        """Return whether another worker's process has provably ended; always False for a worker on
        another host.
        """
        return (
            self.process_space is not None
            and (other.process_space, other.hostname) == (self.process_space, self.hostname)
            and other.process_started is not None
            and os_process.is_process_gone(other.pid, other.process_started)
        )


class Liveness:
    """Creates the statements that register the worker, renew its row, and describe it."""

    def __init__(self, app_config: AppConfig, config: WorkerConfig, identity: Identity) -> None:
        self._app_config = app_config
        self._config = config
        self.identity = identity
        self._process = psutil.Process()
        self._process.cpu_percent()  # the first call only starts psutil's measurement
        self.is_registered = False

    def steps(self, *, receives_notifications: bool, waits: bool, calls: bool) -> list[Step]:
        """Return the statements that renew this worker's row and, with `calls`, notify all workers."""
        identity = self.identity
        seen = see_worker(identity.worker_id, receives_notifications, waits, calls)
        if self.is_registered:
            return [seen]
        row = register_worker(
            identity.worker_id,
            lock_key(identity.worker_id),
            identity.hostname,
            identity.pid,
            self._config.places,
            self._config.queues,
            identity.process_space,
            identity.process_started,
            identity.known_tasks,
            self._config.name,
            __version__,
            self._app_config.release,
        )
        return [row, seen]

    def note_seen(self, rows: Sequence[Presence]) -> bool:
        """Note that the row was renewed; return False if another worker has declared this worker lost."""
        # A deleted row does not mean that this worker was declared lost; the next heartbeat writes the
        # row again.
        self.is_registered = bool(rows)
        return not any(row.was_stopped for row in rows)

    def forget(self) -> None:
        """Note that another worker closed this worker's row, so that this worker must register again."""
        self.is_registered = False

    def snapshot(self, running: int, waiting: int, children: Sequence[ChildSummary]) -> Step:
        """Return the statement that stores the load of this worker and its children."""
        config = self._app_config
        queues = config.queues()
        caps = {queue.name: queue.max_concurrency for queue in queues}
        memory_mb, cpu_percent, memory_percent = self._usage()
        return store_worker_state(
            worker_id=self.identity.worker_id,
            tasks_running=running,
            tasks_claimed=waiting,
            memory_usage_mb=memory_mb,
            cpu_percent=cpu_percent,
            memory_percent=memory_percent,
            children_memory_mb=sum(child.rss_mb for child in children),
            max_claim_batch=self._config.max_claim_batch,
            max_claim_per_worker=self._config.effective_claims,
            cluster_wide_cap=config.cluster_wide_cap,
            queue_priorities=json.dumps({queue.name: queue.priority for queue in queues}),
            queue_max_concurrency=json.dumps(
                {name: cap for name, cap in caps.items() if cap is not None}
            ),
            recovery_config=config.recovery.model_dump_json(),
            children=json.dumps([_child_document(child) for child in children]),
        )

    def _usage(self) -> tuple[float | None, float | None, float | None]:
        """Return the memory in MB, and CPU and memory in percent; None for values that cannot be read,
        for example if no descriptor is free.
        """
        process = self._process
        try:
            with process.oneshot():
                memory_mb = process.memory_info().rss / _MEGABYTE
                return memory_mb, process.cpu_percent(), process.memory_percent()
        except (psutil.Error, OSError) as error:
            logger.warning("The memory and CPU use of the worker is unknown: %s", error)
            return None, None, None

    def pongs(self, payloads: Iterable[str]) -> list[Step]:
        """Return the responses to these pings; a malformed ping is ignored."""
        return [pong for payload in payloads if (pong := self._pong(payload))]

    def _pong(self, payload: str) -> Step | None:
        try:
            ping = json.loads(payload)
            channel, correlation = str(ping["reply_channel"]), str(ping["correlation_id"])
            target = ping.get("target_worker_id")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            return None
        identity = self.identity
        if target not in (None, identity.worker_id) or not _PONG_CHANNEL.fullmatch(channel):
            return None
        # A correlation id, cut to 100 characters, fits into a notification even if JSON escapes all of
        # it.
        answer = {
            "correlation_id": correlation[:100],
            "worker_id": identity.worker_id,
            "hostname": identity.hostname,
            "pid": identity.pid,
        }
        return send_notification(channel, json.dumps(answer))

    def stop(self) -> Step:
        """Return the statement that closes this worker's row; the worker must have no tasks
        left to recover.
        """
        return record_worker_stop(self.identity.worker_id)
