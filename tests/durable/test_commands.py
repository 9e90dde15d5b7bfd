"""The commands on runs, with the application and without it: what they refuse, and the fix that they name."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from types import ModuleType

import pytest
from pydantic import BaseModel

from horsies import Durable, Horsies, TaskActionErrorCode, TaskHandle
from horsies.db.statements.workers import register_defaults
from horsies.testing import run_pending
from horsies.worker.known_tasks import task_defaults
from tests.support.command_line import Finished, Run
from tests.support.database import Database

LOCATOR = "durable_commands:app"


class Approval(BaseModel):
    by: str


class Reversed:
    """A codec that hides nothing, so that no package is needed."""

    key_id, key_ids = "k1", ("k1",)

    def encode(self, data: bytes) -> str:
        return data[::-1].hex()

    def decode(self, key_id: str, text: str) -> bytes:
        return bytes.fromhex(text)[::-1]


@pytest.fixture
def located(app: Horsies, monkeypatch: pytest.MonkeyPatch) -> Horsies:
    """The application, as the commands find it."""
    return locate(app, monkeypatch)


def locate(app: Horsies, monkeypatch: pytest.MonkeyPatch) -> Horsies:
    module = ModuleType("durable_commands")
    module.app = app  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return app


@pytest.fixture
def secret(app: Horsies, monkeypatch: pytest.MonkeyPatch) -> Iterator[Horsies]:
    """An application that encrypts its payload, as the commands find it."""
    broker = app.config.broker.model_copy(update={"codec": Reversed()})
    made = Horsies(app.config.model_copy(update={"broker": broker}))
    yield locate(made, monkeypatch)
    made.close()


def start_worker(app: Horsies, connection: Database) -> None:
    """Register what a worker registers when it starts."""
    register_defaults.run(connection, (task_defaults(app),))


def waiting(app: Horsies, signals: dict[str, object] | None = None) -> TaskHandle[str]:
    """A run that waits for its signal."""

    @app.durable("release", signals=signals)
    def release(ctx: Durable, version: str) -> str:
        ctx.on_cancel(print, "undo")
        ctx.with_options(name="build").step(str, version)
        ctx.sleep(0)
        return f"{version} by {ctx.wait_signal('approve', Approval).by}"

    sent = release.enqueue("v1")
    run_pending(app)
    return sent


def one_line(finished: Finished) -> str:
    """What a command has written, without the breaks of its lines."""
    return " ".join(f"{finished.out} {finished.err}".split())


def stored(connection: Database) -> list[str]:
    return [value for (value,) in connection.execute("SELECT value FROM horsies_task_signals")]


def test_a_signal_without_the_application_is_checked_by_what_workers_registered(
    located: Horsies, connection: Database, horsies: Run
) -> None:
    sent = waiting(located, {"approve": Approval})

    @located.task("plain")
    def plain() -> None: ...

    other = plain.enqueue()
    start_worker(located, connection)
    signal = partial(horsies, "durable", "signal")
    misspelt = signal(sent.task_id, "aprove", "1")
    assert (misspelt.code, "its signals are 'approve'" in one_line(misspelt)) == (4, True)
    unchecked = signal(sent.task_id, "approve", '{"by": "ada"}')
    assert unchecked.code == 1
    assert "its type is declared in the code of 'release'; name the application" in one_line(
        unchecked
    )
    assert f'horsies durable signal {sent.task_id} approve \'{{"by": "ada"}}\' APP' in one_line(
        unchecked
    )
    assert "not a durable function" in one_line(signal(other.task_id, "approve", "1"))
    assert stored(connection) == []
    wrong = signal(sent.task_id, "approve", '{"who": "ada"}', LOCATOR)
    assert "The signal 'approve' was not sent" in wrong.err
    assert "delivered" in signal(sent.task_id, "approve", '{"by": "ada"}', LOCATOR).out
    run_pending(located)
    assert sent.result(timeout_ms=0) == "v1 by ada"


def test_a_program_without_the_function_sends_declared_names_only(
    app: Horsies, connection: Database
) -> None:
    sent = waiting(app, {"approve": Approval})
    start_worker(app, connection)
    other = Horsies(app.config)
    try:
        refused = other.signal(sent.task_id, "aprove", Approval(by="ada")).unwrap_err()
        assert refused.code is TaskActionErrorCode.SIGNAL_NOT_FOUND
        other.signal(sent.task_id, "approve", {"by": "ada"}).unwrap()
    finally:
        other.close()
    run_pending(app)
    assert sent.result(timeout_ms=0) == "v1 by ada"


@pytest.mark.parametrize(
    "is_registered", [False, True], ids=["its arguments tell", "a worker told"]
)
def test_no_value_is_stored_in_plain_text_beside_encrypted_ones(
    secret: Horsies, connection: Database, horsies: Run, is_registered: bool
) -> None:
    sent = waiting(secret)
    if is_registered:
        start_worker(secret, connection)
        connection.execute("UPDATE horsies_tasks SET args = '[]'")
    signal = partial(horsies, "durable", "signal", sent.task_id, "approve", '{"by": "ada"}')
    refused = signal()
    assert refused.code == 1
    assert "'release' encrypts its payload, and this program has no key; name" in one_line(refused)
    assert stored(connection) == []
    assert "delivered" in signal(LOCATOR).out
    assert "ada" not in str(stored(connection))


def test_show_and_export_name_the_key_that_they_do_not_have(secret: Horsies, horsies: Run) -> None:
    sent = waiting(secret)
    key_id = "k1"
    shown = one_line(horsies("durable", "show", sent.task_id))
    assert f"encrypted with key {key_id}, which this command does not have" in shown
    assert f"horsies durable show {sent.task_id} APP" in shown
    assert '"v1"' in horsies("durable", "show", sent.task_id, LOCATOR).out
    assert (
        json.loads(horsies("durable", "show", sent.task_id, "--json").out)["missing_key"] == key_id
    )
    unread = horsies("durable", "export", sent.task_id)
    assert (unread.code, unread.out) == (1, "")
    assert f"horsies durable export {sent.task_id} APP" in one_line(unread)
    assert json.loads(horsies("durable", "export", sent.task_id, LOCATOR).out)["args"] == '["v1"]'


def test_a_failed_step_is_shown_without_its_key(secret: Horsies, horsies: Run) -> None:
    def fail() -> None:
        raise ValueError("S3CRET")

    @secret.durable("fails")
    def fails(ctx: Durable) -> None:
        ctx.step(fail)

    sent = fails.enqueue()
    run_pending(secret)
    assert "failed with encrypted" in horsies("durable", "show", sent.task_id).out


def test_a_run_is_shown_with_what_its_records_mean(located: Horsies, horsies: Run) -> None:
    sent = waiting(located)
    shown = horsies("durable", "show", sent.task_id).out
    assert f"horsies durable signal {sent.task_id} approve VALUE APP" in " ".join(shown.split())
    (clean_up,) = [line for line in shown.splitlines() if line.startswith("on_cancel:print")]
    assert clean_up.endswith("registered")
    (sleep,) = [line for line in shown.splitlines() if line.startswith("sleep ")]
    assert "until 20" in sleep
    assert "ENDED" not in shown


def test_a_reset_that_is_refused_names_the_steps_and_the_way_out(
    located: Horsies, horsies: Run
) -> None:
    sent = waiting(located)
    reset = partial(horsies, "durable", "reset")
    missing = one_line(reset(sent.task_id, "none"))
    assert (
        "has no recorded step 'none'; its steps are 'on_cancel:print', 'build', 'sleep'." in missing
    )

    @located.durable("long")
    def long(ctx: Durable) -> None:
        for _ in range(12):
            ctx.step(int)
        ctx.sleep(timedelta(days=1))

    @located.durable("fails")
    def fails(ctx: Durable) -> None:
        ctx.with_options(name="fail").step(int, "no number")

    ended, many, new = fails.enqueue(), long.enqueue(), long.enqueue()
    assert "none is recorded yet" in one_line(reset(new.task_id, "int"))
    run_pending(located)
    assert "'int#10' and 3 more." in one_line(reset(many.task_id, "none"))
    failed = one_line(reset(ended.task_id, "fail"))
    assert "is FAILED and cannot be reset" in failed
    assert f"`horsies retry {ended.task_id}` starts a new run with the same arguments." in failed
    resumed = one_line(horsies("durable", "resume", ended.task_id))
    assert "is FAILED and cannot be resumed" in resumed
    assert "horsies explain" in one_line(horsies("durable", "resume", many.task_id))
