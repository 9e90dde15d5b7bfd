"""docs/schema.md describes every table, column, key and index of a migrated database; its queries run."""

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
# Not the NOT NULL constraints, which only PostgreSQL 18 has a name for.
KEYS = """
SELECT class.relname, rule.contype::text, rule.conname, pg_get_constraintdef(rule.oid, true)
FROM pg_constraint AS rule JOIN pg_class AS class ON class.oid = rule.conrelid
WHERE class.relnamespace = 'public'::regnamespace AND class.relname LIKE 'horsies%'
    AND rule.contype IN ('p', 'f', 'u', 'c')
UNION ALL
SELECT class.relname, CASE WHEN index.indisunique THEN 'x' ELSE 'i' END, named.relname,
    regexp_replace(pg_get_indexdef(index.indexrelid, 0, true), '^.* USING (btree )?', '')
FROM pg_index AS index JOIN pg_class AS class ON class.oid = index.indrelid
JOIN pg_class AS named ON named.oid = index.indexrelid
WHERE class.relnamespace = 'public'::regnamespace AND class.relname LIKE 'horsies%'
    AND NOT EXISTS (SELECT FROM pg_constraint WHERE conindid = index.indexrelid)
UNION ALL
SELECT class.relname, 't', trigger.tgname, pg_get_triggerdef(trigger.oid, true)
FROM pg_trigger AS trigger JOIN pg_class AS class ON class.oid = trigger.tgrelid
WHERE class.relnamespace = 'public'::regnamespace AND class.relname LIKE 'horsies%'
    AND NOT trigger.tgisinternal
"""
KINDS = {
    "p": "primary key",
    "u": "unique",
    "f": "foreign key",
    "c": "check",
    "x": "unique index",
    "i": "index",
    "t": "trigger",
}
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


def plain(definition: str) -> str:
    """Return a definition of PostgreSQL without casts, keywords of its kind, and double parentheses."""
    text = re.sub(r"::(character varying|text)(\[\])?", "", " ".join(definition.split()))
    text = re.sub(r"^(PRIMARY KEY|UNIQUE|FOREIGN KEY|CHECK) ?", "", text)
    text = re.sub(r"^CREATE TRIGGER \w+ (\w+ \w+) .*FUNCTION (\w+)\(\)$", r"\1: \2", text)
    text = re.sub(r"\((\w+) = ANY \(ARRAY\[(.*?)\]\)\)", r"\1 IN (\2)", text)
    text = re.sub(r"= ANY \(ARRAY\[(.*?)\]\)", r"IN (\1)", text)
    return text.replace("~~", "LIKE")


def existing_keys(connection: Database) -> set[tuple[str, str]]:
    rules = connection.execute(KEYS.encode()).fetchall()
    return {
        (table, f"- {KINDS[kind]} `{name}`: `{plain(definition)}`")
        for table, kind, name, definition in rules
    }


def described_keys() -> set[tuple[str, str]]:
    _, *tables = re.split(r"^### (\w+)$", page("schema.md").partition("## Tables")[2], flags=re.M)
    return {
        (table, line)
        for table, text in zip(tables[::2], tables[1::2], strict=True)
        for line in text.splitlines()
        if line.startswith("- ")
    }


def test_every_key_index_and_trigger_is_described(connection: Database) -> None:
    found, described = existing_keys(connection), described_keys()
    assert sorted(found - described) == [], "add these lines below their tables"
    assert sorted(described - found) == [], "remove these lines"


def test_the_queries_run(connection: Database) -> None:
    queries = [block.text for block in blocks(page("schema.md")) if block.language == "sql"]
    assert len(queries) >= 5
    for query in queries:
        assert connection.execute(query.encode()).fetchall() == []
