"""Databases of unusual history, and the numbers of migrations in the git history."""

from __future__ import annotations

import subprocess
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from psycopg import Connection

from horsies.db import migrate
from tests.support.doc_pages import REPOSITORY

MIGRATIONS = "src/horsies/db/migrations"


def apply_all_but(connection: Connection[Any], version: int) -> None:
    """Migrate as a commit of development that lacks a migration below its highest number."""
    kept = tuple(one for one in migrate._MIGRATIONS if one.version != version)
    with patch.object(migrate, "_MIGRATIONS", kept), patch.object(migrate, "_FUNCTIONS", ()):
        migrate.apply_migrations(connection)


def misplaced(before: Collection[str], after: Collection[str]) -> list[str]:
    """The added files whose number is not above all that were there."""
    highest = max(before, default="")[:4]
    return sorted(name for name in set(after) - set(before) if name[:4] <= highest)


def additions() -> Iterator[tuple[str, list[str], list[str]]]:
    """Each commit that adds migrations, with the files before and after it; first the working tree."""
    own = sorted(path.name for path in (REPOSITORY / MIGRATIONS).glob("*.sql"))
    yield "the working tree", files_at("HEAD"), own
    found = git("log", "--first-parent", "-m", "--diff-filter=A", "--format=%H", "--", MIGRATIONS)
    for commit in found:
        yield commit, files_at(f"{commit}^"), files_at(commit)


def files_at(commit: str) -> list[str]:
    names = git("ls-tree", "--name-only", commit, f"{MIGRATIONS}/")
    return sorted(Path(name).name for name in names if name.endswith(".sql"))


def git(*arguments: str) -> list[str]:
    """The words that git prints; none without git or a history."""
    try:
        found = subprocess.run(["git", *arguments], cwd=REPOSITORY, capture_output=True, text=True)
    except OSError:
        return []
    return found.stdout.split()
