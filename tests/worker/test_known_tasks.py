"""Known tasks: fingerprints that tell two versions of a task apart, and the bookkeeping of exclusions."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
from pydantic import BaseModel, GetPydanticSchema, create_model
from pydantic_core import core_schema

from horsies import RetryPolicy, TaskError, TaskResult
from horsies.codec.calls import CallSignature
from horsies.db.statements.turn import ClaimedTask, Taker
from horsies.worker.agenda import NEVER
from horsies.worker.known_tasks import (
    REFUSAL_SECONDS,
    REFUSED_MAX,
    KnownTasks,
    UnknownTasks,
    fingerprint,
)

GRACE_SECONDS = 600.0
NO_TAKER = Taker("", is_known=False, is_recent=False)
TAKER = Taker("", is_known=True, is_recent=True)


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
    return UnknownTasks(KnownTasks({"old": "1", "horsies.expand": "2"}), GRACE_SECONDS, 30.0)


def claimed(name: str, task_id: str = "id", kwargs: str = "{}") -> ClaimedTask:
    return ClaimedTask(task_id, 1, name, "mail", "[]", kwargs, 0, 0, None, None, 7)


def test_a_worker_without_unknown_tasks_excludes_nothing_and_never_wakes_up() -> None:
    unknown = unknown_tasks()
    assert unknown.knows_all([claimed("old")])
    assert unknown.exclusions() == ((), ())
    assert unknown.next_at() == NEVER


def test_an_unknown_name_is_left_out_for_good_and_looked_after_once_the_grace_period_is_over() -> (
    None
):
    unknown = unknown_tasks()
    assert not unknown.knows_all([claimed("old"), claimed("new")])
    assert unknown.note_unknown(claimed("new"), 100.0) is None
    assert unknown.exclusions() == (["new"], [])
    assert unknown.next_at() == 100.0 + GRACE_SECONDS
    assert not unknown.forget_old(1e9)
    assert unknown.check("worker", "host", ["mail"], 100.0 + GRACE_SECONDS - 1) is None
    check = unknown.check("worker", "host", ["mail"], 100.0 + GRACE_SECONDS)
    assert check is not None
    assert check.names == ["new"]
    assert unknown.next_at() == 100.0 + GRACE_SECONDS + 30.0


def test_a_call_that_does_not_fit_is_left_to_a_worker_with_other_parameters_for_a_while() -> None:
    unknown = unknown_tasks()
    assert unknown.is_left(claimed("old"), TAKER, 100.0)
    assert unknown.exclusions() == ([], ["id"])
    assert unknown.next_at() == 100.0 + REFUSAL_SECONDS
    assert unknown.forget_old(100.0 + REFUSAL_SECONDS)
    assert unknown.exclusions() == ((), ())


def test_a_call_that_does_not_fit_fails_when_no_worker_has_other_parameters() -> None:
    unknown = unknown_tasks()
    recent = Taker("", is_known=False, is_recent=True)
    assert not unknown.is_left(claimed("old"), recent, 100.0)
    assert unknown.exclusions() == ((), ())


def test_many_calls_that_do_not_fit_are_left_out_by_their_name() -> None:
    unknown = unknown_tasks()
    for number in range(REFUSED_MAX + 1):
        assert unknown.is_left(claimed("old", f"id {number}"), TAKER, 100.0)
    assert unknown.exclusions().names == ["old"]
    assert unknown.forget_old(100.0 + REFUSAL_SECONDS)
    assert unknown.exclusions().names == ()


def test_an_unknown_sub_workflow_waits_for_the_grace_period_and_then_fails() -> None:
    unknown = unknown_tasks()
    task = claimed("horsies.expand", kwargs='{"definition_key":"new","kwargs":{}}')
    assert not unknown.knows_all([task])
    assert unknown.is_unknown(task)
    outcome = unknown.note_unknown(task, 100.0)
    assert outcome is not None
    assert outcome.error_code == "SUBWORKFLOW_LOAD_FAILED"
    assert unknown.is_left(task, NO_TAKER, 100.0 + GRACE_SECONDS - 1)
    assert not unknown.is_left(task, NO_TAKER, 100.0 + GRACE_SECONDS)
    assert unknown.is_left(task, TAKER, 100.0 + GRACE_SECONDS)


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
