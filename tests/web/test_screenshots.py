"""The pictures of the documentation: the dashboard of `make demo KEEP=1`, on a wide screen and on a phone.

`make screenshots` writes them; as a test the same steps check that every page has its content, that nothing
needs sideways scrolling, and that the documentation shows pictures of the same widths.
`HORSIES_SCREENSHOTS_INTO=DIRECTORY pytest -m browser tests/web/test_screenshots.py` takes every page at three
widths, light and dark, with the rows of `tests/support/web_rows.py`.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import psutil
import psycopg
import pytest
from playwright.sync_api import Browser, Page

from horsies.app import Horsies
from tests.support import measures
from tests.support.database import Database
from tests.support.doc_pages import REPOSITORY
from tests.support.web_keyboard import WIDTHS
from tests.support.web_rows import PAGES, fill, path_of
from tests.support.web_server import WebServer, served, watched
from tests.support.workers import DATABASE_VARIABLE

pytestmark = pytest.mark.browser

IMAGES = REPOSITORY / "docs" / "images"
SCREENS: dict[str, tuple[int, int]] = {"wide": (1280, 860), "phone": (360, 780)}
SCHEMES: tuple[Literal["light", "dark"], ...] = ("light", "dark")
WRITES = os.environ.get("HORSIES_WRITE_SCREENSHOTS") == "1"
INTO = os.environ.get("HORSIES_SCREENSHOTS_INTO")


@pytest.fixture(scope="module")
def demo() -> Iterator[WebServer]:
    """The demonstration with its dashboard left up, stopped as by Ctrl-C afterwards."""
    directory = Path(tempfile.mkdtemp(prefix="horsies-demo-"))
    directory.chmod(0o755)
    command = [sys.executable, "-m", "horsies", "demo", "--keep"]
    environment = {**os.environ, "TMPDIR": str(directory), "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    printed = b""
    try:
        with httpx.Client() as client:
            while b"until you press Ctrl-C" not in printed:
                printed += process.stdout.readline()
                assert process.poll() is None, printed.decode()
            found = re.search(rb"http://127\.0\.0\.1:\d+", printed)
            assert found is not None
            yield WebServer(process, found[0].decode(), client)
    finally:
        printed = stop(process)
        left = list(directory.iterdir())
        shutil.rmtree(directory)
    assert process.returncode == 0, printed.decode()
    assert b"horsies init" in printed
    assert left == []


def stop(process: subprocess.Popen[bytes]) -> bytes:
    """Stop it as Ctrl-C does, or by SIGTERM if it does not listen; return the rest of its output."""
    for number in (signal.SIGINT, signal.SIGTERM):
        process.send_signal(number)
        try:
            return process.communicate(timeout=40)[0]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.communicate()[0]


@pytest.fixture(scope="module")
def paths(demo: WebServer) -> dict[str, tuple[str, str]]:
    """The pages to take, each with a text that it must have; a task waits on a paused queue."""
    fill_the_last_hour(demo)
    tasks = {task["task_name"]: task["id"] for task in demo.get("/api/tasks").json()["tasks"]}
    crashed = tasks["crash"]
    order(demo, "/api/queues/default/pause", reason="the bank is down")
    waiting = order(demo, f"/api/tasks/{crashed}/retry")["task_id"]
    runs = demo.get("/api/workflows").json()["workflows"]
    run = next(run["id"] for run in runs if run["parent_workflow_id"] is None)
    return {
        "overview": ("/", "Attempts per minute"),
        "task": (f"/tasks/{tasks['fetch_rate']}", "GATEWAY_DOWN"),
        "run": (f"/workflows/{run}", "approval"),
        "explain": (f"/tasks/{waiting}/explain", "the bank is down"),
    }


def fill_the_last_hour(demo: WebServer) -> None:
    """Store example figures for the charts, which a demonstration of seconds would leave empty."""
    (worker, *_) = psutil.Process(demo.process.pid).children()
    with psycopg.connect(worker.environ()["HORSIES_DATABASE_URL"], autocommit=True) as connection:
        measures.fill_last_hour(connection, {"add": 300, "fetch_rate": 90, "withdraw": 40})


def order(demo: WebServer, path: str, **fields: str) -> Any:
    headers = {"X-Horsies-Intent": "action"}
    response = demo.client.post(demo.url + path, headers=headers, json=fields)
    assert response.is_success, response.text
    return response.json()


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("screen", SCREENS)
def test_pages_look_as_documented(
    demo: WebServer,
    paths: dict[str, tuple[str, str]],
    browser: Browser,
    screen: str,
    scheme: Literal["light", "dark"],
) -> None:
    width, height = SCREENS[screen]
    size: dict[str, int] = {"width": width, "height": height}
    with watched(browser, demo, viewport=size, color_scheme=scheme) as context:
        page = context.new_page()
        for name, (path, text) in paths.items():
            page.goto(path)
            page.get_by_text(text).first.wait_for(state="attached")
            assert _overflow(page) <= 0, f"{name} scrolls sideways"
            image = IMAGES / f"{name}-{screen}-{scheme}.png"
            if WRITES:
                image.write_bytes(
                    page.screenshot()
                )  # with a path, Playwright leaves a thread behind
            assert _width(image) == width


@pytest.mark.skipif(INTO is None, reason="HORSIES_SCREENSHOTS_INTO names no directory")
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_page_is_taken(
    app: Horsies,
    connection: Database,
    process_url: str,
    browser: Browser,
    width: int,
    scheme: Literal["light", "dark"],
) -> None:
    directory = Path(INTO or "")
    examples = fill(app, connection)
    options = ("tests.support.apps.cards:app", "--enable-actions", "--payload")
    size: dict[str, int] = {"width": width, "height": 900}
    with (
        served(*options, env={DATABASE_VARIABLE: process_url}) as server,
        watched(browser, server, viewport=size, color_scheme=scheme) as context,
    ):
        page = context.new_page()
        for route in PAGES:
            page.goto(path_of(route, examples))
            name = re.sub(r"\W+", "-", route.path).strip("-") or "overview"
            image = directory / f"{name}-{width}-{scheme}.png"
            image.write_bytes(page.screenshot(full_page=True))
    assert len(list(directory.glob(f"*-{width}-{scheme}.png"))) == len(PAGES)


def test_the_documentation_shows_every_picture() -> None:
    pages = [path.read_text("utf-8") for path in (REPOSITORY / "docs").glob("*.md")]
    shown = {name for text in pages for name in re.findall(r"images/([\w-]+\.png)", text)}
    assert shown == {path.name for path in IMAGES.glob("*.png")}


def _overflow(page: Page) -> int:
    root = "document.documentElement"
    return int(page.evaluate(f"{root}.scrollWidth - {root}.clientWidth"))


def _width(image: Path) -> int:
    """Return the width that the header of a PNG file names."""
    (width,) = struct.unpack(">I", image.read_bytes()[16:20])
    return int(width)
