"""The application object: where it finds tasks, its names, and the objects it returns."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, cast

import pytest

from horsies import (
    AppConfig,
    ConfigurationError,
    ErrorCode,
    Horsies,
    PayloadPolicy,
    PostgresConfig,
    TaskError,
    TaskResult,
)
from horsies.config.app import PayloadConfig
from horsies.task import RegisteredTasks
from tests.support.applications import UNREACHABLE

BROKER = PostgresConfig(database_url="postgresql://app:hunter2@127.0.0.1:1/shop")


@pytest.fixture
def bare_app() -> Horsies:
    return Horsies(AppConfig(broker=BROKER))


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_without_configuration_the_environment_names_the_database(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", "postgresql://localhost/first")
    monkeypatch.setenv("DATABASE_URL", "postgresql://localhost/second")
    assert Horsies().config.broker.database_url == "postgresql://localhost/first"


def test_without_configuration_and_environment_the_error_names_both_remedies(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("HORSIES_DATABASE_URL", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    with pytest.raises(ConfigurationError) as caught:
        Horsies()
    assert "HORSIES_DATABASE_URL" in caught.value.message
    assert "embedded://" in caught.value.message


def test_discovering_only_remembers(bare_app: Horsies) -> None:
    bare_app.discover_tasks(["no.such.module"])
    assert bare_app.get_discovered_task_modules() == ["no.such.module"]


def test_discovering_again_replaces_the_list_and_warns(
    bare_app: Horsies, caplog: pytest.LogCaptureFixture
) -> None:
    bare_app.discover_tasks(["first"])
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        bare_app.discover_tasks(["second"])
    assert bare_app.get_discovered_task_modules() == ["second"]
    assert "replaced" in caplog.text


def test_the_list_of_modules_is_a_copy(bare_app: Horsies) -> None:
    modules = ["first"]
    bare_app.discover_tasks(modules)
    modules.append("second")
    bare_app.get_discovered_task_modules().clear()
    assert bare_app.get_discovered_task_modules() == ["first"]


def test_modules_are_imported_and_a_missing_file_is_skipped_with_a_warning(
    bare_app: Horsies, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    present = write(tmp_path / "present_tasks.py", "")
    missing = str(tmp_path / "missing_tasks.py")
    assert bare_app.import_task_modules([missing, present]) == [present]
    assert "missing_tasks.py" in caplog.text


def test_a_module_that_fails_is_not_skipped(bare_app: Horsies, tmp_path: Path) -> None:
    bare_app.discover_tasks([write(tmp_path / "failing_tasks.py", "raise LookupError('no')")])
    with pytest.raises(LookupError):
        bare_app.import_task_modules()


def test_globs_become_files(bare_app: Horsies, tmp_path: Path) -> None:
    tasks = write(tmp_path / "tasks.py", "")
    write(tmp_path / "test_tasks.py", "")
    assert bare_app.expand_module_globs([f"{tmp_path}/*.py", "shop.tasks"]) == [tasks, "shop.tasks"]


def test_the_broker_is_built_once_and_connects_to_nothing(bare_app: Horsies) -> None:
    assert bare_app.get_broker() is bare_app.get_broker()
    assert bare_app.close().is_ok()


def test_a_broker_that_cannot_be_built_is_a_configuration_error(
    bare_app: Horsies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError("cannot read postgresql://app:hunter2@host/shop")

    monkeypatch.setattr("horsies.tasks.broker.PostgresBroker", broken)
    with pytest.raises(ConfigurationError) as caught:
        bare_app.get_broker()
    assert caught.value.code is ErrorCode.BROKER_INIT_FAILED
    assert "hunter2" not in str(caught.value)


def test_the_role_is_logged(bare_app: Horsies, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "horsies"):
        bare_app.set_role("scheduler")
    assert "scheduler" in caplog.text


def test_the_address_for_other_libraries_is_one_that_libpq_reads() -> None:
    app = Horsies("postgresql+psycopg://app:hunter2@127.0.0.1:1/shop")
    assert app.database_url == "postgresql://app:hunter2@127.0.0.1:1/shop"


def test_an_application_takes_a_url() -> None:
    assert Horsies(UNREACHABLE).config == AppConfig(broker=PostgresConfig(database_url=UNREACHABLE))


@pytest.mark.parametrize("url", ["", "mysql://localhost/shop"])
def test_a_wrong_url_is_refused_at_once(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setenv("HORSIES_DATABASE_URL", UNREACHABLE)
    with pytest.raises(ConfigurationError) as refused:
        Horsies(url)
    assert refused.value.code is ErrorCode.BROKER_INVALID_URL


@pytest.mark.parametrize(
    "config", [PostgresConfig(database_url=UNREACHABLE), {"database_url": UNREACHABLE}, 7]
)
def test_other_configurations_are_refused_by_type(config: object) -> None:
    with pytest.raises(ConfigurationError) as refused:
        Horsies(cast("Any", config))
    kind = type(config).__name__
    assert refused.value.message == f"Horsies takes an AppConfig or a database URL, not {kind}."
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize("value", ["false", "no", ""])
def test_a_switch_for_migrations_that_is_neither_0_nor_1_is_refused(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("HORSIES_MIGRATE", value)
    with pytest.raises(ConfigurationError) as refused:
        Horsies("postgresql://localhost/unused")
    assert refused.value.message == f"HORSIES_MIGRATE must be 0 or 1, not {value!r}."


def test_the_tasks_of_an_application_are_a_mapping_and_a_call() -> None:
    app = Horsies(UNREACHABLE)

    @app.task("add")
    def add(a: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=a)

    assert isinstance(app.tasks, RegisteredTasks)
    assert app.tasks["add"] is add
    assert list(app.tasks.items()) == [("add", add)]
    assert app.tasks() == {"add": add}
    assert "sub" not in app.tasks


def test_other_names_mean_the_same() -> None:
    app = Horsies(UNREACHABLE, run_schema_migrations=False)
    assert app.migrates is Horsies(UNREACHABLE, migrate=False).migrates is False
    assert app.rerun_task == app.retry_task
    assert app.rerun_task_async == app.retry_task_async
    config = AppConfig(
        broker=PostgresConfig(database_url=UNREACHABLE), payload=PayloadPolicy(warn_bytes=7)
    )
    assert config.payload == PayloadConfig(warn_bytes=7)
