"""Applications as a newcomer writes them: a URL, bare decorators, methods."""

from __future__ import annotations

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


def test_a_decorator_without_a_name_is_refused() -> None:
    app = Horsies(URL)

    def send_invoice(number: int) -> TaskResult[int, TaskError]:
        return TaskResult(ok=number)

    with pytest.raises(TaskDefinitionError) as refused:
        cast("Any", app.task)(send_invoice)
    assert refused.value.message == "@app.task needs the name of the task."
    assert refused.value.help_text == 'write @app.task("send_invoice")'
    location = refused.value.location
    assert location is not None
    assert location.file == __file__
    assert location.line == send_invoice.__code__.co_firstlineno
    assert app.list_tasks() == []
