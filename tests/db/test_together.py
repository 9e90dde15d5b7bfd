"""Several statements in one round trip: all of them or none, and the connection lives on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import psycopg
import pytest
from psycopg import Connection

from horsies.db.connect import is_transient
from horsies.db.query import Statement
from horsies.db.tasks import TaskId, TaskIds, read_outcomes
from horsies.db.together import Together
from tests.db.rows import add_task, row_of
from tests.waiting import wait_until


class Text(NamedTuple):
    text: str


class Number(NamedTuple):
    number: int


ECHO = Statement("echo", "SELECT %(text)s::text AS text", Text, Text)
DIVIDE = Statement("divide", "SELECT 1 / %(number)s::integer AS number", Number, Number)
UNKNOWN = Statement("unknown", "SELECT text FROM nowhere WHERE text = %(text)s", Text, Text)
FINISH = Statement(
    "finish",
    "UPDATE horsies_tasks SET status = 'COMPLETED' WHERE id = %(id)s::uuid RETURNING id::text",
    TaskId,
    TaskId,
)


@pytest.fixture(params=[True, False], ids=["prepared", "parsed anew"])
def together(
    connection: Connection[Any], process_url: str, request: pytest.FixtureRequest
) -> Iterator[Together]:
    with psycopg.connect(process_url, autocommit=True) as mine:
        yield Together(mine, prepared=request.param)


def test_each_statement_gets_its_rows(connection: Connection[Any], together: Together) -> None:
    task_id = add_task(connection)
    for _ in range(2):
        echoed, outcomes, nothing = together.run(
            [
                (ECHO, Text("x")),
                (read_outcomes, TaskIds([task_id])),
                (read_outcomes, TaskIds([])),
            ]
        )
        assert echoed == [Text("x")]
        assert [(row.id, row.status) for row in outcomes] == [(task_id, "PENDING")]
        assert nothing == []


@pytest.mark.parametrize("failing", [(DIVIDE, Number(0)), (UNKNOWN, Text("x"))])
@pytest.mark.parametrize("warm", [True, False])
def test_one_failure_undoes_the_whole_group_and_nothing_else(
    connection: Connection[Any], together: Together, failing: Any, warm: bool
) -> None:
    first, second, third = (add_task(connection) for _ in range(3))
    if warm:
        together.run([(FINISH, TaskId(first)), (ECHO, Text("x"))])
    with pytest.raises(psycopg.ProgrammingError if failing[0] is UNKNOWN else psycopg.DataError):
        together.run([(FINISH, TaskId(second)), failing, (FINISH, TaskId(third))])
    assert row_of(connection, second)["status"] == "PENDING"
    assert together.run([(FINISH, TaskId(second)), (ECHO, Text("y"))]) == [
        [TaskId(second)],
        [Text("y")],
    ]
    assert row_of(connection, second)["status"] == "COMPLETED"
    assert row_of(connection, third)["status"] == "PENDING"
    assert together.connection.execute("SELECT 1").fetchone() == (1,)


def test_a_parameter_that_cannot_be_sent_is_refused_before_anything_is(
    connection: Connection[Any], together: Together
) -> None:
    task_id = add_task(connection)
    with pytest.raises(psycopg.DataError, match="NUL"):
        together.run([(FINISH, TaskId(task_id)), (ECHO, Text("a\0b"))])
    assert row_of(connection, task_id)["status"] == "PENDING"
    assert together.run([(ECHO, Text("fine"))]) == [[Text("fine")]]


def test_much_data_both_ways_does_not_jam(together: Together) -> None:
    texts = [str(number) * 2_000_000 for number in range(5)]
    answers = together.run([(ECHO, Text(text)) for text in texts])
    assert [rows[0].text for rows in answers] == texts


def test_a_connection_that_is_already_gone_is_a_transient_error(
    connection: Connection[Any], together: Together
) -> None:
    pid = together.connection.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with pytest.raises(psycopg.OperationalError) as caught:
        together.run([(ECHO, Text("x"))])
    assert (caught.value.sqlstate, is_transient(caught.value)) == ("57P01", True)
    assert together.connection.closed


def test_a_connection_cut_under_way_is_a_transient_error(
    connection: Connection[Any], process_url: str, together: Together
) -> None:
    task_id = add_task(connection)
    failures: list[psycopg.Error] = []

    def finish() -> None:
        try:
            together.run([(ECHO, Text("x")), (FINISH, TaskId(task_id))])
        except psycopg.Error as error:
            failures.append(error)

    pid = together.connection.info.backend_pid
    with psycopg.connect(process_url) as locker:
        locker.execute("SELECT 1 FROM horsies_tasks FOR UPDATE")
        thread = threading.Thread(target=finish)
        thread.start()
        wait_until(lambda: _is_waiting(connection, pid))
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        thread.join()
    assert [(error.sqlstate, is_transient(error)) for error in failures] == [("57P01", True)]
    assert together.connection.closed
    assert row_of(connection, task_id)["status"] == "PENDING"


def _is_waiting(connection: Connection[Any], pid: int) -> bool:
    found = connection.execute(
        "SELECT 1 FROM pg_stat_activity WHERE pid = %s AND wait_event_type = 'Lock'", (pid,)
    )
    return found.fetchone() is not None


def test_statements_parsed_anew_work_through_a_transaction_pooler(pgbouncer_url: str) -> None:
    with (
        psycopg.connect(pgbouncer_url, autocommit=True) as first,
        psycopg.connect(pgbouncer_url, autocommit=True) as second,
    ):
        for connection in [first, second] * 5:
            answers = Together(connection, prepared=False).run([(ECHO, Text("x"))] * 2)
            assert answers == [[Text("x")]] * 2
