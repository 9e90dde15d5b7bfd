"""Retries, delays and deadlines on one worker that lives on notifications alone."""

from __future__ import annotations

from types import ModuleType

import pytest

from horsies.monitor.queries import TaskFilters, list_tasks
from tests.support.database import Database
from tests.support.tables import attempts, task
from tests.support.wait import in_seconds
from tests.support.workers import HARDLY_POLLS, RunningWorker

WORKER = {"config": HARDLY_POLLS}


def test_a_retry_that_would_miss_the_deadline_fails_with_the_original_error(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.fail_on_schedule.with_options(good_until=in_seconds(1.5)).send().unwrap()
    assert sent.get(10_000).err_value.error_code == "FLAKY"
    made = attempts(connection, sent.task_id)
    assert [(one.outcome, one.will_retry) for one in made] == [("FAILED", True), ("FAILED", False)]
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code, row.retry_count) == ("FAILED", "FLAKY", 1)


def test_a_code_too_long_for_an_index_is_retried_and_kept_whole_in_the_result(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.fail_with_long_code.send().unwrap()
    error = sent.get(10_000).err_value
    assert error.error_code == programs.LONG_CODE
    assert (error.message, error.data) == ("too long", {"left": 0})
    made = attempts(connection, sent.task_id)
    cut = programs.LONG_CODE[:197] + "..."
    assert [(one.will_retry, one.error_code) for one in made] == [(True, cut), (False, cut)]
    assert task(connection, sent.task_id).error_code == cut
    filters = TaskFilters(error_codes=[programs.LONG_CODE])
    (listed,) = list_tasks(programs.app.get_broker(), filters).unwrap().rows
    assert listed.id == sent.task_id


@pytest.mark.pooled
def test_delayed_tasks_start_on_time(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    delays = [1.1, 0.4, 0.8]
    sent = [programs.noop.schedule(delay).unwrap() for delay in delays]
    for one in sent:
        assert one.get(10_000).is_ok()
        row = task(connection, one.task_id)
        assert row.started_at is not None
        assert 0 <= (row.started_at - row.enqueued_at).total_seconds() < 0.25


def test_a_deadline_is_kept_on_time_by_an_idle_worker(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    deadline = in_seconds(1.0)
    sent = programs.noop.with_options(good_until=deadline).schedule(60).unwrap()
    error = sent.get(10_000).err_value
    assert error.error_code == "TASK_EXPIRED"
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code) == ("EXPIRED", "TASK_EXPIRED")
    assert row.failed_at is not None
    assert 0 <= (row.failed_at - deadline).total_seconds() < 0.25
    assert attempts(connection, sent.task_id) == []


def test_a_sleeping_worker_wakes_for_a_new_task_without_its_poll(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    for _ in range(5):
        sent = programs.noop.send().unwrap()
        assert sent.get(5_000).is_ok()
        row = task(connection, sent.task_id)
        assert row.started_at is not None
        assert (row.started_at - row.enqueued_at).total_seconds() < 0.25
