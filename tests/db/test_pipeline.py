"""Several statements in one round trip: all of them or none, and the connection lives on."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Iterator
from typing import Any, NamedTuple
from urllib.parse import quote

import psycopg
import pytest
from psycopg import Connection, sql

from horsies.config.postgres import PostgresConfig
from horsies.db.database import Database
from horsies.db.errors import ErrorKind, is_transient, kind_of
from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement
from horsies.db.statements.tasks import TaskId, read_outcomes
from tests.support.database import database_on, framed_config, lock_waiters
from tests.support.poison import DEFERRED, poisoned
from tests.support.rows import add_task, row_of
from tests.support.statements import ECHO, FINISH, Text
from tests.support.wait import wait_until


class Number(NamedTuple):
    number: int


MEASURE = Statement("measure", "SELECT length(%(text)s::text) AS number", Text, Number)
DIVIDE = Statement("divide", "SELECT 1 / %(number)s::integer AS number", Number, Number)
UNKNOWN = Statement("unknown", "SELECT text FROM nowhere WHERE text = %(text)s", Text, Text)


@pytest.fixture(params=[True, False], ids=["prepared", "parsed anew"])
def pipeline(
    connection: Connection[Any], process_url: str, request: pytest.FixtureRequest
) -> Iterator[Pipeline]:
    with psycopg.connect(process_url, autocommit=True) as mine:
        yield Pipeline(mine, prepared=request.param)


def test_each_statement_gets_its_rows(connection: Connection[Any], pipeline: Pipeline) -> None:
    task_id = add_task(connection)
    for _ in range(2):
        echoed, outcomes, nothing = pipeline.run(
            [
                (ECHO, Text("x")),
                read_outcomes([task_id]),
                read_outcomes([]),
            ]
        )
        assert echoed == [Text("x")]
        assert [(row.id, row.status) for row in outcomes] == [(task_id, "PENDING")]
        assert nothing == []


@pytest.mark.parametrize(
    "text", ["", "it's", "a\\b\\", "50 %", "%(text)s", "%s", "$1", "horsies_tasks", 'é "\n', None]
)
def test_a_bound_parameter_means_the_same_as_one_that_is_sent(
    connection: Connection[Any], pipeline: Pipeline, text: str | None
) -> None:
    bound = ECHO.bound(text=text)
    sent, written = pipeline.run([(ECHO, (text,)), (bound, ())])
    assert written == sent == [(text,)]
    assert bound.run(connection, ()) == [(text,)]


def test_statements_with_other_constants_are_prepared_apart(pipeline: Pipeline) -> None:
    steps = [(ECHO.bound(text=text), ()) for text in ("a", "b", "a")]
    assert pipeline.run(steps) == [[("a",)], [("b",)], [("a",)]]


@pytest.mark.parametrize("failing", [(DIVIDE, Number(0)), (UNKNOWN, Text("x"))])
@pytest.mark.parametrize("warm", [True, False])
def test_one_failure_undoes_the_whole_group_and_nothing_else(
    connection: Connection[Any], pipeline: Pipeline, failing: Any, warm: bool
) -> None:
    first, second, third = (add_task(connection) for _ in range(3))
    if warm:
        pipeline.run([(FINISH, TaskId(first)), (ECHO, Text("x"))])
    with pytest.raises(psycopg.ProgrammingError if failing[0] is UNKNOWN else psycopg.DataError):
        pipeline.run([(FINISH, TaskId(second)), failing, (FINISH, TaskId(third))])
    assert row_of(connection, second)["status"] == "PENDING"
    assert pipeline.run([(FINISH, TaskId(second)), (ECHO, Text("y"))]) == [
        [TaskId(second)],
        [Text("y")],
    ]
    assert row_of(connection, second)["status"] == "COMPLETED"
    assert row_of(connection, third)["status"] == "PENDING"
    assert pipeline.connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.parametrize("is_pooled", [False, True])
@pytest.mark.parametrize("warm", [True, False])
def test_an_error_at_commit_undoes_the_whole_group_and_nothing_else(
    connection: Connection[Any], process_url: str, is_pooled: bool, warm: bool
) -> None:
    good, bad = add_task(connection), add_task(connection, task_name="poison")
    with poisoned(connection, "NEW.task_name = 'poison'", state="23514", trigger=DEFERRED):
        pipeline = Pipeline.open(Database(framed_config(process_url, is_pooled=is_pooled)), "turn")
        with pipeline.connection:
            if warm:
                pipeline.run([(FINISH, TaskId(add_task(connection))), (ECHO, Text("x"))])
            for _ in range(2):
                with pytest.raises(psycopg.errors.CheckViolation, match="poisonous") as caught:
                    pipeline.run([(FINISH, TaskId(good)), (FINISH, TaskId(bad))])
                assert kind_of(caught.value) is ErrorKind.DATA
                assert row_of(connection, good)["status"] == "PENDING"
            assert pipeline.run([(FINISH, TaskId(good))]) == [[TaskId(good)]]
            assert pipeline.connection.execute("SELECT 1").fetchone() == (1,)
    assert row_of(connection, good)["status"] == "COMPLETED"
    assert row_of(connection, bad)["status"] == "PENDING"


def test_a_commit_that_the_server_answers_with_a_rollback_is_not_taken_for_success(
    connection: Connection[Any], process_url: str
) -> None:
    """Like COMMIT in a failed transaction, which the server does not report as an error."""
    task_id = add_task(connection)
    pipeline = Pipeline.open(Database(framed_config(process_url, is_pooled=True)), "turn")
    pipeline._frame = pipeline._frame[0], (b"ROLLBACK",)
    with pipeline.connection, pytest.raises(psycopg.OperationalError, match="rollback") as caught:
        pipeline.run([(FINISH, TaskId(task_id))])
    assert is_transient(caught.value)
    assert row_of(connection, task_id)["status"] == "PENDING"


def test_a_parameter_that_cannot_be_sent_is_refused_before_anything_is(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    task_id = add_task(connection)
    with pytest.raises(psycopg.DataError, match="NUL"):
        pipeline.run([(FINISH, TaskId(task_id)), (ECHO, Text("a\0b"))])
    assert row_of(connection, task_id)["status"] == "PENDING"
    assert pipeline.run([(ECHO, Text("fine"))]) == [[Text("fine")]]


def test_much_data_both_ways_does_not_jam(pipeline: Pipeline) -> None:
    texts = [str(number) * 2_000_000 for number in range(5)]
    answers = pipeline.run([(ECHO, Text(text)) for text in texts])
    assert [rows[0].text for rows in answers] == texts


def test_a_connection_that_is_already_gone_is_a_transient_error(
    connection: Connection[Any], pipeline: Pipeline
) -> None:
    pid = pipeline.connection.info.backend_pid
    connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
    with pytest.raises(psycopg.OperationalError) as caught:
        pipeline.run([(ECHO, Text("x"))])
    assert (caught.value.sqlstate, is_transient(caught.value)) == ("57P01", True)
    assert pipeline.connection.closed


def test_a_connection_cut_under_way_is_a_transient_error(
    connection: Connection[Any], process_url: str, pipeline: Pipeline
) -> None:
    task_id = add_task(connection)
    failures: list[psycopg.Error] = []

    def finish() -> None:
        try:
            pipeline.run([(ECHO, Text("x")), (FINISH, TaskId(task_id))])
        except psycopg.Error as error:
            failures.append(error)

    pid = pipeline.connection.info.backend_pid
    with psycopg.connect(process_url) as locker:
        locker.execute("SELECT 1 FROM horsies_tasks FOR UPDATE")
        thread = threading.Thread(target=finish)
        thread.start()
        wait_until(lambda: lock_waiters(connection, pid))
        connection.execute("SELECT pg_terminate_backend(%s, 5000)", (pid,))
        thread.join()
    assert [(error.sqlstate, is_transient(error)) for error in failures] == [("57P01", True)]
    assert pipeline.connection.closed
    assert row_of(connection, task_id)["status"] == "PENDING"


def test_statements_parsed_anew_work_through_a_transaction_pooler(pgbouncer_url: str) -> None:
    with (
        psycopg.connect(pgbouncer_url, autocommit=True) as first,
        psycopg.connect(pgbouncer_url, autocommit=True) as second,
    ):
        for connection in [first, second] * 5:
            answers = Pipeline(connection, prepared=False).run([(ECHO, Text("x"))] * 2)
            assert answers == [[Text("x")]] * 2


@pytest.fixture
def latin1_url(server_url: str) -> Iterator[str]:
    """A fresh database that stores its texts as LATIN1."""
    name = f"horsies_latin1_{uuid.uuid4().hex}"
    with psycopg.connect(server_url, autocommit=True) as connection:
        make = "CREATE DATABASE {} ENCODING 'LATIN1' TEMPLATE template0 LC_COLLATE 'C' LC_CTYPE 'C'"
        connection.execute(sql.SQL(make).format(sql.Identifier(name)))
        yield database_on(server_url, name)
        connection.execute(sql.SQL("DROP DATABASE {} WITH (FORCE)").format(sql.Identifier(name)))


def test_a_database_with_an_encoding_of_its_own_gets_the_same_text(latin1_url: str) -> None:
    assert_text_survives(latin1_url)


def test_an_encoding_in_the_environment_does_not_matter(
    process_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PGCLIENTENCODING", "LATIN1")
    assert_text_survives(process_url)


def assert_text_survives(url: str) -> None:
    """Send a text, and have the server say how many characters it read."""
    with opened(url).connection as connection:
        pipeline = Pipeline(connection)
        assert pipeline.run([(ECHO, Text("Grüße"))]) == [[Text("Grüße")]]
        assert pipeline.run([(MEASURE, Text("Grüße"))]) == [[Number(5)]]


def opened(url: str, session_settings: str | None = None) -> Pipeline:
    return Pipeline.open(Database(PostgresConfig(database_url=url)), "turn", session_settings)


@pytest.mark.parametrize("given_by", ["address", "environment", "both"])
@pytest.mark.parametrize("session_settings", [None, "-c enable_seqscan=off"])
def test_options_of_the_address_or_the_environment_stay_beside_our_own(
    process_url: str,
    monkeypatch: pytest.MonkeyPatch,
    given_by: str,
    session_settings: str | None,
) -> None:
    options, url = "-c lock_timeout=7s -c work_mem=5MB", process_url
    if given_by != "address":
        wins = given_by == "environment"
        monkeypatch.setenv("PGOPTIONS", options if wins else "-c work_mem=9MB")
    if given_by != "environment":
        url = f"{url}{'&' if '?' in url else '?'}options={quote(options)}"
    with psycopg.connect(url) as plain, opened(url, session_settings).connection as ours:
        for name in ("lock_timeout", "work_mem"):
            assert shown(ours, name) == shown(plain, name)
        assert shown(ours, "enable_seqscan") == ("on" if session_settings is None else "off")


def shown(connection: Connection[Any], setting: str) -> str:
    (value,) = connection.execute("SELECT current_setting(%s)", (setting,)).fetchone() or ("",)
    return str(value)


def test_a_session_whose_prepared_statements_are_in_doubt_is_lost(process_url: str) -> None:
    with psycopg.connect(process_url, autocommit=True) as mine:
        pipeline = Pipeline(mine)
        mine.execute("BEGIN")
        with pytest.raises(psycopg.OperationalError, match="in doubt") as caught:
            pipeline.run([(DIVIDE, Number(0))])
    assert caught.value.sqlstate is None
    assert is_transient(caught.value)
