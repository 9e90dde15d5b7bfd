"""Qualify the names in SQL statements with the schema that contains all tables and functions.

The ``.sql`` files use names without a schema, so that they also run in psql. Before a statement is sent,
``in_schema`` qualifies the names, so that no statement depends on a search_path, even in a caller's
transaction.

Two installations in one database have different schemas, so their notification channels and advisory lock
keys also differ. In the default schema, channels and keys have no prefix.
"""

from __future__ import annotations

import re
from functools import cache
from hashlib import sha256
from importlib.resources import files

from horsies.database_url import DEFAULT_SCHEMA, channel_prefix

# Functions and sessions resolve operators, casts and unqualified function names only in these schemas. Other
# users must not be able to create objects there, because such objects could run code as any role that changes
# a task.
SAFE_SEARCH_PATH = "pg_catalog, pg_temp"
MIGRATIONS_TABLE = "horsies_migrations"

_CREATED = re.compile(
    r"^CREATE (?:OR REPLACE |UNLOGGED )?(?:TABLE|FUNCTION|TYPE|DOMAIN|SEQUENCE|VIEW) "
    r"(?:IF NOT EXISTS )?(horsies_\w+)",
    re.MULTILINE,
)
# Names in comments, literals and quotes stay unqualified; names in function bodies are qualified like others.
_TOKEN = re.compile(
    r"""--[^\n]* | /\*.*?\*/ | \b[eE]'(?:\\.|[^'\\])*' | '[^']*' | "[^"]*"
    | (?P<body>\bAS\s+\$\$) | (?P<notify>\bpg_notify\() | (?P<lock>\b175134859[56]\b)
    | (?P<index>\b(?:DROP|ALTER)\ INDEX\ (?:IF\ EXISTS\ )?(?=horsies_))
    | (?P<name>(?<![\w.])horsies_\w+)""",
    re.VERBOSE | re.DOTALL,
)

# Changing these rules changes the text of the functions, and therefore their recorded digests.
QUALIFYING_RULES = f"{_TOKEN.pattern} {SAFE_SEARCH_PATH} "


def sql_files(folder: str) -> dict[str, str]:
    """Return the names and texts of the ``.sql`` files in a folder of ``horsies.db``, in order."""
    found = (entry for entry in files("horsies.db").joinpath(folder).iterdir())
    entries = sorted((entry.name, entry) for entry in found if entry.name.endswith(".sql"))
    return {name: entry.read_text("utf-8") for name, entry in entries}


@cache
def object_names() -> frozenset[str]:
    """Return the names of all tables, types and functions that the files create."""
    texts = (*sql_files("migrations").values(), *sql_files("functions").values())
    return frozenset(name for text in texts for name in _CREATED.findall(text)) | {MIGRATIONS_TABLE}


def in_schema(text: str, schema: str) -> str:
    """Return the SQL text with this schema's names, channels and locks. Functions in the text set their
    own search_path.
    """

    def replaced(token: re.Match[str]) -> str:
        found = token[0]
        match token.lastgroup:
            case "name" if found in object_names():
                return f'"{schema}".{found}'
            case "index":  # CREATE INDEX accepts only an unqualified name
                return f'{found}"{schema}".'
            case "body":
                return f"SET search_path = {SAFE_SEARCH_PATH} {found}"
            case "notify" if schema != DEFAULT_SCHEMA:
                return f"{found}'{channel_prefix(schema)}'::text || "
            case "lock":
                return str(lock_key(schema, int(found), bits=31))
            case _:
                return found

    return _TOKEN.sub(replaced, text)


def lock_key(schema: str, plain_key: int, *, bits: int) -> int:
    """Return a schema's advisory lock key; ``plain_key`` is the key in the default schema."""
    if schema == DEFAULT_SCHEMA:
        return plain_key
    digest = sha256(f"{schema}:{plain_key}".encode()).digest()
    return int.from_bytes(digest[:8]) & (1 << bits) - 1
