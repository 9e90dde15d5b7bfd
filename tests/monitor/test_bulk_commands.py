"""`horsies retry`, `cancel` and `queues purge` with filters, and `horsies history`."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest

from horsies import Horsies
from horsies.monitor import orders
from horsies.monitor.order_plan import OrderVerb, draft_order
from horsies.monitor.queries import TaskFilters
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.recording import Actor
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.rows import actions, add_failed, add_run, add_task, drafts, resent, row_of


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "PAUSE_SECONDS", 0)


class Terminal(io.StringIO):
    """A terminal on which this text was typed."""

    def isatty(self) -> bool:
        return True


def test_a_dry_run_prints_counts_and_changes_nothing(horsies: Run, database: Database) -> None:
    add_failed(database, 12)
    add_task(database, status="FAILED", error_code="CARD_REFUSED", workflow_id=add_run(database))
    words = ("retry", "--status", "failed", "--error-code", "CARD_REFUSED", "--since", "2h")
    finished = horsies(*words, "--dry-run")
    assert (finished.code, finished.err) == (0, "")
    first, second = finished.out.splitlines()
    assert first == (
        "13 matching, 12 can be sent again, 1 refused: 1 part of a workflow (retry the run)."
    )
    assert second.startswith("newest 2")
    document = json.loads(horsies(*words, "--dry-run", "--json").out)
    assert (document["matching"], document["eligible"], document["has_more"]) == (13, 12, False)
    assert resent(database) == [0]
    assert actions(database) == []


def test_a_bulk_retry_needs_a_confirmation(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_failed(database, 12)
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    refused = horsies("retry", "--queue", "payments")
    assert (refused.code, resent(database)) == (1, [0])
    assert "Send 12 tasks again? Standard input is not a terminal: add --yes." in refused.err
    monkeypatch.setattr(sys, "stdin", Terminal("n\n"))
    assert horsies("retry", "--queue", "payments").code == 1
    assert resent(database) == [0]
    monkeypatch.setattr(sys, "stdin", Terminal("y\n"))
    done = horsies("retry", "--queue", "payments", "--reason", "the bank is back")
    assert (done.code, resent(database)) == (0, [1])
    assert "12 tasks sent again; order " in done.out
    again = horsies("retry", "--queue", "payments", "--yes")
    assert (again.code, "12 refused: 12 sent again already" in again.out) == (0, True)
    ((*_, verb, subject, outcome, detail),) = actions(database)
    assert (verb, subject, outcome) == ("retry_tasks", "tasks FAILED on payments", "done")
    assert detail == "12 of 12 changed. the bank is back"


def test_a_lost_database_prints_the_line_that_continues(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_failed(database, 300)
    monkeypatch.setattr(orders, "RESEND_DELAYS_SECONDS", ())
    database.execute(
        "CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "IF (SELECT count(*) FROM public.horsies_tasks WHERE status = 'PENDING') > 200 THEN "
        "RAISE EXCEPTION 'the disk is full' USING ERRCODE = '53100'; END IF; RETURN NULL; END $$;"
        "CREATE TRIGGER refuse AFTER INSERT ON public.horsies_tasks EXECUTE FUNCTION public.refuse()"
    )
    try:
        finished = horsies("retry", "--status", "failed", "--yes")
    finally:
        database.execute("DROP FUNCTION public.refuse CASCADE")
    assert finished.code == 1
    line = finished.err.strip().rpartition("changing anything twice: horsies ")[2]
    assert line.startswith("retry --order 0")
    assert resent(database) == [0, 1]
    done = json.loads(horsies(*line.split(), "--json").out)
    assert (done["outcome"], done["done"], done["refused"]) == ("done", 300, {})
    assert resent(database) == [1]
    assert len(actions(database)) == 1
    unknown = horsies("retry", "--order", "01a1dd00-0000-7000-8000-000000000000")
    assert (unknown.code, "There is no order 01a1dd00" in unknown.err) == (4, True)
    assert horsies("cancel", *line.split()[1:]).code == 1


@pytest.mark.parametrize(
    ("verb", "words"),
    [
        (OrderVerb.RETRY_TASKS, ("retry",)),
        (OrderVerb.CANCEL_TASKS, ("cancel",)),
        (OrderVerb.PURGE_QUEUE, ("queues", "purge", "mail")),
    ],
)
def test_a_dry_run_of_the_dashboard_is_not_started(
    horsies: Run, app: Horsies, database: Database, verb: OrderVerb, words: tuple[str, ...]
) -> None:
    task_id = add_task(database, queue_name="mail", status="FAILED")
    waiting = add_task(database, queue_name="mail")
    broker, reading = app.get_broker(), BrokerErrorCode.MONITORING_QUERY_FAILED
    draft = draft_order(verb, TaskFilters(queues=["mail"])).unwrap()
    order = broker.perform(reading, orders.preview_script(draft)).unwrap().order
    stored = orders.store_script(order, "draft", Actor("berta", "web"))
    broker.perform(reading, stored, atomic=True).unwrap()
    refused = horsies(*words, "--order", order.id)
    assert refused.code == 1
    sentence = f"Order {order.id} is a dry run that berta made in the dashboard and has not started"
    assert sentence in " ".join(refused.err.split())
    assert (len(drafts(database)), actions(database), resent(database)) == (1, [], [0])
    assert row_of(database, task_id)["status"] == "FAILED"
    assert row_of(database, waiting)["status"] == "PENDING"


def test_a_queue_is_purged(horsies: Run, database: Database) -> None:
    waiting = [add_task(database, queue_name="mail") for _ in range(3)]
    running = add_task(database, queue_name="mail", status="RUNNING")
    counts = horsies("queues", "purge", "mail", "--dry-run").out
    assert counts.startswith("3 matching, 3 can be cancelled.")
    done = horsies("queues", "purge", "mail", "--yes", "--reason", "sent by mistake")
    assert (done.code, "3 tasks cancelled; order " in done.out) == (0, True)
    assert {row_of(database, one)["status"] for one in waiting} == {"CANCELLED"}
    assert row_of(database, running)["status"] == "RUNNING"
    assert horsies("queues", "purge", "mial", "--yes").code == 4
    assert horsies("queues", "purge", "mail", "--yes").out == "No task matches.\n"


@pytest.mark.parametrize("flag", [("--dry-run",), ("--yes",), ("--order", "1")])
def test_options_of_a_purge_are_refused_by_a_pause(
    horsies: Run, database: Database, flag: tuple[str, ...]
) -> None:
    add_task(database, queue_name="mail")
    refused = horsies("queues", "pause", "mail", *flag)
    assert refused.code == 2
    assert "belong to horsies queues purge" in refused.err
    assert actions(database) == []


def test_open_tasks_are_cancelled_in_bulk(horsies: Run, database: Database) -> None:
    waiting = add_task(database)
    running = add_task(database, status="RUNNING")
    spared = horsies("cancel", "--name", "work", "--no-running", "--yes")
    assert "1 task cancelled" in spared.out
    assert row_of(database, waiting)["status"] == "CANCELLED"
    assert row_of(database, running)["cancel_requested_at"] is None
    assert horsies("cancel", "--name", "work", "--yes").code == 0
    assert row_of(database, running)["cancel_requested_at"] is not None


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["retry"], "Name the tasks by their ids, or choose them by filters."),
        (["retry", "01a1dd00-0000-7000-8000-000000000000", "--queue", "x"], "exclude each other"),
        (["retry", "--status", "running"], "not to RUNNING"),
        (["cancel", "--status", "failed"], "not to FAILED"),
        (["cancel", "--order", "1", "--queue", "x"], "--order stands alone"),
        (["retry", "--order", "1", "--dry-run"], "leave out --dry-run"),
        (["queues", "purge", "mail", "--order", "1", "--dry-run"], "leave out --dry-run"),
        (["retry", "--queue", "x", "--until", "soon"], "neither a duration like 15m"),
    ],
)
def test_bad_combinations_are_refused(
    horsies: Run, database: Database, words: list[str], sentence: str
) -> None:
    finished = horsies(*words)
    assert finished.code == 2
    assert sentence in " ".join(finished.err.replace("│", " ").split())


def test_the_history_lists_changes_newest_first(horsies: Run, database: Database) -> None:
    horsies("queues", "resume", "mail")
    add_task(database, queue_name="mail")
    horsies("queues", "pause", "mail", "--reason", "first line\nsecond line\x1b[2J")
    lines = horsies("history").out
    assert lines.index("pause queue: queue mail") < lines.index("(refused)")
    assert "first line\\nsecond line\\x1b[2J" in " ".join(lines.split())
    document: Any = json.loads(horsies("history", "--json", "--limit", "1").out)
    (row,) = document["actions"]
    assert (row["source"], row["verb"], row["outcome"]) == ("cli", "pause_queue", "done")
    older = horsies("history", "--before", str(row["id"]), "--json").out
    assert [one["outcome"] for one in json.loads(older)["actions"]] == ["refused"]
    assert horsies("history", "--actor", "nobody").out == "No change is on record.\n"
    assert "pause" in horsies("history", "--subject", "queue mail").out
