"""Applications as a newcomer writes them: a URL, bare decorators, ignored errors, workers without -c."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from horsies import (
    AppConfig,
    ConfigurationError,
    ErrorCode,
    Horsies,
    PostgresConfig,
    TaskDefinitionError,
    TaskError,
    TaskResult,
)
from horsies.ids import new_id
from horsies.worker.cpus import usable_cpus
from tests.support.applications import Call, app_at

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
