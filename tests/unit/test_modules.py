from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from horsies.errors import ConfigurationError, ErrorCode
from horsies.modules import (
    MissingModuleFile,
    add_project_root,
    expand_module_globs,
    import_entry,
    import_problem,
)


@pytest.fixture(autouse=True)
def _imports_undone() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules.keys():
        del sys.modules[name]


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        file = directory / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def problem_of(entry: str) -> ConfigurationError:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any failure is described
        import_entry(entry)
    problem = import_problem(entry, caught.value)
    assert isinstance(problem, ConfigurationError)
    return problem


def test_globs_become_absolute_files_in_a_stable_order(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"shop/b/tasks.py": "", "shop/a/tasks.py": "", "shop/a/models.py": ""})
    monkeypatch.chdir(tmp_path)
    assert expand_module_globs(["shop/**/tasks.py"]) == [
        str(tmp_path / "shop/a/tasks.py"),
        str(tmp_path / "shop/b/tasks.py"),
    ]


def test_a_file_matched_twice_is_listed_once_and_dotted_names_pass_through(tmp_path: Path) -> None:
    write(tmp_path, {"tasks.py": ""})
    pattern = f"{tmp_path}/*.py"
    expanded = expand_module_globs(["shop.tasks", pattern, f"{tmp_path}/tasks.py", "shop.tasks"])
    assert expanded == ["shop.tasks", str(tmp_path / "tasks.py")]


def test_directories_other_files_and_missing_files_are_dropped(tmp_path: Path) -> None:
    write(tmp_path, {"notes.txt": "", "deep.py/inner.txt": ""})
    patterns = [f"{tmp_path}/*", f"{tmp_path}/missing.py", str(tmp_path)]
    assert expand_module_globs(patterns) == []


@pytest.mark.parametrize("exclude", [None, []])
def test_test_files_are_left_out_unless_excludes_are_given(
    tmp_path: Path, exclude: list[str] | None
) -> None:
    names = ["conftest.py", "tasks.py", "tasks_test.py", "test_tasks.py"]
    write(tmp_path, dict.fromkeys(names, ""))
    assert expand_module_globs([f"{tmp_path}/*.py"], exclude) == [str(tmp_path / "tasks.py")]
    own = expand_module_globs([f"{tmp_path}/*.py"], ["tasks.py"])
    assert own == [str(tmp_path / name) for name in names if name != "tasks.py"]


def test_an_exclude_with_a_directory_is_matched_against_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"legacy/tasks.py": "", "test_area/tasks.py": ""})
    monkeypatch.chdir(tmp_path)
    assert expand_module_globs(["**/*.py"], ["legacy/*", "test_*.py"]) == [
        str(tmp_path / "test_area/tasks.py")
    ]


def test_a_plain_file_is_the_module_that_others_import_by_name(tmp_path: Path) -> None:
    write(tmp_path, {"plain_jobs.py": "", "plain_user.py": "import plain_jobs as jobs"})
    module = import_entry(str(tmp_path / "plain_jobs.py"))
    user = import_entry(str(tmp_path / "plain_user.py"))
    assert module.__name__ == "plain_jobs"
    assert user.jobs is module


def test_a_file_in_a_package_gets_its_dotted_name_and_relative_imports_work(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "parcel/__init__.py": "",
            "parcel/inner/__init__.py": "",
            "parcel/inner/jobs.py": "from ..names import NAME",
            "parcel/names.py": "NAME = 'parcel'",
        },
    )
    module = import_entry(str(tmp_path / "parcel/inner/jobs.py"))
    assert module.__name__ == "parcel.inner.jobs"
    assert module.NAME == "parcel"
    assert sys.path[0] == str(tmp_path)


def test_a_package_can_be_named_by_its_init_file(tmp_path: Path) -> None:
    write(tmp_path, {"wrapped/__init__.py": "from . import part", "wrapped/part.py": ""})
    assert import_entry(str(tmp_path / "wrapped/__init__.py")).__name__ == "wrapped"


def test_two_files_of_one_name_are_two_modules(tmp_path: Path) -> None:
    write(tmp_path, {"one/same_name.py": "WHO = 1", "two/same_name.py": "WHO = 2"})
    first = import_entry(str(tmp_path / "one/same_name.py"))
    second = import_entry(str(tmp_path / "two/same_name.py"))
    assert (first.WHO, second.WHO) == (1, 2)
    assert second.__name__.startswith("horsies_file_")
    assert second.__name__.endswith("_same_name")
    assert sys.modules[second.__name__] is second
    assert import_entry(str(tmp_path / "two/same_name.py")) is second


def test_a_file_beside_a_package_of_the_same_name_is_still_loaded_itself(tmp_path: Path) -> None:
    write(tmp_path, {"twin.py": "WHO = 'file'", "twin/__init__.py": "WHO = 'package'"})
    assert import_entry(str(tmp_path / "twin.py")).WHO == "file"


def test_a_file_named_like_the_standard_library_leaves_the_library_in_place(tmp_path: Path) -> None:
    # A module of the standard library that nothing here has imported yet.
    write(tmp_path, {"this.py": "MINE = True", "this_sibling.py": ""})
    sys.modules.pop("this", None)
    module = import_entry(str(tmp_path / "this.py"))
    assert module.MINE
    assert module.__name__.startswith("horsies_file_")
    assert sys.path[-1] == str(tmp_path)


def test_a_file_whose_name_is_no_identifier_can_be_imported(tmp_path: Path) -> None:
    write(tmp_path, {"my-jobs.py": "WHO = 'me'"})
    assert import_entry(str(tmp_path / "my-jobs.py")).WHO == "me"


def test_a_file_imported_under_another_name_is_reused(tmp_path: Path) -> None:
    write(tmp_path, {"known.py": "raise RuntimeError('run twice')"})
    other = ModuleType("known_elsewhere")
    other.__file__ = str(tmp_path / "known.py")
    sys.modules["known_elsewhere"] = other
    assert import_entry(str(tmp_path / "known.py")) is other


def test_what_only_claims_to_be_a_module_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, {"jobs.py": "WHO = 'me'"})
    # A library of cffi is one: in sys.modules, and no module.
    impostor: Any = type("Library", (), {"__class__": ModuleType})()
    assert isinstance(impostor, ModuleType)
    monkeypatch.setitem(sys.modules, "impostor", impostor)
    assert import_entry(str(tmp_path / "jobs.py")).WHO == "me"


def test_a_script_that_discovers_itself_is_not_run_twice_except_in_a_child(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    write(
        tmp_path,
        {
            "script.py": "import sys\nfrom horsies.modules import import_entry\n"
            "print(__name__)\n"
            "if __name__ == '__main__':\n    print(import_entry(__file__).__name__)\n"
        },
    )
    assert run_python(str(script)) == ["__main__", "__main__"]
    in_child = run_python(str(script), HORSIES_CHILD_PROCESS="1")
    assert in_child == ["__main__", "script", "script"]


def run_python(*arguments: str, **environment: str) -> list[str]:
    finished = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, **environment},
    )
    return finished.stdout.split()


def test_a_failed_import_by_file_leaves_nothing_behind_and_passes_through(tmp_path: Path) -> None:
    write(tmp_path, {"one/fails_once.py": "", "two/fails_once.py": "raise LookupError('no')"})
    import_entry(str(tmp_path / "one/fails_once.py"))
    # Programs that other tests have imported by file stay in ``sys.modules``.
    modules = set(sys.modules)
    with pytest.raises(LookupError):
        import_entry(str(tmp_path / "two/fails_once.py"))
    assert set(sys.modules) == modules


def test_a_missing_file_has_an_error_of_its_own(tmp_path: Path) -> None:
    with pytest.raises(MissingModuleFile):
        import_entry(str(tmp_path / "missing.py"))
    with pytest.raises(MissingModuleFile):
        import_entry(f"{tmp_path}/")


def test_a_missing_file_or_module_is_reported_without_a_source_line() -> None:
    for entry in ("missing/tasks.py", "no_such_module_here", "no_such_module_here.tasks"):
        problem = problem_of(entry)
        assert problem.code is ErrorCode.CLI_INVALID_ARGS
        assert problem.location is None
        assert problem.help_text


def test_a_failing_import_inside_a_module_points_at_the_import_line(tmp_path: Path) -> None:
    write(tmp_path, {"needy.py": "import os\nimport not_installed_anywhere\n"})
    problem = problem_of(str(tmp_path / "needy.py"))
    assert problem.code is ErrorCode.CLI_INVALID_ARGS
    assert "not_installed_anywhere" in problem.message
    assert str(problem.location) == f"{tmp_path / 'needy.py'}:2"


def test_an_exception_points_at_the_users_line_even_when_a_library_raised_it(
    tmp_path: Path,
) -> None:
    write(tmp_path, {"broken.py": "import os\n\nURL = os.environ['NOT_SET_ANYWHERE']\n"})
    problem = problem_of(str(tmp_path / "broken.py"))
    assert problem.code is ErrorCode.MODULE_EXEC_ERROR
    assert "KeyError" in problem.message
    assert str(problem.location) == f"{tmp_path / 'broken.py'}:3"
    assert isinstance(problem.__cause__, KeyError)


def test_a_syntax_error_points_at_its_line(tmp_path: Path) -> None:
    write(tmp_path, {"garbled.py": "fine = 1\ndef (:\n"})
    problem = problem_of(str(tmp_path / "garbled.py"))
    assert problem.code is ErrorCode.MODULE_EXEC_ERROR
    assert str(problem.location) == f"{tmp_path / 'garbled.py'}:2"
    assert problem.message.endswith("SyntaxError: invalid syntax")


def test_a_module_that_exits_is_reported_like_one_that_raises(tmp_path: Path) -> None:
    write(tmp_path, {"leaving.py": "import sys\nsys.exit(0)\n"})
    assert problem_of(str(tmp_path / "leaving.py")).code is ErrorCode.MODULE_EXEC_ERROR


def test_a_password_in_the_exception_is_not_shown(tmp_path: Path) -> None:
    text = "cannot reach postgresql://app:hunter2@db/shop\\nsecond line, password=hunter2"
    write(tmp_path, {"leaking.py": f"raise RuntimeError('{text}')"})
    problem = problem_of(str(tmp_path / "leaking.py"))
    problem.location = None
    assert "hunter2" not in str(problem)
    assert "second line" in str(problem)


def test_an_error_of_ours_is_its_own_description() -> None:
    error = ConfigurationError("wrong", code=ErrorCode.CONFIG_INVALID_PREFETCH)
    assert import_problem("shop.tasks", error) is error


def test_the_working_directory_becomes_importable_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    add_project_root()
    add_project_root()
    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


@pytest.mark.parametrize(("files", "joins"), [([], False), (["pyproject.toml"], True)])
def test_in_safe_path_mode_only_a_project_directory_becomes_importable(
    tmp_path: Path, files: list[str], joins: bool
) -> None:
    write(tmp_path, dict.fromkeys(files, ""))
    script = (
        "import os, sys; from horsies.modules import add_project_root; "
        f"os.chdir({str(tmp_path)!r}); add_project_root(); print(os.getcwd() in sys.path)"
    )
    assert run_python("-P", "-c", script) == [str(joins)]


# The name of a module in every process

TASKS = """
from horsies import Horsies

app = Horsies("postgresql://localhost/unused")

@app.task
def add(a: int, b: int) -> int:
    return a + b

if __name__ == "__main__":
    print(*app.list_tasks())
"""
IMPORTED = "import sys; from {} import app; print(*app.list_tasks())"
LOADED = "from horsies.locate import load_app; print(*load_app({!r}).list_tasks())"


@pytest.mark.slow
@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "directory", "arguments", "name"),
    [
        ("tasks.py", ".", ["tasks.py"], "tasks.add"),
        ("tasks.py", ".", ["-c", IMPORTED.format("tasks")], "tasks.add"),
        ("tasks.py", ".", ["-c", LOADED.format("tasks.py")], "tasks.add"),
        ("my-tasks.py", ".", ["-c", LOADED.format("my-tasks.py")], "my-tasks.add"),
        ("shop/tasks.py", "shop", ["tasks.py"], "shop.tasks.add"),
        ("shop/tasks.py", ".", ["-m", "shop.tasks"], "shop.tasks.add"),
        ("shop/tasks.py", "shop", ["-c", IMPORTED.format("tasks")], "shop.tasks.add"),
        ("shop/tasks.py", ".", ["-c", LOADED.format("shop.tasks")], "shop.tasks.add"),
        ("shop/tasks.py", "shop", ["-c", LOADED.format("tasks.py")], "shop.tasks.add"),
        ("loose/tasks.py", "loose", ["-c", LOADED.format("tasks.py")], "tasks.add"),
        ("loose/tasks.py", ".", ["-c", LOADED.format("loose.tasks")], "loose.tasks.add"),
    ],
)
def test_producers_and_workers_give_a_task_the_same_name(
    tmp_path: Path, file: str, directory: str, arguments: list[str], name: str
) -> None:
    write(tmp_path, {"shop/__init__.py": "", file: TASKS})
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path / directory,
        capture_output=True,
        text=True,
        check=True,
    )
    assert finished.stdout.split() == [name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "arguments", "reason"),
    [
        ("tasks.py", ["-c", TASKS], "it was not defined in a file that a worker can import"),
        ("tasks.py", ["-"], "it was not defined in a file that a worker can import"),
        ("queue.py", ["-P", "queue.py"], "no worker can import queue.py under the name 'queue'"),
        ("queue.py", ["-P", "-c", LOADED.format("queue.py")], "another module has the name of its"),
        ("my.tasks.py", ["my.tasks.py"], "no worker can import my.tasks.py under the name"),
        (
            "loose/tasks.py",
            ["-c", LOADED.format("loose/tasks.py")],
            "its file can be imported as 'tasks' and as 'loose.tasks'; name the module",
        ),
    ],
)
def test_a_task_whose_name_would_differ_between_processes_needs_a_name(
    tmp_path: Path, file: str, arguments: list[str], reason: str
) -> None:
    write(tmp_path, {file: TASKS})
    finished = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        input=TASKS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"Task function 'add' needs a name, because {reason}" in finished.stderr
    assert 'write @app.task("add")' in finished.stderr
