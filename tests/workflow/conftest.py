"""Fixtures: both faces of every method, and an application with tasks to build workflows of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest

from horsies.app import Horsies
from tests.monitor.conftest import horsies as horsies
from tests.support.applications import app_at, run_closing
from tests.support.producer_rows import Database
from tests.support.proxy import Proxy
from tests.support.turns import Hands, Tasks, define_tasks

Call: TypeAlias = Callable[..., Any]


@pytest.fixture(params=["sync", "async"])
def call(request: pytest.FixtureRequest) -> Call:
    """Call a method of a specification or handle, or its _async twin; both must behave the same."""

    def through(app: Horsies, target: Any, method: str, *args: Any, **kwargs: Any) -> Any:
        if request.param == "sync":
            return getattr(target, method)(*args, **kwargs)
        return run_closing(app, getattr(target, f"{method}_async")(*args, **kwargs))

    return through


@pytest.fixture
def tasks(app: Horsies) -> Tasks:
    """Tasks of an application on this process's database."""
    return define_tasks(app)


@pytest.fixture
def hands(connection: Database) -> Hands:
    """Does by hand what workers would do."""
    return Hands(connection)


@pytest.fixture
def proxy(process_url: str, connection: Database) -> Iterator[Proxy]:
    """A way to this process's database that can be cut."""
    with Proxy(process_url) as proxy:
        yield proxy


@pytest.fixture
def distant_app(proxy: Proxy) -> Iterator[Horsies]:
    """An application that reaches the database through the proxy."""
    application = app_at(proxy.url)
    yield application
    application.close()
