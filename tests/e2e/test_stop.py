"""Shutdown of a worker: graceful, forced or immediate, and its exit code."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from types import ModuleType
from typing import Any

import pytest

from tests.support.database import Database, database_on, with_password
from tests.support.proxy import Proxy, outage
from tests.support.rows import insert_raw, row_of
from tests.support.tables import attempts, count, task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import FORKSERVER, HARDLY_POLLS, Fleet, Journal, RunningWorker, is_gone

CLEAN, FAILED, USAGE, FORCED = 0, 1, 2, 3


AWKWARD = "tests.support.apps.noisy_import:app"


# A proxy that waits for an answer to swallow holds notifications back as well.
QUICK_POLLS = {"resilience": {"notify_poll_interval_ms": 1_000}}


def start_and_wait(
    fleet: Fleet, journal: Journal, programs: ModuleType, name: str, *args: Any
) -> Any:
    """Send a task and wait until it runs."""
    sent = programs.app.get_task(name).send(*args).unwrap()
    wait_until(lambda: journal.lines("start", sent.task_id))
    return sent


def begin_stop(worker: RunningWorker) -> None:
    worker.signal(signal.SIGTERM)
    worker.wait_for("worker_stopping")


def processor_seconds_of_ended(worker: RunningWorker) -> float:
    """The processor time that the parent used in all, read from its zombie."""
    wait_until(lambda: is_gone(worker.pid))
    return worker.cpu_seconds()


def test_a_stop_waits_for_running_tasks_and_records_them(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(*FORKSERVER)
    running = [start_and_wait(fleet, journal, programs, "sleep", 2.5) for _ in range(2)]
    waiting = programs.noop.send().unwrap()
    family = worker.family()
    begin_stop(worker)
    before = worker.cpu_seconds()
    used = processor_seconds_of_ended(worker) - before
    assert worker.wait() == CLEAN
    for sent in running:
        assert task(connection, sent.task_id).status == "COMPLETED"
        assert len(attempts(connection, sent.task_id)) == 1
    assert task(connection, waiting.task_id).status == "PENDING"
    assert count(connection, "RUNNING", "CLAIMED") == 0
    assert all(map(is_gone, family))
    assert [one["running"] for one in worker.events("worker_stopping")] == [2]
    assert [one["exit_code"] for one in worker.events("worker_stopped")] == [CLEAN]
    assert used < 0.5


def test_a_task_that_asks_ends_in_order_when_its_worker_shuts_down(
    fleet: Fleet, journal: Journal, connection: Database
) -> None:
    worker = fleet.start(*FORKSERVER, application="tests.support.apps.inside:app")
    task_id = insert_raw(connection, "end_in_order", "[]")
    wait_until(lambda: journal.lines("start", task_id))
    begin_stop(worker)
    assert worker.wait() == CLEAN
    row = task(connection, task_id)
    assert (row.status, row.result) == ("COMPLETED", '{"ok":"in order"}')


def test_an_idle_worker_stops_at_once(fleet: Fleet) -> None:
    worker = fleet.start(config=HARDLY_POLLS)
    family = worker.family()
    assert worker.stop() == CLEAN
    assert all(map(is_gone, family))


def test_a_signal_during_the_start_stops_the_worker(fleet: Fleet) -> None:
    worker = fleet.start(ready=False)
    family = wait_until(worker.family)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == CLEAN
    assert all(map(is_gone, family))


@pytest.mark.parametrize("method", ["forkserver", "spawn", "fork"])
def test_a_signal_while_children_are_slow_to_start_stops_the_worker(
    fleet: Fleet, method: str
) -> None:
    worker = fleet.start(
        *("--start-method", method),
        application=AWKWARD,
        environment={"HORSIES_E2E_LINGERS": "1"},
        ready=False,
    )
    wait_until((fleet.directory / "lingers").exists)
    family = worker.family()
    assert worker.stop() == CLEAN
    assert family
    assert all(map(is_gone, family))
    assert [one["exit_code"] for one in worker.events("worker_stopped")] == [CLEAN]


def test_a_service_manager_that_signals_every_process_stops_a_worker_whose_children_start(
    fleet: Fleet,
) -> None:
    worker = fleet.start("--start-method", "spawn", ready=False)
    family = wait_until(worker.family)
    for pid in (worker.pid, *family):
        with suppress(ProcessLookupError):  # the worker may be quicker
            os.kill(pid, signal.SIGTERM)
    assert worker.wait() == CLEAN
    assert all(map(is_gone, family))


def test_a_signal_after_the_worker_has_stopped_does_not_change_its_exit_code(fleet: Fleet) -> None:
    worker = fleet.start(application=AWKWARD, environment={"HORSIES_E2E_LATE_SIGNAL": "1"})
    assert worker.stop() == CLEAN


def test_the_end_of_the_grace_interrupts_running_tasks(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--shutdown-grace", "0.5")
    once = start_and_wait(fleet, journal, programs, "sleep_and_clean_up", 600)
    again = start_and_wait(fleet, journal, programs, "sleep_again", 600)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == FORCED
    row = task(connection, once.task_id)
    assert (row.status, row.error_code) == ("FAILED", "WORKER_STOPPED")
    assert row.failed_reason == "The worker was stopped before the task ended."
    (attempt,) = attempts(connection, once.task_id)
    assert (attempt.outcome, attempt.will_retry) == ("WORKER_FAILURE", False)
    assert journal.lines("clean-up", once.task_id)
    assert task(connection, again.task_id).status == "PENDING"
    (attempt,) = attempts(connection, again.task_id)
    assert (attempt.outcome, attempt.will_retry) == ("WORKER_FAILURE", True)
    assert count(connection, "RUNNING") == 0


def test_tasks_that_end_within_the_grace_make_a_clean_stop(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--shutdown-grace", "300")
    sent = start_and_wait(fleet, journal, programs, "sleep", 0.7)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == CLEAN
    assert task(connection, sent.task_id).status == "COMPLETED"


def test_a_task_deaf_to_the_end_of_the_grace_is_killed(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--shutdown-grace", "0.2")
    sent = start_and_wait(fleet, journal, programs, "limited_and_deaf")
    begin_stop(worker)
    before = worker.cpu_seconds()
    used = processor_seconds_of_ended(worker) - before
    assert worker.wait() == FORCED
    assert count(connection, "RUNNING") == 0
    assert task(connection, sent.task_id).status == "FAILED"
    assert used < 0.5


def test_a_second_signal_interrupts_and_a_third_leaves_at_once(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start()
    polite = start_and_wait(fleet, journal, programs, "sleep_and_clean_up", 600)
    rude = start_and_wait(fleet, journal, programs, "never_stop")
    family = worker.family()
    begin_stop(worker)
    worker.signal(signal.SIGTERM)
    wait_for_status(connection, polite.task_id, "FAILED")
    assert worker.process.poll() is None
    worker.signal(signal.SIGINT)
    assert worker.wait() == FORCED
    assert all(map(is_gone, family))
    # It left too quickly to say what became of the other; recovery finds it.
    assert task(connection, rude.task_id).status == "RUNNING"


def test_ctrl_c_in_a_terminal_is_an_orderly_stop(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start()
    sent = start_and_wait(fleet, journal, programs, "sleep", 0.7)
    worker.signal_group(signal.SIGINT)
    assert worker.wait() == CLEAN
    assert task(connection, sent.task_id).status == "COMPLETED"
    assert "Traceback" not in worker.log()


def test_a_closed_terminal_is_an_orderly_stop(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start(processes=1)
    sent = start_and_wait(fleet, journal, programs, "rest_until_released", "terminal")
    # The kernel sends the signal, and so does the shell.
    worker.signal_group(signal.SIGHUP)
    worker.wait_for("worker_stopping")
    worker.signal_group(signal.SIGHUP)
    journal.release("terminal")
    assert worker.wait() == CLEAN
    assert task(connection, sent.task_id).status == "COMPLETED"
    assert not worker.events("tasks_interrupted")


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
def test_a_service_manager_that_signals_every_process_gets_an_orderly_stop(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database, method: str
) -> None:
    worker = fleet.start("--start-method", method)
    sent = start_and_wait(fleet, journal, programs, "sleep", 0.7)
    for pid in (worker.pid, *worker.family()):
        os.kill(pid, signal.SIGTERM)
    assert worker.wait() == CLEAN
    assert task(connection, sent.task_id).status == "COMPLETED"


def test_an_idle_worker_stops_during_an_outage(
    fleet: Fleet, server_url: str, connection: Database, programs: ModuleType
) -> None:
    worker = fleet.start(config=HARDLY_POLLS)
    # Its first claim is answered when it describes itself; one in doubt would be waited for.
    states = "SELECT FROM horsies_worker_states"
    wait_until(lambda: connection.execute(states).fetchall())
    with outage(server_url, connection):
        wait_until(lambda: worker.events("notifications_lost") or worker.events("database_lost"))
        assert worker.stop() == CLEAN


def lose_the_answer_to_a_claim(proxy: Proxy, programs: ModuleType) -> str:
    """Have a claim committed whose answer never arrives, and the database vanish; the task."""
    proxy.swallow_answer_with(b"marked")
    sent = programs.sleep.send(0, "marked").unwrap()
    wait_until(proxy.swallowed.is_set)
    proxy.stop()
    return str(sent.task_id)


def test_a_claim_in_doubt_is_given_back_before_the_worker_leaves(
    fleet: Fleet, connection: Database, programs: ModuleType
) -> None:
    with Proxy(fleet.way.url) as proxy:
        config = QUICK_POLLS | {"broker": fleet.way.broker}
        worker = fleet.start(config=config, database_url=proxy.url)
        task_id = lose_the_answer_to_a_claim(proxy, programs)
        begin_stop(worker)
        assert task(connection, task_id).status == "RUNNING"
        proxy.start()
        assert worker.wait() == CLEAN
        row = task(connection, task_id)
        assert (row.status, row.claimed_by_worker_id) == ("PENDING", None)
        assert attempts(connection, task_id) == []


def test_a_claim_in_doubt_is_not_waited_for_for_ever(
    fleet: Fleet, connection: Database, programs: ModuleType
) -> None:
    with Proxy(fleet.way.url) as proxy:
        config = QUICK_POLLS | {"broker": fleet.way.broker}
        worker = fleet.start(config=config, database_url=proxy.url)
        task_id = lose_the_answer_to_a_claim(proxy, programs)
        worker.signal(signal.SIGTERM)
        worker.wait_for("claims_left")
        assert worker.wait() == FORCED
        assert task(connection, task_id).status == "RUNNING"


def test_a_result_waits_for_the_database_before_the_worker_leaves(
    fleet: Fleet, journal: Journal, server_url: str, connection: Database, programs: ModuleType
) -> None:
    worker = fleet.start()
    sent = start_and_wait(fleet, journal, programs, "rest_until_released", "outage")
    with outage(server_url, connection):
        begin_stop(worker)
        journal.release("outage")
        wait_until(lambda: journal.lines("end", sent.task_id))
        worker.wait_for("database_lost")
        assert worker.process.poll() is None
    assert worker.wait() == CLEAN
    assert task(connection, sent.task_id).status == "COMPLETED"


@pytest.mark.pooled
def test_three_signals_leave_even_while_a_result_waits_for_the_database(
    fleet: Fleet, journal: Journal, server_url: str, connection: Database, programs: ModuleType
) -> None:
    worker = fleet.start()
    start_and_wait(fleet, journal, programs, "rest_until_released", "outage")
    with outage(server_url, connection):
        begin_stop(worker)
        journal.release("outage")
        wait_until(lambda: journal.lines("end"))
        worker.wait_for("database_lost")
        worker.signal(signal.SIGTERM)
        worker.signal(signal.SIGINT)
        assert worker.wait() == FORCED


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--max-tasks-per-child", "1"], FAILED, "--max-tasks-per-child must be 0"),
        (["--max-memory-per-child-mb", "0"], FAILED, "--max-memory-per-child-mb must be above 0"),
        (["--processes", "0"], FAILED, "--processes must be at least 1"),
        (["--shutdown-grace", "-1"], FAILED, "--shutdown-grace must be 0 or more"),
        (["--start-method", "teleport"], USAGE, "teleport"),
        (["--no-such-option"], USAGE, "no-such-option"),
    ],
)
def test_options_that_cannot_work_end_before_anything_starts(
    fleet: Fleet, options: list[str], code: int, text: str
) -> None:
    worker = fleet.start(*options, ready=False)
    assert worker.wait() == code
    assert text in worker.log()
    assert "Traceback" not in worker.log()


@pytest.mark.parametrize(
    ("application", "text"),
    [
        ("tests.e2e.no_such_module:app", "no_such_module"),
        ("tests.support.apps.programs:no_such_app", "no_such_app"),
        ("tests.support.apps.broken_tasks:app", "the shop is closed"),
    ],
)
def test_an_application_that_does_not_load_is_named(
    fleet: Fleet, application: str, text: str
) -> None:
    worker = fleet.start(application=application, ready=False)
    assert worker.wait() == FAILED
    assert text in worker.log()
    assert "Traceback" not in worker.log()


def test_a_database_that_does_not_exist_ends_the_worker_with_one_line(fleet: Fleet) -> None:
    url = with_password(database_on(fleet.database_url, "no_such_database"), "hunter2")
    worker = fleet.start(database_url=url, ready=False)
    assert worker.wait() == FAILED
    assert "The database does not exist" in worker.log()
    assert "hunter2" not in worker.log()
    assert "Traceback" not in worker.log()


def test_a_task_decides_how_a_stop_interrupts_it(
    fleet: Fleet, journal: Journal, programs: ModuleType, connection: Database
) -> None:
    worker = fleet.start("--shutdown-grace", "3", processes=3)
    at_once = start_and_wait(fleet, journal, programs, "sleep_or_fail", 600)
    later = start_and_wait(fleet, journal, programs, "sleep_or_return", 600)
    quick = start_and_wait(fleet, journal, programs, "sleep_or_return", 0.7)
    worker.signal(signal.SIGTERM)
    wait_for_status(connection, at_once.task_id, "FAILED")
    assert task(connection, at_once.task_id).error_code == "WORKER_STOPPED"
    assert task(connection, later.task_id).status == "RUNNING"
    assert worker.wait() == CLEAN
    assert task(connection, quick.task_id).status == "COMPLETED"
    row = row_of(connection, later.task_id)
    assert (row["status"], row["retry_count"], row["max_retries"]) == ("PENDING", 1, 4)
    (attempt,) = attempts(connection, later.task_id)
    assert (attempt.outcome, attempt.will_retry) == ("WORKER_FAILURE", True)
    assert attempt.error_code == "WORKER_STOPPED"
    fleet.start(processes=1)
    wait_until(lambda: len(journal.lines("start", later.task_id)) == 2)
    assert journal.lines("start", later.task_id)[-1].attempt == 2
