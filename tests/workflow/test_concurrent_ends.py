"""Two workers and a person at the same runs at the same time: as if they had taken turns.

Whoever changes a tree holds the lock of its root until the commit, so a number taken under that lock
tells the true order. Played to the oracle in that order, what happened must lead to what is stored.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Any

import psycopg
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import Connection

from horsies.ids import new_id
from tests.support.examples import examples
from tests.support.oracle.engine import WORKER, Engine
from tests.support.oracle.graphs import SIGNALS, run_shapes
from tests.support.oracle.pictures import assert_agree
from tests.support.oracle.plans import plan
from tests.support.oracle.rules import Oracle
from tests.support.oracle.shapes import NodeShape, RunShape, fan
from tests.support.oracle.tree import End, Place, failure
from tests.support.wait import wait_until

TAKE = """
UPDATE horsies_tasks AS task SET status = 'RUNNING', generation = task.generation + 1,
    claimed_by_worker_id = %s, started_at = clock_timestamp()
WHERE task.id = ANY(ARRAY(
    SELECT due.id FROM horsies_tasks AS due
    WHERE due.status = 'PENDING' AND NOT due.held
      AND (due.enqueued_at < horsies_never_v1() OR due.workflow_item_index IS NULL)
    ORDER BY random() LIMIT %s FOR UPDATE SKIP LOCKED))
RETURNING workflow_id::text, workflow_node_index, workflow_item_index, kwargs
"""

RUNNING_PLACES = """
SELECT workflow_id::text, workflow_node_index, workflow_item_index FROM horsies_tasks
WHERE status = 'RUNNING' AND workflow_id IN (SELECT horsies_family_v1(%s))
"""

OPEN_RUNS = "SELECT id::text FROM horsies_workflows WHERE status IN ('RUNNING', 'PAUSED')"
IS_STORED = "SELECT 1 FROM horsies_workflows WHERE id = %s"
IS_BUSY = f"""
SELECT EXISTS ({OPEN_RUNS}) OR EXISTS (
    SELECT FROM horsies_tasks WHERE status IN ('PENDING', 'RUNNING'))
"""

CANCELLED = failure("WORKFLOW_CANCELLED")["err"]
concurrent = settings(
    max_examples=examples(20),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@dataclass(slots=True)
class Ledger:
    """What happened, numbered while the tree was locked."""

    numbers: Iterator[int] = field(default_factory=itertools.count)
    acts: list[tuple[int, Callable[[Oracle], object]]] = field(default_factory=list)

    def replay(self) -> Oracle:
        oracle = Oracle()
        for _, act in sorted(self.acts, key=lambda entry: entry[0]):
            act(oracle)
        return oracle

    @contextmanager
    def turn(self, engine: Engine, run_ids: list[str]) -> Iterator[list[Callable[[Oracle], Any]]]:
        """Lock the trees, give a number, and write down what was done once it is committed."""
        done: list[Callable[[Oracle], Any]] = []
        with engine.connection.transaction():
            engine.lock(run_ids)
            number = next(self.numbers)
            yield done
        self.acts += [(number, act) for act in done]


@dataclass(slots=True)
class Crowd:
    """The threads, and what they share."""

    url: str
    shapes: dict[str, RunShape]
    ledger: Ledger = field(default_factory=Ledger)
    ended: threading.Event = field(default_factory=threading.Event)
    failures: list[BaseException] = field(default_factory=list)

    def shape_of(self, place: Place) -> NodeShape:
        return self.shapes[place[0]].nodes[place[1]]

    def work(self, seed: int) -> None:
        """Take tasks and end them until there is nothing left to do."""
        chance = random.Random(seed)
        with psycopg.connect(self.url, autocommit=True) as connection:
            engine = Engine(connection)
            while not self.ended.is_set() and not self.failures:
                taken = connection.execute(TAKE, (WORKER, chance.randint(1, 6))).fetchall()
                ends = [self._end(chance, row[:3], row[3]) for row in taken]
                if ends:
                    self._finish(engine, ends, in_one_update=chance.random() < 0.5)

    def _end(self, chance: random.Random, place: Place, kwargs: str) -> End:
        shape = self.shape_of(place)
        name = f"{place[1]}/{place[2]}"
        if chance.random() < 0.2:
            error = {"error_code": "BOOM", "message": name, "data": None, "exception": None}
            return End(place, "FAILED", {"err": error})
        if shape.child is not None:
            child_id = new_id()
            self.shapes[child_id] = shape.child
            return End(place, "COMPLETED", None, child_id, shape.child)
        if shape.kind == "signal" and kwargs == "{}":
            return End(place, "FAILED", failure("SIGNAL_TIMEOUT"))
        value: Any = list(range(chance.randint(0, 4))) if chance.random() < 0.7 else name
        if shape.kind == "signal":
            value = 7
        return End(place, "COMPLETED", {"ok": value})

    def _finish(self, engine: Engine, ends: list[End], *, in_one_update: bool) -> None:
        with self.ledger.turn(engine, [end.place[0] for end in ends]) as done:
            if in_one_update:
                engine.finish(ends)
                done.append(lambda oracle: oracle.finish(ends))
                return
            engine.finish_turn(ends)
            for good in (True, False):
                part = [end for end in ends if (end.state == "COMPLETED") is good]
                if part:
                    done.append(lambda oracle, part=part: oracle.finish(part))  # type: ignore[misc]

    def steer(self, seed: int, moves: list[str], count: int) -> None:
        """Pause, resume, cancel, retry and signal runs at random."""
        chance = random.Random(seed)
        with psycopg.connect(self.url, autocommit=True) as connection:
            engine = Engine(connection)
            for _ in range(count):
                run_id = chance.choice(list(self.shapes))
                # Asked before the lock: a run whose plan is on the way cannot be locked, and the number
                # would be that of a moment at which others still change its tree.
                if connection.execute(IS_STORED, (run_id,)).fetchone() is None:
                    continue
                with self.ledger.turn(engine, [run_id]) as done:
                    act = self._steered(engine, run_id, chance.choice(moves), chance)
                    if act is not None:
                        done += [self._taken(connection, run_id), act]

    def _taken(self, connection: Connection[Any], run_id: str) -> Callable[[Oracle], object]:
        """Taking a task needs no lock of a tree: what a person met as running was taken before."""
        running = connection.execute(RUNNING_PLACES, (run_id,)).fetchall()
        return lambda oracle: oracle.claim(running, "RUNNING")

    def _steered(
        self, engine: Engine, run_id: str, move: str, chance: random.Random
    ) -> Callable[[Oracle], object] | None:
        match move:
            case "pause":
                engine.pause(run_id)
                return lambda oracle: oracle.pause(run_id)
            case "resume":
                engine.resume(run_id)
                return lambda oracle: oracle.resume(run_id)
            case "retry":
                engine.retry(run_id)
                return lambda oracle: oracle.retry(run_id)
            case "signal":
                name = chance.choice(SIGNALS)
                engine.signal(run_id, name, 7)
                return lambda oracle: oracle.signal(run_id, name, 7)
            case "cancel":
                engine.cancel(run_id, CANCELLED)
                return lambda oracle: oracle.cancel(run_id, CANCELLED)
            case "cancel task":
                return self._cancel_task(engine, run_id, chance)
            case _:
                raise AssertionError(move)

    def _cancel_task(
        self, engine: Engine, run_id: str, chance: random.Random
    ) -> Callable[[Oracle], object] | None:
        pending = engine.connection.execute(
            "SELECT workflow_id::text, workflow_node_index, workflow_item_index FROM horsies_tasks "
            "WHERE workflow_id = %s AND status = 'PENDING'",
            (run_id,),
        ).fetchall()
        if not pending:
            return None
        place = chance.choice(pending)
        if not engine.cancel_task(place):
            return None
        return lambda oracle: oracle.finish([End(place, "CANCELLED")])

    def run(self, seed: int, moves: list[str], count: int) -> None:
        """Let everybody do their part, then resume until every run has ended."""
        threads = [
            threading.Thread(target=self._guarded, args=(self.work, seed)),
            threading.Thread(target=self._guarded, args=(self.work, seed + 1)),
        ]
        person = threading.Thread(target=self._guarded, args=(self.steer, seed + 2, moves, count))
        for thread in [*threads, person]:
            thread.start()
        try:
            person.join()
            self._resume_until_the_end()
        finally:
            self.ended.set()
            for thread in threads:
                thread.join()
        assert self.failures == []

    def _guarded(self, target: Callable[..., None], *arguments: Any) -> None:
        try:
            target(*arguments)
        except BaseException as error:
            self.failures.append(error)

    def _resume_until_the_end(self) -> None:
        with psycopg.connect(self.url, autocommit=True) as connection:
            engine = Engine(connection)

            def has_ended() -> bool:
                for (run_id,) in connection.execute(OPEN_RUNS).fetchall():
                    with self.ledger.turn(engine, [run_id]) as done:
                        engine.resume(run_id)
                        done.append(lambda oracle, run_id=run_id: oracle.resume(run_id))  # type: ignore[misc]
                is_busy = connection.execute(IS_BUSY).fetchone()
                return bool(self.failures) or is_busy == (False,)

            wait_until(has_ended, 60)


def heard_until_now(
    connection: Connection[Any], listener: Connection[Any], channel: str
) -> list[str]:
    """Return all notifications of transactions that have ended; one of our own comes behind them."""
    connection.execute(f"NOTIFY {channel}, 'the last one'".encode())
    heard = (note.payload for note in listener.notifies(timeout=30))
    return list(takewhile(lambda payload: payload != "the last one", heard))


def play(
    connection: Connection[Any], url: str, shapes: list[RunShape], seed: int, moves: list[str]
) -> tuple[Oracle, Counter[str]]:
    """Start runs, let the crowd loose on them, and compare; return how often each run ended."""
    connection.execute("TRUNCATE horsies_tasks, horsies_workflows CASCADE")
    runs = {new_id(): shape for shape in shapes}
    crowd = Crowd(url, dict(runs))
    for run_id, shape in runs.items():
        act = lambda oracle, run_id=run_id, shape=shape: oracle.start(run_id, shape)  # noqa: E731
        crowd.ledger.acts.append((next(crowd.ledger.numbers), act))
    deadlocks = _deadlocks(connection)
    with psycopg.connect(url, autocommit=True) as listener:
        listener.execute("LISTEN horsies_workflow_status")
        Engine(connection).start_many([plan(run_id, shape) for run_id, shape in runs.items()])
        crowd.run(seed, moves, 25)
        heard = heard_until_now(connection, listener, "horsies_workflow_status")
    oracle = crowd.ledger.replay()
    assert_agree(connection, oracle)
    assert _deadlocks(connection) == deadlocks
    ends = ("COMPLETED", "FAILED", "CANCELLED", "EXPIRED")
    return oracle, Counter(note.split(" ")[0] for note in heard if note.endswith(ends))


def _deadlocks(connection: Connection[Any]) -> int:
    found = connection.execute(
        "SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()"
    ).fetchone()
    assert found is not None
    return int(found[0])


@concurrent
@given(
    shapes=st.lists(run_shapes(most=12), min_size=1, max_size=3),
    seed=st.integers(0, 1_000_000),
)
def test_two_workers_and_a_person_act_as_if_in_turns_and_runs_end_once(
    connection: Connection[Any], process_url: str, shapes: list[RunShape], seed: int
) -> None:
    moves = ["pause", "resume", "resume", "signal", "cancel task", "cancel"]
    oracle, ends = play(connection, process_url, shapes, seed, moves)
    assert ends == Counter(dict.fromkeys(oracle.runs, 1))


@concurrent
@given(
    shapes=st.lists(run_shapes(most=12), min_size=1, max_size=3),
    seed=st.integers(0, 1_000_000),
)
def test_retries_in_between_agree_as_well(
    connection: Connection[Any], process_url: str, shapes: list[RunShape], seed: int
) -> None:
    play(connection, process_url, shapes, seed, ["pause", "resume", "retry", "retry", "signal"])


def test_a_wide_run_ended_by_two_workers_ends_once(
    connection: Connection[Any], process_url: str
) -> None:
    oracle, ends = play(connection, process_url, [fan(200), fan(200)], 7, ["pause", "resume"])
    assert ends == Counter(dict.fromkeys(oracle.runs, 1))
