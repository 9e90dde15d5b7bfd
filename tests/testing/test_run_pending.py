"""run_pending: everything that is due in the database runs in the test's process."""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import Iterator
from datetime import UTC, datetime, time, timedelta
from typing import Any

import psycopg
import pytest

from horsies import (
    INJECTED,
    AnyNode,
    AppConfig,
    AsyncTaskTransaction,
    DailySchedule,
    Horsies,
    IntervalSchedule,
    MonthlySchedule,
    OutcomeCode,
    PostgresConfig,
    RetryPolicy,
    ScheduleConfig,
    SignalNode,
    SleepNode,
    TableStore,
    TaskSchedule,
    TaskStatus,
    TaskTransaction,
    WorkflowStatus,
    current_task,
    from_node,
)
from horsies.testing import PendingRun, clock_of, run_pending, run_pending_async
from tests.support.database import Database

HOUR = timedelta(hours=1)


def test_due_tasks_run_in_this_process_in_their_order(app: Horsies) -> None:
    ran: list[tuple[int, int]] = []

    @app.task("note")
    def note(number: int) -> int:
        ran.append((number, os.getpid()))
        return number

    handles = note.send_many([note.bind(number) for number in range(3)]).unwrap()
    done = run_pending(app)
    assert ran == [(number, os.getpid()) for number in range(3)]
    assert [one.result(timeout_ms=30_000) for one in handles] == [0, 1, 2]
    assert (done.completed, done.failed, done.retried) == (3, 0, 0)
    assert [(one.task, one.task_id, one.number) for one in done.attempts] == [
        ("note", handle.task_id, 1) for handle in handles
    ]
    assert run_pending(app).attempts == []


def test_tasks_that_tasks_send_run_too(app: Horsies) -> None:
    @app.task("count_down")
    def count_down(number: int) -> None:
        if number:
            count_down.enqueue(number - 1)

    count_down.enqueue(3)
    assert run_pending(app).completed == 4


def test_tasks_of_an_application_with_a_store_run(process_url: str, connection: Database) -> None:
    broker = PostgresConfig(database_url=process_url, store=TableStore(), store_above_bytes=1_000)
    app = Horsies(AppConfig(broker=broker))

    @app.task("repeat")
    def repeat(text: str) -> str:
        return text * 2

    @app.task("repeat_async")
    async def repeat_async(text: str) -> str:
        return text * 2

    sent = [
        task.send(text).unwrap() for task in (repeat, repeat_async) for text in ("x", "x" * 3_000)
    ]
    assert run_pending(app).completed == len(sent)
    assert [len(one.result(timeout_ms=30_000)) for one in sent] == [2, 6_000] * 2
    app.close()


def test_tasks_with_keys_run_too(app: Horsies) -> None:
    ran = list[str]()

    @app.task("serve", key="customer")
    def serve(customer: str) -> None:
        ran.append(customer)

    @app.task("plain")
    def plain() -> None:
        ran.append("")

    for customer in ("acme", "acme", "other"):
        serve.enqueue(customer)
    plain.enqueue()
    serve.with_options(delay=HOUR).enqueue("later")
    run_pending(app)
    assert sorted(ran) == ["", "acme", "acme", "other"]
    clock_of(app).advance(2 * HOUR)
    run_pending(app)
    assert ran[-1] == "later"


def test_tasks_without_end_are_refused(app: Horsies) -> None:
    @app.task("again")
    def again() -> None:
        again.enqueue()

    again.enqueue()
    with pytest.raises(RuntimeError, match="do tasks send each other"):
        run_pending(app, limit=5)


def test_as_many_attempts_as_the_limit_are_not_too_many(app: Horsies) -> None:
    @app.task("note")
    def note() -> None:
        return None

    note.send_many([note.bind(), note.bind()]).unwrap()
    assert run_pending(app, limit=2).completed == 2


def test_the_row_and_its_attempts_are_those_of_a_worker(app: Horsies) -> None:
    @app.task("fail", retry_policy=RetryPolicy.fixed([3_600], auto_retry_for=[OSError]))
    def fail() -> None:
        raise OSError("gone")

    handle = fail.enqueue()
    first = run_pending(app)
    assert [one.outcome for one in first.attempts] == ["retried"]
    waiting = handle.info(include_attempts=True).unwrap()
    assert waiting is not None
    assert waiting.status is TaskStatus.PENDING
    clock_of(app).advance(HOUR)
    second = run_pending(app)
    assert [(one.number, one.outcome) for one in second.attempts] == [(2, "failed")]
    ended = handle.info(include_attempts=True).unwrap()
    assert ended is not None
    assert ended.status is TaskStatus.FAILED
    assert [one.attempt for one in ended.attempts or ()] == [2, 1]


def test_delays_pass_when_the_clock_advances(app: Horsies) -> None:
    @app.task("later")
    def later() -> None:
        return None

    clock = clock_of(app)
    later.schedule(1_800).unwrap()
    later.with_options(at=datetime.now(UTC) + 3 * HOUR).enqueue()
    assert run_pending(app).completed == 0
    clock.advance(HOUR)
    assert run_pending(app).completed == 1
    later.with_options(delay=HOUR).enqueue()
    clock.advance(HOUR)
    assert run_pending(app).completed == 1
    clock.advance(HOUR)
    assert run_pending(app).completed == 1
    assert clock.offset == 3 * HOUR
    assert abs(clock.now() - datetime.now(UTC) - 3 * HOUR) < timedelta(minutes=1)


def test_deadlines_pass_too(app: Horsies) -> None:
    @app.task("fresh")
    def fresh() -> None:
        return None

    handle = fresh.with_options(good_until=datetime.now(UTC) + HOUR).enqueue()
    clock_of(app).advance(2 * HOUR)
    done = run_pending(app)
    assert (done.expired, done.attempts) == (1, [])
    assert handle.get(timeout_ms=30_000).err_value.error_code is OutcomeCode.TASK_EXPIRED


def test_time_does_not_go_back(app: Horsies) -> None:
    with pytest.raises(ValueError, match="time goes forward"):
        clock_of(app).advance(-HOUR)
    with pytest.raises(ValueError, match="takes the timedelta that passes, not 5"):
        clock_of(app).advance(5)  # type: ignore[arg-type]


def test_time_does_not_go_further_than_its_tasks_can_wait(app: Horsies) -> None:
    clock_of(app).advance(timedelta(days=36_500))
    for much in (timedelta.max, timedelta(days=365)):
        with pytest.raises(ValueError, match="by 100 years at most"):
            clock_of(app).advance(much)
    assert run_pending(app).attempts == []


def test_a_workflow_advances_to_its_end(app: Horsies) -> None:
    @app.task("one")
    def one() -> int:
        return 1

    @app.task("double")
    async def double(number: int) -> int:
        assert current_task().workflow_id is not None
        return 2 * number

    first = one.node()()
    pause = SleepNode(3_600, waits_for=[first])
    approval = SignalNode("approve", value_type=int, waits_for=[pause])
    last = double.node()(number=from_node(approval))
    nodes: list[AnyNode] = [first, pause, approval, last]
    handle = app.workflow("slow", nodes, output=last, definition_key="slow.v1").start().unwrap()
    assert run_pending(app).completed == 1
    clock_of(app).advance(HOUR)
    run_pending(app)
    assert handle.status().unwrap() is WorkflowStatus.RUNNING
    handle.signal("approve", 21).unwrap()
    run_pending(app)
    assert handle.result(timeout_ms=30_000) == 42


def test_exceptions_are_reraised_after_the_outcome_is_stored(app: Horsies) -> None:
    @app.task("broken")
    def broken() -> None:
        raise LookupError("original")

    handle = broken.enqueue()
    with pytest.raises(LookupError, match="original"):
        run_pending(app, reraise=True)
    assert "original" in str(handle.get(timeout_ms=30_000).err_value.message)


def test_a_task_that_the_application_does_not_have_stays_in_its_queue(app: Horsies) -> None:
    @app.task("known")
    def known() -> int:
        return 1

    other = app.enqueue_by_name("of_another_service")
    known.enqueue()
    assert [one.task for one in run_pending(app).attempts] == ["known"]
    info = other.info().unwrap()
    assert info is not None
    assert info.status is TaskStatus.PENDING


def test_a_paused_queue_is_left_alone(app: Horsies) -> None:
    @app.task("work")
    def work() -> None:
        return None

    work.enqueue()
    app.pause_queue("default").unwrap()
    assert run_pending(app).attempts == []
    app.resume_queue("default").unwrap()
    assert run_pending(app).completed == 1


def test_async_tasks_run_on_the_event_loop_of_the_test(app: Horsies) -> None:
    loops: list[Any] = []

    @app.task("loop")
    async def loop() -> None:
        await asyncio.sleep(0)
        loops.append(asyncio.get_running_loop())

    async def main() -> None:
        await loop.enqueue_async()
        assert (await run_pending_async(app)).completed == 1
        assert loops == [asyncio.get_running_loop()]
        await app.close_async()

    asyncio.run(main())
    loop.enqueue()
    assert run_pending(app).completed == 1


def schedule(name: str, pattern: Any, **more: Any) -> TaskSchedule:
    return TaskSchedule(name=name, task_name="tick", pattern=pattern, **more)


@pytest.fixture
def scheduled(process_url: str, connection: Database) -> Iterator[Any]:
    """Make an application with these schedules; its task notes the slots."""
    made: list[Horsies] = []

    def make(*schedules: TaskSchedule) -> tuple[Horsies, list[datetime]]:
        broker = PostgresConfig(database_url=process_url)
        app = Horsies(AppConfig(broker=broker, schedule=ScheduleConfig(schedules=list(schedules))))
        made.append(app)
        slots: list[datetime] = []

        @app.task("tick")
        def tick() -> None:
            slot = current_task().slot
            assert slot is not None
            slots.append(slot.astimezone(UTC))

        return app, slots

    yield make
    for app in made:
        app.close()


def test_a_schedule_fires_when_its_slot_has_come(scheduled: Any) -> None:
    app, slots = scheduled(schedule("often", IntervalSchedule(hours=1)))
    assert run_pending(app).slots == 0
    clock = clock_of(app)
    for count in range(1, 4):
        clock.advance(HOUR + timedelta(minutes=1))
        done = run_pending(app)
        assert (done.slots, done.completed) == (1, 1)
        assert len(slots) == count
    assert all(later - earlier >= HOUR for earlier, later in itertools.pairwise(slots))


def test_a_schedule_fires_after_its_pause_however_the_clock_advances(scheduled: Any) -> None:
    app, slots = scheduled(schedule("often", IntervalSchedule(hours=1)))
    run_pending(app)
    clock = clock_of(app)
    app.schedules.pause("often").unwrap()
    clock.advance(HOUR + timedelta(minutes=1))
    app.schedules.resume("often").unwrap()
    assert run_pending(app).slots == 0  # the slot of the pause is dropped
    clock.advance(HOUR + timedelta(minutes=1))
    assert run_pending(app).slots == 1
    assert len(slots) == 1


def test_slots_keep_to_the_calendar(scheduled: Any) -> None:
    monthly = schedule("monthly", MonthlySchedule(day=1, time=time(4, 30)))
    daily = schedule("daily", DailySchedule(time=time(4, 30)))
    app, slots = scheduled(monthly, daily)
    run_pending(app)
    clock = clock_of(app)
    for days in (1, 1, 31):
        clock.advance(timedelta(days=days))
        assert run_pending(app).slots
        assert timedelta() <= clock.now() - max(slots) < timedelta(days=1, minutes=1)
    assert {(slot.hour, slot.minute) for slot in slots} == {(4, 30)}
    assert any(slot.day == 1 for slot in slots)


def test_a_scheduled_task_commits_its_effects_with_its_outcome(
    scheduled: Any, connection: Database
) -> None:
    connection.execute("DROP TABLE IF EXISTS booked; CREATE TABLE booked (slot timestamptz)")
    often = TaskSchedule(name="often", task_name="book", pattern=IntervalSchedule(hours=1))
    app: Horsies = scheduled(often)[0]

    @app.task("book")
    def book(tx: TaskTransaction = INJECTED) -> None:
        tx.connection.execute("INSERT INTO booked VALUES (%s)", (current_task().slot,))

    run_pending(app)
    for _ in range(2):
        clock_of(app).advance(HOUR + timedelta(minutes=1))
        assert run_pending(app).completed == 1
    rows = connection.execute(
        "SELECT count(*) FROM booked JOIN horsies_tasks ON slot = scheduled_for "
        "WHERE status = 'COMPLETED'"
    ).fetchall()
    assert rows == [(2,)]
    connection.execute("DROP TABLE booked")


BOOK = "INSERT INTO booked VALUES (%s)"


def refuse_below_zero(number: int) -> int:
    if number < 0:
        raise ValueError("no")
    return number


def define_booking(app: Horsies, way: str, url: str) -> Any:
    """A task that writes a number through `tx`, or records its outcome in a transaction of its own."""

    @app.task("tx")
    def book(number: int, tx: TaskTransaction = INJECTED) -> int:
        tx.connection.execute(BOOK, (number,))
        return refuse_below_zero(number)

    @app.task("async tx")
    async def book_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> int:
        connection = await tx.connection()
        await connection.execute(BOOK, (number,))
        return refuse_below_zero(number)

    @app.task("record_in")
    def record(number: int, tx: TaskTransaction = INJECTED) -> int:
        with psycopg.connect(url) as connection:
            connection.execute(BOOK, (number,))
            return tx.record_in(connection, refuse_below_zero(number))

    @app.task("async record_in")
    async def record_async(number: int, tx: AsyncTaskTransaction = INJECTED) -> int:
        async with await psycopg.AsyncConnection.connect(url) as connection:
            await connection.execute(BOOK, (number,))
            return await tx.record_in(connection, refuse_below_zero(number))

    tasks = {one.task_name: one for one in (book, book_async, record, record_async)}
    return tasks[way]


async def on_a_loop(app: Horsies) -> PendingRun:
    done = await run_pending_async(app)
    await app.close_async()
    return done


@pytest.mark.parametrize("is_on_loop", [False, True])
@pytest.mark.parametrize("way", ["tx", "async tx", "record_in", "async record_in"])
def test_a_transaction_commits_with_the_outcome_or_is_rolled_back(
    app: Horsies, connection: Database, process_url: str, way: str, is_on_loop: bool
) -> None:
    connection.execute("DROP TABLE IF EXISTS booked; CREATE TABLE booked (number int)")
    book = define_booking(app, way, process_url)
    handles = [book.enqueue(1), book.enqueue(-1)]
    done = asyncio.run(on_a_loop(app)) if is_on_loop else run_pending(app)
    assert (done.completed, done.failed) == (1, 1)
    assert handles[0].result() == 1
    assert connection.execute("SELECT number FROM booked").fetchall() == [(1,)]
    rows = connection.execute("SELECT outcome FROM horsies_task_attempts ORDER BY 1").fetchall()
    assert rows == [("COMPLETED",), ("FAILED",)]
    connection.execute("DROP TABLE booked")
