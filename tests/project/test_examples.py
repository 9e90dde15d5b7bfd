"""The pages run as they are shown: the README's first example, the tutorial."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.commands import environment
from tests.support.doc_pages import REPOSITORY, blocks, files, page
from tests.support.wait import wait_until

COMMANDS = ("python ", "horsies check")


@contextmanager
def running_worker(directory: Path, database_url: str) -> Iterator[Path]:
    """Run `horsies worker tasks.py` as the pages say; yields its log, expects a clean stop."""
    log = directory / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            ["horsies", "worker", "tasks.py"],
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


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands a page shows, each with the output it shows below it."""
    for block in blocks(text):
        if block.language == "console":
            for part in block.text.split("$ ")[1:]:
                command, _, output = part.partition("\n")
                yield command, output


def follow(text: str, directory: Path, database_url: str) -> list[str]:
    """Make the page's files, run its commands, compare what they print; return the commands run."""
    for name, content in files(text).items():
        (directory / name).write_text(content)
    wanted = [(command, shown) for command, shown in sessions(text) if command.startswith(COMMANDS)]
    for command, shown in wanted:
        finished = subprocess.run(
            command.split(),
            cwd=directory,
            env=environment(HORSIES_DATABASE_URL=database_url),
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert (finished.stdout, finished.returncode) == (shown, 0), finished.stderr
    return [command for command, _ in wanted]


def follow_with_worker(name: str, directory: Path, database_url: str) -> tuple[list[str], str]:
    """Follow a page while a worker runs; return the commands and what the worker logged."""
    text = page(name)
    (directory / "tasks.py").write_text(files(text)["tasks.py"])
    with running_worker(directory, database_url) as log:
        commands = follow(text, directory, database_url)
    return commands, log.read_text()


def test_the_first_example_of_the_readme_works_as_it_is_shown(
    tmp_path: Path, database_url: str
) -> None:
    commands, log = follow_with_worker("README.md", tmp_path, database_url)
    assert commands == ["python send.py"]
    assert "WARNING" not in log
    assert "ERROR" not in log


def test_the_readme_shows_the_quickstart() -> None:
    quickstart = REPOSITORY / "examples" / "quickstart"
    shown = files(page("README.md"))
    assert shown == {path.name: path.read_text() for path in quickstart.glob("*.py")}


def test_the_tutorial_can_be_followed(tmp_path: Path, database_url: str) -> None:
    commands, _ = follow_with_worker("tutorial.md", tmp_path, database_url)
    scripts = {f"python {name}" for name in files(page("tutorial.md")) if name != "tasks.py"}
    assert set(commands) == scripts | {"horsies check tasks.py"}
