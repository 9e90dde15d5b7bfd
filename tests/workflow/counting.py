"""Counting statements: every one that the library sends, whichever connection takes it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from psycopg import AsyncCursor, Cursor


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
