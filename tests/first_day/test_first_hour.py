"""The first hour with Horsies: calls that look right, fail, and must say so."""

from __future__ import annotations

import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from pydantic import BaseModel

from horsies import (
    AnyNode,
    AppConfig,
    Err,
    ErrorCode,
    Horsies,
    Ok,
    OperationalErrorCode,
    PostgresConfig,
    SignalNode,
    SleepNode,
    TaskError,
    TaskResult,
    WorkflowContext,
)
from horsies.check import live_errors
from horsies.db.migrate import apply_migrations
from horsies.db.statements.turn import ClaimTasks, claim_tasks
from horsies.retry import resolve_exception_code
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError
from horsies.tasks.handle import TaskHandle
from horsies.worker.child.execute import execute
from horsies.worker.protocol import Assignment
from tests.support.applications import Call
from tests.support.database import Database
from tests.support.doc_pages import REPOSITORY
from tests.support.proxy import Proxy
from tests.support.rows import finish, row_of
from tests.support.turns import Hands

NOWHERE = AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused"))


# Direct calls


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        (("one",), {}, "order_id must be int (input should be a valid integer)."),
        ((), {}, "argument 'order_id' is missing; the parameters are order_id, note."),
        ((1, None, 2), {}, "3 positional arguments are too many"),
        ((1,), {"node": 2}, "there is no parameter 'node'"),
        ((1,), {"note": {1}}, "note is of type set and would come back as list"),
    ],
)
def test_a_direct_call_checks_its_arguments(args: Any, kwargs: Any, problem: str) -> None:
    app = Horsies(NOWHERE)

    @app.task("confirm")
    def confirm(order_id: int, note: Any = None) -> TaskResult[int, TaskError]:
        return TaskResult(ok=order_id)

    error = confirm(*args, **kwargs).err_value
    assert error.error_code is OperationalErrorCode.WORKER_SERIALIZATION_ERROR
    assert error.message is not None
    assert error.message.startswith(f"The arguments do not fit task 'confirm': {problem}")
    assert confirm(1, note="today").unwrap() == 1


def test_a_direct_call_may_pass_the_context_of_a_workflow() -> None:
    app = Horsies(NOWHERE)

    @app.task("look")
    def look(order_id: int, workflow_ctx: WorkflowContext | None) -> TaskResult[bool, TaskError]:
        return TaskResult(ok=workflow_ctx is None)

    context = WorkflowContext("run", 0, "look", {})
    assert look(1, workflow_ctx=context).unwrap() is False
    assert look(1, context).unwrap() is False


# Untyped values


class Parcel(BaseModel):
    content: Any


@pytest.mark.parametrize(
    ("value", "parcel"),
    [
        ((1, 2), None),
        ({"sizes": (1, 2)}, None),
        ({1, 2}, None),
        (None, Parcel(content=(1, 2))),
        (None, Parcel(content=[{1, 2}])),
    ],
)
def test_a_tuple_or_a_set_for_any_is_refused(value: Any, parcel: Parcel | None) -> None:
    app = Horsies(NOWHERE)

    @app.task("keep")
    def keep(value: Any, parcel: Parcel | None) -> TaskResult[Any, TaskError]:
        return TaskResult(ok=value)

    refused = keep.send(value, parcel).unwrap_err()
    assert refused.code == "VALIDATION_FAILED"
    assert "would come back as list; annotate it with its type." in refused.message


@pytest.mark.parametrize(
    ("data", "stored"),
    [((1, 2), '"data":[1,2]'), ({1}, "err.data is of type set and would come back as list")],
)
def test_the_code_of_an_error_outlives_data_that_cannot_be_stored(data: Any, stored: str) -> None:
    app = Horsies(NOWHERE)

    @app.task("pay")
    def pay() -> TaskResult[None, TaskError]:
        return TaskResult(err=TaskError(error_code="NO_MONEY", message="empty", data=data))

    report = execute(app, Assignment("id", 1, "pay", 1, "[]", "{}", None))
    assert (report.error_code, report.error_message) == ("NO_MONEY", "empty")
    assert stored in report.result_json


# Retries

CHARGE = """
from enum import StrEnum

from horsies import Horsies, RetryPolicy, TaskError, TaskResult

app = Horsies("postgresql://nobody@127.0.0.1:1/nothing")
BANK_AWAY = "THE_BANK_IS_AWAY"


class Code(StrEnum):
    SLOW = "BANK_SLOW"


def bank_is_busy() -> TaskError:
    return TaskError(error_code="BANK_BUSY", message="later")


@app.task(
    "charge",
    exception_mapper={ConnectionError: "GATEWAY_DOWN"},
    default_unhandled_error_code="CHARGE_FAILED",
    retry_policy=RetryPolicy.exponential(1, max_retries=2, auto_retry_for=[
        *("GATEWAY_DOWN", "CHARGE_FAILED", "WORKER_CRASHED", "TASK_TIMEOUT"),
        *("BANK_BUSY", BANK_AWAY, Code.SLOW),
        *(OSError, "builtins.OSError", "horsies.errors.RetryLater"),
        *("GATEWY_DOWN", "NEVER_MENTIONED", "TASK_CANCELLED", "shop.Missing", "away.Missing"),
    ]),
)
def charge() -> TaskResult[int, TaskError]:
    return TaskResult(err=bank_is_busy())
"""


def test_check_warns_of_codes_that_nothing_produces(tmp_path: Path) -> None:
    (tmp_path / "shop.py").write_text(CHARGE)
    command = [sys.executable, "-m", "horsies", "check", "shop:app"]
    checked = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, "ok: all validations passed" in checked.stdout) == (0, True)
    warnings = [line.partition("auto_retry_for lists ")[2] for line in checked.stderr.splitlines()]
    unproduced = "but no exception mapper, default code or function produces it"
    unloaded = "but no loaded module has an exception class of that name"
    assert warnings == [
        f"GATEWY_DOWN, {unproduced}; did you mean GATEWAY_DOWN?",
        f"NEVER_MENTIONED, {unproduced}; correct the code or remove it",
        "TASK_CANCELLED, a built-in code that no failed attempt has; remove it",
        f"shop.Missing, {unloaded}; list the class itself",
        f"away.Missing, {unloaded}; list the class itself",
    ]
    assert f"In task 'charge' ({tmp_path / 'shop.py'}:" in checked.stderr


class Reset(ConnectionResetError):
    pass


@pytest.mark.parametrize(
    ("task_mapper", "app_mapper", "code"),
    [
        ({ConnectionError: "AWAY"}, {}, "AWAY"),
        ({}, {OSError: "SYSTEM"}, "SYSTEM"),
        ({OSError: "SYSTEM", ConnectionError: "AWAY"}, {}, "AWAY"),
        ({ConnectionError: "AWAY", OSError: "SYSTEM", Reset: "RESET"}, {}, "RESET"),
        ({OSError: "SYSTEM"}, {Reset: "RESET"}, "SYSTEM"),
        ({TimeoutError: "SLOW"}, {BaseException: "ANY"}, "ANY"),
        ({TimeoutError: "SLOW"}, {}, "DEFAULT"),
    ],
)
def test_a_mapped_exception_stands_for_its_subclasses(
    task_mapper: dict[type[BaseException], str],
    app_mapper: dict[type[BaseException], str],
    code: str,
) -> None:
    assert resolve_exception_code(Reset(), task_mapper, app_mapper, "DEFAULT", None) == code


# Sending


@pytest.mark.parametrize("way", ["send_many", "sends of one moment"])
def test_tasks_run_in_the_order_of_their_sends(
    app: Horsies, connection: Database, way: str
) -> None:
    @app.task("step")
    def step(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    if way == "send_many":
        step.send_many(step.bind(number) for number in range(20)).unwrap()
    else:
        for number in range(20):
            step.send(number).unwrap()
        connection.execute("UPDATE horsies_tasks SET enqueued_at = now()")
    claimed = [
        claim_tasks.run(connection, ClaimTasks("worker", "host", [1], ["default"], [1]))[0].id
        for _ in range(20)
    ]
    assert [row_of(connection, task_id)["args"] for task_id in claimed] == [
        f"[{number}]" for number in range(20)
    ]


# Results


def test_a_get_after_an_outage_connects_by_itself(
    proxy: Proxy, distant_app: Horsies, connection: Database, call: Call
) -> None:
    @distant_app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    handle = add.send(1).unwrap()
    finish(connection, handle.task_id)
    proxy.stop()
    # Failed reconnects: the next one by the clock alone is seconds away.
    for _ in range(6):
        assert distant_app.handle(handle.task_id).get(timeout_ms=0).is_err()
    proxy.start()
    for timeout_ms in (0, 20_000):
        assert call(distant_app, distant_app.handle(handle.task_id), "get", timeout_ms).is_ok()


# Examples of the documentation

RUN_PAGE = """
from tests.project.test_docs import _run_page
app = _run_page("sending.md")["app"]
print(app.database_url)
app.close()
"""


@pytest.fixture
def directory() -> Iterator[Path]:
    """A short path that the user of an embedded server may enter."""
    parent = Path(tempfile.mkdtemp(prefix="horsies-embedded-"))
    parent.chmod(0o755)
    yield parent / "data"
    shutil.rmtree(parent)


def test_the_examples_of_sends_run_with_the_embedded_database(directory: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", RUN_PAGE],
        cwd=REPOSITORY,
        env=os.environ | {"HORSIES_DATABASE_URL": f"embedded://{directory}"},
        timeout=120,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    address = done.stdout.splitlines()[-1]
    assert address.startswith("postgresql://")
    assert str(directory) in address


def test_the_address_for_other_libraries_is_one_that_libpq_reads() -> None:
    app = Horsies("postgresql+psycopg://app:hunter2@127.0.0.1:1/shop")
    assert app.database_url == "postgresql://app:hunter2@127.0.0.1:1/shop"


# Forgotten unwraps

FAILED = Err(BrokerOperationError(BrokerErrorCode.NO_BROKER, "no database"))


@pytest.mark.parametrize("result", [Ok(1), Ok(False), FAILED])
def test_ok_and_err_are_neither_true_nor_false(result: Any) -> None:
    with pytest.raises(TypeError, match=r"is neither true nor false; call is_ok\(\) or is_err\(\)"):
        bool(result)


@pytest.mark.parametrize(
    ("result", "name", "hint"),
    [
        (Ok(TaskHandle("x", None)), "get", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "task_id", "; call .unwrap() first"),
        (Ok(TaskHandle("x", None)), "result_of", ""),
        (FAILED, "message", "; call .unwrap_err() first"),
        (
            FAILED,
            "get",
            "; it holds the error of a failed call: match it, or call .unwrap() to raise it",
        ),
    ],
)
def test_an_attribute_of_the_value_says_unwrap_first(result: Any, name: str, hint: str) -> None:
    kind = type(result).__name__
    with pytest.raises(AttributeError) as refused:
        getattr(result, name)
    assert str(refused.value) == f"'{kind}' object has no attribute '{name}'{hint}"


# A live check of tables and rights

PRODUCER = """
GRANT SELECT ON horsies_migrations, horsies_task_attempts TO {role};
GRANT SELECT, INSERT, UPDATE ON horsies_tasks, horsies_workflows, horsies_workflow_tasks TO {role};
GRANT SELECT, INSERT, DELETE ON horsies_workflow_signals TO {role};
"""


@pytest.fixture
def role(database_url: str) -> Iterator[str]:
    """A role without rights on the fresh database."""
    name = f"newcomer_{uuid.uuid4().hex[:8]}"
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(f"CREATE ROLE {name}".encode())
        yield name
        connection.execute(f"DROP OWNED BY {name}".encode())
        connection.execute(f"DROP ROLE {name}".encode())


@pytest.mark.parametrize(
    ("has_tables", "grants", "migrates", "message", "remedy"),
    [
        (
            False,
            "",
            True,
            "The tables of horsies are missing or outdated, and the role {role} must not create or "
            "change them in the schema public.",
            "run `horsies migrate` as the owner of the tables",
        ),
        (
            False,
            "",
            False,
            "The schema public of this database has no tables of horsies; "
            "create them with `horsies migrate`.",
            "",
        ),
        (False, "GRANT CREATE ON SCHEMA public TO {role}", True, None, ""),
        (
            False,
            "REVOKE USAGE ON SCHEMA public FROM PUBLIC",
            True,
            "The role {role} has no right to use the schema public.",
            "GRANT USAGE ON SCHEMA public TO {role}",
        ),
        (
            True,
            f"{PRODUCER} REVOKE SELECT ON horsies_migrations, horsies_task_attempts FROM {{role}}",
            True,
            "The role {role} lacks rights of a producer: SELECT ON horsies_migrations, SELECT ON "
            "horsies_task_attempts.",
            "GRANT SELECT ON public.horsies_migrations TO {role}; GRANT SELECT ON "
            "public.horsies_task_attempts TO {role}",
        ),
        (
            True,
            f"{PRODUCER} REVOKE INSERT ON horsies_tasks FROM {{role}}",
            False,
            "The role {role} lacks rights of a producer: INSERT ON horsies_tasks.",
            "GRANT INSERT ON public.horsies_tasks TO {role}",
        ),
        (True, PRODUCER, True, None, ""),
    ],
)
def test_a_live_check_finds_missing_tables_and_rights(
    database_url: str,
    role: str,
    has_tables: bool,
    grants: str,
    migrates: bool,
    message: str | None,
    remedy: str,
) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        if has_tables:
            apply_migrations(connection)
        connection.execute(grants.format(role=role).encode())
    joint = "&" if "?" in database_url else "?"
    config = PostgresConfig(database_url=f"{database_url}{joint}options=-c%20role%3D{role}")
    errors = Horsies(AppConfig(broker=config), migrate=migrates).check(live=True)
    assert [error.message for error in errors] == (
        [] if message is None else [message.format(role=role)]
    )
    assert all(remedy.format(role=role) in (error.help_text or "") for error in errors)


def test_a_live_check_says_who_cannot_run_workers(database_url: str, role: str) -> None:
    with psycopg.connect(database_url, autocommit=True) as connection:
        apply_migrations(connection)
        connection.execute(PRODUCER.format(role=role).encode())
        names = [name for (name,) in connection.execute("SELECT tablename FROM pg_tables")]
        tables = ", ".join(name for name in names if name.startswith("horsies_"))
        config = PostgresConfig(
            database_url=f"{database_url}{'&' if '?' in database_url else '?'}options=-c%20role%3D{role}"
        )
        (error,) = live_errors(config, role="worker")
        assert error.message.startswith(f"The role {role} lacks rights of a worker: ")
        assert "horsies_migrations" not in error.message
        connection.execute(f"GRANT SELECT, INSERT, UPDATE, DELETE ON {tables} TO {role}".encode())
        connection.execute(f"REVOKE INSERT ON horsies_migrations FROM {role}".encode())
    assert live_errors(config, role="worker") == []


@pytest.mark.parametrize(
    "node", [SignalNode("approve", node_id="waiting"), SleepNode(3600, node_id="waiting")]
)
def test_the_drawing_shows_how_long_a_node_waited(
    app: Horsies, connection: Database, node: AnyNode
) -> None:
    handle = app.workflow("order", [node], definition_key="first_hour.order").start().unwrap()
    connection.execute(
        "UPDATE public.horsies_workflow_tasks SET enqueued_at = enqueued_at - interval '1 hour'"
    )
    assert handle.draw().unwrap().endswith("  1h00m")
    Hands(connection).complete(handle.workflow_id, "waiting", True)
    assert handle.draw().unwrap().endswith("  1h00m")


@pytest.mark.parametrize("where", ["made here", "made by a function"])
def test_a_builder_in_the_module_of_the_application_must_be_registered(
    module: Callable[[str], Horsies], where: str
) -> None:
    app = module("""
        def make() -> Horsies:
            return Horsies("postgresql://shop@127.0.0.1:1/shop")

        made = make()

        @app.workflow_builder()
        def registered() -> WorkflowSpec[Any]:
            return forgotten()

        def forgotten() -> WorkflowSpec[Any]:
            return app.workflow("w", [work.node()()], definition_key="first_hour.w")
    """)
    home = importlib.import_module(app.definitions()["work"].function.__module__)
    (error,) = (app if where == "made here" else home.made).check()
    assert error.code is ErrorCode.WORKFLOW_CHECK_UNDECORATED_BUILDER
    assert "'forgotten'" in error.message
    home.forgotten.__horsies_no_check__ = True
    assert app.check() == []
