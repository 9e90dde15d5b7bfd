"""Counting statements: every one that the library sends, whichever connection takes it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from psycopg import AsyncCursor, Connection, Cursor

from horsies.db.statement import Statement
from horsies.db.statements.tasks import TaskId


@contextmanager
def counted() -> Iterator[list[str]]:
    """Collect the texts of all statements executed through psycopg cursors meanwhile."""
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


class Text(NamedTuple):
    text: str


ECHO = Statement("echo", "SELECT %(text)s::text AS text", Text, Text)


FINISH = Statement(
    "finish",
    "UPDATE horsies_tasks SET status = 'COMPLETED' WHERE id = %(id)s::uuid RETURNING id::text",
    TaskId,
    TaskId,
)


def count_statements(connection: Connection[Any], work: Any) -> int:
    """How many statements the server was asked to execute, by libpq's own record."""
    with tempfile.TemporaryFile() as record:
        connection.pgconn.trace(record.fileno())
        work()
        connection.pgconn.untrace()
        record.seek(0)
        lines = record.read().decode().splitlines()
    return sum(line.split("\t")[3] in ("Execute", "Query") for line in lines if line[0].isdigit())
