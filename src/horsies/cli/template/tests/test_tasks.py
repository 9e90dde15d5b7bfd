"""Tests of the task functions and of the application; none of them needs a database."""

import pytest
from horsies import TaskFailed

from project_name.app import app
from project_name.tasks import add_up, fetch_price


def test_an_article_has_a_price() -> None:
    assert fetch_price("saddle") == 90


def test_an_unknown_article_is_refused_by_a_code() -> None:
    with pytest.raises(TaskFailed, match="unicorn") as caught:
        fetch_price("unicorn")
    assert caught.value.code == "UNKNOWN_ARTICLE"


def test_prices_are_added_up() -> None:
    assert add_up([5, 7]) == 12


def test_the_application_is_valid() -> None:
    assert app.check() == []
