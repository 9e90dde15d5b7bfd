"""The FastAPI and Django examples serve real requests beside a real worker."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.support.commands import EXAMPLES, environment, run, worker
from tests.support.doc_pages import REPOSITORY, blocks, page
from tests.support.ports import free_port
from tests.support.wait import wait_until


@contextmanager
def served(
    directory: Path, database_url: str, log: Path, *command: str, port: int
) -> Iterator[httpx.Client]:
    """Run a web server as a module of this Python until the end of the block; expect a clean stop."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=directory,
            env=environment(HORSIES_DATABASE_URL=database_url),
            stdout=output,
            stderr=output,
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60, verify=False) as client:
            wait_until(lambda: process.poll() is not None or answers(client), 60, log.read_text)
            assert process.poll() is None, log.read_text()
            yield client
    finally:
        process.send_signal(signal.SIGINT)  # runserver does not handle SIGTERM
        assert process.wait(60) == 0, log.read_text()


def answers(client: httpx.Client) -> bool:
    try:
        return client.get("/orders/0").status_code == 404
    except httpx.TransportError:
        return False


def result_of(client: httpx.Client, order_id: int) -> Any:
    """Ask for the order until its task has ended."""

    def ended() -> Any:
        order = client.get(f"/orders/{order_id}").raise_for_status().json()
        return order if order["status"] not in ("PENDING", "CLAIMED", "RUNNING") else None

    return wait_until(ended, 60)


def check_orders(client: httpx.Client, database_url: str, table: str) -> None:
    """Place an order, and one that is rolled back; only the first has a row and a task."""
    placed = client.post("/orders", json={"article": "saddle", "pieces": 2})
    assert placed.status_code == 201, placed.text
    order_id = placed.json()["id"]
    refused = client.post("/orders", json={"article": "saddle", "pieces": 101})
    assert (refused.status_code, refused.json()) == (
        409,
        {"detail": "Only 100 pieces are in stock."},
    )
    assert result_of(client, order_id) == {
        "id": order_id,
        "status": "COMPLETED",
        "result": "confirmed: 2 x saddle",
    }
    with psycopg.connect(database_url) as connection:
        orders = connection.execute(f"SELECT task_id FROM public.{table}".encode()).fetchall()
        tasks = connection.execute("SELECT id::text FROM horsies_tasks").fetchall()
    assert len(orders) == 1
    assert orders == tasks


def test_fastapi_serves_orders_with_their_tasks(tmp_path: Path, database_url: str) -> None:
    port = free_port()
    with worker("fastapi", database_url, tmp_path) as directory:
        command = ("-m", "uvicorn", "api:api", "--port", str(port))
        with served(
            directory, database_url, tmp_path / "uvicorn.log", *command, port=port
        ) as client:
            check_orders(client, database_url, "api_orders")
            page = client.get("/tasks/", follow_redirects=True).raise_for_status()
            assert 'href="/tasks/queues' in page.text
            tasks = client.get("/tasks/api/tasks").raise_for_status().json()["tasks"]
            assert [task["task_name"] for task in tasks] == ["orders.confirm"]


def test_django_serves_orders_with_their_tasks(tmp_path: Path, database_url: str) -> None:
    port = free_port()
    with worker("django", database_url, tmp_path) as directory:
        made = run(directory, [sys.executable, "manage.py", "migrate"], database_url)
        assert made.returncode == 0, made.stderr
        command = ("manage.py", "runserver", "--noreload", str(port))
        with served(
            directory, database_url, tmp_path / "runserver.log", *command, port=port
        ) as client:
            check_orders(client, database_url, "website_order")


@pytest.mark.parametrize("example", ["fastapi", "django"])
def test_the_page_shows_code_of_the_example(example: str) -> None:
    code = "".join(path.read_text() for path in (EXAMPLES / example).rglob("*.py"))
    code = code.replace("  # type: ignore[untyped-decorator]", "")
    backend = (REPOSITORY / "src" / "horsies" / "django" / "__init__.py").read_text()
    code += backend.replace("\n    ", "\n")  # the example of its docstring
    shown = [
        block.text for block in blocks(page(f"{example}.md")) if block.language.startswith("python")
    ]
    assert len(shown) >= 3
    assert [text for text in shown if text.strip() not in code] == []
