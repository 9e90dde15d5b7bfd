"""What an attempt logs is stored with its outcome, once, whatever becomes of its child."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections.abc import Iterable, Sequence
from types import ModuleType
from typing import Any, LiteralString

import pytest

from tests.support.database import Database
from tests.support.poison import poisoned
from tests.support.rows import add_task, ago
from tests.support.tables import (
    attempts,
    busy_children,
    count,
    wait_for_status,
    wait_until_empty,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, RunningWorker, is_gone

APPLICATION = "tests.support.apps.talking:app"
KEPT = {"log_capture": {"max_lines": 100, "max_bytes": 8_192}}
IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
TASKS = 2_000 if IS_LONG else 200
WORKER_KILLS = 30 if IS_LONG else 2


@pytest.fixture(scope="module")
def talking(programs: ModuleType) -> Iterable[ModuleType]:
    """The application, once the database of the tests is known."""
    module = importlib.import_module("tests.support.apps.talking")
    yield module
    module.app.close()


def start(fleet: Fleet, *options: str, config: Any = KEPT, **more: Any) -> Any:
    return fleet.start(*options, application=APPLICATION, config=config, **more)


def journal_of(fleet: Fleet) -> list[Sequence[str]]:
    """The lines that tasks wrote down: task, attempt, process, text."""
    path = fleet.journal.path
    return [line.split(" ", 3) for line in path.read_text().splitlines()] if path.exists() else []


def logs_of(connection: Database, task_id: str) -> list[tuple[int, int, list[str]]]:
    """Attempt, dropped lines and messages of each stored log of a task."""
    rows = connection.execute(
        "SELECT attempt, dropped, body FROM horsies_task_logs WHERE task_id = %s ORDER BY generation",
        [task_id],
    ).fetchall()
    return [(attempt, dropped, messages(body)) for attempt, dropped, body in rows]


def messages(body: str) -> list[str]:
    return [line.split(": ", 1)[1] for line in body.splitlines() if not line.startswith(" ")]


def test_each_attempt_keeps_its_own_lines_and_the_traceback_of_its_error(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    start(fleet)
    sent, silent = talking.stumble.send().unwrap(), talking.quiet.send().unwrap()
    assert sent.get(30_000).ok_value == "done"
    assert silent.get(30_000).ok_value == "done"
    first, second = logs_of(connection, sent.task_id)
    assert first[:2] == (1, 0)
    assert first[2][:2] == ["attempt 1", "from a thread"]
    assert len(first[2]) == 3
    assert second == (2, 0, ["attempt 2", "from a thread"])
    ((body,),) = connection.execute(
        "SELECT body FROM horsies_task_logs WHERE attempt = 1"
    ).fetchall()
    assert "    Traceback (most recent call last):" in body
    assert "Z WARNING talking: from a thread\n" in body
    assert logs_of(connection, silent.task_id) == []


def test_the_middle_of_a_long_log_is_left_out_and_counted(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    start(fleet)
    sent = talking.talk.send(600).unwrap()
    assert sent.get(30_000).ok_value == 600
    ((_, dropped, lines),) = logs_of(connection, sent.task_id)
    assert dropped == 600 - len(lines)
    assert (lines[0], lines[-1]) == ("line 0", "line 599")
    assert 90 <= len(lines) <= 100


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_the_lines_before_the_end_of_the_child_are_kept(
    fleet: Fleet, talking: ModuleType, connection: Database, how: str
) -> None:
    start(fleet)
    sent = talking.talk.send(3, "never").unwrap()
    ((_, _, pid, _),) = wait_until(lambda: journal_of(fleet))
    expected = ["line 0", "line 1", "line 2", "waiting"]
    if how == "killed":
        os.kill(int(pid), signal.SIGKILL)
    else:
        expected.append("leaving")
    code = {"killed": "WORKER_CRASHED", "stopped": "TASK_TIMEOUT"}[how]
    assert sent.get(30_000).err_value.error_code == code
    assert logs_of(connection, sent.task_id) == [(1, 0, expected)]


def test_every_attempt_has_its_lines_once_when_children_die_in_windows(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    start(fleet)
    talking.short.send_many(talking.short.bind(number) for number in range(TASKS)).unwrap()
    wait_until_empty(connection, 90)
    written = {(task, int(attempt)): text for task, attempt, _, text in journal_of(fleet)}
    rows = connection.execute(
        "SELECT task_id::text, attempt, body FROM horsies_task_logs"
    ).fetchall()
    assert len(rows) == len(written) == len(attempts(connection))
    assert len(rows) > TASKS
    assert {(task, attempt): messages(body)[0] for task, attempt, body in rows} == written


@pytest.mark.timeout(900 if IS_LONG else 240)
def test_recorded_attempts_have_their_lines_once_when_workers_are_killed(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    """Lines are stored with the outcome, so a kill loses both of them or neither."""
    config = KEPT | QUICK_RECOVERY
    workers = [start(fleet, config=config) for _ in range(2)]
    batch = TASKS // WORKER_KILLS
    for kill in range(WORKER_KILLS):
        numbers = range(kill * batch, (kill + 1) * batch)
        talking.steady.send_many(talking.steady.bind(number) for number in numbers).unwrap()
        kill_amid_work(workers[kill % 2], connection)
        workers[kill % 2] = start(fleet, config=config)
    wait_until_empty(connection, 120)
    ended = attempts(connection)
    completed = {(one.task_id, one.attempt) for one in ended if one.outcome == "COMPLETED"}
    assert len(completed) == batch * WORKER_KILLS
    assert "WORKER_CRASHED" in {one.error_code for one in ended}
    written = {(task, int(attempt)): text for task, attempt, _, text in journal_of(fleet)}
    rows = connection.execute(
        "SELECT task_id::text, attempt, body FROM horsies_task_logs"
    ).fetchall()
    stored = sorted((task, attempt, messages(body)) for task, attempt, body in rows)
    assert stored == sorted((*one, [written[one]]) for one in completed)


def kill_amid_work(worker: RunningWorker, connection: Database) -> None:
    """Kill a worker while it runs tasks, or once all tasks have ended."""
    open_statuses = ("PENDING", "CLAIMED", "RUNNING")
    wait_until(lambda: busy_children(worker, connection) or not count(connection, *open_statuses))
    worker.signal(signal.SIGKILL)


def test_coroutines_keep_their_own_lines_even_if_their_process_is_killed(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    start(fleet, "--async-children", "1", processes=1)
    ended, lost = talking.wait_async.send("a").unwrap(), talking.wait_async.send("b").unwrap()
    wait_until(lambda: len(journal_of(fleet)) == 6)
    (pid,) = {line[2] for line in journal_of(fleet)}
    fleet.journal.release("a")
    assert ended.get(30_000).ok_value == "a"
    os.kill(int(pid), signal.SIGKILL)
    assert lost.get(30_000).err_value.error_code == "WORKER_CRASHED"
    assert logs_of(connection, ended.task_id) == [(1, 0, ["a 0", "a 1", "a 2"])]
    assert logs_of(connection, lost.task_id) == [(1, 0, ["b 0", "b 1", "b 2"])]


def test_transactions_and_every_stay_of_a_durable_run_keep_their_lines(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    start(fleet)
    run, inside = (
        talking.talk_and_sleep.send().unwrap(),
        talking.talk_in_transaction.send().unwrap(),
    )
    assert inside.get(30_000).ok_value == "done"
    assert run.get(30_000).ok_value == "done"
    assert logs_of(connection, inside.task_id) == [(1, 0, ["inside"])]
    assert logs_of(connection, run.task_id) == [
        (1, 0, ["first stay"]),
        # Its code runs from the start again; the steps that are recorded do not.
        (1, 0, ["first stay", "second stay"]),
    ]


def test_the_lines_of_running_attempts_are_lost_with_their_worker(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    """As the documentation says: memory that a worker shares with its children ends with it."""
    worker = start(fleet)
    sent = talking.wait_here.send("later").unwrap()
    ((_, _, pid, _),) = wait_until(lambda: journal_of(fleet))
    worker.signal(signal.SIGKILL)
    wait_until(lambda: is_gone(int(pid)))
    start(fleet)
    wait_for_status(connection, sent.task_id, "FAILED")
    assert logs_of(connection, sent.task_id) == []


def test_nothing_is_kept_without_the_setting(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    fleet.start(application=APPLICATION)
    assert talking.talk.send(3).unwrap().get(30_000).ok_value == 3
    assert connection.execute("SELECT count(*) FROM horsies_task_logs").fetchone() == (0,)


HEADERS = {"request_id": "r-17", "secret": "s-99"}
NAMED = {"log_headers": ["request_id"]}


def start_naming(fleet: Fleet, **config: Any) -> RunningWorker:
    """A worker whose lines about a task show one of its headers."""
    return fleet.start("--log-format", "json", application=APPLICATION, config=NAMED | config)


def messages_about(worker: RunningWorker, task_id: str) -> dict[str, list[str]]:
    """The worker's lines that name the task, by logger; each has the header, and none the other one."""
    lines = [json.loads(line) for line in worker.log().splitlines() if line.startswith("{")]
    about = [line for line in lines if task_id in json.dumps(line)]
    assert [line["headers"] for line in about] == [{"request_id": "r-17"}] * len(about)
    assert "s-99" not in worker.log()
    found: dict[str, list[str]] = {}
    for line in about:
        found.setdefault(line["logger"], []).append(line["message"])
    return found


def test_named_headers_stand_in_the_lines_of_the_task_and_of_the_worker(
    fleet: Fleet, talking: ModuleType
) -> None:
    worker = start_naming(fleet)
    sent = talking.wait_here.with_options(headers=HEADERS).send("never").unwrap()
    ((_, _, pid, _),) = wait_until(lambda: journal_of(fleet))
    os.kill(int(pid), signal.SIGKILL)
    assert sent.get(30_000).err_value.error_code == "WORKER_CRASHED"
    assert worker.stop() == 0
    assert {"talking", "horsies.worker", "horsies.tasks"} <= set(
        messages_about(worker, sent.task_id)
    )


def test_named_headers_stand_in_the_line_of_the_worker_that_recovers_the_task(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    doomed = start_naming(fleet)
    sent = talking.wait_here.with_options(headers=HEADERS).send("never").unwrap()
    wait_until(lambda: journal_of(fleet))
    heir = start_naming(fleet)
    doomed.signal(signal.SIGKILL)
    wait_for_status(connection, sent.task_id, "FAILED")
    assert heir.stop() == 0
    (line,) = messages_about(heir, sent.task_id)["horsies.recover"]
    assert line.startswith(f"recovered task wait_here {sent.task_id}")


@pytest.mark.parametrize(
    "refused",
    ["NEW.status IN ('CLAIMED', 'RUNNING')", "NEW.status = 'COMPLETED'"],
    ids=["claim", "record"],
)
def test_named_headers_stand_in_the_line_about_a_blocked_task(
    fleet: Fleet, talking: ModuleType, connection: Database, refused: LiteralString
) -> None:
    sent = talking.quiet.with_options(headers=HEADERS).send().unwrap()
    with poisoned(connection, f"NEW.id = {{}} AND {refused}", sent.task_id):
        worker = start_naming(fleet)
        worker.wait_for("blocked")
    assert sent.get(30_000).ok_value == "done"
    assert worker.stop() == 0
    (line,) = messages_about(worker, sent.task_id)["horsies.blocked"]
    assert f"task {sent.task_id} is blocked" in line


def test_named_headers_stand_in_the_lines_about_an_unknown_task(
    fleet: Fleet, talking: ModuleType, connection: Database
) -> None:
    worker = start_naming(fleet, recovery={"unknown_task_grace_ms": 1_000})
    options = json.dumps({"headers": HEADERS})
    sent = add_task(connection, task_name="nobody", enqueued_at=ago(0), task_options=options)
    wait_for_status(connection, sent, "FAILED")
    assert worker.stop() == 0
    lines = [line for found in messages_about(worker, sent).values() for line in found]
    assert any("leaves it to other workers" in line for line in lines)
    assert any("No worker of queue 'default' has had a task 'nobody'" in line for line in lines)
