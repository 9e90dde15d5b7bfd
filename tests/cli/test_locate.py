from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from horsies.app import Horsies
from horsies.errors import ErrorCode, HorsiesError
from horsies.locate import load_app

APP = """
from horsies.app import Horsies
from horsies.config.app import AppConfig; from horsies.config.postgres import PostgresConfig

app = Horsies(AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/shop")))
"""
SECOND_APP = APP + "\nbackground = Horsies(app.config)\n"


@pytest.fixture(autouse=True)
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    modules = dict(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    yield
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def write(name: str, text: str) -> None:
    file = Path(name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def refusal(locator: str) -> HorsiesError:
    with pytest.raises(HorsiesError) as caught:
        load_app(locator)
    return caught.value


@pytest.mark.parametrize(
    "locator", ["shop.jobs:app", "shop.jobs", "shop/jobs.py:app", "shop/jobs.py", " shop.jobs "]
)
def test_every_form_of_locator_finds_the_application(locator: str) -> None:
    write("shop/__init__.py", "")
    write("shop/jobs.py", APP)
    assert isinstance(load_app(locator), Horsies)


def test_all_forms_lead_to_one_and_the_same_application() -> None:
    write("jobs_once.py", APP)
    found = {id(load_app(each)) for each in ("jobs_once", "jobs_once.py", "./jobs_once.py:app")}
    assert len(found) == 1


def test_the_locator_is_split_at_the_last_colon() -> None:
    write("odd:directory/jobs_colon.py", APP)
    assert isinstance(load_app("odd:directory/jobs_colon.py:app"), Horsies)


def test_one_application_under_two_names_is_one() -> None:
    write("jobs_alias.py", APP + "\nother = app\n")
    assert isinstance(load_app("jobs_alias"), Horsies)


def test_without_a_name_several_applications_are_refused_with_the_choices() -> None:
    write("jobs_two.py", SECOND_APP)
    error = refusal("jobs_two")
    assert error.code is ErrorCode.CLI_INVALID_ARGS
    assert error.help_text == "choose one of: jobs_two:app, jobs_two:background"


def test_a_module_without_an_application_is_refused() -> None:
    write("jobs_none.py", "")
    assert refusal("jobs_none").code is ErrorCode.CLI_INVALID_ARGS
    assert refusal("jobs_none:app").code is ErrorCode.CLI_INVALID_ARGS


def test_a_misspelt_name_is_answered_with_the_right_one() -> None:
    write("jobs_typo.py", SECOND_APP)
    assert refusal("jobs_typo:backgruond").help_text == "did you mean jobs_typo:background?"
    assert "jobs_typo:app, jobs_typo:background" in (refusal("jobs_typo:zzz").help_text or "")


def test_something_else_than_an_application_is_refused_by_its_type() -> None:
    write("jobs_type.py", APP + "\nnumber = 3\n")
    error = refusal("jobs_type:number")
    assert "int" in error.message
    assert error.help_text == "did you mean jobs_type:app?"


@pytest.mark.parametrize("locator", ["", ":", ":app", "shop.jobs:", "  "])
def test_half_a_locator_is_refused(locator: str) -> None:
    assert refusal(locator).code is ErrorCode.CLI_INVALID_ARGS


def test_a_mixture_of_module_and_path_is_refused_with_both_corrections() -> None:
    error = refusal("shop.jobs.py:app")
    assert error.code is ErrorCode.CLI_INVALID_ARGS
    assert "shop.jobs:app" in (error.help_text or "")
    assert "shop/jobs.py:app" in (error.help_text or "")


def test_a_path_without_its_suffix_is_answered_with_the_file() -> None:
    write("area/jobs_suffix.py", APP)
    assert refusal("area/jobs_suffix:app").help_text == "did you mean area/jobs_suffix.py?"


def test_a_missing_module_is_refused() -> None:
    for locator in ("no_such_module_here:app", "missing/jobs.py"):
        error = refusal(locator)
        assert error.code is ErrorCode.CLI_INVALID_ARGS
        assert error.location is None


@pytest.mark.parametrize("locator", [".", "..", ".jobs:app"])
def test_a_relative_module_is_refused(locator: str) -> None:
    error = refusal(locator)
    assert error.code is ErrorCode.CLI_INVALID_ARGS
    assert "is a relative module name" in error.message
    assert error.location is None


def test_a_module_that_raises_is_reported_at_its_line() -> None:
    write("jobs_raise.py", "\n1 / 0\n")
    error = refusal("jobs_raise:app")
    assert error.code is ErrorCode.MODULE_EXEC_ERROR
    assert error.location is not None
    assert error.location.line == 2


def test_a_wrong_configuration_is_reported_as_it_is() -> None:
    write("jobs_config.py", APP.replace("postgresql://", "mysql://"))
    assert refusal("jobs_config").code is ErrorCode.BROKER_INVALID_URL
