"""The consequences of the end of an attempt for its task."""

from __future__ import annotations

import json
from typing import Any

import pytest

from horsies import RetryPolicy
from horsies.db.statements.turn import ClaimedTask
from horsies.failure_fingerprint import fingerprint_of
from horsies.states import TaskAttemptOutcome, TaskStatus
from horsies.tasks.outcome import (
    STOPPED_BY_CANCEL,
    STOPPED_BY_MEMORY,
    STOPPED_BY_SHUTDOWN,
    STOPPED_BY_TIMEOUT,
    STOPPED_FOR_REQUEUE,
    Failure,
    Outcome,
    outcome_of_crash,
    outcome_of_error,
    outcome_of_stop,
    recording_steps,
    without_result,
)
from horsies.worker.protocol import ChildReport

TASK = ClaimedTask("id-1", 3, "charge", "default", "[]", "{}", 0, 0, None, 500, 4711)
SUCCESS = ChildReport("id-1", 3, True, '{"ok": 1}', None, None)
REFUSAL = ChildReport("id-1", 3, False, '{"err": 1}', "OUT_OF_STOCK", "nothing left")


def retrying(*codes: str, retry_count: int = 0, jitter: bool = False) -> ClaimedTask:
    policy = RetryPolicy.fixed([10, 20], auto_retry_for=list(codes), jitter=jitter)
    options = json.dumps({"retry_policy": policy.to_json()})
    return TASK._replace(retry_count=retry_count, max_retries=2, task_options=options)


def reported(task: ClaimedTask, report: ChildReport, **options: Any) -> Outcome:
    if report.ok:
        return Outcome.completed(task, report.result_json)
    return outcome_of_error(task, report, **options)


def error_in(outcome: Outcome) -> dict[str, Any]:
    error: dict[str, Any] = json.loads(outcome.result)["err"]
    return error


def test_a_success_keeps_its_result_and_the_generation_of_its_claim() -> None:
    assert reported(TASK, SUCCESS) == Outcome(
        task_id="id-1",
        generation=3,
        workflow_id=None,
        status=TaskStatus.COMPLETED,
        result='{"ok": 1}',
        attempt_outcome=TaskAttemptOutcome.COMPLETED,
    )


def test_an_error_the_task_returned_is_final_without_a_policy() -> None:
    assert reported(TASK, REFUSAL) == Outcome(
        task_id="id-1",
        generation=3,
        workflow_id=None,
        status=TaskStatus.FAILED,
        result='{"err": 1}',
        attempt_outcome=TaskAttemptOutcome.FAILED,
        error_code="OUT_OF_STOCK",
        error_message="nothing left",
        failed_reason=None,
        delay_seconds=None,
        fingerprint=fingerprint_of(TASK.task_name, "OUT_OF_STOCK"),
    )


@pytest.mark.parametrize(
    ("task", "delay_seconds"),
    [
        (retrying("OUT_OF_STOCK"), 10.0),
        (retrying("OUT_OF_STOCK", retry_count=1), 20.0),
        (retrying("OUT_OF_STOCK", retry_count=2), None),
        (retrying("ANOTHER_CODE"), None),
        (TASK._replace(max_retries=2, task_options="{not json"), None),
    ],
)
def test_an_error_is_tried_again_as_the_stored_policy_says(
    task: ClaimedTask, delay_seconds: float | None
) -> None:
    assert reported(task, REFUSAL).delay_seconds == delay_seconds


def test_an_exception_is_tried_again_by_a_class_of_the_stored_policy() -> None:
    raised = REFUSAL._replace(exception_names=("shop.Away", "builtins.OSError"))
    outcome = reported(retrying("builtins.OSError"), raised)
    assert (outcome.delay_seconds, outcome.retry_reason) == (10.0, "retried by builtins.OSError")
    final = reported(retrying("builtins.KeyError"), raised)
    assert final.delay_seconds is None
    assert "neither code OUT_OF_STOCK nor shop.Away is listed" in str(final.retry_reason)


def test_a_task_that_asks_for_a_retry_gets_it_without_a_policy() -> None:
    outcome = reported(TASK, REFUSAL._replace(retry_after=0.5))
    assert (outcome.delay_seconds, outcome.max_retries) == (0.5, 3)
    assert outcome.retry_reason == "retried by RetryLater"


def test_a_retry_that_the_database_refuses_is_recorded_with_its_reason() -> None:
    other = retrying("X")._replace(id="id-2")
    outcomes = [reported(retrying("OUT_OF_STOCK"), REFUSAL), reported(other, REFUSAL)]
    steps = recording_steps("worker", outcomes)
    assert list(steps) == ["retried", "failed"]
    (_, retried), (_, failed) = steps.values()
    assert retried.retry_reasons == ["retried by code OUT_OF_STOCK"]
    assert "would start after good_until" in failed.retry_reasons[0]
    assert "code OUT_OF_STOCK is not listed" in failed.retry_reasons[1]


def test_of_two_attempts_of_a_task_the_newest_is_recorded() -> None:
    again = Outcome.completed(TASK._replace(generation=TASK.generation + 1), "2")
    other = Outcome.completed(TASK._replace(id="id-2"), "3")
    for outcomes in (
        [reported(TASK, REFUSAL), other, again],
        [again, other, reported(TASK, REFUSAL)],
    ):
        ((_, done),) = recording_steps("worker", outcomes).values()
        found = zip(done.ids, done.generations, done.results, strict=True)
        assert set(found) == {
            (again.task_id, again.generation, "2"),
            (other.task_id, TASK.generation, "3"),
        }


def test_jitter_only_lengthens_a_delay() -> None:
    task = retrying("OUT_OF_STOCK", jitter=True)
    assert reported(task, REFUSAL, random=lambda: 0.0).delay_seconds == 10.0
    assert reported(task, REFUSAL, random=lambda: 1.0).delay_seconds == 12.5


def test_a_death_is_a_crash_that_says_how_the_process_ended() -> None:
    outcome = outcome_of_crash(TASK, "signal 9 (SIGKILL)")
    assert outcome.status is TaskStatus.FAILED
    assert outcome.attempt_outcome is TaskAttemptOutcome.WORKER_FAILURE
    assert outcome.error_code == "WORKER_CRASHED"
    assert outcome.failed_reason == "The process running the task died: signal 9 (SIGKILL)."
    assert outcome.delay_seconds is None
    assert error_in(outcome)["message"] == outcome.failed_reason


def test_a_death_is_tried_again_only_when_the_policy_lists_crashes() -> None:
    assert outcome_of_crash(retrying("WORKER_CRASHED"), "exit code 3").delay_seconds == 10.0
    assert outcome_of_crash(retrying("OUT_OF_STOCK"), "exit code 3").delay_seconds is None


def test_a_cancelled_task_is_never_tried_again() -> None:
    outcome = outcome_of_stop(retrying("TASK_CANCELLED", "WORKER_CRASHED"), STOPPED_BY_CANCEL)
    assert outcome.status is TaskStatus.CANCELLED
    assert outcome.attempt_outcome is TaskAttemptOutcome.FAILED
    assert outcome.error_code == "TASK_CANCELLED"
    assert outcome.delay_seconds is None


def test_a_task_over_its_time_limit_fails_with_the_limit_in_its_reason() -> None:
    outcome = outcome_of_stop(TASK, STOPPED_BY_TIMEOUT)
    assert outcome.status is TaskStatus.FAILED
    assert outcome.error_code == "TASK_TIMEOUT"
    assert outcome.failed_reason is not None
    assert "timeout_ms=500" in outcome.failed_reason
    assert outcome.delay_seconds is None


@pytest.mark.parametrize("own_ms", [None, 9_000])
def test_a_time_limit_of_another_task_in_the_batch_is_named(own_ms: int | None) -> None:
    task = TASK._replace(timeout_ms=own_ms)
    outcome = outcome_of_stop(task, STOPPED_BY_TIMEOUT, limit_ms=300)
    assert outcome.failed_reason is not None
    assert "timeout_ms=300, the shortest limit" in outcome.failed_reason


def test_a_time_limit_is_tried_again_when_the_policy_lists_it() -> None:
    assert outcome_of_stop(retrying("TASK_TIMEOUT"), STOPPED_BY_TIMEOUT).delay_seconds == 10.0


def test_a_task_that_a_stopping_worker_interrupted_has_a_code_of_its_own() -> None:
    outcome = outcome_of_stop(TASK, STOPPED_BY_SHUTDOWN)
    assert outcome.attempt_outcome is TaskAttemptOutcome.WORKER_FAILURE
    assert outcome.error_code == "WORKER_STOPPED"
    assert outcome_of_stop(retrying("WORKER_STOPPED"), STOPPED_BY_SHUTDOWN).delay_seconds == 10.0
    assert outcome_of_stop(retrying("WORKER_CRASHED"), STOPPED_BY_SHUTDOWN).delay_seconds is None


def test_a_task_that_returns_to_its_queue_uses_up_no_retry() -> None:
    task = TASK._replace(retry_count=3, max_retries=3)
    outcome = outcome_of_stop(task, STOPPED_FOR_REQUEUE)
    assert (outcome.delay_seconds, outcome.max_retries) == (0.0, 4)
    assert outcome.error_code == "WORKER_STOPPED"


def test_an_outcome_the_database_refuses_keeps_its_claim_and_loses_its_texts() -> None:
    for outcome in (reported(TASK, SUCCESS), reported(retrying("X"), REFUSAL)):
        plain = without_result(outcome)
        assert (plain.task_id, plain.generation) == ("id-1", 3)
        assert plain.error_code == "WORKER_SERIALIZATION_ERROR"
        assert error_in(plain)["message"] == "The outcome of the task could not be stored."
        assert plain.delay_seconds is None


@pytest.mark.parametrize(
    ("text", "stored"),
    [(None, None), ("grüße", "grüße"), ("a\0b", "a\\x00b"), ("\ud800", "\\ud800")],
)
def test_messages_are_made_storable(text: str | None, stored: str | None) -> None:
    outcome = outcome_of_error(TASK, Failure("X", text, '{"err": 1}'))
    assert outcome.error_message == stored


def test_a_memory_limit_is_an_outcome_of_its_own_and_retried_if_listed() -> None:
    text = "used 400 MB, more than its memory_limit_mb=300"
    outcome = outcome_of_stop(retrying("OTHER"), STOPPED_BY_MEMORY, description=text)
    assert (outcome.error_code, outcome.delay_seconds) == ("MEMORY_LIMIT", None)
    assert outcome.error_message == f"The process running the task {text}."
    assert outcome_of_stop(retrying("MEMORY_LIMIT"), STOPPED_BY_MEMORY).delay_seconds == 10.0
