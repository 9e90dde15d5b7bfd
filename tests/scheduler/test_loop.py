"""A scheduler in a thread: it serves, ends when asked to, and tells why when it ends by itself."""

from __future__ import annotations

import os
import resource
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import psycopg

from horsies.config.app import WorkerResilienceConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database as Server
from horsies.scheduler.service import (
    Scheduler,
    SchedulerGaveUpError,
    SchedulerThread,
    migrating_connector,
)
from tests.support.database import Database
from tests.support.scheduling import OWNER, MakeApp, ago, make_due, schedule, tasks
from tests.support.wait import wait_until


@contextmanager
def threaded(service: Scheduler) -> Iterator[tuple[SchedulerThread, list[Exception]]]:
    failures: list[Exception] = []
    thread = SchedulerThread(service, failures.append)
    thread.start()
    try:
        yield thread, failures
    finally:
        thread.stop()
        assert "horsies-scheduler" not in {one.name for one in threading.enumerate()}


def test_a_thread_serves_schedules_until_it_is_asked_to_stop(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    app = make_app(schedule("report"))
    connect = migrating_connector(Server(PostgresConfig(database_url=process_url), "scheduler"))
    service = Scheduler(app.config, app.definitions(), OWNER, connect)
    with threaded(service) as (thread, failures):
        wait_until(lambda: service.next_at() > 0)
        make_due(connection, ago(connection, 1))
        wait_until(lambda: tasks(connection))
        thread.ask_to_stop()
    assert failures == []


@contextmanager
def many_descriptors(count: int) -> Iterator[None]:
    """Occupy that many descriptors, so that the next ones have higher numbers."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, count + 500)), hard))
    with ExitStack() as files:
        try:
            for _ in range(count):
                files.enter_context(open(os.devnull, "rb"))
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thread_serves_schedules_in_a_process_with_many_descriptors(
    connection: Database, make_app: MakeApp, process_url: str
) -> None:
    app = make_app(schedule("report"))
    with many_descriptors(1_100):
        connect = migrating_connector(Server(PostgresConfig(database_url=process_url), "scheduler"))
        service = Scheduler(app.config, app.definitions(), OWNER, connect)
        with threaded(service) as (_, failures):
            wait_until(lambda: service.next_at() > 0)
            make_due(connection, ago(connection, 1))
            wait_until(lambda: tasks(connection) or failures)
    assert failures == []


def test_a_thread_that_gives_up_says_why(make_app: MakeApp) -> None:
    def refuse() -> None:
        raise psycopg.OperationalError("connection refused")

    resilience = WorkerResilienceConfig(db_retry_initial_ms=100, db_retry_max_attempts=1)
    app = make_app(schedule("report"), resilience=resilience)
    service = Scheduler(app.config, app.definitions(), OWNER, refuse)  # type: ignore[arg-type]
    with threaded(service) as (_, failures):
        wait_until(lambda: failures)
    (failure,) = failures
    assert isinstance(failure, SchedulerGaveUpError)
    assert "connection refused" in str(failure)


def test_a_thread_that_never_began_can_be_stopped(make_app: MakeApp) -> None:
    app = make_app(schedule("report"))
    service = Scheduler(app.config, app.definitions(), OWNER, lambda: None)  # type: ignore[arg-type,return-value]
    SchedulerThread(service, lambda _: None).stop()
