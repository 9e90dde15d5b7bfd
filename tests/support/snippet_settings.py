"""The settings of code blocks that cannot run with their page alone; each setting runs its blocks and
checks their effects. Such a block has a mark in its page, as in `python with-setting`. `SETTINGS` has
one function per page. It receives the text of these blocks in order, the URL of a database with empty
tables, and a directory.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, TypeAlias

import django.db
import psycopg
from sqlalchemy import Engine, create_engine
from sqlalchemy import text as sql
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column

import horsies
from horsies import Horsies, current_task
from horsies.testing import check_replay, clock_of, run_pending
from tests.support.callers import alchemy_url, configure_django
from tests.support.commands import running_worker
from tests.support.doc_pages import REPOSITORY, blocks, files, page
from tests.support.followed_pages import make_files
from tests.support.wait import wait_until

Setting: TypeAlias = Callable[[list[str], str, Path], None]
Names: TypeAlias = dict[str, Any]


def run(text: str, names: Names) -> Names:
    """Run a block with these names; the block may add names."""
    exec(compile(text, "a block", "exec", dont_inherit=True), names)
    return names


@contextmanager
def modules(**contents: ModuleType | SimpleNamespace) -> Iterator[None]:
    """Make modules importable during the block; `shop__background` is `shop.background`."""
    named = {name.replace("__", "."): module for name, module in contents.items()}
    before = {name: sys.modules.get(name) for name in named}
    sys.modules.update(named)  # type: ignore[arg-type]
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name)
            if module is not None:
                sys.modules[name] = module


def orders_table(url: str) -> psycopg.Connection[Any]:
    """Yield a connection, after creating a table `orders` with order 7."""
    connection = psycopg.connect(url, autocommit=True)
    connection.execute("DROP TABLE IF EXISTS orders, refunds")
    connection.execute(
        "CREATE TABLE orders (id int PRIMARY KEY, total int, paid bool, shipped bool, placed bool)"
    )
    connection.execute("CREATE TABLE refunds (order_id int PRIMARY KEY)")
    connection.execute("INSERT INTO orders VALUES (7, 40)")
    return connection


class _Base(DeclarativeBase):
    """The rows of a shop."""


class Refund(_Base):
    """A row that a reader writes in a separate transaction."""

    __tablename__ = "refunds"
    order_id: Mapped[int] = mapped_column(primary_key=True)


class Payments:
    """A payment service that remembers its idempotency keys."""

    def __init__(self) -> None:
        self.keys: dict[str, int] = {}

    def charge(self, order_id: int, idempotency_key: str) -> str:
        self.keys[idempotency_key] = order_id
        return "charged"


def exactly_once(texts: list[str], url: str, _: Path) -> None:
    """Check that the tasks write the rows of order 7 and commit with them, and that the other system
    rejects an outdated attempt.
    """
    *tasks, guarded = texts
    payments, engine = Payments(), create_engine(alchemy_url(url))
    names: Names = {"Session": Session, "engine": engine, "Refund": Refund, "payments": payments}
    names |= {"__name__": "booking", "current_task": current_task}
    names["AsyncTaskTransaction"] = horsies.AsyncTaskTransaction
    with orders_table(url) as connection:
        for task in tasks:
            run(task, names)
        for task in ("book_shipment", "book_refund", "place_order"):
            names[task].enqueue(7)
        ended = run_pending(names["app"])
        row = connection.execute("SELECT paid, shipped, placed FROM orders").fetchone()
        assert connection.execute("SELECT order_id FROM refunds").fetchall() == [(7,)]
        connection.execute("DROP TABLE orders, refunds")
    assert rows_changed(engine, guarded, tokens=(5, 5, 6, 5)) == [1, 1, 1, 0]
    engine.dispose()
    assert (row, ended.completed, list(payments.keys.values())) == ((True, True, True), 7, [7])


def rows_changed(engine: Engine, update: str, tokens: Sequence[int]) -> list[int]:
    """Update a device with each token in turn; return the number of rows that each update changes."""
    with engine.connect() as connection:
        connection.execute(sql("CREATE TEMP TABLE devices AS SELECT 1 id, 0 firmware, 0 token"))
        values = [{"device": 1, "firmware": 2, "token": token} for token in tokens]
        return [connection.execute(sql(update), value).rowcount for value in values]


def engine_at_import(texts: list[str], url: str, _: Path) -> None:
    """Run the task that the page warns about, with parent and child in one process."""
    (text,) = texts
    engine, app = create_engine(alchemy_url(url)), Horsies(url)
    database = SimpleNamespace(engine=lambda: engine)
    with modules(shop=SimpleNamespace(database=database), shop__database=database):
        names = run(text, {"app": app, "__name__": "report"})
        sent = names["report"].enqueue()
        run_pending(app)
    assert names["connections"] is engine
    assert sent.get(0).is_err()  # The body `...` returns None, which is not an int.
    engine.dispose()


def django_block(texts: list[str], url: str, _: Path) -> None:
    """Check that a send inside Django's `atomic()` commits with the order."""
    (text,) = texts
    configure_django(url)
    app, saved = Horsies(url), []

    @app.task("confirm")
    def confirm(order_id: int) -> int:
        return order_id

    order = SimpleNamespace(id=17, save=lambda: saved.append(django.db.connection.in_atomic_block))
    try:
        run(text, {"django": django, "order": order, "confirm": confirm})
    finally:
        django.db.connection.close()
    assert saved == [True]
    assert run_pending(app).completed == 1


def durable_tests(texts: list[str], url: str, directory: Path) -> None:
    """Skip the waits of a durable function, and replay its record."""
    skipped, replayed = texts
    first = blocks(page("durable-functions.md"))[0].text.replace('"embedded://"', "")
    names: Names = {"__name__": "accounts", "run_pending": run_pending, "clock_of": clock_of}
    run(skipped, run(first, names))
    record = names["app"].durable_handle(names["sent"].task_id).export().unwrap()
    records = directory / "tests" / "records"
    records.mkdir(parents=True)
    (records / "onboard.json").write_text(json.dumps(record))
    os.chdir(directory)
    run(replayed, names | {"check_replay": check_replay})["test_old_runs_fit_the_code"]()


def send_from_sql(texts: list[str], url: str, directory: Path) -> None:
    """Send from pg_cron, replaced by a function that records the command, and as a role with the
    documented rights.
    """
    scheduled, rights = texts
    make_files({"tasks.py": files(page("sending-from-sql.md"))["tasks.py"]}, directory)
    with running_worker(directory, url), psycopg.connect(url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA cron")
        connection.execute(
            "CREATE FUNCTION cron.schedule(name text, slots text, command text) RETURNS text "
            "LANGUAGE sql AS 'SELECT command'"
        )
        (command,) = connection.execute(scheduled.encode()).fetchone() or ("",)
        connection.execute("DROP SCHEMA cron CASCADE")
        known = "SELECT FROM horsies_task_defaults WHERE task_name = 'confirm'"
        wait_until(lambda: connection.execute(known).rowcount == 1, what="the worker's tasks")
        send_with_rights(connection, rights, command)
        ended = "SELECT FROM horsies_tasks WHERE status = 'COMPLETED'"
        wait_until(lambda: connection.execute(ended).rowcount == 2, what="two results")


def send_with_rights(connection: psycopg.Connection[Any], rights: str, command: str) -> None:
    """Send as the owner, and as a role with only the documented rights."""
    connection.execute(command.encode())
    role = f"shop_trigger_{os.getpid()}"
    here = rights.replace("horsies.horsies_", "horsies_").replace("SCHEMA horsies", "SCHEMA public")
    connection.execute(f"CREATE ROLE {role}".encode())
    try:
        connection.execute(here.replace("shop_trigger", role).encode())
        connection.execute(f"SET ROLE {role}".encode())
        connection.execute(command.encode())
    finally:
        connection.execute("RESET ROLE")
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}".encode())


def celery_beside_horsies(texts: list[str], url: str, _: Path) -> None:
    """Send a Horsies task from a Celery task, whose decorator is replaced by one that returns the
    function.
    """
    (text,) = texts
    app = Horsies(url)

    @app.task("shop.charge")
    def charge(order_id: int) -> int:
        return order_id

    celery = SimpleNamespace(task=lambda name: lambda function: function)
    background = SimpleNamespace(charge=charge)
    with modules(shop=SimpleNamespace(background=background), shop__background=background):
        run(text, {"celery_app": celery})["charge_the_old_way"](17)
    assert run_pending(app).completed == 1


# A process can set its provider only once, so the block about it runs in a separate process.
_BEFORE_TRACING = """
import sys, types
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
spans = InMemorySpanExporter()
exporter = types.SimpleNamespace(OTLPSpanExporter=lambda: spans)
sys.modules["opentelemetry.exporter.otlp.proto.http.trace_exporter"] = exporter
"""
_AFTER_TRACING = """
from opentelemetry import trace
with trace.get_tracer("a test").start_as_current_span("a span"):
    pass
trace.get_tracer_provider().force_flush()
print(*(f"{span.name} of {span.resource.attributes['service.name']}" for span in spans.get_finished_spans()))
"""


_BEFORE_SENTRY = """
import sys

from horsies import Horsies, current_task
from horsies.testing import run_pending

sys.path.insert(0, sys.argv[2])
app = Horsies(sys.argv[1])
"""
_AFTER_SENTRY = """

@app.task("has_trace")
def has_trace() -> bool:
    return "sentry-trace" in current_task().headers

sent = has_trace.enqueue()
run_pending(app)
print(sent.result(timeout_ms=0))
app.close()
"""


def tracing(texts: list[str], url: str, _: Path) -> None:
    """Check that the page's provider exports spans to memory, and that Sentry's hooks run around a task."""
    installed, sentry = texts
    assert printed_by(_BEFORE_TRACING + installed + _AFTER_TRACING) == "a span of shop\n"
    examples = str(REPOSITORY / "examples")
    assert printed_by(_BEFORE_SENTRY + sentry + _AFTER_SENTRY, url, examples) == "True\n"


def printed_by(script: str, *arguments: str) -> str:
    """Run a script that changes its whole process, as tracers do, and return its output."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SETTINGS: dict[str, Setting] = {
    "coming-from-celery.md": celery_beside_horsies,
    "durable-functions.md": durable_tests,
    "exactly-once.md": exactly_once,
    "hooks.md": engine_at_import,
    "sending-from-sql.md": send_from_sql,
    "sending.md": django_block,
    "tracing.md": tracing,
    "transactions.md": django_block,
}
