"""Random graphs under random fates: the database always agrees with the oracle."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import Connection

from tests.support.database import steps_of
from tests.support.examples import examples
from tests.support.oracle.compare import Duet
from tests.support.oracle.graphs import SIGNALS, run_shapes
from tests.support.oracle.shapes import RunShape
from tests.support.oracle.tree import End, Place

ORDINARY = ["finish"] * 6 + ["turn"] * 4 + ["claim"] * 3 + ["claim ahead", "give back", "signal"]
STEERING = ["pause", "pause", "resume", "resume", "resume retrying", "retry", "retry some"]
STEERING += ["cancel task", "expire task"]
ENDING = ["cancel", "expire"]

random_graphs = settings(
    max_examples=examples(50),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class Player:
    """Plays a duet by drawing what happens next."""

    def __init__(self, duet: Duet, data: st.DataObject) -> None:
        self.duet = duet
        self.data = data

    def play(self, moves: list[str], count: int) -> None:
        """Let things happen, then let everything come to its end."""
        for _ in range(self.data.draw(st.integers(5, count), label="moves")):
            self.move(self.data.draw(st.sampled_from(moves)))
            self.duet.check()
        self.drain()

    def drain(self) -> None:
        while self._has_open_runs():
            for run in list(self.duet.oracle.runs.values()):
                self.duet.resume(run.id)
            self.duet.check()
            while places := self.duet.claimable() + self.duet.places("RUNNING"):
                self._finish(places[:8], turn=False)
                self.duet.check()

    def _has_open_runs(self) -> bool:
        return any(run.is_open for run in self.duet.oracle.runs.values())

    def move(self, name: str) -> None:
        duet = self.duet
        match name:
            case "claim" | "claim ahead":
                if places := self._some(duet.claimable()):
                    duet.claim(places, "RUNNING" if name == "claim" else "CLAIMED")
            case "finish":
                self._finish(self._some(duet.claimable() + duet.places("RUNNING")), turn=False)
            case "turn":
                self._finish(self._some(duet.places("RUNNING")), turn=True)
            case "give back":
                open_runs = [p for p in duet.places("RUNNING") if duet.oracle.runs[p[0]].is_open]
                if places := self._some(open_runs):
                    duet.give_back(places)
            case "cancel task":
                for place in self._some(duet.places("PENDING", "CLAIMED"))[:1]:
                    duet.cancel_task(place)
            case "expire task":
                self._end_unstarted(self._some(duet.places("PENDING")))
            case _:
                self._steer(name)

    def _steer(self, name: str) -> None:
        duet = self.duet
        run_id = self.data.draw(st.sampled_from(list(duet.oracle.runs)))
        match name:
            case "pause":
                duet.pause(run_id)
            case "resume":
                duet.resume(run_id)
            case "resume retrying":
                duet.resume_retrying(run_id)
            case "cancel":
                duet.cancel(run_id, self.data.draw(st.booleans()))
            case "expire":
                duet.expire(run_id)
            case "retry":
                duet.retry(run_id)
            case "retry some":
                nodes = duet.oracle.runs[run_id].nodes
                failed = [node.index for node in nodes if node.status == "FAILED"] or [0]
                duet.retry(run_id, self.data.draw(st.lists(st.sampled_from(failed), max_size=2)))
            case "signal":
                value = self.data.draw(st.integers(0, 9))
                duet.signal(run_id, self.data.draw(st.sampled_from(SIGNALS)), value)

    def _some(self, places: list[Place]) -> list[Place]:
        if not places:
            return []
        return self.data.draw(st.lists(st.sampled_from(places), unique=True, max_size=8))

    def _finish(self, places: list[Place], *, turn: bool) -> None:
        ends = [self._end(place) for place in places]
        if ends and turn:
            self.duet.finish_turn(*ends)
        elif ends:
            self.duet.finish(*ends)

    def _end(self, place: Place) -> End:
        if self.data.draw(st.integers(0, 3)) == 0:
            return self.duet.failed(place)
        node = self.duet.node(place)
        feeds_a_map = any(one.over == node.index for one in node.run.shape.nodes)
        value = None
        if feeds_a_map and self.data.draw(st.integers(0, 5)) > 0:
            value = self.data.draw(st.lists(st.integers(0, 9), max_size=5))
        return self.duet.success(place, value)

    def _end_unstarted(self, places: list[Place]) -> None:
        if places:
            self.duet.finish(*(End(place, "EXPIRED") for place in places))


@random_graphs
@given(shapes=st.lists(run_shapes(most=10), min_size=1, max_size=3), data=st.data())
def test_every_order_of_ends_leads_where_the_oracle_says(
    connection: Connection[Any], shapes: list[RunShape], data: st.DataObject
) -> None:
    duet = Duet(connection)
    duet.start(*shapes)
    duet.check()
    Player(duet, data).play(ORDINARY, 30)


@random_graphs
@given(shapes=st.lists(run_shapes(most=8), min_size=1, max_size=2), data=st.data())
def test_pauses_retries_and_cancels_in_between_change_nothing_about_that(
    connection: Connection[Any], shapes: list[RunShape], data: st.DataObject
) -> None:
    duet = Duet(connection)
    duet.start(*shapes)
    Player(duet, data).play(ORDINARY + STEERING * 2 + ENDING, 40)


@random_graphs
@given(
    shapes=st.lists(run_shapes(most=8), min_size=1, max_size=2),
    step=st.integers(1, 2),
    data=st.data(),
)
def test_maps_that_grow_in_steps_end_like_maps_that_are_added_at_once(
    connection: Connection[Any], shapes: list[RunShape], step: int, data: st.DataObject
) -> None:
    with steps_of(connection, step):
        duet = Duet(connection, step)
        duet.start(*shapes)
        Player(duet, data).play(ORDINARY + STEERING + ENDING, 30)


@settings(random_graphs, max_examples=examples(10))
@given(shape=run_shapes(most=60, least=30, depth=3), data=st.data())
def test_large_graphs_with_nested_runs_end_as_the_oracle_says(
    connection: Connection[Any], shape: RunShape, data: st.DataObject
) -> None:
    duet = Duet(connection)
    duet.start(shape)
    Player(duet, data).play(ORDINARY * 3 + STEERING, 20)
