from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NewType, Optional, Protocol, TypeVar, Union

import pytest
from typing_extensions import TypeAliasType

from horsies import TaskError, TaskResult
from horsies.codec.shape import bare
from horsies.workflow.nodes.type_compat import (
    UNKNOWN_TYPE,
    admits_none,
    element_type,
    fits,
    result_targets,
    takes_item_results,
    takes_value,
)

T = TypeVar("T")
U = TypeVar("U")
# As `type Outcome = ...` makes them since Python 3.12.
Outcome = TypeAliasType("Outcome", TaskResult[int, TaskError])
Maybe = TypeAliasType("Maybe", int | None)
Several = TypeAliasType("Several", list[T], type_params=(T,))
Swapped = TypeAliasType("Swapped", dict[U, list[T]], type_params=(T, U))
Id = NewType("Id", int)


class Animal: ...


class Dog(Animal): ...


class Barks(Protocol):
    def bark(self) -> None: ...


class Narrow(TaskError): ...


FITTING = [
    (int, int),
    (Any, int),
    (int, Any),
    (int, object),
    (Dog, Animal),
    (int, int | None),
    (int | str, int | str | None),
    (Optional[int], Union[int, None]),  # noqa: UP007, UP045
    (list[Dog], list[Animal]),
    (list[int], list),
    (list, list[int]),
    (list[int], Sequence[int]),
    (dict[str, int], Mapping[str, int]),
    (tuple[int, int], tuple[int, ...]),
    (tuple[int, ...], Sequence[int]),
    (Literal["a"], str),
    (Literal["a"], Literal["a", "b"]),
    (Id, int),
    (None, int | None),
    (Annotated[int, "cents"], int),
    (int, float),
    (T, int),
    (Dog, Barks),
    (list[TaskResult[Dog, TaskError]], list[TaskResult[Animal, TaskError]]),
]
UNFITTING = [
    (int, str),
    (Animal, Dog),
    (int | None, int),
    (list[int], list[str]),
    (list[int], Sequence[str]),
    (dict[str, int], Mapping[str, str]),
    (tuple[int, str], tuple[int, ...]),
    (tuple[int, ...], tuple[int, int]),
    (tuple[int], tuple[int, int]),
    (Literal["a"], int),
    (Literal["a", "c"], Literal["a", "b"]),
    (str, Literal["a"]),
    (int, None),
    (float, int),
    (TaskResult[int, TaskError], TaskResult[str, TaskError]),
]


@pytest.mark.parametrize(("source", "target"), FITTING, ids=str)
def test_a_value_fits_where_its_type_says_so(source: Any, target: Any) -> None:
    assert fits(source, target)


@pytest.mark.parametrize(("source", "target"), UNFITTING, ids=str)
def test_a_value_does_not_fit_elsewhere(source: Any, target: Any) -> None:
    assert not fits(source, target)


@pytest.mark.parametrize(
    ("annotation", "targets"),
    [
        (TaskResult[int, TaskError], [int]),
        (TaskResult[int, TaskError] | None, [int]),
        (TaskResult[int, TaskError] | TaskResult[str, TaskError], [int, str]),
        (TaskResult[int, Any], [int]),
        (Annotated[TaskResult[int, TaskError], "x"], [int]),
        (TaskResult, [Any]),
        (TaskResult[int, Narrow], []),
        (int, []),
        (Any, []),
        (None, []),
    ],
    ids=str,
)
def test_the_results_an_annotation_takes_are_known(annotation: Any, targets: list[Any]) -> None:
    assert list(result_targets(annotation)) == targets


def test_the_elements_of_a_list_have_a_type() -> None:
    assert element_type(list[int]) is int
    assert element_type(list) is Any
    assert element_type(Any) is Any
    assert element_type(tuple[int, ...]) is UNKNOWN_TYPE
    assert element_type(None) is UNKNOWN_TYPE


def test_an_alias_is_what_it_stands_for() -> None:
    assert result_targets(Outcome) == (int,)
    assert not takes_value(Outcome)
    assert takes_item_results(list[Outcome])
    assert admits_none(Maybe)
    assert element_type(Several[int]) is int
    assert element_type(Annotated[Several[str], "words"]) is str
    assert element_type(Swapped[int, str]) is UNKNOWN_TYPE
    assert bare(Swapped[int, str]) == dict[str, list[int]]
