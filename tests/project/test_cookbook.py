"""Every recipe of the cookbook does what it says, on a real worker."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import psycopg
import pytest

from horsies import TaskFailed
from horsies.testing.worker import running_worker
from tests.support.doc_pages import blocks, page
from tests.support.wait import wait_until

WAIT_MS = 30_000
TABLES = "CREATE TABLE accounts (address text); CREATE TABLE articles (id integer)"


@pytest.fixture(scope="module")
def recipes(tmp_path_factory: pytest.TempPathFactory, process_url: str) -> Iterator[Any]:
    """All blocks of the page as one module, with a worker that serves it."""
    directory = tmp_path_factory.mktemp("cookbook")
    code = "\n\n".join(block.text for block in blocks(page("cookbook.md")) if block.is_run)
    (directory / "cookbook_page.py").write_text(code)
    with psycopg.connect(process_url) as connection:
        connection.execute(TABLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORSIES_DATABASE_URL", process_url)
        patch.syspath_prepend(str(directory))
        options = ("-c", "2", "--async-children", "1", "--async-slots", "10")
        with running_worker("cookbook_page:app", process_url, directory, options):
            module = import_module("cookbook_page")
            yield module
            module.app.close()
        sys.modules.pop("cookbook_page")
    with psycopg.connect(process_url) as connection:
        connection.execute("DROP TABLE accounts, articles")


def one_per_key(recipes: Any) -> None:
    recipes.app.pause_queue("default").unwrap()
    try:
        assert recipes.start_synchronising("north") == recipes.start_synchronising("north")
    finally:
        recipes.app.resume_queue("default").unwrap()


def quiet(recipes: Any) -> None:
    first, second = recipes.edited(7, "a"), recipes.edited(7, "abc")
    assert first == second
    assert recipes.app.handle(first, "cookbook_page.index_document").result(WAIT_MS) == 3


def progress(recipes: Any) -> None:
    handle = recipes.import_rows.enqueue(50)
    assert handle.result(WAIT_MS) == 50
    assert recipes.progress_of(handle.task_id) == "50 of 50"


def by_reference(recipes: Any, directory: Path) -> None:
    source = directory / "picture.raw"
    source.write_bytes(b"0123456789 and more")
    assert recipes.shrink.enqueue(source).result(WAIT_MS).read_bytes() == b"0123456789"


def charged_once(recipes: Any) -> None:
    task_id = recipes.charge_once(17)
    assert recipes.charge_once(17) == task_id
    handle = recipes.app.handle(task_id, "cookbook_page.charge")
    assert handle.result(WAIT_MS) == f"receipt 17, key {task_id}"


def approved(recipes: Any) -> None:
    run = recipes.article("horses").start().unwrap()
    run.signal("approve", True).unwrap()
    assert run.result(WAIT_MS) == "about horses"


def slow_program(recipes: Any) -> None:
    assert recipes.convert.enqueue(["echo", "done"], 20).result(WAIT_MS) == "done"
    with pytest.raises(TaskFailed, match="TOO_SLOW"):
        recipes.convert.enqueue(["sleep", "60"], 0.2).result(WAIT_MS)


def failed(recipes: Any) -> None:
    with pytest.raises(TaskFailed):
        recipes.convert.enqueue(["false"], 20).result(WAIT_MS)
    (task_id, *_) = recipes.failed_with("CONVERSION_FAILED")
    again = recipes.app.handle(recipes.run_again(task_id), "cookbook_page.convert")
    with pytest.raises(TaskFailed, match="CONVERSION_FAILED"):
        again.result(WAIT_MS)


def last_error(recipes: Any) -> None:
    with pytest.raises(TaskFailed):
        recipes.convert.enqueue(["false"], 20).result(WAIT_MS)


def triggered(recipes: Any) -> None:
    with psycopg.connect(recipes.app.database_url) as connection:
        connection.execute(recipes.TRIGGER)
        connection.execute("INSERT INTO articles VALUES (5)")

    def is_done() -> bool:
        rows = recipes.app.tasks_where(name="reindex", status="COMPLETED").unwrap().rows
        return len(rows) == 1

    wait_until(is_done, 30)


# By the heading of the recipe.
CHECKS: dict[str, Callable[[Any, Path], object]] = {
    "Send mail after commit": lambda r, _: expect(r.sign_up("ada@a.org"), "mail to ada@a.org"),
    "Call an API that limits your rate": lambda r, _: expect(
        r.temperature.enqueue("Bonn").result(WAIT_MS), 21.5
    ),
    "At most two at a time per customer": lambda r, _: expect(
        sorted(h.result(WAIT_MS) for h in [r.invoice.enqueue("ada", n) for n in range(3)]),
        ["ada-0", "ada-1", "ada-2"],
    ),
    "One job at a time": lambda r, _: one_per_key(r),
    "Wait until the user stops typing": lambda r, _: quiet(r),
    "Show a progress bar": lambda r, _: progress(r),
    "Fan out, then collect": lambda r, _: expect(
        r.words_of("example.org").start().unwrap().result(WAIT_MS), 39
    ),
    "A nightly report that catches up": lambda r, _: expect(
        r.report.enqueue().result(WAIT_MS), "report for now"
    ),
    "Pass large files by reference": by_reference,
    "Charge a card once": lambda r, _: charged_once(r),
    "Wait for a person: a human in the loop": lambda r, _: approved(r),
    "Many calls of a language model": lambda r, _: expect(
        r.complete.enqueue("hello").result(WAIT_MS), "[hello]"
    ),
    "Handle failed tasks, without a dead-letter queue": lambda r, _: failed(r),
    "Keep tenants apart": lambda r, _: expect(r.for_tenant("blue"), "blue"),
    "Run a program with a time limit": lambda r, _: slow_program(r),
    "Work through a million rows": lambda r, _: expect(r.archive_all(10_500), 10_500),
    "Report errors": lambda r, _: last_error(r),
    "Survive a deployment": lambda r, _: expect(r.crawl.enqueue(9).result(WAIT_MS), 9),
    "Load a model once per process": lambda r, _: expect(
        r.classify.enqueue("a").result(WAIT_MS), "a: ready"
    ),
    "Send from a trigger": lambda r, _: triggered(r),
}


def expect(found: object, wanted: object) -> None:
    assert found == wanted


@pytest.mark.parametrize("heading", CHECKS)
def test_a_recipe_works(recipes: Any, heading: str, tmp_path: Path) -> None:
    CHECKS[heading](recipes, tmp_path)


def test_every_recipe_is_checked() -> None:
    assert re.findall("^## (.+)$", page("cookbook.md"), re.MULTILINE) == list(CHECKS)
