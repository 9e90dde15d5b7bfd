"""Runs commands as a user does, in their own directory and environment."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.applications import UNREACHABLE as UNREACHABLE
from tests.support.doc_pages import REPOSITORY, blocks
from tests.support.wait import wait_until

BINARIES = Path(sys.executable).parent
EXAMPLES = REPOSITORY / "examples"

Finished = subprocess.CompletedProcess[str]


def horsies(directory: Path, *arguments: str, typed: str = "", **environment: str) -> Finished:
    """Run the command as a user does, in a separate directory and environment."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HORSIES_", "FORCE_COLOR")) and name != "DATABASE_URL"
    }
    return subprocess.run(
        [sys.executable, "-m", "horsies", *arguments],
        cwd=directory,
        env={"SHOP_URL": UNREACHABLE, **kept, "NO_COLOR": "1", "COLUMNS": "100", **environment},
        input=typed,
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )


def environment(**more: str) -> dict[str, str]:
    """Return the environment of a user who has just installed the package."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("HORSIES_", "PYTEST_"))
        and name not in ("DATABASE_URL", "FORCE_COLOR")
    }
    return {**kept, "PATH": f"{BINARIES}{os.pathsep}{os.environ['PATH']}", "NO_COLOR": "1", **more}


@contextmanager
def worker(example: str, database_url: str, tmp_path: Path) -> Iterator[Path]:
    """A copy of the example, with its page's worker."""
    directory = shutil.copytree(EXAMPLES / example, tmp_path / example)
    (command,) = [line for line in commands(directory) if line.startswith("horsies worker")]
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command.removesuffix(" &").split(), "-c", "2"],
            cwd=directory,
            env=environment(HORSIES_DATABASE_URL=database_url),
            stderr=output,
        )
    try:
        wait_until(lambda: "listening on" in log.read_text() or process.poll() is not None, 60)
        yield directory
    finally:
        process.terminate()
        assert process.wait(60) == 0, log.read_text()


def commands(directory: Path) -> list[str]:
    text = (directory / "README.md").read_text()
    shown = "".join(block.text for block in blocks(text) if block.language == "console")
    return [line.removeprefix("$ ") for line in shown.splitlines()]


def run(directory: Path, command: list[str], database_url: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        cwd=directory,
        env=environment(HORSIES_DATABASE_URL=database_url),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@contextmanager
def running_worker(
    directory: Path, database_url: str, locator: str = "tasks.py", log: Path | None = None
) -> Iterator[Path]:
    """Run `horsies worker tasks.py` as the pages describe; yield its log, and expect a clean stop."""
    log = log or directory / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            ["horsies", "worker", locator],
            cwd=directory,
            env=environment(HORSIES_DATABASE_URL=database_url),
            stderr=output,
        )
        try:
            wait_until(lambda: "listening on" in log.read_text() or worker.poll() is not None, 30)
            yield log
            worker.send_signal(signal.SIGINT)
            assert worker.wait() == 0, log.read_text()
        finally:
            worker.kill()
            worker.wait()
