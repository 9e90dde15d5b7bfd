"""Any client may send notifications: to a worker they are hints, never commands."""

from __future__ import annotations

import json
from types import ModuleType

from horsies.monitor.health import PING_CHANNEL, PONG_CHANNEL_PREFIX
from horsies.worker.notifications import CANCEL_CHANNEL
from tests.support.database import Database, notify
from tests.support.tables import task
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal

MALFORMED = ("\0", "\ud800", "\U0001f40e" * 43)


def test_a_malformed_ping_harms_no_worker(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(processes=1)
    replies = [PONG_CHANNEL_PREFIX + ending for ending in MALFORMED]
    pings = [json.dumps({"reply_channel": one, "correlation_id": "1"}) for one in replies]
    for payload in ("[" * 7_000, *pings):
        notify(connection, PING_CHANNEL, payload)
        (pong,) = programs.app.ping_workers(timeout_seconds=30, min_responses=1).unwrap()
        assert pong.pid == worker.pid
    assert programs.add.send(1, 2).unwrap().get(30_000).ok_value == 3
    assert worker.stop() == 0


def test_nobody_cancels_a_task_by_notification_alone(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(processes=2, config=HARDLY_POLLS)
    forged = programs.rest_until_released.send("forged").unwrap()
    meant = programs.sleep_and_clean_up.send(600).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    notify(connection, CANCEL_CHANNEL, forged.task_id)
    meant.cancel().unwrap()
    assert meant.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert task(connection, forged.task_id).status == "RUNNING"
    journal.release("forged")
    assert forged.get(30_000).ok_value == "done"
    assert worker.stop() == 0
