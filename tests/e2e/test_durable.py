"""Durable functions under kills: records never change, effects in the database happen exactly once."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType

import pytest

from horsies import (
    AnyNode,
    MapNode,
    TaskHandle,
    WorkflowHandle,
    WorkflowSpec,
    WorkflowStatus,
    from_node,
)
from tests.support.database import Database, backends
from tests.support.durable_runs import APPLICATION, WITNESS, journal_of, start
from tests.support.explained import Doors, the
from tests.support.tables import attempts, task, wait_for_status, wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import HARDLY_POLLS, QUICK_RECOVERY, Fleet, Journal, RunningWorker

IS_LONG = os.environ.get("HORSIES_TEST_OUTAGES") == "long"
RUNS, KILLS, WORKER_KILLS = (300, 600, 20) if IS_LONG else (12, 25, 1)
# The async functions among them run side by side in a child of their own.
ASYNC = ("--async-children", "1", "--async-slots", "4")


@pytest.fixture
def witnessed(connection: Database) -> Iterator[Database]:
    connection.execute(WITNESS)
    yield connection
    connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        "WHERE application_name LIKE 'horsies:child%' AND datname = current_database()"
    )
    connection.execute("DROP FUNCTION e2e_unchanged CASCADE; DROP TABLE durable_effects")


def kill_child(connection: Database, dice: random.Random) -> bool:
    rows = connection.execute(
        "SELECT worker_pid FROM horsies_tasks WHERE status = 'RUNNING' AND worker_pid IS NOT NULL"
    ).fetchall()
    if not rows:
        return False
    with suppress(ProcessLookupError):
        os.kill(dice.choice(rows)[0], signal.SIGKILL)
        return True
    return False


def signal_waiting(module: ModuleType, connection: Database) -> None:
    """Send each run that waits for its signal the signal, once."""
    rows = connection.execute(
        "SELECT parked.task_id::text FROM horsies_parked AS parked "
        "WHERE parked.signals <> '{}' AND NOT EXISTS ("
        "    SELECT FROM horsies_steps AS step WHERE step.task_id = parked.task_id AND name = 'signal:go') "
        "AND NOT EXISTS (SELECT FROM horsies_task_signals AS sent WHERE sent.task_id = parked.task_id)"
    ).fetchall()
    for (task_id,) in rows:
        module.app.signal(task_id, "go", "went").unwrap()


@pytest.mark.timeout(3600 if IS_LONG else 240)
def test_runs_end_with_what_their_steps_recorded_under_kills_of_children_and_workers(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    worker = start(fleet, *ASYNC)
    tours = (durable.tour, durable.async_tour)
    sent: list[TaskHandle[list[str]]] = [
        tours[number % 2].enqueue(dice.choice((0.0, 0.002, 0.01))) for number in range(RUNS)
    ]
    kills, worker_kills = 0, 0

    def is_done() -> bool:
        row = witnessed.execute(
            "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
        ).fetchone()
        return row == (0,)

    while not is_done():
        signal_waiting(durable, witnessed)
        if kills < KILLS and kill_child(witnessed, dice):
            kills += 1
        if worker_kills < WORKER_KILLS and kills > (worker_kills + 1) * KILLS / (WORKER_KILLS + 1):
            worker.signal(signal.SIGKILL)
            worker.wait()
            worker = start(fleet, *ASYNC)
            worker_kills += 1
        witnessed.execute("SELECT pg_sleep(%s)", (dice.uniform(0.0, 0.03),))
    print(f"{kills} kills of children, {worker_kills} of workers, {RUNS} runs")
    made = journal_of(fleet)
    for one in sent:
        first, second, third, twice, answer, last = one.result(timeout_ms=5_000)
        assert (twice, answer) == ("42", "went")
        calls = made[one.task_id]
        for step, token in (("act-0", first), ("act-1", second), ("act-2", third), ("act-3", last)):
            assert calls[step, token] == 1, "a result that no call of the step has returned"
    rows = witnessed.execute(
        "SELECT task_id::text, count(*), count(DISTINCT number) FROM durable_effects GROUP BY 1"
    ).fetchall()
    assert {row[1:] for row in rows} == {(2, 2)}, "the effects of a tx_step happen once"
    assert len(rows) == RUNS


@pytest.mark.timeout(180)
@pytest.mark.parametrize("function", ["swept", "async_swept"])
def test_a_run_that_dies_before_or_after_any_of_its_effects_continues_there(
    fleet: Fleet, durable: ModuleType, witnessed: Database, function: str
) -> None:
    start(fleet)
    doze = durable.doze.enqueue()
    swept = getattr(durable, function)
    whole: TaskHandle[list[str]] = swept.enqueue(-1)
    durable.app.signal(whole.task_id, "go", "went").unwrap()
    assert whole.result(timeout_ms=30_000)[1:] == ["42", "went", "2"]
    points = len(Path(f"{fleet.journal.path}.{whole.task_id}.points").read_text())
    assert points > 30
    sent: list[TaskHandle[list[str]]] = [swept.enqueue(point) for point in range(points)]
    for one in sent:
        durable.app.signal(one.task_id, "go", "went").unwrap()
    for point, one in enumerate(sent):
        token, *others = one.result(timeout_ms=60_000)
        assert others == ["42", "went", "2"], point
        assert journal_of(fleet)[one.task_id]["effect", token] == 1, point
        assert os.path.exists(f"{fleet.journal.path}.{one.task_id}.died"), point
        ends = [row.outcome for row in attempts(witnessed, one.task_id)]
        assert sorted(ends) == ["COMPLETED", "WORKER_FAILURE"], point
    rows = witnessed.execute("SELECT count(*) FROM durable_effects GROUP BY task_id").fetchall()
    assert rows == [(1,)] * (points + 1), "the effects of a tx_step happen once"
    children = witnessed.execute("SELECT count(*) FROM horsies_tasks WHERE task_name = 'double'")
    assert children.fetchone() == (points + 1,), "each child is sent once"
    print(f"{points} points before and after effects")
    doze.result(timeout_ms=30_000)
    ends = [row.outcome for row in attempts(witnessed, doze.task_id)]
    assert ends == ["COMPLETED"], "its waits do not count towards its timeout_ms"


def points_of(fleet: Fleet, task_id: str) -> int:
    """The number of points that the calls of a run have reached."""
    return len(Path(f"{fleet.journal.path}.{task_id}.points").read_text())


def cancel_waiting(connection: Database, sent: list[TaskHandle[None]]) -> None:
    """Cancel each of these runs as soon as it waits for its end."""
    waiting = {one.task_id: one for one in sent}
    while waiting:
        rows = connection.execute(
            "SELECT task_id::text FROM horsies_parked WHERE signals = '{end}'"
        )
        for (task_id,) in rows.fetchall():
            if (one := waiting.pop(task_id, None)) is not None:
                one.cancel().unwrap()
        connection.execute("SELECT pg_sleep(0.02)")
    for one in sent:
        wait_for_status(connection, one.task_id, "CANCELLED")


@pytest.mark.timeout(180)
def test_a_run_that_dies_in_a_retry_a_timeout_a_continuation_or_its_clean_up_continues_there(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    start(fleet)
    whole: TaskHandle[None] = durable.swept_rest.enqueue(-1)
    cancel_waiting(witnessed, [whole])
    points = points_of(fleet, whole.task_id)
    assert points > 30
    # The point behind an effect and the point before the next one lie in the same gap.
    chosen = range(0 if IS_LONG else 1, points, 1 if IS_LONG else 2)
    sent: list[TaskHandle[None]] = [durable.swept_rest.enqueue(point) for point in chosen]
    cancel_waiting(witnessed, sent)
    found = ["tried again", "SIGNAL_TIMEOUT", "WAIT_TIMEOUT", "42"]
    registered = ["on_cancel:undo", "write", "on_cancel:undo#2"]
    cleaned = ["!cancel", "on_cancel:undo#2!done", "on_cancel:undo!done"]
    arguments = "SELECT args FROM horsies_tasks WHERE id = %s"
    made, repeated = journal_of(fleet), 0
    for point, one in zip(chosen, sent, strict=True):
        # A child that ends before its run asks for it saves the run some points.
        has_died = os.path.exists(f"{fleet.journal.path}.{one.task_id}.died")
        assert has_died or points_of(fleet, one.task_id) <= point, point
        (args,) = witnessed.execute(arguments, (one.task_id,)).fetchone() or ("",)
        assert json.loads(args) == [point, found], point
        assert steps_of(witnessed, one.task_id) == registered + cleaned, point
        calls = made[one.task_id]
        undone = [calls["undo-1", "-"], calls["undo-2", "-"]]
        assert sorted(undone) in ([1, 1], [1, 2]), point
        repeated += max(undone) == 2
        ends = Counter(row.outcome for row in attempts(witnessed, one.task_id))
        assert ends["WORKER_FAILURE"] == has_died, point
    assert repeated >= 2, "a run died between each clean-up step and its record"
    rows = witnessed.execute("SELECT count(*) FROM durable_effects GROUP BY task_id").fetchall()
    assert rows == [(1,)] * (len(sent) + 1), "the effects of a tx_step happen once"
    flows = witnessed.execute("SELECT count(*), min(status) FROM horsies_workflows").fetchone()
    assert flows == (len(sent) + 1, "COMPLETED"), "each workflow is started once"
    print(f"{points} points before and after effects")


# The points at which a run dies once, and how often the effect outside of the database then happens.
POINTS = {
    "before the effect": 1,
    "after the effect": 2,
    "before the INSERT": 2,
    "after the INSERT": 1,
    "in the transaction": 1,
    "before COMMIT": 1,
    "after COMMIT": 1,
    "before the park": 1,
    "after the wake-up": 1,
    "after the start of a child": 1,
    "before the outcome": 1,
}


@pytest.mark.pooled
@pytest.mark.timeout(120)
@pytest.mark.parametrize("function", ["boundary", "async_boundary"])
def test_a_run_that_dies_at_any_boundary_continues_there(
    fleet: Fleet, durable: ModuleType, witnessed: Database, function: str
) -> None:
    start(fleet)
    boundary = getattr(durable, function)
    sent: dict[str, TaskHandle[str]] = {point: boundary.enqueue(point) for point in POINTS}
    for one in sent.values():
        durable.app.signal(one.task_id, "go", "went").unwrap()
    results = {point: one.result(timeout_ms=60_000) for point, one in sent.items()}
    made = journal_of(fleet)
    for point, one in sent.items():
        assert os.path.exists(f"{fleet.journal.path}.{one.task_id}.died"), point
        tokens = [token for step, token in made[one.task_id].elements() if step == "effect"]
        assert len(tokens) == POINTS[point], point
        assert results[point] == f"{tokens[-1]}42went", point
        effects = witnessed.execute(
            "SELECT count(*) FROM durable_effects WHERE task_id = %s", (one.task_id,)
        ).fetchone()
        assert effects == (1,), point
        ends = [row.outcome for row in attempts(witnessed, one.task_id)]
        assert sorted(ends) == ["COMPLETED", "WORKER_FAILURE"], point
    children = witnessed.execute("SELECT count(*) FROM horsies_tasks WHERE task_name = 'double'")
    assert children.fetchone() == (len(POINTS),), "each child is sent once"


@pytest.mark.skipif(not IS_LONG, reason="takes minutes; HORSIES_TEST_OUTAGES=long")
@pytest.mark.timeout(600)
def test_a_run_of_ten_thousand_steps_survives_kills(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    start(fleet, processes=1)
    count, dice, kills = 9_990, random.Random(7), 0
    sent = durable.steps.enqueue(count)
    while task(witnessed, sent.task_id).status != "COMPLETED":
        witnessed.execute("SELECT pg_sleep(1.5)")
        kills += kills < 5 and kill_child(witnessed, dice)
    assert sent.result(timeout_ms=0) == sum(range(count))
    times = witnessed.execute(
        "SELECT extract(epoch FROM max(ended_at) - min(ended_at))::float8 FROM horsies_steps"
    ).fetchone()
    print(f"{count} steps in {times} s with {kills} kills")


def open_tasks(connection: Database) -> int:
    (count,) = connection.execute(
        "SELECT count(*) FROM horsies_tasks WHERE status IN ('PENDING', 'CLAIMED', 'RUNNING')"
    ).fetchone() or (0,)
    return int(count)


@pytest.mark.timeout(3600 if IS_LONG else 240)
def test_cancelled_runs_undo_their_effects_under_kills(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    print(f"seed {seed}")
    dice = random.Random(seed)
    worker = start(fleet)
    waiting = [durable.saga.enqueue(dice.choice((0.0, 0.005, 0.02))) for _ in range(RUNS)]
    sent, kills, worker_kills = list(waiting), 0, 0
    dice.shuffle(waiting)
    while waiting or open_tasks(witnessed):
        if waiting and dice.random() < 0.3:
            waiting.pop().cancel(include_running=True).unwrap()
        if kills < KILLS and kill_child(witnessed, dice):
            kills += 1
        if worker_kills < WORKER_KILLS and kills > (worker_kills + 1) * KILLS / (WORKER_KILLS + 1):
            worker.signal(signal.SIGKILL)
            worker.wait()
            worker = start(fleet)
            worker_kills += 1
        witnessed.execute("SELECT pg_sleep(%s)", (dice.uniform(0.0, 0.05),))
    print(f"{kills} kills of children, {worker_kills} of workers, {RUNS} runs")
    made = journal_of(fleet)
    for one in sent:
        calls = [step for step, _ in made[one.task_id]]
        acted = {step.removeprefix("act-") for step in calls if step.startswith("act-")}
        undone = {step.removeprefix("undo-") for step in calls if step.startswith("undo-")}
        assert acted <= undone, "an effect without its clean-up"
        recorded = {
            row[0]
            for row in witnessed.execute(
                "SELECT name FROM horsies_steps WHERE task_id = %s AND kind = 'on_cancel'",
                (one.task_id,),
            )
        }
        # A registration that was on its way when its process died may be stored after the end of its run.
        registered = {str(number) for number in range(len(recorded))}
        assert undone <= registered, "a clean-up that was not registered"
        status = task(witnessed, one.task_id).status
        assert status == "CANCELLED" or not undone, "a crash before any clean-up is registered"
    children = witnessed.execute(
        "SELECT DISTINCT status FROM horsies_tasks WHERE task_name = 'double'"
    )
    assert children.fetchall() in ([], [("CANCELLED",)])


FLOWS, ITEMS = (20, 10) if IS_LONG else (2, 4)


def start_flow(module: ModuleType, number: int) -> WorkflowHandle[list[list[str]]]:
    """A durable node, a map whose items are durable, and a durable node that reads them."""
    first = module.begin.node()(count=ITEMS)
    many = MapNode(module.visit, over=first, node_id="many", max_parallel=ITEMS - 1)
    last = module.finish.node()(visited=from_node(many))
    nodes: list[AnyNode] = [first, many, last]
    spec: WorkflowSpec[list[list[str]]] = module.app.workflow(
        f"flow {number}", nodes, output=last, definition_key="e2e.durable-flow"
    )
    return spec.start().unwrap()


def items_of(connection: Database, workflow_id: str) -> list[str]:
    """The tasks of the items of the map, in order."""
    rows = connection.execute(
        "SELECT id::text FROM horsies_tasks WHERE workflow_id = %s AND workflow_item_index IS NOT NULL "
        "ORDER BY workflow_item_index",
        (workflow_id,),
    )
    return [task_id for (task_id,) in rows]


@pytest.mark.timeout(3600 if IS_LONG else 240)
def test_durable_nodes_and_items_record_every_step_once_under_kills_of_children(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    seed = random.SystemRandom().randint(0, 1 << 32)
    print(f"seed {seed}")
    dice, kills = random.Random(seed), 0
    start(fleet)
    flows = [start_flow(durable, number) for number in range(FLOWS)]
    while any(one.status().unwrap() is WorkflowStatus.RUNNING for one in flows):
        kills += kills < KILLS and kill_child(witnessed, dice)
        witnessed.execute("SELECT pg_sleep(%s)", (dice.uniform(0.0, 0.05),))
    print(f"{kills} kills of children, {FLOWS} workflows of {ITEMS} items")
    assert kills > KILLS // 5
    made = journal_of(fleet)
    for flow in flows:
        *values, last = flow.result(timeout_ms=30_000)
        items = items_of(witnessed, flow.workflow_id)
        for number, (value, task_id) in enumerate(zip(values, items, strict=True), start=1):
            first, twice, second = value
            assert twice == str(2 * number)
            assert [made[task_id][f"act-{number}", one] for one in (first, second)] == [1, 1]
        (token,) = last
        assert sum(calls["act-0", token] for calls in made.values()) == 1
    rows = witnessed.execute(
        "SELECT task_id, count(*), count(DISTINCT number) FROM durable_effects GROUP BY 1"
    ).fetchall()
    assert {row[1:] for row in rows} == {(2, 2)}, "the effects of a tx_step happen once"
    assert len(rows) == FLOWS * (ITEMS + 2)
    ends = Counter(one.outcome for one in attempts(witnessed) if one.outcome == "COMPLETED")
    assert ends["COMPLETED"] == FLOWS * (2 * ITEMS + 2), "runs and their children complete once"
    assert (
        witnessed.execute("SELECT horsies_problems_v1(id) FROM horsies_workflows").fetchall() == []
    )


def start_release(fleet: Fleet, module: ModuleType, versions: str) -> RunningWorker:
    """A worker whose application has these versions of the function."""
    return fleet.start(
        application=APPLICATION, config=QUICK_RECOVERY, environment={module.VERSIONS: versions}
    )


def sent_release(module: ModuleType, version: int) -> str:
    """Start a run of this version; this process has none of its code."""
    task_id: str = module.app.send_by_name(f"release@{version}").unwrap().task_id
    return task_id


def steps_of(connection: Database, task_id: str) -> list[str]:
    rows = connection.execute(
        "SELECT name FROM horsies_steps WHERE task_id = %s ORDER BY position", (task_id,)
    )
    return [name for (name,) in rows]


@pytest.mark.timeout(180)
def test_runs_of_a_former_version_wait_for_a_worker_that_has_it(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    former = start_release(fleet, durable, "1")
    runs = [sent_release(durable, 1) for _ in range(4)]
    unversioned = durable.unversioned.enqueue()
    parked = "SELECT count(*) FROM horsies_parked WHERE signals = '{go}'"
    wait_until(lambda: witnessed.execute(parked).fetchone() == (len(runs) + 1,))
    assert former.stop() == 0

    latter = start_release(fleet, durable, "2")
    doors = Doors(durable.app)
    for task_id in runs:
        durable.app.signal(task_id, "go", "went").unwrap()
    latter.wait_for("unknown_task")
    newer = sent_release(durable, 2)
    durable.app.signal(newer, "go", "went").unwrap()
    wait_for_status(witnessed, newer, "COMPLETED")
    for task_id in runs:
        wait_for_status(witnessed, task_id, "PENDING")
        assert steps_of(witnessed, task_id) == ["first of 1"]
        assert attempts(witnessed, task_id) == []
        unknown = the(doors.task(task_id), "TASK_UNKNOWN").sentence
        assert "release@1" in unknown
    durable.app.signal(unversioned.task_id, "go", "went").unwrap()
    assert latter.wait_for("run_held")["task_id"] == unversioned.task_id
    mismatch = "the code asks for step 'begin 2', the record goes on with 'begin 1'"
    assert f"unversioned {unversioned.task_id} is held" in latter.log()
    assert mismatch in latter.log()

    start_release(fleet, durable, "1 2")
    for task_id in runs:
        row = wait_for_status(witnessed, task_id, "COMPLETED")
        tokens = json.loads(row.result)["ok"]
        calls = journal_of(fleet)[task_id]
        assert calls == {("act-1", token): 1 for token in tokens}
        assert steps_of(witnessed, task_id) == ["first of 1", "signal:go", "write", "last of 1"]
        assert [one.outcome for one in attempts(witnessed, task_id)] == ["COMPLETED"]
    effects = witnessed.execute("SELECT task_id::text, number FROM durable_effects").fetchall()
    assert sorted(effects) == sorted([*((task_id, 1) for task_id in runs), (newer, 2)])
    assert latter.stop() == 0
    durable.app.durable_handle(unversioned.task_id).resume().unwrap()
    token = unversioned.result(timeout_ms=30_000)
    assert journal_of(fleet)[unversioned.task_id] == {("act-0", token): 1}


@pytest.mark.timeout(120)
def test_runs_end_at_their_deadline_wherever_they_are(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    # Only the deadline itself can wake this worker in time.
    fleet.start(application=APPLICATION, processes=2, config=HARDLY_POLLS)
    sent = {label: durable.late.enqueue(label) for label in ("parked", "running")}
    for label, one in sent.items():
        row = wait_for_status(witnessed, one.task_id, "CANCELLED")
        assert [what for what, _ in journal_of(fleet)[one.task_id]][-1] == "act-1", label
        info = one.info(include_failed_reason=True).unwrap()
        assert info is not None
        assert info.failed_reason == "The run reached its deadline."
        took = "SELECT extract(epoch FROM failed_at - sent_at)::float8 FROM horsies_tasks WHERE id = %s"
        (seconds,) = witnessed.execute(took, (one.task_id,)).fetchone() or (0.0,)
        assert 2.0 <= seconds < 20.0, (label, row)


QUICK_GRACE = {"recovery": {**QUICK_RECOVERY["recovery"], "unknown_task_grace_ms": 1_000}}


@pytest.mark.timeout(120)
def test_a_run_without_a_worker_for_its_version_never_fails(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    former = start_release(fleet, durable, "1")
    parked = sent_release(durable, 1)
    wait_until(lambda: witnessed.execute("SELECT FROM horsies_parked").fetchall() != [])
    assert former.stop() == 0

    durable.app.signal(parked, "go", "went").unwrap()
    # Nobody has ever registered version 9; only its name shows that it is a durable function.
    runs = [parked, sent_release(durable, 1), sent_release(durable, 9)]
    fleet.start(
        application=APPLICATION, config=QUICK_GRACE, environment={durable.VERSIONS: "2"}
    ).wait_for("unknown_task", times=2)
    # A task with an unknown name fails after the grace period, so that of the runs is over by then.
    for name in ("first nobody", "second nobody"):
        unknown = durable.app.send_by_name(name).unwrap()
        assert unknown.get(timeout_ms=30_000).err_value.error_code == "WORKER_RESOLUTION_ERROR"
    doors = Doors(durable.app)
    for task_id in runs:
        wait_for_status(witnessed, task_id, "PENDING")
        assert attempts(witnessed, task_id) == []
        sentence = the(doors.task(task_id), "TASK_UNKNOWN").sentence
        assert "it waits for a worker that does" in sentence
        assert "fails" not in sentence

    start_release(fleet, durable, "1 9")
    durable.app.signal(runs[1], "go", "went").unwrap()
    durable.app.signal(runs[2], "go", "went").unwrap()
    for task_id in runs:
        wait_for_status(witnessed, task_id, "COMPLETED")


@pytest.mark.timeout(120)
@pytest.mark.direct("a pooler has sessions of its own")
def test_a_zombie_cannot_record_after_its_successor(
    fleet: Fleet, durable: ModuleType, witnessed: Database, journal: Journal
) -> None:
    zombie = start(fleet, processes=1)
    sent = durable.rest.enqueue("zombie")
    wait_until(lambda: len(journal_of(fleet)[sent.task_id]) == 1)
    zombie.signal(signal.SIGSTOP)
    for pid in backends(witnessed, "horsies:turn"):
        witnessed.execute("SELECT pg_terminate_backend(%s)", (pid,))
    start(fleet, processes=1)
    wait_until(lambda: len(journal_of(fleet)[sent.task_id]) == 2, 60)
    journal.release("zombie")
    token = sent.result(timeout_ms=30_000)
    zombie.signal(signal.SIGCONT)
    wait_until(lambda: "claim_lost" in zombie.log() or "declared this worker lost" in zombie.log())
    wait_until_empty(witnessed)
    recorded = witnessed.execute("SELECT result FROM horsies_steps WHERE name = 'wait_for_release'")
    assert recorded.fetchall() == [(f'"{token}"',)]
    assert witnessed.execute("SELECT count(*) FROM durable_effects").fetchone() == (1,)


def test_a_parked_run_survives_its_worker_and_needs_no_process(
    fleet: Fleet, durable: ModuleType, witnessed: Database
) -> None:
    worker = start(fleet)
    sent = durable.tour.enqueue(0.0)
    waits = "SELECT signals FROM horsies_parked WHERE signals <> '{}'"
    wait_until(lambda: witnessed.execute(waits).fetchall() == [(["go"],)])
    parked = wait_for_status(witnessed, sent.task_id, "PENDING")
    assert parked.claimed_by_worker_id is None
    worker.signal(signal.SIGKILL)
    worker.wait()
    durable.app.signal(sent.task_id, "go", "went").unwrap()
    start(fleet)
    assert sent.result(timeout_ms=30_000)[4] == "went"
    assert task(witnessed, sent.task_id).retry_count == 0
    assert [one.outcome for one in attempts(witnessed, sent.task_id)] == ["COMPLETED"]
