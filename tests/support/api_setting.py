"""The names that the Python API's examples use, and the effects that they must have. Examples in
docstrings are short and use names of the reader's program. This module defines these names: an
application with tasks, durable functions and nodes. `CHECKS` has the conditions that must hold after an
example; `RAISED` lists the examples that must raise an exception.
"""

from __future__ import annotations

import json
import logging
import os
import re
import textwrap
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, time, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import fastapi
from pydantic import BaseModel

import horsies
import horsies.testing
import horsies.web
from horsies import Horsies
from tests.support.doc_pages import REPOSITORY

Names: TypeAlias = dict[str, Any]
_BLOCK = re.compile(r"^```python with-setting\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


class Row(BaseModel):
    """An element of a batch."""

    number: int


def examples() -> dict[str, str]:
    """Return all examples by `page: entry`."""
    found = {}
    for path in sorted((REPOSITORY / "docs" / "api").glob("*.md")):
        text = path.read_text("utf-8")
        for block in _BLOCK.finditer(text):
            entry = _HEADING.findall(text[: block.start()])[-1].strip("`")
            found[f"{path.stem}: {entry}"] = block[1]
    return found


def tasks_of(app: Horsies) -> Names:
    """Return the tasks that examples send, use as nodes, or call in a step."""

    @app.task("stage.add")
    def add(a: int, b: int) -> int:
        return a + b

    @app.task("stage.fetch")
    def fetch(url: str) -> str:
        return url.upper()

    @app.task("stage.render")
    def render_task(page: str) -> str:
        return f"<p>{page}</p>"

    @app.task("confirm")
    def confirm(order_id: int) -> int:
        return order_id

    return {"add": add, "task": confirm, "fetch": fetch, "fetch_task": fetch} | {
        "render_task": render_task,
        **dict.fromkeys(("confirm", "receipt", "reindex"), confirm),
        "place_order": lambda order_id: confirm.enqueue(order_id),
    }


def durable_names(app: Horsies) -> Names:
    """Return a durable function that waits for a signal, and its step functions."""

    def create_account(user_id: int) -> str:
        return f"account-{user_id}"

    def send_tips(account: str) -> str:
        return account

    @app.durable("stage.onboard")
    def onboard(ctx: horsies.Durable, user_id: int) -> bool:
        ctx.step(create_account, user_id)
        return ctx.wait_signal("approve", bool)

    return {"create_account": create_account, "send_tips": send_tips, "onboard": onboard}


def graph_names(app: Horsies, tasks: Names) -> Names:
    """Return nodes, a definition and a graph."""
    add, fetch = tasks["add"], tasks["fetch"]
    nodes = ("first", "second", "order", "reminder", "charge", "ship", "card", "invoice")
    names = {
        name: add.node(node_id=name)(a=1, b=2) for name in (*nodes, "newsletter", "total_node")
    }

    class Billing(horsies.WorkflowDefinition[Any]):
        """A workflow that is a node of another workflow."""

        name = "billing"
        definition_key = "billing.v1"

        @classmethod
        def build_with(cls, app: Horsies, order_id: int) -> horsies.WorkflowSpec[Any]:
            return app.workflow("billing", [add.node()(a=order_id, b=0)])

    def build_report(day: date) -> horsies.WorkflowSpec[Any]:
        page = fetch.node()(url=str(day))
        return app.workflow(f"report {day}", [page], output=page, definition_key="day.v1")

    spec = build_report(date(2026, 1, 1))
    return names | {"Billing": Billing, "build_report": build_report, "spec": spec}


def plain_names(directory: Path) -> Names:
    """Return the values that examples assume to exist."""
    return {
        "os": os,
        "json": json,
        "Path": Path,
        "Collection": Collection,
        "Row": Row,
        "time": time,
        "timedelta": timedelta,
        "ROOT": directory,
        "log": logging.getLogger("shop"),
        "urls": ["a", "b"],
        "days": [date(2026, 1, 1), date(2026, 1, 2)],
        "now": datetime(2026, 1, 1, tzinfo=UTC),
        "number": 7,
        "row": {"task_options": '{"headers": {"tenant": "7"}}'},
        "response": SimpleNamespace(status_code=429, headers={"Retry-After": "1.5"}),
        "api": fastapi.FastAPI(),
    }


def setting(app: Horsies, directory: Path) -> Names:
    """Return every name that examples may use."""
    names = {
        name: getattr(module, name)
        for module in (horsies, horsies.testing, horsies.web)
        for name in module.__all__
    }
    tasks = tasks_of(app)
    names |= tasks | durable_names(app) | graph_names(app, tasks) | plain_names(directory)
    return names | {"app": app, "__name__": "shop"}


@contextmanager
def everything_runs(app: Horsies) -> Iterator[None]:
    """Run due tasks and nodes in a thread for the duration of the block."""
    ended = threading.Event()

    def run_all() -> None:
        while not ended.wait(0.02):
            horsies.testing.run_pending(app)

    thread = threading.Thread(target=run_all)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def run_example(text: str, names: Names) -> None:
    """Run an example. An example with `return` runs as the body of a function, whose return value is
    then `returned`.
    """
    if text.lstrip().startswith("return "):
        text = f"def example():\n{textwrap.indent(text, '    ')}\nreturned = example()\n"
    exec(compile(text, "an example", "exec", dont_inherit=True), names)
