"""Fingerprints of failures: the class and the place of an exception, whatever its message and line."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from horsies.errors import RetryLater, TaskFailed
from horsies.failure_fingerprint import Origin, fingerprint_of, origin_of

HERE = "unit/test_failure_fingerprint.py"


class Declined(Exception):
    """An error of the application."""


class Till:
    def charge(self, amount: str) -> int:
        if not amount:
            raise Declined("empty")
        return int(amount)


def raised(call: Callable[[], object]) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011
        call()
    return caught.value


def test_the_place_is_the_innermost_frame_of_the_application() -> None:
    origin = origin_of(raised(lambda: Till().charge("")))
    assert origin.exception_type == f"{__name__}.Declined"
    assert origin.raised_in is not None
    assert origin.raised_in.endswith(f"{HERE}:Till.charge")
    assert not origin.raised_in.startswith("/")


def test_frames_of_libraries_do_not_count() -> None:
    def read() -> Any:
        return json.loads("{")

    origin = origin_of(raised(read))
    assert origin.exception_type == "json.decoder.JSONDecodeError"
    assert str(origin.raised_in).endswith(
        f"{HERE}:test_frames_of_libraries_do_not_count.<locals>.read"
    )


def test_code_without_a_file_is_traced_to_its_caller() -> None:
    code = compile("1 / 0", "<string>", "exec")

    def run() -> None:
        exec(code, {})

    origin = origin_of(raised(run))
    assert origin == Origin("ZeroDivisionError", origin.raised_in)
    assert str(origin.raised_in).endswith("run")


@pytest.mark.parametrize("error", [TaskFailed("CARD_DECLINED"), RetryLater(1.0)], ids=repr)
def test_an_error_whose_code_says_more_has_a_place_only(error: Exception) -> None:
    def fail() -> None:
        raise error

    origin = origin_of(raised(fail))
    assert origin.exception_type is None
    assert str(origin.raised_in).endswith("<locals>.fail")


@pytest.mark.parametrize("raised", [None, "text", {"type": "KeyError"}], ids=repr)
def test_other_objects_have_no_origin(raised: object) -> None:
    assert origin_of(raised) == Origin()


def test_an_exception_that_was_never_raised_has_no_place() -> None:
    assert origin_of(KeyError("x")) == Origin("KeyError", None)


def test_a_hostile_class_costs_only_the_origin() -> None:
    class Hostile(type):
        def __getattribute__(cls, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    broken: Any = Hostile("Broken", (Exception,), {})
    assert origin_of(Exception.__new__(broken)) == Origin()


def test_long_names_are_cut_to_the_columns() -> None:
    kind = type("E" * 1_000, (Exception,), {})
    assert len(origin_of(kind()).exception_type or "") == 255


def test_only_the_reason_decides_the_fingerprint() -> None:
    first, second = (origin_of(raised(lambda: Till().charge(""))) for _ in range(2))
    assert fingerprint_of("pay", "X", first) == fingerprint_of("pay", "X", second)
    other = origin_of(raised(lambda: Till().charge("ten")))
    reasons = [
        ("pay", "X", first),
        ("pay", "X", other),
        ("refund", "X", first),
        ("pay", "Y", first),
        ("pay", None, Origin()),
        ("pay", "X", Origin()),
    ]
    found = {fingerprint_of(*reason) for reason in reasons}
    assert len(found) == len(reasons)
    assert all(re.fullmatch("[0-9a-f]{12}", one) for one in found)
    assert fingerprint_of("\udc80", "X") != fingerprint_of("\udc81", "X")
