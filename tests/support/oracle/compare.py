"""Applies every action to both the oracle and the database, and compares their results."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from psycopg import Connection

from horsies.ids import new_id
from tests.support.oracle.engine import Engine
from tests.support.oracle.pictures import assert_agree
from tests.support.oracle.plans import plan
from tests.support.oracle.rules import Oracle
from tests.support.oracle.shapes import RunShape
from tests.support.oracle.tree import NOTHING_YET, End, Node, Place, Result, Work, failure

READ_TASKS = """
SELECT id::text, workflow_id::text, workflow_node_index, workflow_item_index,
    enqueued_at, enqueued_at > clock_timestamp()
FROM horsies_tasks WHERE workflow_id = ANY(%s::uuid[]) AND NOT id = ANY(%s::uuid[])
"""


class Duet:
    """Any number of runs, both in memory and in the database."""

    def __init__(self, connection: Connection[Any], step: int = 1_000) -> None:
        self.connection = connection
        self.engine = Engine(connection)
        self.oracle = Oracle(step)
        self._seen: list[str] = []
        self._numbers = itertools.count()

    def start(self, *shapes: RunShape) -> list[str]:
        """Start runs with one statement."""
        ids = [new_id() for _ in shapes]
        plans = [plan(run_id, shape) for run_id, shape in zip(ids, shapes, strict=True)]
        started = self.engine.start_many(plans)
        assert [(row.id, row.created) for row in started] == [(run_id, True) for run_id in ids]
        for run_id, shape in zip(ids, shapes, strict=True):
            self.oracle.start(run_id, shape)
        return ids

    def start_one(self, shape: RunShape) -> str:
        (run_id,) = self.start(shape)
        return run_id

    # The possible work

    def places(self, *states: str) -> list[Place]:
        """Return the tasks in these states, in a fixed order."""
        return [place for place, work in self._works() if work.state in states]

    def claimable(self) -> list[Place]:
        """Return the tasks that a worker might claim."""
        return [
            place
            for place, work in self._works()
            if work.state in {"PENDING", "CLAIMED"}
            and not work.parked
            and self.oracle.runs[place[0]].status == "RUNNING"
        ]

    def _works(self) -> list[tuple[Place, Work]]:
        found: list[tuple[Place, Work]] = []
        for run in self.oracle.runs.values():
            for node in run.nodes:
                if node.work is not None:
                    found.append(((run.id, node.index, None), node.work))
                found += [((run.id, node.index, at), item) for at, item in enumerate(node.items)]
        return found

    def node(self, place: Place) -> Node:
        return self.oracle.runs[place[0]].nodes[place[1]]

    # What workers do.

    def claim(self, places: Sequence[Place], state: str = "RUNNING") -> None:
        assert self.engine.claim(places, state) == len(places)
        self.oracle.claim(places, state)

    def give_back(self, places: Sequence[Place]) -> None:
        assert self.engine.give_back(places) == len(places)
        self.oracle.give_back(places)

    def cancel_task(self, place: Place) -> None:
        assert self.engine.cancel_task(place)
        self.oracle.finish([End(place, "CANCELLED")])

    def finish(self, *ends: End) -> None:
        """End tasks with one statement, in any status."""
        self.engine.finish(ends)
        self.oracle.finish(ends)

    def finish_turn(self, *ends: End) -> None:
        """Record running tasks' outcomes as a worker does: successes, then failures."""
        self.engine.finish_turn(ends)
        for good in (True, False):
            part = [end for end in ends if (end.state == "COMPLETED") is good]
            if part:
                self.oracle.finish(part)

    def succeed(self, *places: Place, value: Any = None) -> None:
        self.finish(*(self.success(place, value) for place in places))

    def fail(self, *places: Place) -> None:
        self.finish(*(self.failed(place) for place in places))

    def success(self, place: Place, value: Any = None) -> End:
        """Return a success: a plan for a sub-workflow, the value of a signal, otherwise the value."""
        node = self.node(place)
        if node.shape.kind == "workflow":
            return End(place, "COMPLETED", None, new_id(), node.shape.child)
        if node.shape.kind == "signal":
            return self._signalled(place)
        if value is None:
            value = f"value {next(self._numbers)}"
        return End(place, "COMPLETED", {"ok": value})

    def _signalled(self, place: Place) -> End:
        value = self.oracle.work(place).value
        if value is NOTHING_YET:
            return End(place, "FAILED", failure("SIGNAL_TIMEOUT"))
        return End(place, "COMPLETED", {"ok": value})

    def failed(self, place: Place) -> End:
        return End(place, "FAILED", self._boom())

    def _boom(self) -> Result:
        message = f"failure {next(self._numbers)}"
        return {"err": {"error_code": "BOOM", "message": message, "data": None, "exception": None}}

    # What people do.

    def pause(self, run_id: str) -> None:
        assert self.engine.pause(run_id) == self.oracle.pause(run_id)

    def resume(self, run_id: str) -> None:
        assert self.engine.resume(run_id) == self.oracle.resume(run_id)

    def resume_retrying(self, run_id: str) -> None:
        assert self.engine.resume_retrying(run_id) == self.oracle.resume_retrying(run_id)

    def cancel(self, run_id: str, interrupt: bool = False) -> None:
        reason = failure("WORKFLOW_CANCELLED")["err"]
        assert self.engine.cancel(run_id, reason, interrupt) == self.oracle.cancel(run_id, reason)

    def expire(self, run_id: str) -> None:
        reason = failure("WORKFLOW_EXPIRED")["err"]
        assert self.engine.expire(run_id, reason) == self.oracle.expire(run_id, reason)

    def retry(self, run_id: str, indexes: Sequence[int] | None = None) -> str:
        answer = self.oracle.retry(run_id, indexes)
        assert self.engine.retry(run_id, indexes) == answer
        return answer

    def signal(self, run_id: str, name: str, value: Any) -> None:
        answer = self.oracle.signal(run_id, name, value)
        assert self.engine.signal(run_id, name, value) == answer

    # Whether they agree.

    def check(self) -> None:
        """Compare the states, including the order of the tasks created since the previous check."""
        assert_agree(self.connection, self.oracle)
        assert self.engine.problems_of(list(self.oracle.runs)) == []
        self._check_order()

    def look_away(self) -> None:
        """Accept the existing tasks in any order."""
        self._new_tasks()
        self.oracle.enqueued = []

    def _new_tasks(self) -> list[tuple[Any, ...]]:
        new = self.connection.execute(READ_TASKS, (list(self.oracle.runs), self._seen)).fetchall()
        self._seen += [row[0] for row in new]
        return new

    def _starts_at_once(self, place: Place) -> bool:
        return self.node(place).shape.kind not in {"sleep", "signal"}

    def _check_order(self) -> None:
        new = self._new_tasks()
        moments, self.oracle.enqueued = self.oracle.enqueued, []
        expected = sorted(itertools.chain.from_iterable(moments), key=str)
        assert sorted((row[1:4] for row in new), key=str) == expected
        due = {row[1:4]: row[4] for row in new if not row[5] and self._starts_at_once(row[1:4])}
        for moment in moments:
            for run_id in {place[0] for place in moment}:
                times = [due[place] for place in moment if place[0] == run_id and place in due]
                assert times == sorted(set(times)), "siblings are due in the order of their indexes"


def statuses(duet: Duet, run_id: str) -> list[str]:
    duet.check()
    return [node.status for node in duet.oracle.runs[run_id].nodes]


def status_of(duet: Duet, run_id: str) -> str:
    duet.check()
    return duet.oracle.runs[run_id].status
