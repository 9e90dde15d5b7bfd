"""Generators around tasks, as a child runs them."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from horsies import (
    AppConfig,
    ConfigurationError,
    ErrorCode,
    Horsies,
    PostgresConfig,
    TaskError,
    TaskResult,
)
from horsies.current_task import CurrentTask, inherited_headers, set_running_task
from horsies.errors import TaskStopped
from horsies.worker.child.execute import AppProgram
from horsies.worker.protocol import Assignment, ChildReport
from tests.support.applications import NOWHERE, app_at

BROKER = PostgresConfig(database_url="postgresql://localhost/unused")


@pytest.fixture
def steps() -> list[str]:
    return []


@pytest.fixture
def app(steps: list[str]) -> Horsies:
    app = Horsies(AppConfig(broker=BROKER))

    @app.task("work")
    def work(fails: bool = False) -> TaskResult[int, TaskError]:
        steps.append("work")
        if fails:
            raise KeyError("missing")
        return TaskResult(ok=1)

    @app.task("work_async")
    async def work_async(fails: bool = False) -> TaskResult[int, TaskError]:
        await asyncio.sleep(0)
        return work.definition.function(fails)  # type: ignore[no-any-return]

    @app.task("end")
    def end() -> TaskResult[int, TaskError]:
        raise StopAsyncIteration("no more rows")

    @app.task("end_async")
    async def end_async() -> TaskResult[int, TaskError]:
        raise StopAsyncIteration("no more rows")

    @app.task("stop")
    def stop() -> TaskResult[int, TaskError]:
        raise TaskStopped

    return app


def run(app: Horsies, name: str, *args: Any, stored: str = "") -> ChildReport:
    assignment = Assignment("id-1", 1, name, 2, json.dumps(args), "{}", None, None, stored)
    set_running_task(CurrentTask(assignment, 0.0))
    try:
        return AppProgram(app).execute(assignment)
    finally:
        set_running_task(None)


def add_sync(app: Horsies, steps: list[str], name: str) -> None:
    @app.around_task
    def around(task: CurrentTask) -> Iterator[None]:
        steps.append(f"{name} before {task.id}")
        try:
            result = yield
            steps.append(f"{name} got {result}")
        except BaseException as error:
            steps.append(f"{name} saw {type(error).__name__}")
            raise


def add_async(app: Horsies, steps: list[str], name: str) -> None:
    @app.around_task
    async def around(task: CurrentTask) -> AsyncIterator[None]:
        await asyncio.sleep(0)
        steps.append(f"{name} before {task.id}")
        try:
            result = yield
            steps.append(f"{name} got {result}")
        except BaseException as error:
            await asyncio.sleep(0)
            steps.append(f"{name} saw {type(error).__name__}")
            raise


@pytest.mark.parametrize("task", ["work", "work_async"])
@pytest.mark.parametrize("adders", [(add_sync, add_async), (add_async, add_sync)])
def test_hooks_nest_in_the_order_of_their_registration(
    app: Horsies, steps: list[str], task: str, adders: tuple[Any, Any]
) -> None:
    for add, name in zip(adders, ("outer", "inner"), strict=True):
        add(app, steps, name)
    assert run(app, task).ok
    shown = [step.partition(" got ")[0] for step in steps]
    assert shown == ["outer before id-1", "inner before id-1", "work", "inner", "outer"]
    steps.clear()
    report = run(app, task, True)
    assert report.error_code == "UNHANDLED_EXCEPTION"
    assert "raised KeyError" in (report.error_message or "")
    assert steps[2:] == ["work", "inner saw KeyError", "outer saw KeyError"]


@pytest.mark.parametrize("task", ["end", "end_async"])
@pytest.mark.parametrize("add", [add_sync, add_async])
def test_the_end_of_an_iterator_passes_through_the_hooks(
    app: Horsies, steps: list[str], task: str, add: Any
) -> None:
    add(app, steps, "outer")
    assert "StopAsyncIteration: no more rows" in (run(app, task).error_message or "")
    assert steps == ["outer before id-1", "outer saw StopAsyncIteration"]


def test_a_stop_passes_through_the_hooks(app: Horsies, steps: list[str]) -> None:
    add_sync(app, steps, "outer")
    with pytest.raises(TaskStopped):
        run(app, "stop")
    assert steps == ["outer before id-1", "outer saw TaskStopped"]


def test_a_hook_that_swallows_the_exception_does_not_make_it_a_success(app: Horsies) -> None:
    @app.around_task
    def swallow(task: CurrentTask) -> Iterator[None]:
        try:
            yield
        except KeyError:
            return

    assert "KeyError" in (run(app, "work", True).error_message or "")


def test_a_hook_may_fail_the_task_and_replace_its_exception(app: Horsies) -> None:
    @app.around_task
    def commit(task: CurrentTask) -> Iterator[None]:
        try:
            yield
        except KeyError as error:
            raise ValueError("replaced") from error
        raise OSError("the commit failed")

    assert "OSError: the commit failed" in (run(app, "work").error_message or "")
    assert "ValueError: replaced" in (run(app, "work", True).error_message or "")


@pytest.mark.parametrize("task", ["work", "work_async"])
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_hook_that_yields_twice_or_never_is_one_clear_error(
    app: Horsies, steps: list[str], task: str, is_async: bool, fails: bool
) -> None:
    def twice(task: CurrentTask) -> Iterator[None]:
        for _ in range(2):
            try:
                yield
            except KeyError:
                continue

    async def twice_async(task: CurrentTask) -> AsyncIterator[None]:
        for _ in range(2):
            try:
                yield
            except KeyError:
                continue

    app.hooks.around[:] = [twice_async if is_async else twice]
    assert "yielded twice" in (run(app, task, fails).error_message or "")

    def never(task: CurrentTask) -> Iterator[None]:
        yield from ()

    steps.clear()
    app.hooks.around[:] = [never]
    assert "did not yield" in (run(app, task).error_message or "")
    assert steps == []


@pytest.mark.parametrize("hook", [None, lambda task: None, asyncio.sleep])
def test_a_hook_that_is_not_a_generator_function_is_refused(app: Horsies, hook: Any) -> None:
    with pytest.raises(ConfigurationError, match="must be a generator function"):
        app.around_task(hook)


def without_parameters() -> Iterator[None]:
    yield


def with_two(task: CurrentTask, more: int) -> Iterator[None]:
    yield


@pytest.mark.parametrize("hook", [without_parameters, with_two])
def test_a_generator_that_does_not_take_just_the_task_is_refused(app: Horsies, hook: Any) -> None:
    with pytest.raises(ConfigurationError, match="with one parameter, the running task") as caught:
        app.around_task(hook)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_CHILD_HOOK
    assert app.hooks.around == []


@pytest.mark.parametrize("method", ["on_child_process_start", "on_child_process_stop"])
def test_a_child_process_hook_with_a_required_parameter_is_refused(
    app: Horsies, method: str
) -> None:
    with pytest.raises(ConfigurationError, match="a function without parameters") as caught:
        getattr(app, method)(lambda needed: None)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_CHILD_HOOK
    getattr(app, method)(lambda optional=1: None)
    getattr(app, method)(dict)  # shows no signature


def test_sends_of_a_task_inherit_its_headers(app: Horsies) -> None:
    seen: list[dict[str, str]] = []

    @app.around_task
    def look(task: CurrentTask) -> Iterator[None]:
        seen.append(dict(inherited_headers()))
        yield

    options = json.dumps({"headers": {"tenant": "a"}})
    run(app, "work", stored=f"1\x000\x00default\x00{options}\x00" + "\n" * 7)
    run(app, "work")
    assert seen == [{"tenant": "a"}, {}]
    assert inherited_headers() == {}


async def async_generator_hook() -> AsyncIterator[None]:
    yield


def generator_hook() -> Iterator[None]:
    yield


class AsyncGeneratorHook:
    async def __call__(self) -> AsyncIterator[None]:
        yield


@pytest.mark.parametrize(
    "hook",
    [
        async_generator_hook,
        functools.partial(async_generator_hook),
        AsyncGeneratorHook(),
        generator_hook,
    ],
)
def test_a_start_hook_whose_body_would_never_run_is_refused(hook: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        app_at(NOWHERE).on_child_process_start(hook)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_CHILD_HOOK
