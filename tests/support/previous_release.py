"""The code of two consecutive releases; the previous release comes from the git history, if it has an
older schema.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from tests.support.migrations import FIRST, MIGRATIONS, files_at, git, later_release
from tests.support.workers import REPOSITORY


def previous_release(directory: Path) -> Path:
    """Copy the sources of the previous release and return the folder to put on PYTHONPATH."""
    commit = next(_older_commits(), None)
    if commit is None:
        shutil.copytree(REPOSITORY / "src", directory, ignore=shutil.ignore_patterns("__pycache__"))
        return directory
    return release_at(commit, directory)


def release_at(commit: str, directory: Path) -> Path:
    """Copy the sources of a commit and return the folder to put on PYTHONPATH."""
    archive = ["git", "archive", commit, "src"]
    packed = subprocess.run(archive, cwd=REPOSITORY, check=True, capture_output=True).stdout
    directory.mkdir()
    subprocess.run(["tar", "-x", "-C", str(directory)], input=packed, check=True)
    return directory / "src"


def has_commit(name: str) -> bool:
    """Return whether the git history has this commit."""
    return git("cat-file", "-t", name) == ["commit"]


def other_numbering(directory: Path) -> Path:
    """Copy this code, with its first migration named as before the numbering restarted."""
    shutil.copytree(REPOSITORY / "src", directory, ignore=shutil.ignore_patterns("__pycache__"))
    first = directory / Path(MIGRATIONS).relative_to("src") / FIRST
    first.rename(first.with_name(FIRST.replace("schema", "tables")))
    return directory


def next_release(directory: Path) -> Path:
    """Return the next release: this code, with more migrations if both releases have the same schema."""
    has_older = next(_older_commits(), None) is not None
    return REPOSITORY / "src" if has_older else later_release(directory)


def _older_commits() -> Iterator[str]:
    """Return the commits with an older schema than this code, newest first. Their migrations must be the
    first migrations of this code, because a merge may renumber a branch's migrations.
    """
    own = sorted(path.name for path in (REPOSITORY / MIGRATIONS).glob("*.sql"))
    added = git("log", "--diff-filter=A", "--no-renames", "--format=%H", "--", MIGRATIONS)
    for commit in ["HEAD", *(f"{one}^" for one in added)]:
        known = files_at(commit)
        if FIRST in known and known != own and known == own[: len(known)]:
            yield commit
