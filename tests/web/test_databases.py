"""`horsies web` over several databases: the list of all, one dashboard below each name."""

from __future__ import annotations

import re
from collections.abc import Iterator

import psycopg
import pytest

from tests.support.database import Database
from tests.support.locks import locked
from tests.support.rows import add_task
from tests.support.wait import wait_until
from tests.support.web_server import DOWN, WebServer, served


@pytest.fixture
def server(process_url: str, other_url: str, connection: Database) -> Iterator[WebServer]:
    add_task(connection, queue_name="mail")
    with psycopg.connect(other_url, autocommit=True) as other:
        add_task(other, queue_name="video")
    named = {"orders": process_url, "media": other_url, "down": DOWN}
    words = [word for name, url in named.items() for word in ("--database-url", f"{name}={url}")]
    with served(*words) as server:
        yield server


def row_of(page: str, name: str) -> str:
    (row,) = re.findall(rf'<tr data-key="{name}">(.*?)</tr>', page, re.DOTALL)
    return str(row)


def test_the_list_has_every_database_and_names_the_one_that_is_down(server: WebServer) -> None:
    def page() -> str:
        return server.get("/").text

    # A database that takes longer than a second fills its row in a later view.
    wait_until(lambda: "no worker" in row_of(page(), "orders"))
    wait_until(lambda: "no worker" in row_of(page(), "media"))
    wait_until(lambda: "refused" in row_of(page(), "down"))
    text = page()
    assert 'href="/db/media/"' in row_of(text, "media")
    assert "cannot be read" in row_of(text, "down")
    assert "hunter2" not in text
    assert 'data-live="/live/"' in text
    assert server.get("/readyz").text == "cannot be read: down\n"


def test_a_locked_database_has_a_row_that_names_the_holder_and_hides_no_other(
    server: WebServer, process_url: str
) -> None:
    with locked(process_url, "horsies_tasks") as pid:
        wait_until(lambda: f"pid {pid} (user" in row_of(server.get("/").text, "orders"))
        row = row_of(server.get("/").text, "orders")
        wait_until(lambda: "no worker" in row_of(server.get("/").text, "media"))
        metrics = server.get("/metrics").text
    assert f"<code>SELECT pg_terminate_backend({pid})</code>" in row
    ups = dict(re.findall(r'^horsies_up\{database="(\w+)"\} (\S+)$', metrics, re.M))
    assert ups == {"orders": "0.0", "media": "1.0", "down": "0.0"}


def test_a_dashboard_of_one_database_links_to_the_others(server: WebServer) -> None:
    text = server.get("/db/media/queues").text
    assert "video" in text
    assert "mail" not in text
    assert "<title>Queues · media · horsies</title>" in text
    links = re.findall(r'<a href="([^"]*)"[^>]*>\s*(All databases|orders|media|down)</a>', text)
    assert {name: link for link, name in links} == {
        "All databases": "/",
        "orders": "/db/orders/",
        "media": "/db/media/",
        "down": "/db/down/",
    }
    assert 'href="/db/media/tasks"' in text
    assert server.get("/db/down/queues").status_code == 503
    assert server.get("/db/orders", follow_redirects=True).url.path == "/db/orders/"
    assert server.get("/db/unknown/").status_code == 404


def test_metrics_of_all_databases_are_at_one_address(server: WebServer) -> None:
    text = server.get("/metrics").text
    ups = dict(re.findall(r'^horsies_up\{database="(\w+)"\} (\S+)$', text, re.M))
    assert ups == {"orders": "1.0", "media": "1.0", "down": "0.0"}
    assert "horsies_up 1.0" in server.get("/db/orders/metrics").text


def test_a_prefix_of_a_proxy_stays_in_front_of_all_links(process_url: str, other_url: str) -> None:
    words = ["--database-url", f"a={process_url}", "--database-url", f"b={other_url}"]
    with served(*words, "--root-path", "/ops") as server:
        assert 'href="/ops/db/a/"' in server.get("/").text
        assert 'href="/ops/db/b/tasks"' in server.get("/db/b/").text
