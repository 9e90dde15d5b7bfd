"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from horsies import Err, Ok
from horsies.app import Horsies
from horsies.task_result import TaskError, TaskResult
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError
from horsies.tasks.handle import TaskHandle
from tests.support.applications import Call
from tests.support.database import Database
from tests.support.doc_pages import REPOSITORY
from tests.support.proxy import Proxy
from tests.support.rows import finish

# Results


def test_a_get_after_an_outage_connects_by_itself(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    @distant_app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    handle = add.send(1).unwrap()
    finish(connection, handle.task_id)
    proxy.stop()
    # Failed reconnects: the next one by the clock alone is seconds away.
    for _ in range(6):
        assert distant_app.handle(handle.task_id).get(timeout_ms=0).is_err()
    proxy.start()
    for timeout_ms in (0, 20_000):
        assert call(distant_app, distant_app.handle(handle.task_id), "get", timeout_ms).is_ok()


# Examples of the documentation

RUN_PAGE = """
from tests.project.test_docs import _run_page
app = _run_page("sending.md")["app"]
print(app.database_url)
app.close()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path that the user of an embedded server may enter."""
    parent = Path(tempfile.mkdtemp(prefix="horsies-embedded-"))
    parent.chmod(0o755)
    yield parent / "data"
    shutil.rmtree(parent)


def test_the_examples_of_sends_run_with_the_embedded_database(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE],
        cwd=REPOSITORY,
        env=os.environ | {"HORSIES_DATABASE_URL": f"embedded://{directory}"},
        timeout=120,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = done.stdout.splitlines()[-1]
    assert address.startswith("postgresql://")
    assert str(directory) in address


def test_the_address_for_other_libraries_is_one_that_libpq_reads() -> None:
    app = Horsies("postgresql+psycopg://app:hunter2@127.0.0.1:1/shop")
    assert app.database_url == "postgresql://app:hunter2@127.0.0.1:1/shop"


# Forgotten unwraps

FAILED = Err(BrokerOperationError(BrokerErrorCode.NO_BROKER, "no database"))


@pytest.mark.parametrize("result", [Ok(1), Ok(False), FAILED])
def test_ok_and_err_are_neither_true_nor_false(result: Any) -> None:
    with pytest.raises(TypeError, match=r"is neither true nor false; call is_ok\(\) or is_err\(\)"):
        bool(result)


@pytest.mark.parametrize(
    ("result", "name", "hint"),
    [
        (Ok(TaskHandle("x", None)), "get", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "task_id", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "result_of", ""),
        (FAILED, "message", "; call .unwrap_err() first"),
        (
            FAILED,
            "get",
            "; it holds the error of a failed call: match it, or call .unwrap() to raise it",
        ),
    ],
)
def test_an_attribute_of_the_value_says_unwrap_first(result: Any, name: str, hint: str) -> None:
    kind = type(result).__name__
    with pytest.raises(AttributeError) as refused:
        getattr(result, name)
    assert str(refused.value) == f"'{kind}' object has no attribute '{name}'{hint}"
