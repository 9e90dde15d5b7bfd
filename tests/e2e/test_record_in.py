"""`record_in` under stops, time limits, lost sessions and a transaction that is left idle."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType

import psycopg
import pytest

from tests.support.database import Database
from tests.support.tables import attempts, task, wait_for_status
from tests.support.transactions import (
    OWN_ROLE,
    bookings,
    closed_gate,
    idle_sessions,
    open_gate,
    waits_at_gate,
    waits_for_row,
)
from tests.support.wait import wait_until
from tests.support.workers import QUICK_RECOVERY, Fleet, Journal, RunningWorker

APPLICATION = "tests.support.apps.recording:app"
ASYNC = ("--async-children", "1", "--async-slots", "4")
ASKED = "asked to stop"


@pytest.fixture
def recording(booking: ModuleType) -> ModuleType:
    return importlib.import_module("tests.support.apps.recording")


def start(fleet: Fleet, *options: str) -> RunningWorker:
    return fleet.start(*options, application=APPLICATION, processes=1, config=QUICK_RECOVERY)


@contextmanager
def held_at(
    connection: Database, recording: ModuleType, journal: Journal, point: str, name: str
) -> Iterator[str]:
    """A task that waits at a point of its own transaction until the end of the block."""
    with ExitStack() as stack:
        if point in ("record", "commit"):
            stack.enter_context(closed_gate(connection, "write" if point == "record" else point))
        task_id = str(getattr(recording, name).send(1, point).unwrap().task_id)
        if point == "record":  # another session has locked the row of the task
            wait_until(lambda: waits_at_gate(connection, OWN_ROLE))
            other = stack.enter_context(psycopg.connect(connection.info.dsn))
            other.execute("SELECT FROM horsies_tasks WHERE id = %s FOR UPDATE", (task_id,))
            open_gate(connection)
            wait_until(lambda: waits_for_row(connection, OWN_ROLE))
        elif point == "commit":
            wait_until(lambda: waits_at_gate(connection, OWN_ROLE))
        else:
            wait_until(lambda: journal.lines(point))
        yield task_id
        journal.release(point)


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.parametrize(
    ("point", "name", "options"),
    [
        ("written", "record_or_return", ()),
        ("written", "record_or_return_async", ASYNC),
        ("record", "record_or_return", ()),
        ("record", "record_or_return_async", ASYNC),
        ("recorded", "record_or_return", ()),
        ("recorded", "record_or_return_async", ASYNC),
        ("recorded", "record_or_return_async", ()),
        ("recorded", "record_in_a_task", ASYNC),
        ("commit", "record_or_return_async", ASYNC),
        ("committed", "record_or_return", ()),
        ("committed", "record_or_return_async", ASYNC),
    ],
)
def test_a_stop_behind_record_in_comes_too_late(
    fleet: Fleet,
    recording: ModuleType,
    effects: Database,
    journal: Journal,
    point: str,
    name: str,
    options: tuple[str, ...],
) -> None:
    worker = start(fleet, "--shutdown-grace", "0.1", *options)
    with held_at(effects, recording, journal, point, name) as task_id:
        worker.signal(signal.SIGTERM)
        wait_until(lambda: journal.lines(ASKED))
        if point == "written":  # stopped there, and returned to the queue
            wait_until(lambda: task(effects, task_id).status == "PENDING")
    assert worker.wait() == 0
    if point == "written":
        assert bookings(effects) == []
        start(fleet, *options)
        wait_for_status(effects, task_id, "COMPLETED")
    assert task(effects, task_id).status == "COMPLETED"
    assert bookings(effects) == [1]
    ends = [one.outcome for one in attempts(effects, task_id)]
    assert ends[-1:] == ["COMPLETED"]
    assert ends.count("COMPLETED") == 1


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.parametrize("point", ["written", "recorded", "commit"])
@pytest.mark.parametrize(
    ("name", "options"), [("record_or_return", ()), ("record_or_return_async", ASYNC)]
)
def test_a_child_killed_before_its_own_commit_leaves_nothing(
    fleet: Fleet,
    recording: ModuleType,
    effects: Database,
    journal: Journal,
    point: str,
    name: str,
    options: tuple[str, ...],
) -> None:
    start(fleet, *options)
    with held_at(effects, recording, journal, point, name) as task_id:
        os.kill(wait_for_status(effects, task_id, "RUNNING").worker_pid, signal.SIGKILL)
        # Behind the recorded outcome the server rolls back when it notices that its client is gone.
        wait_until(lambda: attempts(effects, task_id))
        assert bookings(effects) == []
    wait_for_status(effects, task_id, "COMPLETED")
    codes = [one.error_code for one in attempts(effects, task_id)]
    assert codes == ["WORKER_CRASHED", None]
    assert effects.execute("SELECT number, attempt FROM bookings").fetchall() == [(1, 2)]


@pytest.mark.direct("a pooler has sessions of its own")
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("record_or_return", ()),
        ("record_or_return_async", ASYNC),
        ("record_or_return_async", ()),
    ],
)
def test_a_stop_that_comes_during_a_record_in_which_fails_takes_effect(
    fleet: Fleet,
    recording: ModuleType,
    effects: Database,
    journal: Journal,
    name: str,
    options: tuple[str, ...],
) -> None:
    worker = start(fleet, "--shutdown-grace", "0.1", *options)
    with held_at(effects, recording, journal, "record", name) as task_id:
        worker.signal(signal.SIGTERM)
        wait_until(lambda: journal.lines(ASKED))
        (victim,) = waits_for_row(effects, OWN_ROLE)
        effects.execute("SELECT pg_terminate_backend(%s)", (victim,))
        wait_until(lambda: not waits_for_row(effects, OWN_ROLE))
    assert worker.wait() == 0
    assert task(effects, task_id).status == "PENDING"
    assert [one.error_code for one in attempts(effects, task_id)] == ["WORKER_STOPPED"]
    assert bookings(effects) == []


def test_a_time_limit_that_passes_behind_record_in_comes_too_late(
    fleet: Fleet, recording: ModuleType, effects: Database, journal: Journal
) -> None:
    start(fleet, *ASYNC)
    sent = [
        recording.record_in_time.send(1).unwrap(),
        recording.record_in_time_async.send(2).unwrap(),
    ]
    # The worker asks both to stop, and would kill their children five seconds later.
    wait_until(lambda: len(journal.lines(ASKED)) == 2)
    journal.release("recorded")
    assert [one.get(30_000).ok_value for one in sent] == [1, 2]
    assert bookings(effects) == [1, 2]
    assert {one.outcome for one in attempts(effects)} == {"COMPLETED"}


@pytest.mark.parametrize("name", ["record_when_stopped", "record_when_stopped_async"])
def test_a_task_that_records_and_commits_when_it_is_stopped_is_completed(
    fleet: Fleet, recording: ModuleType, effects: Database, journal: Journal, name: str
) -> None:
    worker = start(fleet, "--shutdown-grace", "0.1", *ASYNC)
    sent = getattr(recording, name).send(1).unwrap()
    wait_until(lambda: journal.lines("until stopped"))
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert sent.get(30_000).ok_value == 1
    assert bookings(effects) == [1]
    assert [one.outcome for one in attempts(effects, sent.task_id)] == ["COMPLETED"]
    assert "dropped" not in worker.log()


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("idle_after_record", "raise"),
        ("idle_after_record_async", "raise"),
        ("idle_after_record", "return"),
    ],
)
def test_a_transaction_that_is_left_idle_behind_record_in_is_lost(
    fleet: Fleet, recording: ModuleType, effects: Database, journal: Journal, name: str, how: str
) -> None:
    start(fleet, *ASYNC)
    sent = getattr(recording, name).send(1, how).unwrap()
    wait_until(lambda: journal.lines("idle"))
    wait_until(lambda: not idle_sessions(effects), what="the end of the session")
    # Nothing holds the row of the task any more, and nothing is written.
    status = "SELECT status FROM horsies_tasks WHERE id = %s FOR UPDATE NOWAIT"
    assert effects.execute(status, (sent.task_id,)).fetchone() == ("RUNNING",)
    assert bookings(effects) == []
    journal.release("idle")
    result = sent.get(30_000)
    codes = [one.error_code for one in attempts(effects, sent.task_id)]
    if how == "raise":
        assert codes == ["TRANSACTION_LOST", None]
        assert result.ok_value == 1
        assert effects.execute("SELECT attempt FROM bookings").fetchall() == [(2,)]
    else:
        assert codes == ["TRANSACTION_NOT_COMMITTED"]
        assert "rolled back or is still open" in (result.err_value.message or "")
        assert bookings(effects) == []
