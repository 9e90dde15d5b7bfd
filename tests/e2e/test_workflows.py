"""Workflows on real workers: the cost of a step, and the effects of pauses, cancels and retries."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import pytest

from horsies.db.statements.workflows import pause_run, resume_run, signal_run
from horsies.error_codes import OperationalErrorCode
from horsies.workflow.nodes.nodes import MapNode, SleepNode, TaskNode
from tests.support import runs
from tests.support.database import Database, backends, function_replaced, steps_of, terminate
from tests.support.tables import attempts, count, tasks
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, Fleet, Journal, Line, RunningWorker

APPLICATION = "tests.support.apps.flows:app"
ENOUGH = '{"error_code":"STOPPED","message":"enough","data":null,"exception":null}'
STEPS = 1_000
CHAIN = 300
# The worker's session and ours: the server counts each notification it wakes them for as a transaction.
LISTENERS = 2


@pytest.fixture
def worker(fleet: Fleet) -> RunningWorker:
    """A worker with two children that lives on notifications alone."""
    return fleet.start(application=APPLICATION, config=HARDLY_POLLS)


# The cost of a step


def transactions(connection: Database) -> int:
    """The number of transactions that have ended on this database, once every worker has reported
    its own.
    """
    wait_until(lambda: not backends(connection, "horsies%"))
    (row,) = connection.execute(
        "SELECT xact_commit + xact_rollback FROM pg_stat_database "
        "WHERE datname = current_database()"
    )
    return int(row[0])


def commits_of_attempts(connection: Database) -> int:
    """How many transactions recorded the ends of tasks."""
    (row,) = connection.execute("SELECT count(DISTINCT xmin::text) FROM horsies_task_attempts")
    return int(row[0])


def wait_quietly(connection: Database, run_id: str, seconds: float = 60.0) -> None:
    """Wait for the end of a run without an own transaction."""
    heard = connection.notifies(timeout=seconds, stop_after=1)
    assert [note.payload for note in heard] == [run_id]


def spent(worker: RunningWorker) -> tuple[int, int]:
    """The statements and round trips of a worker's turns, from its log, once it has stopped."""
    (found,) = re.findall(r"turns: (\d+) statements in (\d+) round trips", worker.log())
    return int(found[0]), int(found[1])


@pytest.mark.direct("a pooler hides who sent a notification")
def test_a_chain_takes_no_more_than_two_round_trips_per_step(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    terminate(connection, "horsies%")  # sessions that earlier tests of this process left open
    before = transactions(connection)
    worker = fleet.start("--loglevel", "DEBUG", application=APPLICATION, config=HARDLY_POLLS)
    connection.execute("LISTEN workflow_done")
    (run_id,) = runs.start(connection, flows.chain(CHAIN))
    wait_quietly(connection, run_id)
    assert worker.stop() == 0
    statements, round_trips = spent(worker)
    # One, or two on a busy machine, whose signs of life and looks ahead come on top of that.
    assert round_trips <= CHAIN * 2.5
    assert transactions(connection) - before <= CHAIN * 2.5 * (1 + LISTENERS)
    assert statements <= CHAIN * 7
    # Every step was recorded in its own transaction, and no step in two.
    assert commits_of_attempts(connection) == CHAIN
    assert runs.result(connection, run_id) == {"ok": CHAIN}


def test_a_chain_over_two_workers_takes_one_more_round_trip_where_it_changes_hands(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    workers = [
        fleet.start(
            "--loglevel", "DEBUG", application=APPLICATION, config=HARDLY_POLLS, processes=1
        )
        for _ in range(2)
    ]
    connection.execute("LISTEN workflow_done")
    (run_id,) = runs.start(connection, flows.chain(200))
    wait_quietly(connection, run_id)
    assert runs.result(connection, run_id) == {"ok": 200}
    assert [worker.stop() for worker in workers] == [0, 0]


@pytest.mark.direct("a pooler hides who sent a notification")
def test_a_wide_fan_takes_less_than_two_statements_per_node(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    terminate(connection, "horsies%")  # sessions that earlier tests of this process left open
    before = transactions(connection)
    worker = fleet.start(
        "--loglevel", "DEBUG", processes=4, application=APPLICATION, config=HARDLY_POLLS
    )
    connection.execute("LISTEN workflow_done")
    (run_id,) = runs.start(connection, flows.fan(STEPS))
    wait_quietly(connection, run_id)
    assert worker.stop() == 0
    statements, _ = spent(worker)
    assert statements <= 2 * (STEPS + 2)
    assert transactions(connection) - before <= STEPS * (1 + LISTENERS)
    assert runs.result(connection, run_id) == {"ok": 2 * STEPS}


def size_of(connection: Database) -> int:
    (row,) = connection.execute("SELECT pg_database_size(current_database())")
    return int(row[0])


def growth(connection: Database, flows: ModuleType, length: int, readers: int) -> int:
    """By how much the database grows when that many nodes take a text of that length."""
    before = size_of(connection)
    (run_id,) = runs.start(connection, flows.readers(length, readers))
    runs.wait_for(connection, run_id, "COMPLETED", 60)
    lengths = runs.result(connection, run_id)["ok"].values()
    assert [one["ok"] for one in lengths] == [length] * readers
    return size_of(connection) - before


def test_a_large_result_is_stored_once_however_many_take_it(
    worker: RunningWorker, connection: Database, flows: ModuleType
) -> None:
    growth(connection, flows, 10, CHAIN)  # the tables have their pages now
    small = growth(connection, flows, 10, CHAIN)
    large = growth(connection, flows, 1_000_000, CHAIN)
    assert large - small < 4_000_000
    assert worker.stop() == 0


# Inputs that cannot be read


@contextmanager
def failing_reads(connection: Database, times: int, code: str) -> Iterator[None]:
    """Make the database refuse to hand out results of nodes that often, with that SQLSTATE."""
    refusing = f"""(p_task horsies_tasks) RETURNS text LANGUAGE plpgsql STABLE AS $$
        BEGIN
            IF current_query() LIKE '%summed AS%' AND nextval('public.e2e_reads') <= {times} THEN
                RAISE EXCEPTION 'not now' USING ERRCODE = '{code}';
            END IF;
            RETURN coalesce(p_task.result, '{{"ok":1}}');
        END $$"""
    connection.execute("CREATE SEQUENCE e2e_reads")
    try:
        with function_replaced(connection, "horsies_task_result_v1", refusing):
            yield
    finally:
        connection.execute("DROP SEQUENCE e2e_reads")


def start_with_first_step_done(connection: Database, flows: ModuleType) -> str:
    """A chain of two whose first step has ended without a result: the database makes one up."""
    (run_id,) = runs.start(connection, flows.chain(2))
    connection.execute("UPDATE horsies_tasks SET status = 'COMPLETED', completed_at = now()")
    return run_id


def test_a_node_whose_inputs_cannot_be_read_at_the_moment_is_given_back_and_runs_later(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    run_id = start_with_first_step_done(connection, flows)
    with failing_reads(connection, 2, "57P03"):
        worker = fleet.start(application=APPLICATION)
        runs.wait_for(connection, run_id, "COMPLETED")
        assert worker.stop() == 0
    assert runs.result(connection, run_id) == {"ok": 2}
    (second,) = [row for row in tasks(connection) if row.generation > 0]
    # Claimed three times, started once.
    assert second.generation == 3
    assert [(one.attempt, one.outcome) for one in attempts(connection)] == [(1, "COMPLETED")]


def test_a_node_whose_inputs_can_never_be_read_fails_and_the_worker_lives_on(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    run_id = start_with_first_step_done(connection, flows)
    with failing_reads(connection, 100, "XX001"):
        worker = fleet.start(application=APPLICATION)
        runs.wait_for(connection, run_id, "FAILED")
        assert flows.one.send().unwrap().get(timeout_ms=30_000).ok == 1
        assert worker.stop() == 0
    (row,) = runs.all_runs(connection)
    assert "WORKER_SERIALIZATION_ERROR" in (row.error or "")


# Shapes


def overlapping(lines: list[Line]) -> int:
    """How many tasks ran at the same time at most."""
    running = most = 0
    for line in lines:
        running += {"start": 1, "end": -1}[line.what]
        most = max(most, running)
    return most


@pytest.mark.pooled
def test_a_map_runs_at_most_so_many_at_once_and_keeps_the_order(
    fleet: Fleet, journal: Journal, connection: Database, flows: ModuleType
) -> None:
    worker = fleet.start(application=APPLICATION, config=HARDLY_POLLS, processes=4)
    (run_id,) = runs.start(connection, flows.squares(12, 2, 0.02))
    runs.wait_for(connection, run_id, "COMPLETED")
    assert runs.result(connection, run_id) == {"ok": sum(n * n for n in range(12))}
    assert overlapping(journal.lines()) == 2
    assert worker.stop() == 0


def test_a_map_that_grows_in_steps_runs_all_of_its_items(
    fleet: Fleet, journal: Journal, connection: Database, flows: ModuleType
) -> None:
    with steps_of(connection, 3):
        worker = fleet.start(application=APPLICATION, config=HARDLY_POLLS, processes=4)
        bounded, free = runs.start(
            connection, flows.squares(20, 2, 0.0), flows.squares(20, None, 0.0)
        )
        for run_id in (bounded, free):
            runs.wait_for(connection, run_id, "COMPLETED")
            assert runs.result(connection, run_id) == {"ok": sum(n * n for n in range(20))}
        assert worker.stop() == 0


def test_a_map_larger_than_its_taker_may_read_fails_the_taker_alone(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    worker = fleet.start(
        application=APPLICATION, config={"payload": {"max_input_bytes": 4_000_000}}
    )
    source = TaskNode(flows.numbers_up_to, kwargs={"count": 9})
    texts = MapNode(
        flows.text_for,
        over=source,
        each="number",
        kwargs={"length": 500_000},
        allow_failed_items=True,
        node_id="texts",
    )
    taker = TaskNode(flows.tell, args_from={"value": texts}, waits_for=[texts], node_id="taker")
    spec = flows.app.workflow("pages", [source, texts, taker], definition_key="e2e.pages")
    (run_id,) = runs.start(connection, spec)
    runs.wait_for(connection, run_id, "FAILED")
    handle = flows.app.workflow_handle(run_id)
    error = handle.result_for(taker).err_value
    assert error.error_code is OperationalErrorCode.PAYLOAD_TOO_LARGE
    assert "payload.max_input_bytes (4,000,000)" in error.message
    read = handle.result_for(texts).ok_value
    assert [text.ok_value for text in read] == [str(number) * 500_000 for number in range(9)]
    assert flows.one.send().unwrap().get(timeout_ms=30_000).ok == 1
    assert worker.stop() == 0


# Waiting without a worker


def test_a_sleep_is_over_in_time_and_holds_no_child(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    fleet.start(application=APPLICATION, config=HARDLY_POLLS, processes=1)
    first = TaskNode(flows.one)
    sleep = SleepNode(4, waits_for=[first], node_id="sleep")
    last = TaskNode(flows.one, waits_for=[sleep], node_id="last")
    spec = flows.app.workflow("nap", [first, sleep, last], definition_key="e2e.nap")
    (run_id,) = runs.start(connection, spec)
    wait_until(lambda: runs.nodes(connection, run_id)["sleep"] == "ENQUEUED")
    assert flows.one.send().unwrap().get(timeout_ms=30_000).ok == 1
    assert runs.nodes(connection, run_id)["sleep"] == "ENQUEUED"
    runs.wait_for(connection, run_id, "COMPLETED")


@pytest.mark.pooled
def test_a_signal_is_taken_when_it_comes_late_and_kept_when_it_comes_early(
    fleet: Fleet, connection: Database, flows: ModuleType
) -> None:
    early, late = runs.start(connection, flows.signalled(), flows.signalled())
    signal_run.fetch(connection, early, "go", '{"from":"early"}')
    fleet.start(application=APPLICATION, config=HARDLY_POLLS)
    runs.wait_for(connection, early, "COMPLETED")
    assert runs.result(connection, early) == {"ok": {"from": "early"}}
    wait_until(lambda: runs.nodes(connection, late)["signal"] == "ENQUEUED")
    assert count(connection, "RUNNING", "CLAIMED") == 0
    signal_run.fetch(connection, late, "go", "[1]")
    runs.wait_for(connection, late, "COMPLETED")
    assert runs.result(connection, late) == {"ok": [1]}


# Steering


def test_what_was_claimed_ahead_is_not_started_in_a_paused_run(
    fleet: Fleet,
    journal: Journal,
    connection: Database,
    programs: ModuleType,
    flows: ModuleType,
) -> None:
    ahead = HARDLY_POLLS | {"prefetch_buffer": 3, "claim_lease_ms": 10_000}
    worker = fleet.start(application=APPLICATION, config=ahead, processes=1)
    nodes = [TaskNode(programs.rest_until_released, kwargs={"label": "0"})]
    nodes += [TaskNode(flows.linger, kwargs={"seconds": 0.0, "label": str(n)}) for n in (1, 2, 3)]
    (run_id,) = runs.start(
        connection, flows.app.workflow("ahead", nodes, definition_key="e2e.ahead")
    )
    wait_until(lambda: count(connection, "CLAIMED") == 3 and journal.lines("start"))
    pause_run.fetch(connection, run_id)
    journal.release("0")
    wait_until(lambda: journal.lines("end"))
    assert flows.one.send().unwrap().get(timeout_ms=30_000).ok == 1
    assert len(journal.lines("start")) == 1
    assert count(connection, "PENDING") == 3
    resume_run.fetch(connection, run_id)
    runs.wait_for(connection, run_id, "COMPLETED")
    assert Counter(line.label for line in journal.lines("start")) == Counter("0123")
    assert worker.stop() == 0
