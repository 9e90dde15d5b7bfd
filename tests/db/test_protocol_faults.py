"""Faults at every boundary of protocol messages: what a client counts as done is in the tables, and once.

Each test repeats a conversation with the server, with a fault at the first message, the second and so on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import psycopg
import pytest
from psycopg.pq import PipelineStatus, TransactionStatus

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.schedules import ScheduleConfig, TaskSchedule
from horsies.db import pipeline as pipeline_module
from horsies.db.database import Database
from horsies.db.errors import ErrorKind, kind_of
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Nothing, Statement
from horsies.result import Err, Ok
from horsies.scheduler.registry import Registry, store_configured
from horsies.scheduler.tick import tick
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.outcome import Outcome
from horsies.testing.database import empty_tables
from horsies.timetable.patterns import IntervalSchedule
from horsies.worker.connection import TURN_SETTINGS
from horsies.worker.turn import Claimer, TurnRequest, TurnResult, release_unheld, take_turn
from tests.support import database as databases
from tests.support.faults import Action, Direction, Fault, Faults
from tests.support.proxy import Proxy
from tests.support.rows import add_task, row_of
from tests.support.tables import attempts
from tests.support.wait import wait_until

pytestmark = pytest.mark.slow

CLAIMER = Claimer("me", "host", ["default"], [None])
STALL_SECONDS = 0.05
# A conflict, a refusal of the data, and the end of the session.
CONFLICT, REFUSAL, SHUTDOWN = "40001", "23514", "57P01"
KINDS = {CONFLICT: ErrorKind.TRANSIENT, REFUSAL: ErrorKind.DATA, SHUTDOWN: ErrorKind.TRANSIENT}
FAULTS = [
    (Action.ERROR, CONFLICT),
    (Action.ERROR, REFUSAL),
    (Action.FATAL, SHUTDOWN),
    (Action.CLOSE, SHUTDOWN),
    (Action.DELAY, SHUTDOWN),
]
# The three that differ most, where a sweep takes long.
MAIN_FAULTS = [*FAULTS[:2], (Action.CLOSE, SHUTDOWN)]


def names(faults: list[tuple[Action, str]]) -> list[str]:
    return [f"{action.value} {state}" for action, state in faults]


@dataclass
class Scene:
    """The database, and the way to it through faults."""

    connection: databases.Database
    proxy: Proxy
    faults: Faults
    is_pooled: bool

    @property
    def config(self) -> Any:
        return databases.framed_config(self.proxy.url, is_pooled=self.is_pooled)


class Conversation(Protocol):
    """Something that a client does; ``meet`` does it once and checks the tables afterwards."""

    def prepare(self) -> None: ...

    def meet(self, fault: Fault | None) -> None: ...


@pytest.fixture(params=[False, True], ids=["direct", "pooled"])
def scene(
    connection: databases.Database, process_url: str, request: pytest.FixtureRequest
) -> Iterator[Scene]:
    faults = Faults()
    with Proxy(process_url, faults) as proxy:
        yield Scene(connection, proxy, faults, request.param)


def sweep(scene: Scene, conversation: Conversation, action: Action, state: str) -> int:
    """Have the conversation with the fault at each of its boundaries; return how many there were.

    A repeated conversation may be shorter than the first, when psycopg has prepared a statement.
    """
    happened = 0
    conversation.prepare()
    scene.faults.arm()
    conversation.meet(None)
    counts = scene.faults.counts
    directions = [Direction.QUESTION] if action is Action.ERROR else list(Direction)
    boundaries = [(one, number) for one in directions for number in range(counts[one])]
    for direction, number in boundaries:
        fault = Fault(direction, number, action, state)
        conversation.prepare()
        scene.faults.arm(fault)
        try:
            conversation.meet(fault)
        except Exception as error:
            error.add_note(f"with {fault}")
            raise
        finally:
            scene.faults.disarm()
        happened += scene.faults.has_happened
    return happened


# A turn


class Turn:
    """A worker records an outcome and claims a task."""

    def __init__(self, scene: Scene, *, is_warm: bool, timeout_seconds: float | None) -> None:
        self.scene, self.is_warm, self.timeout_seconds = scene, is_warm, timeout_seconds
        self.pipeline = self.open()

    def open(self) -> Pipeline:
        database = Database(self.scene.config)
        return Pipeline.open(database, "turn", TURN_SETTINGS)

    def prepare(self) -> None:
        connection = self.scene.connection
        empty_tables(connection)
        add_task(connection)
        if self.is_warm:  # a turn of the same kind has prepared the statements
            (before,) = self.turn([]).claimed
            add_task(connection)
            (self.held,) = self.turn([Outcome.completed(before, "1")]).claimed
        else:
            plain = Pipeline(connection, prepared=False)
            (self.held,) = take_turn(plain, CLAIMER, [], TurnRequest(pids=[7])).claimed
            self.pipeline.connection.close()
            self.pipeline = self.open()
        self.running, self.waiting = self.held.id, add_task(connection)

    def turn(self, outcomes: list[Outcome]) -> TurnResult:
        return take_turn(self.pipeline, CLAIMER, outcomes, TurnRequest(pids=[7]))

    def meet(self, fault: Fault | None) -> None:
        outcomes = [Outcome.completed(self.held, '{"ok":1}')]
        patience = self.pipeline.timeout_seconds
        if fault is not None:
            self.pipeline.timeout_seconds = self.timeout_seconds
        try:
            turned = self.turn(outcomes)
            self.pipeline.timeout_seconds = patience
            assert turned.recorded == {self.running}
        except psycopg.Error as error:
            self.check_failure(error, fault)
            self.go_on()
            turned = self.turn(outcomes)  # records nothing if the first did after all
        self.check(turned)

    def check_failure(self, error: psycopg.Error, fault: Fault | None) -> None:
        assert fault is not None, error
        assert fault.action is not Action.DELAY
        assert "pipeline mode" not in str(error)
        assert kind_of(error) is KINDS[fault.state]
        if fault.action is Action.ERROR:
            assert error.sqlstate == fault.state
            assert row_of(self.scene.connection, self.running)["status"] == "RUNNING"
            assert row_of(self.scene.connection, self.waiting)["status"] == "PENDING"

    def go_on(self) -> None:
        """As a worker does: another session unless this one is ready, and no claim in doubt.

        The worker's lock makes sure that the earlier session has ended.
        """
        self.scene.faults.disarm()
        pgconn = self.pipeline.connection.pgconn
        if (
            self.pipeline.connection.closed
            or pgconn.pipeline_status != PipelineStatus.OFF
            or pgconn.transaction_status != TransactionStatus.IDLE
        ):
            self.pipeline.connection.close()
            wait_until(lambda: not databases.backends(self.scene.connection, "horsies:turn"))
            self.pipeline = self.open()
        release_unheld(self.pipeline, "me", [self.held])

    def check(self, turned: TurnResult) -> None:
        connection = self.scene.connection
        assert row_of(connection, self.running)["status"] == "COMPLETED"
        assert len(attempts(connection, self.running)) == 1
        (claimed,) = turned.claimed
        row = row_of(connection, self.waiting)
        assert claimed.id == self.waiting
        assert (row["status"], row["generation"]) == ("RUNNING", claimed.generation)


@pytest.fixture
def make_turn(scene: Scene) -> Iterator[Callable[..., Turn]]:
    made: list[Turn] = []

    def make(*, is_warm: bool = True, timeout_seconds: float | None = None) -> Turn:
        made.append(Turn(scene, is_warm=is_warm, timeout_seconds=timeout_seconds))
        return made[-1]

    yield make
    for turn in made:
        turn.pipeline.connection.close()


@pytest.mark.parametrize(("action", "state"), FAULTS, ids=names(FAULTS))
def test_a_turn_records_once_and_never_counts_what_was_rolled_back(
    scene: Scene, make_turn: Callable[..., Turn], action: Action, state: str
) -> None:
    assert sweep(scene, make_turn(), action, state) > 6


# Behind a pooler nothing is prepared.
@pytest.mark.parametrize("scene", [False], ids=["direct"], indirect=True)
@pytest.mark.parametrize(("action", "state"), MAIN_FAULTS, ids=names(MAIN_FAULTS))
def test_a_turn_that_prepares_its_statements_records_once(
    scene: Scene, make_turn: Callable[..., Turn], action: Action, state: str
) -> None:
    assert sweep(scene, make_turn(is_warm=False), action, state) > 8


def test_a_turn_that_gets_no_answer_is_given_up(
    scene: Scene, make_turn: Callable[..., Turn], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "CANCEL_SECONDS", STALL_SECONDS)
    turn = make_turn(timeout_seconds=STALL_SECONDS)
    assert sweep(scene, turn, Action.STALL, SHUTDOWN) > 12


class Failing(Turn):
    """A worker's group of statements fails, and the session is restored for the next group."""

    def meet(self, fault: Fault | None) -> None:
        divide = Statement("divide", "SELECT 1 / 0", lambda: None, Nothing)
        patience = self.pipeline.timeout_seconds
        if fault is not None:
            self.pipeline.timeout_seconds = self.timeout_seconds
        with pytest.raises((psycopg.errors.DivisionByZero, psycopg.OperationalError)):
            self.pipeline.run([divide()])
        self.pipeline.timeout_seconds = patience
        self.go_on()
        self.check(self.turn([Outcome.completed(self.held, '{"ok":1}')]))


def test_a_failed_group_whose_session_gets_no_answer_is_given_up(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pipeline_module, "CANCEL_SECONDS", STALL_SECONDS)
    failing = Failing(scene, is_warm=True, timeout_seconds=STALL_SECONDS)
    try:
        assert sweep(scene, failing, Action.STALL, SHUTDOWN) > 4
    finally:
        failing.pipeline.connection.close()


@pytest.mark.parametrize("packet_bytes", [0, 1, 3])
def test_packets_that_are_cut_or_joined_make_no_difference(
    scene: Scene, make_turn: Callable[..., Turn], packet_bytes: int
) -> None:
    turn = make_turn()
    scene.faults.packet_bytes = packet_bytes
    for _ in range(2):
        turn.prepare()
        turn.meet(None)


# Sends and starts


@pytest.fixture
def app(scene: Scene) -> Iterator[Horsies]:
    schedules = [
        TaskSchedule(name=name, task_name="note", pattern=IntervalSchedule(hours=1))
        for name in ("one", "two")
    ]
    config = AppConfig(broker=scene.config, schedule=ScheduleConfig(schedules=schedules))
    app = Horsies(config)

    @app.task("note")
    def note(n: int = 0) -> TaskResult[int, TaskError]:
        return TaskResult(ok=n)

    yield app
    app.close()


@dataclass
class Store:
    """A producer stores tasks or runs: all of a call or nothing."""

    scene: Scene
    act: Callable[[], Any]
    # A call of many cannot be repeated under the same ids.
    repeat: Callable[[Any], Any] | None
    rows: int
    table: str = "horsies_tasks"
    warm_up: Callable[[], Any] = field(default=lambda: None)

    def prepare(self) -> None:
        self.warm_up()
        empty_tables(self.scene.connection)

    def meet(self, fault: Fault | None) -> None:
        stored = self.act()
        self.scene.faults.disarm()
        if isinstance(stored, Ok):
            assert self.count() == self.rows
            return
        assert fault is not None, stored
        assert isinstance(stored, Err)
        self.check_failure(stored.err_value, fault)

    def check_failure(self, error: Any, fault: Fault) -> None:
        assert fault.action is not Action.DELAY
        assert error.retryable is (KINDS[fault.state] is ErrorKind.TRANSIENT)
        if fault.action is Action.ERROR:
            assert self.count() == 0
            assert error.exception.sqlstate == fault.state
        else:
            assert self.count() in (0, self.rows)
        if error.retryable and self.repeat is not None:
            assert self.repeat(error).is_ok()
            assert self.count() == self.rows

    def count(self) -> int:
        found = self.scene.connection.execute(f"SELECT count(*) FROM {self.table}".encode())
        (number,) = found.fetchone() or (0,)
        return int(number)


def ways_to_store(app: Horsies, scene: Scene) -> dict[str, Store]:
    note = app.tasks()["note"]
    many = [note.bind(n) for n in range(3)]
    flow = app.workflow("flow", [note.node(node_id="only")(n=1)], definition_key="flow")
    return {
        "send": Store(scene, lambda: note.send(1), note.retry_send, 1),
        "send_many": Store(scene, lambda: note.send_many(many), None, 3),
        "start": Store(scene, flow.start, flow.retry_start, 1, "horsies_workflows"),
    }


@pytest.mark.parametrize("way", ["send", "send_many", "start"])
@pytest.mark.parametrize(("action", "state"), MAIN_FAULTS, ids=names(MAIN_FAULTS))
def test_what_a_producer_counts_as_stored_is_stored_once(
    scene: Scene, app: Horsies, way: str, action: Action, state: str
) -> None:
    store = ways_to_store(app, scene)[way]
    store.warm_up = store.act
    assert sweep(scene, store, action, state) >= 3


# A tick


class Tick:
    """A scheduler sends the tasks of two due schedules."""

    def __init__(self, scene: Scene, app: Horsies) -> None:
        self.scene = scene
        self.registry = Registry.of(app.config, app.definitions(), "tests:app", app)
        self.pipeline = self.open()

    def open(self) -> Pipeline:
        return Pipeline.open(Database(self.scene.config), "scheduler")

    def prepare(self) -> None:
        connection = self.scene.connection
        empty_tables(connection)
        if self.pipeline.connection.closed:
            self.pipeline = self.open()
        self.pipeline.run_script(store_configured(self.registry, at_start=True))
        self.make_due()
        tick(self.pipeline, self.registry)  # prepares the statements
        self.make_due()

    def make_due(self) -> None:
        connection = self.scene.connection
        connection.execute("DELETE FROM horsies_tasks")
        connection.execute(
            "UPDATE horsies_schedule_state SET run_count = 0, "
            "next_run_at = clock_timestamp() - interval '1 second'"
        )

    def meet(self, fault: Fault | None) -> None:
        try:
            fired = tick(self.pipeline, self.registry).fired
        except psycopg.Error as error:
            self.go_on(error, fault)
        else:
            assert {one.due.name for one in fired} <= {"one", "two"}
        found = self.scene.connection.execute(
            "SELECT state.schedule_name, state.run_count, count(task.id) "
            "FROM horsies_schedule_state AS state LEFT JOIN horsies_tasks AS task USING (schedule_name) "
            "GROUP BY 1, 2 ORDER BY 1"
        )
        assert found.fetchall() == [("one", 1, 1), ("two", 1, 1)]

    def go_on(self, error: psycopg.Error, fault: Fault | None) -> None:
        """As a scheduler does: another session."""
        assert fault is not None, error
        assert kind_of(error) is ErrorKind.TRANSIENT
        assert "pipeline mode" not in str(error)
        self.scene.faults.disarm()
        self.pipeline.connection.close()
        wait_until(lambda: not databases.backends(self.scene.connection, "horsies:scheduler"))
        self.pipeline = self.open()
        tick(self.pipeline, self.registry)


@pytest.mark.parametrize(("action", "state"), MAIN_FAULTS, ids=names(MAIN_FAULTS))
def test_a_tick_sends_every_slot_once(
    scene: Scene, app: Horsies, action: Action, state: str
) -> None:
    conversation = Tick(scene, app)
    try:
        assert sweep(scene, conversation, action, state) > 6
    finally:
        conversation.pipeline.connection.close()
