"""capture_sends: everything an application sends, without a database."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from horsies import (
    BrokerErrorCode,
    Horsies,
    OperationalErrorCode,
    ResultUnavailable,
    TaskSendErrorCode,
    from_node,
    start_many,
)
from horsies.tasks.broker import PostgresBroker
from horsies.testing import CapturedSend, capture_sends
from tests.support.applications import NOWHERE, Call

LATER = datetime(2030, 1, 1, tzinfo=UTC)


@pytest.fixture
def app() -> Horsies:
    """An application whose database does not exist."""
    return Horsies(NOWHERE)


@pytest.fixture
def mail(app: Horsies) -> Any:
    @app.task("mail")
    def mail(to: str, when: datetime = LATER, *, copies: int = 1) -> int:
        return copies

    return mail


def test_a_send_is_recorded_as_its_worker_would_get_it(app: Horsies, mail: Any, call: Call) -> None:
    with capture_sends(app) as sent:
        handle = call(app, mail, "send", "ada", LATER, copies=2).unwrap()
    (one,) = sent
    assert (one.task, one.args, one.kwargs) == ("mail", ("ada", LATER), {"copies": 2})
    assert one.arguments == {"to": "ada", "when": LATER, "copies": 2}
    assert (one.task_id, one.queue_name, one.priority) == (handle.task_id, "default", 100)


def test_options_are_recorded_under_their_names(app: Horsies, mail: Any, call: Call) -> None:
    transaction = object()
    options = {
        "at": LATER,
        "priority": 3,
        "good_until": LATER + timedelta(hours=1),
        "timeout_ms": 500,
        "retention": timedelta(days=2),
        "headers": {"tenant": "acme"},
        "idempotency_key": "order-7",
        "unique": "while_open",
        "transaction": transaction,
    }
    with capture_sends(app) as sent:
        call(app, mail.with_options(**options), "send", "ada").unwrap()
    assert {name: getattr(sent[0], name) for name in options} == options


def test_every_way_to_send_is_captured(app: Horsies, mail: Any, call: Call) -> None:
    with capture_sends(app) as sent:
        call(app, mail, "enqueue", "a")
        call(app, mail, "schedule", 1.5, "b").unwrap()
        call(app, mail, "send_many", [mail.bind("c"), mail.bind("d")]).unwrap()
        call(app, mail.with_options(delay=timedelta(hours=1)), "send_many", [mail.bind("e")])
        call(app, app, "send_by_name", "elsewhere", {"x": [1]}).unwrap()
    assert [one.arguments.get("to") for one in sent] == ["a", "b", "c", "d", "e", None]
    delays = [one.delay for one in sent]
    assert delays == [None, timedelta(seconds=1.5), None, None, timedelta(hours=1), None]
    assert sent[-1].task == "elsewhere"
    assert sent[-1].kwargs == {"x": [1]}
    assert sent.of(mail) == sent[:5]
    assert sent.of("elsewhere") == sent[5:]


def test_a_stream_of_calls_is_captured_whole_or_not_at_all(app: Horsies, mail: Any) -> None:
    with capture_sends(app) as sent:
        handles = mail.send_many(mail.bind(str(number)) for number in range(1_100)).unwrap()
        assert [one.task_id for one in sent] == [handle.task_id for handle in handles]
        sent.clear()
        calls = (mail.bind("x" if number < 1_050 else number) for number in range(1_100))
        assert mail.send_many(calls).is_err()
        assert not sent


def test_arguments_that_do_not_fit_are_refused_as_always(app: Horsies, mail: Any) -> None:
    with capture_sends(app) as sent:
        refused = mail.send(7)
    assert refused.unwrap_err().code is TaskSendErrorCode.VALIDATION_FAILED
    assert len(sent) == 0


def test_a_repeated_key_is_one_send(app: Horsies, mail: Any) -> None:
    with capture_sends(app) as sent:
        first = mail.with_options(idempotency_key="k").enqueue("ada")
        second = mail.with_options(idempotency_key="k").enqueue("ada")
        other = mail.with_options(idempotency_key="k").send("eve")
        waiting = mail.with_options(idempotency_key="w", unique="while_waiting").enqueue("ada")
        again = mail.with_options(idempotency_key="w", unique="while_waiting").enqueue("ada")
    assert first.task_id == second.task_id
    assert waiting.task_id == again.task_id
    assert other.unwrap_err().code is TaskSendErrorCode.PAYLOAD_MISMATCH
    assert len(sent) == 2


def test_waiting_for_a_captured_send_ends_at_once_and_says_why(app: Horsies, mail: Any) -> None:
    with capture_sends(app):
        handle = mail.enqueue("ada")
        result = handle.get()
        assert asyncio.run(handle.get_async()).err_value.error_code == result.err_value.error_code
        with pytest.raises(ResultUnavailable, match="capture_sends and never runs; use run_inline"):
            handle.result()
    assert result.err_value.error_code is OperationalErrorCode.BROKER_ERROR


def test_what_needs_a_database_is_refused_in_one_sentence(app: Horsies, mail: Any) -> None:
    with capture_sends(app):
        refused = mail.enqueue("ada").info().unwrap_err()
    assert refused.code is BrokerErrorCode.TASK_INFO_QUERY_FAILED
    assert refused.message == (
        "capture_sends has no database to answer 'read_task'; use the fixture horsies_database and "
        "run_pending."
    )


def test_the_start_of_a_workflow_is_captured(app: Horsies, mail: Any, call: Call) -> None:
    first = mail.node(node_id="first")(to="ada")

    @app.task("count")
    def count(number: int) -> int:
        return number

    last = count.node(node_id="last")(number=from_node(first))
    spec = app.workflow("letters", [first, last], output=last, definition_key="letters.v1")
    with capture_sends(app) as sent:
        handle = call(app, spec, "start", workflow_key="today").unwrap()
        start_many([spec, spec]).unwrap()
        assert "capture_sends" in str(handle.get().err_value.message)
    started = sent.workflows[0]
    assert (started.workflow, started.workflow_key) == ("letters", "today")
    assert (started.workflow_id, started.definition_key) == (handle.workflow_id, "letters.v1")
    assert started.nodes == {"first": "mail", "last": "count"}
    assert len(sent.workflows) == 3
    assert not sent


def test_the_text_of_captured_sends_reads_like_the_calls(app: Horsies, mail: Any) -> None:
    with capture_sends(app) as sent:
        assert repr(sent) == "captured sends:\n  none"
        mail.with_options(delay=timedelta(seconds=5)).enqueue("ada", copies=2)
    assert repr(sent) == (
        "captured sends:\n  mail('ada', copies=2) [queue_name='default', priority=100, "
        "delay=datetime.timedelta(seconds=5)]"
    )


def test_the_hooks_of_sends_run(app: Horsies, mail: Any) -> None:
    @app.on_send
    def stamp(outgoing: Any) -> None:
        outgoing.headers["stamp"] = "1"

    with capture_sends(app) as sent:
        mail.enqueue("ada")
        mail.send_many([mail.bind("eve")]).unwrap()
    assert [one.headers for one in sent] == [{"stamp": "1"}, {"stamp": "1"}]


def test_after_the_block_the_application_has_its_own_broker(app: Horsies, mail: Any) -> None:
    before = app.get_broker()
    with pytest.raises(ZeroDivisionError), capture_sends(app):
        _ = len(mail.enqueue("ada").task_id) / 0
    assert app.get_broker() is before


def test_a_captured_send_is_a_value() -> None:
    one = CapturedSend("mail", (1,), {}, "id", "default", 100)
    assert one == CapturedSend("mail", (1,), {}, "id", "default", 100)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (0, 2, 1), (1, 2, 0), (2, 1, 0)])
def test_overlapping_blocks_may_end_in_any_order(
    app: Horsies, mail: Any, order: tuple[int, ...]
) -> None:
    blocks = [ExitStack() for _ in order]
    captured = [block.enter_context(capture_sends(app)) for block in blocks]
    open_ones = [0, 1, 2]
    for place in order:
        mail.send(str(place)).unwrap()
        assert [one.args for one in captured[max(open_ones)]][-1] == (str(place),)
        blocks[place].close()
        open_ones.remove(place)
    assert sum(map(len, captured)) == 3
    assert type(app.get_broker()) is PostgresBroker
