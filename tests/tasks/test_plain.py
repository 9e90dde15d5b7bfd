"""Plain functions as tasks: a value returned, TaskFailed raised, and the methods that raise."""

from __future__ import annotations

import asyncio
import logging
import pickle
from typing import Annotated, Any, cast

import pytest
from typing_extensions import TypeAliasType

from horsies import (
    AppConfig,
    Horsies,
    OperationalErrorCode,
    OutcomeCode,
    PostgresConfig,
    ResultTimeout,
    ResultUnavailable,
    RetryPolicy,
    TaskError,
    TaskFailed,
    TaskResult,
    TaskSendFailed,
)
from horsies.codec.results import ResultCodec, encode_task_error
from horsies.tasks.invoke import invoke
from horsies.worker.child.execute import execute
from horsies.worker.protocol import Assignment
from tests.support.applications import Call, app_at
from tests.support.database import Database
from tests.support.rows import finish, row_of

# As `type Outcome = ...` makes it since Python 3.12.
Outcome = TypeAliasType("Outcome", TaskResult[int, TaskError])
shop = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused")))
MODULE = __name__


@shop.task
def add(a: int, b: int = 0) -> int:
    return a + b


@shop.task()
async def double(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


@shop.task("tidy")
def tidy(lie: bool = False) -> None:
    return cast("None", lie) or None


@shop.task
def refuse(code: str) -> int:
    raise TaskFailed(code, "the bank said no", data={"card": 7})


@shop.task
def long_refuse(code: str) -> TaskResult[int, TaskError]:
    raise TaskFailed(code, "the bank said no", data={"card": 7})


@shop.task
async def async_refuse(code: str) -> int:
    raise TaskFailed(code, "the bank said no", data={"card": 7})


@shop.task
def refuse_because() -> int:
    try:
        raise ConnectionError("port 443")
    except ConnectionError as error:
        raise TaskFailed("BANK_DOWN", "try later") from error


@shop.task
def refuse_meanwhile() -> int:
    try:
        raise ConnectionError("port 443")
    except ConnectionError:
        raise TaskFailed("BANK_DOWN", "try later")  # noqa: B904


@shop.task
def odd_refuse(code: str | int) -> int:
    failure = TaskFailed("A")
    failure.code = cast("str", code)
    raise failure


@shop.task
def stumble(other: str) -> int:
    raise {"value": ValueError("no"), "timeout": timed_out(), "domain": failed()}[other]


def timed_out() -> TaskFailed:
    return TaskFailed(OutcomeCode.TASK_TIMEOUT, "too slow", task_id="another")


def failed() -> TaskFailed:
    return TaskFailed("NO_STOCK", "sold out", task_id="another")


def run(name: str, arguments: str = "[]") -> TaskResult[Any, TaskError]:
    """Run a task as a child does and return the result that it stores."""
    report = execute(shop, Assignment("id", 1, name, 1, arguments, "{}", None))
    return ResultCodec.of(Any, TaskError).decode(report.result_json).unwrap()


# Defining


def test_a_task_without_a_name_is_named_by_its_module_and_function() -> None:
    assert [name for name in shop.list_tasks() if "refuse" not in name] == [
        f"{MODULE}.add",
        f"{MODULE}.double",
        "tidy",
        f"{MODULE}.stumble",
    ]
    assert add.task_name == f"{MODULE}.add"
    assert repr(add) == f"TaskFunction('{MODULE}.add')"


def test_two_functions_of_one_name_in_a_module_are_refused() -> None:
    with pytest.raises(Exception, match=r"test_plain\.add' is used twice"):

        @shop.task
        def add() -> None: ...


# Running


@pytest.mark.parametrize(
    ("name", "arguments", "value"),
    [("add", "[1, 2]", 3), ("double", "[4]", 8), ("tidy", "[]", None)],
)
def test_a_returned_value_is_the_result(name: str, arguments: str, value: object) -> None:
    name = name if name == "tidy" else f"{MODULE}.{name}"
    assert run(name, arguments) == TaskResult(ok=value)


@pytest.mark.parametrize(
    ("annotation", "value", "sentence"),
    [
        (int, "three", "returned a value of type str, but is annotated int (input should be "),
        (int, None, "returned None, but is annotated int (input should be a valid integer)."),
        (
            int,
            TaskResult(ok=1),
            "returned a value of type TaskResult, but is annotated int; annotate TaskResult[T, TaskError]",
        ),
        (
            str,
            TaskError(error_code="A"),
            "returned a value of type TaskError, but is annotated str; annotate",
        ),
        (
            list[int],
            [1, "2"],
            "returned a value that does not fit its annotation: value[1] does not fit list[int] (input",
        ),
        (float, float("nan"), "does not fit its annotation: value is NaN or infinite"),
    ],
)
def test_a_value_of_another_type_is_described_without_an_ok(
    annotation: Any, value: object, sentence: str
) -> None:
    def returns() -> Any:
        return value

    returns.__annotations__["return"] = annotation
    own = app_at("postgresql://127.0.0.1:1/shop")
    definition = own.task("returns")(returns).definition
    error = invoke(own.config, definition, (), {}).err_value
    assert error.error_code == "RETURN_TYPE_MISMATCH"
    assert error.message is not None
    assert error.message.startswith("Task 'returns' ")
    assert sentence in error.message


@pytest.mark.parametrize("name", ["refuse", "long_refuse", "async_refuse"])
def test_task_failed_is_a_returned_error(name: str, caplog: pytest.LogCaptureFixture) -> None:
    error = run(f"{MODULE}.{name}", '["CARD_REFUSED"]').err_value
    returned = TaskError(error_code="CARD_REFUSED", message="the bank said no", data={"card": 7})
    assert error == returned
    assert caplog.records == []


@pytest.mark.parametrize("code", [OperationalErrorCode.WORKER_CRASHED, 404, ["A"]])
def test_task_failed_takes_only_plain_text_as_its_code(code: Any) -> None:
    with pytest.raises(TypeError, match="takes your own code as plain text"):
        TaskFailed(code, "x")


def test_task_failed_with_an_exception_as_its_message_says_so_where_it_is_raised() -> None:
    with pytest.raises(TypeError, match=r"its message as text, not KeyError; write str\(error\)"):
        TaskFailed("CARD_REFUSED", KeyError("card"))  # type: ignore[arg-type]


def test_task_failed_with_a_reserved_code_is_a_mistake_of_the_task() -> None:
    error = run(f"{MODULE}.refuse", '["WORKER_CRASHED"]').err_value
    assert error.error_code is OperationalErrorCode.UNHANDLED_EXCEPTION
    assert error.message is not None
    assert error.message.endswith(
        "raised ValueError: TaskFailed does not take the built-in code WORKER_CRASHED; "
        "raise your own code, such as CARD_REFUSED"
    )


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (
            '"TASK_CANCELLED"',
            "TaskFailed does not take the built-in code TASK_CANCELLED; "
            "raise your own code, such as CARD_REFUSED",
        ),
        ("7", "the TaskFailed cannot be stored: error_code must be a string, not int"),
    ],
)
def test_a_code_that_cannot_be_stored_is_refused_in_one_sentence(code: str, reason: str) -> None:
    error = run(f"{MODULE}.odd_refuse", f"[{code}]").err_value
    assert error.message == f"Task '{MODULE}.odd_refuse' raised ValueError: {reason}"


def test_a_lower_case_code_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    run(f"{MODULE}.refuse", '["no money today"]')
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "no retry policy can list an error" in caplog.text


@pytest.mark.parametrize(
    ("other", "code"),
    [("value", "UNHANDLED_EXCEPTION"), ("timeout", "UNHANDLED_EXCEPTION"), ("domain", "NO_STOCK")],
)
def test_the_failure_of_another_task_passes_on_only_a_code_of_the_domain(
    other: str, code: str
) -> None:
    error = run(f"{MODULE}.stumble", f'["{other}"]').err_value
    assert error.error_code == code
    # An exception is stored with its traceback, an error of the domain is not one.
    assert (error.exception is not None) == (code == "UNHANDLED_EXCEPTION")


# Direct calls


def test_a_direct_call_behaves_like_the_function() -> None:
    assert add(1, b=2) == 3
    assert asyncio.run(double(4)) == 8
    tidy()
    with pytest.raises(TaskFailed) as refused:
        refuse("CARD_REFUSED")
    assert (refused.value.code, refused.value.data) == ("CARD_REFUSED", {"card": 7})
    with pytest.raises(ValueError, match="no"):
        stumble("value")
    assert long_refuse("CARD_REFUSED").err_value.error_code == "CARD_REFUSED"


@pytest.mark.parametrize("task", [add, double])
def test_a_direct_call_with_wrong_arguments_raises(task: Any) -> None:
    sentence = f"The arguments do not fit task '{task.task_name}': .* must be int"
    with pytest.raises(TypeError, match=sentence):
        task("one")


# Sending and waiting


@pytest.fixture
def greet(app: Horsies) -> Any:
    @app.task("greet", retry_policy=RetryPolicy.fixed([1], auto_retry_for=["AWAY"]))
    def greet(name: str) -> str:
        return f"hello {name}"

    return greet


def test_enqueue_stores_what_send_stores(
    app: Horsies, greet: Any, connection: Database, call: Call
) -> None:
    handles = [
        call(app, greet, "enqueue", "ada"),
        call(app, greet.with_options(priority=3), "enqueue", name="ada"),
    ]
    rows = [row_of(connection, handle.task_id) for handle in handles]
    assert [(row["args"], row["kwargs"], row["priority"]) for row in rows] == [
        ('["ada"]', "{}", 100),
        ("[]", '{"name":"ada"}', 3),
    ]


@pytest.mark.parametrize("sender", ["task", "options"])
def test_enqueue_raises_what_send_returns(
    app: Horsies, greet: Any, call: Call, sender: str
) -> None:
    target = greet if sender == "task" else greet.with_options(priority=3)
    with pytest.raises(TaskSendFailed) as refused:
        call(app, target, "enqueue", 7)
    assert refused.value.error == target.send(7).unwrap_err()
    assert str(refused.value) == (
        "VALIDATION_FAILED: Task 'greet' was not sent: name must be str "
        "(input should be a valid string)."
    )


def test_enqueue_without_a_database_raises_from_its_cause() -> None:
    away = app_at("postgresql://127.0.0.1:1/shop")

    @away.task
    def nothing() -> None: ...

    with pytest.raises(TaskSendFailed) as refused:
        nothing.enqueue()
    assert refused.value.error.code == "ENQUEUE_FAILED"
    assert refused.value.error.retryable
    assert refused.value.__cause__ is refused.value.error.exception is not None
    away.close()


def test_result_returns_the_value(
    app: Horsies, greet: Any, connection: Database, call: Call
) -> None:
    handle = greet.enqueue("ada")
    finish(connection, handle.task_id, '{"ok":"hello ada"}')
    assert call(app, handle, "result", timeout_ms=30_000) == "hello ada"


def test_result_raises_the_error_of_the_task(
    app: Horsies, greet: Any, connection: Database, call: Call
) -> None:
    handle = greet.enqueue("ada")
    try:
        raise ConnectionError("no answer")
    except ConnectionError as problem:
        error = TaskError(error_code="AWAY", message="gone", data=[1], exception=problem)
    finish(connection, handle.task_id, encode_task_error(error), status="FAILED")
    with pytest.raises(TaskFailed) as raised:
        call(app, handle, "result", timeout_ms=30_000)
    failure = raised.value
    assert (failure.code, failure.message, failure.data) == ("AWAY", "gone", [1])
    assert failure.task_id == handle.task_id
    assert failure.traceback is not None
    assert failure.traceback.endswith("ConnectionError: no answer\n")
    assert str(failure) == "AWAY: gone"
    # A terminal shows the worker's traceback below the exception.
    (note,) = failure.__notes__
    assert "raise ConnectionError" in note


def test_result_raises_for_a_cancelled_task(
    app: Horsies, greet: Any, connection: Database, call: Call
) -> None:
    handle = greet.enqueue("ada")
    handle.cancel().unwrap()
    with pytest.raises(TaskFailed) as raised:
        call(app, handle, "result")
    assert raised.value.code is OutcomeCode.TASK_CANCELLED
    assert raised.value.__notes__ == ["See: horsies docs TASK_CANCELLED"]


@pytest.mark.parametrize("timeout_ms", [0, 10])
def test_result_of_an_unfinished_task_is_a_timeout(
    app: Horsies, greet: Any, call: Call, timeout_ms: int
) -> None:
    with pytest.raises(TimeoutError) as raised:
        call(app, greet.enqueue("ada"), "result", timeout_ms=timeout_ms)
    assert isinstance(raised.value, ResultTimeout)
    assert raised.value.code in ("RESULT_NOT_READY", "WAIT_TIMEOUT")
    assert str(raised.value).startswith(f"{raised.value.code}: Task ")
    assert raised.value.__notes__ == [f"See: horsies docs {raised.value.code}"]


@pytest.mark.parametrize("stored", ['{"ok":7}', "nonsense"])
def test_result_that_cannot_be_read_is_not_a_failure_of_the_task(
    app: Horsies, greet: Any, connection: Database, call: Call, stored: str
) -> None:
    handle = greet.enqueue("ada")
    finish(connection, handle.task_id, stored)
    with pytest.raises(ResultUnavailable, match=r"The stored result of task .* cannot be read"):
        call(app, handle, "result", timeout_ms=30_000)


def test_result_of_a_missing_task_is_unavailable(app: Horsies, call: Call) -> None:
    handle = app.handle("01a1e0f2-0000-7000-8000-000000000000")
    with pytest.raises(ResultUnavailable, match="TASK_NOT_FOUND: There is no task"):
        call(app, handle, "result", timeout_ms=0)


@pytest.mark.parametrize(
    "error",
    [
        TaskFailed("A", "b", data={"c": 1}, traceback="Traceback", task_id="id"),
        TaskFailed(None, "b"),
        TaskFailed(OutcomeCode.TASK_TIMEOUT, "too slow", task_id="another"),
        ResultTimeout("WAIT_TIMEOUT", "late", {"timeout_ms": 5}),
    ],
)
def test_the_exceptions_survive_pickle(error: Exception) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))


def test_a_failed_enqueue_is_logged_like_a_failed_send(
    greet: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(TaskSendFailed):
        greet.enqueue(7)
    assert "a send of task 'greet' failed with VALIDATION_FAILED" in caplog.text


@pytest.mark.parametrize("declared", [Outcome, Annotated[TaskResult[int, TaskError], "a number"]])
def test_a_result_behind_another_name_is_no_value_of_a_plain_function(declared: Any) -> None:
    def function() -> Any:
        return TaskResult(err=TaskError(error_code="EMPTY", message="nothing there"))

    function.__annotations__["return"] = declared
    task = app_at("postgresql://localhost/unused").task("renamed")(function)
    result = cast(Any, task())
    assert result.err_value.error_code == "EMPTY"
    assert not task.definition.is_plain


def test_the_cause_of_a_failure_is_stored_with_it(caplog: pytest.LogCaptureFixture) -> None:
    error = run(f"{MODULE}.refuse_because").err_value
    assert (error.error_code, error.message) == ("BANK_DOWN", "try later")
    assert isinstance(error.exception, dict)
    assert (error.exception["type"], error.exception["message"]) == ("ConnectionError", "port 443")
    assert 'raise ConnectionError("port 443")' in error.exception["traceback"]
    assert run(f"{MODULE}.refuse_meanwhile").err_value.exception is None
    assert caplog.text == ""


def test_a_failure_is_not_retried_for_the_class_of_its_cause() -> None:
    report = execute(shop, Assignment("id", 1, f"{MODULE}.refuse_because", 1, "[]", "{}", None))
    assert report.exception_names == ()
