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
# Less than any interval that could stand in for a notification or a due time; the machine may be busy.
SOON_SECONDS = 5.0


def test_a_retry_that_would_miss_the_deadline_fails_with_the_original_error(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    # The first retry follows after a second, the second one after an hour.
    sent = programs.fail_soon_and_late.with_options(good_until=in_seconds(60)).send().unwrap()
    assert sent.get(30_000).err_value.error_code == "FLAKY"
    made = attempts(connection, sent.task_id)
    assert [(one.outcome, one.will_retry) for one in made] == [("FAILED", True), ("FAILED", False)]
    assert made[0].retry_reason == "retried by code FLAKY"
    assert "would start after good_until" in made[1].retry_reason
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code, row.retry_count) == ("FAILED", "FLAKY", 1)


def test_a_subclass_of_a_listed_exception_is_retried_after_fractions_of_a_second(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.raise_then_work.send().unwrap()
    assert sent.get(30_000).err_value.data == {"exception_type": "KeyError"}
    first, second, last = attempts(connection, sent.task_id)
    by_away = f"retried by {programs.Away.__module__}.Away"
    assert [one.retry_reason for one in (first, second, last)] == [
        by_away,
        by_away,
        "not retried: neither code UNHANDLED_EXCEPTION nor builtins.KeyError is listed in "
        "auto_retry_for",
    ]
    gaps = [
        later.started_at - earlier.finished_at
        for earlier, later in ((first, second), (second, last))
    ]
    assert all(gap.total_seconds() >= wait for gap, wait in zip(gaps, (0.05, 0.1), strict=True))
    assert sum(gap.total_seconds() for gap in gaps) < SOON_SECONDS
    line = f"{sent.task_id} #1 failed with UNHANDLED_EXCEPTION after "
    (logged,) = [one for one in worker.log().splitlines() if line in one]
    assert logged.endswith(f" s, retry 1 of 2 in 0.05 s ({by_away})")
    info = sent.info(include_attempts=True).unwrap()
    assert info is not None
    assert info.attempts is not None
    assert {one.retry_reason for one in info.attempts[1:]} == {by_away}


@pytest.mark.parametrize(("times", "succeeds"), [(2, True), (4, False)])
def test_a_worker_retries_a_task_without_a_policy_three_times(
    worker: RunningWorker, programs: ModuleType, connection: Database, times: int, succeeds: bool
) -> None:
    sent = programs.ask_for_retry.send(0.1, times).unwrap()
    result = sent.get(30_000)
    made = attempts(connection, sent.task_id)
    assert {one.retry_reason for one in made if one.will_retry} == {"retried by RetryLater"}
    row = task(connection, sent.task_id)
    assert (row.retry_count, row.max_retries) == (min(times, 3), 3)
    assert made[1].started_at.timestamp() - made[0].finished_at.timestamp() >= 0.1
    assert result.is_ok() is succeeds
    if not succeeds:
        assert result.err_value.error_code == "RETRY_LATER"
        assert made[-1].retry_reason == "not retried: max_retries=3 is reached"
    assert "Traceback" not in worker.log().partition(sent.task_id)[2]


def test_retry_later_counts_as_one_of_the_retries_of_the_policy(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.ask_for_one_retry.send().unwrap()
    assert sent.get(30_000).err_value.error_code == "GATEWAY_BUSY"
    made = attempts(connection, sent.task_id)
    assert [one.retry_reason for one in made] == [
        "retried by RetryLater",
        "not retried: max_retries=1 is reached",
    ]


def test_a_code_too_long_for_an_index_is_retried_and_kept_whole_in_the_result(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    sent = programs.fail_with_long_code.send().unwrap()
    error = sent.get(30_000).err_value
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
        assert one.get(30_000).is_ok()
        row = task(connection, one.task_id)
        assert row.started_at is not None
        assert 0 <= (row.started_at - row.enqueued_at).total_seconds() < SOON_SECONDS


def test_a_deadline_is_kept_on_time_by_an_idle_worker(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    deadline = in_seconds(2.0)
    sent = programs.noop.with_options(good_until=deadline).schedule(60).unwrap()
    error = sent.get(30_000).err_value
    assert error.error_code == "TASK_EXPIRED"
    row = task(connection, sent.task_id)
    assert (row.status, row.error_code) == ("EXPIRED", "TASK_EXPIRED")
    assert row.failed_at is not None
    assert 0 <= (row.failed_at - deadline).total_seconds() < SOON_SECONDS
    assert attempts(connection, sent.task_id) == []


def test_a_sleeping_worker_wakes_for_a_new_task_without_its_poll(
    worker: RunningWorker, programs: ModuleType, connection: Database
) -> None:
    for _ in range(5):
        sent = programs.noop.send().unwrap()
        assert sent.get(30_000).is_ok()
        row = task(connection, sent.task_id)
        assert row.started_at is not None
        assert (row.started_at - row.enqueued_at).total_seconds() < SOON_SECONDS
