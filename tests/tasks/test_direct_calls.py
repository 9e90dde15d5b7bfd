"""A task function that is called instead of sent."""

from __future__ import annotations

from typing import Any

import pytest

from horsies import Horsies, OperationalErrorCode, TaskError, TaskResult, WorkflowContext
from horsies.ids import new_id
from tests.support.applications import NOWHERE, UNREACHABLE


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        (("one",), {}, "order_id must be int (input should be a valid integer)."),
        ((), {}, "argument 'order_id' is missing; the parameters are order_id, note."),
        ((1, None, 2), {}, "3 positional arguments are too many"),
        ((1,), {"node": 2}, "there is no parameter 'node'"),
        ((1,), {"note": {1}}, "note is of type set and would come back as list"),
    ],
)
def test_a_direct_call_checks_its_arguments(args: Any, kwargs: Any, problem: str) -> None:
    app = Horsies(NOWHERE)

    @app.task("confirm")
    def confirm(order_id: int, note: Any = None) -> TaskResult[int, TaskError]:
        return TaskResult(ok=order_id)

    error = confirm(*args, **kwargs).err_value
    assert error.error_code is OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    assert error.message is not None
    assert error.message.startswith(f"The arguments do not fit task 'confirm': {problem}")
    assert confirm(1, note="today").unwrap() == 1


def test_a_direct_call_may_pass_the_context_of_a_workflow() -> None:
    app = Horsies(NOWHERE)

    @app.task("look")
    def look(order_id: int, workflow_ctx: WorkflowContext | None) -> TaskResult[bool, TaskError]:
        return TaskResult(ok=workflow_ctx is None)

    context = WorkflowContext("run", 0, "look", {})
    assert look(1, workflow_ctx=context).unwrap() is False
    assert look(1, context).unwrap() is False


def test_a_code_that_cannot_be_retried_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = Horsies(UNREACHABLE)

    @app.task("pay")
    def pay(code: str) -> TaskResult[int, TaskError]:
        return TaskResult(err=TaskError(error_code=code))

    wrong = f"no money {new_id()}"
    for code in (wrong, "NO_MONEY", wrong):
        assert pay(code).err_value.error_code == code
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        (
            "WARNING",
            f"no retry policy can list an error of task 'pay': the error code {wrong!r} must be an upper "
            "case name such as GATEWAY_DOWN (letters A-Z, digits and _, starting with a letter)",
        )
    ]
