"""docs/schema.md describes every table and column of a migrated database, and its queries run."""

from __future__ import annotations

import re

from tests.support.database import Database
from tests.support.doc_pages import blocks, code_of, page, rows

COLUMNS = """
SELECT class.relname, attribute.attname, format_type(attribute.atttypid, attribute.atttypmod)
FROM pg_attribute AS attribute JOIN pg_class AS class ON class.oid = attribute.attrelid
WHERE class.relnamespace = 'public'::regnamespace AND class.relkind = 'r'
    AND class.relname LIKE 'horsies%' AND attribute.attnum > 0 AND NOT attribute.attisdropped
ORDER BY class.relname, attribute.attnum
"""
SHORT = {"timestamp with time zone": "timestamptz", "character varying": "varchar"}


def described() -> list[tuple[str, str, str]]:
    _, *tables = re.split(r"^### (\w+)$", page("schema.md").partition("## Tables")[2], flags=re.M)
    return [
        (table, code_of(column), kind)
        for table, text in zip(tables[::2], tables[1::2], strict=True)
        for column, kind, _ in rows(text)
    ]


def short(kind: str) -> str:
    for long, name in SHORT.items():
        kind = kind.replace(long, name)
    return kind


def test_every_column_of_every_table_is_described(connection: Database) -> None:
    found = [
        (table, column, short(kind)) for table, column, kind in connection.execute(COLUMNS.encode())
    ]
    assert sorted(described()) == sorted(found)


def test_the_queries_run(connection: Database) -> None:
    queries = [block.text for block in blocks(page("schema.md")) if block.language == "sql"]
    assert len(queries) >= 5
    for query in queries:
        assert connection.execute(query.encode()).fetchall() == []
