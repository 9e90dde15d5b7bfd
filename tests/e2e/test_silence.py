"""A listening connection that is open and delivers nothing is detected, reported and replaced."""

from __future__ import annotations

from types import ModuleType

from horsies.db.statements.monitor import WorkerSummary
from horsies.monitor.overview import misses_notifications, read_workers
from tests.support.database import Database, backends
from tests.support.proxy import Proxy
from tests.support.wait import wait_until
from tests.support.workers import Fleet

POLL_EVERY_SECOND = {"resilience": {"notify_poll_interval_ms": 1_000}}


def only_worker(programs: ModuleType) -> WorkerSummary:
    (worker,) = read_workers(programs.app.get_broker()).unwrap()
    return worker


def test_a_worker_that_hears_nothing_polls_shows_it_and_hears_again(
    fleet: Fleet, programs: ModuleType, connection: Database
) -> None:
    with Proxy(fleet.database_url) as proxy:
        broker = {"broker": {"session_database_url": proxy.url}}
        worker = fleet.start(config=POLL_EVERY_SECOND | broker)
        assert programs.noop.send().unwrap().get(30_000).is_ok()
        assert only_worker(programs).hears
        first = backends(connection, "horsies:listener")

        proxy.is_silent = True
        wait_until(lambda: misses_notifications(only_worker(programs)))
        for _ in range(3):
            assert programs.noop.send().unwrap().get(30_000).is_ok()
        wait_until(lambda: not programs.app.list_worker_states().unwrap()[0].hears)
        wait_until(lambda: backends(connection, "horsies:listener") not in ([], first))
        wait_until(lambda: only_worker(programs).holds_lock)
        assert not worker.events("notifications_back")

        proxy.is_silent = False
        wait_until(lambda: not misses_notifications(only_worker(programs)))
        wait_until(lambda: programs.app.list_worker_states().unwrap()[0].hears)
        assert programs.noop.send().unwrap().get(30_000).is_ok()
        assert worker.stop() == 0
    assert [one["silent"] for one in worker.events("notifications_lost")] == [True]
    assert len(worker.events("notifications_back")) == 1
