"""Mistakes of newcomers: each is made on purpose, and the sentence that answers it is held here.

Every case fails when its mistake stays silent or is answered in other words. Mistakes that need a running
worker, another role or a newer schema have their cases in tests/e2e/test_roles.py, tests/worker and
tests/db/test_migrate.py; those of workflows in test_habits.py.
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import textwrap
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import psycopg
import pytest

from horsies import Horsies
from horsies.current_task import CurrentTask, set_running_task
from horsies.db.errors import describe
from horsies.tasks import waiters
from horsies.worker.child.execute import execute
from horsies.worker.protocol import Assignment
from tests.support.applications import app_at
from tests.support.command_line import Run

Write: TypeAlias = Callable[..., str]

HEADER = """
import os
from typing import Any
from horsies import *

app = Horsies(os.environ["DATABASE_URL"])


@app.task("add")
def add(a: int, b: int) -> int:
    return a + b
"""
SCHEDULED = """
import os
from horsies import *

schedule = TaskSchedule(name="night", task_name={task!r}, pattern={cron})
app = Horsies(AppConfig(
    broker=PostgresConfig(database_url=os.environ["DATABASE_URL"]),
    schedule=ScheduleConfig(schedules=[schedule]),
))


@app.task("add")
def add() -> int:
    return 1
"""


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Write a module into an empty project and return its name; its import is undone."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def write(body: str, header: str = HEADER) -> str:
        name = f"shop_{uuid.uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(header + textwrap.dedent(body).replace("SHOP", name))
        return name

    yield write
    for name in set(sys.modules) - before:
        if name.startswith("shop_"):
            del sys.modules[name]


# Applications that `horsies check` refuses: a module, and a part of the answer.
DEFINED_WRONG = {
    "no return annotation": (
        "@app.task('x')\ndef x(a: int):\n    return 1\n",
        "Task function 'x' has no return annotation.",
    ),
    "lambda": (
        "app.task('x')(lambda a: a)\n",
        "A lambda cannot be a task: it has neither a name nor annotations.",
    ),
    "class": (
        "@app.task('x')\nclass X:\n    pass\n",
        "A class cannot be a task: 'X'.",
    ),
    "method": (
        "class Shop:\n    @app.task('x')\n    def x(self, a: int) -> int:\n        return a\n",
        "A method cannot be a task: 'Shop.x' takes an object.",
    ),
    "generator": (
        "@app.task('x')\ndef x() -> int:\n    yield 1\n",
        "collect the values and return a list",
    ),
    "another decorator below": (
        "import functools\n"
        "def logged(f):\n    return functools.wraps(f)(lambda *a: f(*a))\n"
        "@app.task('x')\n@logged\ndef x(a: int) -> int:\n    return a\n",
        "@app.task must be the innermost decorator",
    ),
    "name used twice": (
        "@app.task('add')\ndef x() -> int:\n    return 1\n",
        "The task name 'add' is used twice.",
    ),
    "queue without custom mode": (
        "@app.task('x', queue_name='mail')\ndef x() -> int:\n    return 1\n",
        "leave queue_name out, or configure queue_mode=QueueMode.CUSTOM",
    ),
    "misspelt queue": (
        "app = Horsies(AppConfig(broker=PostgresConfig(database_url=os.environ['DATABASE_URL']),\n"
        "    queue_mode=QueueMode.CUSTOM, custom_queues=[CustomQueueConfig(name='mail')]))\n"
        "@app.task('x', queue_name='mial')\ndef x() -> int:\n    return 1\n",
        "choose one of: mail",
    ),
    "options of other queues": (
        "@app.task('x', retries=3, timeout=5)\ndef x() -> int:\n    return 1\n",
        "@app.task has no option 'retries' (write retry_policy=), 'timeout' (write timeout_ms=).",
    ),
    "exception class as text": (
        "RetryPolicy.fixed([1], auto_retry_for=['ConnectionError'])\n",
        "the entry 'ConnectionError' looks like an exception class; list the class itself, without quotes",
    ),
    "code that nothing produces": (
        "@app.task('x', retry_policy=RetryPolicy.fixed([1], auto_retry_for=['BANK_BUZY']))\n"
        "def x() -> TaskResult[int, TaskError]:\n"
        "    return TaskResult(err=TaskError(error_code='BANK_BUSY'))\n",
        "auto_retry_for lists BANK_BUZY, but no exception mapper, default code or function produces it",
    ),
    "parameter that cannot be stored": (
        "class Order: pass\n@app.task('x')\ndef x(order: Order) -> int:\n    return 1\n",
        "'order' is annotated with Order, which cannot be stored",
    ),
    "annotation that exists for type checkers only": (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from decimal import Decimal\n"
        "@app.task('x')\ndef x(price: 'Decimal') -> int:\n    return 1\n",
        "import or define the names they use at module level",
    ),
    "circular import": (
        "from SHOP import nothing_yet\n",
        "name the module in discover_tasks, which imports it after the application exists",
    ),
    "misspelt module to discover": (
        "app.discover_tasks(['nope'])\n",
        "There is no module 'nope'.",
    ),
    "missing setting of the module's own": (
        "os.environ['STRIPE_KEY']\n",
        "failed with KeyError: 'STRIPE_KEY'",
    ),
    "two applications": (
        "other = Horsies(os.environ['DATABASE_URL'])\n",
        "holds 2 Horsies applications.",
    ),
    "send while the module is imported": (
        "add.send(1, 2)\n",
        "a send of task 'add' failed with SEND_SUPPRESSED",
    ),
}


@pytest.mark.parametrize("mistake", DEFINED_WRONG)
def test_a_wrong_definition_is_answered_by_check(
    mistake: str, write: Write, horsies: Run, caplog: pytest.LogCaptureFixture
) -> None:
    body, answer = DEFINED_WRONG[mistake]
    checked = horsies("check", f"{write(body)}.py")
    assert answer in checked.out + checked.err + caplog.text
    assert "errors.pydantic.dev" not in checked.err


# The same, written as Celery's users write it: accepted.
@pytest.mark.parametrize(
    "body",
    [
        "@app.task\ndef x(a: int) -> int:\n    return a\n",
        "@app.task()\ndef x(a: int) -> int:\n    return a\n",
        "@app.task('x')\ndef x(a) -> int:\n    return a\n",
        "@app.task('x', retry_policy=RetryPolicy.fixed([1], auto_retry_for=[ConnectionError]))\n"
        "def x() -> int:\n    return 1\n",
        "@app.task('x', exception_mapper={OSError: 'AWAY'},\n"
        "    retry_policy=RetryPolicy.fixed([1], auto_retry_for=['AWAY']))\n"
        "def x() -> int:\n    return 1\n",
    ],
    ids=["bare decorator", "empty decorator", "no annotations", "exception class", "base class"],
)
def test_habits_that_were_once_mistakes_are_accepted(body: str, write: Write, horsies: Run) -> None:
    checked = horsies("check", f"{write(body)}.py")
    assert (checked.code, checked.err) == (0, "")
    assert "2 task(s) registered" in checked.out


@pytest.mark.parametrize(
    ("task", "cron", "answer"),
    [
        ("add", "CronSchedule.parse('61 * * * *')", "bad minute '61'"),
        (
            "ad",
            "CronSchedule.parse('5 * * * *')",
            "there is no task 'ad'; did you mean 'add'?",
        ),
        ("add", "CronSchedule(expression='* * * * *')", "CronSchedule needs the field 'minute'."),
    ],
    ids=["minute out of range", "misspelt task", "without parse"],
)
def test_a_wrong_schedule_is_answered_by_check(
    task: str, cron: str, answer: str, write: Write, horsies: Run
) -> None:
    checked = horsies("check", f"{write('', SCHEDULED.format(task=task, cron=cron))}.py")
    assert checked.code == 1
    assert answer in checked.err


@pytest.mark.parametrize(
    ("locator", "answer"),
    [
        ("goood.py", "There is no file 'goood.py'."),
        ("{name}:ap", "did you mean {name}:app?"),
        ("{name}.py:add", "is of type TaskFunction, not Horsies."),
    ],
)
def test_a_wrong_locator_is_answered(locator: str, answer: str, write: Write, horsies: Run) -> None:
    name = write("")
    checked = horsies("check", locator.format(name=name))
    assert checked.code == 1
    assert answer.format(name=name) in checked.err


def test_an_application_without_a_database_is_told_the_variable(
    write: Write, horsies: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL")
    name = write("", "from horsies import Horsies\napp = Horsies()\n")
    assert "set HORSIES_DATABASE_URL (or DATABASE_URL)" in horsies("check", f"{name}.py").err


WRONG_VALUES: dict[str, tuple[str, str]] = {
    "misspelt field": (
        "AppConfig(broker=BROKER, brokr=1)",
        "AppConfig has no field 'brokr'; did you mean broker?",
    ),
    "unknown field": (
        "CustomQueueConfig(name='mail', colour=1)",
        "CustomQueueConfig has no field 'colour'; the fields are name, priority, max_concurrency",
    ),
    "field left out": (
        "PostgresConfig()",
        "PostgresConfig needs the field 'database_url'.",
    ),
    "field without its name": (
        "PostgresConfig('postgresql://u:hunter2@h/x')",
        "PostgresConfig takes its fields by name; write PostgresConfig(database_url=...).",
    ),
    "address for a configuration": (
        "AppConfig(broker='postgresql://u:hunter2@h/x')",
        "AppConfig.broker must be a PostgresConfig.",
    ),
    "names for queues": (
        "AppConfig(broker=BROKER, queue_mode=QueueMode.CUSTOM, custom_queues=['mail'])",
        "AppConfig.custom_queues[0] must be a CustomQueueConfig.",
    ),
    "negative wait": (
        "RetryPolicy.fixed([-1], auto_retry_for=['X'])",
        "RetryPolicy.intervals[0]: input should be greater than or equal to 0.001.",
    ),
    "other database": ("Horsies('mysql://localhost/x')", "must start with postgresql://"),
    "result without a name": (
        "TaskResult(3)",
        "write TaskResult(ok=value) or TaskResult(err=error)",
    ),
    "Celery's delay": ("add.delay(1, 2)", "has no attribute 'delay'; write add_two.send(...)"),
    "Celery's apply_async": (
        "add.apply_async((1, 2))",
        "write add_two.with_options(...).send(...)",
    ),
    "Celery's eta": ("add.with_options(eta=1)", "A send has no option 'eta'; write at=;"),
    "truth of a send": ("bool(add.send('one', 2))", "Err is neither true nor false; call is_ok()"),
    "get without unwrap": (
        "add.send(1, 2).get()",
        "'Ok' object has no attribute 'get'; call .unwrap() first",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_VALUES)
def test_a_wrong_value_is_refused_at_once(mistake: str, process_url: str) -> None:
    expression, answer = WRONG_VALUES[mistake]
    names: dict[str, Any] = {}
    exec("from horsies import *", names)
    app = app_at(process_url)
    names.update(add=app.task("add")(add_two), BROKER=app.config.broker)
    with pytest.raises(Exception) as refused:  # noqa: PT011
        eval(expression, names)
    assert answer in str(refused.value)
    assert "errors.pydantic.dev" not in str(refused.value)
    assert "hunter2" not in str(refused.value)
    app.close()


def add_two(a: int, b: int) -> int:
    return a + b


WRONG_CALLS: dict[str, tuple[str, str]] = {
    "wrong type": ("add.send('one', 2)", "a must be int (input should be a valid integer)."),
    "missing": ("add.send(1)", "argument 'b' is missing; the parameters are a, b."),
    "too many": ("add.send(1, 2, 3)", "3 positional arguments are too many"),
    "misspelt": ("add.send(1, bb=2)", "there is no parameter 'bb'; the parameters are a, b."),
    "object": ("keep.send(object())", "holds a value that cannot be written as JSON"),
    "set": ("keep.send({1})", "v is of type set and would come back as list"),
    "Decimal": ("keep.send(Decimal(1))", "v is of type Decimal and would come back as str"),
    "20 MB": ("keep.send('x' * 20_000_000)", "store the data and send a reference to it."),
    "no time zone": (
        "add.with_options(good_until=datetime(2030, 1, 1)).send(1, 2)",
        "write datetime(..., tzinfo=UTC) or call .astimezone()",
    ),
    "other object for a transaction": (
        "add.with_options(transaction=object()).send(1, 2)",
        "transaction= takes an open psycopg, asyncpg, SQLAlchemy or Django connection",
    ),
    "delay until a day": (
        "add.schedule(datetime(2030, 1, 1), 1, 2)",
        "for a point in time write with_options(at=...).send(...)",
    ),
    "delay of a timedelta": (
        "add.schedule(timedelta(1), 1, 2)",
        "write with_options(delay=...).send(...) or pass .total_seconds()",
    ),
}


@pytest.mark.parametrize("mistake", WRONG_CALLS)
def test_a_send_that_cannot_be_stored_is_an_error_and_logged(
    mistake: str, process_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    expression, answer = WRONG_CALLS[mistake]
    app = app_at(process_url)

    @app.task("keep")
    def keep(v: Any) -> int:
        return 1

    names: dict[str, Any] = {"add": app.task("add")(add_two), "keep": keep}
    exec("from datetime import datetime, timedelta\nfrom decimal import Decimal", names)
    with caplog.at_level(logging.WARNING, logger="horsies.send"):
        refused = eval(expression, names).unwrap_err()
    assert answer in refused.message
    assert f"failed with {refused.code.value}" in caplog.text
    app.close()


def test_a_send_inside_an_event_loop_is_reported_once(
    process_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    app = app_at(process_url)
    add = app.task(f"add_{uuid.uuid4().hex}")(add_two)

    async def send_twice() -> None:
        add.send(1, 2)
        add.send(3, 4)

    with caplog.at_level(logging.WARNING, logger="horsies.send"):
        asyncio.run(send_twice())
        add.send(5, 6)
    assert caplog.text.count("blocks the running event loop; write `await add_") == 1
    app.close()


@pytest.mark.usefixtures("connection")  # no worker of another test is on record
def test_waits_that_block_are_answered(process_url: str) -> None:
    app = app_at(process_url)
    handle = app.task("add")(add_two).send(1, 2).unwrap()

    async def wait() -> Any:
        return handle.get()

    refused: Any = asyncio.run(wait()).err_value
    assert "would block the running event loop; write `await handle.get_async()`" in refused.message
    unserved: Any = handle.get(timeout_ms=50).err_value
    assert "no live worker serves its queue 'default'" in unserved.message
    app.close()


RUN_WRONG: dict[str, tuple[str, str]] = {
    "plain value for a TaskResult": (
        "def run() -> TaskResult[int, TaskError]:\n    return 3\n",
        "returned int instead of a TaskResult; return TaskResult(ok=...) or TaskResult(err=...).",
    ),
    "value of another type": (
        "def run() -> int:\n    return 'x'\n",
        "returned a value of type str, but is annotated int",
    ),
    "text for an error": (
        "def run() -> TaskResult[int, TaskError]:\n    return TaskResult(err='text')\n",
        "err must be TaskError",
    ),
    "exception": ("def run() -> int:\n    raise ValueError('no stock')\n", "ValueError: no stock"),
    "exit": ("def run() -> int:\n    raise SystemExit(3)\n", "SystemExit: 3"),
    "parameter added while calls wait": (
        "def run(a: int) -> int:\n    return a\n",
        "keep its old parameters and give new ones a default while calls are pending",
    ),
}


@pytest.mark.parametrize("mistake", RUN_WRONG)
def test_a_mistake_in_a_running_task_is_its_error(mistake: str) -> None:
    body, answer = RUN_WRONG[mistake]
    names: dict[str, Any] = {}
    exec("from horsies import *\n" + body, names)
    app = Horsies("postgresql://localhost/unused")
    app.task("run")(names["run"])
    report = execute(app, Assignment("task-1", 1, "run", 1, "[]", "{}", None))
    assert not report.ok
    assert answer in f"{report.error_message} {json.loads(report.result_json)}"


def test_a_wait_inside_a_task_is_reported_once(
    process_url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiters, "_reported", set())
    app = app_at(process_url)
    add = app.task("add")(add_two)

    @app.task("outer")
    def outer() -> str:
        handle = add.send(1, 2).unwrap()
        return f"{handle.get(timeout_ms=20)} {handle.get(timeout_ms=20)}"

    with caplog.at_level(logging.WARNING, logger="horsies.wait"):
        assignment = Assignment("task-1", 1, "outer", 1, "[]", "{}", None)
        set_running_task(CurrentTask(assignment, time.time()))
        try:
            execute(app, assignment)
        finally:
            set_running_task(None)
    assert caplog.text.count("task 'outer' waits for task") == 1
    app.close()


@pytest.mark.parametrize(
    ("address", "answer"),
    [
        ("postgresql://u:hunter2@127.0.0.1:1/x", "start PostgreSQL or correct host and port"),
        (
            "postgresql://u:hun@ter2@127.0.0.1/x",
            "percent-encode its special characters, '@' as %40",
        ),
        ("mysql://u:hunter2@127.0.0.1/x", "must start with postgresql://"),
    ],
    ids=["wrong port", "@ in the password", "other database"],
)
def test_a_wrong_address_is_answered_without_its_password(
    address: str, answer: str, horsies: Run
) -> None:
    shown = horsies("status", "--database-url", address)
    assert shown.code != 0
    assert answer in " ".join(shown.err.split())
    assert "ter2" not in shown.err


def test_a_missing_database_is_answered(horsies: Run, process_url: str) -> None:
    address = psycopg.conninfo.conninfo_to_dict(process_url)
    url = f"postgresql://{address['user']}@/no_such_database?host={address['host']}"
    assert "create it or correct database_url" in " ".join(
        horsies("status", "--database-url", url).err.split()
    )


def test_a_wrong_password_is_answered() -> None:
    error = psycopg.OperationalError('FATAL:  password authentication failed for user "app"')
    assert "PostgreSQL refused the user name or password; correct database_url" in describe(error)


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("tasks", "--status", "faild"), "'faild' is not one of"),
        (("worker",), "horsies worker needs an application."),
        (("tasks", "--since", "yesterdayish"), "yesterdayish"),
        (("retry", "A", str(uuid.uuid4())), "'A' is not a task id; no task was changed."),
        (("retry", str(uuid.uuid4()), str(uuid.uuid4())), "There is no task"),
        (("show", "01a1e508"), "01a1e508"),
    ],
)
def test_a_typo_on_the_command_line_is_answered(
    arguments: tuple[str, ...], answer: str, horsies: Run
) -> None:
    refused = horsies(*arguments)
    assert refused.code != 0
    assert answer in " ".join(refused.err.replace("│", " ").split())
