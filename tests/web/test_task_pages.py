"""The pages of tasks, one task and failures: facts, filters, paging, hidden arguments, hostile data."""

from __future__ import annotations

import csv
import html
import io
import json
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from psycopg.types.json import Jsonb

from horsies.app import Horsies
from horsies.db.statements.lookup import FailureGroup
from horsies.ids import new_id
from horsies.monitor import paging, queries
from horsies.monitor.measures import BUCKETS, bucket_of
from horsies.web import ViewOnly
from horsies.web.pages_failures import spark_counts
from tests.support.database import Database
from tests.support.rows import add_attempt, add_run, add_task, add_worker, ago
from tests.support.web_server import Ask

HOSTILE = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onmouseover='alert(1)",
    "{{ 7*7 }}{% raw %}",
    "javascript:alert(1)",
    "\u202eevil\u2066 \u061c",
    "\x1b[31mred\x07\x7f",
    "]]></script><!--",
    "x" * 1_000,
)


class Elements(HTMLParser):
    """The tags and the names of the attributes of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}


def shown_ids(answer: httpx.Response) -> list[str]:
    return re.findall(r'<tr data-key="([0-9a-f-]{36})"', answer.text)


def text_of(answer: httpx.Response) -> str:
    """The words of a page, without tags."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", answer.text)))


def add_failed(connection: Database, **columns: Any) -> str:
    result = {
        "err": {
            "error_code": "CARD_REFUSED",
            "message": "the bank said no",
            "exception": {
                "type": "CardRefused",
                "message": "card 4111",
                "traceback": TRACEBACK,
            },
        }
    }
    values = {
        "status": "FAILED",
        "error_code": "CARD_REFUSED",
        "result": json.dumps(result),
        "failed_at": ago(1),
        "started_at": ago(2),
        **columns,
    }
    return add_task(connection, **values)


TRACEBACK = """Traceback (most recent call last):
  File "/srv/venv/lib/python3.12/site-packages/httpx/_client.py", line 12, in send
    raise error
  File "/srv/venv/lib/python3.12/site-packages/httpx/_api.py", line 3, in get
    return send()
  File "/srv/shop/pay.py", line 41, in charge_card
    raise CardRefused(number)
shop.pay.CardRefused: card 4111 refused by postgresql://u:hunter2@bank/db
"""


def test_the_list_shows_tasks_and_narrows_by_every_filter(ask: Ask, connection: Database) -> None:
    worker = add_worker(connection, hostname="vm-7")
    failed = add_failed(
        connection,
        task_name="charge_card",
        queue_name="payments",
        retry_count=2,
        max_retries=4,
        claimed_by_worker_id=worker,
        worker_hostname="vm-7",
    )
    waiting = add_task(connection, task_name="send_mail", queue_name="mail")
    everything = ask("/tasks")
    assert shown_ids(everything) == [waiting, failed]
    assert "CARD_REFUSED" in text_of(everything)
    for query in (
        "status=FAILED&status=CANCELLED",
        "queue=payments",
        "task_name=charge_card",
        "error_code=CARD_REFUSED",
        f"worker={worker}",
        "worker=vm-7",
        "retried_only=true",
        f"before={waiting}",
        "since=1h&status=failed",
    ):
        assert shown_ids(ask(f"/tasks?{query}")) == [failed], query
    assert shown_ids(ask("/tasks?status=&queue=&since=&until=1h")) == []


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("status=BROKEN", "status must be one of PENDING"),
        ("since=yesterday", "since: 'yesterday' is neither a duration"),
        ("limit=201", "limit must be a whole number from 1 to 200"),
        (f"limit=0000000001{'9' * 5_000}", "limit must be a whole number from 1 to 200"),
        ("before=x", "after must be the next_cursor"),
        ("first=x", "first must be the id of a task"),
        ("statuz=FAILED", "There is no filter 'statuz'"),
        ("retried_only=maybe", "retried_only must be true or false"),
        ("queue=%00", "must not contain NUL"),
        ("since=1h&until=2h", "since must be earlier than until"),
    ],
)
def test_wrong_filters_are_refused_in_one_sentence(ask: Ask, query: str, sentence: str) -> None:
    answer = ask(f"/tasks?{query}")
    assert answer.status_code == 400
    assert sentence in text_of(answer)


def test_tasks_of_one_millisecond_are_paged_without_loss_or_repetition(
    ask: Ask, connection: Database
) -> None:
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, enqueue_sha) "
        "SELECT ('019a0000-0000-7' || lpad(to_hex(n), 3, '0') || '-8000-000000000000')::uuid, "
        "'work', 'mail', 'sha' FROM generate_series(0, 999) AS n"
    )
    seen: list[str] = []
    path = "/tasks?limit=200&queue=mail"
    while path:
        answer = ask(path)
        seen += shown_ids(answer)
        found = re.search(r'href="([^"]+)" rel="next"', answer.text)
        path = html.unescape(found[1]) if found else ""
    assert len(seen) == len(set(seen)) == 1_000


def test_a_list_that_found_too_little_says_how_far_it_looked(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "LIST_WINDOW", 2)
    ids = [
        add_task(connection, status="COMPLETED", task_name="old" if not n else "new")
        for n in range(4)
    ]
    answer = ask("/tasks?task_name=old&status=COMPLETED")
    assert "looked at" in text_of(answer)
    assert "back to" in text_of(answer)
    following = re.search(r'href="([^"]+)" rel="next"', answer.text)
    assert following is not None
    assert shown_ids(ask(html.unescape(following[1]))) == [ids[0]]


def test_live_rows_keep_their_places_and_newer_tasks_are_counted(
    ask: Ask, connection: Database
) -> None:
    older, first = add_task(connection), add_task(connection)
    for _ in range(3):
        add_task(connection)
    answer = ask(f"/tasks?limit=2&first={first}")
    assert shown_ids(answer) == [first, older]
    assert "3 newer" in text_of(answer)
    assert f"first={first}" in html.unescape(answer.text)


def test_the_search_box_leads_to_a_task_a_run_or_the_search(ask: Ask, connection: Database) -> None:
    task, run = add_task(connection), add_run(connection)
    assert ask(f"/tasks?q={task.replace('-', '')}").headers["location"] == f"/tasks/{task}"
    assert ask(f"/tasks?q={run}").headers["location"] == f"/workflows/{run}"
    assert ask(f"/tasks?q={new_id()}").status_code == 404
    assert ask("/tasks?q=send+mail").headers["location"] == "/search?q=send+mail"
    searched = ask("/tasks?q=order_id%3D17", payload=True)
    assert searched.headers["location"] == "/tasks?argument=order_id%3D17"


def test_arguments_are_searched_by_value(ask: Ask, connection: Database) -> None:
    wanted = add_task(connection, kwargs='{"order_id":17,"card":"4111"}')
    add_task(connection, kwargs='{"order_id":170}')
    add_task(connection, kwargs='{"order_id":"17x"}')
    add_task(connection, kwargs='{"order_id":17', args="not json")
    add_task(connection, kwargs='{"order_id":17,"filler":"%s"}' % ("x" * 70_000))

    def found(argument: str) -> list[str]:
        answer = ask(f"/tasks?argument={argument}", payload=True)
        assert answer.status_code == 200, answer.text
        return shown_ids(answer)

    assert found("order_id%3D17") == [wanted]
    assert found("order_id%3D17&status=PENDING") == [wanted]
    assert found("order_id%3D17&status=FAILED") == []
    assert found("4111") == []
    refused = ask("/tasks?argument=card%3D4111", payload=True)
    assert refused.status_code == 400
    assert "masked" in refused.text


def test_a_value_that_many_tasks_mask_cannot_be_guessed_by_a_search(
    ask: Ask, connection: Database
) -> None:
    visible = add_task(connection, kwargs='{"note":"sk-17"}')
    connection.execute(
        "INSERT INTO horsies_tasks (id, task_name, queue_name, args, kwargs, enqueue_sha)"
        " SELECT gen_random_uuid(), 'pay', 'default', '[]', %s, 'sha' FROM generate_series(1, 450)",
        ('{"api_key":"sk-17"}',),
    )
    right, wrong = (
        ask(f"/api/tasks?argument={guess}", payload=True).json() for guess in ("sk-1", "sk-2")
    )
    assert [task["id"] for task in right.pop("tasks")] == [visible]
    assert wrong.pop("tasks") == []
    assert right == wrong


@pytest.mark.parametrize("parsed_max", [0, 30, 1_000_000])
def test_a_search_that_stops_early_continues_where_it_stopped(
    ask: Ask, connection: Database, monkeypatch: pytest.MonkeyPatch, parsed_max: int
) -> None:
    sizes = {"CANDIDATES_MAX": 2, "SEARCH_WINDOW": 5, "PARSED_CHARACTERS_MAX": parsed_max}
    for name, size in sizes.items():
        monkeypatch.setattr(queries, name, size)
    wanted = []
    for number in range(14):
        matches = number % 4 == 0
        task_id = add_task(connection, kwargs=json.dumps({"n": 1 if matches else 10 + number}))
        wanted += [task_id] if matches else []
    found: list[str] = []
    before = ""
    while before is not None:
        page = ask(f"/api/tasks?argument=n%3D1&limit=1&before={before}", payload=True).json()
        found += [task["id"] for task in page["tasks"]]
        before = page["next_before"]
    assert found == wanted[::-1]


def test_without_the_right_there_is_no_search_and_nothing_of_the_arguments(
    ask: Ask, connection: Database
) -> None:
    task = add_failed(connection, kwargs='{"order":"visible-argument"}')
    for switches in ({}, {"payload": True, "policy": ViewOnly()}):
        assert "argument" not in ask("/tasks", **switches).text
        for path in ("/tasks", "/tasks.csv", "/api/tasks"):
            refused = ask(f"{path}?argument=visible", **switches)
            assert refused.status_code == 403, path
        shown = ask(f"/tasks/{task}", **switches).text
        assert "visible-argument" not in shown
        assert "card 4111" not in shown
        assert "pay.py" in shown
        assert ask(f"/tasks/{task}/payload/kwargs", **switches).status_code == 404
        assert "visible-argument" not in ask(f"/api/tasks/{task}", **switches).text


def test_csv_has_the_listed_tasks_and_no_formulas(ask: Ask, connection: Database) -> None:
    task = add_task(connection, task_name="=cmd()", queue_name='a,b\n"c')
    answer = ask("/tasks.csv?queue=a,b%0A%22c")
    (row,) = csv.DictReader(io.StringIO(answer.text))
    assert (row["id"], row["task_name"], row["queue_name"]) == (task, "'=cmd()", 'a,b\n"c')
    assert answer.headers["content-type"].startswith("text/csv")
    for name in (" =cmd()", "\n=cmd()", "\uff1dcmd()"):
        add_task(connection, task_name=name, queue_name="formulas")
    rows = csv.DictReader(io.StringIO(ask("/tasks.csv?queue=formulas").text, newline=""))
    assert {row["task_name"][0] for row in rows} == {"'"}


def test_the_page_of_a_task_shows_its_life_attempts_and_traceback(
    ask: Ask, connection: Database
) -> None:
    policy = {"auto_retry_for": ["GATEWAY_SLOW"], "max_retries": 4, "intervals": [1, 2, 3, 4]}
    options = {"retry_policy": policy, "headers": {"tenant": "acme", "auth": "hunter2"}}
    first = new_id()
    task = add_failed(
        connection,
        task_name="charge_card",
        queue_name="payments",
        kwargs='{"order_id":12345678901234567890,"card":"4111"}',
        max_retries=4,
        retry_count=1,
        task_options=json.dumps(options),
        retried_from_task_id=first,
        schedule_name="nightly",
    )
    add_attempt(
        connection,
        task,
        outcome="FAILED",
        error_code="GATEWAY_SLOW",
        error_message="no answer from postgresql://u:hunter2@bank/db",
        started_at=ago(30),
        finished_at=ago(29),
        will_retry=True,
        retry_reason="retried by code GATEWAY_SLOW",
        worker_hostname="vm-1",
        worker_pid=77,
    )
    add_attempt(
        connection,
        task,
        attempt=2,
        outcome="FAILED",
        error_code="CARD_REFUSED",
        started_at=ago(2),
        finished_at=ago(1),
    )
    answer = ask(
        f"/tasks/{task}",
        payload=True,
        links={
            "logs": "https://logs/?id={task_id}&t={trace_id}",
            "metrics": "https://m/{task_name}",
        },
    )
    words = text_of(answer)
    for expected in (
        "charge_card",
        "12345678901234567890",
        '"card": ••• string',
        "2 frames of libraries",
        "pay.py :41",
        "card 4111 refused by postgresql://u:***@bank/db",
        "retried by code GATEWAY_SLOW",
        "not retried: code CARD_REFUSED is not listed in auto_retry_for",
        "vm-1 pid 77",
        "1 of 4",
        "acme",
        "Life of the task: sent",
    ):
        assert expected in words, expected
    assert "hunter2" not in answer.text
    assert "horsies docs" not in answer.text  # CARD_REFUSED is a code of the application
    assert f"/tasks/{first}" in answer.text
    resent = add_task(connection, retried_from_task_id=task)
    assert f'href="/tasks/{resent}"' in ask(f"/tasks/{task}").text
    assert 'href="https://m/charge_card"' in answer.text
    assert "https://logs" not in answer.text
    assert "data-live" not in answer.text


def test_the_trace_of_a_task_is_that_of_its_newest_attempt(ask: Ask, connection: Database) -> None:
    sent, ran = "a" * 32, "b" * 32
    options = {"trace": {"traceparent": f"00-{sent}-{'1' * 16}-01"}}
    task = add_task(connection, task_options=json.dumps(options))
    links = {"trace": "https://traces/{trace_id}"}
    assert f'href="https://traces/{sent}"' in ask(f"/tasks/{task}", links=links).text
    add_attempt(connection, task, traceparent=f"00-{ran}-{'2' * 16}-01")
    assert f'href="https://traces/{ran}"' in ask(f"/tasks/{task}", links=links).text


def test_an_attempt_that_was_cancelled_has_not_failed(ask: Ask, connection: Database) -> None:
    task = add_task(connection, status="CANCELLED", error_code="TASK_CANCELLED")
    add_attempt(connection, task, outcome="FAILED", error_code="TASK_CANCELLED")
    page = ask(f"/tasks/{task}").text
    assert "not retried: the task was cancelled" in page
    assert "<code>horsies docs TASK_CANCELLED</code>" in page
    assert "status-failed" not in page


def test_an_open_task_shows_why_it_waits_its_progress_and_updates(
    ask: Ask, connection: Database
) -> None:
    waiting = add_task(connection)
    answer = ask(f"/tasks/{waiting}")
    assert "data-live" in answer.text
    assert "Why it is pending" in text_of(answer)
    assert "UNSERVED" in answer.text
    running = add_task(connection, status="RUNNING", started_at=ago(3), claimed_at=ago(4))
    connection.execute(
        "INSERT INTO horsies_task_progress "
        "(task_id, attempt, done, total, note, reported_at) VALUES (%s, 1, 3, 10, 'copying', now())",
        (running,),
    )
    assert "3 of 10, copying" in text_of(ask(f"/tasks/{running}"))


@pytest.mark.parametrize(
    ("path", "link"),
    [
        ("/tasks/{}", "/tasks/{}/explain"),
        ("/tasks?q={}", "/explain?id={}"),
        ("/workflows/{}", "/workflows/{}/explain"),
    ],
)
def test_the_page_of_a_missing_id_leads_to_its_explanation(ask: Ask, path: str, link: str) -> None:
    missing = new_id()
    page = ask(path.format(missing), root_path="/ops")
    assert page.status_code == 404
    assert f'href="/ops{link.format(missing)}"' in page.text
    explained = ask(link.format(missing))
    assert explained.status_code == 404
    assert "The send was rolled back" in explained.text
    assert "/explain" not in ask("/queues/nothing").text


def test_missing_tasks_are_404(ask: Ask) -> None:
    for path in (f"/tasks/{new_id()}", "/tasks/x", f"/tasks/{new_id()}/payload/args"):
        assert ask(path, payload=True).status_code == 404
    assert ask(f"/tasks/{new_id()}/payload/secret", payload=True).status_code == 404


def test_large_arguments_are_cut_and_downloaded_masked(ask: Ask, connection: Database) -> None:
    kwargs = json.dumps({"token": "hunter2", "text": "y" * 1_000_000})
    task = add_task(connection, kwargs=kwargs)
    answer = ask(f"/tasks/{task}", payload=True)
    assert "Only the first 64 KB" in answer.text
    assert len(answer.text) < 120_000
    whole = ask(f"/tasks/{task}/payload/kwargs", payload=True)
    assert whole.text.count("y") == 1_000_000
    assert "hunter2" not in whole.text
    assert whole.headers["content-disposition"].startswith("attachment")
    assert whole.headers["x-content-type-options"] == "nosniff"


def test_failures_are_grouped_by_task_and_code(ask: Ask, connection: Database) -> None:
    task = add_failed(connection, task_name="charge_card")
    for number in range(3):
        add_attempt(
            connection,
            task,
            attempt=number + 1,
            outcome="FAILED",
            error_code="CARD_REFUSED",
            error_message="no postgresql://u:hunter2@bank/db",
            worker_hostname="vm-3",
            will_retry=number < 2,
        )
    add_attempt(connection, add_task(connection), outcome="COMPLETED")
    add_attempt(connection, add_task(connection), outcome="FAILED", error_code="TASK_CANCELLED")
    answer = ask("/failures")
    words = text_of(answer)
    assert "charge_card" in words
    assert "all on vm-3" in words
    assert "hunter2" not in answer.text
    assert "3 failed attempts" in words
    document = ask("/api/failures").json()
    assert [(one["total"], one["final"]) for one in document["failures"]] == [(3, 1)]
    assert (
        text_of(ask("/failures?task_name=other")).count("No attempt of this task has failed") == 1
    )
    refund = add_failed(connection, task_name="refund")
    add_attempt(connection, refund, outcome="FAILED", error_code="CLOSED")
    assert "1 failed attempt among" in text_of(ask("/failures?task_name=refund"))


def test_a_reason_says_whether_it_still_fails(ask: Ask, connection: Database) -> None:
    for digit, seconds in ("a", 60), ("b", 3600):
        failed = {"task_name": f"pay_{digit}", "fingerprint": digit * 12, "error_code": "CLOSED"}
        task = add_failed(connection, **failed)
        del failed["task_name"]
        add_attempt(connection, task, outcome="FAILED", finished_at=ago(seconds), **failed)
    for name, digit, word, other in (
        ("pay_a", "a", "still failing", "quiet"),
        ("pay_b", "b", "quiet", "still failing"),
    ):
        for path in f"/failures?task_name={name}", f"/names/{name}", f"/failures/{digit * 12}":
            words = text_of(ask(path))
            assert word in words
            assert other not in words


def test_the_line_of_a_quiet_reason_ends_at_zero() -> None:
    """A chart that ended with the last failure would look as if it still failed."""
    now = datetime.now(UTC)
    then = now - timedelta(hours=1)
    group = FailureGroup("pay", None, 1, 1, then, then, None, "id", None, [then.timestamp()])
    counts = spark_counts([group], group, now)
    assert (counts[0], sum(counts[1:])) == (1.0, 0.0)


def test_a_filter_of_failures_is_shown_and_can_be_removed(ask: Ask, connection: Database) -> None:
    page = ask("/failures?task_name=pay")
    assert "task: pay" in text_of(page)
    assert 'href="/failures" title="Remove this filter"' in page.text
    assert "Remove this filter" not in ask("/failures").text


def test_two_reasons_behind_one_code_are_two_groups_with_their_pages(
    ask: Ask, connection: Database
) -> None:
    worker = add_worker(connection, release="2026.11")
    for number, digit in enumerate("aab"):
        reason = {"error_code": "UNHANDLED_EXCEPTION", "fingerprint": digit * 12}
        task = add_failed(connection, task_name="charge_card", **reason)
        add_attempt(
            connection,
            task,
            outcome="FAILED",
            exception_type=f"shop.Error{digit}",
            raised_in=f"shop/cards.py:charge_{digit}",
            error_message=f"order {number}",
            worker_id=worker,
            finished_at=ago(3600 if number == 0 else 5),
            **reason,
        )
    page = text_of(ask("/failures", actions=True))
    assert "shop.Errora" in page
    assert "shop/cards.py:charge_b" in page
    one = ask("/failures/aaaaaaaaaaaa", actions=True)
    words = text_of(one)
    for part in ("shop.Errora", "2, 2 of them final", "in release 2026.11", "order 1"):
        assert part in words
    assert (
        'href="/orders/new?verb=retry_task&amp;status=FAILED&amp;fingerprint=aaaaaaaaaaaa"'
        in one.text
    )
    order = text_of(
        ask("/orders/new?verb=retry_task&status=FAILED&fingerprint=aaaaaaaaaaaa", actions=True)
    )
    assert "Send 2 tasks again" in order
    listed = ask("/api/tasks?fingerprint=bbbbbbbbbbbb").json()["tasks"]
    assert [task["id"] for task in listed] == [task_id_of(connection, "bbbbbbbbbbbb")]
    document = ask("/api/failures/aaaaaaaaaaaa").json()
    assert (document["total"], document["first_release"]) == (2, "2026.11")
    assert sum(slot["failures"] for slot in document["over_time"]) == 2
    assert 'href="/failures/bbbbbbbbbbbb"' in ask(f"/tasks/{listed[0]['id']}").text
    assert ask("/failures/cccccccccccc").status_code == 404
    assert ask("/failures/not-digits").status_code == 404
    assert ask("/tasks?fingerprint=short").status_code == 400
    both = ask("/tasks?fingerprint=aaaaaaaaaaaa&argument=order_id%3D1", payload=True)
    assert (both.status_code, "exclude each other" in both.text) == (400, True)


def test_the_page_of_a_task_name_has_rates_durations_and_reasons(
    ask: Ask, connection: Database
) -> None:
    waited, ran = [0] * BUCKETS, [0] * BUCKETS
    waited[bucket_of(0.05)], waited[bucket_of(30)] = 9, 1
    ran[bucket_of(0.5)], ran[bucket_of(5)] = 8, 2
    connection.execute(
        "INSERT INTO horsies_measures VALUES (date_trunc('minute', now() - interval '5 minutes'), 1, "
        "'default', 'shop/pay now', 7, 2, 1, 0, 0, 900, 4500, %s, %s)",
        [waited, ran],
    )
    task = add_failed(connection, task_name="shop/pay now", fingerprint="ab12cd34ef56")
    reason = {"fingerprint": "ab12cd34ef56", "exception_type": "shop.Late"}
    add_attempt(connection, task, outcome="FAILED", error_code="X", **reason)
    answer = ask("/names/shop%2Fpay%20now")
    words = text_of(answer)
    for part in (
        "Tasks named shop/pay now",
        "Attempts per minute",
        "done 7 retried 1 failed 2",
        # Interpolated: half of ten attempts is five of the eight between 250 and 500 ms.
        "p95 wait 20s p50 run 406ms p95 run 4.4s",
        "Run: time from start to end",
        "shop.Late",
    ):
        assert part in words
    assert 'href="/failures/ab12cd34ef56"' in answer.text
    assert f'href="/names/{quote("shop/pay now")}"' in ask(f"/tasks/{task}").text
    assert "No attempt has ended in this time" in text_of(ask("/names/unheard"))
    assert ask("/names/pay?range=1y").status_code == 400
    assert ask(f"/names/{'x' * 256}").status_code == 404


def test_the_page_of_a_task_name_shows_the_memory_of_its_running_children(
    ask: Ask, app: Horsies, connection: Database
) -> None:
    @app.task("pay", memory_limit_mb=700)
    def pay() -> None: ...

    running = [add_task(connection, task_name="pay", status="RUNNING") for _ in range(4)]
    other = add_task(connection, task_name="other", status="RUNNING")
    sizes = dict(zip([*running, other], (110.4, 120.0, 340.0, 9_000.0, 8_000.0), strict=True))
    children: list[dict[str, Any]] = [
        {"pid": 1, "private_mb": size, "task_id": one} for one, size in sizes.items()
    ]
    children[3]["tasks"] = 7  # an async child
    children.append({"pid": 1, "private_mb": 5.0, "task_id": None})
    add_worker(connection, children=Jsonb(children))
    add_worker(connection, children=Jsonb(children[:1]), stopped_at=ago(1))
    add_worker(connection)
    text = text_of(ask("/names/pay"))
    assert "p50 memory now, 3 running 120 MB" in text
    assert "most memory now 340 MB" in text
    assert "memory limit 700 MB" in text
    assert "memory" not in text_of(ask("/names/unheard"))


def task_id_of(connection: Database, fingerprint: str) -> str:
    found = connection.execute(
        "SELECT id::text FROM horsies_tasks WHERE fingerprint = %s", (fingerprint,)
    ).fetchone()
    assert found is not None
    return str(found[0])


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_data_leaves_every_page_intact(ask: Ask, connection: Database, text: str) -> None:
    short = text[:100]
    task = add_failed(
        connection,
        task_name=text[:255],
        queue_name=short,
        error_code=short,
        failed_reason=text,
        args=f"not json {text}",
        kwargs=json.dumps({text: text, "list": [text]}),
        result=json.dumps(
            {
                "err": {
                    "message": text,
                    "exception": {"type": text, "traceback": f"{TRACEBACK}{text}"},
                }
            }
        ),
        task_options=json.dumps({"headers": {text: text}, "retry_policy": [text]}),
        worker_hostname=short,
        schedule_name=short,
        idempotency_key=short,
        idempotency_sha="sha",
    )
    add_attempt(
        connection,
        task,
        outcome="FAILED",
        error_code=short,
        error_message=text,
        worker_hostname=short,
        retry_reason=text,
        fingerprint="ab12cd34ef56",
        exception_type=short,
        raised_in=short,
    )
    for path in ("/tasks", f"/tasks/{task}", "/failures", "/failures/ab12cd34ef56"):
        for switches in ({"payload": True, "actions": True}, {}):
            answer = ask(path, **switches)
            assert answer.status_code == 200
            elements = Elements(answer.text)
            assert elements.tags.count("script") == 1
            assert "img" not in elements.tags
            assert not [name for name in elements.attributes if name.startswith(("on", "style"))]
            assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202e\u2066\u061c]", answer.text)


@pytest.mark.parametrize(
    "stored",
    ["", "{", "[1,", '{"a":1}}', "nul", '"\\u0000"', '{"a":"\\ud800"}', "[" * 5_000, "1e999999"],
)
def test_stored_text_of_any_kind_is_shown(ask: Ask, connection: Database, stored: str) -> None:
    task = add_failed(
        connection, args=stored, kwargs=stored, result=stored, task_options=stored, error_code=None
    )
    assert ask(f"/tasks/{task}", payload=True).status_code == 200
    assert ask(f"/api/tasks/{task}", payload=True).status_code == 200
    assert ask("/tasks?argument=a%3D1", payload=True).status_code == 200


def add_step(connection: Database, task: str, position: int, name: str, **columns: Any) -> None:
    values = {"kind": "step", "result": None, "error": None, "due_at": None, **columns}
    connection.execute(
        "INSERT INTO horsies_steps (task_id, name, position, kind, result, error, due_at, attempt, "
        "started_at, ended_at) VALUES (%s, %s, %s, %s, %s, %s, %s, 1, now() - interval '2 seconds', now())",
        (task, name, position, *values.values()),
    )


@pytest.mark.parametrize("payload", [True, False])
def test_the_page_of_a_run_lists_its_steps_under_the_mask(
    ask: Ask, connection: Database, payload: bool
) -> None:
    task = add_task(connection, task_name="onboard", status="RUNNING", generation=1)
    result = '{"account": "acme", "password": "hunter2"}'
    add_step(connection, task, 1, "create_account", result=result)
    failed = '{"code": "NO_ROUTE", "message": "to postgresql://u:hunter2@bank/db", "data": null}'
    add_step(connection, task, 2, HOSTILE[0], error=failed)
    add_step(connection, task, 3, "sleep", kind="sleep", result="null", due_at="2030-01-01")
    page = ask(f"/tasks/{task}", payload=payload)
    words = text_of(page)
    assert words.index("sleep") < words.index("create_account"), "the newest first"
    assert "NO_ROUTE" in words
    assert "hunter2" not in page.text
    assert HOSTILE[0] not in page.text
    assert ("acme" in words) is payload


def test_the_page_of_a_plain_task_has_no_list_of_steps(ask: Ask, connection: Database) -> None:
    assert "<h2>Steps</h2>" not in ask(f"/tasks/{add_task(connection)}").text
