from __future__ import annotations

import importlib
import itertools
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from horsies import (
    AppConfig,
    ErrorCode,
    Horsies,
    HorsiesError,
    SubWorkflowNode,
    TaskError,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
    WorkflowValidationError,
    from_node,
)
from tests.support.apps.shop import BROKER, double, number
from tests.support.apps.shop import app as shop

_numbers = itertools.count()

HEADER = """
from typing import Any
from horsies import (AppConfig, Horsies, PostgresConfig, SubWorkflowNode, TaskError, TaskResult,
    WorkflowDefinition, WorkflowSpec)

app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://shop@127.0.0.1:1/shop")))

@app.task("work")
def work(n: int = 1) -> TaskResult[int, TaskError]:
    return TaskResult(ok=n)
"""


@pytest.fixture
def app() -> Horsies:
    return Horsies(AppConfig(broker=BROKER))


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Horsies]]:
    """Write a module with an application, and return that application, told to discover it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    names: list[str] = []

    def write(body: str) -> Horsies:
        name = f"builders_{next(_numbers)}"
        names.append(name)
        (tmp_path / f"{name}.py").write_text(HEADER + textwrap.dedent(body))
        found = cast(Horsies, __import__(name).app)
        found.discover_tasks([name])
        return found

    yield write
    for name in names:
        sys.modules.pop(name, None)


class Child(WorkflowDefinition[int]):
    name = "child"
    definition_key = "builders.child"

    @classmethod
    def build_with(
        cls, app: Any, *, n: int, before: TaskResult[int, TaskError] | None = None
    ) -> WorkflowSpec[int]:
        if n < 0:
            raise ArithmeticError("n is negative")
        node = number.node(node_id="n")(n=n)
        return WorkflowSpec(cls.name, [node], output=node)


class Endless(WorkflowDefinition[None]):
    name = "endless"
    definition_key = "builders.endless"

    @classmethod
    def build_with(cls, app: Any, *, level: int, step: int) -> WorkflowSpec[None]:
        node = SubWorkflowNode(Endless, kwargs={"level": level + step, "step": step}, node_id="n")
        return WorkflowSpec(cls.name, [node])


def codes(errors: list[HorsiesError]) -> list[str]:
    return [error.code.value for error in errors]


def one_node(app: Horsies, **options: Any) -> WorkflowSpec[Any]:
    return app.workflow("one", [number.node(**options)()], definition_key="one.v1")


def test_a_sound_builder_has_no_errors_and_stays_what_it_is(app: Horsies) -> None:
    def build() -> WorkflowSpec[Any]:
        return one_node(app)

    assert app.workflow_builder()(build) is build
    assert app.check() == []


def test_a_builder_runs_once_per_case_with_sends_suppressed(app: Horsies) -> None:
    seen: list[tuple[int, bool]] = []

    @app.workflow_builder(cases=[{"n": 1}, {"n": 2, "extra": "x"}])
    def build(n: int, extra: str = "") -> WorkflowSpec[Any]:
        seen.append((n, app.are_sends_suppressed()))
        return one_node(app)

    assert app.check() == []
    assert seen == [(1, True), (2, True)]
    assert not app.are_sends_suppressed()


def test_a_builder_with_parameters_needs_cases(app: Horsies) -> None:
    @app.workflow_builder()
    def build(n: int) -> WorkflowSpec[Any]:
        return one_node(app)

    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_CASES_REQUIRED
    assert error.location is not None
    assert error.location.function == "build"


@pytest.mark.parametrize("case", [{}, {"n": 1, "m": 2}, ["n"]], ids=str)
def test_a_case_must_fit_the_builder(app: Horsies, case: Any) -> None:
    @app.workflow_builder(cases=[case, {"n": 1}])
    def build(n: int) -> WorkflowSpec[Any]:
        return one_node(app)

    assert codes(app.check()) == ["HRS-028"]


def test_a_builder_that_takes_any_name_takes_any_case(app: Horsies) -> None:
    @app.workflow_builder(cases=[{"n": 1, "anything": 2}])
    def build(n: int, **more: Any) -> WorkflowSpec[Any]:
        return one_node(app)

    assert app.check() == []


def test_what_a_builder_raises_is_reported(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        raise LookupError("no such order")

    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION
    assert "LookupError: no such order" in error.message
    assert isinstance(error.__cause__, LookupError)


def test_mistakes_in_the_workflow_are_reported_as_they_are(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        return one_node(app, queue="nowhere", priority=1000)

    assert sorted(codes(app.check())) == ["HRS-102", "HRS-200"]


def test_a_builder_must_return_a_specification(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        return cast("WorkflowSpec[Any]", None)

    assert codes(app.check()) == ["HRS-029"]


def test_a_builder_that_cannot_be_introspected_is_reported(app: Horsies) -> None:
    class Strange:
        __signature__ = "none"

        def __call__(self) -> WorkflowSpec[Any]:
            return one_node(app)

    app.workflow_builder()(Strange())
    assert codes(app.check()) == ["HRS-029"]


def test_the_specification_of_a_builder_needs_a_key(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        return WorkflowSpec("bare", [number.node()()])

    assert codes(app.check()) == ["HRS-016"]


def test_queues_are_resolved_even_where_the_builder_did_not(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        return WorkflowSpec("bare", [number.node(queue="nowhere")()], definition_key="bare")

    assert codes(app.check()) == ["HRS-200"]


def test_children_with_known_parameters_are_built_too(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        child = SubWorkflowNode(Child, kwargs={"n": -1})
        return app.workflow("parent", [child], definition_key="parent")

    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION
    assert "ArithmeticError: n is negative" in error.message


def test_children_that_wait_for_results_are_not_built(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        first = number.node()()
        child = SubWorkflowNode(
            Child, kwargs={"n": -1}, args_from={"before": first}, waits_for=[first]
        )
        return app.workflow("parent", [first, child], definition_key="parent")

    assert app.check() == []


@pytest.mark.parametrize(("step", "expected"), [(0, []), (1, ["HRS-007"])])
def test_a_definition_within_itself_is_followed_until_it_repeats_or_is_too_deep(
    app: Horsies, step: int, expected: list[str]
) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        node = SubWorkflowNode(Endless, kwargs={"level": 0, "step": step})
        return app.workflow("parent", [node], definition_key="parent")

    assert codes(app.check()) == expected


def test_a_definition_without_a_key_is_found(module: Callable[[str], Horsies]) -> None:
    app = module("""
        class Forgotten(WorkflowDefinition[None]):
            name = "forgotten"
            first = work.node()()
    """)
    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_NO_DEFINITION_KEY
    assert error.location is not None
    assert error.location.function == "Forgotten"


def test_bases_and_classes_that_opt_out_need_no_key(module: Callable[[str], Horsies]) -> None:
    app = module("""
        class Shared(WorkflowDefinition[None]):
            name = "shared"
            first = work.node()()

        class Concrete(Shared):
            definition_key = "builders.concrete"

        class Library(WorkflowDefinition[None]):
            name = "library"
            first = work.node()()
            __horsies_no_check__ = True

        class Unfinished(WorkflowDefinition[None]):
            pass
    """)
    assert app.check() == []


def test_definitions_that_take_no_parameters_are_built(module: Callable[[str], Horsies]) -> None:
    app = module("""
        class Broken(WorkflowDefinition[str]):
            name = "broken"
            definition_key = "builders.broken"
            first = work.node()()

            class Meta:
                output = "first"
    """)
    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_OUTPUT_TYPE_MISMATCH
    assert error.location is not None
    assert error.location.function == "Broken"


def test_a_definition_whose_node_runs_no_task_is_told(module: Callable[[str], Horsies]) -> None:
    found = module(
        """
        from horsies import TaskNode

        class Broken(WorkflowDefinition[None]):
            name = "broken"
            definition_key = "builders.no_task"
            only = TaskNode(len)
        """
    )
    (error,) = found.check()
    assert error.code is ErrorCode.TASK_NOT_REGISTERED


def test_definitions_of_another_application_are_left_to_it(
    module: Callable[[str], Horsies],
) -> None:
    app = module("""
        other = Horsies(app.config)

        @other.task("foreign")
        def foreign() -> TaskResult[int, TaskError]:
            return TaskResult(ok=1)

        class Foreign(WorkflowDefinition[str]):
            name = "foreign"
            definition_key = "builders.foreign"
            first = foreign.node()()
    """)
    assert app.check() == []


def test_a_function_that_returns_a_specification_must_be_registered(
    module: Callable[[str], Horsies],
) -> None:
    app = module("""
        def forgotten() -> WorkflowSpec[Any]:
            raise NotImplementedError

        def quoted() -> "WorkflowSpec[Nowhere]":
            raise NotImplementedError

        @app.workflow_builder()
        def registered() -> WorkflowSpec[Any]:
            return app.workflow("w", [work.node()()], definition_key="w")

        def opted_out() -> WorkflowSpec[Any]:
            raise NotImplementedError

        opted_out.__horsies_no_check__ = True

        def other() -> int:
            return 1
    """)
    errors = app.check()
    assert codes(errors) == ["HRS-030", "HRS-030"]
    assert ["'forgotten'" in errors[0].message, "'quoted'" in errors[1].message] == [True, True]


def test_imported_functions_are_left_to_their_own_module(
    module: Callable[[str], Horsies], tmp_path: Path
) -> None:
    (tmp_path / "elsewhere.py").write_text(
        "from horsies import WorkflowSpec\ndef build() -> WorkflowSpec[int]: raise ValueError\n"
    )
    app = module("from elsewhere import build")
    assert app.check() == []
    sys.modules.pop("elsewhere")


def test_loaded_modules_of_a_discovered_package_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: Horsies
) -> None:
    package = tmp_path / "builders_package"
    package.mkdir()
    (package / "__init__.py").write_text("from builders_package import inner\n")
    (package / "inner.py").write_text(
        "from horsies import WorkflowSpec\ndef build() -> WorkflowSpec[int]: raise ValueError\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    app.discover_tasks(["builders_package"])
    assert codes(app.check()) == ["HRS-030"]
    for name in ("builders_package", "builders_package.inner"):
        sys.modules.pop(name)


def test_a_builder_with_errors_ends_the_check(module: Callable[[str], Horsies]) -> None:
    app = module("""
        @app.workflow_builder()
        def broken() -> WorkflowSpec[Any]:
            raise ValueError

        def forgotten() -> WorkflowSpec[Any]:
            raise NotImplementedError
    """)
    assert codes(app.check()) == ["HRS-029"]


def test_workflows_built_while_a_module_is_imported_are_checked_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, app: Horsies
) -> None:
    (tmp_path / "builders_at_import.py").write_text(
        HEADER + "spec = app.workflow('w', [], definition_key='w')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    app.discover_tasks(["builders_at_import"])
    assert codes(app.check()) == ["HRS-002"]


def test_handing_results_on_is_checked_where_the_builder_runs(app: Horsies) -> None:
    @app.workflow_builder()
    def build() -> WorkflowSpec[Any]:
        first: Any = SubWorkflowNode(Endless, kwargs={"level": 0, "step": 0})
        last = double.node()(value=from_node(first))
        return app.workflow("parent", [first, last], definition_key="parent")

    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_ARGS_FROM_TYPE_MISMATCH
    assert error.location is not None
    assert error.location.function == "build"


@pytest.mark.parametrize("where", ["made here", "made by a function"])
def test_a_builder_in_the_module_of_the_application_must_be_registered(
    module: Callable[[str], Horsies], where: str
) -> None:
    app = module("""
        def make() -> Horsies:
            return Horsies("postgresql://shop@127.0.0.1:1/shop")

        made = make()

        @app.workflow_builder()
        def registered() -> WorkflowSpec[Any]:
            return forgotten()

        def forgotten() -> WorkflowSpec[Any]:
            return app.workflow("w", [work.node()()], definition_key="first_hour.w")
    """)
    home = importlib.import_module(app.definitions()["work"].function.__module__)
    (error,) = (app if where == "made here" else home.made).check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_UNDECORATED_BUILDER
    assert "'forgotten'" in error.message
    home.forgotten.__horsies_no_check__ = True
    assert app.check() == []


@pytest.mark.parametrize("key", [None, "habits.keyed"], ids=["left out", "given"])
def test_a_workflow_made_in_build_with_takes_the_key_of_its_class(key: str | None) -> None:
    class Keyed(WorkflowDefinition[int]):
        name = "keyed"
        definition_key = "habits.keyed"

        @classmethod
        def build_with(cls, app: Horsies, *, n: int) -> WorkflowSpec[int]:
            only = number.node(node_id="only")(n=n)
            return app.workflow(cls.name, [only], output=only, definition_key=key)

    assert Keyed.build_with(shop, n=3).definition_key == "habits.keyed"
    with pytest.raises(WorkflowValidationError, match="has no definition_key"):
        shop.workflow("keyed", [number.node()()])


@pytest.mark.parametrize("discovered", [True, False], ids=["discovered", "own module"])
def test_the_check_builds_the_children_of_a_specification_at_module_level(
    module: Callable[[str], Horsies], discovered: bool
) -> None:
    app = module("""
        class Child(WorkflowDefinition[int]):
            name = "child"
            definition_key = f"{__name__}.child"

            @classmethod
            def build_with(cls, app: Any, *, n: int) -> WorkflowSpec[int]:
                raise ArithmeticError("n is negative")

        inner = SubWorkflowNode(Child, kwargs={"n": -1})
        spec = app.workflow("outer", [inner], definition_key="habits.outer")
    """)
    if discovered:
        app.discover_tasks([app.definitions()["work"].function.__module__])
    (error,) = app.check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_BUILDER_EXCEPTION
    assert "n is negative" in error.message
