"""Mistakes in an application, each with the sentence in which `horsies check` answers it."""

from __future__ import annotations

import sys
import textwrap
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

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
