"""What a newcomer does in the first hour, with the case that once failed for each of it."""

from __future__ import annotations

import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import psycopg
import pytest
from psycopg import sql
from pydantic import BaseModel

import horsies as horsies_package
from horsies import (
    AnyNode,
    AppConfig,
    ConfigurationError,
    Err,
    ErrorCode,
    Horsies,
    Ok,
    OperationalErrorCode,
    PostgresConfig,
    SignalNode,
    SleepNode,
    TaskDefinitionError,
    TaskError,
    TaskResult,
    WorkflowContext,
    WorkflowSpec,
)
from horsies.db.migrate import apply_migrations, schema_version
from horsies.db.statements.turn import ClaimTasks, claim_tasks
from horsies.error_codes import resolve_exception_code
from horsies.ids import new_id
from horsies.tasks.broker import BrokerErrorCode, BrokerOperationError
from horsies.tasks.check import live_errors, live_notes
from horsies.tasks.handle import TaskHandle
from horsies.worker.child.execute import execute
from horsies.worker.cpus import usable_cpus
from horsies.worker.protocol import Assignment
from tests.support.applications import Call, app_at
from tests.support.command_line import Run
from tests.support.database import Database
from tests.support.doc_pages import REPOSITORY
from tests.support.proxy import Proxy
from tests.support.rows import add_task, add_worker, ago, finish, row_of
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
from tests.support.doc_pages import run_page
app = run_page("sending.md")["app"]
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
    assert live_notes(config) == []


def test_a_live_check_says_that_migrations_are_missing(
    database_url: str, horsies: Run, tmp_path: Path
) -> None:
    path = tmp_path / f"live_{uuid.uuid4().hex}.py"
    path.write_text(f"from horsies import Horsies\n\napp = Horsies({database_url!r})\n")
    yet = "note: The schema public of this database has no tables of horsies yet; `horsies migrate`"
    assert yet in horsies("check", f"{path}:app", "--live").out
    with psycopg.connect(database_url, autocommit=True) as connection:
        apply_migrations(connection)
        assert live_notes(PostgresConfig(database_url=database_url)) == []
        newest = schema_version()
        connection.execute("DELETE FROM horsies_migrations WHERE version = %s", (newest,))
    (note,) = live_notes(PostgresConfig(database_url=database_url))
    assert f"lacks 1 migration(s), beginning with {newest:04d} " in note


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


URL = "postgresql://app:hunter2@127.0.0.1:1/shop"


# The database as a URL


def test_an_application_takes_a_url() -> None:
    assert Horsies(URL).config == AppConfig(broker=PostgresConfig(database_url=URL))


@pytest.mark.parametrize("url", ["", "mysql://localhost/shop"])
def test_a_wrong_url_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", URL)
    with pytest.raises(ConfigurationError) as refused:
        Horsies(url)
    assert refused.value.code is ErrorCode.BROKER_INVALID_URL


@pytest.mark.parametrize("config", [PostgresConfig(database_url=URL), {"database_url": URL}, 7])
def test_other_configurations_are_refused_by_type(config: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Horsies(cast("Any", config))
    kind = type(config).__name__
    assert refused.value.message == f"Horsies takes an AppConfig or a database URL, not {kind}."
    assert "hunter2" not in str(refused.value)


# Functions that are not registered as meant


def test_a_decorator_without_a_name_registers_the_function() -> None:
    app = Horsies(URL)

    @app.task
    def send_invoice(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    assert app.list_tasks() == [f"{__name__}.send_invoice"]
    assert send_invoice(7).ok == 7


@pytest.mark.parametrize("name", ["self", "cls"])
def test_a_method_is_refused(name: str) -> None:
    app, names = Horsies(URL), {"TaskResult": TaskResult, "TaskError": TaskError}
    source = f"""
class Mailer:
    @app.task("greet")
    def greet({name}, to: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=to)
"""
    with pytest.raises(TaskDefinitionError) as refused:
        exec(source, {"app": app, "__name__": __name__, **names})
    assert refused.value.message == "A method cannot be a task: 'Mailer.greet' takes an object."
    assert app.list_tasks() == []


def test_a_function_in_a_class_and_a_parameter_named_self_are_accepted() -> None:
    app = Horsies(URL)

    class Mailer:
        @staticmethod
        @app.task("greet")
        def greet(to: str) -> TaskResult[str, TaskError]:
            return TaskResult(ok=to)

    @app.task("odd")
    def odd(self: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=self)

    assert Mailer.greet("ada").ok == "ada"
    assert odd(1).ok == 1


# Error codes that no retry policy can list


def test_a_code_that_cannot_be_retried_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    app = Horsies(URL)

    @app.task("pay")
    def pay(code: str) -> TaskResult[int, TaskError]:
        return TaskResult(err=TaskError(error_code=code))

    wrong = f"no money {new_id()}"
    for code in (wrong, "NO_MONEY", wrong):
        assert pay(code).err_value.error_code == code
    assert [(one.levelname, one.getMessage()) for one in caplog.records] == [
        (
            "WARNING",
            f"no retry policy can list an error of task 'pay': the error code {wrong!r} must be an upper "
            "case name such as GATEWAY_DOWN (letters A-Z, digits and _, starting with a letter)",
        )
    ]


# The number of children


@pytest.fixture
def one_cpu() -> Iterator[None]:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    yield
    os.sched_setaffinity(0, before)


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no affinity")
@pytest.mark.usefixtures("one_cpu")
def test_children_are_not_started_for_cpus_that_others_use(tmp_path: Path) -> None:
    assert usable_cpus() == 1
    assert usable_cpus(tmp_path / "missing", tmp_path) == 1


@pytest.mark.parametrize(
    ("group", "top", "service", "expected"),
    [
        ("0::/", "150000 100000", None, 2),
        ("0::/", "10000 100000", None, 1),
        ("0::/", "max 100000", None, 64),
        ("0::/", "9900000 100000", None, 64),
        ("1:cpu:/\n0::/jobs/horsies", None, "300000 100000", 3),
        ("0::/jobs/horsies", "200000 100000", "300000 100000", 2),
        ("0::/jobs/horsies", "200000 100000", "max 100000", 2),
        ("1:cpu:/jobs/horsies", None, "100000 100000", 64),
        ("0::/", "nonsense", None, 64),
        ("0::/../..", "100000 100000", None, 1),
    ],
)
def test_the_quota_of_the_cgroup_limits_the_children(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    top: str | None,
    service: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text(f"{group}\n")
    (root / "jobs" / "horsies").mkdir(parents=True)
    for folder, quota in ((root, top), (root / "jobs" / "horsies", service)):
        if quota is not None:
            (folder / "cpu.max").write_text(f"{quota}\n")
    assert usable_cpus(own, root) == expected


@pytest.mark.parametrize(
    ("group", "top", "service", "expected"),
    [
        ("4:cpu,cpuacct:/", "150000", None, 2),
        ("4:cpuacct,cpu:/", "10000", None, 1),
        ("4:cpu,cpuacct:/", "-1", None, 64),
        ("4:cpu,cpuacct:/", "nonsense", None, 64),
        ("3:memory:/\n4:cpu:/jobs/horsies\n0::/jobs", None, "300000", 3),
        ("4:cpu:/jobs/horsies", "200000", "300000", 2),
        # A container sees its own group as the top one, whatever its name on the host.
        ("4:cpu:/docker/0d7e", "200000", None, 2),
        ("3:cpuset:/jobs/horsies", None, "100000", 64),
    ],
)
def test_the_quota_of_a_cgroup_of_the_first_version_limits_the_children(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    top: str | None,
    service: str | None,
    expected: int,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: set(range(64)), raising=False)
    own, root = tmp_path / "cgroup", tmp_path / "fs"
    own.write_text(f"{group}\n")
    (root / "cpu" / "jobs" / "horsies").mkdir(parents=True)
    for folder, quota in ((root / "cpu", top), (root / "cpu" / "jobs" / "horsies", service)):
        (folder / "cpu.cfs_period_us").write_text("100000\n")
        if quota is not None:
            (folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
    assert usable_cpus(own, root) == expected


@pytest.mark.parametrize("value", ["false", "no", ""])
def test_a_switch_for_migrations_that_is_neither_0_nor_1_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HORSIES_MIGRATE", value)
    with pytest.raises(ConfigurationError) as refused:
        Horsies("postgresql://localhost/unused")
    assert refused.value.message == f"HORSIES_MIGRATE must be 0 or 1, not {value!r}."


# Failed sends that the caller ignores


def send_failures(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    records = [one for one in caplog.records if one.name == "horsies.send"]
    return [(one.levelname, one.getMessage()) for one in records]


@pytest.mark.parametrize(
    ("secret", "transaction", "suppressed", "level", "code"),
    [
        ("s3cret", None, False, "WARNING", "ENQUEUE_FAILED"),
        (b"s3cret", None, False, "WARNING", "VALIDATION_FAILED"),
        ("s3cret", None, True, "WARNING", "SEND_SUPPRESSED"),
        ("s3cret", object(), False, "ERROR", None),
    ],
    ids=["unreachable", "refused", "suppressed", "transaction"],
)
def test_a_failed_send_is_logged_once_without_arguments(
    call: Call,
    caplog: pytest.LogCaptureFixture,
    secret: object,
    transaction: object,
    suppressed: bool,
    level: str,
    code: str | None,
) -> None:
    app = app_at(URL)
    app.suppress_sends(suppressed)

    @app.task("greet")
    def greet(name: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=name)

    sender = greet.with_options(transaction=transaction)
    for method, argument in (("send", secret), ("send_many", [greet.bind(cast("Any", secret))])):
        caplog.clear()
        error = call(app, sender, method, argument).unwrap_err()
        assert code in (None, error.code.value)
        sentence = f"a send of task 'greet' failed with {error.code.value}"
        assert send_failures(caplog) == [(level, sentence)]
        assert "s3cret" not in caplog.text
    app.close()


@pytest.mark.parametrize(
    ("transaction", "suppressed", "is_adopted", "level"),
    [
        (None, False, True, "WARNING"),
        (None, True, True, "WARNING"),
        (None, False, False, "WARNING"),
        (object(), False, True, "ERROR"),
    ],
    ids=["unreachable", "suppressed", "without an application", "transaction"],
)
def test_a_failed_start_of_a_workflow_is_logged_once_without_arguments(
    call: Call,
    caplog: pytest.LogCaptureFixture,
    transaction: object,
    suppressed: bool,
    is_adopted: bool,
    level: str,
) -> None:
    app = app_at(URL)
    app.suppress_sends(suppressed)

    @app.task("greet")
    def greet(name: str) -> TaskResult[str, TaskError]:
        return TaskResult(ok=name)

    nodes = [greet.node()(name="s3cret")]
    make: Any = app.workflow if is_adopted else WorkflowSpec
    spec = make("welcome", nodes, definition_key="first_hour.welcome")
    for target, method, argument in (
        (spec, "start", None),
        (horsies_package, "start_many", [spec]),
    ):
        caplog.clear()
        error = call(app, target, method, argument, transaction=transaction).unwrap_err()
        sentence = f"a start of workflow 'welcome' failed with {error.code.value}"
        assert send_failures(caplog) == [(level, sentence)]
        assert "s3cret" not in caplog.text
    app.close()


# Several ids in one command


def test_retry_takes_several_ids_and_an_application(
    horsies: Run, database: Database, tmp_path: Path, process_url: str
) -> None:
    app = tmp_path / "several.py"
    app.write_text(
        "from horsies import AppConfig, Horsies, PostgresConfig\n"
        f"app = Horsies(AppConfig(broker=PostgresConfig(database_url={process_url!r})))\n"
    )
    old = [add_task(database, status="FAILED") for _ in range(2)]
    for arguments in (old, [*old, str(app)]):
        finished = horsies("retry", *arguments)
        assert (finished.code, finished.err) == (0, "")
        lines = finished.out.splitlines()
        assert [line.split()[1] for line in lines] == old
        new = [line.split()[-1].rstrip(".") for line in lines]
        assert [row_of(database, one)["retried_from_task_id"] for one in new] == old


def test_cancel_reports_each_task_and_the_worst_exit_code(horsies: Run, database: Database) -> None:
    waiting, ended, unknown = add_task(database), add_task(database, status="FAILED"), new_id()
    finished = horsies("cancel", unknown, ended, waiting)
    assert finished.code == 1
    assert finished.out == f"Task {waiting} was PENDING; it is cancelled.\n"
    assert finished.err == (
        f"error: There is no task {unknown}.\n"
        f"error: Task {ended} is FAILED and can no longer be cancelled.\n"
    )
    assert horsies("cancel", unknown, new_id()).code == 4


def test_several_changes_are_one_json_document(horsies: Run, database: Database) -> None:
    ids = [add_task(database) for _ in range(2)]
    document = json.loads(horsies("cancel", *ids, new_id(), "--json").out)
    assert document == {"tasks": [{"task_id": one, "was_status": "PENDING"} for one in ids]}


@pytest.mark.parametrize("typo", ["01a1dd42", "01a1dd42-fbaa-74ac-a8e3-bab50b3dfa8", "a-b"])
@pytest.mark.parametrize("command", ["cancel", "retry"])
def test_an_id_that_is_not_one_is_refused_before_any_change(
    horsies: Run, database: Database, command: str, typo: str
) -> None:
    task_id = add_task(database, status="PENDING" if command == "cancel" else "FAILED")
    finished = horsies(command, task_id, typo)
    assert (finished.code, finished.out) == (4, "")
    assert finished.err == f"error: {typo!r} is not a task id; no task was changed.\n"
    assert database.execute(
        "SELECT count(*), max(cancel_requested_at) FROM horsies_tasks"
    ).fetchone() == (1, None)


# A ping without an answer


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


# Tracebacks


def test_a_traceback_is_printed_line_by_line(horsies: Run, database: Database) -> None:
    lines = [
        "Traceback (most recent call last):",
        '  File "a.py", line 3, in f',
        "OSError: \x1b[2J",
    ]
    exception = {"type": "OSError", "message": "x", "traceback": "\n".join(lines) + "\n"}
    result = {"err": {"error_code": "BROKE", "exception": exception}}
    task_id = add_task(database, status="FAILED", result=json.dumps(result))
    shown = horsies("show", task_id, "--payload").out.splitlines()
    start = next(index for index, line in enumerate(shown) if line.startswith("traceback"))
    column = shown[start].index("Traceback")
    assert [line[column:] for line in shown[start : start + 3]] == [
        *lines[:2],
        "OSError: \\x1b[2J",
    ]
    assert "\\n" not in "".join(shown)
    assert "".join(shown).count("Traceback") == 1
    assert "BROKE" in "".join(shown)
    assert json.loads(horsies("show", task_id, "--payload", "--json").out)["result"] == result


@pytest.mark.parametrize(
    "result", ['{"ok":{"exception":{"traceback":"x"}}}', '{"err":{"exception":null}}', "[1]", "no"]
)
def test_other_results_are_printed_as_they_are_stored(
    horsies: Run, database: Database, result: str
) -> None:
    shown = horsies("show", add_task(database, result=result), "--payload").out
    assert result in shown
    assert "\ntraceback" not in shown


# Delayed tasks


def test_a_delayed_task_is_due_in_the_future_not_enqueued(horsies: Run, database: Database) -> None:
    delayed = add_task(database, enqueued_at=ago(-3_599))
    listed = horsies("tasks", "--status", "pending").out
    assert re.search(r"work on default\n +due in 59m\d\ds\n", listed)
    shown = horsies("show", delayed).out
    assert re.search(r"\ndue +in 59m\d\ds, at 20\S+ \S+ UTC\n", shown)
    assert "enqueued" not in shown
    document = json.loads(horsies("show", delayed, "--json").out)
    assert "enqueued_at" in document
    assert "age_seconds" not in document


def test_a_task_that_waits_for_an_event_has_no_due_time(horsies: Run, database: Database) -> None:
    parked = add_task(database, enqueued_at=sql.SQL("horsies_never_v1()"))
    assert "due after an event" in horsies("tasks").out
    assert "after an event" in horsies("show", parked).out
    assert "9999" not in horsies("show", parked).out


@pytest.mark.parametrize(("status", "seconds"), [("PENDING", 60), ("CANCELLED", -3_600)])
def test_tasks_that_are_due_or_ended_were_enqueued(
    horsies: Run, database: Database, status: str, seconds: float
) -> None:
    task_id = add_task(database, status=status, enqueued_at=ago(seconds))
    assert "due" not in horsies("tasks").out
    shown = horsies("show", task_id).out
    assert "\nenqueued" in shown
    assert "\ndue" not in shown


# Why a task does not run


def reasons(horsies: Run, task_id: str) -> list[str]:
    document = json.loads(horsies("show", task_id, "--json").out)
    text = " ".join(horsies("show", task_id).out.split())
    assert all(reason in text for reason in document["waits_because"])
    assert ("waits because" in text) == bool(document["waits_because"])
    found: list[str] = document["waits_because"]
    return found


def test_show_names_the_obstacles_of_a_waiting_task(horsies: Run, database: Database) -> None:
    task_id = add_task(database, task_name="resize", queue_name="mail")
    assert reasons(horsies, task_id) == [
        "No live worker serves queue 'mail'; no worker is running."
    ]
    known = '{"tasks": {"other": "1"}}'
    worker = add_worker(database, queues=["mail"], known_tasks=known)
    database.execute(
        "INSERT INTO horsies_queues (queue_name, paused_at) VALUES ('mail', now() - interval '90 min')"
    )
    assert reasons(horsies, task_id) == [
        "Queue 'mail' was paused 1 h 30 min ago.",
        "1 live worker serves queue 'mail', but it does not know task 'resize'; it fails with "
        "WORKER_RESOLUTION_ERROR.",
    ]
    database.execute("UPDATE horsies_queues SET paused_at = NULL")
    database.execute("UPDATE horsies_workers SET known_tasks = NULL")
    assert reasons(horsies, task_id) == []
    database.execute(
        "INSERT INTO horsies_blocked (id, kind, status, generation, action, error, worker_id) "
        "SELECT id, 'task', status, generation, 'claim', '22012 division by zero', %s "
        "FROM horsies_tasks",
        (worker,),
    )
    assert reasons(horsies, task_id) == [
        "The database refuses to claim it: 22012 division by zero."
    ]
    database.execute("UPDATE horsies_tasks SET status = 'CANCELLED'")
    assert reasons(horsies, task_id) == []


def test_a_task_that_no_process_ran_is_shown_without_a_pid(
    horsies: Run, database: Database
) -> None:
    task_id = add_task(database, status="FAILED", worker_hostname="web-1")
    lines = horsies("show", task_id).out.splitlines()
    assert [line.split() for line in lines if line.startswith("process")] == [["process", "web-1"]]
