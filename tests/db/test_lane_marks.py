"""The claim by marks of lanes: it looks behind them first, in front of them soon, and loses nothing."""

from __future__ import annotations

import json
from collections import defaultdict
from contextlib import closing
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from horsies.db.pipeline import Pipeline
from horsies.db.statements.turn import (
    ClaimedTask,
    ReleaseUnstarted,
    claim_tasks,
    release_unstarted,
)
from horsies.worker import busy_lanes
from horsies.worker.busy_lanes import NO_MARKS
from horsies.worker.keyed import KeyRings
from horsies.worker.turn import EVERYWHERE, EVERYWHERE_SECONDS, Bookmarks, Claimer, TurnRequest
from tests.support.database import Database
from tests.support.examples import examples
from tests.support.keys import OFFER, add_keyed, add_many_keyed, end, limit, retry
from tests.support.notifications import SENTINEL, Ears
from tests.support.rows import add_task, ago

QUEUES = ["default"]


@pytest.fixture(autouse=True)
def _marks_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first task of a lane marks it, and every search from the fronts counts as slow."""
    monkeypatch.setattr(busy_lanes, "MARKED_AFTER", 1)
    monkeypatch.setattr(busy_lanes, "SLOW_SEARCH_US", -1)
    monkeypatch.setattr(busy_lanes, "SLOW_SEARCHES", 1)


class Taker:
    """A worker's claims by keys on a clock of the test's own, with its marks."""

    def __init__(self, connection: Database, *, is_async: bool = False) -> None:
        self.claimer = Claimer("w", "host", QUEUES, [None])
        self.is_async = True if is_async else None
        self.bookmarks, self.rings = Bookmarks(QUEUES), KeyRings(QUEUES)
        self.rings.note_keyed(QUEUES)
        self.now = 1_000.0
        self.searched_everywhere = False
        self._pipeline = Pipeline(connection, prepared=False)

    def request(self, children: int) -> TurnRequest:
        marks = self.rings.marks()
        positions = self.bookmarks.positions(self.now, has_lane_marks=bool(marks.lanes))
        return TurnRequest(
            pids=list(range(1, children + 1)),
            positions=positions,
            cursors=self.rings.cursors(),
            lane_marks=NO_MARKS if positions is EVERYWHERE else marks,
            is_async=self.is_async,
        )

    def take(self, children: int = 1, **more: Any) -> list[ClaimedTask]:
        request = self.request(children)._replace(**more)
        rows = self._pipeline.run([self.claimer.claim_step(request)])[0]
        claimed = [row for row in rows if row.id]
        self.searched_everywhere = self.bookmarks.note_claim(
            request.positions,
            claimed,
            was_short=len(claimed) < children,
            span=(self.now, self.now),
        )
        answers = [row for row in rows if not row.id]
        self.rings.note_claim(answers, {task.queue_name for task in claimed}, self.now)
        self.rings.note_taken(claimed)
        return claimed

    def names(self, children: int = 1) -> list[str]:
        return [task.task_name for task in self.take(children)]


@pytest.fixture
def taker(connection: Database) -> Taker:
    return Taker(connection)


def add_named(connection: Database, *names: str, **columns: Any) -> None:
    for name in names:
        add_keyed(connection, "a", task_name=name, **columns)


def test_a_task_in_front_of_a_mark_is_claimed_within_the_bound(
    connection: Database, taker: Taker
) -> None:
    add_named(connection, "first", "second", "third", "fourth")
    assert taker.names() == ["first"]
    add_named(connection, "older", enqueued_at=ago(120))
    assert taker.names() == ["second"]
    taker.now += EVERYWHERE_SECONDS
    assert taker.names() == ["older"]
    assert taker.names(9) == ["third", "fourth"]


def test_a_task_in_front_of_a_mark_that_was_notified_is_claimed_next(
    connection: Database, taker: Taker
) -> None:
    add_named(connection, "first", "second")
    assert taker.names() == ["first"]
    add_named(connection, "urgent", priority=1)
    taker.bookmarks.note_news()
    assert taker.names() == ["urgent"]


def test_a_short_claim_searches_the_fronts_as_well(connection: Database, taker: Taker) -> None:
    add_named(connection, "first", "second")
    assert taker.names() == ["first"], "a task without a key might have the first turn"
    add_task(connection, task_name="plain")
    add_named(connection, "older", enqueued_at=ago(120))
    assert sorted(taker.names(4)) == ["older", "plain", "second"]
    assert taker.searched_everywhere


def test_a_mark_in_one_queue_does_not_hide_a_lane_beside_it(
    connection: Database, taker: Taker
) -> None:
    add_named(connection, "first", "second", "third")
    assert taker.names() == ["first"]
    for key in "bcd":
        add_keyed(connection, key, enqueued_at=ago(120))
    found = [task.task_name for _ in range(2) for task in taker.take(2)]
    assert sorted(found) == ["second", "work", "work", "work"]


def test_caps_hold_when_a_claim_searches_twice(connection: Database, taker: Taker) -> None:
    limit(connection, max_concurrency=2)
    add_keyed(connection, "a", 2)
    assert len(taker.take(1)) == 1
    add_keyed(connection, "a", 3, enqueued_at=ago(120))
    assert len(taker.take(8)) == 1, "one behind the mark, and none in front of it"


@pytest.mark.parametrize(
    ("sent", "unknown", "taken", "expected"),
    [
        pytest.param(["urgent", "other"], [], ["other"], [OFFER], id="another lane is taken"),
        pytest.param(["urgent"], ["urgent"], [], [OFFER], id="the task is for another worker"),
        pytest.param(["urgent"], [], ["urgent"], [], id="the task is found in front"),
        pytest.param([], [], [], [], id="nothing waits"),
    ],
)
def test_a_place_of_a_marked_lane_is_offered_for_a_task_in_front_of_the_mark(
    connection: Database,
    process_url: str,
    taker: Taker,
    sent: list[str],
    unknown: list[str],
    taken: list[str],
    expected: list[tuple[str, str]],
) -> None:
    limit(connection, "a", max_concurrency=1)
    add_named(connection, "first")
    (first,) = taker.take()
    for name in sent:
        key, priority = ("a", 1) if name == "urgent" else ("b", 100)
        add_keyed(connection, key, task_name=name, priority=priority)
    end(connection, first)
    assert first.lane in taker.request(1).lane_marks.lanes
    with closing(Ears(process_url, ("task_queue_default", SENTINEL))) as ears:
        claimed = taker.take(freed_lanes=[("default", first.lane)], unknown_names=unknown)
        assert [task.task_name for task in claimed] == taken
        assert ears.heard() == expected


def keep_statistics(connection: Database) -> None:
    """Analyze no table until the test ends: a statement that is planned anew reads pages of dead entries."""
    connection.execute("ALTER TABLE horsies_tasks SET (autovacuum_enabled = off)")
    connection.execute("ALTER TABLE horsies_lanes SET (autovacuum_enabled = off)")


def pages_read(connection: Database, taker: Taker, **more: Any) -> int:
    """Count the pages that the next claim of one task looks at, without claiming it."""
    claim = taker.claimer.claim(taker.request(1)._replace(**more))
    values = {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in claim_tasks.mapping(claim).items()
    }
    with connection.transaction(force_rollback=True):
        ((plan,),) = connection.execute(
            f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {claim_tasks.text}".encode(),
            values,
        ).fetchall()
    plan = plan if isinstance(plan, list) else json.loads(plan)
    return int(plan[0]["Plan"]["Shared Hit Blocks"]) + int(plan[0]["Plan"]["Shared Read Blocks"])


@pytest.mark.parametrize("columns", [None, {"rate_seconds": 1e-6, "rate_burst": 1000}])
def test_a_lane_costs_the_same_after_many_tasks_beside_an_open_transaction(
    connection: Database, process_url: str, taker: Taker, columns: dict[str, Any] | None
) -> None:
    keep_statistics(connection)
    if columns:
        limit(connection, **columns)
    add_many_keyed(connection, "noisy", 9_700)
    with psycopg.connect(process_url) as snapshot:
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM horsies_tasks")
        assert len(taker.take(32)) == 32
        first = pages_read(connection, taker)
        for _ in range(48):
            assert len(taker.take(200)) == 200
        last = pages_read(connection, taker)
        taker.bookmarks.note_news()
        everywhere = pages_read(connection, taker)
    print(f"{first} pages at first, {last} after 9,632 tasks, {everywhere} from the front")
    assert last <= 1.5 * first
    assert everywhere > 3 * last, "the dead entries are there"


def test_the_offer_of_a_place_reads_no_dead_entries_beside_an_open_transaction(
    connection: Database, process_url: str, taker: Taker
) -> None:
    keep_statistics(connection)
    add_many_keyed(connection, "noisy", 3_000)
    with psycopg.connect(process_url) as snapshot:
        snapshot.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        snapshot.execute("SELECT count(*) FROM horsies_tasks")
        for _ in range(15):
            claimed = taker.take(200)
            assert len(claimed) == 200
        limit(connection, "noisy", max_concurrency=3_000)
        add_keyed(connection, "b")
        freed = [("default", claimed[-1].lane)]
        without = pages_read(connection, taker)
        offered = pages_read(connection, taker, freed_lanes=freed)
        searched = pages_read(connection, taker, freed_lanes=freed, lane_marks=NO_MARKS)
    print(f"{without} pages without an offer, {offered} with one, {searched} with a search")
    assert offered <= 2 * without
    assert searched > 3 * offered, "the dead entries are there"


class Lanes:
    """What a claim may take, by plain reading of the rows, and what was put into lanes since the last
    search everywhere.
    """

    def __init__(self, connection: Database) -> None:
        self.connection = connection
        self.fresh: set[str] = set()

    def waiting(self) -> dict[str, list[str]]:
        """The ids of the tasks that may start, by key and in order."""
        found: dict[str, list[str]] = defaultdict(list)
        rows = self.connection.execute(
            "SELECT task.lane_key, task.id::text FROM horsies_tasks AS task "
            "WHERE task.status = 'PENDING' AND NOT EXISTS (SELECT FROM horsies_lanes AS stored "
            "  WHERE stored.lane = task.lane AND stored.paused_at IS NOT NULL) "
            "ORDER BY task.priority, task.enqueued_at, task.id"
        )
        for key, task_id in rows.fetchall():
            found[key].append(task_id)
        return found

    def check(self, before: dict[str, list[str]], taken: list[str], taker: Taker) -> None:
        """Only tasks that are new since the last search everywhere may have been passed over."""
        if taker.searched_everywhere:
            self.fresh.clear()
        for ids in before.values():
            mine = [number for number, one in enumerate(ids) if one in taken]
            passed = {one for one in ids[: max(mine, default=0)] if one not in taken}
            assert passed <= self.fresh


STEPS = st.one_of(
    st.tuples(
        st.just("send"), st.sampled_from("abc"), st.sampled_from([1, 5, 100]), st.integers(0, 60)
    ),
    st.tuples(st.just("take"), st.integers(1, 4)),
    st.tuples(st.sampled_from(["retry", "release", "end", "cancel"]), st.integers(0, 9)),
    st.tuples(st.sampled_from(["pause", "resume"]), st.sampled_from("abc")),
    st.tuples(st.sampled_from(["wait", "news"])),
)


def change(
    connection: Database,
    step: tuple[Any, ...],
    running: list[ClaimedTask],
    task_options: str | None,
) -> set[str]:
    """Carry out a step that is not a claim; return the tasks that it put into lanes."""
    match step:
        case ("send", key, priority, seconds):
            columns = {"priority": priority, "enqueued_at": ago(seconds)}
            before = ids_of(connection)
            add_keyed(connection, key, task_options=task_options, **columns)
            return ids_of(connection) - before
        case ("cancel", number):
            waiting = sorted(ids_of(connection))
            connection.execute(
                "UPDATE horsies_tasks SET status = 'CANCELLED' WHERE id = ANY(%s::uuid[])",
                (waiting[number : number + 1],),
            )
        case ("pause", key):
            connection.execute(
                "UPDATE horsies_lanes SET paused_at = now() WHERE lane_key = %s", [key]
            )
        case ("resume", key):
            connection.execute(
                "UPDATE horsies_lanes SET paused_at = NULL WHERE lane_key = %s", [key]
            )
            return ids_of(connection)
        case (what, number) if number < len(running):
            return take_back(connection, what, running.pop(number), running)
    return set()


def take_back(
    connection: Database, what: str, task: ClaimedTask, running: list[ClaimedTask]
) -> set[str]:
    if what == "end":
        end(connection, task)
        return set()
    if what == "retry":
        retry(connection, task, 0)
    else:
        held = ReleaseUnstarted(
            "w", [one.id for one in running], [one.generation for one in running]
        )
        assert release_unstarted.run(connection, held)
    return {task.id}


def ids_of(connection: Database) -> set[str]:
    query = "SELECT id::text FROM horsies_tasks WHERE status = 'PENDING'"
    return {task_id for (task_id,) in connection.execute(query).fetchall()}


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(steps=st.lists(STEPS, max_size=40), is_fifo=st.booleans(), is_async=st.booleans())
def test_whatever_happens_to_tasks_they_are_claimed_in_order_and_none_is_forgotten(
    connection: Database, steps: list[tuple[Any, ...]], is_fifo: bool, is_async: bool
) -> None:
    connection.execute("TRUNCATE horsies_tasks, horsies_lanes CASCADE")
    for key in "abc":
        limit(connection, key, is_fifo=is_fifo)
    taker, lanes = Taker(connection, is_async=is_async), Lanes(connection)
    task_options = '{"async":true}' if is_async else None
    running: list[ClaimedTask] = []
    for step in steps:
        match step:
            case ("wait",):
                taker.now += EVERYWHERE_SECONDS
            case ("news",):
                taker.bookmarks.note_news()
            case ("take", children):
                before = lanes.waiting()
                claimed = taker.take(children)
                taken = [task.id for task in claimed]
                if is_fifo:
                    busy = {task.lane for task in running}
                    assert not busy & {task.lane for task in claimed}
                    assert set(taken) <= {ids[0] for ids in before.values()}
                else:
                    assert len(taken) == min(children, sum(map(len, before.values())))
                    lanes.check(before, taken, taker)
                running += claimed
            case _:
                lanes.fresh |= change(connection, step, running, task_options)
    drain(connection, taker, running)
    assert not ids_of(connection)


def drain(connection: Database, taker: Taker, running: list[ClaimedTask]) -> None:
    """End everything; a claim that finds nothing ends it."""
    connection.execute("UPDATE horsies_lanes SET paused_at = NULL")
    end(connection, *running)
    while claimed := taker.take(5):
        end(connection, *claimed)
