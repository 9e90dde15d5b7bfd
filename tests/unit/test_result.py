"""Ok and Err: every member on both sides, the wrong side first."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from typing import assert_type

import pytest

from horsies.result import Err, Ok, Result, UnwrapError, is_err, is_ok


def parsed(text: str) -> Result[int, str]:
    return Ok(int(text)) if text.isdigit() else Err(f"not a number: {text}")


GOOD: Result[int, str] = parsed("2")
BAD: Result[int, str] = parsed("x")


WRONG_SIDE: list[Callable[[], object]] = [
    lambda: BAD.unwrap(),
    lambda: BAD.ok_value,
    lambda: GOOD.unwrap_err(),
    lambda: GOOD.err_value,
]


@pytest.mark.parametrize("ask", WRONG_SIDE)
def test_the_wrong_side_raises_and_the_error_keeps_the_result(ask: Callable[[], object]) -> None:
    with pytest.raises(UnwrapError) as caught:
        ask()
    assert caught.value.result in (GOOD, BAD)
    assert caught.value.__cause__ is None


def test_an_unwrapped_exception_is_the_cause() -> None:
    reason = OSError("disk full")
    result: Result[int, OSError] = Err(reason)
    with pytest.raises(UnwrapError, match=r"^called unwrap\(\) on Err: OSError") as caught:
        result.unwrap()
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
    assert (GOOD.ok_value, GOOD.unwrap(), GOOD.unwrap_or(9)) == (2, 2, 2)


def test_the_bad_side_of_every_reader() -> None:
    message = "not a number: x"
    assert (BAD.err_value, BAD.unwrap_err(), BAD.unwrap_or(9)) == (message, message, 9)


def test_both_sides_take_the_same_keywords() -> None:
    for result in (GOOD, BAD):
        assert result.unwrap_or(default=2) == 2
        assert result.map(function=str).map_err(function=str).is_ok() == result.is_ok()


def test_mapping_touches_only_its_own_side() -> None:
    assert GOOD.map(lambda value: value + 1) == Ok(3)
    assert BAD.map(lambda value: value + 1) is BAD
    assert GOOD.map_err(len) is GOOD
    assert BAD.map_err(len) == Err(15)
