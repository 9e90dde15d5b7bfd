"""The order system in examples/shop runs as its page says: gateway, two workers, a tour."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psycopg

from tests.support.commands import environment
from tests.support.doc_pages import REPOSITORY, rows
from tests.support.ports import free_port
from tests.support.wait import wait_until

SHOP = REPOSITORY / "examples" / "shop"
TOUR = """\
confirmed 6500 cents
shipped order 1: 3 pieces, receipt R1
refused CARD_REFUSED the card was refused
invoices ada-1 ada-2 ada-3 ada-4 ada-5
import COMPLETED 50000 of 50000, article 50000
one report True 1
recommended lamp tea
by name bulb
failed CARD_REFUSED
"""
# The task that an order names, the worker of each queue, and the schedules.
CONFIRMED = """
SELECT task.task_name FROM shop_orders JOIN horsies_tasks AS task ON task.id::text = confirmed_by
"""
SERVED = """
SELECT DISTINCT task.queue_name, worker.name FROM horsies_task_attempts AS tried
JOIN horsies_tasks AS task ON task.id = tried.task_id JOIN horsies_workers AS worker USING (worker_id)
ORDER BY task.queue_name
"""
SCHEDULED = "SELECT schedule_name FROM horsies_schedule_state"


@contextmanager
def running(env: dict[str, str], log: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=SHOP, env=env, stdout=output, stderr=output
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(30)


def test_the_tour_of_the_shop_runs_as_its_page_says(tmp_path: Path, database_url: str) -> None:
    port = free_port()
    env = environment(HORSIES_DATABASE_URL=database_url, SHOP_GATEWAY=f"http://127.0.0.1:{port}")
    workers = {
        "orders": ("--queues", "orders,payments,invoices", "--with-scheduler"),
        "reports": ("--queues", "reports", "--name", "reports"),
    }
    with ExitStack() as stack:
        stack.enter_context(running(env, tmp_path / "gateway", "shop.gateway", str(port)))
        for name, options in workers.items():
            command = ("horsies", "worker", "shop.app:app", "-c", "2", *options)
            stack.enter_context(running(env, tmp_path / name, *command))
        for name in workers:
            log = tmp_path / name
            wait_until(lambda log=log: "listening on" in log.read_text(), 60, log.read_text)  # type: ignore[misc]
        tour = subprocess.run(
            [sys.executable, "-m", "shop.main"],
            cwd=SHOP,
            env=env,
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
    logs = (tmp_path / "orders").read_text()
    assert tour.returncode == 0, tour.stderr + logs
    shown = [
        line for line in tour.stdout.splitlines() if not re.match("import (PEND|CLAI|RUNN)", line)
    ]
    assert shown == TOUR.splitlines()
    assert "works for ada" in logs
    assert "retried by RetryLater" in logs
    with psycopg.connect(database_url) as connection:
        assert connection.execute(CONFIRMED).fetchall() == [("shop.tasks.confirm",)]
        by_first_worker = [("invoices", None), ("orders", None), ("payments", None)]
        assert connection.execute(SERVED).fetchall() == [*by_first_worker, ("reports", "reports")]
        assert connection.execute(SCHEDULED).fetchall() == [("daily-report",)]


def test_its_code_is_in_the_short_form() -> None:
    code = "".join(path.read_text() for path in SHOP.rglob("*.py"))
    assert "TaskResult" not in code
    assert code.count("unwrap") < 10


def test_its_page_names_functions_that_exist() -> None:
    code = "".join(path.read_text() for path in SHOP.rglob("*.py"))
    places = [place for _, place in rows((SHOP / "README.md").read_text())]
    names = {name for place in places for name in re.findall(r"`(\w+)`", place)}
    assert {"charge", "confirm", "import_catalogue", "invoice", "load_recommendations"} <= names
    assert [name for name in names if name not in code and name not in ("RetryLater",)] == []
