"""Databases with an unusual history, and the numbers of migrations in the git history."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from psycopg import Connection

from horsies.db import migrate
from horsies.db.migrate import Migration, schema_version
from tests.support.doc_pages import REPOSITORY

MIGRATIONS = "src/horsies/db/migrations"
# The migration with which the numbering started again.
FIRST = "0001_schema.sql"


def following() -> tuple[Migration, Migration]:
    """Return two migrations of a possible later release, each with a table."""
    first = schema_version() + 1
    table = "CREATE TABLE public.horsies_{} (id integer);\n"
    return (
        Migration(first, "colours", table.format("colours")),
        Migration(first + 1, "shapes", table.format("shapes")),
    )


def later_release(directory: Path) -> Path:
    """Copy the sources with the following migrations; return the folder for PYTHONPATH."""
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(REPOSITORY / "src", directory, ignore=ignored)
    for one in following():
        name = f"{one.version:04d}_{one.name}.sql"
        (directory / "horsies/db/migrations" / name).write_text(one.sql.replace("public.", ""))
    return directory


def apply_all_but(connection: Connection[Any], left_out: Migration) -> None:
    """Migrate as a development commit does that lacks one of the following migrations."""
    kept = tuple(one for one in (*migrate._MIGRATIONS, *following()) if one != left_out)
    with patch.object(migrate, "_MIGRATIONS", kept), patch.object(migrate, "_FUNCTIONS", ()):
        migrate.apply_migrations(connection)


def misplaced(before: Collection[str], after: Collection[str]) -> list[str]:
    """Return the added files whose numbers are not above all earlier numbers."""
    highest = max(before, default="")[:4]
    return sorted(name for name in set(after) - set(before) if name[:4] <= highest)


def additions() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the working tree, then each commit that adds migrations, with the files before and after it."""
    own = sorted(path.name for path in (REPOSITORY / MIGRATIONS).glob("*.sql"))
    if FIRST in (before := files_at("HEAD")):
        yield "the working tree", before, own
    found = git("log", "--first-parent", "-m", "--diff-filter=A", "--format=%H", "--", MIGRATIONS)
    for commit in found:
        if FIRST in (before := files_at(f"{commit}^")):
            yield commit, before, files_at(commit)


def files_at(commit: str) -> list[str]:
    names = git("ls-tree", "--name-only", commit, f"{MIGRATIONS}/")
    return sorted(Path(name).name for name in names if name.endswith(".sql"))


def git(*arguments: str) -> list[str]:
    """Return the words of git's output, or none without git or a history."""
    try:
        found = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return []
    return found.stdout.split()


CATALOGUE = """
SELECT 'column', table_name || '.' || column_name,
       concat_ws(' ', ordinal_position, data_type, character_maximum_length, is_nullable, column_default,
                 is_identity)
FROM information_schema.columns WHERE table_schema = 'public'
UNION ALL SELECT 'table', relname, concat(relkind, reloptions) FROM pg_class
    WHERE relnamespace = 'public'::regnamespace
UNION ALL SELECT 'index', indexname, indexdef FROM pg_indexes WHERE schemaname = 'public'
UNION ALL SELECT 'constraint', conrelid::regclass || '.' || conname, pg_get_constraintdef(oid)
    FROM pg_constraint WHERE connamespace = 'public'::regnamespace
UNION ALL SELECT 'function', proname, pg_get_functiondef(oid) FROM pg_proc
    WHERE pronamespace = 'public'::regnamespace
UNION ALL SELECT 'trigger', tgname, pg_get_triggerdef(oid) FROM pg_trigger WHERE NOT tgisinternal
ORDER BY 1, 2, 3
"""


def catalogue(connection: Connection[Any]) -> list[tuple[str, str, str]]:
    """Return all objects of our schema as the server describes them."""
    return connection.execute(CATALOGUE).fetchall()
