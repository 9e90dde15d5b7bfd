"""Every statement on a real server: its parameters and columns are those of its named tuples."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from enum import Enum, StrEnum
from types import NoneType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import Connection
from psycopg.pq import ExecStatus

from horsies.db.pipeline import Pipeline
from horsies.db.statement import Statement, StatementFile, field_names
from horsies.db.statements.tasks import TaskId
from tests.support.examples import examples
from tests.support.statements import SQL_FILES, STATEMENTS, catalogue_of

# PostgreSQL's names for the Python types of the dataclasses. An id is text for us.
ACCEPTED = {
    str: {"text", "varchar", "uuid"},
    int: {"int4", "int8", "int2"},
    float: {"float8"},
    bool: {"bool"},
    bytes: {"bytea"},
    datetime: {"timestamptz"},
    timedelta: {"interval"},
}
RETURNED = {**ACCEPTED, str: {"text", "varchar"}}


def type_name(connection: Connection[Any], oid: int) -> str:
    found = connection.adapters.types.get(oid)
    assert found is not None, oid
    return f"{found.name}[]" if oid == found.array_oid else found.name


def expected_types(hint: Any, names: dict[type, set[str]]) -> set[str]:
    """Return the PostgreSQL types that serve for a field of this type."""
    if get_origin(hint) is dict:
        return {"json", "jsonb"}
    if hint == list[dict[str, Any]]:
        return {"json", "jsonb"}
    if get_origin(hint) in (Sequence, list):
        return {f"{name}[]" for name in expected_types(get_args(hint)[0], names)}
    (python_type,) = (part for part in get_args(hint) or (hint,) if part is not NoneType)
    if get_args(python_type):
        return expected_types(python_type, names)
    return names[str if issubclass(python_type, StrEnum) else python_type]


@pytest.fixture
def prepared(connection: Connection[Any], request: pytest.FixtureRequest) -> Any:
    """The server's description of a statement that it has just prepared."""
    statement = request.getfixturevalue("statement")
    answer = connection.pgconn.prepare(b"under_test", statement.numbered())
    assert answer.status == ExecStatus.COMMAND_OK, answer.error_message.decode()
    return connection.pgconn.describe_prepared(b"under_test")


def test_there_are_statements_in_every_file() -> None:
    assert {"tasks.sql", "turn.sql"} <= set(SQL_FILES)
    for file_name in SQL_FILES:
        catalogue = catalogue_of(file_name)
        assert catalogue.texts
        assert set(catalogue.texts) == set(catalogue.statements)


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_parameters_of_a_statement_are_those_of_its_declaration(
    connection: Connection[Any], statement: Statement[Any, Any], prepared: Any
) -> None:
    written = set(re.findall(r"%\((\w+)\)s", statement.text))
    assert written == set(statement.parameters)
    assert b"%(" not in statement.numbered()
    hints = get_type_hints(statement.signature)
    hints.pop("return", None)
    assert prepared.nparams == len(hints)
    for number, (name, hint) in enumerate(hints.items()):
        found = type_name(connection, prepared.param_type(number))
        assert found in expected_types(hint, ACCEPTED), name


@pytest.mark.parametrize("statement", STATEMENTS)
def test_the_columns_of_a_statement_are_its_row_dataclass(
    connection: Connection[Any], statement: Statement[Any, Any], prepared: Any
) -> None:
    columns = [prepared.fname(number).decode() for number in range(prepared.nfields)]
    assert columns == list(field_names(statement.row_type))
    for number, hint in enumerate(get_type_hints(statement.row_type).values()):
        found = type_name(connection, prepared.ftype(number))
        assert found in expected_types(hint, RETURNED), columns[number]


@pytest.mark.parametrize("file_name", SQL_FILES)
def test_a_file_with_an_undeclared_statement_does_not_load(file_name: str) -> None:
    undeclared = StatementFile(file_name)
    (first, *_) = undeclared.texts
    with pytest.raises(LookupError, match=rf"{file_name}: no declaration for .*\b{first}\b"):
        undeclared.complete()


def test_a_declaration_without_a_statement_does_not_load() -> None:
    with pytest.raises(LookupError, match=r"tasks.sql has no statement named 'drop_everything'"):
        StatementFile("tasks.sql").declare("drop_everything", TaskId, TaskId)


def test_a_file_that_is_missing_does_not_load() -> None:
    with pytest.raises(FileNotFoundError):
        StatementFile("nothing.sql")


class Anything(NamedTuple):
    """One parameter of each type the statements use."""

    text: str | None
    number: int
    real: float
    truth: bool
    moment: datetime
    texts: Sequence[str | None]
    numbers: Sequence[int]
    reals: Sequence[float]


ECHO = Statement(
    "echo",
    "SELECT %(text)s::text, %(number)s::bigint, %(real)s::float8, %(truth)s::boolean, "
    "%(moment)s::timestamptz, %(texts)s::text[], %(numbers)s::bigint[], %(reals)s::float8[]",
    Anything,
    Anything,
)
TEXTS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0") | st.sampled_from("\\\"{},' \n")
)
NUMBERS = st.integers(-(2**63), 2**63 - 1)
REALS = st.floats(allow_nan=False)
MOMENTS = st.datetimes(datetime(1900, 1, 1), datetime(2200, 1, 1), timezones=st.just(UTC))


@settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    st.builds(
        Anything,
        text=st.none() | TEXTS,
        number=NUMBERS,
        real=REALS,
        truth=st.booleans(),
        moment=MOMENTS,
        texts=st.lists(st.none() | TEXTS | st.sampled_from(["NULL", "null", ""]), max_size=8),
        numbers=st.lists(NUMBERS, max_size=4),
        reals=st.lists(REALS, max_size=4),
    )
)
def test_parameters_written_as_text_arrive_as_they_were(
    connection: Connection[Any], value: Anything
) -> None:
    assert ECHO.run(connection, value) == [value]
    assert Pipeline(connection, prepared=False).run([(ECHO, value)]) == [[value]]


def test_tuples_are_written_as_lists_are(connection: Connection[Any]) -> None:
    as_lists = Anything("", 1, 1.0, True, datetime.now(UTC), ["a", None, '"\\'], [1, 2], [1.0])
    as_tuples = as_lists._replace(texts=("a", None, '"\\'), numbers=(1, 2), reals=(1.0,))
    assert ECHO.texts(as_tuples) == ECHO.texts(as_lists)
    assert Pipeline(connection, prepared=False).run([(ECHO, as_tuples)]) == [[as_lists]]


def test_equal_tuples_of_different_types_are_told_apart() -> None:
    truths, ones = (
        Anything("", 1, 1.0, True, datetime.now(UTC), (), (number,), ()) for number in (True, 1)
    )
    assert (ECHO.texts(truths)[6], ECHO.texts(ones)[6]) == (b"{True}", b"{1}")


def test_a_text_parameter_with_a_nul_is_refused_and_not_cut(connection: Connection[Any]) -> None:
    value = Anything("a\0b", 1, 1.0, True, datetime.now(UTC), ["a\0b"], [], [])
    with pytest.raises(psycopg.DataError, match="NUL"):
        ECHO.texts(value)
    with pytest.raises(psycopg.DataError, match="NUL"):
        ECHO.run(connection, value)


class Colour(str, Enum):  # noqa: UP042 - its str() is "Colour.RED"
    RED = 'r"d'


class Size(int, Enum):
    LARGE = 7


def test_members_of_enumerations_are_written_as_their_values(connection: Connection[Any]) -> None:
    moment = datetime.now(UTC)
    plain = Anything('r"d', 7, 1.0, True, moment, ['r"d', None], [7], [])
    members = plain._replace(
        text=Colour.RED, number=Size.LARGE, texts=[Colour.RED, None], numbers=[Size.LARGE]
    )
    assert ECHO.run(connection, members) == [plain]
    assert Pipeline(connection, prepared=False).run([(ECHO, members)]) == [[plain]]


FILE = StatementFile("tasks.sql")


@FILE.statement
def cancel_tasks(ids: Sequence[str], running: bool = False) -> TaskId: ...  # type: ignore[empty-body]


def test_a_call_of_a_statement_is_a_step_with_its_parameters_in_order() -> None:
    expected = (cancel_tasks, (["a"], True))
    assert cancel_tasks(["a"], True) == expected
    assert cancel_tasks(["a"], running=True) == expected
    assert cancel_tasks(running=True, ids=["a"]) == expected
    assert cancel_tasks(["a"]) == (cancel_tasks, (["a"], False))


def test_a_call_that_does_not_fit_the_declaration_is_refused() -> None:
    call: Any = cancel_tasks
    for args, kwargs in (((), {}), ((["a"], True, 1), {}), ((["a"],), {"walking": True})):
        with pytest.raises(TypeError, match=r"cancel_tasks\(\)"):
            call(*args, **kwargs)
