"""Every recipe of the cookbook does what it says, on a real worker."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psycopg
import pytest

from horsies import (
    AppConfig,
    Horsies,
    PostgresConfig,
    ScheduleConfig,
    TaskFailed,
    calculate_next_run,
)
from horsies.testing.worker import WorkerProcess, running_worker
from tests.support.doc_pages import blocks, page
from tests.support.scheduling import enter, make_due, tick
from tests.support.wait import wait_until

WAIT_MS = 30_000
# An address that exists twice is refused at COMMIT, when the task of the recipe is already inserted.
TABLES = """
CREATE TABLE accounts (address text UNIQUE DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE articles (id integer);
CREATE TABLE invoices_at_work (customer text, together bigint);
"""
# Notes how many invoices of the customer run, and lets none end before the test says so.
GATE_KEY = 8_181
GATE = f"""

@billing.around_task
def counted_and_gated(task: CurrentTask) -> Iterator[None]:
    with psycopg.connect(billing.database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO invoices_at_work SELECT lane_key, count(*) FROM horsies_tasks WHERE status "
            "= 'RUNNING' AND lane_key = (SELECT lane_key FROM horsies_tasks WHERE id = %s) GROUP BY 1",
            (task.id,),
        )
        connection.execute("SELECT pg_advisory_lock_shared({GATE_KEY})")
    yield
"""


@pytest.fixture(scope="module")
def module_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A directory on the path, with all blocks of the page as one module."""
    directory = tmp_path_factory.mktemp("cookbook")
    code = "\n\n".join(block.text for block in blocks(page("cookbook.md")) if block.is_run)
    (directory / "cookbook_page.py").write_text(code + GATE)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(directory))
        yield directory


@pytest.fixture(scope="module")
def worker(module_directory: Path, process_url: str) -> Iterator[WorkerProcess]:
    """A worker that serves the recipes."""
    with psycopg.connect(process_url) as connection:
        connection.execute(TABLES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HORSIES_DATABASE_URL", process_url)
        options = ("-c", "2", "--async-children", "1", "--async-slots", "10")
        with running_worker("cookbook_page:app", process_url, module_directory, options) as started:
            yield started
    with psycopg.connect(process_url) as connection:
        connection.execute("DROP TABLE accounts, articles, invoices_at_work")


@pytest.fixture(scope="module")
def recipes(worker: WorkerProcess) -> Iterator[Any]:
    """The page as a module, whose tasks the worker runs."""
    module = import_module("cookbook_page")
    yield module
    module.app.close()
    module.billing.close()
    sys.modules.pop("cookbook_page")


def mailed(recipes: Any) -> None:
    assert recipes.sign_up("ada@a.org") == "mail to ada@a.org"
    with (
        psycopg.connect(recipes.app.database_url) as connection,  # closed even if COMMIT fails
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(recipes, "psycopg", SimpleNamespace(connect=lambda _: connection))
        with pytest.raises(psycopg.errors.UniqueViolation):
            recipes.sign_up("ada@a.org")
    assert len(recipes.app.tasks_where(name="cookbook_page.welcome").unwrap().rows) == 1


def limited_rate(recipes: Any) -> None:
    assert recipes.temperature.enqueue("Bonn").result(WAIT_MS) == 21.5
    assert recipes.humidity.enqueue("Bonn").result(WAIT_MS) == 0.6


def two_per_customer(recipes: Any, directory: Path) -> None:
    url = recipes.billing.database_url
    with (
        psycopg.connect(url, autocommit=True) as connection,
        running_worker("cookbook_page:billing", url, directory, ("-c", "4")),
        closed_gate(connection),
    ):
        handles = [recipes.invoice.enqueue("ada", number) for number in range(5)]
        wait_until(lambda: at_work(connection, "ada") >= 2, 60)
        other = recipes.invoice.enqueue("bob", 0)  # the worker claims it past the tasks of ada
        wait_until(lambda: at_work(connection, "bob") == 1, 60)
        connection.execute("SELECT pg_advisory_unlock(%s)", (GATE_KEY,))
        assert [one.result(WAIT_MS) for one in handles] == [f"ada-{n}" for n in range(5)]
        assert other.result(WAIT_MS) == "bob-0"
        counts = "SELECT max(together) FROM invoices_at_work WHERE customer = 'ada'"
        assert connection.execute(counts).fetchone() == (2,)


@contextmanager
def closed_gate(connection: psycopg.Connection) -> Iterator[None]:
    connection.execute("SELECT pg_advisory_lock(%s)", (GATE_KEY,))
    try:
        yield
    finally:
        connection.execute("SELECT pg_advisory_unlock_all()")


def at_work(connection: psycopg.Connection, customer: str) -> int:
    query = "SELECT count(*) FROM invoices_at_work WHERE customer = %s"
    row = connection.execute(query, (customer,)).fetchone()
    assert row is not None
    return int(row[0])


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


def caught_up(recipes: Any) -> None:
    """The schedule, on record since two days without a scheduler, sends a report for each slot."""
    url = recipes.app.database_url
    config = AppConfig(
        broker=PostgresConfig(database_url=url),
        schedule=ScheduleConfig(schedules=[recipes.NIGHTLY]),
    )
    app = Horsies(config)
    app.task("report")(recipes.report.function)
    missed = slots_since(recipes.NIGHTLY, timedelta(days=2, hours=2))
    assert len(missed) >= 2
    with psycopg.connect(url, autocommit=True) as connection:
        registry = enter(connection, app)
        make_due(connection, missed[0], "nightly-report")

        def all_are_sent() -> bool:
            tick(connection, registry)  # the next slot is sent when the report before it has ended
            return len(completed(app, "report")) == len(missed)

        wait_until(all_are_sent, 60)
    results = sorted(
        app.get_result(task_id, WAIT_MS).unwrap() for task_id in completed(app, "report")
    )
    assert results == [f"report for {slot}" for slot in missed]
    app.close()


def slots_since(schedule: Any, age: timedelta) -> list[datetime]:
    """The slots of a schedule from that long ago until now."""
    now = datetime.now(UTC)
    slots = [calculate_next_run(schedule.pattern, now - age, schedule.timezone)]
    while slots[-1] < now:
        slots.append(calculate_next_run(schedule.pattern, slots[-1], schedule.timezone))
    return slots[:-1]


def completed(app: Horsies, name: str) -> list[str]:
    rows = app.tasks_where(name=name, status="COMPLETED").unwrap().rows
    return [row.id for row in rows]


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


def reported(recipes: Any) -> None:
    handle = recipes.convert.enqueue(["false"], 20)
    with pytest.raises(TaskFailed):
        handle.result(WAIT_MS)
    log = Path(recipes.__file__).with_name("worker.log")
    line = re.compile(f"{handle.task_id}.*cookbook_page.convert failed for the last time")
    wait_until(lambda: line.search(log.read_text()) is not None, 30, log.read_text)


def kept_apart(recipes: Any) -> None:
    assert [recipes.for_tenant(one) for one in ("blue", "green")] == ["blue", "green"]
    assert recipes.who.enqueue().result(WAIT_MS) == "nobody"


def triggered(recipes: Any) -> None:
    with psycopg.connect(recipes.app.database_url) as connection:
        connection.execute(recipes.TRIGGER)
        connection.execute("INSERT INTO articles VALUES (5)")

    wait_until(lambda: len(completed(recipes.app, "reindex")) == 1, 30)


# By the heading of the recipe.
CHECKS: dict[str, Callable[[Any, Path], object]] = {
    "Send mail after commit": lambda r, _: mailed(r),
    "Call an API that limits your rate": lambda r, _: limited_rate(r),
    "At most two at a time per customer": two_per_customer,
    "One job at a time": lambda r, _: one_per_key(r),
    "Wait until the user stops typing": lambda r, _: quiet(r),
    "Show a progress bar": lambda r, _: progress(r),
    "Fan out, then collect": lambda r, _: expect(
        r.words_of("example.org").start().unwrap().result(WAIT_MS), 39
    ),
    "A nightly report that catches up": lambda r, _: caught_up(r),
    "Pass large files by reference": by_reference,
    "Charge a card once": lambda r, _: charged_once(r),
    "Wait for a person: a human in the loop": lambda r, _: approved(r),
    "Many calls of a language model": lambda r, _: expect(
        r.complete.enqueue("hello").result(WAIT_MS), "[hello]"
    ),
    "Handle failed tasks, without a dead-letter queue": lambda r, _: failed(r),
    "Keep tenants apart": lambda r, _: kept_apart(r),
    "Run a program with a time limit": lambda r, _: slow_program(r),
    "Work through a million rows": lambda r, _: expect(r.archive_all(10_500), 10_500),
    "Report errors": lambda r, _: reported(r),
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


def test_a_stopped_worker_returns_the_long_task_to_its_queue(
    recipes: Any, migrated_url: str, tmp_path: Path
) -> None:
    app = Horsies(migrated_url)
    crawl = app.task("cookbook_page.crawl")(recipes.crawl.function)
    handle = crawl.enqueue(1 << 60)  # takes longer than any test
    options = ("-c", "1", "--shutdown-grace", "0.2")
    with running_worker("cookbook_page:app", migrated_url, tmp_path, options) as worker:
        wait_until(lambda: state_of(handle).status == "RUNNING", 60)
        assert worker.stop(60) == 0, worker.log()
    info = state_of(handle)
    assert info.status == "PENDING"
    (attempt,) = info.attempts
    assert attempt.retry_reason == "returned to its queue: the worker stopped"
    app.close()


def state_of(handle: Any) -> Any:
    return handle.info(include_attempts=True).unwrap()


def test_every_recipe_is_checked() -> None:
    assert re.findall("^## (.+)$", page("cookbook.md"), re.MULTILINE) == list(CHECKS)
