"""`horsies delete` and `horsies redact`: what goes, what stays, what is refused, and no trace left."""

from __future__ import annotations

import json
import time
from collections import Counter
from dataclasses import replace

import pytest
from psycopg import sql

from horsies import AppConfig, Horsies, PostgresConfig, Webhook
from horsies.db.statements.webhooks import record_findings, store_webhooks
from horsies.monitor import orders
from horsies.monitor.order_plan import (
    Order,
    OrderVerb,
    draft_order,
    order_text,
    read_order_text,
)
from horsies.monitor.queries import RunFilters
from horsies.webhooks.task import subscriptions
from tests.support.command_line import Finished, Run
from tests.support.database import Database
from tests.support.receiver import SECRET
from tests.support.rows import (
    actions,
    add_failed,
    add_run,
    add_task,
    ago,
    attempts_of,
    row_of,
)
from tests.support.traces import PERSON, add_person, add_personal_run, tables_with, traces


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(orders, "PAUSE_SECONDS", 0)


def count(database: Database, table: str = "horsies_tasks") -> int:
    found = database.execute(f"SELECT count(*) FROM {table}".encode()).fetchone()
    assert found is not None
    return int(found[0])


def done(finished: Finished) -> Finished:
    assert finished.code == 0, finished.err
    return finished


NOT_REACHED = (
    "Not reached: copies that your code made; log lines and spans that were written; the log of the "
    "database server; events that webhooks have delivered; the log and the error message of a batch, "
    "which its other tasks keep; deliveries of findings, unless --key names their key; backups, the WAL of "
    "this server and its replicas, and dead row versions until VACUUM. See `horsies docs personal-data`."
)
BY_PERSON = [("--argument", f"customer={PERSON}"), ("--argument", PERSON), ("--key", PERSON)]


@pytest.mark.parametrize("command", ["delete", "redact"])
@pytest.mark.parametrize("by", BY_PERSON, ids=" ".join)
def test_no_table_mentions_the_person_afterwards(
    horsies: Run, database: Database, by: tuple[str, str], command: str
) -> None:
    add_person(database)
    add_personal_run(database)
    pausing = draft_order(OrderVerb.PAUSE_RUNS, RunFilters(workflow_keys=[PERSON])).unwrap()
    database.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, order_id, order_plan, "
        "order_progress) VALUES ('bert', 'cli', 'pause_runs', 'runs', 'done', %s, %s, '{}')",
        [pausing.id, order_text(pausing)],
    )
    assert len(tables_with(database)) == 15
    other = add_task(database, status="COMPLETED", result='{"ok":1}')
    ended = done(horsies(command, *by, "--with-runs", "--yes", "--reason", "asked for it"))
    verb_done = "deleted" if command == "delete" else "redacted"
    assert f"2 tasks and runs {verb_done}; order " in ended.out
    assert ended.err.splitlines()[-1] == NOT_REACHED
    assert traces(database) == []
    assert row_of(database, other)["result"] == '{"ok":1}'
    *_, (_, verb, subject, outcome, detail) = actions(database)
    found_by = {"customer": "argument customer", "--key": "a key"}
    words = next(
        (word for sign, word in found_by.items() if sign in str(by)), "a text in arguments"
    )
    assert (verb, outcome) == (f"{command}_tasks", "done")
    assert subject == f"2 tasks and runs found by {words}"
    assert detail == "2 of 2 changed. asked for it"


def test_without_the_switch_runs_stay_and_are_reported(horsies: Run, database: Database) -> None:
    add_person(database)
    run_id = add_personal_run(database)
    shown = done(horsies("delete", "--argument", PERSON, "--dry-run"))
    assert shown.out.splitlines()[0] == (
        "3 matching, 1 can be deleted, 2 refused: 2 part of a workflow (--with-runs takes whole runs)."
    )
    assert shown.out.splitlines()[2].startswith("for example 0")
    assert "1 run of workflows also match: --with-runs takes them whole." in shown.err
    assert len(tables_with(database)) == 15
    done(horsies("delete", "--argument", PERSON, "--yes"))
    assert (count(database), count(database, "horsies_workflows")) == (2, 2)
    done(horsies("delete", run_id, "--yes"))
    assert traces(database) == []


@pytest.mark.parametrize("command", ["delete", "redact"])
@pytest.mark.parametrize(("bound", "found"), [("--until", 0), ("--since", 1)])
def test_runs_with_the_key_are_bounded_by_the_times(
    horsies: Run, database: Database, command: str, bound: str, found: int
) -> None:
    runs = [
        add_run(
            database,
            status="COMPLETED",
            workflow_key=PERSON,
            created_at=ago(age_seconds),
            completed_at=ago(age_seconds),
        )
        for age_seconds in (40 * 86_400, 60)
    ]
    done(horsies(command, "--key", PERSON, bound, "30d", "--with-runs", "--yes"))
    rest = database.execute(
        "SELECT id::text FROM horsies_workflows WHERE redacted_at IS NULL"
    ).fetchall()
    assert rest == [(runs[1 - found],)]


def store_plan(database: Database, filters: RunFilters) -> Order:
    order = draft_order(OrderVerb.CANCEL_RUNS, filters).unwrap()
    database.execute(
        "INSERT INTO horsies_actions (actor, source, verb, subject, outcome, order_id, order_plan, "
        "order_progress) VALUES ('bert', 'cli', 'cancel_runs', 'runs', 'stopped', %s, %s, '{}')",
        [order.id, order_text(order)],
    )
    return order


def stored_plan(database: Database, order: Order) -> Order:
    found = database.execute(
        "SELECT order_plan FROM horsies_actions WHERE order_id = %s", [order.id]
    ).fetchone()
    assert found is not None
    return read_order_text(found[0])


def test_orders_lose_the_keys_of_erased_runs_and_nothing_else(
    horsies: Run, database: Database
) -> None:
    erased = ["nightly", "runs", "workflow_keys", "id"]
    keys = [*erased, "other"]
    filters = RunFilters(names=["nightly"], workflow_keys=keys)
    order, other = (
        store_plan(database, one) for one in (filters, replace(filters, workflow_keys=["other"]))
    )
    ids = [
        add_run(database, status="COMPLETED", workflow_key=key, completed_at=ago(1))
        for key in erased
    ]
    done(horsies("delete", *ids, "--yes"))
    assert order.runs is not None
    wanted = replace(order.runs, workflow_keys=["erased"] * 4 + ["other"])
    assert stored_plan(database, order) == replace(order, runs=wanted)
    assert stored_plan(database, other) == other


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_the_id_of_a_task_takes_its_whole_run_with_the_switch(
    horsies: Run, database: Database, command: str
) -> None:
    add_personal_run(database)
    parts = [row[0] for row in database.execute("SELECT id::text FROM horsies_tasks").fetchall()]
    single = add_task(database, status="COMPLETED")
    refused = done(horsies(command, *parts, "--yes"))
    assert "2 refused: 2 part of a workflow (--with-runs takes whole runs)" in refused.out
    done(horsies(command, *parts, single, "--with-runs", "--yes"))
    assert traces(database) == []
    left = "SELECT count(*) FROM horsies_tasks WHERE redacted_at IS NULL"
    assert database.execute(left).fetchone() == (0,)


def test_a_node_that_never_ran_and_a_schedule_are_found(horsies: Run, database: Database) -> None:
    add_personal_run(database)
    for table in ("horsies_tasks", "horsies_blocked", "horsies_refusals"):
        database.execute(f"DELETE FROM {table}".encode())
    database.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, definition) VALUES ('greet-daily', %s)",
        [json.dumps({"kwargs": {"customer": PERSON}})],
    )
    words = ("delete", "--argument", f"customer={PERSON}", "--with-runs", "--yes")
    assert "These schedules have the argument and stay: greet-daily." in done(horsies(*words)).err
    assert tables_with(database) == {"horsies_schedule_state"}


def test_arguments_of_any_size_are_found(horsies: Run, database: Database) -> None:
    large = json.dumps({"pages": "x" * 100_000, "customer": PERSON})
    add_task(database, status="COMPLETED", kwargs=large)
    assert done(horsies("delete", "--argument", f"customer={PERSON}", "--yes")).out.splitlines()[-1]
    assert count(database) == 0


def test_open_tasks_and_runs_are_refused_and_keep_their_key(
    horsies: Run, database: Database
) -> None:
    kwargs = json.dumps({"customer": PERSON})
    waiting = add_task(database, kwargs=kwargs, lane_key=PERSON, lane=7)
    add_task(database, status="COMPLETED", kwargs=kwargs, lane_key=PERSON)
    run_id = add_run(database, status="CANCELLED", completed_at="2026-01-01")
    node = add_task(database, status="RUNNING", workflow_id=run_id, kwargs=kwargs)
    database.execute(
        "UPDATE horsies_tasks SET lane = horsies_lane_v1('default', %s) WHERE id = %s",
        [PERSON, waiting],
    )
    database.execute(
        "INSERT INTO horsies_lanes (queue_name, lane, lane_key, weight) "
        "VALUES ('default', horsies_lane_v1('default', %s), %s, 2)",
        [PERSON] * 2,
    )
    words = ("delete", "--argument", PERSON, "--with-runs", "--yes")
    shown = done(horsies(*words)).out.splitlines()
    assert shown[0] == "3 matching, 1 can be deleted, 2 refused: 2 not ended (cancel first)."
    assert {row_of(database, one)["kwargs"] for one in (waiting, node)} == {kwargs}
    assert (count(database), count(database, "horsies_lanes")) == (2, 1)
    database.execute("UPDATE horsies_tasks SET status = 'CANCELLED'")
    done(horsies(*words))
    assert traces(database) == []


def test_a_result_that_a_durable_run_may_take_stays(horsies: Run, database: Database) -> None:
    parent = add_task(database)
    child = add_task(database, status="COMPLETED", wakes_task_id=parent)
    shown = done(horsies("delete", child, "--yes")).out
    assert "1 refused: 1 awaited by an open durable run" in shown
    database.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")
    done(horsies("delete", child, "--yes"))
    assert count(database) == 1


def test_filters_choose_by_name_and_age_in_bounded_batches(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ERASE_BATCH", 100)
    monkeypatch.setattr(orders, "PAGE", 70)
    add_failed(database, 450)
    add_task(database, status="COMPLETED")
    add_task(database, task_name="charge")
    ended = done(horsies("delete", "--name", "charge", "--until", "0s", "--yes"))
    assert ended.out.splitlines()[-1].startswith("450 tasks deleted; order ")
    assert count(database) == 2
    ((_, verb, subject, _, detail),) = actions(database)
    assert verb == "delete_tasks"
    assert subject.startswith("tasks FAILED/CANCELLED/EXPIRED/COMPLETED named charge until 2")
    assert detail == "450 of 450 changed."


def test_many_found_tasks_become_several_orders(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.cli.erase.ORDER_MAX", 40)
    add_failed(database, 100)
    database.execute("UPDATE horsies_tasks SET kwargs = %s", [json.dumps({"customer": PERSON})])
    shown = done(horsies("delete", "--argument", PERSON, "--dry-run")).out
    assert shown.startswith("100 matching, 100 can be deleted.")
    ended = done(horsies("delete", "--argument", PERSON, "--yes")).out.splitlines()
    assert [line.partition(" ")[0] for line in ended[3:]] == ["40", "40", "20"]
    assert count(database) == 0
    assert traces(database) == []


def test_an_interrupted_order_continues_and_deletes_no_newer_task(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ERASE_BATCH", 100)
    add_failed(database, 450)

    interruptions = iter([KeyboardInterrupt])

    def interrupt(seconds: float) -> None:
        if count(database) < 300 and (interruption := next(interruptions, None)):
            raise interruption

    monkeypatch.setattr(time, "sleep", interrupt)
    stopped = horsies("delete", "--name", "charge", "--yes")
    assert (stopped.code, count(database)) == (1, 250)
    order_id = stopped.err.split("--order ")[1].split()[0]
    newer = add_task(database, task_name="charge", status="FAILED")
    assert "450 tasks deleted" in done(horsies("delete", "--order", order_id)).out
    assert row_of(database, newer)["status"] == "FAILED"
    assert count(database) == 1


def test_nothing_is_deleted_by_a_dry_run_or_without_an_answer(
    horsies: Run, database: Database
) -> None:
    add_person(database)
    assert horsies("delete", "--argument", PERSON, "--dry-run").code == 0
    assert horsies("delete", "--status", "failed").code == 1
    assert horsies("delete", "--argument", "customer=nobody", "--yes").out == "No task matches.\n"
    assert horsies("delete", "--key", "nobody", "--yes").out == "No task matches.\n"
    assert count(database) == 1


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_a_key_without_tasks_is_forgotten(horsies: Run, database: Database, command: str) -> None:
    add_person(database)
    database.execute("DELETE FROM horsies_tasks")
    database.execute("DELETE FROM horsies_actions WHERE verb = 'cancel_task'")
    for table in ("horsies_blocked", "horsies_refusals", "horsies_findings WHERE code = 'BLOCKED'"):
        database.execute(f"DELETE FROM {table}".encode())
    others = [f"key {PERSON}-2 of queue default", f"key {PERSON} of queue b of queue default"]
    for subject in others:
        database.execute(
            "INSERT INTO horsies_actions (actor, source, verb, subject, outcome) "
            "VALUES ('bert', 'cli', 'pause_key', %s, 'done')",
            [subject],
        )
    assert tables_with(database) == {"horsies_lanes", "horsies_actions", "horsies_findings"}
    by_key = (command, "--key", PERSON)
    shown = done(horsies(*by_key, "--dry-run")).out
    assert shown == "No task matches.\nThe key has limits, a pause or a history in 1 queue.\n"
    assert done(horsies(*by_key, "--until", "30d", "--yes")).out == "No task matches.\n"
    refused = horsies(*by_key)
    assert (refused.code, "add --yes" in refused.err) == (1, True)
    assert count(database, "horsies_lanes") == 1
    forgotten = done(horsies(*by_key, "--yes", "--reason", "asked for it")).out
    assert forgotten.endswith("The key is forgotten.\n")
    assert "horsies_findings" not in tables_with(database)
    assert count(database, "horsies_lanes") == 0
    subjects = [subject for _, _, subject, _, _ in actions(database)]
    assert subjects == ["a key of queue default", *others, "a key"]
    assert actions(database)[-1][1:] == (f"{command}_tasks", "a key", "done", "asked for it")


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_the_limits_of_a_key_go_in_every_queue_and_json_stays_json(
    horsies: Run, database: Database, command: str
) -> None:
    add_task(database, status="COMPLETED", lane_key=PERSON, lane=lane_of("default"))
    for queue in ("default", "mail"):
        database.execute(
            "INSERT INTO horsies_lanes (queue_name, lane, lane_key, weight) "
            "VALUES (%s, horsies_lane_v1(%s, %s), %s, 2)",
            [queue, queue, PERSON, PERSON],
        )
    by_key = (command, "--key", PERSON, "--json")
    shown = done(horsies(*by_key, "--dry-run"))
    assert json.loads(shown.out)["matching"] == 1
    assert "limits, a pause or a history in 2 queues" in shown.err
    assert count(database, "horsies_lanes") == 2
    ended = done(horsies(*by_key, "--yes"))
    assert json.loads(ended.out)["done"] == 1
    assert count(database, "horsies_lanes") == 0
    assert traces(database) == []
    assert json.loads(done(horsies(*by_key, "--yes")).out)["matching"] == 0


def lane_of(queue: str) -> sql.SQL:
    """The number of the person's key in a queue."""
    return sql.SQL(f"horsies_lane_v1('{queue}', '{PERSON}')")


def add_lane(database: Database, key: str) -> None:
    """Pause a key, and let its rate have allowed a start some time ago."""
    database.execute(
        "INSERT INTO horsies_lanes (queue_name, lane, lane_key, paused_at) "
        "VALUES ('default', horsies_lane_v1('default', %s), %s, now())",
        [key, key],
    )
    database.execute(
        "INSERT INTO horsies_meters (queue_name, lane, next_at, seconds, burst) "
        "VALUES ('default', horsies_lane_v1('default', %s), now() - interval '1 second', 1, 1)",
        [key],
    )


@pytest.mark.parametrize("by", [("--argument", PERSON), ("--key", "task:collect")], ids=" ".join)
@pytest.mark.parametrize("command", ["delete", "redact"])
def test_a_key_that_all_calls_of_a_task_share_stays(
    horsies: Run, database: Database, by: tuple[str, str], command: str
) -> None:
    database.execute(
        "INSERT INTO horsies_task_defaults (task_name, queue_name, queues, max_retries, is_async, burst, "
        "reject_bytes, fixed_key) VALUES ('collect', 'default', '{}', 0, false, false, 1, 'task:collect')"
    )
    kwargs = json.dumps({"customer": PERSON})
    for key in ("task:collect", PERSON):
        add_lane(database, key)
        add_task(database, status="COMPLETED", kwargs=kwargs, lane_key=key)
    shown = done(horsies(command, *by, "--yes")).out
    assert "The key " not in shown
    kept = ["task:collect"] if by[0] == "--argument" else ["task:collect", PERSON]
    found = database.execute("SELECT lane_key FROM horsies_lanes WHERE paused_at IS NOT NULL")
    assert {key for (key,) in found.fetchall()} == set(kept)
    assert count(database, "horsies_meters") == len(kept)


@pytest.mark.parametrize("command", ["delete", "redact"])
def test_a_start_that_is_not_yet_paid_for_outlasts_the_key(
    horsies: Run, database: Database, command: str
) -> None:
    add_lane(database, PERSON)
    database.execute("UPDATE horsies_meters SET next_at = now() + interval '1 hour'")
    kwargs = json.dumps({"customer": PERSON})
    add_task(database, status="COMPLETED", kwargs=kwargs, lane_key=PERSON)
    by_key = (command, "--key", PERSON, "--yes")
    done(horsies(command, "--argument", PERSON, "--yes"))
    assert done(horsies(*by_key)).out == "No task matches.\n"
    assert (count(database, "horsies_lanes"), count(database, "horsies_meters")) == (0, 1)
    assert traces(database) == []
    database.execute("UPDATE horsies_meters SET next_at = now()")
    assert done(horsies(*by_key)).out.endswith("The key is forgotten.\n")
    assert count(database, "horsies_meters") == 0


@pytest.mark.parametrize("key", ["ACME\\alice", "it's", "a", "zoë\n", "a' of queue 'b"])
@pytest.mark.parametrize("is_erased", [True, False], ids=["erased", "another"])
@pytest.mark.parametrize("command", ["delete", "redact"])
def test_the_finding_of_a_key_and_its_delivery_are_erased_and_those_of_a_longer_key_are_not(
    horsies: Run, database: Database, command: str, key: str, is_erased: bool
) -> None:
    named = key if is_erased else f"{key}cme"
    sentence = f"Key {named!r} of queue 'default' was paused 3 minutes ago."
    remedy = "horsies keys resume"
    announce(database, sentence, remedy)
    add_task(database, status="COMPLETED", lane_key=key)
    done(horsies(command, "--key", key, "--yes"))
    found = database.execute("SELECT sentence, remedy FROM horsies_findings").fetchone()
    assert found == (("erased", None) if is_erased else (sentence, remedy))
    delivered = database.execute(
        "SELECT kwargs::json #>> '{event,data,sentence}' FROM horsies_tasks "
        "WHERE task_name = 'horsies.webhook.alerts' AND kwargs IS NOT NULL"
    ).fetchall()
    assert delivered == ([] if is_erased else [(sentence,)])


def announce(database: Database, sentence: str, remedy: str) -> None:
    """Open a finding about a key, to which a webhook subscribes; its delivery has ended."""
    finding = {"code": "KEY_PAUSED", "subject": "queue default", "check_id": "tests"}
    finding |= {"level": "red", "sentence": sentence, "remedy": remedy}
    hook = Webhook(name="alerts", url="https://hooks.example", secret=SECRET, on=["finding.opened"])
    config = AppConfig(broker=PostgresConfig(database_url="postgresql://"), webhooks=[hook])
    store_webhooks.run(database, (subscriptions(config), ["default"]))
    (recorded,) = record_findings.fetch(database, json.dumps([finding]), ["tests"])
    assert recorded.announced == 1
    database.execute("UPDATE horsies_tasks SET status = 'COMPLETED'")


def test_a_key_of_a_run_that_stays_keeps_its_limits(horsies: Run, database: Database) -> None:
    add_run(database, workflow_key=PERSON)
    database.execute(
        "INSERT INTO horsies_lanes (queue_name, lane, lane_key, weight) "
        "VALUES ('default', horsies_lane_v1('default', %s), %s, 2)",
        [PERSON] * 2,
    )
    assert done(horsies("delete", "--key", PERSON, "--yes")).out == "No task matches.\n"
    assert count(database, "horsies_lanes") == 1


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("--key", "a", "--argument", "b"), "--key stands alone"),
        (("--key", "a", "--name", "b"), "--key stands alone"),
        (("--argument", ""), "argument must be a text"),
        (("--order", "x", "--name", "b"), "--order stands alone"),
        (("--status", "running"), "applies to the statuses"),
        ((), "Name the tasks by their ids"),
        (("not-an-id",), "is not the id of a task or run"),
    ],
    ids=str,
)
def test_wrong_command_lines_change_nothing(
    horsies: Run, database: Database, words: tuple[str, ...], sentence: str
) -> None:
    add_task(database, status="COMPLETED")
    refused = horsies("delete", *words, "--yes")
    assert refused.code != 0
    assert sentence in " ".join(refused.err.replace("│", " ").split())
    assert count(database) == 1


def test_a_redacted_task_keeps_that_it_ran_and_cannot_be_sent_again(
    horsies: Run, database: Database, app: Horsies
) -> None:
    task_id = add_person(database)
    database.execute(
        "UPDATE horsies_tasks SET error_code = 'CARD_REFUSED', cancel_requested_at = now(), "
        "wakes_task_id = gen_random_uuid()"
    )
    before = row_of(database, task_id)
    done(horsies("redact", task_id, "--yes"))
    row = row_of(database, task_id)
    kept = (
        "status",
        "task_name",
        "queue_name",
        "error_code",
        "created_at",
        "updated_at",
        "retry_count",
    )
    assert {name: row[name] for name in kept} == {name: before[name] for name in kept}
    assert (row["args"], row["kwargs"], row["task_options"]) == (None, None, None)
    (attempt,) = attempts_of(database, task_id)
    assert (attempt["outcome"], attempt["error_message"]) == ("FAILED", None)
    error = app.handle(task_id).get(1_000).err_value
    assert (error.error_code, error.message) == ("CARD_REFUSED", "The task was redacted.")
    assert "\nredacted " in done(horsies("show", task_id, "--payload")).out
    refused = horsies("retry", task_id)
    assert (refused.code, "is redacted: its arguments are gone" in refused.err) == (1, True)
    words = ("retry", "--status", "failed", "--yes", "--json")
    assert json.loads(horsies(*words).out)["refused"] == {"redacted": 1}
    again = done(horsies("redact", task_id, "--yes")).out
    assert again.startswith("1 matching, 0 can be redacted, 1 refused: 1 redacted.")
    assert count(database) == 1
    done(horsies("delete", task_id, "--yes"))
    assert count(database) == 0


def test_a_redaction_notifies_nobody_and_changes_no_status(
    horsies: Run, database: Database
) -> None:
    run_id = add_personal_run(database)
    add_person(database)
    for channel in ("task_done", "workflow_done", "task_queue_default", "horsies_workflow_status"):
        database.execute(f"LISTEN {channel}".encode())
    database.execute(
        "INSERT INTO horsies_webhooks (name, events, queue_name, priority, max_retries, task_options) "
        "VALUES ('ops', '{task.failed,run.ended}', 'default', 1, 0, '{}')"
    )
    tasks = count(database)
    statuses = "SELECT id, status, completed_at, open_nodes FROM horsies_workflows ORDER BY id"
    before = database.execute(statuses).fetchall()
    done(horsies("redact", "--argument", PERSON, "--with-runs", "--yes"))
    assert database.execute(statuses).fetchall() == before
    assert (list(database.notifies(timeout=0)), count(database)) == ([], tasks)
    refused = horsies("workflow", "retry", run_id)
    assert (refused.code, "is redacted: its arguments are gone" in refused.err) == (1, True)
    assert tables_with(database) == set()
    assert done(horsies("workflow", "show", run_id)).out


def test_tasks_chosen_by_filters_are_redacted_in_bounded_batches(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(orders, "ERASE_BATCH", 100)
    add_failed(database, 250)
    database.execute("UPDATE horsies_tasks SET kwargs = %s", [json.dumps({"customer": PERSON})])
    ended = done(horsies("redact", "--name", "charge", "--yes"))
    assert ended.out.splitlines()[-1].startswith("250 tasks redacted; order ")
    assert (count(database), traces(database)) == (250, [])


@pytest.mark.parametrize("by", BY_PERSON, ids=" ".join)
def test_an_export_has_everything_that_mentions_the_person(
    horsies: Run, database: Database, by: tuple[str, str]
) -> None:
    task_id, run_id = add_person(database), add_personal_run(database)
    other = add_task(database, status="COMPLETED", kwargs='{"customer": "bert"}')
    database.execute(
        "INSERT INTO horsies_schedule_state (schedule_name, definition) VALUES ('daily', %s)",
        [json.dumps({"kwargs": {"customer": PERSON}})],
    )
    before = traces(database)
    documents = [json.loads(line) for line in done(horsies("export", *by)).out.splitlines()]
    kinds = Counter(one["kind"] for one in documents)
    is_key = by[0] == "--key"
    other_kind = "key" if is_key else "schedule"
    assert kinds == {"task": 3, "run": 2, "change": 1 + is_key, other_kind: 1}
    assert other not in json.dumps(documents)
    exported = next(one for one in documents if one.get("id") == task_id)
    assert exported["kwargs"] == {"customer": PERSON}
    parts = ("attempts", "logs", "steps", "signals")
    assert all(PERSON in json.dumps(exported[part][0]) for part in parts)
    assert PERSON in exported["progress"]["note"]
    run = next(one for one in documents if one.get("id") == run_id)
    assert all(PERSON in json.dumps(run[part]) for part in ("nodes", "signals"))
    assert traces(database) == before


def test_an_export_by_id_brings_the_run_of_a_task(horsies: Run, database: Database) -> None:
    run_id = add_personal_run(database)
    found = database.execute(
        "SELECT id::text FROM horsies_tasks WHERE workflow_id = %s", [run_id]
    ).fetchone()
    assert found is not None
    by_task, by_run = (done(horsies("export", one)).out for one in (found[0], run_id))
    assert by_task == by_run
    assert len(by_run.splitlines()) == 4
    assert done(horsies("export", "--key", "nobody")).out == ""
    assert horsies("export", "--key", "a", "--argument", "b").code == 2
