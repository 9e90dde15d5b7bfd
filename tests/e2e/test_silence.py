"""A listening connection that lives and delivers nothing: noticed, shown, lived with, and mended."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import psycopg

from horsies.monitor.overview import WorkerOverview, read_workers
from tests.support.proxy import Proxy
from tests.support.tables import backends
from tests.support.workers import Fleet, eventually

Database = psycopg.Connection[Any]

POLL_EVERY_SECOND = {"resilience": {"notify_poll_interval_ms": 1_000}}


def only_worker(programs: ModuleType) -> WorkerOverview:
    (overview,) = read_workers(programs.app.get_broker()).unwrap()
    return overview


def test_a_worker_that_hears_nothing_polls_shows_it_and_hears_again(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    with Proxy(fleet.database_url) as proxy:
        broker = {"broker": {"session_database_url": proxy.url}}
        worker = fleet.start(config=POLL_EVERY_SECOND | broker)
        assert programs.noop.send().unwrap().get(10_000).is_ok()
        assert only_worker(programs).worker.hears
        first = backends(connection, "horsies:listener")

        proxy.is_silent = True
        eventually(lambda: only_worker(programs).is_deaf, 20)
        for _ in range(3):
            assert programs.noop.send().unwrap().get(10_000).is_ok()
        eventually(lambda: not programs.app.list_worker_states().unwrap()[0].hears, 10)
        eventually(lambda: backends(connection, "horsies:listener") not in ([], first), 10)
        eventually(lambda: only_worker(programs).worker.holds_lock, 10)
        assert "notifications are received again" not in worker.log()

        proxy.is_silent = False
        eventually(lambda: not only_worker(programs).is_deaf, 20)
        eventually(lambda: programs.app.list_worker_states().unwrap()[0].hears, 10)
        assert programs.noop.send().unwrap().get(10_000).is_ok()
        assert worker.stop() == 0
    assert worker.log().count("notifications are not delivered; polling every 1 s") == 1
    assert worker.log().count("notifications are received again") == 1
