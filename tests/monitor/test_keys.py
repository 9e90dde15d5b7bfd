"""Keys for operators: `app.keys`, `horsies keys`, explanations, the doctor's finding and the gauges."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import psycopg
import pytest
from pydantic import ValidationError

from horsies import Horsies, Rate
from horsies.db.statements.keys import pause_key, set_key
from horsies.findings import Level
from horsies.monitor.diagnose.doctor import run_doctor
from horsies.monitor.keys import limit_words
from horsies.monitor.metrics import ClusterGauges
from horsies.tasks.broker import BrokerErrorCode
from horsies.tasks.keys import lane_of
from tests.support.command_line import Run
from tests.support.database import Database, lock_waiters
from tests.support.explained import Doors, codes, the
from tests.support.keys import OFFER, Ring, add_keyed, add_many_keyed, end, fail, limit, retry
from tests.support.notifications import SENTINEL, Ears
from tests.support.rows import actions, add_run, add_task, add_worker, ago, row_of
from tests.support.wait import wait_until

pytestmark = pytest.mark.usefixtures("connection")


def keyed(connection: Database, key: str, **columns: Any) -> str:
    """Add a due task with a key, and return its id."""
    lane = lane_of("default", key).number
    return add_task(connection, lane_key=key, lane=lane, held=True, **columns)


# Counts


def test_a_delayed_task_is_due_at_its_time_although_no_worker_moves_it_to_its_lane(
    connection: Database,
) -> None:
    def counts() -> list[tuple[Any, ...]]:
        text = "SELECT due, delayed, first_due_at < now() FROM horsies_count_keyed_v1(NULL, 10)"
        return connection.execute(text).fetchall()

    keyed(connection, "acme", enqueued_at=ago(-600))
    # The first task of a fifo lane keeps its place while it waits for its retry.
    keyed(connection, "acme", enqueued_at=ago(900), next_retry_at=ago(-600))
    assert counts() == [(0, 2, None)]
    keyed(connection, "acme", enqueued_at=ago(800), updated_at=ago(900))
    keyed(connection, "acme", enqueued_at=ago(950), next_retry_at=ago(10), updated_at=ago(900))
    assert counts() == [(2, 2, True)]


# Sent again


def test_a_task_that_is_sent_again_keeps_its_key(app: Horsies, connection: Database) -> None:
    limit(connection, is_fifo=True)
    waiting = keyed(connection, "acme")
    old = keyed(connection, "acme", status="FAILED", claimed_by_worker_id="w")
    again = app.retry_task(old).unwrap().task_id
    columns = [row_of(connection, one) for one in (old, again)]
    assert columns[0]["lane"] == columns[1]["lane"]
    assert (columns[1]["lane_key"], columns[1]["held"]) == ("acme", True)
    ring = Ring(connection)
    order = []
    while taken := ring.take(4):
        order += [task.id for task in taken]
        end(connection, *taken)
    assert order == [waiting, again], "it stands behind the tasks that wait"


# app.keys


def test_the_keys_of_a_queue_are_listed_with_their_tasks_and_limits(
    app: Horsies, connection: Database
) -> None:
    limit(connection, max_concurrency=2, rate_seconds=0.5, rate_burst=3)
    limit(connection, "idle", weight=4)
    limit(connection, "stopped", paused_at="2026-01-01", pause_reason="asked for it")
    add_keyed(connection, "busy", 3)
    Ring(connection).claim(1)
    add_keyed(connection, "waiting", 2)
    found = app.keys.list("default").unwrap()
    assert [(one.key, one.due, one.in_flight) for one in found] == [
        ("stopped", 0, 0),
        ("busy", 2, 1),
        ("waiting", 2, 0),
        ("idle", 0, 0),
    ]
    by_key = {one.key: one for one in found}
    assert limit_words(by_key["busy"]) == "at most 2, 2 per second, burst 3"
    assert limit_words(by_key["idle"]) == "at most 2, 2 per second, burst 3, weight 4"
    assert (by_key["idle"].is_own, by_key["busy"].is_own) == (True, False)
    assert by_key["stopped"].pause_reason == "asked for it"
    assert app.keys.list("default", limit=1).unwrap()[0].key in by_key


def test_a_list_reads_no_more_keys_than_its_limit(app: Horsies, connection: Database) -> None:
    for number in range(12):
        add_keyed(connection, f"key {number}")
    assert len(app.keys.list("default", limit=5).unwrap()) == 5
    refused = app.keys.list("default", limit=0).unwrap_err()
    assert refused.code is BrokerErrorCode.INVALID_QUERY
    assert refused.message == "limit must be from 1 to 1,000, not 0."


def test_limits_of_one_key_hold_for_the_next_claim_until_they_are_cleared(
    app: Horsies, connection: Database
) -> None:
    limit(connection, max_concurrency=1)
    add_keyed(connection, "acme", 9)
    assert app.keys.set("default", "acme", max_concurrency=3).unwrap().max_concurrency == 3
    ring = Ring(connection)
    assert len(ring.claim(9)) == 3
    raised = app.keys.set(
        "default", "acme", weight=2.5, rate=Rate(count=1, per_seconds=60)
    ).unwrap()
    assert (raised.max_concurrency, raised.weight, raised.rate_seconds) == (3, 2.5, 60.0)
    assert app.keys.set("default", "acme", rate=None).unwrap().rate_seconds is None
    cleared = app.keys.clear("default", "acme").unwrap()
    assert (cleared.max_concurrency, cleared.weight, cleared.is_own) == (1, 1.0, False)
    assert ring.claim(9) == [], "three are in flight, and one is allowed again"


def test_a_paused_key_waits_until_it_is_resumed_and_others_do_not(
    app: Horsies, connection: Database
) -> None:
    add_keyed(connection, "acme")
    add_keyed(connection, "other")
    paused = app.keys.pause("default", "acme", reason="the customer asked for it").unwrap()
    assert (paused.is_paused, paused.pause_reason) == (True, "the customer asked for it")
    ring = Ring(connection)
    assert ring.claim(9) == ["other"]
    since = paused.paused_at
    assert app.keys.pause("default", "acme").unwrap().paused_at == since
    app.keys.set("default", "acme", weight=2).unwrap()
    assert app.keys.clear("default", "acme").unwrap().is_paused, "clear keeps the pause"
    assert not app.keys.resume("default", "acme").unwrap().is_paused
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []
    assert ring.claim(9) == ["acme"]


@pytest.mark.parametrize("first", ["resume", "clear"])
def test_two_operators_who_change_a_key_at_once_both_have_their_way(
    app: Horsies, connection: Database, process_url: str, first: str
) -> None:
    """The second change waits for the first one, and its own words were chosen before that."""
    if first == "clear":
        app.keys.set("default", "acme", weight=2).unwrap()
        wanted, held_up = pause_key("default", "acme", None), app.keys.clear
    else:
        app.keys.pause("default", "acme").unwrap()
        wanted = set_key("default", "acme", ["weight"], None, None, None, 2)
        held_up = app.keys.resume
    with psycopg.connect(process_url) as other, ThreadPoolExecutor(1) as threads:
        wanted[0].run(other, wanted[1])
        waiting = threads.submit(held_up, "default", "acme")
        wait_until(lambda: lock_waiters(connection) == 1)
        other.commit()
        state = waiting.result().unwrap()
    assert (state.is_paused, state.weight) == ((True, 1) if first == "clear" else (False, 2))


def test_every_change_notifies_the_workers_of_the_queue_and_is_recorded(
    app: Horsies, connection: Database, process_url: str
) -> None:
    with closing(Ears(process_url, ("task_queue_default", SENTINEL))) as ears:
        app.keys.set("default", "acme", max_concurrency=5, reason="a large customer").unwrap()
        app.keys.set("default", "acme", max_concurrency=5).unwrap()
        app.keys.pause("default", "acme").unwrap()
        app.keys.resume("default", "acme").unwrap()
        app.keys.clear("default", "acme").unwrap()
        app.keys.pause("mial", "acme").unwrap_err()
        assert ears.heard() == [OFFER] * 4, "a pause makes no task startable"
    subject = "key acme of queue default"
    assert [row[1:4] for row in actions(connection)] == [
        ("set_key", subject, "done"),
        ("set_key", subject, "unchanged"),
        ("pause_key", subject, "done"),
        ("resume_key", subject, "done"),
        ("clear_key", subject, "done"),
        ("pause_key", "key acme of queue mial", "refused"),
    ]


def test_the_same_from_an_event_loop(app: Horsies, connection: Database) -> None:
    async def change() -> list[str]:
        keys = app.keys
        (await keys.set_async("default", "acme", weight=3)).unwrap()
        (await keys.pause_async("default", "acme", reason="why")).unwrap()
        shown = (await keys.get_async("default", "acme")).unwrap()
        (await keys.resume_async("default", "acme")).unwrap()
        (await keys.clear_async("default", "acme")).unwrap()
        listed = (await keys.list_async("default")).unwrap()
        return [shown.key, f"{shown.weight:g}", shown.pause_reason or "", str(len(listed))]

    assert asyncio.run(change()) == ["acme", "3", "why", "0"]


@pytest.mark.parametrize(
    ("queue", "key", "code", "message"),
    [
        ("mial", "acme", "UNKNOWN_QUEUE", "There is no queue 'mial'; the known ones are: default."),
        ("default", "", "INVALID_QUERY", "Key must have 1 to 255 characters, not 0."),
        ("default", "x" * 256, "INVALID_QUERY", "Key must have 1 to 255 characters, not 256."),
        (
            "default",
            "\0",
            "INVALID_QUERY",
            "Key contains a NUL character or a lone surrogate; remove it.",
        ),
        ("default", 7, "INVALID_QUERY", "Key must be a text, not int."),
    ],
)
def test_bad_keys_are_refused_in_one_sentence(
    app: Horsies, connection: Database, queue: str, key: Any, code: str, message: str
) -> None:
    for refused in (app.keys.get(queue, key), app.keys.pause(queue, key)):
        error = refused.unwrap_err()
        assert (error.code.value, error.message) == (code, message)
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []


@pytest.mark.parametrize("limits", [{"max_concurrency": -1}, {"weight": 0}, {"weight": 101}])
def test_limits_out_of_range_raise_and_store_nothing(
    app: Horsies, connection: Database, limits: Any
) -> None:
    with pytest.raises(ValidationError):
        app.keys.set("default", "acme", **limits)
    with pytest.raises(TypeError, match="needs a limit"):
        app.keys.set("default", "acme")
    with pytest.raises(TypeError, match="takes max_concurrency, rate, weight, not order"):
        app.keys.set("default", "acme", order="fifo")  # type: ignore[call-arg]
    assert connection.execute("SELECT FROM horsies_lanes").fetchall() == []


# horsies status


def add_meter(connection: Database, lane: int) -> None:
    """Add a meter whose rate allows the next start in an hour."""
    connection.execute(
        "INSERT INTO horsies_meters (queue_name, lane, next_at, seconds, burst) "
        "VALUES ('default', %s, now() + interval '1 hour', 60, 1)",
        (lane,),
    )


def test_the_status_marks_a_queue_whose_rate_or_keys_hold_its_tasks_back(
    horsies: Run, app: Horsies, connection: Database
) -> None:
    def marks() -> str:
        _, _, *lines = horsies("status").out.splitlines()
        end = next(row for row, line in enumerate(lines) if "worker alive" in line)
        return " ".join(lines[:end])

    def holds() -> tuple[int, int, bool]:
        (queue,) = json.loads(horsies("status", "--json").out)["queues"]
        wait = queue["rate_wait_seconds"]
        return queue["paused_keys"], queue["rated_keys"], wait is not None and wait > 3_000

    add_worker(connection)
    for key in ("acme", "globex", "initech"):
        add_keyed(connection, key)
    add_meter(connection, lane_of("default", "acme").number)
    app.keys.pause("default", "idle").unwrap()
    assert (marks(), holds()) == (
        "",
        (0, 0, False),
    )  # the meter's rate was removed, a key has no task
    limit(connection, rate_seconds=60.0, rate_burst=1)
    assert (marks(), holds()) == ("1 key at its rate", (0, 1, False))
    add_meter(connection, 0)
    add_meter(connection, lane_of("default", "globex").number)
    add_meter(connection, lane_of("default", "idle").number)
    assert (marks(), holds()) == ("at its rate 2 keys at their rate", (0, 2, True))
    app.keys.pause("default", "acme").unwrap()
    assert (marks(), holds()) == ("at its rate 1 key paused 1 key at its rate", (1, 1, True))
    connection.execute("DELETE FROM horsies_tasks")
    assert (marks(), holds()) == ("", (0, 0, False))


def test_a_large_number_of_held_keys_is_shown_as_a_lower_bound(
    horsies: Run, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.monitor.overview.HELD_KEYS_MOST", 2)
    monkeypatch.setattr("horsies.cli.status.HELD_KEYS_MOST", 2)
    add_worker(connection)
    for key in ("acme", "globex", "initech"):
        add_keyed(connection, key)
        limit(connection, key, paused_at="2026-01-01")
    assert "2+ keys paused" in " ".join(horsies("status").out.split())


def test_paused_keys_without_tasks_and_those_of_other_queues_hide_none(
    horsies: Run, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("horsies.monitor.overview.HELD_KEYS_MOST", 2)
    add_worker(connection)
    for number in range(5):
        limit(connection, f"idle {number}", paused_at="2026-01-01")
    for queue in ("default", "mail"):
        for key in ("acme", "globex"):
            add_keyed(connection, key, queue=queue)
            limit(connection, key, queue, paused_at="2026-01-01")
    queues = json.loads(horsies("status", "--json").out)["queues"]
    assert {one["name"]: one["paused_keys"] for one in queues} == {"default": 2, "mail": 2}


# horsies keys


def test_the_command_lists_changes_and_shows_keys(horsies: Run, connection: Database) -> None:
    add_worker(connection)
    add_keyed(connection, "acme", 2)
    listed = horsies("keys", "list", "default")
    assert listed.out.splitlines()[1].split() == ["acme", "2", "0", "none", "open"]
    changed = horsies("keys", "set", "default", "acme", "--max-concurrency", "3", "--rate", "10/60")
    assert changed.code == 0, changed.err
    assert "at most 3, 1 per 6 s, set for this key" in changed.out
    paused = horsies("keys", "pause", "default", "acme", "--reason", "asked for it", "--json")
    document = json.loads(paused.out)
    assert (document["paused"], document["pause_reason"]) == (True, "asked for it")
    assert (document["order"], document["on_failure"]) == ("parallel", "go_on")
    assert "asked for it" in horsies("keys", "list", "default").out
    assert horsies("keys", "resume", "default", "acme").code == 0
    assert horsies("keys", "clear", "default", "acme").code == 0
    shown = horsies("keys", "show", "default", "acme").out
    assert "none" in shown
    assert "open" in shown
    assert [row[1] for row in actions(connection)] == [
        *("set_key", "pause_key", "resume_key", "clear_key"),
    ]


def test_a_list_of_keys_fits_a_terminal_and_its_json_is_whole(
    horsies: Run, connection: Database
) -> None:
    add_worker(connection)
    key = f"customer-{'x' * 200}-eu"
    reason = f"task {add_task(connection)} failed: CARD_REFUSED: {'the bank said no ' * 20}."
    add_keyed(connection, key, 2)
    limits: dict[str, Any] = {"max_concurrency": 10_000, "rate_seconds": 3.6, "rate_burst": 1_000}
    limit(connection, key, weight=2.5, paused_at="2026-01-01", pause_reason=reason, **limits)
    lines = horsies("keys", "list", "default").out.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 15
    assert lines[1].startswith("customer-x")
    assert lines[1].split()[1:3] == ["2", "0"]
    assert lines[1].endswith("paused")
    shown = "".join(line.split("  ")[0].strip() for line in lines)
    assert "…" in shown
    assert "x-eu" in shown
    assert "since2026-01-01" in shown.replace(" ", "")
    (found,) = json.loads(horsies("keys", "list", "default", "--json").out)["keys"]
    assert (found["key"], found["pause_reason"]) == (key, reason)


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["list"], 1, "horsies keys list needs a queue."),
        (["pause", "default"], 1, "horsies keys pause needs a queue and a key."),
        (["list", "mial"], 4, "There is no queue 'mial'"),
        (["set", "default", "acme"], 2, "horsies keys set needs --max-concurrency"),
        (["pause", "default", "acme", "--weight", "2"], 2, "belong to horsies keys set"),
        (["set", "default", "acme", "--rate", "often"], 2, "as 100/60, not 'often'"),
        (["show", "default", ""], 1, "Key must have 1 to 255 characters"),
    ],
)
def test_the_command_refuses_in_one_sentence(
    horsies: Run, connection: Database, words: list[str], code: int, sentence: str
) -> None:
    add_worker(connection)
    finished = horsies("keys", *words)
    assert finished.code == code, finished.err
    assert sentence in " ".join(finished.err.replace("│", " ").split())


# Explanations


@pytest.fixture
def doors(app: Horsies, connection: Database) -> Doors:
    add_worker(connection, known_tasks=None)
    return Doors(app)


def test_the_tasks_ahead_are_those_of_the_same_key(doors: Doors, connection: Database) -> None:
    add_many_keyed(connection, "noisy", 30)
    first = keyed(connection, "acme", enqueued_at=ago(50))
    second = keyed(connection, "acme", enqueued_at=ago(40))
    plain = add_task(connection, enqueued_at=ago(40))
    add_task(connection, enqueued_at=ago(50))
    assert codes(doors.task(first)) == ["SHOULD_START_NOW"]
    behind = the(doors.task(second), "BEHIND")
    assert behind.sentence == (
        "1 task of key 'acme' is ahead of it; 1 key has their turns in between."
    )
    ahead = the(doors.task(plain), "BEHIND").sentence
    assert ahead == "1 task is ahead of it in queue 'default'; 2 keys have their turns in between."


def test_limits_of_the_key_are_named(doors: Doors, connection: Database) -> None:
    limit(connection, max_concurrency=2)
    add_keyed(connection, "acme", 2)
    Ring(connection).claim(2)
    capped = doors.task(keyed(connection, "acme"))
    assert codes(capped) == ["KEY_CAP"]
    assert the(capped, "KEY_CAP").sentence == "2 of 2 tasks of key 'acme' are in flight."
    limit(connection, "zero", max_concurrency=0)
    zero = doors.task(keyed(connection, "zero"))
    assert "is 0, so none of its tasks starts" in the(zero, "KEY_CAP").sentence
    limit(connection, "slow", rate_seconds=600, rate_burst=1)
    add_keyed(connection, "slow")
    assert "slow" in Ring(connection).claim(9)
    rated = doors.task(keyed(connection, "slow"))
    assert codes(rated) == ["KEY_RATE"]
    assert "key 'slow' allows its next start in 9 min" in the(rated, "KEY_RATE").sentence


def test_a_paused_key_is_named_with_its_reason_and_remedy(
    doors: Doors, app: Horsies, connection: Database
) -> None:
    waiting = keyed(connection, "acme's")
    app.keys.pause("default", "acme's", reason="asked for it").unwrap()
    paused = the(doors.task(waiting), "KEY_PAUSED")
    assert paused.sentence.startswith("Key \"acme's\" of queue 'default' was paused ")
    assert paused.sentence.endswith("ago: asked for it.")
    assert paused.remedy == "horsies keys resume default 'acme'\"'\"'s'"


def test_a_halted_lane_and_its_order_are_named(doors: Doors, connection: Database) -> None:
    limit(connection, is_fifo=True, halts=True)
    head = keyed(connection, "acme", enqueued_at=ago(60))
    second = keyed(connection, "acme", enqueued_at=ago(50))
    third = keyed(connection, "acme", enqueued_at=ago(40))
    order = doors.task(third)
    assert codes(order) == ["KEY_ORDER"]
    assert the(order, "KEY_ORDER").sentence.startswith("2 tasks of key 'acme' are before it")
    (running,) = Ring(connection).take(9)
    assert running.id == head
    held = the(doors.task(second), "KEY_CAP").sentence
    assert held == "Key 'acme' runs its tasks one after the other, and one is in flight."
    fail(connection, running)
    connection.execute("UPDATE horsies_lanes SET paused_at = paused_at - interval '9 minutes'")
    halted = doors.task(second)
    assert codes(halted) == ["KEY_HALTED"]
    assert f"halted 9 min ago: task {head} failed: DOWN" in the(halted, "KEY_HALTED").sentence


def test_a_retry_that_keeps_its_place_is_a_retry_for_later(
    doors: Doors, connection: Database
) -> None:
    limit(connection, is_fifo=True)
    head = keyed(connection, "acme", max_retries=3)
    (running,) = Ring(connection).take(1)
    retry(connection, running, 600)
    assert codes(doors.task(head)) == ["RETRY_LATER"]


def test_a_node_with_a_key_is_not_held_by_its_run(doors: Doors, connection: Database) -> None:
    run = add_run(connection, status="RUNNING")
    waiting = keyed(connection, "acme", workflow_id=run)
    assert "HELD_BY_RUN" not in codes(doors.task(waiting))


def test_a_queue_whose_keys_have_limits_is_not_stuck(doors: Doors, connection: Database) -> None:
    keyed(connection, "acme", enqueued_at=ago(1_000))
    assert "QUEUE_STUCK" in codes(doors.queue("default"))
    limit(connection, "acme", paused_at="2026-01-01")
    assert "QUEUE_STUCK" not in codes(doors.queue("default"))


def test_a_queue_that_its_rate_holds_back_is_not_stuck(
    doors: Doors, app: Horsies, connection: Database
) -> None:
    add_task(connection, enqueued_at=ago(1_000))
    assert "QUEUE_STUCK" in codes(doors.queue("default"))
    connection.execute("INSERT INTO horsies_meters VALUES ('default', 0, now() + '9 s', 30, 1)")
    assert "QUEUE_STUCK" not in codes(doors.queue("default"))
    (report,) = run_doctor(app.get_broker(), ["stuck-queues"]).unwrap()
    assert report.findings == ()
    connection.execute("UPDATE horsies_meters SET next_at = now() - interval '5 minutes'")
    (report,) = run_doctor(app.get_broker(), ["stuck-queues"]).unwrap()
    assert [one.code for one in report.findings] == ["QUEUE_STUCK"]


def test_tasks_of_paused_keys_keep_no_other_queue_waiting(
    doors: Doors, connection: Database
) -> None:
    add_worker(connection, queues=["first", "mail"], known_tasks=None)
    add_keyed(connection, "acme", 3, queue="first")
    waiting = add_task(connection, queue_name="mail")
    assert "first (3 due)" in the(doors.task(waiting), "BETTER_QUEUES_FIRST").sentence
    limit(connection, "acme", queue="first", paused_at="2026-01-01")
    assert codes(doors.task(waiting)) == ["SHOULD_START_NOW"]
    assert "BETTER_QUEUES_FIRST" not in codes(doors.queue("mail"))
    add_keyed(connection, "globex", queue="first")
    assert "first (1 due)" in the(doors.queue("mail"), "BETTER_QUEUES_FIRST").sentence


# The doctor and the gauges


def test_the_doctor_finds_paused_keys_with_due_tasks_only(
    app: Horsies, connection: Database
) -> None:
    def findings() -> list[Any]:
        (report,) = run_doctor(app.get_broker(), ["paused-keys"]).unwrap()
        return list(report.findings)

    app.keys.pause("default", "idle").unwrap()
    assert findings() == []
    keyed(connection, "acme")
    app.keys.pause("default", "acme", reason="asked for it").unwrap()
    (found,) = findings()
    assert (found.code, found.level) == ("KEY_PAUSED", Level.YELLOW)
    assert found.evidence == ("1 of its tasks are due, the first for 1 min",)
    connection.execute("UPDATE horsies_lanes SET paused_at = now() - interval '2 hours'")
    assert [one.level for one in findings()] == [Level.RED]
    app.keys.resume("default", "acme").unwrap()
    assert findings() == []


def test_gauges_count_keys_and_name_none(app: Horsies, connection: Database) -> None:
    def keys() -> dict[tuple[str, ...], float]:
        gauges = ClusterGauges("public")
        code = BrokerErrorCode.MONITORING_QUERY_FAILED
        app.get_broker().perform(code, gauges.script()).unwrap()
        return {
            one.labels: one.value for one in gauges.samples() if one.name == "horsies_queue_keys"
        }

    assert keys() == {}
    for number in range(1_005):
        add_keyed(connection, f"key {number}")
    app.keys.pause("default", "key 7").unwrap()
    assert keys() == {("default", "due"): 1_000, ("default", "paused"): 1}
