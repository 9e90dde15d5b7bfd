"""The private PostgreSQL: one per project; the last process stops it, even when others were killed."""

from __future__ import annotations

import logging
import os
import pty
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from horsies.db import embedded
from horsies.db.embedded import data_directory, project_directory
from horsies.errors import ConfigurationError
from tests.support.doc_pages import REPOSITORY
from tests.support.embedded_places import install

pytestmark = pytest.mark.slow

JOIN = "from horsies.db.embedded import start_or_join; start_or_join({url!r}, keep_data={keep}); "
DIE = "import os; os._exit(3)"


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path that the server's own user may enter."""
    parent = Path(tempfile.mkdtemp(prefix="horsies-embedded-"))
    parent.chmod(0o755)
    yield parent / "data"
    shutil.rmtree(parent)


def join(directory: Path, *, keep: bool, then: str = "") -> str:
    """Start or join the server in another process; return the output of that process in a terminal."""
    program = JOIN.format(url=f"embedded://{directory}", keep=keep) + then
    master, slave = pty.openpty()
    try:
        os.set_blocking(master, False)
        subprocess.run([sys.executable, "-c", program], timeout=60, check=not then, stderr=slave)
        with suppress(BlockingIOError):
            return os.read(master, 4096).decode()
        return ""
    finally:
        os.close(slave)
        os.close(master)


def test_a_user_that_was_killed_does_not_keep_the_server_alive(directory: Path) -> None:
    shown = join(directory, keep=True, then=DIE)
    assert (directory / "postmaster.pid").exists(), "nobody was left to stop it"
    assert shown == (
        f"creating a PostgreSQL server in {directory}: the first start takes a few seconds\r\n"
    )
    assert join(directory, keep=True) == ""
    assert not (directory / "postmaster.pid").exists()
    assert (directory / "PG_VERSION").exists(), "the data stay"


def test_a_log_has_the_creation_of_a_server(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "horsies.embedded"):
        embedded._announce_creation(Path("/some/where"))
    assert caplog.messages == [
        "creating a PostgreSQL server in /some/where: the first start takes a few seconds"
    ]


def test_a_redirected_stream_has_the_creation_of_a_server(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded.logger, "hasHandlers", lambda: False)
    embedded._announce_creation(Path("/some/where"))
    text = "creating a PostgreSQL server in /some/where: the first start takes a few seconds\n"
    assert capsys.readouterr() == ("", text)


def test_a_killed_user_that_its_parent_has_not_collected_counts_as_dead() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert not embedded._is_running(process.pid)
    assert embedded._is_running(os.getpid())


def test_the_last_to_leave_deletes_data_it_does_not_want_kept(directory: Path) -> None:
    assert join(directory, keep=False) == "", "of a passing server"
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
    assert not socket_directory.exists(), "nothing stays behind"


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
    assert not directory.exists(), "nothing stays behind"


# Root and another user start a server each, the other one second.
START_BOTH = """
import os
from horsies.db import embedded
embedded._package()  # the other user may not be able to read it
is_other = os.fork() == 0
if is_other:
    os.read({ready}, 1)
    os.setgroups([]), os.setgid({uid}), os.setuid({uid})
embedded.start_or_join({others!r} if is_other else {own!r}, keep_data=False)
print("started", flush=True)
if not is_other:
    os.write({go}, b"!")
    os.wait()
"""


@needs_root
def test_two_users_of_a_machine_have_a_server_each(directory: Path) -> None:
    others = directory.parent / "others"
    others.mkdir()
    os.chown(others, STRANGER, STRANGER)
    ready, go = os.pipe()
    program = START_BOTH.format(
        uid=STRANGER,
        ready=ready,
        go=go,
        own=f"embedded://{directory}",
        others=f"embedded://{others}/data",
    )
    command = [sys.executable, "-c", program]
    environment = os.environ | {"PYTHONPATH": str(install(directory.parent))}
    try:
        done = subprocess.run(
            command,
            timeout=120,
            check=False,
            capture_output=True,
            text=True,
            pass_fds=(ready, go),
            env=environment,
        )
    finally:
        os.close(ready)
        os.close(go)
    assert done.stdout.split() == ["started", "started"], done.stderr


# Runs a program of Python with a copy of /etc in which the server's user does not exist.
WITHOUT_USER = """
set -e
mount --make-rprivate /
cp -a /etc "$1"
for name in passwd group shadow gshadow; do
    if [ -e "$1/$name" ]; then sed -i '/^pgserver:/d' "$1/$name"; fi
done
mount --bind "$1" /etc
if [ "$2" = read-only ]; then mount -o remount,bind,ro /etc; fi
PATH=/usr/bin:/bin exec "$3" -c "$4"
"""


def join_without_user(directory: Path, etc: str) -> subprocess.CompletedProcess[str]:
    """Join as root, with no sbin in PATH, and in a separate mount namespace."""
    if subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("this root may not create mount namespaces")
    copy = directory.parent / "etc"
    program = JOIN.format(url=f"embedded://{directory}", keep=False) + "print('started')"
    command = ["unshare", "-m", "sh", "-c", WITHOUT_USER, "sh", str(copy), etc, sys.executable]
    return subprocess.run(
        [*command, program], timeout=60, check=False, capture_output=True, text=True
    )


@needs_root
def test_root_without_sbin_in_its_path_gets_the_servers_user(directory: Path) -> None:
    done = join_without_user(directory, "writable")
    assert done.stdout == "started\n", done.stderr
    assert "pgserver:" in (directory.parent / "etc" / "passwd").read_text()


@needs_root
def test_where_no_user_can_be_created_root_gets_the_cure(directory: Path) -> None:
    done = join_without_user(directory, "read-only")
    assert "the user pgserver that runs it for root could not be created: /" in done.stderr
    assert "help: work as another user, create the user pgserver, or name a server" in done.stderr
    assert "CalledProcessError" not in done.stderr.rpartition("ConfigurationError")[2]


def test_a_server_that_does_not_start_is_reported_with_its_log(directory: Path) -> None:
    directory.mkdir()
    directory.chmod(0o700)
    (directory / "PG_VERSION").write_text("18\n")
    (directory / "pg_hba.conf").write_text("local all all peer map=horsies\n")
    (directory / "postgresql.conf").write_text("nonsense = 1\n")
    with pytest.raises(ConfigurationError, match="did not start") as caught:
        embedded.start_or_join(f"embedded://{directory}")
    assert str(directory / "log") in str(caught.value)


def test_a_signal_arrives_once_the_server_is_known() -> None:
    passed = []

    def start() -> None:
        with embedded._signals_deferred():
            signal.raise_signal(signal.SIGINT)
            passed.append("the signal")

    with pytest.raises(KeyboardInterrupt):
        start()
    assert passed == ["the signal"]


def test_a_project_has_one_directory_from_wherever_in_it_a_command_runs(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").touch()
    inner = tmp_path / "src" / "shop"
    inner.mkdir(parents=True)
    assert project_directory(inner) == project_directory(tmp_path) == tmp_path
    (tmp_path / "src" / ".git").mkdir()
    assert project_directory(inner) == tmp_path / "src", "the nearest one counts"


def test_projects_do_not_share_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name in ("one", "two", "two"):
        project = tmp_path / name / "my shop"
        project.mkdir(parents=True, exist_ok=True)
        monkeypatch.setattr(embedded, "_started_in", project)
        found.append(data_directory("embedded://"))
    one, two, again = found
    assert one != two == again
    assert one.name.startswith("my_shop-")
    assert tmp_path not in one.parents, "git clean and a read-only checkout leave it alone"


def test_a_changed_working_directory_changes_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = data_directory("embedded://")
    monkeypatch.chdir(tmp_path)
    assert data_directory("embedded://") == before


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("embedded://~/my%20data", "embedded:///home/anna/my%20data"),
        ("embedded://~", "embedded:///home/anna"),
        ("embedded://rel/dir", "embedded:///rel/dir"),
    ],
)
def test_a_directory_with_two_slashes_is_answered_with_the_right_address(
    url: str, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/anna")
    with pytest.raises(ConfigurationError) as caught:
        data_directory(url)
    assert caught.value.help_text == f"write {advice}, with three slashes"


def test_a_named_directory_is_taken_as_it_is() -> None:
    assert data_directory("embedded:///some/where%20else") == Path("/some/where else")


RUN_PAGE = """
from tests.support.doc_pages import run_page
app = run_page("sending.md")["app"]
print(app.database_url)
app.close()
"""


def test_the_examples_of_sends_run_with_the_embedded_database(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE],
        cwd=REPOSITORY,
        env=os.environ | {"HORSIES_DATABASE_URL": f"embedded://{directory}"},
        timeout=120,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = done.stdout.splitlines()[-1]
    assert address.startswith("postgresql://")
    assert str(directory) in address
