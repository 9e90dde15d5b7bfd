"""Large payload is kept outside the rows of tasks, and comes and goes with them."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

import pytest

from horsies import FernetCodec, Horsies, OperationalErrorCode, TaskNode, TaskSendErrorCode
from horsies.db.errors import StoreUnreachable
from horsies.db.payload_keeper import FIRST, PayloadKeeper
from horsies.db.statements.payloads import sweep_payloads
from horsies.db.statements.refusals import UNREACHABLE
from tests.support.database import Database
from tests.support.dump import leaks
from tests.support.file_store import Directory
from tests.support.s3_server import CREDENTIALS, PREFIX, Bucket, s3_server
from tests.support.tables import attempts, count, kill_a_busy_child, task
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, RunningWorker

APPLICATION = "tests.support.apps.confidential:app"
TASKS = 3_000 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 150
KILLS = max(4, TASKS // 100)
KEY = FernetCodec.new_key()
LARGE = "x" * 3_000
Maker = Callable[..., Horsies]
WAIT_MS = 60_000
ASYNC = ("--async-children", "1")
UUID_KEY = re.compile(f"{PREFIX}[0-9a-f-]{{36}}")
# The longest text of a row: a list of references, one for each element.
ROW_CHARACTERS_MAX = 2_000
_SENT = "SELECT max(length(args) + length(kwargs)) FROM horsies_tasks WHERE workflow_id IS NULL"
_RETURNED = "SELECT max(length(result)) FROM horsies_tasks WHERE status = 'COMPLETED'"
_STEPS = "SELECT max(length(result)) FROM horsies_steps"
# Objects that no row names, and references without their object.
_UNNAMED = """
SELECT count(*) FROM horsies_payloads AS kept WHERE NOT EXISTS (
    SELECT FROM horsies_tasks AS task
    WHERE strpos(concat(task.args, task.kwargs, task.result), kept.id::text) > 0)
"""
_DANGLING = """
SELECT count(*) FROM horsies_tasks AS task, regexp_matches(
    concat(task.args, task.kwargs, task.result), '"@[a-z]+:([0-9a-f-]{36})', 'g') AS named
WHERE NOT EXISTS (SELECT FROM horsies_payloads AS kept WHERE kept.id::text = named[1])
"""


@pytest.fixture(scope="module")
def confidential(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.confidential")
    yield module
    module.app.close()


@pytest.fixture(scope="module")
def s3_port() -> Iterator[int]:
    with s3_server() as port:
        yield port


@pytest.fixture
def outside(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Directory | Bucket]:
    """A store outside the database, of the kind that the test names."""
    if request.param == "files":
        yield Directory(tmp_path / "objects")
        return
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    port = request.getfixturevalue("s3_port")
    with Bucket(port, f"payloads-{uuid4()}") as bucket:
        yield bucket


@pytest.fixture
def make(confidential: ModuleType) -> Iterator[Maker]:
    """Makes applications with a store, and closes them."""
    made: list[Horsies] = []

    def maker(place: str, *keys: str) -> Horsies:
        made.append(confidential.make(keys, **confidential.store_of(place)))
        return made[-1]

    yield maker
    for one in made:
        one.close()


def start(
    fleet: Fleet, place: str, *keys: str, options: Sequence[str] = (), **more: Any
) -> RunningWorker:
    environment = {"HORSIES_TEST_KEYS": ",".join(keys), "HORSIES_TEST_STORE": place}
    return fleet.start(*options, application=APPLICATION, environment=environment, **more)


def task_of(app: Horsies, name: str) -> Any:
    found = app.get_task(name)
    assert found is not None
    return found


def number(connection: Database, query: str) -> int:
    ((found,),) = connection.execute(query.encode()).fetchall()
    return int(found)


def names(connection: Database) -> list[str]:
    """The names of all objects, as the database has them."""
    return [str(one) for (one,) in connection.execute("SELECT id FROM horsies_payloads")]


def sweep(connection: Database, orphan_seconds: float = 0.0) -> None:
    """Delete what no row needs, page by page."""
    after: str | None = FIRST
    while after is not None:
        (last,) = sweep_payloads.fetch(connection, after, orphan_seconds, 100)
        after = last.id


@pytest.mark.parametrize("keys", [(), (KEY,)], ids=["plain", "encrypted"])
def test_large_payload_takes_every_path_and_the_rows_stay_small(
    fleet: Fleet,
    make: Maker,
    confidential: ModuleType,
    connection: Database,
    keys: tuple[str, ...],
) -> None:
    app = make("table", *keys)
    start(fleet, "table", *keys)
    take_every_path(app, confidential, connection)
    bodies = connection.execute("SELECT body FROM horsies_payloads").fetchall()
    assert any(LARGE.encode() in bytes(body) for (body,) in bodies) is not bool(keys)
    assert not keys or leaks(connection, LARGE[:100]) == {}


@pytest.mark.parametrize("outside", ["s3"], indirect=True)
def test_every_path_leads_through_a_bucket(
    fleet: Fleet, make: Maker, confidential: ModuleType, connection: Database, outside: Bucket
) -> None:
    app = make(outside.place)
    worker = start(fleet, outside.place, options=ASYNC)
    take_every_path(app, confidential, connection)
    assert set(names(connection)) == outside.names()
    assert all(UUID_KEY.fullmatch(key) for key in outside.object_keys())
    connection.execute("DELETE FROM horsies_tasks; DELETE FROM horsies_workflows")
    PayloadKeeper(app.get_broker().database).delete_released()
    assert outside.names() == set()
    assert names(connection) == []
    assert not [
        one for one in CREDENTIALS.values() if one.startswith("hidden") and one in worker.log()
    ]


def take_every_path(app: Horsies, confidential: ModuleType, connection: Database) -> None:
    """Send, signal, run, map, retry and read large values."""
    handles = [
        task_of(app, name).send(f"{name}-{LARGE}").unwrap()
        for name in ("greet", "greet_async", "book", "stumble")
    ]
    many = task_of(app, "greet")
    handles += many.send_many([many.bind(f"{one}-{LARGE}") for one in "ab"]).unwrap()
    run = confidential.graph(app, LARGE).start().unwrap()
    run.signal("word", [f"x-{LARGE}", "y"]).unwrap()
    durable = task_of(app, "tour").send(LARGE, 2).unwrap()
    for value in (f"1{LARGE}", f"2{LARGE}"):
        app.durable_handle(durable.task_id).signal("word", value).unwrap()
    results = [handle.get(WAIT_MS) for handle in handles]
    assert [one.ok_value for one in results if one.is_ok()] == [
        f"Hello greet-{LARGE}",
        f"Hello greet_async-{LARGE}",
        f"booked book-{LARGE}",
        f"Hello a-{LARGE}",
        f"Hello b-{LARGE}",
    ]
    assert results[3].err_value.data == {"name": f"stumble-{LARGE}"}
    assert run.get(WAIT_MS).ok_value == "+".join(f"Hi {LARGE} {LARGE}-{n}" for n in range(3))
    assert run.result_for("join-2").ok_value == f"Hello x-{LARGE}+Hello y"
    assert durable.get(WAIT_MS).ok_value == f"described {LARGE}steHello {LARGE}2{LARGE}"
    again = app.retry_task(handles[0].task_id).unwrap()
    assert app.get_result(again.task_id, WAIT_MS).ok_value == f"Hello greet-{LARGE}"
    for query in (_SENT, _RETURNED, _STEPS):
        assert number(connection, query) < ROW_CHARACTERS_MAX
    assert number(connection, _DANGLING) == 0
    sweep(connection)
    PayloadKeeper(app.get_broker().database).delete_released()
    assert number(connection, _DANGLING) == 0
    assert app.get_result(handles[0].task_id, WAIT_MS).ok_value == f"Hello greet-{LARGE}"


def test_a_value_that_looks_like_a_reference_is_plain_data(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    app = make("table")
    start(fleet, "table")
    secret = task_of(app, "greet").send(f"secret-{LARGE}").unwrap()
    (reference,) = connection.execute("SELECT args FROM horsies_tasks").fetchone() or ("",)
    stolen: dict[str, str] = json.loads(reference)
    sent = task_of(app, "echo").send(stolen).unwrap()
    assert sent.get(30_000).ok_value == stolen
    call = [json.dumps({"value": stolen})]
    row = connection.execute("SELECT horsies_send_v1('echo', %s::jsonb)", call).fetchone()
    assert row is not None
    assert app.get_result(str(row[0]), 30_000).ok_value == stolen
    node: Any = TaskNode(task_of(app, "echo"), kwargs={"value": stolen | {"more": LARGE}})
    after: Any = TaskNode(task_of(app, "echo"), args_from={"value": node}, waits_for=[node])
    graph = app.workflow("echoes", [node, after], definition_key="e2e.large.echoes")
    (end,) = graph.start().unwrap().get(30_000).ok_value.values()
    assert end.ok_value == stolen | {"more": LARGE}
    assert secret.get(30_000).ok_value == f"Hello secret-{LARGE}"


def test_a_worker_without_the_store_or_the_object_holds_the_task_and_says_so(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    app = make("table")
    without = start(fleet, "")
    held = task_of(app, "greet").send(LARGE).unwrap()
    wait_until(
        lambda: "is kept in the store 'table', which this worker does not have" in without.log()
    )
    wait_until(lambda: task(connection, held.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(held.task_id).unwrap().reasons if one.blocks]
    assert (reason.code, reason.subjects) == ("PAYLOAD_UNREADABLE", ("@table",))
    assert "which no worker has" in reason.sentence
    having = start(fleet, "table")
    assert held.get(30_000).ok_value == f"Hello {LARGE}"
    assert task(connection, held.task_id).retry_count == 0
    unread = make("").get_result(held.task_id, 5_000).err_value
    assert unread.error_code == OperationalErrorCode.PAYLOAD_UNREADABLE
    assert "kept in the store 'table'" in str(unread.message)
    for one in (without, having):
        one.signal(signal.SIGTERM)
        assert one.wait() == 0
    later = task_of(app, "greet").send(f"lost-{LARGE}").unwrap()
    connection.execute(
        "UPDATE horsies_payloads SET body = 'other' WHERE id IN "
        "(SELECT payload_id FROM horsies_payload_owners WHERE owner_id = %s)",
        [later.task_id],
    )
    having = start(fleet, "table")
    wait_until(lambda: "does not have it, or has another one under its name" in having.log())
    wait_until(lambda: task(connection, later.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(later.task_id).unwrap().reasons if one.blocks]
    assert "is missing from the store" in reason.sentence
    assert task_of(app, "greet").send("ada").unwrap().get(30_000).ok_value == "Hello ada"


@pytest.mark.parametrize("outside", ["files", "s3"], indirect=True)
def test_a_lost_object_holds_its_task_and_is_reported_for_a_result(
    fleet: Fleet, make: Maker, connection: Database, outside: Directory | Bucket
) -> None:
    app = make(outside.place)
    done = task_of(app, "repeat").send("ab", 1_000).unwrap()
    worker = start(fleet, outside.place)
    assert done.get(WAIT_MS).ok_value == "ab" * 1_000
    outside.delete(*names(connection))
    unread = app.get_result(done.task_id, WAIT_MS).err_value
    assert unread.error_code == OperationalErrorCode.PAYLOAD_UNREADABLE
    assert "which this program does not have or which has lost it" in str(unread.message)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    held = task_of(app, "greet").send(LARGE).unwrap()
    outside.delete(*outside.names())
    worker = start(fleet, outside.place)
    wait_until(lambda: "which does not have it, or has another one under its name" in worker.log())
    wait_until(lambda: task(connection, held.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(held.task_id).unwrap().reasons if one.blocks]
    assert (reason.code, task(connection, held.task_id).retry_count) == ("PAYLOAD_UNREADABLE", 0)


@pytest.mark.parametrize("outside", ["files", "s3"], indirect=True)
def test_during_an_outage_of_the_store_sends_fail_and_ended_tasks_wait(
    fleet: Fleet, make: Maker, connection: Database, outside: Directory | Bucket
) -> None:
    app = make(outside.place)
    store = app.config.broker.store
    assert store is not None
    waiting = task_of(app, "greet").send(f"a-{LARGE}").unwrap()
    assert outside.names() == set(names(connection))
    outside.close()
    worker = start(fleet, outside.place, options=ASYNC, processes=3)
    wait_until(
        lambda: f"cannot be read: The store {store.store_id!r} does not answer" in worker.log()
    )
    wait_until(lambda: task(connection, waiting.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(waiting.task_id).unwrap().reasons if one.blocks]
    assert "which does not respond" in reason.sentence
    found = connection.execute("SELECT fingerprint FROM horsies_refusals").fetchall()
    assert found == [(f"key:@{store.store_id}{UNREACHABLE}",)]
    greet = task_of(app, "greet")
    for sender in (greet, greet.with_options(transaction=connection)):
        with connection.transaction():
            refused = sender.send(f"b-{LARGE}").err_value
        assert (refused.code, refused.retryable) == (TaskSendErrorCode.ENQUEUE_FAILED, True)
        assert refused.message.startswith(
            f"The store {store.store_id!r} does not take 3,006 bytes: "
        )
    kinds = ("repeat", "repeat_async", "repeat_tx", "repeat_tx_async")
    ended = [task_of(app, kind).send(kind, 1_000).unwrap() for kind in kinds]
    for kind in kinds:
        line = f"the result of task {kind!r}"
        wait_until(lambda line=line: line in worker.log(), what=f"{line} in the log")  # type: ignore[misc]
    assert number(connection, "SELECT count(*) FROM horsies_tasks") == 1 + len(kinds)
    assert "waits until it can be stored: The store" in worker.log()
    assert greet.send("ada").unwrap().get(WAIT_MS).ok_value == "Hello ada"
    outside.open()
    assert [one.get(WAIT_MS).ok_value for one in ended] == [kind * 1_000 for kind in kinds]
    assert waiting.get(WAIT_MS).ok_value == f"Hello a-{LARGE}"
    assert Counter(line.label for line in fleet.journal.lines("repeat")) == Counter(kinds)
    assert number(connection, "SELECT max(retry_count) FROM horsies_tasks") == 0
    delete_during_an_outage(app, connection, outside)
    assert not [
        one for one in CREDENTIALS.values() if one.startswith("hidden") and one in worker.log()
    ]


def delete_during_an_outage(
    app: Horsies, connection: Database, outside: Directory | Bucket
) -> None:
    connection.execute("DELETE FROM horsies_tasks WHERE task_name = 'greet'")
    sweep(connection)
    keeper = PayloadKeeper(app.get_broker().database)
    outside.close()
    with pytest.raises(StoreUnreachable, match="does not delete"):
        keeper.delete_released()
    outside.open()
    keeper.delete_released()
    assert set(names(connection)) == outside.names()
    assert (len(outside.names()), number(connection, _DANGLING)) == (4, 0)


@pytest.mark.timeout(900 if TASKS > 1_000 else 240)
@pytest.mark.parametrize(
    ("outside", "is_table"),
    [("files", True), ("s3", False)],
    indirect=["outside"],
    ids=["table", "s3"],
)
def test_kills_lose_no_payload_and_a_sweep_leaves_none_behind(
    fleet: Fleet,
    make: Maker,
    connection: Database,
    outside: Directory | Bucket,
    is_table: bool,
) -> None:
    """Children and workers are killed while they read arguments and store results."""
    place, tasks = ("table", TASKS) if is_table else (outside.place, TASKS // 5)
    app = make(place, KEY)
    workers = [start(fleet, place, KEY, config=QUICK_RECOVERY) for _ in range(2)]
    producer = task_of(app, "greet_slowly")
    calls = [producer.bind(f"{one}-{LARGE}") for one in range(tasks)]
    sent = [handle.task_id for handle in producer.send_many(calls).unwrap()]
    for kill in range(KILLS):
        wait_for_ended(connection, tasks * kill // (KILLS + 1))
        worker = workers[kill % 2]
        if kill % 3 == 2:
            worker.signal(signal.SIGKILL)
            workers[kill % 2] = start(fleet, place, KEY, config=QUICK_RECOVERY)
        else:
            kill_a_busy_child(worker, connection)
    wait_for_ended(connection, tasks)
    for position, task_id in enumerate(sent):
        assert app.get_result(task_id, 5_000).ok_value == f"Hello {position}-{LARGE}"
    ended = attempts(connection)
    completed = Counter(one.task_id for one in ended if one.outcome == "COMPLETED")
    assert set(completed.values()) == {1}
    assert "WORKER_CRASHED" in {one.error_code for one in ended}
    run = {line.label for line in fleet.journal.lines("greet")}
    assert run == {f"{one}-{LARGE}" for one in range(tasks)}
    sweep(connection, orphan_seconds=24 * 3600.0)  # all are younger
    assert len(names(connection)) >= 2 * tasks
    sweep(connection)
    keeper = PayloadKeeper(app.get_broker().database)
    while keeper.delete_released():
        pass
    assert len(names(connection)) == 2 * tasks
    assert outside.names() == (set() if is_table else set(names(connection)))
    assert (number(connection, _UNNAMED), number(connection, _DANGLING)) == (0, 0)
    connection.execute("DELETE FROM horsies_tasks")
    while keeper.delete_released():
        pass
    assert (names(connection), outside.names()) == ([], set())


def wait_for_ended(connection: Database, tasks: int) -> None:
    wait_until(lambda: count(connection, "COMPLETED") >= tasks, 240.0)
