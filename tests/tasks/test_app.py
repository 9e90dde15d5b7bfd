"""The application object: where tasks are found, what it is called, and what it hands out."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from horsies.app import Horsies
from horsies.config.app import AppConfig
from horsies.config.postgres import PostgresConfig
from horsies.errors import ConfigurationError, ErrorCode

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
