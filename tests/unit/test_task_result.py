"""Task results and task errors: values they refuse, values they hide, and how they survive storage."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from enum import Enum, StrEnum
from typing import Any, assert_type

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter, ValidationError

from horsies import TaskError, TaskResult
from horsies.error_codes import (
    BUILTIN_CODE_REGISTRY,
    BuiltInTaskCode,
    ContractCode,
    OperationalErrorCode,
    OutcomeCode,
    RetrievalCode,
    error_code_text,
    resolve_code,
)
from horsies.task_result import SubWorkflowError, describe_exception
from tests.support.examples import examples

ALL_CODES = list(BUILTIN_CODE_REGISTRY.values())
TAG = "__builtin_task_code__"


class Foreign(StrEnum):
    CARD_DECLINED = "CARD_DECLINED"


class OldStyle(str, Enum):  # noqa: UP042  the older spelling is what must be refused as well
    CARD_DECLINED = "CARD_DECLINED"


class Text(str):
    __slots__ = ()


class Nested(BaseModel):
    error: TaskError
    anything: object = None
    many: list[TaskError] = []


def is_free(code: str) -> bool:
    return code not in BUILTIN_CODE_REGISTRY


def raised(exception: BaseException) -> BaseException:
    try:
        raise exception
    except BaseException as caught:
        return caught


@pytest.mark.parametrize("code", sorted(BUILTIN_CODE_REGISTRY))
def test_a_plain_string_equal_to_a_builtin_value_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match="is reserved"):
        TaskError(error_code=code)
    with pytest.raises(ValueError, match="is reserved"):
        TaskError(error_code=Text(code))
    with pytest.raises(ValueError, match="is reserved"):
        TaskError.model_validate_json(json.dumps({"error_code": code}))


@pytest.mark.parametrize("member", [Foreign.CARD_DECLINED, OldStyle.CARD_DECLINED])
def test_a_member_of_a_foreign_enum_is_refused(member: str) -> None:
    with pytest.raises(ValueError, match="not a member of"):
        TaskError(error_code=member)


@pytest.mark.parametrize(
    "value",
    [
        {},
        {TAG: "CARD_DECLINED"},
        {TAG: None},
        {TAG: ["TASK_EXPIRED"]},
        {TAG: "TASK_EXPIRED", "more": 1},
        {"code": "TASK_EXPIRED"},
        b"TASK_EXPIRED",
        5,
        1.5,
        True,
        ["TASK_EXPIRED"],
    ],
)
def test_any_other_form_of_code_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="error_code"):
        TaskError(error_code=value)


def test_unknown_fields_are_refused_without_showing_their_values() -> None:
    with pytest.raises(ValidationError) as caught:
        TaskError(details="hunter2")  # type: ignore[call-arg]
    assert "hunter2" not in str(caught.value)


def test_an_exception_that_is_no_exception_is_refused_without_showing_it() -> None:
    with pytest.raises(ValidationError) as caught:
        TaskError(exception="hunter2")  # type: ignore[arg-type]
    assert "hunter2" not in str(caught.value)


def test_a_task_error_is_immutable() -> None:
    error = TaskError(error_code="MINE")
    with pytest.raises(ValidationError):
        error.error_code = OutcomeCode.TASK_EXPIRED


def test_the_registry_holds_every_family() -> None:
    families = (OperationalErrorCode, ContractCode, RetrievalCode, OutcomeCode)
    # No value is used twice, neither in two families nor by an alias inside one.
    assert len(BUILTIN_CODE_REGISTRY) == sum(len(family.__members__) for family in families)
    assert BUILTIN_CODE_REGISTRY["TASK_TIMEOUT"] is OutcomeCode.TASK_TIMEOUT
    assert all(code.value == code.name == key for key, code in BUILTIN_CODE_REGISTRY.items())


def test_codes_resolve_to_members_and_back_to_text() -> None:
    assert resolve_code("WORKER_CRASHED") is OperationalErrorCode.WORKER_CRASHED
    assert resolve_code("CARD_DECLINED") == "CARD_DECLINED"
    assert error_code_text(OperationalErrorCode.WORKER_CRASHED) == "WORKER_CRASHED"
    assert type(error_code_text(OperationalErrorCode.WORKER_CRASHED)) is str
    assert error_code_text("CARD_DECLINED") == "CARD_DECLINED"
    assert error_code_text(None) is None


@pytest.mark.parametrize("code", ALL_CODES)
def test_a_builtin_code_dumps_to_its_tag_and_comes_back(code: BuiltInTaskCode) -> None:
    error = TaskError(error_code=code)
    tagged = {TAG: code.value}
    assert error.model_dump()["error_code"] == tagged
    assert json.loads(error.model_dump_json())["error_code"] == tagged
    assert TaskError.model_validate(error.model_dump()).error_code is code
    assert TaskError.model_validate_json(error.model_dump_json()).error_code is code
    assert TaskError.model_validate_json(error.model_dump_json(), strict=True).error_code is code


def test_a_nested_error_dumps_the_same_way() -> None:
    error = TaskError(error_code=OutcomeCode.TASK_CANCELLED, exception=raised(ValueError("no")))
    outer = Nested(error=error, anything={"deep": [error]}, many=[error])
    for dumped in (outer.model_dump(), json.loads(outer.model_dump_json())):
        found = [dumped["error"], dumped["anything"]["deep"][0], dumped["many"][0]]
        assert [item["error_code"] for item in found] == [{TAG: "TASK_CANCELLED"}] * 3
        assert [item["exception"]["type"] for item in found] == ["ValueError"] * 3
    again = Nested.model_validate_json(outer.model_dump_json())
    assert again.many[0].error_code is OutcomeCode.TASK_CANCELLED


@settings(max_examples=examples(100))
@given(st.text(alphabet=st.characters(codec="utf-8")).filter(is_free))
def test_a_code_of_the_user_stays_a_plain_string(code: str) -> None:
    error = TaskError(error_code=code)
    assert error.model_dump()["error_code"] == code
    again = TaskError.model_validate_json(error.model_dump_json())
    assert type(again.error_code) is str
    assert again == error


def test_a_live_exception_is_kept_here_and_described_when_dumped() -> None:
    exception = raised(KeyError("gone"))
    error = TaskError(exception=exception)
    assert error.exception is exception
    described = error.model_dump()["exception"]
    assert (described["type"], described["message"]) == ("KeyError", "'gone'")
    assert "raise exception" in described["traceback"]
    assert json.loads(error.model_dump_json())["exception"] == described
    assert TaskError.model_validate(error.model_dump()).exception == described


class RaisingText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


class ExitingText(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)

    __repr__ = __str__


class NumberForText(Exception):
    def __str__(self) -> str:
        return 5  # type: ignore[return-value]

    __repr__ = __str__


class EvilNotes(Exception):
    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]
        raise SystemExit(3)


@pytest.mark.parametrize("kind", [RaisingText, ExitingText, NumberForText, EvilNotes])
def test_an_exception_that_cannot_be_printed_is_still_described(
    kind: type[Exception],
) -> None:
    described = json.loads(TaskError(exception=raised(kind("x"))).model_dump_json())["exception"]
    assert described["type"] == kind.__name__
    assert described["message"]
    assert described["traceback"]


def test_a_chain_that_bites_its_tail_is_still_described() -> None:
    first, second = raised(ValueError("first")), raised(ValueError("second"))
    first.__cause__, second.__cause__ = second, first
    assert "first" in describe_exception(first)["traceback"]


def test_an_endless_recursion_is_described_within_bounds() -> None:
    def endless(depth: int) -> int:
        return endless(depth + 1) + 1

    with pytest.raises(RecursionError) as caught:
        endless(0)
    assert len(describe_exception(caught.value)["traceback"]) < 17_000


def test_a_huge_exception_keeps_the_head_and_the_tail() -> None:
    described = describe_exception(raised(ValueError("HEAD" + "x" * 100_000 + "TAIL")))
    assert len(described["message"]) < 5_000
    assert described["message"].startswith("HEADxxx")
    assert described["message"].endswith("xxxTAIL")
    assert len(described["traceback"]) < 17_000
    assert described["traceback"].startswith("Traceback (most recent call last)")
    assert described["traceback"].endswith("TAIL\n")
    assert "characters left out" in described["traceback"]


@settings(max_examples=examples(100))
@given(st.text())
def test_any_message_becomes_text_that_json_and_postgres_take(message: str) -> None:
    dumped = TaskError(exception=ValueError(message)).model_dump_json()
    described = json.loads(dumped)["exception"]
    assert "\x00" not in "".join(described.values())
    "".join(described.values()).encode("utf-8")


def test_the_json_schema_of_an_error_can_be_made() -> None:
    for mode in ("validation", "serialization"):
        schema = TypeAdapter(TaskError).json_schema(mode=mode)
        assert set(schema["properties"]) == {"error_code", "message", "data", "exception"}


def test_printing_an_error_shows_code_and_message_but_no_data() -> None:
    error = TaskError(
        error_code=OperationalErrorCode.TASK_EXCEPTION,
        message="it broke",
        data={"password": "hunter2"},
        exception=ValueError("hunter2"),
    )
    for shown in (repr(error), str(error), f"{error}", repr([error])):
        assert "hunter2" not in shown
        assert "TASK_EXCEPTION" in shown
        assert "it broke" in shown
    assert repr(error) == (
        "TaskError(error_code='TASK_EXCEPTION', message='it broke', "
        "data_type='dict', exception_type='ValueError')"
    )


def test_printing_an_error_cuts_a_long_message() -> None:
    assert len(repr(TaskError(message="x" * 10_000))) < 300


def test_a_sub_workflow_error_is_a_task_error_with_one_more_field() -> None:
    error = SubWorkflowError(error_code=OutcomeCode.SUBWORKFLOW_FAILED, sub_workflow_id="w1")
    assert isinstance(error, TaskError)
    assert SubWorkflowError.model_validate_json(error.model_dump_json()) == error


def test_a_result_without_a_side_is_refused() -> None:
    with pytest.raises(ValueError, match="neither was given"):
        TaskResult()  # type: ignore[call-overload]


def test_a_result_with_both_sides_is_refused_even_when_they_are_none() -> None:
    for sides in ({"ok": 1, "err": TaskError()}, {"ok": None, "err": None}):
        with pytest.raises(ValueError, match="both was given"):
            TaskResult(**sides)


def test_a_result_takes_no_positional_argument() -> None:
    with pytest.raises(TypeError):
        TaskResult(1)  # type: ignore[call-overload]


def failed() -> TaskResult[int, TaskError]:
    return TaskResult(err=TaskError(error_code="CARD_DECLINED", data="hunter2"))


def succeeded() -> TaskResult[int, TaskError]:
    return TaskResult(ok=4)


def test_the_wrong_side_raises_value_error_without_showing_values() -> None:
    secret: TaskResult[str, TaskError] = TaskResult(ok="hunter2")
    wrong: list[Callable[[], object]] = [
        lambda: failed().ok_value,
        lambda: failed().unwrap(),
        lambda: secret.err_value,
        lambda: secret.unwrap_err(),
    ]
    for ask in wrong:
        with pytest.raises(ValueError, match=r"a (failed|successful) task has no") as caught:
            ask()
        assert "hunter2" not in str(caught.value)


def test_a_task_result_cannot_be_changed() -> None:
    result = succeeded()
    for name in ("ok", "_ok", "_err", "other"):
        with pytest.raises(AttributeError):
            setattr(result, name, 5)
        with pytest.raises(AttributeError):
            delattr(result, name)
    assert not hasattr(result, "__dict__")
    assert result.ok == 4


def test_a_success_answers_on_its_side() -> None:
    result = succeeded()
    assert (result.is_ok(), result.is_err()) == (True, False)
    assert (result.ok, result.err, result.ok_value, result.unwrap()) == (4, None, 4, 4)
    assert_type(result.ok, int | None)
    assert_type(result.ok_value, int)


def test_a_failure_answers_on_its_side() -> None:
    result = failed()
    error = TaskError(error_code="CARD_DECLINED", data="hunter2")
    assert (result.is_ok(), result.is_err()) == (False, True)
    assert (result.ok, result.err, result.err_value, result.unwrap_err()) == (
        None,
        error,
        error,
        error,
    )


def test_none_is_a_value_like_any_other() -> None:
    result: TaskResult[None, TaskError] = TaskResult(ok=None)
    assert result.is_ok()
    assert result.unwrap() is None


def test_results_compare_by_side_and_value() -> None:
    assert succeeded() == succeeded()
    assert failed() == failed()
    assert succeeded() != failed()
    assert succeeded() != 4
    assert TaskResult(ok=None) != TaskResult(err=None)
    assert hash(succeeded()) == hash(succeeded())
    with pytest.raises(TypeError):
        hash(TaskResult(ok=[1]))


def test_printing_a_result_shows_its_value_but_no_data_of_an_error() -> None:
    assert repr(succeeded()) == "TaskResult(ok=4)"
    assert repr(failed()) == (
        "TaskResult(err=TaskError(error_code='CARD_DECLINED', message=None, data_type='str'))"
    )
    assert repr(TaskResult(err=["x" * 1000])) == f"TaskResult(err=['{'x' * 97}...{'x' * 98}'])"


@pytest.mark.parametrize(
    "again", [copy.copy, copy.deepcopy, lambda r: pickle.loads(pickle.dumps(r))]
)
@pytest.mark.parametrize("result", [succeeded(), failed(), TaskResult(ok=None)])
def test_a_result_survives_copying_and_pickling(
    again: Callable[[object], object], result: TaskResult[int, TaskError]
) -> None:
    assert again(result) == result


def test_a_result_type_can_be_called_with_its_arguments() -> None:
    assert TaskResult[int, TaskError](ok=4) == succeeded()


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (TaskResult(ok=3), "TaskResult(ok=3)"),
        (TaskResult(ok=None), "TaskResult(ok=None)"),
        (TaskResult(ok="x" * 1000), f"TaskResult(ok='{'x' * 97}...{'x' * 98}')"),
        (
            TaskResult(err=TaskError(error_code="NO", message="it failed")),
            "TaskResult(err=TaskError(error_code='NO', message='it failed'))",
        ),
    ],
)
def test_a_result_shows_its_value_shortened(
    result: TaskResult[Any, TaskError], expected: str
) -> None:
    assert repr(result) == expected


def test_a_result_shows_the_beginning_of_a_long_list() -> None:
    # Not a parameter of the test above: every test process would keep these 38 MB to its end.
    result: TaskResult[list[int], TaskError] = TaskResult(ok=list(range(1_000_000)))
    assert repr(result) == "TaskResult(ok=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...])"
