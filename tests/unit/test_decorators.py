"""The forms that each decorator of an application accepts; every other one is refused with a sentence."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from horsies import ErrorCode, Horsies, HorsiesError, WorkflowSpec
from horsies.tasks.hooks import as_plain_calls

NO_CALL = ["on_send", "on_child_process_start", "on_child_process_stop", "around_task"]
DECORATORS = ["task", "workflow_builder", *NO_CALL]


def plain_0() -> None: ...
def plain_1(one: int) -> None: ...
async def async_0() -> None: ...
async def async_1(one: int) -> None: ...
def generator_0() -> Iterator[None]:
    yield


def generator_1(one: int) -> Iterator[None]:
    yield


async def async_generator_0() -> AsyncIterator[None]:
    yield


async def async_generator_1(one: int) -> AsyncIterator[None]:
    yield


class Kind:
    def method(self) -> None: ...

    def method_1(self, one: int) -> None: ...

    def __call__(self, one: int) -> None: ...

    @staticmethod
    def static_1(one: int) -> None: ...

    @classmethod
    def of_class(cls) -> None: ...


class AsyncKind:
    async def __call__(self, one: int) -> None: ...


class GeneratorKind:
    def __call__(self, one: int) -> Iterator[None]:
        yield


FORMS: dict[str, Any] = {
    "plain_0": plain_0,
    "plain_1": plain_1,
    "async_0": async_0,
    "async_1": async_1,
    "generator_0": generator_0,
    "generator_1": generator_1,
    "async_generator_0": async_generator_0,
    "async_generator_1": async_generator_1,
    "lambda_0": lambda: None,
    "lambda_1": lambda one: None,
    "partial_0": functools.partial(plain_1, 1),
    "partial_1": functools.partial(plain_1),
    "async_partial_0": functools.partial(async_1, 1),
    "generator_partial_1": functools.partial(generator_1),
    "class": Kind,
    "method_of_a_class": Kind.method,
    "bound_method_0": Kind().method,
    "bound_method_1": Kind().method_1,
    "static_method_object": vars(Kind)["static_1"],
    "class_method_object": vars(Kind)["of_class"],
    "property_object": property(Kind.method),
    "object_1": Kind(),
    "async_object_1": AsyncKind(),
    "generator_object_1": GeneratorKind(),
}
NOT_FUNCTIONS: dict[str, Any] = {"number": 3, "dict": {"one": 1}}

HOOK = {
    "plain_0", "async_0", "lambda_0", "partial_0", "async_partial_0", "class", "bound_method_0",
}  # fmt: skip
ACCEPTED = {
    "task": {"plain_0", "plain_1", "async_0", "async_1"},
    "workflow_builder": {
        "plain_0", "plain_1", "lambda_0", "lambda_1", "partial_0", "partial_1", "bound_method_0",
        "bound_method_1", "static_method_object", "object_1", "async_object_1",
        "generator_object_1",  # `check` reports the results of the last two
    },
    "on_send": {
        "plain_1", "lambda_1", "partial_1", "method_of_a_class", "bound_method_1",
        "static_method_object", "object_1",
    },
    "on_child_process_start": HOOK,
    "on_child_process_stop": HOOK,
    "around_task": {
        "generator_1", "async_generator_1", "generator_partial_1", "generator_object_1",
    },
}  # fmt: skip


@pytest.fixture
def app() -> Horsies:
    return Horsies("postgresql://localhost/unused")


def is_accepted(decorate: Callable[[Any], object], form: Any) -> bool:
    try:
        decorate(form)
    except HorsiesError as error:
        return not error.help_text  # a refusal says what to write instead
    return True


@pytest.mark.parametrize("decorator", DECORATORS)
def test_a_decorator_without_parentheses_takes_its_functions_alone(
    app: Horsies, decorator: str
) -> None:
    names = [name for name, form in FORMS.items() if is_accepted(getattr(app, decorator), form)]
    assert set(names) == ACCEPTED[decorator]


@pytest.mark.parametrize("decorator", ["task", "workflow_builder"])
def test_a_decorator_with_parentheses_takes_the_same_functions(
    app: Horsies, decorator: str
) -> None:
    names = [name for name, form in FORMS.items() if is_accepted(getattr(app, decorator)(), form)]
    assert set(names) == ACCEPTED[decorator]


@pytest.mark.parametrize("decorator", DECORATORS)
@pytest.mark.parametrize("given", NOT_FUNCTIONS.values(), ids=NOT_FUNCTIONS)
def test_other_values_are_not_decorated(app: Horsies, decorator: str, given: Any) -> None:
    with pytest.raises(HorsiesError):
        getattr(app, decorator)(given)(plain_1)


@pytest.mark.parametrize("decorator", NO_CALL)
@pytest.mark.parametrize("options", [{}, {"name": "x"}], ids=str)
def test_a_hook_takes_neither_parentheses_nor_options(
    app: Horsies, decorator: str, options: Any
) -> None:
    with pytest.raises(HorsiesError, match=f"@app.{decorator} takes the function alone") as caught:
        getattr(app, decorator)(**options)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_CHILD_HOOK
    assert caught.value.help_text == f"write @app.{decorator} above `def`"


def test_a_builder_without_parentheses_is_checked(app: Horsies) -> None:
    calls: list[str] = []

    @app.workflow_builder
    def build() -> WorkflowSpec[Any]:
        calls.append("build")
        raise LookupError("no such order")

    (error,) = app.check()
    assert "LookupError: no such order" in error.message
    assert calls == ["build"]
    with pytest.raises(LookupError):
        build()


def test_a_builder_with_parameters_needs_cases_also_without_parentheses(app: Horsies) -> None:
    @app.workflow_builder
    def build(order_id: int) -> WorkflowSpec[Any]:
        return app.workflow("one", [])

    assert [error.code for error in app.check()] == [ErrorCode.WORKFLOW_CHECK_CASES_REQUIRED]


def test_a_hook_that_returns_a_coroutine_runs_to_its_end(app: Horsies) -> None:
    ran: list[str] = []

    @app.task("warm_up")
    async def warm_up() -> None:
        ran.append("warm_up")

    app.on_child_process_start(warm_up)
    (hook,) = as_plain_calls(app.get_child_process_start_hooks())
    hook()
    assert ran == ["warm_up"]


def test_a_send_hook_that_returns_a_coroutine_refuses_the_send(app: Horsies) -> None:
    app.on_send(lambda outgoing: async_0())  # type: ignore[type-var]

    @app.task("work")
    def work() -> None: ...

    refused = work.send()
    assert refused.is_err()
    assert (
        "it returned a coroutine, which synchronous sends cannot await" in refused.err_value.message
    )
