"""Options of one send: stored with the task, part of its fingerprint, kept by a retry of the send."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta, tzinfo
from enum import Enum
from typing import Any

import pytest

from horsies import (
    INJECTED,
    AppConfig,
    AsyncTaskTransaction,
    ConfigurationError,
    CustomQueueConfig,
    Horsies,
    OutgoingTask,
    PostgresConfig,
    QueueMode,
    RetryPolicy,
    TaskDefinitionError,
    TaskOptions,
    TaskSendError,
    TaskSendErrorCode,
    TaskSendFailed,
    TaskTransaction,
    TransactionMisuse,
)
from horsies.tasks.options import SendOptions
from horsies.tasks.request import Stamp, TaskSendResult, prepare, replay
from horsies.testing import capture_sends
from tests.support.applications import Call, Task, add_task
from tests.support.database import Database
from tests.support.rows import row_of, stored
from tests.support.running import running_with_headers

POLICY = RetryPolicy.fixed([1, 2], auto_retry_for=["BUSY"])
MANY: dict[str, Any] = {
    "queue_name": "reports",
    "timeout_ms": 2_500,
    "retry_policy": POLICY,
    "headers": {"tenant": "blue", "trace": "é"},
    "retention": timedelta(hours=2),
    "delay": timedelta(minutes=10),
}


@pytest.fixture
def queued(process_url: str, connection: Database) -> Iterator[Horsies]:
    queues = [CustomQueueConfig(name="mail"), CustomQueueConfig(name="reports", priority=7)]
    broker = PostgresConfig(database_url=process_url, pool_size=1, max_overflow=1)
    app = Horsies(AppConfig(broker=broker, queue_mode=QueueMode.CUSTOM, custom_queues=queues))
    yield app
    app.close()


@pytest.fixture
def inheriting() -> Iterator[None]:
    with running_with_headers({"tenant": "red", "user": "ada"}):
        yield


class BrokenMapping(Mapping[str, str]):
    """A mapping of the application that cannot be read now."""

    def __getitem__(self, key: str) -> str:
        raise RuntimeError("no request")

    def __iter__(self) -> Iterator[str]:
        return iter(["user"])

    def __len__(self) -> int:
        raise RuntimeError("no request")


class BrokenZone(tzinfo):
    def utcoffset(self, when: datetime | None) -> timedelta:
        raise RuntimeError("no such zone")

    dst = tzname = utcoffset  # type: ignore[assignment]


def refusal(sent: TaskSendResult[Any]) -> str:
    error = sent.unwrap_err()
    assert error.code is TaskSendErrorCode.VALIDATION_FAILED
    return error.message


def test_options_of_a_send_replace_those_of_its_task(
    queued: Horsies, connection: Database, call: Call
) -> None:
    add = add_task(queued, queue_name="mail", timeout_ms=100)
    sender = add.with_options(**MANY)
    handles = [call(queued, sender, "send", 1).unwrap()]
    handles += call(queued, sender, "send_many", [add.bind(1)]).unwrap()
    for handle in handles:
        row = row_of(connection, handle.task_id)
        assert (row["queue_name"], row["priority"], row["timeout_ms"]) == ("reports", 7, 2_500)
        assert (row["max_retries"], row["retention"]) == (2, "02:00:00")
        options = json.loads(row["task_options"])
        assert options["retry_policy"] == POLICY.to_json()
        assert options["headers"] == MANY["headers"]
        waits = datetime.fromisoformat(row["enqueued_at"]) - datetime.fromisoformat(row["sent_at"])
        assert timedelta(minutes=9) < waits < timedelta(minutes=11)
    plain = row_of(connection, add.send(1).unwrap().task_id)
    assert (plain["queue_name"], plain["timeout_ms"], plain["retention"]) == ("mail", 100, None)
    assert "headers" not in json.loads(plain["task_options"])


@pytest.mark.parametrize("many", [False, True])
def test_a_task_sent_for_a_time_waits_for_it_and_one_of_the_past_does_not_overtake(
    add: Task, connection: Database, many: bool
) -> None:
    for hours in (-1, 1):
        at = datetime.now(UTC) + timedelta(hours=hours)
        sender = add.with_options(at=at)
        sender.send_many([add.bind(1)]).unwrap() if many else sender.send(1).unwrap()
    past, future = stored(connection)
    assert past["enqueued_at"] == past["created_at"]
    assert future["enqueued_at"] == at


CHANGES: dict[str, Any] = {
    **MANY,
    "at": datetime(2030, 1, 1, tzinfo=UTC),
    "priority": 3,
    "good_until": datetime(2031, 1, 1, tzinfo=UTC),
}


@pytest.mark.parametrize("name", CHANGES)
def test_every_option_is_part_of_the_fingerprint_and_of_a_retried_send(
    queued: Horsies, name: str
) -> None:
    definition = add_task(queued, queue_name="mail").definition
    options = SendOptions(**{name: CHANGES[name]})
    request = prepare(queued.config, definition, options, (1,), {}).unwrap()
    stamp = Stamp(request.row.id, request.row.sent_at)
    usual = prepare(queued.config, definition, SendOptions(), (1,), {}, stamp=stamp).unwrap()
    assert request.row.enqueue_sha != usual.row.enqueue_sha
    assert request.row != usual.row._replace(enqueue_sha=request.row.enqueue_sha)
    error = failed(request)
    assert replay(queued.config, definition, error, scheduled=False).unwrap().row == request.row


def failed(request: Any) -> Any:
    code = TaskSendErrorCode.ENQUEUE_FAILED
    return TaskSendError(code, "lost", True, request.row.id, request.payload)


def test_a_queue_of_the_task_is_one_of_the_application(queued: Horsies) -> None:
    add = add_task(queued, queue_name="mail")
    message = refusal(add.with_options(queue_name="elsewhere").send(1))
    assert "no queue 'elsewhere'; choose one of mail, reports, or use app.send_by_name" in message


# Headers


def test_a_send_inside_a_task_takes_over_the_headers_of_the_task(
    app: Horsies, add: Task, inheriting: None
) -> None:
    with capture_sends(app) as sent:
        add.send(1).unwrap()
        add.with_options(headers={"tenant": "blue"}).send(2).unwrap()
        add.send_many([add.bind(3)]).unwrap()
    red, blue = {"tenant": "red", "user": "ada"}, {"tenant": "blue", "user": "ada"}
    assert [one.headers for one in sent] == [red, blue, red]


@pytest.mark.parametrize(
    ("headers", "problem"),
    [
        ("tenant", "headers must be a dictionary of texts, not str"),
        (0, "headers must be a dictionary of texts, not int"),
        (False, "headers must be a dictionary of texts, not bool"),
        ([], "headers must be a dictionary of texts, not list"),
        (BrokenMapping(), "headers could not be read: RuntimeError"),
        ({1: "a"}, "the name of a header must be a text"),
        ({"": "a"}, "the name of a header must be a text that is not empty"),
        ({"tenant": 1}, "header 'tenant' must be a text, not int"),
        ({"tenant": "a\0"}, "header 'tenant' contains a NUL character"),
        ({"tenant": "\ud800"}, "header 'tenant' contains a lone surrogate"),
        ({"tenant": "é" * 5_000}, "headers are 10,006 bytes, more than 8,192"),
    ],
)
def test_headers_that_cannot_be_stored_are_refused(
    app: Horsies, add: Task, headers: Any, problem: str
) -> None:
    with capture_sends(app) as sent:
        assert problem in refusal(add.with_options(headers=headers).send(1))
    assert not sent


def test_inherited_headers_count_for_the_limit(app: Horsies, add: Task, inheriting: None) -> None:
    with capture_sends(app) as sent:
        sender = add.with_options(headers={"big": "x" * 8_180})
        assert "headers are 8,199 bytes, more than 8,192" in refusal(sender.send(1))
    assert not sent


@pytest.mark.parametrize("option", ["good_until", "at"])
def test_a_time_zone_that_raises_is_refused(
    add: Task, call: Call, app: Horsies, option: str
) -> None:
    options: Any = {option: datetime(2026, 1, 1, tzinfo=BrokenZone())}
    with capture_sends(app) as sent:
        message = refusal(call(app, add.with_options(**options), "send", 1))
    assert message == f"Task 'add' was not sent: {option} has a time zone that raised RuntimeError."
    assert not sent


# By name


def test_a_task_is_sent_by_its_name_to_a_queue_of_another_application(
    app: Horsies, connection: Database, call: Call
) -> None:
    options = {"queue_name": "mail.of-others", "timeout_ms": 500, "retry_policy": POLICY}
    handle = call(app, app, "send_by_name", "mail", {"to": ["a", 1, None]}, **options).unwrap()
    row = row_of(connection, handle.task_id)
    assert (row["task_name"], row["queue_name"], row["priority"]) == ("mail", "mail.of-others", 100)
    assert (row["args"], json.loads(row["kwargs"])) == ("[]", {"to": ["a", 1, None]})
    assert (row["timeout_ms"], row["max_retries"]) == (500, 2)


def test_a_known_task_sent_by_name_keeps_its_options(queued: Horsies, connection: Database) -> None:
    add_task(queued, queue_name="reports", timeout_ms=100, retry_policy=POLICY)
    row = row_of(connection, queued.send_by_name("add", {"a": 1}).unwrap().task_id)
    assert (row["queue_name"], row["priority"], row["timeout_ms"]) == ("reports", 7, 100)
    assert row["max_retries"] == 2
    row = row_of(connection, queued.send_by_name("add", {}, queue_name="x").unwrap().task_id)
    assert (row["queue_name"], row["priority"], row["timeout_ms"]) == ("x", 100, 100)


@pytest.mark.parametrize(
    ("arguments", "options", "problem"),
    [
        (("", {}), {"queue_name": "mail"}, "a task name is a text of 1 to 255 characters"),
        (([], {}), {"queue_name": "mail"}, "a task name is a text of 1 to 255 characters"),
        (("x", {}), {}, "send_by_name needs a queue_name in CUSTOM queue mode"),
        (("x", {}), {"queue_name": "a b"}, "the queue name 'a b' must consist of letters"),
        (("horsies.expand", {}), {"queue_name": "mail"}, "belong to horsies itself"),
        (("x", {}), {"queue_name": ["mail"]}, "queue_name must be a text, not list"),
        (("x", [1]), {"queue_name": "mail"}, "one dictionary of JSON values, not list"),
        (
            ("x", BrokenMapping()),
            {"queue_name": "mail"},
            "the arguments could not be read: RuntimeError",
        ),
        (
            ("x", {"at": object()}),
            {"queue_name": "mail"},
            "at holds a value that cannot be written",
        ),
        (("x", {}), {"queue_name": "mail", "timeout_ms": 1}, "timeout_ms must be a whole number"),
    ],
)
def test_a_send_by_name_that_cannot_be_stored_is_refused(
    queued: Horsies, arguments: Any, options: Any, problem: str
) -> None:
    assert problem in refusal(queued.send_by_name(*arguments, **options))


def test_a_long_name_is_cut_in_the_message(queued: Horsies) -> None:
    name = "x" * 1_000_000
    add = add_task(queued, queue_name="mail")
    for sent in (
        queued.send_by_name(name, queue_name="mail"),
        queued.send_by_name("mail", queue_name=name),
        add.with_options(queue_name=name).send(1),
    ):
        message = refusal(sent)
        assert "xxx" in message
        assert len(message) < 400


def test_a_failed_send_by_name_is_retried_from_its_error(app: Horsies, call: Call) -> None:
    first = app.send_by_name("mail", {"to": "a"}, delay=timedelta(hours=1)).unwrap()
    request = prepare(app.config, add_task(app).definition, SendOptions(), (1,), {}).unwrap()
    retried = call(app, app, "retry_send", failed(request)).unwrap()
    assert retried.task_id == request.row.id != first.task_id
    assert call(app, app, "retry_send", failed(request)).unwrap().task_id == request.row.id
    assert "only the TaskSendError" in refusal(call(app, app, "retry_send", None))


def test_the_raising_form_gives_the_handle_or_raises(app: Horsies, call: Call) -> None:
    with capture_sends(app) as sent:
        handle = call(app, app, "enqueue_by_name", "mail", {"to": "a"})
        with pytest.raises(TaskSendFailed, match="a task name is a text"):
            call(app, app, "enqueue_by_name", "")
    assert [one.task_id for one in sent] == [handle.task_id]


# Hooks


def test_a_hook_sees_each_send_once_and_adds_headers(
    app: Horsies, add: Task, inheriting: None
) -> None:
    seen: list[Any] = []

    @app.on_send
    def note(outgoing: OutgoingTask) -> None:
        seen.append((outgoing.task_name, outgoing.queue_name, outgoing.count))
        outgoing.headers["trace"] = f"{len(seen)}"

    with capture_sends(app) as sent:
        refusal(add.send("not a number"))
        add.with_options(headers={"user": "eve"}).send(1).unwrap()
        add.send_many([add.bind(1), add.bind(2)]).unwrap()
        app.send_by_name("mail", queue_name="post").unwrap()
    assert seen == [("add", "default", 1), ("add", "default", 2), ("mail", "post", 1)]
    assert sent[0].headers == {"tenant": "red", "user": "eve", "trace": "1"}
    assert [one.headers["trace"] for one in sent] == ["1", "2", "2", "3"]


def test_a_hook_that_raises_is_a_failed_send(app: Horsies, add: Task, call: Call) -> None:
    @app.on_send
    def broken(outgoing: OutgoingTask) -> None:
        if outgoing.count == 1:
            raise LookupError("no tenant")
        outgoing.headers["x"] = 1  # type: ignore[assignment]

    with capture_sends(app) as sent:
        failed = call(app, add, "send", 1)
        assert "header 'x' must be a text" in refusal(add.send_many([add.bind(1), add.bind(2)]))
    assert refusal(failed) == (
        "Task 'add' was not sent: the on_send hook 'broken' raised LookupError: no tenant."
    )
    assert isinstance(failed.unwrap_err().exception, LookupError)
    assert not sent


def test_the_message_of_a_failed_hook_is_one_line_without_passwords(
    app: Horsies, add: Task
) -> None:
    @app.on_send
    def broken(outgoing: OutgoingTask) -> None:
        raise ValueError("\npostgresql://ada:secret@host/shop\nsecond line")

    assert refusal(add.send(1)) == (
        "Task 'add' was not sent: the on_send hook 'broken' raised ValueError: "
        "postgresql://ada:***@host/shop."
    )


def test_a_hook_cannot_be_asynchronous(app: Horsies) -> None:
    async def hook(outgoing: OutgoingTask) -> None: ...

    with pytest.raises(
        ConfigurationError, match="must be a plain function that takes the outgoing"
    ):
        app.on_send(hook)  # type: ignore[type-var]


def test_a_hook_takes_the_outgoing_task(app: Horsies) -> None:
    def nothing() -> None: ...

    def two(outgoing: OutgoingTask, other: int) -> None: ...

    for hook in (nothing, two):
        with pytest.raises(ConfigurationError, match="plain function that takes the outgoing task"):
            app.on_send(hook)  # type: ignore[type-var]
    app.on_send(print)


def test_a_hook_changes_only_the_headers(app: Horsies, add: Task) -> None:
    @app.on_send
    def move(outgoing: OutgoingTask) -> None:
        outgoing.headers = {"tenant": "blue"}
        if outgoing.count == 1:
            outgoing.queue_name = "other"

    with capture_sends(app) as sent:
        assert "can change only the headers, not queue_name" in refusal(add.send(1))
        add.send_many([add.bind(1), add.bind(2)]).unwrap()
    assert [one.headers for one in sent] == [{"tenant": "blue"}] * 2


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("eta", "; write at="),
        ("countdown", "; write delay="),
        ("queue", "; write queue_name="),
        ("x", ""),
    ],
)
def test_an_unknown_option_is_refused_with_the_known_ones(
    app: Horsies, add: Task, name: str, hint: str
) -> None:
    calls: list[Any] = [add.with_options, lambda **options: app.send_by_name("mail", **options)]
    for attach in calls:
        with pytest.raises(TypeError) as raised:
            attach(**{name: 1})
        assert str(raised.value).startswith(
            f"A send has no option {name!r}{hint}; the options are "
        )
        assert "idempotency_key, " in str(raised.value)


@pytest.mark.parametrize(
    ("options", "burst"),
    [
        ({}, False),
        ({"burst": True}, True),
        ({"retry_policy": POLICY}, False),
        ({"retry_policy": RetryPolicy.fixed([1], auto_retry_for=["WORKER_CRASHED"])}, True),
    ],
)
def test_tasks_that_may_wait_in_a_child_say_so_in_their_row(
    app: Horsies, connection: Database, options: dict[str, Any], burst: bool
) -> None:
    add = add_task(app, **options)
    ids = [add.send(1).unwrap().task_id]
    ids += [one.task_id for one in add.send_many([add.bind(1), add.bind(2)]).unwrap()]
    rows = connection.execute("SELECT burst FROM horsies_tasks WHERE id = ANY(%s::uuid[])", (ids,))
    assert rows.fetchall() == [(burst,)] * 3


def test_a_transaction_is_refused_where_a_child_holds_several_tasks(app: Horsies) -> None:
    with pytest.raises(
        TaskDefinitionError, match=r"takes a transaction \(tx\), so it cannot be a burst"
    ):

        @app.task("short", burst=True)
        def short(tx: TaskTransaction) -> None: ...

    with pytest.raises(
        TaskDefinitionError,
        match="of the wrong kind: TaskTransaction in a function with `async def`",
    ):

        @app.task("later")
        async def later(tx: TaskTransaction) -> None: ...

    with pytest.raises(TaskDefinitionError, match="AsyncTaskTransaction in a function with `def`"):

        @app.task("now")
        def now(tx: AsyncTaskTransaction) -> None: ...

    with pytest.raises(TaskDefinitionError, match="'a' and 'b' are both the transaction"):

        @app.task("two")
        def two(a: TaskTransaction, b: TaskTransaction | None = None) -> None: ...

    with pytest.raises(
        TaskDefinitionError, match="'tx', the transaction, cannot be passed by its name"
    ):

        @app.task("first")
        def first(tx: TaskTransaction, /) -> None: ...


def test_the_transaction_is_not_part_of_a_call(app: Horsies) -> None:
    @app.task("pay")
    def pay(order: int, tx: TaskTransaction = INJECTED, *, note: str = "") -> int:
        return tx.attempt

    sent = pay.send(1, note="x")
    assert sent.is_ok()
    refused = pay.send(1, tx=None)  # type: ignore[arg-type]
    assert "no parameter 'tx'" in refused.err_value.message
    with pytest.raises(TransactionMisuse, match="does not run in a worker"):
        pay(1)


def test_burst_is_a_boolean(app: Horsies) -> None:
    with pytest.raises(TaskDefinitionError, match="burst must be True or False"):
        add_task(app, burst="yes")


class Name(str, Enum):  # noqa: UP042 - its str() is "Name.REPORTS"
    REPORTS = "reports"


def test_a_member_of_an_enumeration_counts_as_its_value(
    queued: Horsies, connection: Database
) -> None:
    task = add_task(queued, queue_name="mail")
    keyed = task.with_options(queue_name=Name.REPORTS, idempotency_key=Name.REPORTS).enqueue(1, 2)
    again = task.with_options(queue_name="reports", idempotency_key="reports").enqueue(1, 2)
    assert again.task_id == keyed.task_id
    row = row_of(connection, keyed.task_id)
    assert (row["queue_name"], row["idempotency_key"]) == ("reports", "reports")


def test_the_stored_options_are_read_back(app: Horsies, connection: Database) -> None:
    policy = RetryPolicy.fixed([1, 5], auto_retry_for=["DOWN"])
    deadline = datetime(2100, 1, 1, tzinfo=UTC)

    @app.task("fetch", retry_policy=policy, burst=True)
    async def fetch() -> None: ...

    fetch.with_options(good_until=deadline, headers={"tenant": "blue"}).send().unwrap()
    ((stored,),) = connection.execute(b"SELECT task_options FROM horsies_tasks").fetchall()
    options = TaskOptions(policy, deadline, {"tenant": "blue"}, is_async=True, burst=True)
    assert TaskOptions.from_json(stored) == options
    assert options.to_json() == stored
    assert TaskOptions.from_json(None) == TaskOptions()
    with pytest.raises(ValueError, match="task_options is a JSON object, not list"):
        TaskOptions.from_json("[]")
