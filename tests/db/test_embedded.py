"""The private PostgreSQL: the last process stops it, even when others were killed."""

from __future__ import annotations

import os
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


STRANGER = 65534
# Reports what another user of the machine gets when connecting to the server, and when joining it.
INTRUDE = """
import os, sys, psycopg
from horsies.db.embedded import start_or_join
url = start_or_join({url!r}, keep_data=False)
print(url, flush=True)
if os.fork() == 0:
    os.setgroups([]), os.setgid({uid}), os.setuid({uid})
    for attempt in (lambda: psycopg.connect(url), lambda: start_or_join({url!r})):
        try:
            attempt()
            print("came in", flush=True)
        except Exception as error:
            print(type(error).__name__, flush=True)
    os._exit(0)
os.wait()
with psycopg.connect(url) as connection:
    print(connection.execute("SHOW unix_socket_permissions").fetchone()[0])
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def intrude(directory: Path) -> list[str]:
    program = INTRUDE.format(url=f"embedded://{directory}", uid=STRANGER)
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.splitlines()


@needs_root
@pytest.mark.parametrize("length", [0, 120])
def test_another_user_of_the_machine_does_not_come_in(directory: Path, length: int) -> None:
    data = directory / ("x" * length) / "pg" if length else directory
    url, *answers = intrude(data)
    assert answers == ["OperationalError", "ConfigurationError", "0700"]
    socket_directory = Path(url.partition("host=")[2])
    assert (socket_directory == data) == (length == 0)
    assert not socket_directory.exists()
    assert length == 0 or not socket_directory.parent.exists(), "nothing stays behind"


@needs_root
def test_a_parent_that_the_servers_user_cannot_enter_is_named_and_stays_closed(
    directory: Path,
) -> None:
    directory.parent.chmod(0o700)
    program = JOIN.format(url=f"embedded://{directory}", keep=False)
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=60, check=False, stderr=subprocess.PIPE, text=True
    )
    assert f"{directory.parent} is closed to that user" in done.stderr
    assert directory.parent.stat().st_mode & 0o777 == 0o700
