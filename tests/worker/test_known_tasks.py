"""Known tasks: fingerprints that tell two versions of a task apart, and the bookkeeping of exclusions."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, GetPydanticSchema, create_model
from pydantic_core import core_schema

from horsies import RetryPolicy, TaskError, TaskResult
from horsies.codec.calls import CallSignature
from horsies.db.statements.refusals import RefusedTask, Taker
from horsies.db.statements.turn import ClaimedTask
from horsies.tasks.outcome import Failure, Outcome, outcome_of_error
from horsies.worker.agenda import NEVER
from horsies.worker.known_tasks import PAUSE_SECONDS, KnownTasks, UnknownTasks, fingerprint
from tests.support.statements import named

GRACE_SECONDS = 600.0
CHECK_SECONDS = 30.0


class Order(BaseModel):
    number: int


class LargerOrder(BaseModel):
    number: int
    note: str = ""


LargerOrder.__name__ = LargerOrder.__qualname__ = "Order"
LargerOrder.model_config["title"] = "Order"


def version_of(parameters: str, **names: Any) -> str:
    scope: dict[str, Any] = {"TaskResult": TaskResult, "TaskError": TaskError, "Any": Any, **names}
    exec(f"def task({parameters}) -> TaskResult[int, TaskError]: ...", scope)
    return fingerprint(CallSignature.of(scope["task"]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a: int", "a: int, b: int = 0"),
        ("a: int, b: int", "a: int, b: int = 0"),
        ("a: int", "a: str"),
        ("a: int", "*, a: int"),
        ("a: int", ""),
    ],
)
def test_a_fingerprint_changes_with_the_parameters(before: str, after: str) -> None:
    assert version_of(before) == version_of(before)
    assert version_of(before) != version_of(after)


def test_a_fingerprint_changes_with_the_fields_of_a_model() -> None:
    assert version_of("a: Order", Order=Order) != version_of("a: Order", Order=LargerOrder)


def test_a_fingerprint_does_not_depend_on_the_value_of_a_default() -> None:
    # It may be computed when its module is imported: a time, a host name, an environment variable.
    early, late, required = (
        version_of("a: Order", Order=create_model("Order", region=(str, default)))
        for default in ("eu", "us", ...)
    )
    assert early == late != required


def test_a_fingerprint_does_not_depend_on_where_an_object_is_in_memory() -> None:
    def anything() -> Any:
        plain = core_schema.no_info_plain_validator_function(lambda value: value)
        return Annotated[object, GetPydanticSchema(lambda *_: plain)]

    kinds = [anything(), anything()]
    assert " at 0x" in repr(kinds[0])
    assert version_of("a: Kind", Kind=kinds[0]) == version_of("a: Kind", Kind=kinds[1])


def unknown_tasks() -> UnknownTasks:
    return UnknownTasks(
        KnownTasks({"old": "1", "horsies.expand": "2"}), GRACE_SECONDS, CHECK_SECONDS
    )


def claimed(name: str, task_id: str = "id", kwargs: str = "{}") -> ClaimedTask:
    return ClaimedTask(task_id, 1, name, "mail", "[]", kwargs, 0, 0, None, None, 7)


def test_a_worker_without_unknown_tasks_excludes_nothing_and_never_wakes_up() -> None:
    unknown = unknown_tasks()
    assert unknown.knows_names(["old"])
    assert unknown.exclusions() == ((), ())
    assert unknown.next_at() == NEVER


def test_an_unknown_name_is_left_out_for_good_and_looked_after_once_the_grace_period_is_over() -> (
    None
):
    unknown = unknown_tasks()
    assert not unknown.knows_names(["old", "new"])
    assert unknown.note_unknown(claimed("new"), 100.0) is None
    assert unknown.exclusions() == (["new"], [])
    assert unknown.next_at() == 100.0 + GRACE_SECONDS
    assert not unknown.forget_old(1e9)
    assert unknown.check("worker", "host", ["mail"], 100.0 + GRACE_SECONDS - 1) is None
    check = unknown.check("worker", "host", ["mail"], 100.0 + GRACE_SECONDS)
    assert check is not None
    assert check.names == ["new"]
    assert unknown.next_at() == 100.0 + GRACE_SECONDS + 30.0


def uncalled(task: ClaimedTask, message: str = "no") -> tuple[ClaimedTask, Outcome]:
    code = "WORKER_SERIALIZATION_ERROR"
    return task, outcome_of_error(task, Failure(code, message, "{}"))


def left(
    unknown: UnknownTasks, task: ClaimedTask, *, known: bool, recent: bool, seconds: float
) -> bool:
    refused = RefusedTask(task.id, unknown.known.wanted_by(task).fingerprint, seconds)
    return task.id in unknown.left(
        [uncalled(task)], [refused], [Taker(task.id, known, recent)], 100.0
    )


@pytest.mark.parametrize(("known", "recent"), [(True, True), (True, False), (False, True)])
def test_a_call_that_does_not_fit_is_left_to_others_and_looked_at_again(
    known: bool, recent: bool
) -> None:
    unknown = unknown_tasks()
    assert left(unknown, claimed("old"), known=known, recent=recent, seconds=GRACE_SECONDS)
    assert unknown.exclusions() == ([], ["1"])
    assert unknown.next_at() == 100.0 + GRACE_SECONDS
    assert not unknown.forget_old(100.0 + GRACE_SECONDS - 1)
    assert unknown.forget_old(100.0 + GRACE_SECONDS)
    assert unknown.exclusions() == ((), ())


def test_a_call_that_does_not_fit_fails_when_no_worker_could_take_it_for_the_grace_period() -> None:
    unknown = unknown_tasks()
    assert not left(unknown, claimed("old"), known=False, recent=False, seconds=PAUSE_SECONDS)
    assert unknown.exclusions() == ((), ())
    assert unknown.next_at() == NEVER


def test_a_prefetched_task_is_left_to_others_because_only_a_started_one_can_fail() -> None:
    unknown, task = unknown_tasks(), claimed("old")._replace(worker_pid=None)
    assert left(unknown, task, known=False, recent=False, seconds=PAUSE_SECONDS)
    assert unknown.next_at() == 100.0 + PAUSE_SECONDS


def test_refusals_of_one_fingerprint_are_looked_at_from_the_first_to_the_last() -> None:
    unknown = unknown_tasks()
    for number, seconds in enumerate((50.0, 10.0, 90.0)):
        task = claimed("old", f"id {number}")
        assert left(unknown, task, known=True, recent=True, seconds=seconds)
    assert unknown.next_at() == 110.0
    looks = [110.0]
    while unknown.forget_old(unknown.next_at()) and unknown.next_at() != NEVER:
        looks.append(unknown.next_at())
    assert looks == [110.0, 140.0, 170.0, 190.0]
    assert unknown.exclusions() == ((), ())


def test_a_refusal_is_stored_once_per_task_in_a_text_that_every_encoding_takes() -> None:
    given = [uncalled(claimed("old"), "größe"), uncalled(claimed("old"), "größe")]
    refuse, ask = map(named, unknown_tasks().refusal("me", given))
    assert (refuse.ids, refuse.fingerprints, refuse.messages) == (["id"], ["1"], ["gr\\xf6\\xdfe"])
    assert (ask.ids, ask.kinds, ask.names, ask.queues) == (["id"], ["tasks"], ["old"], ["mail"])


def test_an_unknown_sub_workflow_is_refused_without_a_fingerprint() -> None:
    unknown = unknown_tasks()
    task = claimed("horsies.expand", kwargs='{"definition_key":"new","kwargs":{}}')
    assert not unknown.knows_names([task.task_name])
    assert unknown.is_unknown(task)
    outcome = unknown.note_unknown(task, 100.0)
    assert outcome is not None
    assert outcome.error_code == "SUBWORKFLOW_LOAD_FAILED"
    assert left(unknown, task, known=False, recent=True, seconds=GRACE_SECONDS)
    assert unknown.exclusions() == ([], [""])
    assert not left(unknown, task, known=False, recent=False, seconds=PAUSE_SECONDS)


@pytest.mark.parametrize("key", ["5", "[1]", '"a\\u0000b"', '"\\ud800"', "[" * 100_000])
def test_a_stored_expansion_without_a_readable_key_is_left_to_its_child(key: str) -> None:
    task = claimed("horsies.expand", kwargs=f'{{"definition_key":{key},"kwargs":{{}}}}')
    assert not unknown_tasks().is_unknown(task)


def test_a_failure_that_the_policy_lists_is_retried() -> None:
    policy = RetryPolicy.fixed([7], auto_retry_for=["WORKER_RESOLUTION_ERROR"], jitter=False)
    options = '{"retry_policy":' + policy.model_dump_json() + "}"
    task = claimed("new")._replace(task_options=options, max_retries=1)
    assert unknown_tasks().outcome(task).delay_seconds == 7
    assert unknown_tasks().outcome(claimed("new")).delay_seconds is None


def test_a_call_that_does_not_fit_is_logged_with_its_parameter_and_a_remedy_that_helps(
    caplog: pytest.LogCaptureFixture,
) -> None:
    unknown = unknown_tasks()
    message = (
        "The stored call does not fit the function: there is no parameter 'title'. Correct it."
    )
    unknown.left([uncalled(claimed("old"), message)], [], [Taker("id", True, True)], 100.0)
    (line,) = caplog.messages
    assert "cannot call task 'old' on queue 'mail'" in line
    assert "there is no parameter 'title';" in line
    assert "deploy the same release to every worker" in line
    assert "discover_tasks" not in line
