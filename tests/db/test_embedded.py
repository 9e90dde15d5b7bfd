"""The private PostgreSQL: the last process stops it, even when others were killed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

JOIN = "from horsies.db.embedded import start_or_join; start_or_join({url!r}, keep_data={keep}); "
DIE = "import os; os._exit(3)"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path that the server's own user may enter."""
    parent = Path(tempfile.mkdtemp(prefix="horsies-embedded-"))
    parent.chmod(0o755)
    yield parent / "data"
    shutil.rmtree(parent)


def join(directory: Path, *, keep: bool, then: str = "") -> None:
    program = JOIN.format(url=f"embedded://{directory}", keep=keep) + then
    subprocess.run([sys.executable, "-c", program], timeout=60, check=not then)


def test_a_user_that_was_killed_does_not_keep_the_server_alive(directory: Path) -> None:
    join(directory, keep=True, then=DIE)
    assert (directory / "postmaster.pid").exists(), "nobody was left to stop it"
    join(directory, keep=True)
    assert not (directory / "postmaster.pid").exists()
    assert (directory / "PG_VERSION").exists(), "the data stay"


def test_the_last_to_leave_deletes_data_it_does_not_want_kept(directory: Path) -> None:
    join(directory, keep=False)
    assert not directory.exists()
