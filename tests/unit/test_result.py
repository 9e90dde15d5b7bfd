"""Ok and Err: every member on both sides, the wrong side first."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pickle
from collections.abc import Callable
from operator import add
from typing import Any, assert_type

import pytest

from horsies import Err, Ok
from horsies.result import Result, UnwrapError, is_err, is_ok
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError
from horsies.tasks.handle import TaskHandle


def parsed(text: str) -> Result[int, str]:
    return Ok(int(text)) if text.isdigit() else Err(f"not a number: {text}")


GOOD: Result[int, str] = parsed("2")
BAD: Result[int, str] = parsed("x")

WRONG_SIDE: list[Callable[[], object]] = [
    lambda: BAD.unwrap(),
    lambda: BAD.ok_value,
    lambda: BAD.expect("a number"),
    lambda: GOOD.unwrap_err(),
    lambda: GOOD.err_value,
    lambda: GOOD.expect_err("a failure"),
]


@pytest.mark.parametrize("ask", WRONG_SIDE)
def test_the_wrong_side_raises_and_the_error_keeps_the_result(ask: Callable[[], object]) -> None:
    with pytest.raises(UnwrapError) as caught:
        ask()
    assert caught.value.result in (GOOD, BAD)
    assert caught.value.__cause__ is None


def test_the_message_of_expect_comes_first() -> None:
    with pytest.raises(UnwrapError, match=r"^a number: 'not a number: x'$"):
        BAD.expect("a number")


def test_an_unwrapped_exception_is_the_cause() -> None:
    reason = OSError("disk full")
    result: Result[int, OSError] = Err(reason)
    asks: list[Callable[[], object]] = [
        lambda: result.unwrap(),
        lambda: result.ok_value,
        lambda: result.expect("m"),
    ]
    for ask in asks:
        with pytest.raises(UnwrapError) as caught:
            ask()
        assert caught.value.__cause__ is reason


def test_an_unwrapped_success_is_named_by_type_only() -> None:
    result: Result[str, str] = Ok("a customer's secret")
    with pytest.raises(UnwrapError) as caught:
        result.unwrap_err()
    assert str(caught.value) == "called unwrap_err() on Ok: str"


def test_an_unwrap_error_survives_pickling() -> None:
    with pytest.raises(UnwrapError) as caught:
        BAD.unwrap()
    again = pickle.loads(pickle.dumps(caught.value))
    assert (again.result, str(again)) == (BAD, str(caught.value))


def test_results_are_immutable_and_slotted() -> None:
    for result in (GOOD, BAD):
        with pytest.raises(dataclasses.FrozenInstanceError):
            result.value = 3  # type: ignore[misc]
        assert not hasattr(result, "__dict__")


def test_an_unhashable_value_makes_the_result_unhashable() -> None:
    with pytest.raises(TypeError):
        hash(Ok([1]))


def test_results_compare_and_hash_by_side_and_value() -> None:
    one, failed_one = Ok(1), Err(1)
    unlike: list[object] = [Ok(2), failed_one, 1]
    assert one == Ok(1)
    assert one not in unlike
    assert len({Ok(1), Ok(1), Err(1), Err(1)}) == 2
    assert repr([Ok("a"), Err(None)]) == "[Ok('a'), Err(None)]"
    assert pickle.loads(pickle.dumps(one)) == one


def test_results_match_by_position() -> None:
    def described(result: Result[int, str]) -> str:
        match result:
            case Ok(value):
                return f"value {value}"
            case Err(error):
                return f"error {error}"

    assert described(GOOD) == "value 2"
    assert described(BAD) == "error not a number: x"


def test_questions_about_the_side() -> None:
    assert (GOOD.is_ok(), GOOD.is_err()) == (True, False)
    assert (BAD.is_ok(), BAD.is_err()) == (False, True)


def test_the_guards_narrow_on_both_branches() -> None:
    for result in (GOOD, BAD):
        if is_ok(result):
            assert_type(result, Ok[int])
        else:
            assert_type(result, Err[str])
        if is_err(result):
            assert_type(result, Err[str])
    assert [is_ok(GOOD), is_ok(BAD), is_err(GOOD), is_err(BAD)] == [True, False, False, True]


def test_the_good_side_of_every_reader() -> None:
    assert (GOOD.ok(), GOOD.err(), GOOD.ok_value) == (2, None, 2)
    assert (GOOD.unwrap(), GOOD.unwrap_or(9), GOOD.expect("m")) == (2, 2, 2)
    assert GOOD.unwrap_or_else(len) == 2
    assert GOOD.unwrap_or_raise(RuntimeError) == 2


def test_the_bad_side_of_every_reader() -> None:
    message = "not a number: x"
    assert (BAD.ok(), BAD.err(), BAD.err_value) == (None, message, message)
    assert (BAD.unwrap_err(), BAD.expect_err("m")) == (message, message)
    assert BAD.unwrap_or(9) == 9
    assert BAD.unwrap_or_else(len) == len(message)


def test_both_sides_take_the_same_keywords() -> None:
    for result in (GOOD, BAD):
        assert result.unwrap_or(default=2) == 2
        assert result.unwrap_or_else(function=lambda error: 2) == 2
        assert result.map_or(default=3, function=lambda value: value + 1) == 3
        assert result.map_or_else(default=lambda: 3, function=lambda value: value + 1) == 3
        assert result.map(function=str).map_err(function=str).is_ok() == result.is_ok()


def test_unwrap_or_raise_raises_the_exception_made_from_the_error() -> None:
    with pytest.raises(RuntimeError, match=r"^not a number: x$"):
        BAD.unwrap_or_raise(RuntimeError)


def test_mapping_touches_only_its_own_side() -> None:
    assert GOOD.map(lambda value: value + 1) == Ok(3)
    assert BAD.map(lambda value: value + 1) is BAD
    assert GOOD.map_err(len) is GOOD
    assert BAD.map_err(len) == Err(15)


def test_map_or_takes_the_default_only_for_an_err() -> None:
    assert GOOD.map_or(0, lambda value: value + 1) == 3
    assert BAD.map_or(0, lambda value: value + 1) == 0
    assert GOOD.map_or_else(lambda: 0, lambda value: value + 1) == 3
    assert BAD.map_or_else(lambda: 0, lambda value: value + 1) == 0


def test_chaining_goes_on_only_from_its_own_side() -> None:
    assert GOOD.and_then(lambda value: parsed(str(value * 10))) == Ok(20)
    assert BAD.and_then(lambda value: parsed(str(value))) is BAD
    assert GOOD.or_else(lambda error: parsed("7")) is GOOD
    assert BAD.or_else(lambda error: parsed("7")) == Ok(7)


def test_async_members_await_only_for_an_ok() -> None:
    async def tripled(value: int) -> int:
        return value * 3

    async def tripled_result(value: int) -> Result[int, str]:
        return Ok(value * 3)

    async def scenario() -> None:
        assert await GOOD.map_async(tripled) == Ok(6)
        assert await BAD.map_async(tripled) is BAD
        assert await GOOD.and_then_async(tripled_result) == Ok(6)
        assert await BAD.and_then_async(tripled_result) is BAD

    asyncio.run(scenario())


def test_inspecting_sees_its_own_side_and_returns_the_result() -> None:
    seen: list[object] = []
    for result in (GOOD, BAD):
        assert result.inspect(seen.append) is result
        assert result.inspect_err(seen.append) is result
    assert seen == [2, "not a number: x"]


def matched(value: Any) -> bool:
    match value:
        case Ok(_) | Err(_):
            return True
    return False


def test_a_match_on_the_result_of_a_task_does_not_fall_through() -> None:
    assert matched(GOOD)
    assert matched(BAD)
    results: list[Any] = [TaskResult(ok=1), TaskResult(err=TaskError(error_code="DOWN"))]
    for result in results:
        with pytest.raises(TypeError, match="a TaskResult is neither Ok nor Err, so that no such"):
            matched(result)
    values: list[Any] = [1, None, [], TaskResult]
    for value in values:
        assert not matched(value)


FAILED = Err(BrokerOperationError(BrokerErrorCode.NO_BROKER, "no database"))


@pytest.mark.parametrize("result", [Ok(1), Ok(False), FAILED])
def test_ok_and_err_are_neither_true_nor_false(result: Any) -> None:
    with pytest.raises(TypeError, match=r"is neither true nor false; call is_ok\(\) or is_err\(\)"):
        bool(result)


@pytest.mark.parametrize(
    ("result", "name", "hint"),
    [
        (Ok(TaskHandle("x", None)), "get", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "task_id", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "result_of", ""),
        (FAILED, "message", "; call .unwrap_err() first"),
        (
            FAILED,
            "get",
            "; it holds the error of a failed call: match it, or call .unwrap() to raise it",
        ),
    ],
)
def test_an_attribute_of_the_value_says_unwrap_first(result: Any, name: str, hint: str) -> None:
    kind = type(result).__name__
    with pytest.raises(AttributeError) as refused:
        getattr(result, name)
    assert str(refused.value) == f"'{kind}' object has no attribute '{name}'{hint}"


@pytest.mark.parametrize("result", [Ok(1), Err("no")])
@pytest.mark.parametrize("name", ["value", "x"])
def test_a_result_cannot_be_changed(result: Any, name: str) -> None:
    with pytest.raises(AttributeError, match=name):
        setattr(result, name, 2)
    with pytest.raises(AttributeError, match=name):
        delattr(result, name)


@pytest.mark.parametrize("result", [Ok([1]), Err("no"), Ok[int](1)])
def test_a_result_can_be_copied_and_pickled(result: Any) -> None:
    assert copy.copy(result) == copy.deepcopy(result) == result
    assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize("pair", [(Ok([1]), Ok([2])), ([1], Ok([2])), (Err("x"), [1])])
def test_results_are_not_added(pair: tuple[Any, Any]) -> None:
    with pytest.raises(TypeError, match=r"holds the value of a call.* call \.unwrap\(\) first"):
        add(*pair)
