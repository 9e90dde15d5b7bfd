"""Payload is encrypted in every table; a worker without the key holds the task until one with it comes."""

from __future__ import annotations

import importlib
import json
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import closing
from datetime import timedelta
from types import ModuleType
from typing import Any

import pytest

from horsies import (
    Debounce,
    FernetCodec,
    Horsies,
    IntervalSchedule,
    OperationalErrorCode,
    TaskNode,
    TaskSchedule,
    start_many,
)
from horsies.db.statements.refusals import DAMAGED, list_refused
from horsies.monitor.actions import retry_task
from horsies.monitor.diagnose.explain import read_task
from horsies.monitor.edited_calls import edit_reason, edited_call
from tests.support.database import Database
from tests.support.dump import leaks
from tests.support.tables import attempts, count, kill_a_busy_child, task
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, RunningWorker

APPLICATION = "tests.support.apps.confidential:app"
LOGS = {"log_capture": {"max_lines": 100, "max_bytes": 8_192}}
TASKS = 3_000 if os.environ.get("HORSIES_TEST_OUTAGES") == "long" else 150
# How many processes are killed while the keys stay as they are.
KILLS_PER_KEY = max(1, TASKS // 250)
DEBOUNCE = Debounce(quiet=timedelta(seconds=0.5), at_most=timedelta(seconds=5))
OLD, NEW = FernetCodec.new_key(), FernetCodec.new_key()
Maker = Callable[..., Horsies]


@pytest.fixture(scope="module")
def confidential(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.confidential")
    yield module
    module.app.close()


@pytest.fixture
def make(confidential: ModuleType) -> Iterator[Maker]:
    """Makes applications with some keys, and closes them."""
    made: list[Horsies] = []

    def maker(*keys: str, **changes: Any) -> Horsies:
        made.append(confidential.make(keys, **changes))
        return made[-1]

    yield maker
    for one in made:
        one.close()


def start(fleet: Fleet, *keys: str, place: str = "", **more: Any) -> RunningWorker:
    environment = {"HORSIES_TEST_KEYS": ",".join(keys), "HORSIES_TEST_STORE": place}
    return fleet.start(application=APPLICATION, environment=environment, **more)


def task_of(app: Horsies, name: str) -> Any:
    found = app.get_task(name)
    assert found is not None
    return found


def test_a_dump_contains_no_argument_result_error_step_signal_note_or_log_line(
    fleet: Fleet, make: Maker, confidential: ModuleType, connection: Database
) -> None:
    app = make(OLD)
    secret = confidential.SECRET
    start(fleet, OLD, config=LOGS)
    handles = [
        task_of(app, name).send(f"{secret}-{name}").unwrap()
        for name in ("greet", "greet_async", "book", "stumble", "fail", "refuse")
    ]
    many = task_of(app, "greet")
    handles += many.send_many(
        [many.bind(f"{secret}-{one}", greeting=secret) for one in "ab"]
    ).unwrap()
    run = confidential.graph(app, secret).start().unwrap()
    run.signal("word", [f"{secret}-x", f"{secret}-y"]).unwrap()
    durable = task_of(app, "tour").send(secret, 2).unwrap()
    app.durable_handle(durable.task_id).signal("word", f"{secret}-1").unwrap()
    app.durable_handle(durable.task_id).signal("word", f"{secret}-2").unwrap()
    app.durable_handle(durable.task_id).signal("later", f"{secret}-3").unwrap()
    schedule = TaskSchedule(
        name="daily", task_name="greet", kwargs={"name": secret}, pattern=IntervalSchedule(days=1)
    )
    app.schedules.add(schedule).unwrap()
    app.schedules.add(schedule).unwrap()  # the same again
    handles.append(app.schedules.run("daily").unwrap())
    results = [handle.get(30_000) for handle in handles]
    assert [one.ok_value for one in results if one.is_ok()] == [
        f"Hello {secret}-greet",
        f"Hello {secret}-greet_async",
        f"booked {secret}-book",
        f"{secret} {secret}-a",
        f"{secret} {secret}-b",
        f"Hello {secret}",
    ]
    errors = [one.err_value for one in results if one.is_err()]
    assert [(str(one.error_code), one.message) for one in errors] == [
        ("BUSY", f"no line for {secret}-stumble"),
        ("UNHANDLED_EXCEPTION", errors[1].message),
        ("REFUSED", f"{secret}-refuse"),
    ]
    assert f"bad name {secret}-fail" in str(errors[1].message)
    assert errors[0].data == {"name": f"{secret}-stumble"}
    assert run.get(30_000).ok_value == "+".join(f"Hi {secret} {secret}-{n}" for n in range(3))
    assert run.result_for("join-1").ok_value == f"Hello {secret}-0+Hello {secret}-1"
    assert run.result_for("join-2").ok_value == f"Hello {secret}-x+Hello {secret}-y"
    assert durable.get(30_000).ok_value == f"described {secret}steHello {secret}{secret}-2"
    info = app.get_task_info(handles[3].task_id, include_attempts=True).unwrap()
    assert info is not None
    assert info.attempts is not None
    messages = [one.error_message for one in info.attempts]
    assert messages == [f"no line for {secret}-stumble"] * 2
    assert leaks(connection, secret) == {}
    assert connection.execute("SELECT count(*) FROM horsies_task_logs").fetchone() != (0,)


@pytest.mark.parametrize("place", ["", "table"], ids=["codec", "codec and store"])
def test_a_dump_contains_nothing_of_other_ways_to_send_whatever_the_size(
    fleet: Fleet, make: Maker, confidential: ModuleType, connection: Database, place: str
) -> None:
    app = make(OLD, **confidential.store_of(place))
    start(fleet, OLD, place=place, config=LOGS)
    for secret in (confidential.SECRET, confidential.SECRET * 500):
        send_debounced_and_edited(app, secret)
        start_several(app, secret)
        send_misfits(app, secret, connection)
    ((kept,),) = connection.execute("SELECT count(*) FROM horsies_payloads").fetchall()
    assert (kept > 0) is (place == "table")
    assert leaks(connection, confidential.SECRET) == {}


def send_debounced_and_edited(app: Horsies, secret: str) -> None:
    greet, broker = task_of(app, "greet"), app.get_broker()
    debounced = greet.with_options(idempotency_key=f"size {len(secret)}", debounce=DEBOUNCE)
    handles = [debounced.send(f"{secret}-{one}").unwrap() for one in "ab"]
    assert handles[1].get(30_000).ok_value == f"Hello {secret}-b"
    report = read_task(broker, handles[1].task_id, payload=True).unwrap()
    assert report is not None
    arguments = {"name": f"{secret}-edited", "greeting": secret}
    call = edited_call(app.config.payload, greet.definition, report.task, arguments)
    reason = edit_reason(sorted(arguments), None)
    again = retry_task(broker, report.task.id, reason=reason, call=call).unwrap()
    assert app.get_result(again.task_id, 30_000).ok_value == f"{secret} {secret}-edited"


def start_several(app: Horsies, secret: str) -> None:
    """Start two runs in one transaction."""
    specs = [
        app.workflow(
            "one",
            [TaskNode(task_of(app, "greet"), kwargs={"name": f"{secret}-{one}"})],
            definition_key="e2e.confidential.one",
        )
        for one in "xy"
    ]
    for run, one in zip(start_many(specs).unwrap(), "xy", strict=True):
        (end,) = run.get(30_000).ok_value.values()
        assert end.ok_value == f"Hello {secret}-{one}"


def send_misfits(app: Horsies, secret: str, connection: Database) -> None:
    """Send calls of another release of the functions, with another name and of another type; the worker
    leaves them to others and writes down why.
    """
    with closing(Horsies(app.config)) as other:

        @other.task("greet")
        def greet(nickname: str) -> str:
            return nickname

        @other.task("repeat")
        def repeat(text: str, times: str) -> str:
            return text + times

        sent = [greet.send(nickname=secret).unwrap(), repeat.send(secret, secret).unwrap()]
    refused = "SELECT FROM horsies_refusals WHERE task_id = ANY(%s::uuid[])"
    ids = [handle.task_id for handle in sent]
    wait_until(lambda: connection.execute(refused, [ids]).rowcount == len(ids))


def test_a_batch_reads_and_writes_encrypted_payload(
    fleet: Fleet, make: Maker, confidential: ModuleType, connection: Database
) -> None:
    app, secret = make(OLD), confidential.SECRET
    greet_all = task_of(app, "greet_all")
    names = [f"{secret}-{number}" for number in range(5)]
    handles = greet_all.send_many([greet_all.bind(name) for name in names]).unwrap()
    start(fleet, OLD, config=LOGS, processes=1)
    assert [one.get(30_000).ok_value for one in handles] == [f"Hello {name}" for name in names]
    assert leaks(connection, secret) == {}


def test_a_worker_without_the_key_holds_the_task_and_says_so_until_one_with_it_comes(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    app = make(NEW)
    without = start(fleet, OLD)
    held = task_of(app, "greet").send("ada").unwrap()
    plain = task_of(make(), "greet").send("bob").unwrap()  # without a codec
    assert make(OLD).get_result(plain.task_id, 30_000).ok_value == "Hello bob"
    unread = plain.get(30_000).err_value
    assert unread.error_code == OperationalErrorCode.PAYLOAD_UNREADABLE
    wait_until(lambda: "PAYLOAD_UNREADABLE" in without.log())
    key_id = FernetCodec([NEW]).key_id
    assert f"encrypted with key {key_id}" in without.log()
    wait_until(lambda: task(connection, held.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(held.task_id).unwrap().reasons if one.blocks]
    assert (reason.code, reason.subjects) == ("PAYLOAD_UNREADABLE", (key_id,))
    first = task(connection, held.task_id)
    again = task_of(app, "greet").send("eve").unwrap()
    wait_until(
        lambda: connection.execute("SELECT count(*) FROM horsies_refusals").fetchone() == (2,)
    )
    assert task(connection, held.task_id).generation == first.generation  # it is not claimed again
    start(fleet, NEW, OLD)
    assert [one.get(30_000).ok_value for one in (held, again)] == ["Hello ada", "Hello eve"]
    assert task(connection, held.task_id).retry_count == 0


def test_a_run_whose_steps_need_another_key_is_held_and_continues_without_repeating_them(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    app = make(NEW, OLD)
    first = start(fleet, NEW, OLD)
    run = task_of(make(OLD), "pair").send("ada").unwrap()
    wait_until(lambda: connection.execute("SELECT count(*) FROM horsies_parked").fetchone() == (1,))
    first.signal(signal.SIGTERM)
    assert first.wait() == 0
    without = start(fleet, OLD)  # it can read the arguments, but not the steps
    app.durable_handle(run.task_id).signal("word", "now").unwrap()
    wait_until(lambda: "PAYLOAD_UNREADABLE" in without.log())
    wait_until(lambda: task(connection, run.task_id).status == "PENDING")
    start(fleet, NEW, OLD)
    assert make(NEW, OLD).get_result(run.task_id, 30_000).ok_value == "described ada now"
    steps = app.durable_handle(run.task_id).info().unwrap().steps
    assert Counter(step.name for step in steps)["described"] == 1


@pytest.mark.parametrize("keys", [(OLD,), ()], ids=["codec", "no codec"])
def test_a_value_that_looks_like_an_encrypted_one_is_plain_data(
    fleet: Fleet, make: Maker, connection: Database, keys: tuple[str, ...]
) -> None:
    app, value = make(*keys), {"__horsies_encrypted__": "a:b"}
    start(fleet, *keys)
    sent = task_of(app, "echo").send(value).unwrap()
    assert sent.get(30_000).ok_value == value
    call = [json.dumps({"value": value})]
    row = connection.execute("SELECT horsies_send_v1('echo', %s::jsonb)", call).fetchone()
    assert row is not None
    assert app.get_result(str(row[0]), 30_000).ok_value == value
    run = task_of(app, "echo_signal").send(value).unwrap()
    wait_until(lambda: connection.execute("SELECT count(*) FROM horsies_parked").fetchone() == (1,))
    app.durable_handle(run.task_id).signal("word", value).unwrap()
    assert run.get(30_000).ok_value == [value, value]
    node: Any = TaskNode(task_of(app, "echo"), kwargs={"value": value})
    after: Any = TaskNode(task_of(app, "echo"), args_from={"value": node}, waits_for=[node])
    graph = app.workflow("echoes", [node, after], definition_key="e2e.confidential.echoes")
    (end,) = graph.start().unwrap().get(30_000).ok_value.values()
    assert end.ok_value == value
    stored = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE result LIKE '%%\"a:b\"%%'"
    ).fetchone()
    assert (stored == (0,)) is bool(keys)


def test_a_damaged_payload_is_held_and_explained(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    app, key_id = make(OLD), FernetCodec([OLD]).key_id
    held = task_of(app, "greet").send("ada").unwrap()
    connection.execute(
        "UPDATE horsies_tasks SET args = regexp_replace(args, '.{6}\"}$', 'AAAAA=\"}')"
    )
    worker = start(fleet, OLD)
    wait_until(lambda: "the text was changed" in worker.log())
    wait_until(lambda: task(connection, held.task_id).status == "PENDING")
    (reason,) = [one for one in app.explain(held.task_id).unwrap().reasons if one.blocks]
    assert (reason.code, reason.subjects) == ("PAYLOAD_UNREADABLE", (key_id,))
    assert "does not decrypt the payload" in reason.sentence
    assert task_of(app, "greet").send("eve").unwrap().get(30_000).ok_value == "Hello eve"
    (refused,) = list_refused.fetch(connection, 100)
    assert (refused.name, refused.missing_key) == ("greet", f"{key_id}{DAMAGED}")


@pytest.mark.timeout(900 if TASKS > 1_000 else 240)
def test_keys_are_rotated_under_kills_while_workers_run(
    fleet: Fleet, make: Maker, connection: Database
) -> None:
    """Producers and workers change their keys one after the other, and processes are killed all the time."""
    sent: dict[str, str] = {}
    workers = [start(fleet, OLD, config=QUICK_RECOVERY) for _ in range(2)]
    for number, keys in enumerate([(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]):
        producer = task_of(make(*keys), "greet_slowly")
        sent |= send_some(producer, f"n{number}", TASKS // 16)
        if number:
            workers[number % 2].signal(signal.SIGKILL if number == 2 else signal.SIGTERM)
            workers[number % 2] = start(fleet, *keys, config=QUICK_RECOVERY)
        for kill in range(KILLS_PER_KEY):
            sent |= send_some(producer, f"n{number}-{kill}", TASKS * 3 // 16 // KILLS_PER_KEY)
            if kill % 3 == 2:
                workers[number % 2].signal(signal.SIGKILL)
                workers[number % 2] = start(fleet, *keys, config=QUICK_RECOVERY)
            else:
                kill_a_busy_child(workers[number % 2], connection)
    workers.append(start(fleet, NEW, OLD, config=QUICK_RECOVERY))
    wait_until(lambda: count(connection, "COMPLETED") == len(sent), 240.0)
    reader = make(NEW, OLD)
    for task_id, name in sent.items():
        assert reader.get_result(task_id, 5_000).ok_value == f"Hello {name}"
    ended = attempts(connection)
    completed = Counter(one.task_id for one in ended if one.outcome == "COMPLETED")
    assert set(completed.values()) == {1}
    lost = sum(one.error_code == "WORKER_CRASHED" for one in ended)
    assert lost > 0
    done = Counter(line.label for line in fleet.journal.lines("greet"))
    assert set(done) == set(sent.values())
    print(f"{len(sent):,} tasks, {lost} attempts lost, {done.total() - len(sent)} started again")


def send_some(producer: Any, prefix: str, number: int) -> dict[str, str]:
    """Send so many tasks in one call; return the name in each task's argument."""
    names = [f"{prefix}-{one}" for one in range(number)]
    handles = producer.send_many([producer.bind(name) for name in names]).unwrap()
    return {handle.task_id: name for handle, name in zip(handles, names, strict=True)}
