"""Failures by fingerprint: recorded with each attempt, listed, filtered and sent again by their reason."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import Horsies, RetryPolicy
from horsies.cli.failures import bars
from horsies.db.statements.lookup import FailureGroup
from horsies.monitor import orders
from horsies.monitor.failures import SLOTS, over_time, release_text
from horsies.testing import run_pending
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import add_attempt, add_task, add_worker, ago, resent


class Declined(Exception):
    """The bank said no."""


class Unreachable(Exception):
    """The bank does not answer."""


def ask_bank(number: int) -> None:
    if number % 3 == 0:
        raise Unreachable(f"order {number}: the bank does not answer")


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "PAUSE_SECONDS", 0)


@pytest.fixture
def failed(app: Horsies, database: Database) -> list[dict[str, Any]]:
    """Nine failures of one task and one code with two reasons; return the groups in the order of size."""

    @app.task("charge")
    def charge(number: int) -> None:
        ask_bank(number)
        raise Declined(f"order {number}: declined")

    for number in range(9):
        charge.send(number).unwrap()
    run_pending(app)
    rows = database.execute(
        "SELECT fingerprint, exception_type, raised_in, count(*) FROM horsies_task_attempts "
        "GROUP BY 1, 2, 3 ORDER BY 4 DESC"
    ).fetchall()
    names = ("fingerprint", "exception_type", "raised_in", "total")
    return [dict(zip(names, row, strict=True)) for row in rows]


def test_two_bugs_behind_one_code_are_two_groups(
    horsies: Run, database: Database, failed: list[dict[str, Any]]
) -> None:
    declined, unreachable = failed
    assert declined["exception_type"] == f"{__name__}.Declined"
    assert declined["raised_in"].endswith("monitor/test_failures.py:failed.<locals>.charge")
    assert unreachable["raised_in"].endswith("monitor/test_failures.py:ask_bank")
    assert (declined["total"], unreachable["total"]) == (6, 3)
    (stored,) = database.execute(
        "SELECT count(*) FROM horsies_tasks JOIN horsies_task_attempts AS tried "
        "ON tried.task_id = horsies_tasks.id AND tried.fingerprint = horsies_tasks.fingerprint"
    ).fetchone() or (0,)
    assert stored == 9
    document = json.loads(horsies("failures", "--json").out)
    assert [
        {name: one[name] for name in ("fingerprint", "exception_type", "raised_in", "total")}
        for one in document["failures"]
    ] == failed
    listed = horsies("failures", "--name", "charge")
    assert (listed.code, listed.err) == (0, "")
    assert f"{declined['fingerprint']}" in listed.out
    assert "declined" in listed.out
    assert horsies("failures", "--name", "other").out == "No attempt has failed.\n"


def test_one_reason_has_an_example_and_the_command_that_sends_its_tasks_again(
    horsies: Run, failed: list[dict[str, Any]]
) -> None:
    fingerprint = failed[1]["fingerprint"]
    shown = horsies("failures", "--fingerprint", fingerprint.upper())
    assert (shown.code, shown.err) == (0, "")
    assert "3, 3 of them final" in shown.out
    assert f"horsies retry --fingerprint {fingerprint} --dry-run" in shown.out
    document = json.loads(horsies("failures", "--fingerprint", fingerprint, "--json").out)
    assert sum(slot["failures"] for slot in document["over_time"]) == 3
    task = horsies("show", document["newest_task_id"])
    assert f"ask_bank, fingerprint {fingerprint}" in task.out
    missing = horsies("failures", "--fingerprint", "0" * 12)
    assert (missing.code, missing.out) == (4, "")
    assert "No failure on record has the fingerprint 000000000000." in missing.err
    wrong = horsies("failures", "--fingerprint", "x")
    assert (wrong.code, "12 hexadecimal digits" in wrong.err) == (2, True)


def test_all_tasks_of_one_reason_are_sent_again(
    horsies: Run, database: Database, failed: list[dict[str, Any]]
) -> None:
    words = ("retry", "--fingerprint", failed[1]["fingerprint"])
    dry = horsies(*words, "--dry-run")
    assert (dry.code, dry.out.splitlines()[0]) == (0, "3 matching, 3 can be sent again.")
    assert resent(database) == [0]
    done = horsies(*words, "--yes")
    assert (done.code, done.err) == (0, "")
    assert "3 tasks sent again" in done.out
    sent = database.execute(
        "SELECT old.args, new.fingerprint FROM horsies_tasks AS new "
        "JOIN horsies_tasks AS old ON old.id = new.retried_from_task_id ORDER BY old.args"
    ).fetchall()
    assert sent == [(f"[{number}]", None) for number in (0, 3, 6)]
    again = horsies(*words, "--yes")
    assert "3 refused: 3 sent again already" in again.out
    listed = json.loads(horsies("tasks", *words[1:], "--json").out)
    assert len(listed["tasks"]) == 3
    assert horsies("tasks", "--fingerprint", "?").code == 2


def test_a_retry_has_a_fingerprint_and_a_cancelled_or_successful_attempt_has_none(
    app: Horsies, database: Database
) -> None:
    policy = RetryPolicy.fixed([0.001], auto_retry_for=[Unreachable], jitter=False)

    @app.task("flaky", retry_policy=policy)
    def flaky() -> None:
        tries.append(1)
        if len(tries) == 1:
            raise Unreachable

    tries: list[int] = []
    flaky.send().unwrap()
    run_pending(app)
    rows = database.execute(
        "SELECT outcome, fingerprint IS NULL, raised_in IS NULL FROM horsies_task_attempts ORDER BY id"
    ).fetchall()
    assert rows == [("FAILED", False, False), ("COMPLETED", True, True)]
    (ended,) = database.execute("SELECT fingerprint FROM horsies_tasks").fetchone() or ("",)
    assert ended is None


def test_first_seen_and_the_releases_come_from_all_attempts_on_record(
    horsies: Run, database: Database
) -> None:
    old = add_worker(database, release="2026.1")
    new = add_worker(database, release="2026.2")
    task = add_task(database, status="FAILED", error_code="X", fingerprint="ab12cd34ef56")
    reason = {"outcome": "FAILED", "error_code": "X", "fingerprint": "ab12cd34ef56"}
    add_attempt(database, task, attempt=1, worker_id=old, finished_at=ago(86_400), **reason)
    add_attempt(database, task, attempt=2, worker_id=new, finished_at=ago(10), **reason)
    (group,) = json.loads(horsies("failures", "--json").out)["failures"]
    assert (group["first_release"], group["last_release"]) == ("2026.1", "2026.2")
    first = datetime.fromisoformat(group["first_at"])
    assert datetime.now(UTC) - first > timedelta(hours=23)
    assert "2026.1 to 2026.2" in horsies("failures", "--fingerprint", "ab12cd34ef56").out


def group_at(*times: float) -> FailureGroup:
    moment = datetime.fromtimestamp(times[0], UTC)
    return FailureGroup("a", "X", len(times), 0, moment, moment, None, "id", None, [*times])


def test_failures_are_counted_in_equal_parts_of_time() -> None:
    now = datetime.fromtimestamp(4_800, UTC)
    slots = over_time(group_at(0.0, 50.0, 101.0, 4_800.0), now)
    assert [slot.failures for slot in slots] == [2, 1, *[0] * (SLOTS - 3), 1]
    assert [slot.at.timestamp() for slot in slots[:2]] == [0.0, 100.0]
    assert sum(slot.failures for slot in over_time(group_at(4_800.0), now)) == 1
    assert bars([0, 0]) == "  "


@pytest.mark.parametrize(
    ("first", "last", "words"),
    [(None, None, None), ("1", "1", "1"), ("1", "2", "1 to 2"), (None, "2", "unknown to 2")],
)
def test_releases_in_words(first: str | None, last: str | None, words: str | None) -> None:
    group = group_at(1.0)._replace(first_release=first, last_release=last)
    assert release_text(group) == words
