"""The running task as its own code sees it."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import CurrentTask, ErrorCode, HorsiesError, NoCurrentTaskError, current_task
from horsies.current_task import attempt_token, run_of, set_running_task
from horsies.db.statements.turn import ClaimedTask
from horsies.worker.protocol import Assignment, ProgressReport
from horsies.worker.sharing import SharedPage

MOMENT = "2026-11-16 05:30:00.25+00"
CLAIMED = ClaimedTask(
    *("id-1", 3, "shop.ship", "parcels", "[]", "{}", 1, 2),
    '{"headers": {"tenant": "a"}}',
    1500,
    1,
    priority=7,
    details=f"{MOMENT}\n2026-11-16 06:30:00+00\n\n{MOMENT}\n4\nrun-1\nship\nnight\nly",
)


def assignment(claimed: ClaimedTask = CLAIMED) -> Assignment:
    attempt = claimed.retry_count + 1
    place = (claimed.id, claimed.generation, claimed.task_name, attempt, "[]", "{}")
    return Assignment(*place, claimed.timeout_ms, None, claimed.stored())


@pytest.fixture
def page() -> SharedPage:
    page, descriptor = SharedPage.create()
    SharedPage(descriptor)  # closes it
    return page


@pytest.fixture
def running(page: SharedPage) -> Iterator[CurrentTask]:
    task = CurrentTask(assignment(), 100.0, page)
    set_running_task(task)
    yield task
    set_running_task(None)


def test_outside_a_task_there_is_one_clear_error() -> None:
    with pytest.raises(NoCurrentTaskError, match="No task is running") as caught:
        current_task()
    assert isinstance(caught.value, HorsiesError)
    assert isinstance(caught.value, LookupError)
    assert caught.value.code is ErrorCode.NO_CURRENT_TASK


def test_a_task_sees_its_fields(running: CurrentTask) -> None:
    moment = datetime(2026, 11, 16, 5, 30, 0, 250_000, UTC)
    task = current_task()
    assert task is running
    assert (task.id, task.name, task.queue, task.priority) == ("id-1", "shop.ship", "parcels", 7)
    assert (task.attempt, task.max_attempts, task.is_last_attempt) == (2, 3, False)
    assert (task.sent_at, task.enqueued_at) == (
        moment,
        moment + timedelta(minutes=59, seconds=59.75),
    )
    assert (task.good_until, task.slot, task.schedule_name) == (None, moment, "night\nly")
    assert (task.workflow_id, task.node_id, task.item_index) == ("run-1", "ship", 4)
    assert run_of(assignment().stored) == "run-1"
    assert task.headers == {"tenant": "a"}
    assert task.started_at == datetime.fromtimestamp(100, UTC)
    assert task.deadline == task.started_at + timedelta(milliseconds=1500)
    assert task.logger is logging.getLogger("horsies.task.shop.ship")


def test_a_task_without_a_workflow_schedule_or_limit_has_none(page: SharedPage) -> None:
    plain = CLAIMED._replace(details=f"{MOMENT}\n{MOMENT}\n\n\n\n\n\n", task_options=None)
    task = CurrentTask(assignment(plain._replace(timeout_ms=None, retry_count=2)), 0.0, page)
    assert (task.good_until, task.slot, task.schedule_name, task.deadline) == (None,) * 4
    assert (task.workflow_id, task.node_id, task.item_index) == (None,) * 3
    assert run_of(plain.stored()) is None
    assert run_of("") is None
    assert task.headers == {}
    assert task.is_last_attempt


@pytest.mark.parametrize("max_retries", [2_000_000_000, 2_000_000_001])
def test_no_attempt_is_the_last_without_a_limit(max_retries: int) -> None:
    task = CurrentTask(assignment(CLAIMED._replace(max_retries=max_retries)), 0.0)
    assert (task.max_attempts, task.is_last_attempt) == (None, False)


@pytest.mark.parametrize("options", ["[]", "no JSON", '{"headers": 3}', ""])
def test_options_of_other_programs_are_tolerated(options: str) -> None:
    task = CurrentTask(assignment(CLAIMED._replace(task_options=options)), 0.0)
    assert task.headers == {}
    assert task.schedule_name == "night\nly"


def test_threads_and_coroutines_find_the_task(running: CurrentTask) -> None:
    found: list[CurrentTask] = []
    thread = threading.Thread(target=lambda: found.append(current_task()))
    thread.start()
    thread.join()

    async def inner() -> CurrentTask:
        return current_task()

    assert [*found, asyncio.run(inner())] == [running, running]


def test_the_worker_reads_the_latest_progress(running: CurrentTask, page: SharedPage) -> None:
    assert page.read_progress(assignment()) is None
    running.progress(1, 10, "first")
    running.progress(2, 10, "a \0 zero, a \ud800 surrogate")
    report = page.read_progress(assignment())
    assert report == ProgressReport("id-1", 3, 2.0, 10.0, "a \ufffd zero, a ? surrogate")
    running.progress(0.5, note="x" * 300)
    assert page.read_progress(assignment()) == ProgressReport("id-1", 3, 0.5, None, "x" * 200)
    other = assignment()._replace(generation=4)
    assert page.read_progress(other) is None


def test_a_long_note_written_without_the_library_is_cut(page: SharedPage) -> None:
    written = assignment()
    token = attempt_token(written.task_id, written.generation)
    page.write_progress(token, 1.0, 2.0, "é\0".encode() * 500)
    report = page.read_progress(written)
    assert report is not None
    assert report.note == "é\ufffd" * 100


def test_an_attempt_that_has_ended_reports_nothing(running: CurrentTask, page: SharedPage) -> None:
    set_running_task(None)
    running.progress(1)
    assert page.read_progress(assignment()) is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        (("3",), TypeError),
        ((None,), TypeError),
        ((1, "10"), TypeError),
        ((1, 2, 3), TypeError),
        ((10**400,), TypeError),
        ((float("nan"),), ValueError),
        ((1, float("inf")), ValueError),
    ],
)
def test_progress_that_is_not_a_number_is_refused(
    running: CurrentTask, page: SharedPage, given: tuple[Any, ...], error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"progress\(\) takes"):
        running.progress(*given)
    assert page.read_progress(assignment()) is None


def test_a_stop_request_reaches_the_task(running: CurrentTask, page: SharedPage) -> None:
    assert not running.should_stop()
    page.request_stop()
    assert running.should_stop()
