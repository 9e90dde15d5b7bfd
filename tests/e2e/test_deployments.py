"""Deployments: workers of two releases on one database, each with the tasks it has."""

from __future__ import annotations

import importlib
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import ModuleType
from typing import Any

import psycopg
import pytest
from psycopg import sql

from horsies.workflow.nodes.nodes import SubWorkflowNode
from tests.support import runs
from tests.support.apps import __name__ as APPS
from tests.support.database import Database
from tests.support.poison import poisoned
from tests.support.schedulers import config_of, every, wait_until_serving
from tests.support.tables import attempts, task, wait_for_status
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal, RunningWorker

APPLICATION = "tests.support.apps.releases:app"
RELEASE_VARIABLE = "HORSIES_TEST_RELEASE"
UNFINISHED = "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
BY_STATUS = "SELECT status, count(*) FROM horsies_tasks GROUP BY status"


@pytest.fixture(scope="session")
def releases(programs: ModuleType) -> ModuleType:
    """The second release, once the database of its tasks is known."""
    return importlib.import_module(f"{APPS}.releases")


@pytest.fixture(scope="session")
def first(releases: ModuleType) -> Any:
    """The tasks of the first release."""
    return releases.make(1)


def start(fleet: Fleet, release: int, *options: str, **changes: Any) -> RunningWorker:
    return fleet.start(
        *options,
        application=APPLICATION,
        environment={RELEASE_VARIABLE: str(release)},
        **changes,
    )


def wait_for(connection: Database, seconds: float = 60.0) -> None:
    wait_until(
        lambda: connection.execute(UNFINISHED).fetchone() == (0,),
        seconds,
        lambda: connection.execute(
            "SELECT task_name, status, kwargs, claimed_by_worker_id, generation FROM horsies_tasks "
            "WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
        ).fetchall(),
    )


def statuses(connection: Database) -> dict[str, int]:
    return dict(connection.execute(BY_STATUS).fetchall())


def journal_of(journal: Journal) -> Counter[tuple[str, str]]:
    """How often the tasks say that they ran, by name and label."""
    return Counter((line.what, line.label) for line in journal.lines())


@pytest.mark.pooled
def test_a_new_task_waits_for_the_workers_that_have_it(
    fleet: Fleet, releases: ModuleType, connection: Database, journal: Journal
) -> None:
    # Without polls, only a notification tells the second worker of a task that the first one released.
    old, _ = start(fleet, 1, config=HARDLY_POLLS), start(fleet, 2, config=HARDLY_POLLS)
    for number in range(200):
        releases.tasks.added.send(number).unwrap()
    wait_for(connection)
    assert statuses(connection) == {"COMPLETED": 200}
    assert journal_of(journal) == {("added", f"{number}  by 2"): 1 for number in range(200)}
    attempted = connection.execute("SELECT count(*) FROM horsies_task_attempts").fetchone()
    assert attempted == (200,)
    assert old.log().count("has no task 'added' on queue 'default'") == 1


def start_scheduler(fleet: Fleet, release: int, *schedules: dict[str, Any]) -> RunningWorker:
    command = [sys.executable, "-m", "horsies", "scheduler", APPLICATION]
    environment = fleet.environment(config=config_of(*schedules))
    return fleet.launch("scheduler", command, environment | {RELEASE_VARIABLE: str(release)})


def send_everything(first: Any, releases: ModuleType, rounds: int) -> dict[str, tuple[Any, ...]]:
    """Send the tasks of both releases; by id, what each must write down and which releases may run it."""
    expected: dict[str, tuple[Any, ...]] = {}
    second = releases.tasks
    both, old, new = frozenset({1, 2}), frozenset({1}), frozenset({2})
    for number in range(rounds):
        sends = [
            (first.shared.send(number), "shared", "", both),
            (first.dropped.send(number), "dropped", "", old),
            (second.added.send(number), "added", "", new),
            (first.extended.send(number), "extended", None, both),
            (second.extended.send(number, note="x"), "extended", "x", new),
            (first.loosened.send(number, "y"), "loosened", "y", both),
            (second.loosened.send(number), "loosened", "new", new),
            (first.renamed.send(old=number), "renamed", "", old),
            (second.renamed.send(new=number), "renamed", "", new),
        ]
        for sent, name, note, runs_at in sends:
            expected[sent.unwrap().task_id] = (name, number, note, runs_at)
    return expected


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_two_releases_run_everything_that_one_of_them_has(
    fleet: Fleet, releases: ModuleType, first: Any, connection: Database, journal: Journal
) -> None:
    start(fleet, 1), start(fleet, 2)
    kept = every(1, "kept", task_name="shared", kwargs={"number": -1})
    schedulers = [
        start_scheduler(
            fleet, 1, kept, every(1, "old", task_name="dropped", kwargs={"number": -1})
        ),
        start_scheduler(fleet, 2, kept, every(1, "new", task_name="added", kwargs={"number": -1})),
    ]
    expected = send_everything(first, releases, 30)
    run_ids = runs.start(connection, *(releases.new_workflow(number) for number in range(10)))
    for run_id in run_ids:
        runs.wait_for(connection, run_id, "COMPLETED", 90)
    for scheduler in schedulers:
        wait_until_serving(scheduler)
    scheduled = "SELECT DISTINCT schedule_name FROM horsies_tasks WHERE schedule_name IS NOT NULL"
    wait_until(lambda: len(connection.execute(scheduled).fetchall()) == 3)
    for scheduler in schedulers:
        assert scheduler.stop() == 0
    wait_for(connection)
    assert set(statuses(connection)) == {"COMPLETED"}
    lines = Counter(line.task_id for line in journal.lines())
    assert set(lines.values()) == {1}, "a task ran twice"
    for line in journal.lines():
        if line.task_id in expected:
            name, number, note, runs_at = expected.pop(line.task_id)
            release = int(line.label[-1])
            assert line.what == name
            assert release in runs_at, line
            shown = note if note is not None else {1: "", 2: "new"}[release]
            assert line.label == f"{number} {shown} by {release}"
    assert not expected, "tasks that no journal line mentions"
    # Each of the two workers has claimed a task once, or has met it while it was in doubt.
    assert connection.execute("SELECT max(generation) <= 4 FROM horsies_tasks").fetchone() == (
        True,
    )


def test_a_task_that_no_worker_knows_yet_waits_for_the_next_release(
    fleet: Fleet, releases: ModuleType, connection: Database, journal: Journal
) -> None:
    old = start(fleet, 1)
    sent = releases.tasks.added.send(1).unwrap()
    (run_id,) = runs.start(connection, fresh_run(releases))
    old.wait_for("unknown_task", times=2)
    start(fleet, 2)
    assert sent.get(timeout_ms=30_000).ok_value == 1
    runs.wait_for(connection, run_id, "COMPLETED")
    assert journal.lines("added", sent.task_id)[0].label == "1  by 2"
    assert set(statuses(connection)) == {"COMPLETED"}


def test_a_worker_does_not_claim_an_unknown_name_twice(
    fleet: Fleet, releases: ModuleType, connection: Database
) -> None:
    old = start(fleet, 1)
    releases.tasks.added.send(1).unwrap()
    old.wait_for("unknown_task")
    later = [releases.tasks.added.send(number).unwrap() for number in range(20)]
    known = releases.tasks.shared.send(3).unwrap()
    assert known.get(timeout_ms=30_000).ok_value == 3
    for handle in later:
        row = task(connection, handle.task_id)
        assert (row.status, row.generation) == ("PENDING", 0)
    assert attempts(connection, later[0].task_id) == []


def fresh_run(releases: ModuleType) -> Any:
    node = SubWorkflowNode(releases.Fresh, kwargs={"number": 1}, node_id="fresh")
    return releases.app.workflow("fresh run", [node], definition_key="releases.fresh-run")


QUICK_GRACE = {"recovery": {"unknown_task_grace_ms": 2_000}}


def test_a_task_fails_once_no_worker_has_known_it_for_the_grace_period(
    fleet: Fleet, releases: ModuleType, connection: Database
) -> None:
    old = start(fleet, 1, config=QUICK_GRACE)
    sent = releases.tasks.added.send(1).unwrap()
    (run_id,) = runs.start(connection, fresh_run(releases))
    old.wait_for("unknown_task", times=2)
    error = sent.get(timeout_ms=30_000).err_value
    assert error.error_code == "WORKER_RESOLUTION_ERROR"
    assert "'added'" in (error.message or "")
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "WORKER_RESOLUTION_ERROR")
    waited = "SELECT failed_at - enqueued_at > interval '2 s' FROM horsies_tasks WHERE id = %s"
    assert connection.execute(waited, (sent.task_id,)).fetchone() == (True,)
    runs.wait_for(connection, run_id, "FAILED")
    (run,) = runs.all_runs(connection)
    assert "SUBWORKFLOW_LOAD_FAILED" in (run.error or "")


def test_a_task_waits_longer_than_the_grace_period_for_a_busy_worker_that_knows_it(
    fleet: Fleet, releases: ModuleType, connection: Database, journal: Journal
) -> None:
    old, _ = start(fleet, 1, config=QUICK_GRACE), start(fleet, 2, processes=1)
    releases.tasks.occupy.send(8.0).unwrap()
    wait_until(lambda: bool(journal.lines("start")))
    sent = releases.tasks.added.send(1).unwrap()
    wait_until(lambda: "added" in [one["task_name"] for one in old.events("unknown_task")])
    assert sent.get(timeout_ms=30_000).ok_value == 1
    waited = "SELECT started_at - enqueued_at > interval '2 s' FROM horsies_tasks WHERE id = %s"
    assert connection.execute(waited, (sent.task_id,)).fetchone() == (True,)


@pytest.mark.pooled
def test_calls_with_a_new_parameter_wait_for_the_release_that_has_it(
    fleet: Fleet, releases: ModuleType, first: Any, connection: Database, journal: Journal
) -> None:
    old = start(fleet, 1)
    calls = [releases.tasks.extended.send(number, note="x").unwrap() for number in range(3)]
    calls.append(releases.tasks.extended.send(number=3, note="x").unwrap())
    old.wait_for("unknown_task")
    # Calls that fit are not held up by those that do not.
    fitting = [first.extended.send(number).unwrap() for number in range(4, 8)]
    assert [one.get(timeout_ms=30_000).ok_value for one in fitting] == [4, 5, 6, 7]
    wait_until(lambda: {task(connection, one.task_id).status for one in calls} == {"PENDING"})
    assert [attempts(connection, one.task_id) for one in calls] == [[]] * 4
    start(fleet, 2)
    assert [one.get(timeout_ms=30_000).ok_value for one in calls] == [0, 1, 2, 3]
    assert journal_of(journal) == {("extended", f"{number} x by 2"): 1 for number in range(4)} | {
        ("extended", f"{number}  by 1"): 1 for number in range(4, 8)
    }


def test_a_call_that_fits_no_worker_fails_after_the_grace_period(
    fleet: Fleet, releases: ModuleType, connection: Database
) -> None:
    start(fleet, 1, config=QUICK_GRACE), start(fleet, 2, config=QUICK_GRACE)
    sent = releases.app.send_by_name("extended", {"number": 1, "other": 2}).unwrap()
    error = sent.get(timeout_ms=30_000).err_value
    assert error.error_code == "WORKER_SERIALIZATION_ERROR"
    assert "there is no parameter 'other'" in (error.message or "")
    (attempt,) = attempts(connection, sent.task_id)
    assert (attempt.outcome, attempt.error_code) == ("FAILED", "WORKER_SERIALIZATION_ERROR")
    waited = "SELECT failed_at - enqueued_at > interval '2 s' FROM horsies_tasks WHERE id = %s"
    assert connection.execute(waited, (sent.task_id,)).fetchone() == (True,)
    # Its next attempt would have a grace period of its own.
    assert connection.execute("SELECT FROM horsies_refusals").fetchall() == []
    # Each release has claimed it, and one of them again at the end: no worker claims it over and over.
    assert task(connection, sent.task_id).generation <= 5


def test_workers_of_one_release_refuse_a_call_once_together(
    fleet: Fleet, releases: ModuleType, first: Any, connection: Database
) -> None:
    workers = [start(fleet, 1), start(fleet, 1)]
    calls = [releases.tasks.extended.send(number, note="x").unwrap() for number in range(300)]
    fitting = [first.extended.send(number).unwrap() for number in range(100)]
    assert [one.get(timeout_ms=30_000).ok_value for one in fitting] == list(range(100))
    wait_until(
        lambda: (
            connection.execute(
                "SELECT count(*) FROM horsies_tasks WHERE status <> 'COMPLETED'"
            ).fetchone()
            == connection.execute("SELECT count(*) FROM horsies_refusals").fetchone()
        )
    )
    # A call is given back in the turn after the one that has stored its refusal.
    wait_until(lambda: {task(connection, one.task_id).status for one in calls} == {"PENDING"})
    claims = connection.execute(
        "SELECT max(generation), avg(generation)::float8 FROM horsies_tasks WHERE kwargs LIKE '%note%'"
    ).fetchone()
    assert claims is not None
    assert claims[0] <= 2
    assert claims[1] < 1.2, "each of the two workers claims every call"
    assert all(worker.stop() == 0 for worker in workers)


def test_a_node_with_a_new_parameter_waits_for_the_release_that_has_it(
    fleet: Fleet, releases: ModuleType, connection: Database, journal: Journal
) -> None:
    old = start(fleet, 1)
    (run_id,) = runs.start(connection, releases.new_workflow(5))
    old.wait_for("unknown_task")
    start(fleet, 2)
    runs.wait_for(connection, run_id, "COMPLETED")
    assert ("extended", "5 n by 2") in journal_of(journal)


@pytest.mark.parametrize("options", [(), ("--async-children", "1")])
def test_burst_and_async_calls_wait_for_the_release_that_has_their_parameter(
    fleet: Fleet, releases: ModuleType, first: Any, connection: Database, options: tuple[str, ...]
) -> None:
    old = start(fleet, 1, *options)
    names = ["burst_extended"] + (["async_extended"] if options else [])
    calls = [
        getattr(releases.tasks, name).send(number, note="x").unwrap()
        for name in names
        for number in range(20)
    ]
    fitting = [getattr(first, name).send(1).unwrap() for name in names]
    assert {one.get(timeout_ms=30_000).ok_value for one in fitting} == {1}
    old.wait_for("unknown_task", times=len(names))
    start(fleet, 2, *options)
    assert [one.get(timeout_ms=30_000).ok_value for one in calls] == [*range(20)] * len(names)
    assert statuses(connection) == {"COMPLETED": len(calls) + len(fitting)}


@contextmanager
def trigger_refuses(connection: Database, url: str) -> Iterator[str]:
    with poisoned(connection, "true", table="horsies_refusals", event="INSERT"):
        yield url


@contextmanager
def table_is_locked(connection: Database, url: str) -> Iterator[str]:
    with psycopg.connect(url) as other:
        other.execute("LOCK TABLE horsies_refusals IN SHARE ROW EXCLUSIVE MODE")
        yield url


@contextmanager
def right_is_missing(connection: Database, url: str) -> Iterator[str]:
    """The URL of a role that may write every table except the one of refusals."""
    role = sql.Identifier(name := f"horsies_test_{uuid.uuid4().hex}")
    connection.execute(sql.SQL("CREATE ROLE {}").format(role))
    try:
        grants = "GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA public TO {}"
        connection.execute(sql.SQL(grants).format(role))
        connection.execute(sql.SQL("REVOKE ALL ON horsies_refusals FROM {}").format(role))
        yield f"{url}{'&' if '?' in url else '?'}options=-c%20role%3D{name}"
    finally:
        connection.execute(sql.SQL("DROP OWNED BY {}").format(role))
        connection.execute(sql.SQL("DROP ROLE {}").format(role))


@pytest.mark.parametrize("unwritable", [trigger_refuses, table_is_locked, right_is_missing])
def test_a_refusal_that_cannot_be_stored_holds_nothing_else_up(
    fleet: Fleet,
    releases: ModuleType,
    connection: Database,
    unwritable: Callable[[Database, str], AbstractContextManager[str]],
) -> None:
    with unwritable(connection, fleet.database_url) as url:
        old = start(fleet, 1, processes=1, database_url=url)
        call = releases.tasks.extended.send(1, note="x").unwrap()
        old.wait_for("blocked")
        others = [releases.tasks.shared.send(number).unwrap() for number in range(4)]
        assert [one.get(timeout_ms=20_000).ok_value for one in others] == [0, 1, 2, 3]
        wait_for_status(connection, call.task_id, "PENDING")
        assert attempts(connection, call.task_id) == []
        # Each claim adds one; the waits between them double.
        assert task(connection, call.task_id).generation <= 6
        assert "statement refused" not in old.log()
        if unwritable is right_is_missing:
            assert old.log().count("GRANT SELECT, INSERT, UPDATE, DELETE ON horsies_refusals") == 1
        assert old.stop() == 0
    start(fleet, 2)
    assert call.get(timeout_ms=30_000).ok_value == 1
