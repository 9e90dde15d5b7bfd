"""A full notification queue of the server: all processes wait, none ends, and nothing is lost."""

from __future__ import annotations

import psycopg

from horsies import Horsies, TaskError, TaskResult
from horsies.result import Err
from tests.support.applications import app_at, run_closing
from tests.support.database import Database
from tests.support.notify_queue import full_queue, limit_queue
from tests.support.private_server import PrivateServer
from tests.support.schedulers import config_of, every, sent, start_scheduler
from tests.support.tables import attempts, task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import Fleet

QUICK = {"resilience": {"db_retry_initial_ms": 100, "db_retry_max_ms": 500}}


def producer(url: str) -> Horsies:
    """An application that sends the tasks of the workers."""
    app = app_at(url)

    @app.task("add")
    def add(a: int, b: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    @app.task("rest_until_released")
    def rest_until_released(label: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=label)

    return app


def test_everybody_waits_until_there_is_room(own_server: PrivateServer, own_fleet: Fleet) -> None:
    limit_queue(own_server)
    app = producer(own_server.url)
    add, rest = app.tasks()["add"], app.tasks()["rest_until_released"]
    with psycopg.connect(own_server.url, autocommit=True) as connection:
        running = own_fleet.start(processes=2, config=QUICK)
        scheduler = start_scheduler(own_fleet, config_of(every(1, "often")))
        held = rest.send("gate").unwrap()
        wait_until(lambda: bool(own_fleet.journal.lines("start", held.task_id)))
        with full_queue(own_server.url):
            own_fleet.journal.release("gate")
            running.wait_for("database_lost")
            scheduler.wait_for("scheduler_database_lost")
            starting = own_fleet.start(processes=1, config=QUICK, ready=False)
            starting.wait_for("database_lost", times=2)
            before = len(sent(connection))
            assert_sends_are_retryable(app, connection)
            assert task(connection, held.task_id).status == "RUNNING"
        starting.wait_until_ready()
        wait_for_status(connection, held.task_id, "COMPLETED")
        assert len(attempts(connection, held.task_id)) == 1
        assert add.send(1, 1).unwrap().get(30_000).ok_value == 2
        wait_until(lambda: len(sent(connection)) > before)
        assert [one.stop() for one in (running, starting, scheduler)] == [0, 0, 0]
    app.close()


def assert_sends_are_retryable(app: Horsies, connection: Database) -> None:
    add = app.tasks()["add"]
    many = [add.bind(n, 1) for n in range(3)]
    flow = app.workflow("flow", [add.node(node_id="only")(a=1, b=1)], definition_key="flow")
    for refused in (
        add.send(2, 1),
        add.schedule(10, 2, 1),
        add.send_many(many),
        flow.start(),
        run_closing(app, add.send_async(2, 1)),
        run_closing(app, add.send_many_async(many)),
    ):
        assert isinstance(refused, Err), refused
        assert refused.err_value.retryable, refused
        assert "notification queue is full" in refused.err_value.message
    stored = connection.execute("SELECT count(*) FROM horsies_tasks WHERE task_name = 'add'")
    assert stored.fetchone() == (0,)
