"""The decisions of the supervisor behind `horsies worker --reload` and `horsies dev`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from horsies.cli.supervise import Action, decide, first_failure, watched_folders
from tests.support.wait import wait_until
from tests.support.workers import is_gone


@pytest.mark.parametrize(
    ("stops", "has_changed", "has_ended", "action"),
    [
        (0, False, False, "none"),
        (0, False, True, "report_end"),
        (0, True, True, "try_change"),
        (0, True, False, "try_change"),
        (1, True, True, "stop"),
        (2, False, False, "stop"),
    ],
)
def test_a_stop_comes_first_and_a_change_replaces_a_part_that_ended(
    stops: int, has_changed: bool, has_ended: bool, action: Action
) -> None:
    assert decide(stops=stops, has_changed=has_changed, has_ended=has_ended) == action


def test_the_working_directory_and_an_application_outside_of_it_are_watched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, other = tmp_path / "project", tmp_path / "other"
    (project / "package").mkdir(parents=True)
    other.mkdir()
    monkeypatch.chdir(project)
    for inside in ("shop", "shop.background:app", "shop.py:app", "package/app.py"):
        assert watched_folders(inside) == [str(project)]
    assert watched_folders(f"{other}/app.py:app") == [str(project), str(other)]


@pytest.mark.parametrize(
    ("codes", "expected"),
    [((0, None), 0), ((0, 3, 1), 3), ((-signal.SIGTERM, 0), 0), ((-signal.SIGTERM, 1), 1)],
)
def test_a_part_that_was_stopped_before_it_could_handle_the_signal_has_not_failed(
    codes: tuple[int | None, ...], expected: int
) -> None:
    assert first_failure(codes) == expected


ENDLESS = """
import os, signal
with open("pid", "w") as file:
    file.write(f"{os.getpid()}\\n")
signal.pause()
"""
SUPERVISE = "from horsies.cli.supervise import Supervisor; Supervisor([], 'shop.py', ['.']).run()"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_check_of_a_change_ends_with_the_supervisor(
    tmp_path: Path, number: signal.Signals
) -> None:
    code, noted = tmp_path / "shop.py", tmp_path / "pid"
    noted.touch()
    code.write_text(ENDLESS)
    pids: list[str] = []

    def change() -> list[str]:
        code.touch()
        return noted.read_text().splitlines()

    with subprocess.Popen([sys.executable, "-c", SUPERVISE], cwd=tmp_path) as supervisor:
        try:
            pids += wait_until(change, 60)
            supervisor.send_signal(number)
            wait_until(lambda: supervisor.poll() is not None and is_gone(int(pids[0])))
        finally:
            supervisor.kill()
            for pid in pids:
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
