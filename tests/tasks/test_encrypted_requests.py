"""Requests of an application with a codec: nothing of them can be guessed, and repetitions are recognised."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from horsies import FernetCodec, Horsies, PayloadCodec, TaskNode
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.db.statements.workers import register_defaults
from horsies.tasks.options import SendOptions
from horsies.tasks.request import Stamp, TaskSendErrorCode, prepare
from horsies.worker.known_tasks import task_defaults
from horsies.workflow.build.plan import fingerprints
from tests.support.applications import Call, add_task
from tests.support.database import Database
from tests.support.rows import stored

OLD, NEW = FernetCodec.new_key(), FernetCodec.new_key()
SECRET = "S3CRET"
ROTATION = [[], [OLD], [OLD, NEW], [NEW, OLD]]
Maker = Callable[[PayloadCodec | None], Horsies]


@pytest.fixture
def make(process_url: str, connection: Database) -> Iterator[Maker]:
    """Makes applications with a codec, and closes them."""
    made: list[Horsies] = []

    def maker(codec: PayloadCodec | None) -> Horsies:
        broker = PostgresConfig(database_url=process_url, pool_size=1, codec=codec)
        made.append(Horsies(AppConfig(broker=broker)))
        add_task(made[-1])
        return made[-1]

    yield maker
    for one in made:
        one.close()


def codec_of(keys: list[str]) -> PayloadCodec | None:
    return FernetCodec(keys) if keys else None


def adding(app: Horsies, **options: Any) -> Any:
    task = app.get_task("add")
    assert task is not None
    return task.with_options(**options) if options else task


def graph(app: Horsies, number: int = 1) -> Any:
    node: Any = TaskNode(adding(app), kwargs={"a": number})
    return app.workflow("sum", [node], definition_key="tests.sum")


def test_a_digest_that_is_stored_with_a_request_needs_the_key(
    make: Maker, connection: Database
) -> None:
    app, attacker = make(FernetCodec(OLD)), make(FernetCodec(NEW))
    adding(app, idempotency_key="k").send(1).unwrap()
    adding(app).send_many([adding(app).bind(1)]).unwrap()
    graph(app).start().unwrap()
    runs = connection.execute("SELECT fingerprint FROM horsies_workflows").fetchone()
    digests = [*(runs or ())]
    for row in stored(connection):
        digests += [row["enqueue_sha"], row["idempotency_sha"]]
        stamp = Stamp(str(row["id"]), row["sent_at"])
        for guessing in (attacker, make(None)):
            options = SendOptions(idempotency_key="k")
            definition = adding(guessing).definition
            guess = prepare(guessing.config, definition, options, (1,), {}, stamp=stamp).unwrap()
            assert guess.row.enqueue_sha not in digests
            assert not {*guess.known_shas} & {*digests}
            assert not {*fingerprints(graph(guessing))} & {*digests}
    made = [one for one in digests if one]
    assert len(made) >= 4
    assert {len(one) for one in made} == {64}


@pytest.mark.parametrize("first", ROTATION, ids=len)
def test_a_repeated_request_is_recognised_throughout_a_rotation(
    make: Maker, connection: Database, first: list[str], call: Call
) -> None:
    app = make(codec_of(first))
    sent = adding(app, idempotency_key="k").send(1).unwrap()
    run = graph(app).start(workflow_key="k").unwrap()
    # A process with the old key alone has no part in the last step of a rotation.
    for keys in ROTATION[1:] if first != [NEW, OLD] else ROTATION[2:]:
        later = make(codec_of(keys))
        again = call(later, adding(later, idempotency_key="k"), "send", 1).unwrap()
        assert again.task_id == sent.task_id
        assert graph(later).start(workflow_key="k").unwrap().workflow_id == run.workflow_id
        other = adding(later, idempotency_key="k").send(2).unwrap_err()
        assert other.code is TaskSendErrorCode.PAYLOAD_MISMATCH
        assert graph(later, 2).start(workflow_key="k").is_err()
    assert len(stored(connection)) == 2


def test_a_request_that_cannot_be_compared_is_refused_with_the_reason(
    make: Maker, connection: Database
) -> None:
    app = make(FernetCodec(OLD))
    sent = adding(app, idempotency_key="k").send(1).unwrap()
    for other in (None, FernetCodec(NEW)):
        refused = adding(make(other), idempotency_key="k").send(1).unwrap_err()
        assert refused.code is TaskSendErrorCode.PAYLOAD_MISMATCH
        assert "key of the codec that this process does not have" in refused.message
    register_defaults.run(connection, (task_defaults(app),))
    with pytest.raises(psycopg.errors.UniqueViolation, match=f"{sent.task_id} .* with a codec"):
        connection.execute(
            """SELECT horsies_send_v1('add', '{"a": 1}'::jsonb, p_idempotency_key => 'k')"""
        )


def test_a_send_from_sql_is_recognised_by_an_application_with_a_codec(
    make: Maker, connection: Database
) -> None:
    app = make(FernetCodec(OLD))
    register_defaults.run(connection, (task_defaults(app),))
    query = """SELECT horsies_send_v1('add', '{"a": 1}'::jsonb, p_idempotency_key => 'k')::text"""
    row = connection.execute(query).fetchone()
    sent = app.send_by_name("add", {"a": 1}, idempotency_key="k").unwrap()
    assert row == (sent.task_id,)


class Failing:
    """A codec whose key service is away, and whose exceptions quote the payload."""

    key_id, key_ids = "f1", ("f1",)

    def __init__(self, method: str) -> None:
        self.method = method

    def encode(self, data: bytes) -> str:
        return self._failing("encode", data).hex()

    def digest(self, key_id: str, data: bytes) -> bytes:
        return self._failing("digest", data)

    def decode(self, key_id: str, text: str) -> bytes:
        return bytes.fromhex(text)

    def _failing(self, method: str, data: bytes) -> bytes:
        if method == self.method:
            raise ConnectionError(f"no key service for {data!r}")
        return data


@pytest.mark.parametrize("method", ["encode", "digest"])
def test_a_codec_that_fails_in_a_send_stores_nothing_and_quotes_nothing(
    make: Maker, connection: Database, caplog: pytest.LogCaptureFixture, call: Call, method: str
) -> None:
    app = make(Failing(method))

    @app.task("keep")
    def keep(text: str) -> None: ...

    node: Any = TaskNode(keep, kwargs={"text": SECRET})
    flow: Any = app.workflow("kept", [node], definition_key="tests.kept")
    sender = keep.with_options(idempotency_key="k")
    attempts = [
        call(app, keep, "send", SECRET),
        call(app, sender, "send", SECRET),
        call(app, keep, "send_many", [keep.bind(SECRET)]),
        call(app, flow, "start"),
    ]
    with closing(psycopg.connect(connection.info.dsn)) as own:
        attempts.append(keep.with_options(transaction=own).send(SECRET))
        own.commit()  # the caller's transaction is unharmed
    for attempt in attempts:
        error = attempt.unwrap_err()
        assert error.code.value == "ENQUEUE_FAILED"
        assert error.message == (
            f"The payload cannot be encrypted: {method}() of the codec in PostgresConfig raised "
            "ConnectionError; nothing was stored."
        )
        assert isinstance(error.exception, ConnectionError)
        assert SECRET not in repr(error)
    assert SECRET not in caplog.text
    assert stored(connection) == []
