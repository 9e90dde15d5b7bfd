"""Batches: one call of a function for several tasks, each of which has its own outcome. This module does no
I/O. The stored tasks are ordinary tasks, each with one item as its argument. So the definition of a batched
task has a function of one item, which calls the user's function with a list of one item. A child that gets
several tasks calls the user's function with all their items.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from inspect import Parameter, Signature
from typing import Any, NamedTuple, NoReturn, get_args, get_origin, get_type_hints

from horsies.codec.calls import transaction_class
from horsies.codec.shape import bare
from horsies.task_result import TaskResult

SIZES = range(1, 1_001)


@dataclass(frozen=True, slots=True)
class Batch:
    """How many tasks of a function one call may take.

    Example:
        @app.task("insert_rows", batch=Batch(size=100))
        def insert_rows(rows: list[Row]) -> None: ...
    """

    size: int
    """The maximum number of tasks in one call, from 1 to 1,000."""


class BatchResultMismatch(Exception):
    """A batched function did not return one outcome for each of its tasks."""


class BatchForm(NamedTuple):
    """The parameter of a batched function, the types of an item and of an outcome, and whether outcomes are
    TaskResults, as annotated. A function that returns None has no outcomes, so all its tasks succeed.
    """

    parameter: str
    item: Any
    outcome: Any
    has_results: bool
    is_silent: bool

    @classmethod
    def of(cls, function: Callable[..., Any]) -> BatchForm:
        """Read the annotations; raise ValueError with a sentence that explains the mistake if
        they are wrong.
        """
        try:
            hints = get_type_hints(function, include_extras=True)
        except Exception as error:
            raise ValueError(f"an annotation cannot be resolved ({error})") from error
        parameters = inspect.signature(function).parameters
        if any(transaction_class(hints.get(name)) is not None for name in parameters):
            raise ValueError("it takes a transaction, but each task of a batch has its own outcome")
        name = _only_parameter(parameters.values())
        if "return" not in hints:
            raise ValueError("it has no return annotation")
        outcome = None if hints["return"] is type(None) else _element(hints["return"])
        item = _element(hints.get(name))
        if item is Parameter.empty:
            raise ValueError(
                f"its parameter {name!r} must be annotated as a list, such as list[int]"
            )
        if outcome is Parameter.empty:
            raise ValueError("it must return a list with one outcome for each task, or None")
        has_results = get_origin(bare(outcome)) is TaskResult
        return cls(name, item, outcome, has_results, hints["return"] is type(None))


@dataclass(frozen=True, slots=True)
class BatchTraits:
    """The additional properties of a batched task: its function of a list, and the size of a batch."""

    function: Callable[..., Any]
    size: int
    form: BatchForm

    def outcomes(self, returned: object, count: int) -> Sequence[Any]:
        """Return the outcomes of a call for this many tasks, in order; raise BatchResultMismatch if their
        number or kind is wrong.
        """
        if self.form.is_silent and returned is None:
            return [None] * count
        if isinstance(returned, str | bytes) or not isinstance(returned, Sequence):
            self._refuse(type(returned).__name__, count)
        if len(returned) != count:
            self._refuse(f"{len(returned)} outcome(s)", count)
        if self.form.has_results:
            odd = next((one for one in returned if not isinstance(one, TaskResult)), None)
            if odd is not None:
                self._refuse(f"{type(odd).__name__} among its TaskResults", count)
        return returned

    def _refuse(self, what: str, count: int) -> NoReturn:
        raise BatchResultMismatch(
            f"Batched function {self.function.__name__!r} returned {what} for {count} task(s); return a "
            "list with one outcome for each of them, in order."
        )

    def for_one(self) -> Callable[..., Any]:
        """Return a function of one item, with the annotations that callers of the task see."""

        def call_one(*args: Any, **kwargs: Any) -> Any:
            return self.outcomes(self.function([*args, *kwargs.values()]), 1)[0]

        async def await_one(*args: Any, **kwargs: Any) -> Any:
            return self.outcomes(await self.function([*args, *kwargs.values()]), 1)[0]

        is_async = inspect.iscoroutinefunction(self.function)
        one: Callable[..., Any] = await_one if is_async else call_one
        form = self.form
        parameter = Parameter(form.parameter, Parameter.POSITIONAL_OR_KEYWORD, annotation=form.item)
        one.__signature__ = Signature(  # type: ignore[attr-defined]
            [parameter], return_annotation=form.outcome
        )
        one.__annotations__ = {form.parameter: form.item, "return": form.outcome}
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            setattr(one, name, getattr(self.function, name))
        return one


def _only_parameter(parameters: Collection[Parameter]) -> str:
    kinds = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    names = [one.name for one in parameters if one.kind in kinds]
    if len(names) != 1 or len(names) != len(parameters):
        raise ValueError("it must take one parameter, the list of the items of its tasks")
    return names[0]


def _element(annotation: Any) -> Any:
    """Return the type of a list's elements; `Parameter.empty` if the annotation is not a list."""
    declared = bare(annotation)
    if get_origin(declared) in (list, Sequence) and len(get_args(declared)) == 1:
        return get_args(declared)[0]
    return Parameter.empty
