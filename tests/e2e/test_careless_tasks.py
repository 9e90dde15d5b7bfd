"""No way to fail leaves an argument in plain text in an encrypted database, or behind after an erasure."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from types import ModuleType
from typing import Any

import pytest

from horsies import FernetCodec, Horsies
from tests.support.database import Database
from tests.support.dump import leaks
from tests.support.proxy import Proxy
from tests.support.tables import wait_until_empty
from tests.support.wait import wait_until
from tests.support.workers import Fleet

APPLICATION = "tests.support.apps.careless:app"
SECRET = "S3CRET"
LOGS = {"log_capture": {"max_lines": 100, "max_bytes": 8_192}}
KEY = FernetCodec.new_key()
# Rows of every table that a failure may write to.
WRITTEN = """
SELECT (SELECT count(*) FROM horsies_task_attempts WHERE error_message IS NOT NULL) > 12
    AND (SELECT count(*) FROM horsies_task_logs) > 3 AND (SELECT count(*) FROM horsies_steps) > 1
    AND (SELECT count(*) FROM horsies_workflow_tasks WHERE status = 'FAILED') > 2
"""


@pytest.fixture(scope="module")
def careless(programs: ModuleType) -> Iterator[ModuleType]:
    module = importlib.import_module("tests.support.apps.careless")
    yield module
    module.app.close()


def fail_in_every_way(careless: ModuleType, app: Horsies, connection: Database) -> None:
    """Send and start everything with the secret, and wait until all of it has failed."""

    def send(name: str) -> Any:
        found: Any = app.get_task(name)
        return found.send(SECRET).unwrap()

    sent = [send(name) for name in (*careless.FAILING, *careless.FAILING_RUNS)]
    run = careless.graph(app, SECRET).start().unwrap()
    parked = sent[-1].task_id
    wait_until(lambda: has_parked(connection, parked))
    sent[-1].cancel().unwrap()
    for handle in [*sent, run]:
        assert handle.get(60_000).is_err(), handle
    wait_until_empty(connection)
    wait_until(lambda: connection.execute(WRITTEN.encode()).fetchone() == (True,))


def has_parked(connection: Database, task_id: str) -> bool:
    parked = connection.execute("SELECT FROM horsies_parked WHERE task_id = %s", [task_id])
    return parked.rowcount == 1


def test_a_failure_of_any_kind_leaves_nothing_plain_in_an_encrypted_database(
    fleet: Fleet, process_url: str, careless: ModuleType, connection: Database
) -> None:
    """Neither in its tables nor in a statement, which the server may log with its values."""
    environment = {"HORSIES_TEST_KEYS": KEY}
    with Proxy(process_url) as proxy, closing(careless.make([KEY], database_url=proxy.url)) as app:
        proxy.questions = {}
        fleet.start(
            application=APPLICATION, config=LOGS, environment=environment, database_url=proxy.url
        )
        fail_in_every_way(careless, app, connection)
        sent = bytes(b"\n".join(proxy.questions.values()))
    assert leaks(connection, SECRET) == {}
    around = [sent[one.start() - 80 : one.end() + 20] for one in re.finditer(SECRET.encode(), sent)]
    assert around == []
    assert b"break_commit" in sent


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_a_failure_of_any_kind_leaves_no_trace_after_an_erasure(
    fleet: Fleet, careless: ModuleType, connection: Database, command: str
) -> None:
    fleet.start(application=APPLICATION, config=LOGS)
    fail_in_every_way(careless, careless.app, connection)
    assert "horsies_task_logs" in leaks(connection, SECRET)
    words = [command, APPLICATION, "--argument", SECRET, "--with-runs", "--yes"]
    erased = subprocess.run(
        [sys.executable, "-m", "horsies", *words],
        env=fleet.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert erased.returncode == 0, erased.stderr
    assert leaks(connection, SECRET) == {}
