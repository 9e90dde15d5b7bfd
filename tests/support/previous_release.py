"""The code of the previous release, from the git history: the last commit with an older schema."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.migrations import MIGRATIONS, files_at, git
from tests.support.workers import REPOSITORY

# For code that refuses every newer schema: its statements must work there all the same.
ACCEPTS_ANY_SCHEMA = """

def pending_migrations(connection):
    return ()
"""


def unpack_previous_release(directory: Path) -> Path:
    """Unpack the sources of the previous release and return the folder to put on PYTHONPATH."""
    commit = next(_older_commits(), None)
    if commit is None:
        pytest.skip("the git history has no commit with an older schema, or there is no history")
    archive = ["git", "archive", commit, "src"]
    packed = subprocess.run(archive, cwd=REPOSITORY, check=True, capture_output=True).stdout
    directory.mkdir()
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed, check=True)
    return directory / "src"


def accept_newer_schemas(sources: Path) -> None:
    """Let code that refuses every newer schema work on one."""
    migrate = sources / "horsies/db/migrate.py"
    if "oldest_compatible" not in migrate.read_text():
        with migrate.open("a") as file:
            file.write(ACCEPTS_ANY_SCHEMA)


def _older_commits() -> Iterator[str]:
    """Commits whose schema is older than that of this code, the newest first.

    Their migrations are the first of this code: numbers given on a branch may change when it is merged.
    """
    own = sorted(path.name for path in (REPOSITORY / MIGRATIONS).glob("*.sql"))
    added = git("log", "--diff-filter=A", "--no-renames", "--format=%H", "--", MIGRATIONS)
    for commit in ["HEAD", *(f"{one}^" for one in added)]:
        known = files_at(commit)
        if known and known != own and known == own[: len(known)]:
            yield commit
