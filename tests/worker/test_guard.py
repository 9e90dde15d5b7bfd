"""The guard's search for marked processes, and how it kills them."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from contextlib import suppress

import pytest

from horsies.worker import os_process
from horsies.worker.child import guard
from tests.support.wait import wait_until

# A process that lives for some microseconds and leaves a copy of itself.
COMET = "import os\nos.write(1, b'1')\nwhile True:\n    if os.fork(): os._exit(0)\n"


@pytest.fixture
def mark() -> int:
    mark = os_process.new_mark()
    assert mark
    return mark


def start(mark: int, *command: str, group: int | None = None) -> subprocess.Popen[bytes]:
    """Start a program that alone carries the mark."""
    soft, hard = resource.getrlimit(resource.RLIMIT_RTTIME)
    os_process.set_mark(mark)
    try:
        return subprocess.Popen(command, process_group=group or 0, stdout=subprocess.PIPE)
    finally:
        resource.setrlimit(resource.RLIMIT_RTTIME, (soft, hard))


def test_no_process_is_marked_where_the_limit_cannot_be_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object) -> None:
        raise ValueError("not allowed to raise maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    assert os_process.new_mark() == 0
    os_process.set_mark(0)


def test_marked_processes_are_killed_and_no_others(mark: int) -> None:
    with start(mark, "sleep", "600") as marked, start(mark + 1, "sleep", "600") as other:
        assert guard.kill_marked(mark) == []
        assert marked.wait(30) == -signal.SIGKILL
        assert other.poll() is None
        assert guard.kill_marked(mark + 1) == []


def test_a_process_that_has_ended_is_not_found(mark: int) -> None:
    with start(mark, "true") as ended:
        wait_until(lambda: os_process.has_ended(ended.pid))
        assert guard.find_marked(mark) == {}


def test_a_process_that_forks_faster_than_it_is_found_is_killed(mark: int) -> None:
    with start(mark, sys.executable, "-c", COMET) as comet:
        assert comet.stdout is not None
        assert comet.stdout.read(1) == b"1"
        try:
            assert guard.kill_marked(mark) == []
        finally:
            with suppress(ProcessLookupError):
                os.killpg(comet.pid, signal.SIGKILL)
        assert comet.stdout.read() == b""


def test_the_group_of_the_worker_is_spared(mark: int) -> None:
    with subprocess.Popen(["sleep", "600"], process_group=0) as unmarked:
        with start(mark, "sleep", "600", group=unmarked.pid) as marked:
            assert guard.kill_marked(mark, spared_group=unmarked.pid) == []
            assert marked.wait(30) == -signal.SIGKILL
            assert unmarked.poll() is None
        unmarked.kill()
