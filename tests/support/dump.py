"""The text of every table, as in a dump of the database, and a search for words in it."""

from __future__ import annotations

from psycopg import sql

from tests.support.database import Database


def dump(connection: Database) -> dict[str, str]:
    """Return the text of every table of the schema, in the format of COPY."""
    names = connection.execute(
        "SELECT tablename FROM pg_tables WHERE schemaname = current_schema()"
    ).fetchall()
    texts = {}
    for (name,) in names:
        query = sql.SQL("COPY {} TO STDOUT").format(sql.Identifier(name))
        with connection.cursor().copy(query) as copied:
            texts[name] = b"".join(bytes(part) for part in copied).decode()
    return texts


def leaks(connection: Database, secret: str) -> dict[str, list[str]]:
    """Return the lines of every table that contain the secret, as text or as hexadecimal bytes."""
    forms = (secret, secret.encode().hex())
    found = {
        name: [line for line in text.splitlines() if any(form in line for form in forms)]
        for name, text in dump(connection).items()
    }
    return {name: lines for name, lines in found.items() if lines}
