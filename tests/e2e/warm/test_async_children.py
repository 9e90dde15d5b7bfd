"""Async children: many coroutines share a process, and each is a separate task."""

from __future__ import annotations

import importlib
import time
from types import ModuleType

import pytest

from tests.support.database import Database
from tests.support.tables import attempts, task
from tests.support.wait import wait_until
from tests.support.workers import Journal, RunningWorker

OPTIONS = ("--async-children", "2", "--async-slots", "60")
WORKER = {
    "application": "tests.support.apps.coroutines:app",
    "processes": 1,
    "config": {"log_headers": ["request_id"]},
}


@pytest.fixture(scope="session")
def coroutines(programs: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.coroutines")


def test_many_coroutines_run_at_a_time_and_other_tasks_elsewhere(
    worker: RunningWorker, coroutines: ModuleType, connection: Database
) -> None:
    sent = [coroutines.nap.send(0.5).unwrap() for _ in range(100)]
    beside = coroutines.ordinary.send().unwrap()
    started = time.monotonic()
    pids = {one.get(60_000).ok_value for one in sent}
    assert time.monotonic() - started < 30  # 50 s one after the other
    assert len(pids) == 2
    assert beside.get(30_000).ok_value not in pids


@pytest.mark.parametrize(
    ("how", "code", "text"),
    [
        ("raise", "UNHANDLED_EXCEPTION", "raised ValueError: no such order"),
        ("fail", "CARD_REFUSED", "refused"),
        ("exit", "UNHANDLED_EXCEPTION", "raised SystemExit: 3"),
        ("interrupt", "UNHANDLED_EXCEPTION", "raised KeyboardInterrupt"),
        ("cancelled", "UNHANDLED_EXCEPTION", "raised CancelledError"),
        ("nested exit", "UNHANDLED_EXCEPTION", "raised SystemExit: 3"),
        ("unstorable", "WORKER_SERIALIZATION_ERROR", "cannot be stored"),
    ],
)
def test_a_coroutine_that_fails_fails_alone(
    worker: RunningWorker,
    coroutines: ModuleType,
    connection: Database,
    how: str,
    code: str,
    text: str,
) -> None:
    beside = coroutines.nap.send(0.3).unwrap()
    error = coroutines.failing.send(how).unwrap().get(30_000).err_value
    assert error.error_code == code
    assert text in (error.message or "")
    assert beside.get(30_000).is_ok()


def test_results_errors_and_retries_are_those_of_any_task(
    worker: RunningWorker, coroutines: ModuleType, connection: Database
) -> None:
    assert coroutines.wrapped.send(3).unwrap().get(30_000).ok_value == 3
    assert coroutines.wrapped.send(-3).unwrap().get(30_000).err_value.error_code == "NEGATIVE"
    sent = coroutines.third_time.send().unwrap()
    assert sent.get(30_000).ok_value == 3
    assert [one.will_retry for one in attempts(connection, sent.task_id)] == [True, True, False]


def test_a_time_limit_cancels_one_coroutine_among_others(
    worker: RunningWorker, journal: Journal, coroutines: ModuleType, connection: Database
) -> None:
    others = [coroutines.nap.send(2.0).unwrap() for _ in range(20)]
    sent = coroutines.limited_nap.send(600).unwrap()
    error = sent.get(30_000).err_value
    assert error.error_code == "TASK_TIMEOUT"
    (attempt,) = attempts(connection, sent.task_id)
    assert 1.0 <= (attempt.finished_at - attempt.started_at).total_seconds() < 6
    assert journal.lines("end", sent.task_id)  # its clean-up ran
    assert all(one.get(30_000).is_ok() for one in others)
    assert coroutines.limited_nap.send(0).unwrap().get(30_000).is_ok()
    assert "CancelledError" not in "".join(
        line for line in worker.log().splitlines() if sent.task_id in line
    )


def test_one_running_coroutine_is_cancelled(
    worker: RunningWorker, journal: Journal, coroutines: ModuleType, connection: Database
) -> None:
    sent = coroutines.nap.send(600).unwrap()
    beside = coroutines.nap.send(1.0).unwrap()
    wait_until(lambda: len(journal.lines("start")) == 2)
    sent.cancel().unwrap()
    assert sent.get(30_000).err_value.error_code == "TASK_CANCELLED"
    assert task(connection, sent.task_id).status == "CANCELLED"
    assert beside.get(30_000).is_ok()


def test_each_coroutine_is_its_own_current_task_in_code_and_logs(
    worker: RunningWorker, coroutines: ModuleType, connection: Database
) -> None:
    sent = [coroutines.who_am_i.send().unwrap() for _ in range(20)]
    for one in sent:
        assert one.get(30_000).ok_value == [one.task_id] * 4
    lines = [line for line in worker.log().splitlines() if "horsies.task.who_am_i" in line]
    assert len(lines) == 40
    assert all(line.count(line.split()[-1].rstrip(".")) == 2 for line in lines)


def test_progress_and_headers_belong_to_one_coroutine(
    worker: RunningWorker, coroutines: ModuleType, connection: Database
) -> None:
    slow = [coroutines.reports_progress.send(40).unwrap() for _ in range(3)]

    def stored() -> list[float]:
        rows = connection.execute("SELECT done FROM public.horsies_task_progress").fetchall()
        return [row[0] for row in rows]

    wait_until(lambda: len(stored()) == 3 and all(0 < done < 40 for done in stored()))
    senders = [
        coroutines.sends_with_headers.with_options(headers={"tenant": name}).send(name).unwrap()
        for name in ("red", "blue")
    ]
    for name, one in zip(("red", "blue"), senders, strict=True):
        (options,) = connection.execute(
            "SELECT task_options FROM public.horsies_tasks WHERE id = %s",
            [one.get(30_000).ok_value],
        ).fetchone() or ("",)
        assert f'"tenant":"{name}"' in options
    assert [one.get(30_000).ok_value for one in slow] == [False] * 3
    assert stored() == [40, 40, 40]


def test_nodes_of_a_workflow_run_in_async_children(
    worker: RunningWorker, coroutines: ModuleType, connection: Database
) -> None:
    assert coroutines.sum_of_doubles().start().unwrap().get(20_000).ok_value == 14


def test_hooks_share_the_loop_of_the_coroutines(
    worker: RunningWorker, coroutines: ModuleType, connection: Database
) -> None:
    opened, here = coroutines.hook_loop.send().unwrap().get(30_000).ok_value
    assert opened == here


@pytest.mark.parametrize("name", ["blocks_the_loop", "blocks_in_a_task"])
def test_a_coroutine_that_blocks_the_loop_is_named(
    worker: RunningWorker, coroutines: ModuleType, connection: Database, name: str
) -> None:
    sent = getattr(coroutines, name).with_options(headers={"request_id": name}).send(2.5).unwrap()
    assert sent.get(30_000).is_ok()
    (event,) = [one for one in worker.events("loop_blocked") if one["task_name"] == name]
    assert event["task_id"] == sent.task_id
    (line,) = [one for one in worker.log().splitlines() if f"task '{name}' has blocked" in one]
    assert f"[request_id={name}] " in line
    assert str(event["child_pid"]) in line
    assert "coroutines.py:" in line
    again = getattr(coroutines, name).send(1.6).unwrap()
    assert again.get(30_000).is_ok()
    found = [one for one in worker.events("loop_blocked") if one["task_name"] == name]
    assert len(found) <= 2  # once per child and minute
