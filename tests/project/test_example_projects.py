"""The small projects in examples/ run as their pages say, and end by themselves."""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import psycopg
import pytest

from tests.support.commands import commands, environment, run, worker


def shown_script(directory: Path) -> list[str]:
    """The command of the page that runs the script."""
    (command,) = [line for line in commands(directory) if line.startswith("python ")]
    return [sys.executable, *command.removeprefix("python ").replace('"', "").split()]


def test_the_script_counts_its_files_and_one_that_is_missing(
    tmp_path: Path, database_url: str
) -> None:
    with worker("script", database_url, tmp_path) as directory:
        done = run(directory, shown_script(directory), database_url)
    words = len((directory / "README.md").read_text().split())
    first, second, third = done.stdout.splitlines()
    assert first.split() == [str(words), "README.md"], done.stderr
    assert second.endswith("wordcount.py")
    assert third.split() == ["NO_SUCH_FILE", "no-such-file"]
    assert done.returncode == 1


@pytest.fixture
def sales(database_url: str) -> Iterator[psycopg.Connection[tuple[int]]]:
    """A connection to the database of the example, which drops its table afterwards."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        yield connection
        connection.execute("DROP TABLE IF EXISTS public.sales")


def test_the_etl_workflow_loads_the_valid_rows(
    tmp_path: Path, database_url: str, sales: psycopg.Connection[tuple[int]]
) -> None:
    with worker("etl", database_url, tmp_path) as directory:
        done = run(directory, shown_script(directory), database_url)
    assert done.stdout.endswith("6 rows of 3 files, 13800 cents; 2 rejected\n"), done.stderr
    assert sales.execute("SELECT count(*)::integer FROM public.sales").fetchone() == (6,)


def test_a_person_decides_about_the_draft_of_the_model(tmp_path: Path, database_url: str) -> None:
    with worker("approval", database_url, tmp_path) as directory:
        draft, outcome = ask(directory, database_url, answer="true")
        assert draft == [
            f"[Write {part} of oats for horses]\n"
            for part in ("the summary", "the details", "the risks")
        ]
        assert outcome == "published 3 sections\n"
        _, outcome = ask(directory, database_url, answer="false")
        assert outcome == "A person has rejected the answer.\n"


def ask(directory: Path, database_url: str, answer: str) -> tuple[list[str], str]:
    """Ask the question of the page, and answer with the command that it prints."""
    printed: list[str] = []
    with subprocess.Popen(
        shown_script(directory),
        cwd=directory,
        env=environment(HORSIES_DATABASE_URL=database_url),
        stdout=subprocess.PIPE,
        text=True,
    ) as asking:
        assert asking.stdout is not None
        try:
            while "workflow signal" not in "".join(printed):
                printed.append(asking.stdout.readline())
                assert asking.poll() is None, printed
            command = [sys.executable, "-m", *printed[-1].split()[:-1], answer]
            sent = run(directory, command, database_url)
            assert sent.returncode == 0, sent.stderr
            return printed[:3], asking.stdout.read()
        finally:
            asking.kill()


def test_a_person_improves_the_drafts_of_the_model(tmp_path: Path, database_url: str) -> None:
    with (
        worker("conversation", database_url, tmp_path) as directory,
        subprocess.Popen(
            shown_script(directory),
            cwd=directory,
            env=environment(HORSIES_DATABASE_URL=database_url),
            stdout=subprocess.PIPE,
            text=True,
        ) as talking,
    ):
        assert talking.stdout is not None
        try:
            first, wish, _ = shown_draft(talking.stdout)
            topic = "oats for horses"
            assert first == f"[{topic} with [facts about {topic}] and [risks of {topic}]]"
            answer(directory, wish, database_url)
            second, _, approval = shown_draft(talking.stdout)
            assert second == f"[{topic}, shorter]"
            answer(directory, approval, database_url)
            assert talking.stdout.read() == f"published [{topic}, shorter]\n"
        finally:
            talking.kill()


def shown_draft(printed: IO[str]) -> tuple[str, str, str]:
    """A draft, and the commands that refuse and approve it."""
    draft = printed.readline().strip()
    for _ in range(2):
        printed.readline()
    return draft, printed.readline().strip(), printed.readline().strip()


def answer(directory: Path, command: str, database_url: str) -> None:
    done = run(directory, [sys.executable, "-m", *shlex.split(command)], database_url)
    assert done.returncode == 0, done.stderr
