"""The operator's commands on a real database: text for people, JSON for programs, exit codes."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg.types.json import Jsonb

from horsies.ids import new_id
from horsies.retry import RetryPolicy
from tests.support.command_line import Finished, Run, assert_unreachable
from tests.support.database import Database
from tests.support.rows import (
    UNKNOWN_ID,
    add_attempt,
    add_snapshot,
    add_task,
    add_worker,
    ago,
    picture,
    row_of,
)

# The same in every test process, or they would not agree on the names of the tests.
UNREACHABLE = "postgresql://app:hunter2@127.0.0.1:1/shop"
COMMANDS = [
    ["status"],
    ["workers"],
    ["queues"],
    ["queues", "pause", "mail"],
    ["tasks"],
    ["show", new_id()],
    ["cancel", new_id()],
    ["retry", new_id()],
]
APP = """
import os
from horsies import AppConfig, CustomQueueConfig, Horsies, PostgresConfig, QueueMode

app = Horsies(AppConfig(
    broker=PostgresConfig(database_url=os.environ["SHOP_URL"]),
    queue_mode=QueueMode.CUSTOM,
    custom_queues=[
        CustomQueueConfig(name="mail"), CustomQueueConfig(name="reports", max_concurrency=3)
    ],
))
"""

pytestmark = pytest.mark.usefixtures("database")


def names(command: list[str]) -> str:
    return " ".join(word for word in command if "-" not in word)


def read(finished: Finished) -> Any:
    assert finished.code == 0, finished.err
    assert finished.err == ""
    return json.loads(finished.out)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, process_url: str) -> Path:
    (tmp_path / f"shop_{tmp_path.name}.py").write_text(APP)
    monkeypatch.setenv("SHOP_URL", process_url)
    monkeypatch.chdir(tmp_path)
    return tmp_path / f"shop_{tmp_path.name}.py"


def test_status_shows_queues_and_workers(horsies: Run, database: Database) -> None:
    add_task(database, queue_name="mail", enqueued_at=ago(3720))
    add_task(database, queue_name="mail", enqueued_at=ago(-60))
    database.execute("INSERT INTO horsies_queues VALUES ('mail', now())")
    worker_id = add_worker(database, queues=["mail", "reports"], processes=8)
    add_snapshot(database, worker_id, memory_usage_mb=100.0, children_memory_mb=400.0)
    add_task(database, queue_name="mail", status="RUNNING", claimed_by_worker_id=worker_id)
    finished = horsies("status")
    assert (finished.code, finished.err) == (0, "")
    lines = finished.out.splitlines()
    heads = "QUEUE CAP DUE DELAYED CLAIMED RUNNING OLDEST DONE/MIN FAILED/MIN"
    assert lines[0].split() == heads.split()
    assert lines[1].split() == ["mail", "-", "1", "1", "0", "1", "1h02m", "0", "0"]
    assert lines[2] == "paused"
    assert lines[3].split() == ["reports", "-", "0", "0", "0", "0", "-", "0", "0"]
    assert lines[4] == "1 worker alive, 1 of 8 children busy, 500 MB of memory."


def test_status_shows_the_caps_of_live_workers_and_queues_without_a_worker(
    horsies: Run, database: Database
) -> None:
    for cap in (3, 5):
        worker_id = add_worker(database, queues=["mail", "reports"], name=f"post-{cap}")
        caps = Jsonb({"mail": cap, "orders": 9})
        add_snapshot(database, worker_id, queue_max_concurrency=caps, cluster_wide_cap=12)
    add_task(database, queue_name="orders")
    lines = horsies("status").out.splitlines()
    assert [line.split("  ")[0] for line in lines[1:5]] == [
        "mail",
        "orders",
        "no worker",
        "reports",
    ]
    assert [lines[row].split()[1] for row in (1, 2, 4)] == ["3,", "-", "-"]
    assert lines[5].startswith("2 workers alive, 0 of 8 children busy")
    assert lines[5].endswith(", cluster-wide cap 12.")
    assert lines[6] == "  mail, reports: post-3, post-5"
    assert "\npost-5\nhost-1, pid 100, queues mail, reports" in horsies("workers").out
    queues = {queue["name"]: queue for queue in read(horsies("status", "--json"))["queues"]}
    assert (queues["mail"]["workers"], queues["mail"]["caps"]) == (2, [3, 5])
    assert (queues["orders"]["workers"], queues["orders"]["caps"]) == (0, [])


def test_a_task_whose_outcome_is_refused_occupies_no_child(
    horsies: Run, database: Database
) -> None:
    worker_id = add_worker(database, processes=1)
    for _ in range(2):
        add_task(database, status="RUNNING", claimed_by_worker_id=worker_id)
    database.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error) "
        "SELECT id, 'task', status, generation, 'record', '54000' FROM horsies_tasks LIMIT 1"
    )
    assert "1 worker alive, 1 of 1 child busy" in horsies("status").out


def test_status_counts_the_places_of_async_children(horsies: Run, database: Database) -> None:
    add_worker(database, processes=102, children='[{"pid": 1}, {"pid": 2}, {"pid": 3, "tasks": 0}]')
    assert "1 worker alive, 0 of 102 places busy" in horsies("status").out


def test_an_idle_database_is_described_in_sentences(horsies: Run) -> None:
    finished = horsies("status")
    assert finished.code == 0
    assert finished.out.count("\n") == 2
    assert "No worker is running." in finished.out
    assert horsies("workers").out == "No worker is running.\n"
    assert horsies("tasks").out == "No task matches.\n"


def test_status_counts_workers_that_went_missing(horsies: Run, database: Database) -> None:
    add_worker(database)
    add_worker(database, seen_at=ago(600))
    assert "1 worker alive, 0 of 4 children busy, 1 lost." in horsies("status").out


def test_status_shows_the_oldest_blocked_tasks_and_their_number(
    horsies: Run, database: Database
) -> None:
    assert "blocked" not in horsies("status").out
    ids = sorted(add_task(database, status="RUNNING", generation=2) for _ in range(7))
    database.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error, since) "
        "SELECT id, 'task', status, generation, 'record', '54000 too \x1b[31mlong', "
        "now() - row_number() OVER (ORDER BY id DESC) * interval '1 minute' FROM horsies_tasks"
    )
    database.execute("UPDATE horsies_tasks SET generation = 3 WHERE id = %s", (ids[0],))
    lines = horsies("status").out.splitlines()
    first = lines.index("6 blocked task(s) or run(s): the database refuses their next change.")
    shown = " ".join(lines[first + 1 :])
    assert f"task {ids[1]}, record, for 6m00s: 54000 too \\x1b[31mlong" in " ".join(shown.split())
    assert "and 1 more" in shown
    assert ids[6] not in shown
    blocked = read(horsies("status", "--json"))["blocked"]
    assert blocked["count"] == 6
    assert [row["id"] for row in blocked["first"]] == ids[1:6]


def test_workers_are_listed_with_their_place(horsies: Run, database: Database) -> None:
    worker_id = add_worker(database, hostname="web-1", pid=77, queues=["mail", "reports"])
    gone = add_worker(database, stopped_at=ago(5), seen_at=ago(5))
    out = horsies("workers").out
    assert out.splitlines()[1].split()[:3] == [worker_id, "alive", "0/4"]
    assert "web-1, pid 77, queues mail, reports" in out
    assert gone not in out
    everyone = horsies("workers", "--all").out
    assert gone in everyone
    assert "stopped" in everyone


def test_a_worker_without_notifications_is_shown_as_such(horsies: Run, database: Database) -> None:
    add_worker(database)
    polling = "receives no notifications"
    assert polling not in horsies("workers").out
    assert read(horsies("workers", "--json"))["workers"][0]["receives_notifications"] is True
    database.execute("UPDATE horsies_workers SET hears = false")
    assert polling in horsies("workers").out
    assert read(horsies("workers", "--json"))["workers"][0]["receives_notifications"] is False
    summary = "1 worker alive, 0 of 4 children busy, 1 without notifications."
    assert summary in horsies("status").out
    assert read(horsies("status", "--json"))["workers"][0]["receives_notifications"] is False


def test_workers_that_do_not_answer_a_ping_are_shown_as_such(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.cli.queues_workers.PING_TIMEOUT_SECONDS", 0.05)
    add_worker(database)
    assert horsies("workers", "--ping").out.splitlines()[1].split()[-1] == "none"


def test_json_has_the_same_keys_with_and_without_values(horsies: Run, database: Database) -> None:
    worker_id = add_worker(database)
    add_task(database)
    bare = read(horsies("status", "--json"))
    add_snapshot(database, worker_id, memory_usage_mb=1.0, children_memory_mb=2.0, cpu_percent=3.0)
    add_attempt(database, add_task(database, status="COMPLETED"))
    database.execute("INSERT INTO horsies_queues VALUES ('default', now())")
    full = read(horsies("status", "--json"))
    assert list(bare) == list(full) == ["queues", "workers", "blocked"]
    assert list(bare["queues"][0]) == list(full["queues"][0])
    assert list(bare["workers"][0]) == list(full["workers"][0])
    assert full["queues"][0]["paused"] is True
    assert full["queues"][0]["paused_at"].endswith("Z")
    assert full["queues"][0]["done_per_minute"] == 1.0
    assert full["workers"][0]["memory_mb"] == 3.0
    assert list(read(horsies("queues", "--json"))["queues"][0]) == list(full["queues"][0])
    assert list(read(horsies("workers", "--json"))["workers"][0]) == list(full["workers"][0])


def test_tasks_are_listed_with_their_errors(horsies: Run, database: Database) -> None:
    failed = add_task(
        database,
        task_name="charge",
        status="FAILED",
        error_code="GATEWAY_DOWN",
        created_at=ago(3720),
    )
    waiting = add_task(database, queue_name="mail", created_at=ago(3720))
    lines = horsies("tasks").out.splitlines()
    assert lines[0].split() == ["ID", "STATUS", "AGE", "TASK"]
    assert lines[1].split() == [waiting, "PENDING", "1h02m", "work", "on", "mail"]
    assert lines[2].split() == [failed, "FAILED", "1h02m", "charge", "on", "default"]
    assert lines[3].split() == ["GATEWAY_DOWN"]


def test_every_filter_of_the_list_counts(horsies: Run, database: Database) -> None:
    failed = add_task(database, task_name="charge", status="FAILED", error_code="GATEWAY_DOWN")
    waiting = add_task(database, queue_name="mail")

    def listed(*arguments: str) -> list[str]:
        return [task["id"] for task in read(horsies("tasks", "--json", *arguments))["tasks"]]

    assert listed() == [waiting, failed]
    assert listed("--status", "failed") == [failed]
    assert listed("--status", "FAILED", "--status", "pending") == [waiting, failed]
    assert listed("--queue", "mail") == [waiting]
    assert listed("--queue", "nowhere") == []
    assert listed("--name", "charge") == [failed]
    assert listed("--error-code", "GATEWAY_DOWN") == [failed]
    assert listed("--before", waiting) == [failed]
    assert listed("--limit", "1") == [waiting]
    assert listed("--since", "1h") == [waiting, failed]
    assert listed("--since", "2999-01-01T00:00") == []
    assert listed("--since", "2020-01-01T00:00+02:00") == [waiting, failed]


def test_a_cut_list_says_how_to_go_on(horsies: Run, database: Database) -> None:
    stored = sorted(add_task(database) for _ in range(3))
    finished = horsies("tasks", "--limit", "2")
    assert finished.err == f"There may be more: --before {stored[1]}\n"
    document = read(horsies("tasks", "--limit", "2", "--json"))
    assert (document["next_before"], document["looked_at_all"]) == (stored[1], True)
    assert read(horsies("tasks", "--json"))["next_before"] is None


def test_the_same_list_is_the_same_text(horsies: Run, database: Database) -> None:
    add_task(database, status="FAILED", error_code="BROKE")
    assert horsies("tasks", "--json").out == horsies("tasks", "--json").out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--since", "yesterday"],
        ["--since", "99999999999d"],
        ["--since", "999999999d"],
        ["--before", "nonsense"],
        ["--limit", "0"],
        ["--limit", "1001"],
        ["--status", "DONE"],
    ],
)
def test_arguments_that_make_no_sense_end_in_2(horsies: Run, arguments: list[str]) -> None:
    finished = horsies("tasks", *arguments)
    assert (finished.code, finished.out) == (2, "")
    assert arguments[0] in finished.err
    assert "Value error" not in finished.err


def test_a_task_is_shown_without_arguments_and_result_unless_asked(
    horsies: Run, database: Database
) -> None:
    task_id = add_task(
        database,
        status="FAILED",
        args='["4111-secret"]',
        kwargs='{"pin": "secret-too"}',
        result='{"err": "secret-result"}',
        error_code="GATEWAY_DOWN",
        failed_reason="no answer",
        task_options='{"retry_policy":null,"good_until":null}',
        timeout_ms=5000,
        max_retries=2,
        worker_hostname="web-1",
        worker_pid=7,
        started_at=ago(3),
    )
    add_attempt(
        database,
        task_id,
        outcome="FAILED",
        started_at=ago(3),
        finished_at=ago(1),
        error_code="GATEWAY_DOWN",
        error_message="it said no",
        retry_reason="not retried: code GATEWAY_DOWN is not listed in auto_retry_for",
    )
    plain = horsies("show", task_id)
    assert plain.code == 0
    assert "not retried: code GATEWAY_DOWN is not listed" in " ".join(plain.out.split())
    for word in (task_id, "FAILED", "GATEWAY_DOWN", "no answer", "5,000 ms", "web-1, pid 7"):
        assert word in plain.out
    assert "attempt 1: FAILED" in plain.out
    assert "GATEWAY_DOWN: it said no" in plain.out
    assert "secret" not in plain.out
    assert "secret" not in horsies("show", task_id, "--json").out
    opened = horsies("show", task_id, "--payload").out
    assert all(word in opened for word in ("4111-secret", "secret-too", "secret-result"))
    document = read(horsies("show", task_id, "--payload", "--json"))
    assert document["args"] == ["4111-secret"]
    assert document["result"] == {"err": "secret-result"}
    assert document["options"] == {"retry_policy": None, "good_until": None}
    assert document["attempts"][0]["error_message"] == "it said no"
    assert set(document) - set(read(horsies("show", task_id, "--json"))) == {
        "args",
        "kwargs",
        "result",
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("tasks", "--limit", "x"), "'--limit': 'x' is not a whole number from 1 to 1,000."),
        (("tasks", "--limit", "0"), "'--limit': '0' is not a whole number from 1 to 1,000."),
        (
            ("workflows", "--limit", "5000"),
            "'--limit': '5000' is not a whole number from 1 to 1,000.",
        ),
        (("history", "--limit", "1.5"), "'--limit': '1.5' is not a whole number from 1 to 1,000."),
        (
            ("schedules", "next", "a", "--count", ""),
            "'--count': '' is not a whole number from 1 to 1",
        ),
        (("health", "--timeout", "nan"), "'--timeout': 'nan' is not a number from 0.1 to 60.0."),
        (
            ("dev", "--processes", "0"),
            "'--processes' / '-c': '0' is not a whole number of at least 1.",
        ),
        (("worker", "--processes", "x"), "'--processes' / '-c': 'x' is not a whole number."),
    ],
)
def test_a_bad_number_is_refused_with_its_range(
    horsies: Run, arguments: tuple[str, ...], sentence: str
) -> None:
    finished = horsies(*arguments)
    assert (finished.code, finished.out) == (2, "")
    assert f"Invalid value for {sentence}" in " ".join(finished.err.split())
    assert "Input should" not in finished.err


def test_show_keeps_stored_line_ends_out_of_the_first_column(
    horsies: Run, database: Database
) -> None:
    task_id = add_task(database, status="FAILED")
    texts = {"retry_reason": "by a\nforged one", "error_message": "it said\nforged two"}
    add_attempt(database, task_id, error_code="A", **texts)
    shown = horsies("show", task_id).out
    assert "by a\\nforged one" in shown
    assert "A: it said\n    forged two" in shown


def test_show_has_no_number_for_retries_without_a_limit(horsies: Run, database: Database) -> None:
    endless = RetryPolicy.forever(auto_retry_for=["GATEWAY_DOWN"]).max_retries
    task_id = add_task(database, retry_count=5, max_retries=endless)
    assert "5 without limit" in horsies("show", task_id).out


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_terminal_that_knows_few_characters_gets_the_others_escaped(
    database: Database, process_url: str, as_json: bool
) -> None:
    task_id = add_task(database, args='["caf\u00e9 \u2713"]')
    arguments = ["show", task_id, "--payload", *(["--json"] if as_json else [])]
    shown = subprocess.run(
        [sys.executable, "-m", "horsies", *arguments],
        env={**os.environ, "DATABASE_URL": process_url, "PYTHONIOENCODING": "ascii"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    if as_json:
        assert "caf\u00e9 \u2713" in json.loads(shown.stdout)["args"][0]
    else:
        assert "caf\\xe9 \\u2713" in shown.stdout


def test_stored_text_cannot_control_the_terminal(horsies: Run, database: Database) -> None:
    evil = "\x1b[2Jnothing here\r\x07[bold]x[/bold]"
    task_id = add_task(database, task_name=evil, queue_name="q", status="FAILED", error_code=evil)
    add_worker(database, hostname=evil)
    note = "INSERT INTO horsies_task_progress SELECT id, 1, 1, 2, %s, now() FROM horsies_tasks"
    database.execute(note, ("a\nstatus COMPLETED\x1b[2J",))
    assert "1 of 2, a\\nstatus COMPLETED\\x1b[2J (attempt 1)" in horsies("show", task_id).out
    for command in (["tasks"], ["show", task_id], ["workers"]):
        out = horsies(*command).out
        assert "\x1b" not in out
        assert "\r" not in out
        assert "\x07" not in out
        assert "[bold]" in out.replace("\n", "")
    assert read(horsies("tasks", "--json"))["tasks"][0]["task_name"] == evil


def run_in_terminal(command: list[str], environment: dict[str, str]) -> str:
    """The output of a command on its own terminal."""
    own_end, its_end = pty.openpty()
    with open(own_end, "rb", buffering=0) as terminal:
        started = subprocess.Popen(command, env=environment, stdin=its_end, stdout=its_end)
        os.close(its_end)
        output = b""
        # Linux reports the end of the last process on a terminal as an error.
        with suppress(OSError):
            while read := terminal.read(65536):
                output += read
        assert started.wait(60) == 0
    return output.decode()


@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_stored_text_cannot_control_a_real_terminal(
    database: Database, process_url: str, as_json: bool
) -> None:
    evil = "caf\u00e9 \x1b[2J\x7f\x9b31m\u061c\u200e\u2028\u202e\u2066"
    add_task(database, task_name=evil, queue_name="q", status="FAILED", error_code=evil)
    command = [sys.executable, "-m", "horsies", "tasks", *(["--json"] if as_json else [])]
    kept = {**os.environ, "DATABASE_URL": process_url, "TERM": "dumb", "PYTHONUTF8": "1"}
    out = run_in_terminal(command, kept)
    assert not [one for one in out if not one.isprintable() and one not in "\r\n"]
    assert "caf\u00e9" in out
    if as_json:
        assert json.loads(out)["tasks"][0]["task_name"] == evil


@pytest.mark.parametrize(("status", "stays"), [("PENDING", False), ("RUNNING", True)])
def test_cancel_ends_what_waits_and_asks_what_runs(
    horsies: Run, database: Database, status: str, stays: bool
) -> None:
    task_id = add_task(database, status=status, claimed_by_worker_id="w")
    finished = horsies("cancel", task_id)
    assert finished.code == 0
    assert task_id in finished.out
    row = row_of(database, task_id)
    assert row["status"] == ("RUNNING" if stays else "CANCELLED")
    assert row["cancel_requested_at"] is not None


def test_cancel_leaves_running_tasks_alone_when_told_to(horsies: Run, database: Database) -> None:
    task_id = add_task(database, status="RUNNING")
    finished = horsies("cancel", task_id, "--no-running")
    assert (finished.code, finished.out) == (1, "")
    assert "RUNNING" in finished.err
    assert row_of(database, task_id)["cancel_requested_at"] is None


def test_cancel_tells_programs_what_the_task_was(horsies: Run, database: Database) -> None:
    task_id = add_task(database)
    assert read(horsies("cancel", task_id, "--json")) == {
        "task_id": task_id,
        "was_status": "PENDING",
    }


def test_retry_sends_the_request_again(horsies: Run, database: Database) -> None:
    old = add_task(database, status="FAILED", args="[1]")
    before = picture(database, old)
    finished = horsies("retry", old)
    assert finished.code == 0
    new = finished.out.split()[-1].rstrip(".")
    assert row_of(database, new)["retried_from_task_id"] == old
    assert picture(database, old) == before
    document = read(horsies("retry", old, "--json"))
    assert list(document) == ["task_id", "retried_from_task_id", "was_status"]
    assert document["task_id"] not in (old, new)
    assert f"retry of {old}" in " ".join(horsies("show", new).out.split())


@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_what_cannot_be_done_to_a_task_ends_in_1(
    horsies: Run, database: Database, command: str
) -> None:
    status = "COMPLETED" if command == "cancel" else "PENDING"
    task_id = add_task(database, status=status)
    finished = horsies(command, task_id, "--json")
    assert (finished.code, finished.out) == (1, "")
    assert status in finished.err


@pytest.mark.parametrize("command", ["show", "cancel", "retry"])
@pytest.mark.parametrize("task_id", [UNKNOWN_ID, "nonsense", "' OR true --"])
def test_a_task_that_does_not_exist_ends_in_4(horsies: Run, command: str, task_id: str) -> None:
    finished = horsies(command, task_id)
    assert (finished.code, finished.out) == (4, "")
    assert finished.err == f"error: There is no task {task_id}.\n"


def test_queues_are_paused_and_resumed(horsies: Run, database: Database) -> None:
    add_task(database, queue_name="mail")
    assert horsies("queues", "pause", "mail").out.startswith("Queue mail is paused since 20")
    assert read(horsies("queues", "--json"))["queues"][0]["paused"] is True
    document = read(horsies("queues", "resume", "mail", "--json"))
    assert document == {"paused": False, "name": "mail", "paused_at": None}
    assert horsies("queues", "resume", "mail").out == "Queue mail is not paused.\n"
    assert "paused" not in horsies("queues").out


@pytest.mark.parametrize("action", ["pause", "resume"])
def test_a_queue_nobody_knows_ends_in_4(horsies: Run, database: Database, action: str) -> None:
    add_worker(database, queues=["mail"])
    finished = horsies("queues", action, "mial")
    assert (finished.code, finished.out) == (4, "")
    assert finished.err == "error: There is no queue 'mial'; the known ones are: mail.\n"
    assert database.execute("SELECT count(*) FROM horsies_queues").fetchone() == (0,)


def test_an_application_says_which_queues_there_are(horsies: Run, project: Path) -> None:
    assert horsies("queues", "pause", "reports", project.name).code == 0
    assert horsies("queues", "pause", "images", "-m", project.name).code == 4
    assert "reports" in horsies("queues", f"{project.name}:app").out
    listed = read(horsies("status", project.name, "--json"))["queues"]
    assert [(queue["name"], queue["paused"], queue["caps"]) for queue in listed] == [
        ("mail", False, []),
        ("reports", True, [3]),
    ]


@pytest.mark.parametrize("arguments", [["queues", "pause"], ["queues", "stop", "mail"], ["show"]])
def test_half_a_command_is_refused(horsies: Run, arguments: list[str]) -> None:
    finished = horsies(*arguments)
    assert finished.code in (1, 2)
    assert finished.out == ""
    assert finished.err


@pytest.mark.parametrize("command", COMMANDS, ids=names)
def test_the_database_is_named_by_option_too(
    horsies: Run, monkeypatch: pytest.MonkeyPatch, process_url: str, command: list[str]
) -> None:
    monkeypatch.delenv("DATABASE_URL")
    nowhere = horsies(*command)
    assert nowhere.code == 1
    assert "--database-url" in nowhere.err
    assert horsies(*command, "--database-url", process_url).code in (0, 4)
    both = horsies(*command, "-m", "shop:app", "--database-url", process_url)
    assert both.code == 1
    assert "exclude each other" in both.err


@pytest.mark.parametrize("command", COMMANDS, ids=names)
def test_an_unreachable_database_is_one_report_without_a_password(
    horsies: Run, command: list[str]
) -> None:
    assert_unreachable(horsies(*command, "--database-url", UNREACHABLE))


@pytest.mark.parametrize("command", COMMANDS, ids=names)
def test_a_database_without_our_tables_is_left_as_it_is(
    horsies: Run, database_url: str, command: list[str]
) -> None:
    finished = horsies(*command, "--database-url", database_url)
    assert (finished.code, finished.out) == (1, "")
    assert "create them with `horsies migrate`." in finished.err
    with psycopg.connect(database_url) as connection:
        found = connection.execute(
            "SELECT count(*) FROM pg_class WHERE relname LIKE 'horsies%'"
        ).fetchone()
    assert found == (0,)


def test_tables_of_another_release_are_refused_and_left_alone(
    horsies: Run, database_url: str
) -> None:
    assert horsies("migrate", "--database-url", database_url).code == 0
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("DELETE FROM horsies_migrations WHERE version > 1")
        older = horsies("status", "--database-url", database_url)
        assert older.code == 1
        assert "bring them up to date with `horsies migrate`." in older.err
        connection.execute("INSERT INTO horsies_migrations (version, name) VALUES (9999, 'later')")
        newer = horsies("status", "--database-url", database_url)
        assert newer.code == 1
        assert "upgrade horsies on this machine" in newer.err


@pytest.mark.parametrize("command", ["status", "workers", "queues", "tasks", "show", "retry"])
def test_help_explains_the_exit_codes(horsies: Run, command: str) -> None:
    assert "Exit codes: 0" in horsies(command, "--help").out


def test_nothing_is_wider_than_80_columns_without_a_terminal(
    database: Database, process_url: str
) -> None:
    queues = [f"a-queue-with-quite-a-long-name-{number}" for number in range(6)]
    worker_id = add_worker(database, hostname="worker-17.eu-west.example.com", queues=queues)
    task_id = add_task(
        database,
        task_name="shop.orders.tasks.charge_the_card_of_the_customer",
        queue_name=queues[0],
        status="FAILED",
        claimed_by_worker_id=worker_id,
        error_code="A_RATHER_LONG_ERROR_CODE_OF_SOME_GATEWAY",
        failed_reason="word " * 60,
    )
    kept = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    for command in (["status"], ["workers"], ["tasks"], ["show", task_id]):
        finished = subprocess.run(
            [sys.executable, "-m", "horsies", *command],
            env={**kept, "DATABASE_URL": process_url},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
        )
        assert max(map(len, finished.stdout.splitlines())) <= 80
        assert "\x1b" not in finished.stdout
        assert task_id in finished.stdout or worker_id in finished.stdout or command == ["status"]


def test_a_watched_status_is_printed_until_it_is_interrupted(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        add_task(database, queue_name="mail")
        if len(pauses) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("horsies.cli.status.time.sleep", pause)
    finished = horsies("status", "--watch", "--every", "0.5")
    assert (finished.code, finished.err, pauses) == (0, "", [0.5, 0.5])
    before, after = finished.out.split("No worker is running.")[:2]
    assert "mail" not in before
    assert "mail" in after
    assert "\x1b" not in finished.out


def test_a_ping_without_an_answer_ends_in_1(
    horsies: Run, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.cli.queues_workers.PING_TIMEOUT_SECONDS", 0.05)
    sentence = "error: No worker responded to the ping.\n"
    finished = horsies("workers", "--ping")
    assert (finished.code, finished.out, finished.err) == (1, "No worker is running.\n", sentence)
    worker_id = add_worker(database)
    finished = horsies("workers", "--ping", "--json")
    assert (finished.code, finished.err) == (1, sentence)
    (worker,) = json.loads(finished.out)["workers"]
    assert (worker["id"], worker["ping_ms"]) == (worker_id, None)
    assert horsies("workers").code == 0


CAPPED = """
import os
from horsies import *

queues = [CustomQueueConfig(name="mail", max_concurrency=3), CustomQueueConfig(name="reports")]
broker = PostgresConfig(database_url=os.environ["DATABASE_URL"])
app = Horsies(AppConfig(
    broker=broker, queue_mode=QueueMode.CUSTOM, custom_queues=queues, cluster_wide_cap=15
))
"""


@pytest.mark.usefixtures("database")
def test_status_shows_every_cap_before_a_worker_runs(horsies: Run, tmp_path: Path) -> None:
    path = tmp_path / f"capped_{uuid.uuid4().hex}.py"
    path.write_text(CAPPED)
    shown = horsies("status", str(path)).out.splitlines()
    assert [line.split()[:2] for line in shown[1:5:2]] == [["mail", "3"], ["reports", "-"]]
    assert shown[5] == "No worker is running; cluster-wide cap 15."
