"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from horsies import (
    AppConfig,
    Horsies,
    OperationalErrorCode,
    PostgresConfig,
    TaskError,
    TaskResult,
    WorkflowContext,
)
from horsies.db.statements.turn import ClaimTasks, claim_tasks
from horsies.retry import resolve_exception_code
from horsies.worker.child.execute import execute
from horsies.worker.protocol import Assignment
from tests.support.database import Database
from tests.support.rows import row_of

NOWHERE = AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused"))


# Direct calls


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


# Untyped values


class Parcel(BaseModel):
    content: Any


@pytest.mark.parametrize(
    ("value", "parcel"),
    [
        ((1, 2), None),
        ({"sizes": (1, 2)}, None),
        ({1, 2}, None),
        (None, Parcel(content=(1, 2))),
        (None, Parcel(content=[{1, 2}])),
    ],
)
def test_a_tuple_or_a_set_for_any_is_refused(value: Any, parcel: Parcel | None) -> None:
    app = Horsies(NOWHERE)

    @app.task("keep")
    def keep(value: Any, parcel: Parcel | None) -> TaskResult[Any, TaskError]:
        return TaskResult(ok=value)

    refused = keep.send(value, parcel).unwrap_err()
    assert refused.code == "VALIDATION_FAILED"
    assert "would come back as list; annotate it with its type." in refused.message


@pytest.mark.parametrize(
    ("data", "stored"),
    [((1, 2), '"data":[1,2]'), ({1}, "err.data is of type set and would come back as list")],
)
def test_the_code_of_an_error_outlives_data_that_cannot_be_stored(data: Any, stored: str) -> None:
    app = Horsies(NOWHERE)

    @app.task("pay")
    def pay() -> TaskResult[None, TaskError]:
        return TaskResult(err=TaskError(error_code="NO_MONEY", message="empty", data=data))

    report = execute(app, Assignment("id", 1, "pay", 1, "[]", "{}", None))
    assert (report.error_code, report.error_message) == ("NO_MONEY", "empty")
    assert stored in report.result_json


# Retries

CHARGE = """
from enum import StrEnum

from horsies import Horsies, RetryPolicy, TaskError, TaskResult

app = Horsies("postgresql://nobody@127.0.0.1:1/nothing")
BANK_AWAY = "THE_BANK_IS_AWAY"


class Code(StrEnum):
    SLOW = "BANK_SLOW"


def bank_is_busy() -> TaskError:
    return TaskError(error_code="BANK_BUSY", message="later")


@app.task(
    "charge",
    exception_mapper={ConnectionError: "GATEWAY_DOWN"},
    default_unhandled_error_code="CHARGE_FAILED",
    retry_policy=RetryPolicy.exponential(1, max_retries=2, auto_retry_for=[
        *("GATEWAY_DOWN", "CHARGE_FAILED", "WORKER_CRASHED", "TASK_TIMEOUT"),
        *("BANK_BUSY", BANK_AWAY, Code.SLOW),
        *("GATEWY_DOWN", "NEVER_MENTIONED", "TASK_CANCELLED"),
    ]),
)
def charge() -> TaskResult[int, TaskError]:
    return TaskResult(err=bank_is_busy())
"""


def test_check_warns_of_codes_that_nothing_produces(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CHARGE)
    command = [sys.executable, "-m", "horsies", "check", "shop:app"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, "ok: all validations passed" in checked.stdout) == (0, True)
    warnings = [line.partition("auto_retry_for lists ")[2] for line in checked.stderr.splitlines()]
    unproduced = "but no exception mapper, default code or function produces it"
    assert warnings == [
        f"GATEWY_DOWN, {unproduced}; did you mean GATEWAY_DOWN?",
        f"NEVER_MENTIONED, {unproduced}; correct the code or remove it",
        "TASK_CANCELLED, a built-in code that no failed attempt has; remove it",
    ]
    assert f"In task 'charge' ({tmp_path / 'shop.py'}:" in checked.stderr


class Reset(ConnectionResetError):
    pass


@pytest.mark.parametrize(
    ("task_mapper", "app_mapper", "code"),
    [
        ({ConnectionError: "AWAY"}, {}, "AWAY"),
        ({}, {OSError: "SYSTEM"}, "SYSTEM"),
        ({OSError: "SYSTEM", ConnectionError: "AWAY"}, {}, "AWAY"),
        ({ConnectionError: "AWAY", OSError: "SYSTEM", Reset: "RESET"}, {}, "RESET"),
        ({OSError: "SYSTEM"}, {Reset: "RESET"}, "SYSTEM"),
        ({TimeoutError: "SLOW"}, {BaseException: "ANY"}, "ANY"),
        ({TimeoutError: "SLOW"}, {}, "DEFAULT"),
    ],
)
def test_a_mapped_exception_stands_for_its_subclasses(
    task_mapper: dict[type[BaseException], str],
    app_mapper: dict[type[BaseException], str],
    code: str,
) -> None:
    assert resolve_exception_code(Reset(), task_mapper, app_mapper, "DEFAULT", None) == code


# Sending


@pytest.mark.parametrize("way", ["send_many", "sends of one moment"])
def test_tasks_run_in_the_order_of_their_sends(
    app: Horsies, connection: Database, way: str
) -> None:
    @app.task("step")
    def step(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    if way == "send_many":
        step.send_many(step.bind(number) for number in range(20)).unwrap()
    else:
        for number in range(20):
            step.send(number).unwrap()
        connection.execute("UPDATE horsies_tasks SET enqueued_at = now()")
    claimed = [
        claim_tasks.run(connection, ClaimTasks("worker", "host", [1], ["default"], [1]))[0].id
        for _ in range(20)
    ]
    assert [row_of(connection, task_id)["args"] for task_id in claimed] == [
        f"[{number}]" for number in range(20)
    ]
