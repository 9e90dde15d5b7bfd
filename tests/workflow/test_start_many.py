"""Starting many: a stream is read in chunks and stored in one transaction, or not at all."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import psycopg
import pytest

from horsies import Horsies, WorkflowSpec, WorkflowStartErrorCode, start_many, start_many_async
from tests.support.applications import app_at, run_closing
from tests.support.database import Database
from tests.support.proxy import Proxy
from tests.support.statements import counted
from tests.support.turns import Hands, Tasks, define_tasks

CHUNK = 20
COUNT = 5 * CHUNK + 1
TABLES = ("horsies_workflows", "horsies_workflow_tasks", "horsies_tasks")
Start: TypeAlias = Callable[..., Any]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("horsies.workflow.run.start_many.CHUNK_RUNS", CHUNK)


@pytest.fixture(params=["sync", "async"])
def start(request: pytest.FixtureRequest) -> Start:
    """``start_many`` of an application, by either face."""
    if request.param == "sync":
        return lambda app, *args, **kwargs: start_many(*args, **kwargs)
    return lambda app, *args, **kwargs: run_closing(app, start_many_async(*args, **kwargs))


def single(app: Horsies, tasks: Tasks, n: int = 1) -> WorkflowSpec[int]:
    node = tasks.number.node(node_id="only")(n=n)
    return app.workflow("single", [node], output=node, definition_key="start_many.single")


def assert_nothing_stored(hands: Hands) -> None:
    assert [hands.count(table) for table in TABLES] == [0, 0, 0]


def test_a_stream_is_read_no_more_than_a_chunk_ahead_of_the_database(
    app: Horsies, tasks: Tasks, connection: Database, start: Start
) -> None:
    app.get_broker().ensure_schema_initialized().unwrap()
    ahead: list[int] = []

    def specs() -> Iterator[WorkflowSpec[int]]:
        for n in range(COUNT):
            sent = sum("horsies_start_v1" in text for text in statements)
            ahead.append(n - CHUNK * sent)
            yield single(app, tasks, n)

    with counted() as statements:
        handles = start(app, specs()).unwrap()
    assert max(ahead) <= CHUNK + 1  # two runs of a chunk wait for the next one
    rows = connection.execute("SELECT workflow_id::text, kwargs FROM horsies_tasks").fetchall()
    stored = dict(rows)
    kwargs = [stored[handle.workflow_id] for handle in handles]
    assert kwargs == [f'{{"n":{n}}}' for n in range(COUNT)]


def test_a_stream_is_one_transaction_with_one_notification_per_queue(
    app: Horsies, tasks: Tasks, connection: Database, process_url: str, start: Start
) -> None:
    with psycopg.connect(process_url, autocommit=True) as listener:
        listener.execute("LISTEN task_queue_default")
        start(app, (single(app, tasks, n) for n in range(COUNT))).unwrap()
        single(app, tasks).start().unwrap()
        received = list(listener.notifies(timeout=30, stop_after=2))
    assert [bool(note.payload) for note in received] == [False, True]
    for table in TABLES:
        found = connection.execute(f"SELECT count(DISTINCT xmin::text) FROM {table}").fetchone()
        assert found == (2,)


def test_a_refused_workflow_late_in_a_stream_stores_nothing_and_is_named_by_its_position(
    app: Horsies, tasks: Tasks, hands: Hands, process_url: str, start: Start
) -> None:
    stranger = app_at(process_url)
    foreign = single(stranger, define_tasks(stranger))
    bad = 3 * CHUNK + 7
    specs = (foreign if n == bad else single(app, tasks, n) for n in range(COUNT))
    error = start(app, specs).unwrap_err()
    stranger.close()
    assert error.code is WorkflowStartErrorCode.VALIDATION_FAILED
    assert error.message.startswith(f"Workflow {bad} of start_many: ")
    assert "one application" in error.message
    assert_nothing_stored(hands)


def test_a_single_workflow_in_place_of_a_list_is_named(app: Horsies, tasks: Tasks) -> None:
    one: Any = single(app, tasks)
    with pytest.raises(TypeError, match="takes a list of workflows, not WorkflowSpec"):
        start_many(one)


@pytest.mark.parametrize("position", [0, CHUNK + 3])
def test_an_object_that_is_not_a_workflow_is_named_by_its_position(
    app: Horsies, tasks: Tasks, hands: Hands, start: Start, position: int
) -> None:
    wrong: Any = 3
    specs = (wrong if n == position else single(app, tasks, n) for n in range(2 * CHUNK))
    with pytest.raises(TypeError, match=rf"^Workflow {position} of start_many .* but int; pass"):
        start(app, specs)
    assert_nothing_stored(hands)


def test_an_exception_late_in_a_stream_is_the_callers_and_stores_no_run(
    app: Horsies, tasks: Tasks, hands: Hands, start: Start
) -> None:
    def specs() -> Iterator[WorkflowSpec[int]]:
        yield from (single(app, tasks, n) for n in range(COUNT))
        raise LookupError("no more rows")

    with pytest.raises(LookupError, match="no more rows"):
        start(app, specs())
    assert_nothing_stored(hands)


def test_a_failing_stream_leaves_the_callers_transaction_as_it_was(
    app: Horsies, tasks: Tasks, hands: Hands, process_url: str
) -> None:
    def specs() -> Iterator[WorkflowSpec[int]]:
        yield from (single(app, tasks, n) for n in range(COUNT))
        raise LookupError("no more rows")

    with psycopg.connect(process_url) as caller:
        first = single(app, tasks).start(transaction=caller).unwrap()
        with pytest.raises(LookupError):
            start_many(specs(), transaction=caller)
        rest = (single(app, tasks, n) for n in range(COUNT))
        assert len(start_many(rest, transaction=caller).unwrap()) == COUNT
        assert_nothing_stored(hands)
    assert hands.count("horsies_workflows") == COUNT + 1
    assert hands.statuses(first.workflow_id) == {"only": "ENQUEUED"}


def test_a_cut_in_the_middle_of_a_stream_stores_no_run(
    proxy: Proxy, distant_app: Horsies, hands: Hands, start: Start
) -> None:
    tasks = define_tasks(distant_app)

    def specs() -> Iterator[WorkflowSpec[int]]:
        for n in range(COUNT):
            if n == 3 * CHUNK + 7:
                proxy.cut()
            yield single(distant_app, tasks, n)

    error = start(distant_app, specs()).unwrap_err()
    assert error.code is WorkflowStartErrorCode.ENQUEUE_FAILED
    assert error.retryable
    assert_nothing_stored(hands)


def test_a_stream_that_lost_its_last_answer_is_resent_without_a_second_set_of_runs(
    proxy: Proxy, hands: Hands, connection: Database, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.tasks.bulk.KEPT_BYTES_IN_MEMORY", 1_000)  # to a file
    app = app_at(proxy.url, resend_on_transient_err=True)
    tasks = define_tasks(app)
    app.get_broker().ensure_schema_initialized().unwrap()
    proxy.swallow_answer_with(b"COMMIT\0")
    handles = start(app, (single(app, tasks, n) for n in range(COUNT))).unwrap()
    app.close()
    assert proxy.swallowed.is_set()
    rows = connection.execute("SELECT id::text FROM horsies_workflows").fetchall()
    assert sorted(run_id for (run_id,) in rows) == sorted(one.workflow_id for one in handles)
    assert hands.count("horsies_tasks") == COUNT


def test_a_stream_keeps_handles_in_memory_and_no_workflows(
    app: Horsies, tasks: Tasks, connection: Database
) -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        start_many(single(app, tasks, n) for n in range(count)).unwrap()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    peak(10)
    few, many = peak(3 * CHUNK), peak(13 * CHUNK)
    assert many - few < 600 * 10 * CHUNK  # a specification with its plan takes several kilobytes


def test_the_results_of_different_workflows_keep_their_types(
    app: Horsies, tasks: Tasks, hands: Hands
) -> None:
    def numbers() -> WorkflowSpec[list[int]]:
        node = tasks.numbers.node(node_id="only")()
        return app.workflow("list", [node], output=node, definition_key="start_many.list")

    specs: list[WorkflowSpec[Any]] = [single(app, tasks), numbers(), single(app, tasks)]
    handles = start_many(iter(specs)).unwrap()
    for handle, value in zip(handles, (7, [1, 2], 8), strict=True):
        hands.complete(handle.workflow_id, "only", value)
    assert [handle.get(0).ok_value for handle in handles] == [7, [1, 2], 8]
