"""Finished tasks sent again with other arguments: by the command line, the API and the form."""

from __future__ import annotations

import json
from datetime import date
from typing import Any

import pytest

from horsies import AppConfig, Horsies, Webhook
from horsies.db.statements.monitor import TaskDetail
from horsies.monitor.actions import retry_task
from horsies.monitor.edited_calls import (
    EditProblem,
    changed_names,
    edit_reason,
    edited_call,
    named_arguments,
    unmasked,
)
from horsies.tasks.definition import TaskDefinition
from horsies.testing import run_pending
from tests.support.database import Database
from tests.support.rows import actions, add_task, row_of

STORED: dict[str, Any] = dict.fromkeys(TaskDetail._fields)


@pytest.fixture
def charge(app: Horsies) -> TaskDefinition:
    @app.task("charge")
    def charge(order: int, amount: float, day: date | None = None, *, note: str = "") -> str:
        return f"{order}/{amount}/{day}/{note}"

    return charge.definition


def detail(args: str = "[17, 9.5]", kwargs: str = '{"note": "x"}') -> TaskDetail:
    columns = {"id": "the-id", "task_name": "charge", "args": args, "kwargs": kwargs}
    return TaskDetail(**STORED | columns)


def test_arguments_by_position_get_their_names(charge: TaskDefinition) -> None:
    named = named_arguments(charge.signature, detail())
    assert named == {"order": 17, "amount": 9.5, "note": "x"}


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ("not json", "{}", "are not JSON"),
        ("{}", "{}", "are not a call"),
        ("[1, 2, null, 4]", "{}", "arguments without names"),
    ],
)
def test_a_call_that_cannot_be_named_is_refused(
    charge: TaskDefinition, args: str, kwargs: str, problem: str
) -> None:
    with pytest.raises(EditProblem, match=problem):
        named_arguments(charge.signature, detail(args, kwargs))


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"order": 17}, "amount"),
        ({"order": "many", "amount": 1}, "order"),
        ({"order": 1, "amount": 1, "colour": "red"}, "colour"),
        ({"order": 1, "amount": 1, "note": "x" * 2_000_000}, "bytes"),
    ],
    ids=["missing", "wrong type", "unknown", "too large"],
)
def test_arguments_that_do_not_fit_are_refused_with_their_name(
    app: Horsies, charge: TaskDefinition, arguments: dict[str, Any], problem: str
) -> None:
    limits = app.config.payload.model_copy(update={"reject_bytes": 1_000_000})
    with pytest.raises(EditProblem, match=problem):
        edited_call(limits, charge, detail(), arguments)


def test_a_key_cannot_be_edited(app: Horsies) -> None:
    @app.task("serve", key="tenant")
    def serve(tenant: str, number: int) -> None: ...

    stored = detail('["a", 1]', "{}")
    call = edited_call(app.config.payload, serve.definition, stored, {"tenant": "a", "number": 2})
    assert json.loads(call.kwargs_json) == {"tenant": "a", "number": 2}
    with pytest.raises(EditProblem, match="key of a task cannot be edited"):
        edited_call(app.config.payload, serve.definition, stored, {"tenant": "b", "number": 1})


def test_the_arguments_of_built_in_tasks_cannot_be_edited(app: Horsies) -> None:
    hook = Webhook(name="alerts", url="https://example.com/", secret="s" * 32, on=["task.failed"])
    hooked = Horsies(AppConfig(broker=app.config.broker, webhooks=[hook]))
    (delivery,) = hooked.definitions().values()
    stored = detail("[]", '{"event": {"id": "1"}}')
    with pytest.raises(EditProblem, match=r"'horsies\.webhook\.alerts' belongs to horsies itself"):
        edited_call(hooked.config.payload, delivery, stored, {"event": {"id": "2"}})


def test_the_new_task_runs_with_the_edited_arguments(
    app: Horsies, charge: TaskDefinition, connection: Database
) -> None:
    failed = add_task(connection, task_name="charge", args="[17, 9.5]", status="FAILED")
    arguments = {"order": 17, "amount": 12.0, "day": "2026-11-18"}
    call = edited_call(app.config.payload, charge, detail("[17, 9.5]", "{}"), arguments)
    reason = edit_reason(["amount", "day"], "the price was wrong")
    done = retry_task(app.get_broker(), failed, reason=reason, call=call).unwrap()
    run_pending(app)
    row = row_of(connection, done.task_id)
    assert json.loads(row["result"]) == {"ok": "17/12.0/2026-11-18/"}
    assert str(row["retried_from_task_id"]) == failed
    assert row_of(connection, failed)["args"] == "[17, 9.5]"
    ((*_, detail_text),) = actions(connection)
    assert detail_text == "edited amount, day: the price was wrong"


def test_parts_that_were_left_as_shown_are_the_stored_ones() -> None:
    hidden = {"masked": True}
    stored = {"user": {"name": "ann", "card": 4111}, "list": [{"token": "t"}, 2], "key": 1}
    shown = {"user": {"name": "ann", "card": hidden}, "list": [{"token": hidden}, 2], "key": hidden}
    given = {"user": {"name": "bob", "card": hidden}, "list": [{"token": hidden}, 3], "key": 5}
    assert unmasked(given, shown, stored) == {
        "user": {"name": "bob", "card": 4111},
        "list": [{"token": "t"}, 3],
        "key": 5,
    }
    assert unmasked(shown, shown, stored) == stored
    assert unmasked({"moved": hidden}, shown, stored) == {"moved": hidden}


def test_only_names_of_arguments_are_recorded() -> None:
    assert changed_names({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 5, "d": None}) == ["b", "c", "d"]
    assert edit_reason([], None) == "nothing edited"
