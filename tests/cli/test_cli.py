from __future__ import annotations

import os
import subprocess
import sys
import uuid
from pathlib import Path

import psycopg
import pytest

from horsies._version import __version__
from horsies.db.migrate import known_migrations, schema_version
from tests.support.command_line import Run
from tests.support.commands import UNREACHABLE, Finished, horsies
from tests.support.migrations import apply_all_but, following, later_release

LATEST = f"the schema is at version {schema_version()}"
APP = """
import os
from horsies.app import Horsies
from horsies.config.app import AppConfig; from horsies.config.postgres import PostgresConfig
from horsies.task_result import TaskError, TaskResult

app = Horsies(AppConfig(broker=PostgresConfig(database_url=os.environ["SHOP_URL"])))


@app.task("add")
def add(a: int, b: int) -> TaskResult[int, TaskError]:
    return TaskResult(ok=a + b)
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "shop.py").write_text(APP)
    return tmp_path


def assert_report(finished: Finished, code: str) -> None:
    assert finished.returncode == 1, finished.stderr
    assert f"error[{code}]" in finished.stderr
    assert "Traceback" not in finished.stderr
    assert "hunter2" not in finished.stderr + finished.stdout


def test_without_a_command_the_help_is_shown_and_the_exit_is_1(tmp_path: Path) -> None:
    finished = horsies(tmp_path)
    assert finished.returncode == 1
    assert "migrate" in finished.stdout


def test_help_exits_with_0(tmp_path: Path) -> None:
    finished = horsies(tmp_path, "check", "--help")
    assert finished.returncode == 0
    assert "--live" in finished.stdout


@pytest.mark.parametrize("argument", ["version", "--version"])
def test_the_version_is_printed(tmp_path: Path, argument: str) -> None:
    finished = horsies(tmp_path, argument)
    assert finished.stdout == f"horsies {__version__}\n"
    assert (finished.returncode, finished.stderr) == (0, "")


@pytest.mark.parametrize(
    ("words", "number", "answers"),
    [
        ("horsies workf", "1", {"workflow", "workflows"}),
        ("horsies worker --async-s", "2", {"--async-slots"}),
    ],
)
def test_a_shell_completes_commands_and_flags(
    tmp_path: Path, words: str, number: str, answers: set[str]
) -> None:
    asked = {"_HORSIES_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": number}
    assert set(horsies(tmp_path, **asked).stdout.split()) == answers


def test_the_script_for_completions_is_shown(tmp_path: Path) -> None:
    # The parent process may be any shell, such as the one of make.
    environment = {"_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"}
    finished = horsies(tmp_path, "--show-completion", "bash", **environment)
    assert "_HORSIES_COMPLETE" in finished.stdout


def test_slots_without_async_children_are_refused(project: Path) -> None:
    finished = horsies(project, "worker", "shop:app", "--async-slots", "5", SHOP_URL=UNREACHABLE)
    assert finished.returncode == 1
    assert "--async-slots needs --async-children" in finished.stderr


def test_the_installed_command_is_the_same_program(project: Path) -> None:
    command = Path(sys.executable).with_name("horsies")
    finished = subprocess.run(
        [command, "check", "shop:app"],
        cwd=project,
        env={**os.environ, "SHOP_URL": UNREACHABLE},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr


def test_a_sound_application_passes_the_check(project: Path) -> None:
    finished = horsies(project, "check", "shop:app")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout == "ok: all validations passed\n1 task(s) registered\n"
    assert finished.stderr == ""


def test_the_module_option_wins_over_the_argument(project: Path) -> None:
    finished = horsies(project, "check", "nowhere:app", "-m", "shop.py")
    assert finished.returncode == 0, finished.stderr


def test_a_check_without_an_application_says_how_to_name_it(tmp_path: Path) -> None:
    finished = horsies(tmp_path, "check")
    assert_report(finished, "HRS-206")
    assert "horsies check package.module:app" in finished.stderr


def test_errors_of_the_check_are_reported_together_and_counted(project: Path) -> None:
    (project / "jobs.py").write_text("1 / 0\n")
    (project / "shop.py").write_text(APP + "\napp.discover_tasks(['jobs', 'missing.py'])\n")
    finished = horsies(project, "check", "shop:app")
    assert_report(finished, "HRS-210")
    assert "error[HRS-206]" in finished.stderr
    assert "jobs.py:1" in finished.stderr
    assert finished.stderr.endswith("check: 2 errors found\n")
    assert finished.stdout == ""


def test_the_traceback_of_a_failed_import_is_shown_on_request(project: Path) -> None:
    (project / "shop.py").write_text("1 / 0\n")
    finished = horsies(project, "check", "shop:app", HORSIES_DEBUG_IMPORTS="1")
    assert finished.returncode == 1
    assert "Traceback" in finished.stderr
    assert_report(horsies(project, "check", "shop:app"), "HRS-210")


@pytest.mark.parametrize("password", ["hunter2%zz", "hunter2 secret", "secret@hunter2"])
def test_a_traceback_shows_no_password(project: Path, password: str) -> None:
    url = f"postgresql://app:{password}@127.0.0.1:1/shop"
    (project / "shop.py").write_text(
        "import psycopg\n"
        "try:\n"
        f"    psycopg.connect({url!r})\n"
        "except psycopg.Error as error:\n"
        "    raise RuntimeError('no database') from error\n"
    )
    commands = [
        horsies(project, "check", "shop:app", HORSIES_DEBUG_IMPORTS="1"),
        horsies(project, "migrate", "--database-url", url, HORSIES_DEBUG_IMPORTS="1"),
    ]
    for finished in commands:
        assert "Traceback" in finished.stderr
        shown = [word for word in password.replace("@", " ").split() if word in finished.stderr]
        assert not shown


def test_sends_made_while_the_application_is_imported_are_suppressed(project: Path) -> None:
    sending = APP + "\nprint(add.send(1, 2).unwrap_err().code.value)\n"
    (project / "shop.py").write_text(sending)
    finished = horsies(project, "check", "shop:app")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.startswith("SEND_SUPPRESSED\n")


def test_a_live_check_connects(project: Path, database_url: str) -> None:
    assert_report(horsies(project, "check", "shop:app", "--live"), "HRS-203")
    finished = horsies(project, "check", "shop:app", "--live", SHOP_URL=database_url)
    assert finished.returncode == 0, finished.stderr


def test_log_levels_are_taken_in_any_case_and_others_refused_with_2(project: Path) -> None:
    assert horsies(project, "check", "shop:app", "--loglevel", "Debug").returncode == 0
    assert horsies(project, "check", "shop:app", "--loglevel", "loud").returncode == 2


def test_migrate_brings_the_database_of_an_application_up_to_date(
    project: Path, database_url: str
) -> None:
    first = horsies(project, "migrate", "shop:app", SHOP_URL=database_url)
    assert first.returncode == 0, first.stderr
    lines = first.stdout.splitlines()
    assert lines[0] == "applied 0001 schema"
    assert len(lines) == len(known_migrations()) + 1
    second = horsies(project, "migrate", "shop:app", SHOP_URL=database_url)
    assert second.stdout == f"{LATEST}\n"


@pytest.mark.parametrize("variable", [None, "HORSIES_DATABASE_URL", "DATABASE_URL"])
def test_migrate_takes_the_database_from_the_option_or_the_environment(
    tmp_path: Path, database_url: str, variable: str | None
) -> None:
    finished = (
        horsies(tmp_path, "migrate", "--database-url", database_url)
        if variable is None
        else horsies(tmp_path, "migrate", **{variable: database_url})
    )
    assert finished.returncode == 0, finished.stderr
    with psycopg.connect(database_url) as connection:
        assert connection.execute("SELECT count(*) FROM horsies_tasks").fetchone() == (0,)


def test_migrate_without_a_database_says_how_to_name_it(tmp_path: Path) -> None:
    finished = horsies(tmp_path, "migrate")
    assert_report(finished, "HRS-203")
    assert "--database-url" in finished.stderr


@pytest.mark.parametrize("command", [["migrate"], ["migrate", "--sql"], ["status"]])
def test_an_empty_address_is_refused_whatever_the_environment_says(
    tmp_path: Path, process_url: str, command: list[str]
) -> None:
    finished = horsies(tmp_path, *command, "--database-url", "", DATABASE_URL=process_url)
    assert_report(finished, "HRS-203")
    assert "--database-url is empty" in finished.stderr


@pytest.mark.parametrize("command", ["migrate", "status"])
def test_a_wrong_embedded_address_is_no_mistake_of_a_line(tmp_path: Path, command: str) -> None:
    finished = horsies(tmp_path, command, "--database-url", "embedded://foo")
    assert_report(finished, "HRS-203")
    assert "embedded:///foo" in finished.stderr
    assert "-->" not in finished.stderr


@pytest.mark.parametrize("flag", ["--processes=0", "--max-claim-batch=-1"])
def test_a_flag_that_cannot_work_is_no_mistake_of_a_line(project: Path, flag: str) -> None:
    finished = horsies(project, "worker", "shop:app", flag)
    assert_report(finished, "HRS-206")
    assert "-->" not in finished.stderr


def test_migrate_refuses_contradicting_arguments(project: Path) -> None:
    both = horsies(project, "migrate", "shop:app", "--database-url", UNREACHABLE)
    assert_report(both, "HRS-206")
    assert_report(horsies(project, "migrate", "shop:app", "--sql", "--check"), "HRS-206")


def test_migrate_reports_an_unreachable_database(tmp_path: Path) -> None:
    assert_report(horsies(tmp_path, "migrate", "--database-url", UNREACHABLE), "HRS-203")
    assert_report(horsies(tmp_path, "migrate", "--check", DATABASE_URL=UNREACHABLE), "HRS-203")


def test_migrate_check_tells_whether_something_is_missing(
    tmp_path: Path, database_url: str
) -> None:
    behind = horsies(tmp_path, "migrate", "--check", DATABASE_URL=database_url)
    assert behind.returncode == 1
    assert behind.stderr.startswith("missing 0001 schema\n")
    horsies(tmp_path, "migrate", DATABASE_URL=database_url)
    current = horsies(tmp_path, "migrate", "--check", DATABASE_URL=database_url)
    assert (current.returncode, current.stdout) == (0, f"{LATEST}\n")


def test_commands_notice_a_migration_that_is_missing_below_the_highest(
    project: Path, database_url: str
) -> None:
    hole, newest = following()
    with psycopg.connect(database_url, autocommit=True) as connection:
        apply_all_but(connection, hole)
    sources = later_release(project / "later")
    given = {"DATABASE_URL": database_url, "SHOP_URL": database_url, "PYTHONPATH": str(sources)}
    assert_report(status := horsies(project, "status", **given), "HRS-211")
    assert f"lacks migration {hole.title}" in status.stderr
    doctor = horsies(project, "doctor", **given)
    assert "lacks 1 of its migrations" in doctor.stdout
    assert hole.title in doctor.stdout
    live = horsies(project, "check", "shop:app", "--live", **given)
    assert hole.title in live.stdout + live.stderr
    behind = horsies(project, "migrate", "--check", **given)
    assert (behind.returncode, behind.stderr.split("\n")[0]) == (1, f"missing {hole.title}")
    mended = horsies(project, "migrate", **given)
    assert mended.stdout.startswith(f"applied {hole.title}\n")
    assert mended.stdout.endswith(f"the schema is at version {newest.version}\n")
    assert horsies(project, "migrate", "--check", **given).returncode == 0
    assert horsies(project, "status", **given).returncode == 0


def test_the_printed_sql_brings_a_database_up_to_date(tmp_path: Path, database_url: str) -> None:
    script = horsies(tmp_path, "migrate", "--sql", DATABASE_URL=database_url)
    assert script.returncode == 0, script.stderr
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(script.stdout.encode())
    assert horsies(tmp_path, "migrate", "--check", DATABASE_URL=database_url).returncode == 0
    again = horsies(tmp_path, "migrate", "--sql", DATABASE_URL=database_url)
    assert again.stdout == "-- nothing is missing\n"


def test_without_a_reachable_database_the_whole_script_is_printed(tmp_path: Path) -> None:
    unconfigured = horsies(tmp_path, "migrate", "--sql")
    unreachable = horsies(tmp_path, "migrate", "--sql", DATABASE_URL=UNREACHABLE)
    assert unconfigured.returncode == unreachable.returncode == 0
    assert unconfigured.stdout == unreachable.stdout
    assert unconfigured.stdout.startswith("BEGIN;")
    assert "empty database" in unreachable.stderr
    assert "hunter2" not in unreachable.stderr


def test_a_database_newer_than_the_program_is_refused(tmp_path: Path, database_url: str) -> None:
    horsies(tmp_path, "migrate", DATABASE_URL=database_url)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO horsies_migrations (version, name) VALUES (9999, 'later')")
    for arguments in (["migrate"], ["migrate", "--check"], ["migrate", "--sql"]):
        assert_report(horsies(tmp_path, *arguments, DATABASE_URL=database_url), "HRS-211")


def test_importing_horsies_loads_no_command_line() -> None:
    script = "import sys, horsies.app; print({'typer', 'rich', 'click'} & sys.modules.keys())"
    finished = subprocess.run([sys.executable, "-c", script], capture_output=True, check=True)
    assert finished.stdout == b"set()\n"


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        (("tasks", "--status", "faild"), "'faild' is not one of"),
        (("worker",), "horsies worker needs an application."),
        (("tasks", "--since", "yesterdayish"), "yesterdayish"),
        (("retry", "A", str(uuid.uuid4())), "'A' is not a task id; no task was changed."),
        (("retry", str(uuid.uuid4()), str(uuid.uuid4())), "There is no task"),
        (("show", "01a1e508"), "01a1e508"),
    ],
)
def test_a_typo_on_the_command_line_is_answered(
    arguments: tuple[str, ...], answer: str, horsies: Run
) -> None:
    refused = horsies(*arguments)
    assert refused.code != 0
    assert answer in " ".join(refused.err.replace("│", " ").split())
