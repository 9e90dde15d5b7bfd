"""The backend for Django's task framework: enqueue, results and transactions, beside a real worker."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import django
import pytest

from tests.support.commands import environment, run
from tests.support.doc_pages import REPOSITORY
from tests.support.wait import wait_until

SITE = "tests.support.apps.django_site"
HAS_TASKS = django.VERSION >= (6,)
EXPECTED = {
    "values": {
        "first status": "READY",
        "add": 3,
        "call": [[1], {"b": 2}],
        "workers": 1,
        "times": True,
        "greet": "hello ada",
        "greet queue": "mail",
        "identify": True,
    },
    "failure": {
        "status": "FAILED",
        "class": True,
        "traceback": "Shortage: no oats: 3 missing",
        "value": "ValueError: Task failed",
        "mismatch": "TaskResultMismatch",
    },
    "options": {
        "priorities": [1, 50, 100],
        "due": True,
        "status": "READY",
        "cancelled": ["FAILED", "TaskFailed"],
    },
    "transactions": {
        "rolled back": "TaskResultDoesNotExist",
        "without the option": 3,
        "before commit": "TaskResultDoesNotExist",
        "after commit": 2,
    },
    "mistakes": {
        "queue": "InvalidTask: The Horsies application has no queue 'unknown'; choose one of default, mail.",
        "id": "TaskResultDoesNotExist: nothing",
        "app": "InvalidTaskBackend: TASKS['wrong']['OPTIONS']['app'] must be the dotted path of a Horsies "
        "application, such as \"website.background.app\", not 'no.such.app'.",
        "option": "InvalidTaskBackend: TASKS['misspelt']['OPTIONS'] has no option 'databse'; use app and "
        "database.",
    },
    "enqueued": ["add", "greet", "identify", "run_short"],
}


@pytest.mark.skipif(
    not HAS_TASKS,
    reason=f"django.tasks is new in Django 6, which needs Python 3.12; this is {django.get_version()}",
)
def test_tasks_of_django_run_in_a_worker(tmp_path: Path, database_url: str) -> None:
    log = tmp_path / "worker.log"
    with log.open("w") as output:
        worker = subprocess.Popen(
            [sys.executable, "-m", "horsies", "worker", f"{SITE}.worker:app", "-c", "2"],
            cwd=REPOSITORY,
            env=environment(HORSIES_DATABASE_URL=database_url),
            stderr=output,
        )
    try:
        wait_until(lambda: "listening on" in log.read_text() or worker.poll() is not None, 60)
        produced = run(REPOSITORY, [sys.executable, "-m", f"{SITE}.producer"], database_url)
    finally:
        worker.terminate()
        assert worker.wait(60) == 0, log.read_text()
    assert produced.returncode == 0, produced.stderr + log.read_text()
    assert json.loads(produced.stdout) == EXPECTED
    signals = [line for line in log.read_text().splitlines() if line.startswith("signal ")]
    assert {"signal add RUNNING", "signal greet SUCCESSFUL", "signal run_short FAILED"} <= set(
        signals
    )


@pytest.mark.skipif(HAS_TASKS, reason="this Django has django.tasks")
def test_an_older_django_is_named() -> None:
    with pytest.raises(ImportError, match="needs Django 6 or newer"):
        __import__("horsies.django")
