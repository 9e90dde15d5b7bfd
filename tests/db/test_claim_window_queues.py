"""Claims for windows from several queues: only a due task that cannot wait in a child ends the line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import Connection

from horsies.db.statements.turn import NOTHING, ClaimedTask, ClaimTasks, claim_tasks
from tests.support.examples import examples
from tests.support.rows import add_task, ago

FIRST_ID = "00000000-0000-0000-0000-000000000001"
# Kinds of tasks: s is short and may wait in a child, p may not, l may but is long, u has a name that the
# worker does not know, d is not due, h is on hold.
NAMES = {"l": "long", "u": "unknown"}


class Line(NamedTuple):
    """A queue: the kinds of its tasks in order, with the priority of each if it is not 1."""

    tasks: Sequence[tuple[str, int]]
    cap: int | None = None
    is_paused: bool = False
    # Whether the worker has claimed from it before, and looks behind that task.
    is_marked: bool = False


def line(kinds: str, **options: Any) -> Line:
    return Line([(kind, 1) for kind in kinds], **options)


def store(connection: Connection[Any], lines: Sequence[Line]) -> list[list[tuple[str, str]]]:
    """Store the tasks; return the kind and id of those that can be claimed, by queue, in order."""
    connection.execute("TRUNCATE horsies_tasks, horsies_queues CASCADE")
    found = []
    for place, one in enumerate(lines):
        name = f"q{place}"
        if one.is_paused:
            connection.execute(
                "INSERT INTO horsies_queues (queue_name, paused_at) VALUES (%s, now())", (name,)
            )
        rows = [
            (priority, number, kind, _add(connection, name, kind, priority, number))
            for number, (kind, priority) in enumerate(one.tasks)
        ]
        is_shut = one.is_paused or one.cap == 0
        found.append([row[2:] for row in sorted(rows) if row[2] in "spl" and not is_shut])
    return found


def _add(
    connection: Connection[Any], queue_name: str, kind: str, priority: int, number: int
) -> str:
    return add_task(
        connection,
        queue_name=queue_name,
        priority=priority,
        burst=kind != "p",
        held=kind == "h",
        task_name=NAMES.get(kind, "short"),
        enqueued_at=ago(-3_600 if kind == "d" else 100 - number),
    )


def claim(
    connection: Connection[Any], lines: Sequence[Line], idle: int, ahead: int
) -> list[ClaimedTask]:
    marked = [one.is_marked for one in lines]
    places = idle + ahead
    request = ClaimTasks(
        "me",
        "host",
        pids=list(range(1, places + 1)),
        queues=[f"q{place}" for place in range(len(lines))],
        queue_limits=[places] * len(lines),
        queue_caps=[one.cap for one in lines],
        marked_priorities=[1 if is_marked else None for is_marked in marked],
        marked_moments=["2000-01-01 00:00:00+00" if is_marked else None for is_marked in marked],
        marked_ids=[FIRST_ID if is_marked else None for is_marked in marked],
        unknown_names=["unknown"] if any("u" in kinds(one) for one in lines) else NOTHING,
        idle=idle,
        short_names=["short"],
    )
    return sorted(claim_tasks.run(connection, request), key=lambda one: one.worker_pid or 0)


def kinds(one: Line) -> str:
    return "".join(kind for kind, _ in one.tasks)


@pytest.mark.parametrize(
    "better",
    [
        line("", is_marked=True),
        line("d"),
        line("d", is_marked=True),
        line("h"),
        line("u"),
        line("pp", is_paused=True),
        line("pp", cap=0),
        line("ss"),
        line("s", cap=5),
    ],
    ids=[
        "once claimed from",
        "delayed",
        "once claimed from, delayed",
        "on hold",
        "unknown to this worker",
        "paused",
        "cap reached",
        "short",
        "short, capped",
    ],
)
def test_a_better_queue_without_a_due_task_that_needs_a_child_leaves_windows_open(
    connection: Connection[Any], better: Line
) -> None:
    lines = [better, line("ssssssss")]
    claimable = store(connection, lines)
    claimed = claim(connection, lines, 2, 4)
    everything = [task_id for part in claimable for _, task_id in part]
    assert [task.id for task in claimed] == everything[:6]


@pytest.mark.parametrize(
    ("better", "idle", "taken"),
    [
        (line("p"), 0, 0),
        (line("p"), 2, 2),
        (line("l"), 1, 1),
        (line("sp"), 0, 1),
        (line("ss", cap=9), 0, 0),
        (line("ss", cap=9), 1, 1),
        (line("p", cap=1), 2, 2),
    ],
    ids=[
        "plain, no child idle",
        "plain, children idle",
        "long, one child idle",
        "plain behind a short one",
        "capped, no child idle",
        "capped, one child idle",
        "capped and plain, children idle",
    ],
)
def test_a_due_task_of_a_better_queue_that_needs_a_child_is_not_overtaken(
    connection: Connection[Any], better: Line, idle: int, taken: int
) -> None:
    lines = [better, line("ssssssss")]
    claimable = store(connection, lines)
    everything = [task_id for part in claimable for _, task_id in part]
    claimed = claim(connection, lines, idle, 4)
    assert [task.id for task in claimed] == everything[:taken]


def predicted(lines: Sequence[Line], claimable: Any, idle: int, ahead: int) -> list[str]:
    """Return the tasks that a claim takes, by the rules of the documentation."""
    taken: list[str] = []
    is_open = True
    for one, tasks in zip(lines, claimable, strict=True):
        for kind, task_id in tasks[: one.cap]:
            is_short = kind == "s"
            if len(taken) >= idle and not (is_open and is_short and one.cap is None):
                return taken
            if len(taken) == idle + ahead:
                return taken
            taken.append(task_id)
            is_open = is_open and is_short
    return taken


marked_lines = st.text("sssspludh", max_size=7).map(lambda text: line(text, is_marked=True))
other_lines = st.builds(
    Line,
    st.lists(st.tuples(st.sampled_from("sssspludh"), st.sampled_from([1, 2])), max_size=7),
    cap=st.sampled_from([None, None, None, 0, 1, 3]),
    is_paused=st.sampled_from([False, False, False, True]),
    is_marked=st.just(False),
)


@settings(
    max_examples=examples(200),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    lines=st.lists(st.one_of(marked_lines, other_lines), min_size=1, max_size=4),
    idle=st.integers(0, 4),
    ahead=st.integers(1, 8),
)
def test_whatever_waits_a_claim_takes_all_it_may_and_nothing_overtakes(
    connection: Connection[Any], lines: list[Line], idle: int, ahead: int
) -> None:
    claimable = store(connection, lines)
    claimed = claim(connection, lines, idle, ahead)
    assert [task.id for task in claimed] == predicted(lines, claimable, idle, ahead)
    assert [task.worker_pid for task in claimed] == list(range(1, len(claimed) + 1))
