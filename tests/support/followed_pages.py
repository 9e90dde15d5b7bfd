"""Follows a page as its reader does: creates its files, runs its commands, and compares their output."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path

from tests.support.commands import environment, running_worker
from tests.support.doc_pages import blocks, files, page

# The commands of a page that end on their own and need only its files.
COMMANDS = ("python ", "horsies check", "horsies version")


def sessions(text: str) -> Iterator[tuple[str, str]]:
    """Yield the commands of a page, each with its documented output. The lines of one command are joined."""
    for block in blocks(text):
        if block.language == "console":
            joined = re.sub(r"\\\n\s*", "", block.text)
            for part in re.split(r"^\$ ", joined, flags=re.MULTILINE)[1:]:
                command, _, output = part.partition("\n")
                yield command, output


def make_files(contents: Mapping[str, str], directory: Path) -> None:
    """Create the files of a page."""
    for name, content in contents.items():
        (directory / name).write_text(content)


def run(command: str, directory: Path, database_url: str) -> subprocess.CompletedProcess[str]:
    """Run a command as if it were pasted into a shell."""
    return subprocess.run(
        ["bash", "-c", command],
        cwd=directory,
        env=environment(HORSIES_DATABASE_URL=database_url),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


def run_all(wanted: list[tuple[str, str]], directory: Path, database_url: str) -> list[str]:
    """Run the commands that end on their own and compare their output; return the commands."""
    chosen = [(command, shown) for command, shown in wanted if command.startswith(COMMANDS)]
    for command, shown in chosen:
        finished = run(command, directory, database_url)
        assert (finished.stdout, finished.returncode) == (shown, 0), finished.stderr
    return [command for command, _ in chosen]


def follow_with_worker(name: str, directory: Path, database_url: str) -> tuple[list[str], str]:
    """Follow a page while a worker runs; return the commands and the worker's log."""
    text = page(name)
    make_files(files(text), directory)
    with running_worker(directory, database_url) as log:
        commands = run_all(list(sessions(text)), directory, database_url)
    return commands, log.read_text()
