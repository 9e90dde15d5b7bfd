"""`status` and `explain` over several databases, one of which may be down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
import pytest

from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_task

DOWN = "postgresql://app:hunter2@127.0.0.1:1/media"
APP = """
from horsies import Horsies

first = Horsies({!r})
second = Horsies({!r})
"""


@pytest.fixture
def other(other_url: str, database: Database) -> Iterator[Database]:
    """The second database; both have one task."""
    with psycopg.connect(other_url, autocommit=True) as connection:
        add_task(database, queue_name="mail")
        add_task(connection, queue_name="video")
        yield connection


def urls(**named: str) -> list[str]:
    return [word for name, url in named.items() for word in ("--database-url", f"{name}={url}")]


def test_status_reports_each_database_below_its_name(
    horsies: Run, other: Database, process_url: str, other_url: str
) -> None:
    done = horsies("status", *urls(orders=process_url, media=other_url))
    assert (done.code, done.err) == (0, "")
    titles = [
        line for line in done.out.splitlines() if line.startswith(("database", "mail", "vid"))
    ]
    assert [title.split()[:2] for title in titles] == [
        ["database", "orders"],
        ["mail", "-"],
        ["database", "media"],
        ["video", "-"],
    ]


def test_status_shows_the_others_and_names_a_database_that_is_down(
    horsies: Run, database: Database, process_url: str
) -> None:
    add_task(database, queue_name="mail")
    done = horsies("status", *urls(media=DOWN, orders=process_url))
    assert done.code == 1
    assert "mail" in done.out
    (line,) = done.err.splitlines()
    assert line.startswith("error: database media: ")
    assert "hunter2" not in line

    done = horsies("status", "--json", *urls(media=DOWN, orders=process_url))
    media, orders = json.loads(done.out)["databases"]
    assert (media["database"], orders["database"]) == ("media", "orders")
    assert media["error"] == line.removeprefix("error: database media: ")
    assert [queue["name"] for queue in orders["queues"]] == ["mail"]


def test_applications_are_named_by_their_databases(
    horsies: Run, other: Database, tmp_path: Path, process_url: str, other_url: str
) -> None:
    path = tmp_path / f"shop_{tmp_path.name}.py"
    path.write_text(APP.format(process_url, other_url))
    done = horsies("status", f"{path}:first", f"{path}:second")
    assert done.code == 0
    names = re.findall(r"^database (\S+)$", done.out, re.M)
    assert names == [urlsplit(url).path[1:] for url in (process_url, other_url)]
    done = horsies("status", f"a={path}:first", f"b={path}:second")
    assert re.findall(r"^database (\S+)$", done.out, re.M) == ["a", "b"]


def test_databases_of_the_same_name_have_to_be_named(horsies: Run, process_url: str) -> None:
    done = horsies("status", "--database-url", process_url, "--database-url", process_url)
    assert (done.code, done.out) == (1, "")
    assert "Two of the databases are named" in done.err
    assert "put a name before each, as in east=" in done.err


def test_explain_searches_every_database(
    horsies: Run, other: Database, process_url: str, other_url: str
) -> None:
    both = urls(orders=process_url, media=other_url)
    task_id = add_task(other)
    done = horsies("explain", task_id, *both)
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines()[0] == "database media"
    assert f"task {task_id}" in done.out
    document = json.loads(horsies("explain", task_id, "--json", *both).out)
    assert [one["database"] for one in document["databases"]] == ["media"]

    unknown = "01a1dd00-0000-7000-8000-000000000000"
    assert horsies("explain", unknown, *both).code == 4
    # The one that is down may have it.
    done = horsies("explain", unknown, *urls(orders=process_url, media=DOWN))
    assert done.code == 1
    assert "error: database media: " in done.err


def test_explain_answers_while_another_database_is_down(
    horsies: Run, database: Database, process_url: str
) -> None:
    task_id = add_task(database)
    done = horsies("explain", task_id, *urls(media=DOWN, orders=process_url))
    assert done.code == 0
    assert "database orders" in done.out
    assert done.err.count("\n") == 1
