"""Habits of users of other task queues: each test is one of them, and works here as they expect."""

from __future__ import annotations

import asyncio
import copy
import json
import pickle
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from horsies import (
    AppConfig,
    CustomQueueConfig,
    Err,
    ErrorCode,
    Horsies,
    HorsiesError,
    MapNode,
    Ok,
    PayloadPolicy,
    PostgresConfig,
    QueueMode,
    RecoveryConfig,
    RetrievalCode,
    RetryPolicy,
    SubWorkflowNode,
    TaskError,
    TaskNode,
    TaskResult,
    WorkflowDefinition,
    WorkflowSpec,
    WorkflowTaskStatus,
    WorkflowValidationError,
    from_node,
)
from horsies.cli.worker import _banner
from horsies.config.app import PayloadConfig
from horsies.db.pipeline import Pipeline
from horsies.db.statements.tasks import OutcomeRow
from horsies.ids import new_id
from horsies.retry import delay_seconds
from horsies.task import RegisteredTasks
from horsies.tasks.handle import result_of
from horsies.tasks.recovery import EXPIRED_RESULT
from horsies.worker.child.execute import execute
from horsies.worker.config import WorkerConfig, served_queues
from horsies.worker.protocol import Assignment
from horsies.worker.reaper import sweep
from tests.support.apps.shop import app as shop
from tests.support.apps.shop import double, errors_of, number, square, word, workflow
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import stored_ids
from tests.support.runs import execute_node
from tests.support.turns import Hands, define_tasks


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


def circle() -> list[Any]:
    one, two = number.node()(), double.node(node_id="double")
    second = two(value=from_node(one))
    one.waits_for = [second]
    return [one, second]


def awaited_outside() -> list[Any]:
    outside = number.node(node_id="outside")()
    return [double.node(node_id=name)(value=from_node(outside)) for name in ("a", "b")]


def join_of_no_kind() -> list[Any]:
    first = number.node()()
    kind: Any = "some"
    return [first, double.node(join=kind)(value=from_node(first))]


ONE_MISTAKE: dict[str, tuple[Callable[[], list[Any]], str]] = {
    "circle": (circle, "shop:0 (number) waits for double waits for shop:0 (number)"),
    "forgotten node": (
        awaited_outside,
        "Nodes 'a', 'b' of workflow 'shop' wait for node 'outside'",
    ),
    "misspelt parameter": (
        lambda: [TaskNode(square, kwargs={"itme": 1})],
        "gives a parameter 'itme', which task 'square' does not take, and does not give its 'item'",
    ),
    "unknown join": (join_of_no_kind, "has join='some'"),
}


@pytest.mark.parametrize("mistake", ONE_MISTAKE)
def test_one_mistake_in_a_workflow_is_one_error(mistake: str) -> None:
    make, words = ONE_MISTAKE[mistake]
    with pytest.raises(WorkflowValidationError) as refused:
        workflow(make())
    assert words in refused.value.message


def test_several_mistakes_are_all_in_the_message() -> None:
    def build() -> object:
        return workflow([TaskNode(square, node_id="a"), MapNode(square, over=number.node()())])

    with pytest.raises(Exception) as refused:  # noqa: PT011
        build()
    message = getattr(refused.value, "message", "")
    assert message.startswith("workflow 'shop': 2 errors found: (1) ")
    assert all(error.message in message for error in errors_of(build))


@shop.task("habits.unannotated")
def unannotated(**results) -> TaskResult[str, TaskError]:  # type: ignore[no-untyped-def]
    return TaskResult(ok=f"{results['count'].ok_value} pieces")


@shop.task("habits.any")
def anything_named(**results: Any) -> TaskResult[str, TaskError]:
    return TaskResult(ok=f"{results['count'].ok_value} pieces")


class Open(WorkflowDefinition[str]):
    name = "open"
    definition_key = "habits.open"

    @classmethod
    def build_with(cls, app: Horsies, **results: Any) -> WorkflowSpec[str]:
        only = word.node()(text=f"{results['count'].ok_value} pieces")
        return app.workflow(cls.name, [only], output=only)


@pytest.mark.parametrize("called", [unannotated, anything_named, Open])
def test_results_go_into_keyword_arguments_of_any_name(called: Any) -> None:
    source: Any = number.node(node_id="source")()
    make: Any = SubWorkflowNode if called is Open else TaskNode
    taker = make(called, node_id="taker", args_from={"count": source}, waits_for=[source])
    report = execute_node(shop, workflow([source, taker]), "taker", {"source": '{"ok":3}'})
    assert report.ok, report.error_message
    assert "3 pieces" in report.result_json


@pytest.mark.parametrize(
    "policy",
    [
        RetryPolicy.exponential(
            5, max_retries=20, auto_retry_for=["DOWN"], max_delay_seconds=60, jitter=False
        ),
        RetryPolicy(
            auto_retry_for=["DOWN"],
            max_retries=20,
            intervals=[5],
            max_delay_seconds=60,
            backoff_strategy="exponential",
            jitter=False,
        ),
    ],
    ids=["exponential", "constructor"],
)
def test_waits_grow_up_to_max_delay_seconds(policy: RetryPolicy) -> None:
    stored = RetryPolicy.from_json(policy.to_json())
    assert stored == policy
    waits = [delay_seconds(policy, number) for number in (1, 2, 3, 4, 5, 20)]
    assert waits == [5, 10, 20, 40, 60, 60]


BROKER = PostgresConfig(database_url="postgresql://nobody@localhost/nothing")


@pytest.mark.parametrize(
    ("limits", "code"),
    [
        (PayloadConfig(), None),
        (PayloadConfig(warn_bytes=10, reject_bytes=10), None),
        (PayloadConfig(max_result_bytes=1_000_000), "PAYLOAD_TOO_LARGE"),
    ],
    ids=["default", "limited sends", "limited results"],
)
def test_a_large_result_is_kept_unless_results_have_a_limit(
    limits: PayloadConfig, code: str | None
) -> None:
    app = Horsies(AppConfig(broker=BROKER, payload=limits))

    @app.task("export")
    def export(size: int) -> TaskResult[str, TaskError]:
        return TaskResult(ok="x" * size)

    size = 17_000_000
    report = execute(app, Assignment("task-1", 1, "export", 1, json.dumps([size]), "{}", None))
    assert report.error_code == code
    assert report.ok is (code is None)
    assert (len(report.result_json) > size) is (code is None)


@pytest.mark.parametrize(
    ("max_concurrency", "cluster_wide_cap", "caps"),
    [(None, None, "none"), (3, None, "mail 3"), (0, 15, "cluster 15, mail 0")],
)
def test_a_queue_has_no_cap_unless_it_sets_one_and_the_banner_shows_every_cap(
    max_concurrency: int | None, cluster_wide_cap: int | None, caps: str
) -> None:
    assert CustomQueueConfig(name="reports").max_concurrency is None
    mail = CustomQueueConfig(name="mail", max_concurrency=max_concurrency)
    config = AppConfig(
        broker=BROKER,
        queue_mode=QueueMode.CUSTOM,
        custom_queues=[mail, CustomQueueConfig(name="reports")],
        cluster_wide_cap=cluster_wide_cap,
    )
    app = Horsies(config)
    banner = _banner(app, WorkerConfig("shop:app", 2, served_queues(app)))
    assert f"  caps       {caps}\n" in banner
    assert "not served" not in banner
    limited = WorkerConfig("shop:app", 2, served_queues(app, ["mail"]), name="post")
    assert "  not served reports\n" in _banner(app, limited)
    assert " worker post\n" in _banner(app, limited)


CAPPED = """
import os
from horsies import *

queues = [CustomQueueConfig(name="mail", max_concurrency=3), CustomQueueConfig(name="reports")]
broker = PostgresConfig(database_url=os.environ["DATABASE_URL"])
app = Horsies(AppConfig(
    broker=broker, queue_mode=QueueMode.CUSTOM, custom_queues=queues, cluster_wide_cap=15
))
"""


@pytest.mark.usefixtures("database")
def test_status_shows_every_cap_before_a_worker_runs(horsies: Run, tmp_path: Path) -> None:
    path = tmp_path / f"capped_{uuid.uuid4().hex}.py"
    path.write_text(CAPPED)
    shown = horsies("status", str(path)).out.splitlines()
    assert [line.split()[:2] for line in shown[1:5:2]] == [["mail", "3"], ["reports", "-"]]
    assert shown[5] == "No worker is running; cluster-wide cap 15."


URL = "postgresql://app:hunter2@127.0.0.1:1/shop"


@pytest.mark.parametrize("kind", ["task", "workflow"])
def test_get_in_a_running_event_loop_has_a_code_of_its_own(kind: str) -> None:
    app = Horsies(URL)
    handle: Any = app.handle(new_id()) if kind == "task" else app.workflow_handle(new_id())

    async def main() -> TaskResult[Any, TaskError]:
        result: TaskResult[Any, TaskError] = handle.get()
        return result

    error = asyncio.run(main()).err_value
    assert error.error_code is RetrievalCode.EVENT_LOOP_RUNNING
    assert "_async" in str(error.message)


@pytest.mark.parametrize(
    ("result", "expected"),
    [
        (TaskResult(ok=3), "TaskResult(ok=3)"),
        (TaskResult(ok=None), "TaskResult(ok=None)"),
        (TaskResult(ok="x" * 1000), f"TaskResult(ok='{'x' * 97}...{'x' * 98}')"),
        (
            TaskResult(ok=list(range(1_000_000))),
            "TaskResult(ok=[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, ...])",
        ),
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


def test_the_tasks_of_an_application_are_a_mapping_and_a_call() -> None:
    app = Horsies(URL)

    @app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    assert isinstance(app.tasks, RegisteredTasks)
    assert app.tasks["add"] is add
    assert list(app.tasks.items()) == [("add", add)]
    assert app.tasks() == {"add": add}
    assert "sub" not in app.tasks


def test_other_names_mean_the_same() -> None:
    app = Horsies(URL, run_schema_migrations=False)
    assert app.migrates is Horsies(URL, migrate=False).migrates is False
    assert app.rerun_task == app.retry_task
    assert app.rerun_task_async == app.retry_task_async
    config = AppConfig(broker=PostgresConfig(database_url=URL), payload=PayloadPolicy(warn_bytes=7))
    assert config.payload == PayloadConfig(warn_bytes=7)


@pytest.mark.parametrize(
    ("status", "stored", "code"),
    [
        ("CANCELLED", None, "TASK_CANCELLED"),
        ("EXPIRED", EXPIRED_RESULT, "TASK_EXPIRED"),
        ("EXPIRED", None, "TASK_EXPIRED"),
        ("COMPLETED", None, "RESULT_NOT_AVAILABLE"),
    ],
)
def test_an_error_in_place_of_a_result_carries_the_id_of_its_task(
    status: str, stored: str | None, code: str
) -> None:
    task_id = new_id()
    row = OutcomeRow(task_id, "work", status, stored, failed_reason=None, error_code=None)
    error = result_of(row, None).err_value
    assert error.error_code == code
    assert error.data == {"task_id": task_id}


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


@pytest.mark.parametrize("way", ["failed dependency", "cancelled run", "counted after a resume"])
def test_a_skipped_node_has_no_completed_at(app: Horsies, connection: Database, way: str) -> None:
    tasks, hands = define_tasks(app), Hands(connection)
    first = tasks.number.node(node_id="first")()
    last = tasks.add.node(node_id="last")(first=from_node(first))
    later = tasks.add.node(node_id="later")(first=from_node(last))
    spec = app.workflow("skipping", [first, last, later], definition_key="habits.skipping")
    handle = spec.start().unwrap()
    if way == "cancelled run":
        handle.cancel().unwrap()
    else:
        taken = hands.take(handle.workflow_id, "first")
        if way == "counted after a resume":
            handle.pause().unwrap()
        hands.end(handle.workflow_id, taken, {"err": {"error_code": "BOOM"}})
        handle.resume().unwrap()
    nodes = {node.node_id: node for node in handle.tasks().unwrap()}
    assert nodes["last"].status is nodes["later"].status is WorkflowTaskStatus.SKIPPED
    assert nodes["last"].completed_at is nodes["later"].completed_at is None


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


QUEUES = [CustomQueueConfig(name=name) for name in ("mail", "audit", "reports")]


RETENTION: dict[str, timedelta | None] = {"mail": timedelta(hours=6), "audit": None}


def custom_app(url: str, **recovery: Any) -> Horsies:
    config = AppConfig(
        broker=PostgresConfig(database_url=url, pool_size=1, max_overflow=1),
        queue_mode=QueueMode.CUSTOM,
        custom_queues=QUEUES,
        recovery=RecoveryConfig(**recovery),
    )
    return Horsies(config)


@pytest.mark.parametrize(
    ("queue", "options", "ended_hours_ago", "is_kept"),
    [
        ("mail", {}, 5, True),
        ("mail", {}, 7, False),
        ("audit", {}, 100_000, True),
        ("reports", {}, 700, True),
        ("reports", {}, 740, False),
        ("reports", {"retention": timedelta(minutes=1)}, 1, False),
        ("mail", {"retention": timedelta(days=90)}, 1_000, True),
    ],
)
def test_a_queue_and_a_send_have_a_retention_of_their_own(
    connection: Database,
    process_url: str,
    queue: str,
    options: Any,
    ended_hours_ago: int,
    is_kept: bool,
) -> None:
    app = custom_app(process_url, queue_retention=RETENTION)

    @app.task("work", queue_name=queue)
    def work() -> TaskResult[None, TaskError]:
        return TaskResult(ok=None)

    work.with_options(**options).send().unwrap()
    work.with_options(**options).send_many([work.bind()]).unwrap()
    app.close()
    connection.execute(
        "UPDATE horsies_tasks SET status = 'COMPLETED', completed_at = now() - %s, "
        # As if it had been sent then: retention finds tasks by the time in their ids.
        "id = overlay(id::text placing '000000000000' from 1 for 13)::uuid",
        (timedelta(hours=ended_hours_ago),),
    )
    with psycopg.connect(process_url, autocommit=True) as mine:
        sweep(Pipeline(mine), app.config.recovery)
    assert len(stored_ids(connection)) == (2 if is_kept else 0)


@pytest.mark.parametrize(
    ("retention", "message"),
    [
        ({"nothing": timedelta(hours=1)}, "queue_retention names 'nothing', which is not a queue"),
        ({"mail": timedelta(0)}, "queue_retention['mail'] must be from one second"),
    ],
)
def test_a_retention_that_cannot_apply_is_refused(
    process_url: str, retention: Any, message: str
) -> None:
    with pytest.raises(HorsiesError, match=message.replace("[", r"\[").replace("]", r"\]")):
        custom_app(process_url, queue_retention=retention)
