"""Defining tasks: mistakes that the decorator refuses, and the results of direct calls."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import importlib
import sys
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typing_extensions import TypedDict

from horsies import Horsies, TaskDefinitionError, TaskError, TaskResult
from horsies.config.app import AppConfig, CustomQueueConfig, QueueMode
from horsies.config.postgres import PostgresConfig
from horsies.error_codes import ContractCode, OperationalErrorCode
from horsies.errors import ConfigurationError, ErrorCode, HorsiesError, RegistryError, TaskStopped
from horsies.result import Err
from horsies.retry import RetryPolicy
from tests.support.applications import UNREACHABLE

BROKER = PostgresConfig(database_url="postgresql://app:hunter2@127.0.0.1:1/shop")
IntResult = TaskResult[int, TaskError]


class OldShelf(typing.TypedDict):
    books: int


class Shelf(TypedDict):
    books: int


class PaymentError(TaskError):
    """A user's own error type."""

    gateway: str


def new_app(**settings: Any) -> Horsies:
    return Horsies(AppConfig(broker=BROKER, **settings))


def custom_app() -> Horsies:
    queues = [
        CustomQueueConfig(name="slow", priority=50),
        CustomQueueConfig(name="fast", priority=1),
    ]
    return new_app(queue_mode=QueueMode.CUSTOM, custom_queues=queues)


def answer() -> TaskResult[int, TaskError]:
    return TaskResult(ok=42)


def refusal(function: Any, **options: Any) -> HorsiesError:
    name = options.pop("task_name", "answer")
    with pytest.raises(HorsiesError) as caught:
        new_app().task(name, **options)(function)
    return caught.value


def run(
    function: Callable[..., Any], *args: Any, app: Horsies | None = None, **options: Any
) -> Any:
    """Define a task and call it directly."""
    return (app or new_app()).task("probe", **options)(function)(*args)


# Mistakes that the decorator refuses


def test_a_function_without_return_annotation_is_refused() -> None:
    def silent():  # type: ignore[no-untyped-def]
        return TaskResult(ok=1)

    error = refusal(silent)
    assert error.code is ErrorCode.TASK_NO_RETURN_TYPE
    assert "'silent'" in error.message
    assert error.location is not None
    assert error.location.file == __file__


def wrong_bare() -> TaskResult:  # type: ignore[type-arg]
    return TaskResult(ok=1)


def wrong_union() -> TaskResult[int, TaskError] | None:
    return None


def wrong_plain_type() -> threading.Thread:
    return threading.current_thread()


def wrong_error_type() -> TaskResult[int, str]:
    return TaskResult(ok=1)


def wrong_error_exception() -> TaskResult[int, ValueError]:
    return TaskResult(ok=1)


def wrong_unresolvable() -> TaskResult[NoSuchThing, TaskError]:  # type: ignore[name-defined]  # noqa: F821
    return TaskResult(ok=1)


def wrong_ok_type() -> TaskResult[threading.Thread, TaskError]:
    return TaskResult(ok=threading.current_thread())


@pytest.mark.parametrize(
    "function",
    [
        wrong_bare,
        wrong_union,
        wrong_plain_type,
        wrong_error_type,
        wrong_error_exception,
        wrong_ok_type,
    ],
)
def test_a_return_annotation_that_is_not_usable_is_refused(
    function: Callable[..., Any],
) -> None:
    error = refusal(function)
    assert error.code is ErrorCode.TASK_INVALID_RETURN_TYPE
    assert function.__name__ in error.message
    assert error.help_text is not None
    assert "TaskResult[int, TaskError]" in error.help_text


def test_an_annotation_that_cannot_be_resolved_is_named() -> None:
    error = refusal(wrong_unresolvable)
    assert error.code is ErrorCode.TASK_INVALID_OPTIONS
    assert "NoSuchThing" in error.message


def test_an_error_type_of_the_users_own_is_accepted() -> None:
    def pay() -> TaskResult[int, PaymentError]:
        return TaskResult(err=PaymentError(error_code="DECLINED", gateway="x"))

    assert run(pay).err_value == PaymentError(error_code="DECLINED", gateway="x")


def generator() -> Iterator[TaskResult[int, TaskError]]:
    yield TaskResult(ok=1)


async def async_generator() -> AsyncIterator[TaskResult[int, TaskError]]:
    yield TaskResult(ok=1)


@pytest.mark.parametrize("function", [generator, async_generator])
def test_generators_are_refused(function: Callable[..., Any]) -> None:
    error = refusal(function)
    assert error.code is ErrorCode.TASK_INVALID_RETURN_TYPE
    assert "generator" in error.message


def plain_wrapper(function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> TaskResult[int, TaskError]:
        result: TaskResult[int, TaskError] = function(*args, **kwargs)
        return result

    return wrapper


class CallableAnswer:
    def __call__(self) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    def method(self) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)


@pytest.mark.parametrize(
    "function",
    [
        functools.wraps(answer)(lambda: answer()),
        plain_wrapper(answer),
        functools.partial(answer),
        functools.cache(answer),
        contextlib.contextmanager(generator),
        staticmethod(answer),
        CallableAnswer(),
        CallableAnswer().method,
        CallableAnswer,
        len,
        new_app().task("other")(answer),
        None,
        "answer",
    ],
    ids=lambda function: type(function).__name__,
)
def test_anything_but_the_plain_function_is_refused(function: Any) -> None:
    assert refusal(function).code is ErrorCode.TASK_PREDECORATED_NOT_SUPPORTED


def test_a_task_that_closes_over_another_function_is_no_wrapper() -> None:
    def double(number: int) -> int:
        return 2 * number

    def total(*numbers: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=sum(map(double, numbers)))

    assert run(total, 1, 2).ok_value == 6


@pytest.mark.parametrize("name", ["", "   ", "x" * 256, "a\0b", "\ud800", 7])
def test_a_task_name_that_cannot_be_stored_is_refused(name: Any) -> None:
    error = refusal(answer, task_name=name)
    assert error.code is ErrorCode.TASK_INVALID_OPTIONS
    assert "1 to 255" in error.message


def test_a_task_name_may_have_255_characters() -> None:
    app = new_app()
    app.task("é" * 255)(answer)
    assert app.list_tasks() == ["é" * 255]


@pytest.mark.parametrize(
    "options",
    [
        {"good_until": None},
        {"auto_retry_for": ["X"]},
        {"max_retries": 3},
        {"que_name": "default"},
        {"retry_policy": {"max_retries": 3}},
        {"timeout_ms": 99},
        {"timeout_ms": 100.5},
        {"timeout_ms": True},
        {"timeout_ms": 2**31},
        {"memory_limit_mb": 0},
        {"memory_limit_mb": 2.5},
        {"memory_limit_mb": True},
        {"memory_limit_mb": 2**24},
        {"on_stop": "later"},
    ],
    ids=str,
)
def test_an_option_the_decorator_does_not_know_or_cannot_use_is_refused(
    options: dict[str, Any],
) -> None:
    error = refusal(answer, **options)
    assert error.code is ErrorCode.TASK_INVALID_OPTIONS
    assert next(iter(options)) in error.message


def test_the_refusal_of_an_unknown_option_says_where_it_belongs() -> None:
    error = refusal(answer, good_until=None)
    assert "with_options" in (error.help_text or "")


def test_a_name_given_as_an_option_belongs_into_the_first_argument() -> None:
    error = refusal(answer, name="x")
    assert error.code is ErrorCode.TASK_INVALID_OPTIONS
    assert "as its first argument, not as name=" in error.message


def test_a_parameter_type_that_has_no_json_form_is_refused() -> None:
    def listen(thread: threading.Thread) -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    error = refusal(listen)
    assert error.code is ErrorCode.TASK_INVALID_OPTIONS
    assert "thread" in error.message


@pytest.mark.parametrize(
    "options",
    [
        {"exception_mapper": {ValueError: "lower case"}},
        {"exception_mapper": {"ValueError": "CODE"}},
        {"exception_mapper": {int: "CODE"}},
        {"exception_mapper": [ValueError]},
        {"default_unhandled_error_code": "ValueError"},
        {"default_unhandled_error_code": ""},
        {"default_unhandled_error_code": 5},
    ],
    ids=str,
)
def test_a_bad_mapper_or_default_code_is_refused(options: dict[str, Any]) -> None:
    error = refusal(answer, **options)
    assert error.code is ErrorCode.CONFIG_INVALID_EXCEPTION_MAPPER


def test_every_bad_entry_of_a_mapper_is_reported() -> None:
    error = refusal(answer, exception_mapper={ValueError: "bad", KeyError: "worse"})
    text = str(error)
    assert "ValueError" in text
    assert "KeyError" in text


def test_a_mapper_changed_after_the_definition_changes_nothing() -> None:
    mapper: dict[type[BaseException], str] = {ValueError: "BAD_VALUE"}

    def fail() -> TaskResult[int, TaskError]:
        raise ValueError("no")

    task = new_app().task("fail", exception_mapper=mapper)(fail)
    mapper[ValueError] = "CHANGED"
    assert task().err_value.error_code == "BAD_VALUE"


# Queues


def test_a_queue_name_is_refused_in_default_mode() -> None:
    error = refusal(answer, queue_name="fast")
    assert isinstance(error, ConfigurationError)
    assert error.code is ErrorCode.CONFIG_INVALID_QUEUE_MODE


def test_a_queue_name_is_required_in_custom_mode() -> None:
    with pytest.raises(ConfigurationError) as caught:
        custom_app().task("answer")(answer)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_QUEUE_MODE
    assert "fast, slow" in (caught.value.help_text or "")


@pytest.mark.parametrize("queue_name", ["medium", "", "FAST"])
def test_an_unknown_queue_is_refused_in_custom_mode(queue_name: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        custom_app().task("answer", queue_name=queue_name)(answer)
    assert caught.value.code is ErrorCode.TASK_INVALID_QUEUE
    assert "fast, slow" in (caught.value.help_text or "")


def test_a_task_takes_the_priority_of_its_queue() -> None:
    task = custom_app().task("answer", queue_name="slow")(answer)
    assert (task.definition.queue_name, task.definition.priority) == ("slow", 50)


def test_a_task_in_default_mode_has_the_default_queue_and_priority_100() -> None:
    task = new_app().task("answer")(answer)
    assert (task.definition.queue_name, task.definition.priority) == ("default", 100)


def test_queue_names_can_be_asked_for_and_validated() -> None:
    app = custom_app()
    assert app.get_valid_queue_names() == ["fast", "slow"]
    assert app.validate_queue_name("slow") == "slow"
    assert new_app().validate_queue_name(None) == "default"
    with pytest.raises(ConfigurationError):
        app.validate_queue_name("medium")


# Names are unique


def other_answer() -> TaskResult[int, TaskError]:
    return TaskResult(ok=43)


def test_a_name_used_for_two_functions_is_refused_naming_both_places() -> None:
    app = new_app()
    app.task("answer")(answer)
    with pytest.raises(RegistryError) as caught:
        app.task("answer")(other_answer)
    assert caught.value.code is ErrorCode.TASK_DUPLICATE_NAME
    text = str(caught.value)
    assert f"{__file__}:{answer.__code__.co_firstlineno}" in text
    assert f"{__file__}:{other_answer.__code__.co_firstlineno}" in text
    assert app.tasks()["answer"]().ok_value == 42


def test_importing_a_module_again_gives_the_same_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "reimported_tasks.py"
    source.write_text(
        "from horsies import TaskError, TaskResult\n"
        "from tests.tasks.test_definition import shared\n\n"
        "@shared.app.task('reimported')\n"
        "def reimported() -> TaskResult[int, TaskError]:\n"
        "    return TaskResult(ok=1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(shared, "app", new_app())
    first = _fresh_import("reimported_tasks").reimported
    second = _fresh_import("reimported_tasks").reimported
    assert first is second
    assert shared.app.list_tasks() == ["reimported"]


class shared:
    app: Any = None


def _fresh_import(name: str) -> ModuleType:
    sys.modules.pop(name, None)
    module = importlib.import_module(name)
    sys.modules.pop(name, None)
    return module


def test_functions_without_a_source_file_are_never_taken_for_one_another() -> None:
    app = new_app()
    source = "def made() -> TaskResult[int, TaskError]:\n    return TaskResult(ok={})\n"
    for value in (1, 2):
        names: dict[str, Any] = {"TaskResult": TaskResult, "TaskError": TaskError}
        exec(source.format(value), names)
        if value == 1:
            app.task("made")(names["made"])
    with pytest.raises(RegistryError) as caught:
        app.task("made")(names["made"])
    assert caught.value.code is ErrorCode.TASK_DUPLICATE_NAME


def test_two_applications_may_use_the_same_name() -> None:
    first, second = new_app(), new_app()
    assert first.task("answer")(answer) is not second.task("answer")(answer)


def test_the_list_of_tasks_is_a_copy() -> None:
    app = new_app()
    app.task("answer")(answer)
    app.list_tasks().clear()
    app.tasks().clear()
    assert app.list_tasks() == ["answer"]
    assert app.get_task("answer") is not None
    assert app.get_task("unknown") is None


def test_a_task_keeps_the_name_and_documentation_of_its_function() -> None:
    def documented() -> TaskResult[int, TaskError]:
        """Say something."""
        return TaskResult(ok=1)

    task = new_app().task("documented.task")(documented)
    assert (task.__name__, task.__doc__) == ("documented", "Say something.")
    assert task.task_name == "documented.task"
    assert repr(task) == "TaskFunction('documented.task')"


def test_a_retry_policy_is_kept_with_the_task() -> None:
    policy = RetryPolicy.fixed([1], auto_retry_for=["GATEWAY_DOWN"])
    task = new_app().task("answer", retry_policy=policy, timeout_ms=100, on_stop="fail")(answer)
    assert task.definition.retry_policy is policy
    assert (task.definition.timeout_ms, task.definition.on_stop) == (100, "fail")


# Direct calls


def test_a_direct_call_returns_what_the_function_returned() -> None:
    def add(a: int, b: int = 1) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a + b)

    task = new_app().task("add")(add)
    assert task(1).ok_value == 2
    assert task(a=1, b=5).ok_value == 6


def test_an_async_task_can_be_called_directly() -> None:
    async def slow(a: int) -> TaskResult[int, TaskError]:
        await asyncio.sleep(0)
        return TaskResult(ok=a)

    assert run(slow, 3).ok_value == 3


def test_async_tasks_of_one_process_share_an_event_loop() -> None:
    async def where() -> TaskResult[int, TaskError]:
        return TaskResult(ok=id(asyncio.get_running_loop()))

    task = new_app().task("where")(where)
    assert task().ok_value == task().ok_value


def test_async_tasks_can_be_called_from_several_threads_at_once() -> None:
    meeting = threading.Barrier(4, timeout=30)

    async def meet() -> TaskResult[int, TaskError]:
        meeting.wait()
        return TaskResult(ok=1)

    task = new_app().task("meet")(meet)
    results: list[TaskResult[int, TaskError]] = []
    threads = [threading.Thread(target=lambda: results.append(task())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [result.ok for result in results] == [1] * 4


def test_calling_an_async_task_inside_a_running_loop_says_what_to_do() -> None:
    async def slow() -> TaskResult[int, TaskError]:
        return TaskResult(ok=1)

    task = new_app().task("slow")(slow)

    async def call() -> None:
        task()

    with pytest.raises(RuntimeError, match="event loop is running"):
        asyncio.run(call())


def test_a_synchronous_task_can_be_called_inside_a_running_loop() -> None:
    task = new_app().task("answer")(answer)

    async def call() -> TaskResult[int, TaskError]:
        return task()

    assert asyncio.run(call()).ok_value == 42


@pytest.mark.parametrize("value", [None, 42, "text", Err("no"), TaskError(message="no")])
def test_a_value_that_is_no_task_result_is_a_task_exception(value: Any) -> None:
    def wrong() -> TaskResult[int, TaskError]:
        return value  # type: ignore[no-any-return]

    error = run(wrong).err_value
    assert error.error_code is OperationalErrorCode.TASK_EXCEPTION
    assert type(value).__name__ in error.message


def test_a_value_of_another_type_is_a_mismatch_and_is_not_converted() -> None:
    def wrong() -> TaskResult[int, TaskError]:
        return TaskResult(ok="7")  # type: ignore[arg-type]

    error = run(wrong).err_value
    assert error.error_code is ContractCode.RETURN_TYPE_MISMATCH
    assert error.data["variant"] == "ok"
    assert error.data["expected_type"] == "int"
    assert error.data["path"] == "ok"


def test_a_mismatch_names_the_place_inside_the_value() -> None:
    def wrong() -> TaskResult[list[int], TaskError]:
        return TaskResult(ok=[1, "two"])  # type: ignore[list-item]

    error = run(wrong).err_value
    assert error.error_code is ContractCode.RETURN_TYPE_MISMATCH
    assert error.data["path"] == "ok[1]"


def test_an_error_of_another_type_is_a_mismatch() -> None:
    def wrong() -> TaskResult[int, PaymentError]:
        return TaskResult(err=TaskError(error_code="DECLINED"))  # type: ignore[arg-type]

    error = run(wrong).err_value
    assert error.error_code is ContractCode.RETURN_TYPE_MISMATCH
    assert error.data["variant"] == "err"


def test_a_returned_error_is_kept_and_never_mapped() -> None:
    def decline() -> TaskResult[int, TaskError]:
        cause = ValueError("no")
        return TaskResult(err=TaskError(error_code="DECLINED", exception=cause))

    error = run(decline, exception_mapper={ValueError: "MAPPED"}).err_value
    assert error.error_code == "DECLINED"


def test_a_built_in_code_returned_by_the_task_is_kept() -> None:
    def give_up() -> TaskResult[int, TaskError]:
        return TaskResult(err=TaskError(error_code=OperationalErrorCode.WORKER_CRASHED))

    assert run(give_up).err_value.error_code is OperationalErrorCode.WORKER_CRASHED


def raising(error: BaseException) -> Callable[[], IntResult]:
    def fail() -> TaskResult[int, TaskError]:
        raise error

    return fail


def test_an_exception_becomes_an_error_that_names_it() -> None:
    error = run(raising(ValueError("bad luck"))).err_value
    assert error.error_code is OperationalErrorCode.UNHANDLED_EXCEPTION
    assert error.message == "Task 'probe' raised ValueError: bad luck"
    assert error.data == {"exception_type": "ValueError"}
    assert isinstance(error.exception, ValueError)


def test_an_exception_in_an_async_task_is_mapped_in_the_same_way() -> None:
    async def fail() -> TaskResult[int, TaskError]:
        raise KeyError("x")

    assert run(fail, exception_mapper={KeyError: "GONE"}).err_value.error_code == "GONE"


def test_a_call_that_does_not_fit_the_function_is_an_error_result() -> None:
    error = run(answer, 1, 2, 3).err_value
    assert error.error_code is OperationalErrorCode.WORKER_SERIALIZATION_ERROR


def test_the_mappers_are_asked_in_order() -> None:
    app = new_app(
        exception_mapper={ValueError: "APP_VALUE", KeyError: "APP_KEY"},
        default_unhandled_error_code="APP_DEFAULT",
    )
    options: dict[str, Any] = {"exception_mapper": {ValueError: "TASK_VALUE"}}
    assert run(raising(ValueError()), app=app, **options).err_value.error_code == "TASK_VALUE"
    app = new_app(
        exception_mapper={KeyError: "APP_KEY"}, default_unhandled_error_code="APP_DEFAULT"
    )
    assert run(raising(KeyError()), app=app, **options).err_value.error_code == "APP_KEY"


def test_a_subclass_of_a_mapped_exception_is_mapped() -> None:
    app = new_app(exception_mapper={ValueError: "VALUE"}, default_unhandled_error_code="OTHER")
    error = run(raising(UnicodeError("subclass of ValueError")), app=app).err_value
    assert error.error_code == "VALUE"


def test_the_default_of_the_task_comes_before_the_default_of_the_app() -> None:
    app = new_app(default_unhandled_error_code="APP_DEFAULT")
    error = run(raising(KeyError()), app=app, default_unhandled_error_code="MINE").err_value
    assert error.error_code == "MINE"


def test_a_mapper_may_name_a_built_in_code() -> None:
    error = run(raising(KeyError()), exception_mapper={KeyError: "WORKER_CRASHED"}).err_value
    assert error.error_code is OperationalErrorCode.WORKER_CRASHED


@pytest.mark.parametrize(
    "error", [SystemExit(1), GeneratorExit(), asyncio.CancelledError(), BaseException("raw")]
)
def test_leaving_by_any_exception_is_the_failure_of_the_task(error: BaseException) -> None:
    result = run(raising(error)).err_value
    assert result.error_code is OperationalErrorCode.UNHANDLED_EXCEPTION
    assert result.data == {"exception_type": type(error).__name__}


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TaskStopped()])
def test_only_ctrl_c_and_a_stop_request_pass_through(error: BaseException) -> None:
    with pytest.raises(type(error)):
        run(raising(error))


class Unprintable(Exception):
    def __str__(self) -> str:
        raise ValueError("no text for you")


class Lethal(Exception):
    def __str__(self) -> str:
        raise SystemExit(3)


class Nonsense(Exception):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Lonely(Exception):
    def __str__(self) -> str:
        return "\ud800 and \0"


@pytest.mark.parametrize("kind", [Unprintable, Lethal, Nonsense, Lonely])
def test_an_exception_that_cannot_even_be_printed_is_still_an_error_result(
    kind: type[Exception],
) -> None:
    error = run(raising(kind())).err_value
    assert error.error_code is OperationalErrorCode.UNHANDLED_EXCEPTION
    assert error.data == {"exception_type": kind.__name__}
    assert kind.__name__ in error.message
    error.model_dump_json()


def test_the_text_of_an_exception_is_bounded() -> None:
    error = run(raising(ValueError("x" * 1_000_000))).err_value
    assert len(error.message) < 10_000


# Hooks


def test_a_hook_is_returned_unchanged_and_kept_once_in_order() -> None:
    app = new_app()

    def first() -> None: ...

    def second() -> None: ...

    assert app.on_child_process_start(first) is first
    app.on_child_process_start(second)
    app.on_child_process_start(first)
    assert app.get_child_process_start_hooks() == [first, second]


def test_equal_but_different_hooks_are_both_kept() -> None:
    app = new_app()
    counter = Counter()
    app.on_child_process_start(counter.reset)
    one, two = EqualHook(), EqualHook()
    app.on_child_process_start(one)
    app.on_child_process_start(two)
    assert len(app.get_child_process_start_hooks()) == 3


class Counter:
    def reset(self) -> None: ...


class EqualHook:
    def __call__(self) -> None: ...

    def __eq__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 1


class AsyncHook:
    async def __call__(self) -> None: ...


async def async_hook() -> None: ...


@pytest.mark.parametrize("hook", [async_hook, functools.partial(async_hook), AsyncHook()])
def test_a_hook_may_be_asynchronous(hook: Any) -> None:
    app = new_app()
    app.on_child_process_start(hook)
    assert app.get_child_process_start_hooks() == [hook]


class Unknown:
    """A class of which pydantic knows nothing."""


def test_a_class_without_a_json_form_is_refused_in_our_words() -> None:
    def takes(value: Unknown) -> None: ...

    def returns() -> Unknown:
        return Unknown()

    takes_words, returns_words = "'value' is annotated with", "the value is of type"
    for function, words in ((takes, takes_words), (returns, returns_words)):
        with pytest.raises(TaskDefinitionError) as caught:
            new_app().task("odd")(function)
        message = caught.value.message
        assert f"{words} Unknown, which cannot be stored; use a type that" in message
        assert "arbitrary_types_allowed" not in message
        assert not message.endswith("..")


@pytest.mark.parametrize("hook", [None, 7, "name"])
def test_a_hook_that_is_not_a_function_is_refused(hook: Any) -> None:
    with pytest.raises(ConfigurationError) as caught:
        new_app().on_child_process_start(hook)
    assert caught.value.code is ErrorCode.CONFIG_INVALID_CHILD_HOOK


def test_the_list_of_hooks_is_a_copy() -> None:
    app = new_app()
    app.on_child_process_start(lambda: None)
    app.get_child_process_start_hooks().clear()
    assert len(app.get_child_process_start_hooks()) == 1


def test_a_definition_error_is_a_task_definition_error() -> None:
    assert isinstance(refusal(wrong_bare), TaskDefinitionError)


def test_a_typed_dict_of_typing_is_refused_before_python_3_12_with_its_successor() -> None:
    app = Horsies(AppConfig(broker=BROKER))

    def takes(shelf: OldShelf) -> None: ...

    def returns() -> list[OldShelf]:
        return []

    def newer(shelf: Shelf) -> Shelf:
        return shelf

    app.task("newer")(newer)
    for function in (takes, returns):
        if sys.version_info >= (3, 12):
            app.task(function.__name__)(function)
            continue
        with pytest.raises(TaskDefinitionError, match=r"a typing\.TypedDict, .* 3\.12") as caught:
            app.task(function.__name__)(function)
        assert caught.value.help_text == "write `from typing_extensions import TypedDict`"


def test_a_decorator_without_a_name_registers_the_function() -> None:
    app = Horsies(UNREACHABLE)

    @app.task
    def send_invoice(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    assert app.list_tasks() == [f"{__name__}.send_invoice"]
    assert send_invoice(7).ok == 7


@pytest.mark.parametrize("name", ["self", "cls"])
def test_a_method_is_refused(name: str) -> None:
    app, names = Horsies(UNREACHABLE), {"TaskResult": TaskResult, "TaskError": TaskError}
    source = f"""
class Mailer:
    @app.task("greet")
    def greet({name}, to: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=to)
"""
    with pytest.raises(TaskDefinitionError) as refused:
        exec(source, {"app": app, "__name__": __name__, **names})
    assert refused.value.message == "A method cannot be a task: 'Mailer.greet' takes an object."
    assert app.list_tasks() == []


def test_a_function_in_a_class_and_a_parameter_named_self_are_accepted() -> None:
    app = Horsies(UNREACHABLE)

    class Mailer:
        @staticmethod
        @app.task("greet")
        def greet(to: str) -> TaskResult[str, TaskError]:
            return TaskResult(ok=to)

    @app.task("odd")
    def odd(self: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=self)

    assert Mailer.greet("ada").ok == "ada"
    assert odd(1).ok == 1
