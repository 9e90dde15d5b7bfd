"""All declared statements, and the number of statements that the library sends over any connection."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from psycopg import AsyncConnection, AsyncCursor, Connection, Cursor

from horsies.db.statement import Statement, StatementFile, Step
from horsies.db.statements.tasks import TaskId


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the texts of all statements executed through psycopg cursors during the block."""
    texts: list[str] = []
    plain, twin = Cursor.execute, AsyncCursor.execute

    def execute(cursor: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        texts.append(query.decode() if isinstance(query, bytes) else str(query))
        return plain(cursor, query, *args, **kwargs)

    async def execute_async(cursor: Any, query: Any, *args: Any, **kwargs: Any) -> Any:
        texts.append(query.decode() if isinstance(query, bytes) else str(query))
        return await twin(cursor, query, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cursor, "execute", execute)
        patch.setattr(AsyncCursor, "execute", execute_async)
        yield texts


def named(step: Step) -> SimpleNamespace:
    """Return the parameters of a step by name."""
    statement, params = step
    return SimpleNamespace(**statement.mapping(params))


class Text(NamedTuple):
    text: str


ECHO = Statement("echo", "SELECT %(text)s::text AS text", Text, Text)


FINISH = Statement(
    "finish",
    "UPDATE horsies_tasks SET status = 'COMPLETED' WHERE id = %(id)s::uuid RETURNING id::text",
    TaskId,
    TaskId,
)


@contextmanager
def traced(connection: Connection[Any] | AsyncConnection[Any]) -> Iterator[Counter[str]]:
    """Count the protocol messages of a connection during the block with libpq's trace; read the counts
    afterwards.
    """
    messages: Counter[str] = Counter()
    with tempfile.TemporaryFile() as record:
        connection.pgconn.trace(record.fileno())
        yield messages
        connection.pgconn.untrace()
        record.seek(0)
        lines = record.read().decode().splitlines()
    messages.update(line.split("\t")[3] for line in lines if line[0].isdigit())


def count_statements(connection: Connection[Any], work: Any) -> int:
    """Count the statements that the server executes during the block."""
    with traced(connection) as messages:
        work()
    return messages["Execute"] + messages["Query"]


SQL_FILES = sorted(
    entry.name for entry in files("horsies.db.statements").iterdir() if entry.name.endswith(".sql")
)


def catalogue_of(file_name: str) -> StatementFile:
    """Return the declarations of a file; horsies.db has a module of the same name."""
    module = import_module(f"horsies.db.statements.{file_name.removesuffix('.sql')}")
    (catalogue,) = (
        value
        for value in vars(module).values()
        if isinstance(value, StatementFile) and value.file_name == file_name
    )
    return catalogue


STATEMENTS = [
    pytest.param(statement, id=f"{file_name}:{name}")
    for file_name in SQL_FILES
    for name, statement in catalogue_of(file_name).statements.items()
]
