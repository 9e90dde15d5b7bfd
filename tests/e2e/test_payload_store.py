"""Large payload is kept outside the rows of tasks, and comes and goes with them."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from horsies import FernetCodec, Horsies, OperationalErrorCode, TaskNode
from horsies.db.payload_keeper import FIRST, PayloadKeeper
from horsies.db.statements.payloads import sweep_payloads
from horsies.db.statements.refusals import UNREACHABLE
from tests.support.database import Database
from tests.support.tables import task
from tests.support.wait import wait_until
from tests.support.workers import Fleet, RunningWorker

APPLICATION = "tests.support.apps.confidential:app"
TASKS = 3_000 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 150
KEY = FernetCodec.new_key()
LARGE = "x" * 3_000
Maker = Callable[..., Horsies]
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


def start(fleet: Fleet, place: str, *keys: str, **more: Any) -> RunningWorker:
    environment = {"HORSIES_TEST_KEYS": ",".join(keys), "HORSIES_TEST_STORE": place}
    return fleet.start(application=APPLICATION, environment=environment, **more)


def task_of(app: Horsies, name: str) -> Any:
    found = app.get_task(name)
    assert found is not None
    return found


def number(connection: Database, query: str) -> int:
    ((found,),) = connection.execute(query.encode()).fetchall()
    return int(found)


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
    results = [handle.get(30_000) for handle in handles]
    assert [one.ok_value for one in results if one.is_ok()] == [
        f"Hello greet-{LARGE}",
        f"Hello greet_async-{LARGE}",
        f"booked book-{LARGE}",
        f"Hello a-{LARGE}",
        f"Hello b-{LARGE}",
    ]
    assert results[3].err_value.data == {"name": f"stumble-{LARGE}"}
    assert run.get(30_000).ok_value == "+".join(f"Hi {LARGE} {LARGE}-{n}" for n in range(3))
    assert run.result_for("join-2").ok_value == f"Hello x-{LARGE}+Hello y"
    assert durable.get(30_000).ok_value == f"described {LARGE}steHello {LARGE}2{LARGE}"
    again = app.retry_task(handles[0].task_id).unwrap()
    assert app.get_result(again.task_id, 30_000).ok_value == f"Hello greet-{LARGE}"
    bodies = connection.execute("SELECT body FROM horsies_payloads").fetchall()
    assert any(LARGE.encode() in bytes(body) for (body,) in bodies) is not bool(keys)
    for query in (_SENT, _RETURNED, _STEPS):
        assert number(connection, query) < ROW_CHARACTERS_MAX
    assert number(connection, _DANGLING) == 0
    sweep(connection)
    assert number(connection, _DANGLING) == 0
    assert app.get_result(handles[0].task_id, 5_000).ok_value == f"Hello greet-{LARGE}"


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
    assert "which none of them has" in reason.sentence
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
    assert "does not have it" in reason.sentence
    assert task_of(app, "greet").send("ada").unwrap().get(30_000).ok_value == "Hello ada"


def test_a_store_that_does_not_answer_delays_tasks_and_keeps_new_payload_in_the_rows(
    fleet: Fleet, make: Maker, connection: Database, tmp_path: Path
) -> None:
    directory = tmp_path / "objects"
    directory.mkdir()
    app = make(str(directory))
    waiting = task_of(app, "greet").send(f"a-{LARGE}").unwrap()
    assert len(list(directory.iterdir())) == 1
    directory.rename(tmp_path / "away")
    worker = start(fleet, str(directory))
    wait_until(lambda: "cannot be read: the store 'files' does not answer" in worker.log())
    wait_until(lambda: task(connection, waiting.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(waiting.task_id).unwrap().reasons if one.blocks]
    assert "which does not answer" in reason.sentence
    found = connection.execute("SELECT fingerprint FROM horsies_refusals").fetchall()
    assert found == [(f"key:@files{UNREACHABLE}",)]
    kept = task_of(app, "greet").send(f"b-{LARGE}").unwrap()
    assert kept.get(30_000).ok_value == f"Hello b-{LARGE}"
    assert len(task(connection, kept.task_id).result or "") > len(LARGE)
    (tmp_path / "away").rename(directory)
    assert waiting.get(60_000).ok_value == f"Hello a-{LARGE}"
    app.retry_task(waiting.task_id).unwrap()
    connection.execute("DELETE FROM horsies_tasks WHERE id = %s", [waiting.task_id])
    keeper = PayloadKeeper(app.get_broker().database)
    sweep(connection, orphan_seconds=0.0)
    directory.rename(tmp_path / "away")
    with pytest.raises(Exception, match="does not delete"):
        keeper.delete_released()
    (tmp_path / "away").rename(directory)
    keeper.delete_released()
    named = {str(one) for (one,) in connection.execute("SELECT id FROM horsies_payloads")}
    assert {path.name for path in directory.iterdir()} <= named
    assert number(connection, _DANGLING) == 0


def test_kills_lose_no_payload_and_a_sweep_leaves_none_behind(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    """Children and workers are killed while they read arguments and store results."""
    app = make("table", KEY)
    workers = [start(fleet, "table", KEY), start(fleet, "table", KEY)]
    producer = task_of(app, "greet_slowly")
    calls = [producer.bind(f"{one}-{LARGE}") for one in range(TASKS)]
    sent = [handle.task_id for handle in producer.send_many(calls).unwrap()]
    for kill in range(max(6, TASKS // 100)):
        worker = workers[kill % 2]
        if kill % 3 == 2:
            worker.signal(signal.SIGKILL)
            workers[kill % 2] = start(fleet, "table", KEY)
        else:
            kill_a_child(worker)
    done = "SELECT count(*) FROM horsies_tasks WHERE status = 'COMPLETED'"
    wait_until(lambda: number(connection, done) == TASKS, 240.0)
    for place, task_id in enumerate(sent):
        assert app.get_result(task_id, 5_000).ok_value == f"Hello {place}-{LARGE}"
    attempts = Counter(
        str(row[0])
        for row in connection.execute(
            "SELECT task_id FROM horsies_task_attempts WHERE outcome = 'COMPLETED'"
        )
    )
    assert set(attempts.values()) == {1}
    sweep(connection, orphan_seconds=24 * 3600.0)  # all are younger
    assert number(connection, "SELECT count(*) FROM horsies_payloads") >= 2 * TASKS
    sweep(connection)
    assert number(connection, "SELECT count(*) FROM horsies_payloads") == 2 * TASKS
    assert (number(connection, _UNNAMED), number(connection, _DANGLING)) == (0, 0)
    connection.execute("DELETE FROM horsies_tasks")
    assert number(connection, "SELECT count(*) FROM horsies_payloads") == 0


def kill_a_child(worker: RunningWorker) -> None:
    wait_until(lambda: set(worker.family()) - set(worker.guards()))
    children = [pid for pid in worker.family() if pid not in worker.guards()]
    if children:
        os.kill(children[-1], signal.SIGKILL)
