"""Waiting for results: woken at once, through lost notifications, outages, forks and closes."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import time
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pytest

from horsies import Horsies, TaskError, TaskResult
from horsies.db.statements.tasks import OutcomeRow
from horsies.error_codes import OperationalErrorCode, RetrievalCode
from horsies.ids import new_id
from horsies.tasks.handle import TaskHandle
from horsies.tasks.waiters import POLL_SECONDS, Subject, Waiters
from tests.support.applications import Call, Task, add_task, app_at, never_poll, run_closing
from tests.support.database import Database, backends, lock_waiters, terminate
from tests.support.proxy import Proxy
from tests.support.rows import finish
from tests.support.wait import wait_until

GetResult = TaskResult[Any, TaskError]


class Waiting:
    """A thread that waits for a result, known to be waiting."""

    def __init__(self, app: Horsies, handle: TaskHandle[Any], timeout_ms: int = 20_000) -> None:
        self._future: Future[GetResult] = Future()
        self._thread = threading.Thread(target=self._wait, args=(handle, timeout_ms))
        self._thread.start()
        wait_until(lambda: is_seen(app, handle.task_id))

    def _wait(self, handle: TaskHandle[Any], timeout_ms: int) -> None:
        self._future.set_result(handle.get(timeout_ms=timeout_ms))

    def result(self) -> GetResult:
        self._thread.join()
        return self._future.result()


def is_seen(app: Horsies, task_id: str) -> bool:
    watch = app.get_broker().waiters._watches.get((Subject.TASK, task_id))
    return watch is not None and watch.was_read


def watched(app: Horsies) -> list[str]:
    return [watched_id for _, watched_id in app.get_broker().waiters._watches]


def test_a_notification_wakes_the_waiter(app: Horsies, add: Task, connection: Database) -> None:
    never_poll(app)
    handle = add.send(1).unwrap()
    waiting = Waiting(app, handle)
    finish(connection, handle.task_id)
    assert waiting.result().ok_value == 1
    assert watched(app) == []


def test_a_notification_wakes_the_coroutine(app: Horsies, add: Task, connection: Database) -> None:
    never_poll(app)
    handle = add.send(1).unwrap()

    async def main() -> GetResult:
        waiting = asyncio.create_task(handle.get_async(timeout_ms=30_000))
        await asyncio.to_thread(wait_until, lambda: is_seen(app, handle.task_id))
        finish(connection, handle.task_id)
        return await waiting

    assert run_closing(app, main()).ok_value == 1


def test_everyone_who_waits_for_the_same_task_is_woken(
    app: Horsies, add: Task, connection: Database
) -> None:
    never_poll(app)
    handle = add.send(1).unwrap()
    waiting = [Waiting(app, app.handle(handle.task_id)) for _ in range(5)]
    finish(connection, handle.task_id)
    assert [one.result().ok_value for one in waiting] == [1] * 5


def test_a_look_at_a_task_others_wait_for_does_not_wake_them(
    app: Horsies, add: Task, connection: Database
) -> None:
    never_poll(app)
    handle = add.send(1).unwrap()
    waiting = Waiting(app, handle)
    look = app.handle(handle.task_id).get(timeout_ms=0)
    assert look.err_value.error_code is RetrievalCode.RESULT_NOT_READY
    assert watched(app) == [handle.task_id]
    finish(connection, handle.task_id)
    assert waiting.result().is_ok()


def test_a_lost_notification_costs_at_most_the_poll_interval(
    app: Horsies, add: Task, connection: Database
) -> None:
    handle = add.send(1).unwrap()
    connection.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_changed")
    try:
        waiting = Waiting(app, handle)
        finish(connection, handle.task_id)
        finished = time.monotonic()
        assert waiting.result().ok_value == 1
        assert time.monotonic() - finished < 10 * POLL_SECONDS, "the machine may be busy"
    finally:
        connection.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER horsies_task_changed")


def test_a_notification_that_comes_with_another_answer_is_not_overlooked(
    app: Horsies, add: Task, connection: Database, process_url: str
) -> None:
    never_poll(app)
    first, second = add.send(1).unwrap(), add.send(2).unwrap()
    waiting = Waiting(app, first)
    # While the waiters' thread waits for an answer about the second task, it is told of the first:
    # the notification comes off the socket together with the answer.
    with psycopg.connect(process_url) as other, ThreadPoolExecutor(1) as thread:
        other.execute("ALTER TABLE horsies_tasks DISABLE TRIGGER horsies_task_changed")
        finish(other, first.task_id)
        other.execute("ALTER TABLE horsies_tasks ENABLE TRIGGER horsies_task_changed")
        other.execute("LOCK TABLE horsies_tasks IN ACCESS EXCLUSIVE MODE")
        looking = thread.submit(second.get, 0)
        wait_until(lambda: lock_waiters(connection) == 1)
        connection.execute("SELECT pg_notify('task_done', %s)", (first.task_id,))
        other.commit()
        assert looking.result(timeout=30).is_err()
        assert waiting.result().ok_value == 1


# Giving up


def test_a_waiter_that_gives_up_is_forgotten(app: Horsies, add: Task, call: Call) -> None:
    handle = add.send(1).unwrap()
    assert call(app, handle, "get", timeout_ms=30).is_err()
    assert watched(app) == []


def test_cancelling_a_coroutine_that_waits_is_not_swallowed(
    app: Horsies, add: Task, connection: Database
) -> None:
    handle = add.send(1).unwrap()

    async def main() -> None:
        waiting = asyncio.create_task(handle.get_async())
        await asyncio.to_thread(wait_until, lambda: is_seen(app, handle.task_id))
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert watched(app) == []
        finish(connection, handle.task_id)
        assert (await handle.get_async(timeout_ms=30_000)).is_ok()

    run_closing(app, main())


def test_an_outer_timeout_is_the_callers_own(app: Horsies, add: Task) -> None:
    handle = add.send(1).unwrap()

    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await handle.get_async()
        assert watched(app) == []

    run_closing(app, main())


def test_closing_the_application_ends_every_wait(app: Horsies, add: Task) -> None:
    handle = add.send(1).unwrap()
    waiting = Waiting(app, handle)
    app.close().unwrap()
    error = waiting.result().err_value
    assert error.error_code is OperationalErrorCode.BROKER_ERROR
    assert "closed" in str(error.message)


def test_an_application_can_be_closed_twice_and_used_again(
    app: Horsies, add: Task, connection: Database
) -> None:
    others, threads = set(backends(connection, "horsies:waiters")), set(threading.enumerate())
    handle = add.send(1).unwrap()
    handle.get(timeout_ms=0)
    assert app.close().is_ok()
    assert app.close().is_ok()
    finish(connection, handle.task_id)
    assert handle.get(timeout_ms=30_000).is_ok()
    assert run_closing(app, app.close_async()).is_ok()
    assert app.close().is_ok()
    wait_until(lambda: not set(backends(connection, "horsies:waiters")) - others)
    assert not set(threading.enumerate()) - threads


# Outages


def test_a_waiter_outlasts_the_loss_of_the_listening_connection(
    app: Horsies, add: Task, connection: Database
) -> None:
    never_poll(app)
    handle = add.send(1).unwrap()
    waiting = Waiting(app, handle)
    terminate(connection, "horsies:waiters")
    finish(connection, handle.task_id)
    assert waiting.result().ok_value == 1


def test_a_get_right_after_the_listening_connection_was_lost_works(
    app: Horsies, add: Task, connection: Database
) -> None:
    for n in range(3):
        handle = add.send(n).unwrap()
        finish(connection, handle.task_id)
        opened = threading.Event()
        threading.Timer(0.25, opened.set).start()  # a connection may not be reopened more often
        assert handle.get(timeout_ms=30_000).is_ok()
        opened.wait()
        terminate(connection, "horsies:waiters")


def test_a_waiter_outlasts_the_absence_of_the_server(
    proxy: Proxy, distant_app: Horsies, connection: Database
) -> None:
    handle = add_task(distant_app).send(1).unwrap()
    waiting = Waiting(distant_app, handle)
    proxy.stop()
    finish(connection, handle.task_id)
    proxy.start()
    assert waiting.result().ok_value == 1


def test_a_get_while_the_server_is_away_says_so_and_is_not_remembered(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    handle = add_task(distant_app).send(1).unwrap()
    finish(connection, handle.task_id)
    proxy.stop()
    for timeout_ms in (0, 300):
        error = call(distant_app, handle, "get", timeout_ms=timeout_ms).err_value
        assert error.error_code is OperationalErrorCode.BROKER_ERROR
        assert "No server listens at this address" in error.message
        assert isinstance(error.exception, psycopg.OperationalError)
    assert watched(distant_app) == []
    proxy.start()
    wait_until(lambda: handle.get(timeout_ms=0).is_ok())


def test_a_get_that_starts_while_the_server_is_away_waits_for_it(
    proxy: Proxy, distant_app: Horsies, connection: Database
) -> None:
    handle = add_task(distant_app).send(1).unwrap()
    waiters = distant_app.get_broker().waiters
    proxy.stop()
    waiting = waiters.watch(handle.task_id)
    wait_until(lambda: any(watch.failure for watch in waiters._watches.values()))
    finish(connection, handle.task_id)
    proxy.start()
    row = waiting.result(20)
    assert row is not None
    assert row.status == "COMPLETED"


@pytest.mark.parametrize("timeout_ms", [None, 90_000])
def test_a_server_that_was_never_reached_is_reported_at_once(
    proxy: Proxy, distant_app: Horsies, call: Call, timeout_ms: int | None
) -> None:
    proxy.stop()
    started = time.monotonic()
    error = call(distant_app, distant_app.handle(new_id()), "get", timeout_ms=timeout_ms).err_value
    assert error.error_code is OperationalErrorCode.BROKER_ERROR
    assert time.monotonic() - started < 30


def test_a_look_while_the_server_is_away_does_not_wait_although_others_do(
    proxy: Proxy, distant_app: Horsies, connection: Database
) -> None:
    handle = add_task(distant_app).send(1).unwrap()
    waiting = Waiting(distant_app, handle)
    proxy.stop()
    look = distant_app.handle(handle.task_id).get(timeout_ms=0)
    assert look.err_value.error_code is OperationalErrorCode.BROKER_ERROR
    finish(connection, handle.task_id)
    proxy.start()
    assert waiting.result().is_ok()


def test_a_schema_newer_than_the_code_is_an_error_each_time(database_url: str, call: Call) -> None:
    first = app_at(database_url)
    handle = add_task(first).send(1).unwrap()
    with first.get_broker().database.connection() as connection:
        connection.execute(
            "INSERT INTO public.horsies_migrations (version, name) VALUES (9999, 'x')"
        )
    first.close()
    app = app_at(database_url)
    for _ in range(2):
        error = call(app, app.handle(handle.task_id), "get").err_value
        assert error.error_code is OperationalErrorCode.BROKER_ERROR
        assert "upgrade horsies" in error.message
    app.close()


def test_a_thread_that_died_is_replaced(process_url: str, connection: Database) -> None:
    def connect() -> psycopg.Connection[Any]:
        return psycopg.connect(process_url, autocommit=True)

    waiters = Waiters(connect)
    unknown = "01900000-0000-7000-8000-000000000000"
    dead = threading.Thread(target=lambda: None)
    dead.start()
    dead.join()
    waiters._thread = dead
    found: Future[OutcomeRow | None] = waiters.watch(unknown)
    assert found.result(timeout=30) is None
    waiters.close()


@pytest.mark.parametrize(
    ("program", "words"),
    [
        pytest.param("fork_program.py", ["child:2", "parent:1", "again:3"], id="sends and waits"),
        pytest.param("fork_close_program.py", ["child:0"], id="closes"),
    ],
)
def test_a_forked_child_does_no_harm_whatever_its_parent_was_doing(
    process_url: str, program: str, words: list[str]
) -> None:
    path = Path(__file__).parents[1] / "support" / "apps" / program
    done = subprocess.run(
        [sys.executable, str(path), process_url],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.stdout.split() == words, done.stderr


def test_a_forked_child_may_begin_with_many_threads_at_once(process_url: str) -> None:
    program = Path(__file__).parents[1] / "support" / "apps" / "fork_threads_program.py"
    done = subprocess.run(
        [sys.executable, str(program), process_url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_application_nobody_holds_any_more_goes_and_its_connection_with_it(
    process_url: str, connection: Database
) -> None:
    def sessions() -> set[int]:
        return {*backends(connection, "horsies:waiters"), *backends(connection, "horsies:producer")}

    others = sessions()
    app = app_at(process_url)
    app.get_broker().waiters._spare_seconds = 0.1
    add_task(app).send(1).unwrap().get(timeout_ms=0)
    dropped = weakref.ref(app)
    del app

    def is_gone() -> bool:
        gc.collect()  # again and again: the thread that waits holds on to the pool until it ends
        return dropped() is None and not sessions() - others

    wait_until(is_gone)


def test_a_get_after_an_outage_connects_by_itself(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    @distant_app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    handle = add.send(1).unwrap()
    finish(connection, handle.task_id)
    proxy.stop()
    # Failed reconnects: the next one by the clock alone is seconds away.
    for _ in range(6):
        assert distant_app.handle(handle.task_id).get(timeout_ms=0).is_err()
    proxy.start()
    for timeout_ms in (0, 20_000):
        assert call(distant_app, distant_app.handle(handle.task_id), "get", timeout_ms).is_ok()
