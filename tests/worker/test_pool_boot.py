"""How children start, and the errors when they cannot."""

from __future__ import annotations

import errno
import itertools
import math
import os
import resource
import signal
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

import psutil
import pytest

from horsies.worker.child.fork_server import Reserve
from horsies.worker.pool.events import Died, HookFailed, Reported
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import ChildBootError
from horsies.worker.protocol import ChildBoot
from tests.support.apps.pool_programs import FunctionProgram
from tests.support.pool import (
    BOOT,
    REPOSITORY,
    MakePool,
    assignment,
    collect_events,
    collect_until,
    is_gone,
    run,
)
from tests.support.workers import is_guard

METHODS = list(StartMethod)


def boot(program: str, **changes: object) -> ChildBoot:
    return replace(BOOT, program=f"tests.support.apps.pool_programs:{program}", **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("method", METHODS)
def test_hooks_run_in_order_in_every_child(make_pool: MakePool, method: StartMethod) -> None:
    pool = make_pool(2, boot=boot("load_with_hooks"), start_method=method)
    for _ in range(2):
        pid, *names = run(pool, "hooks_that_ran")
        assert names == ["first_hook", "second_hook"]
        assert pid in pool.pids()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("program", "hook", "what"),
    [
        ("load_with_raising_hook", "raising_hook", "raised ValueError: no license"),
        ("load_with_slow_hook", "slow_hook", "ran longer than 0.2 s"),
        ("load_with_exiting_hook", "exiting_hook", "raised SystemExit"),
    ],
)
def test_a_failing_hook_fails_the_start_by_name(
    make_pool: MakePool, method: StartMethod, program: str, hook: str, what: str
) -> None:
    budget_seconds = 0.2 if hook == "slow_hook" else 60.0
    with pytest.raises(ChildBootError, match=f"{hook} {what}"):
        make_pool(2, boot=boot(program, hook_budget_seconds=budget_seconds), start_method=method)


@pytest.mark.parametrize("method", METHODS)
def test_every_task_finds_what_hooks_set_up_but_no_hook_takes_the_stop_signal(
    make_pool: MakePool, method: StartMethod
) -> None:
    pool = make_pool(1, boot=boot("load_with_moving_hook"), start_method=method)
    for _ in range(2):
        assert run(pool, "describe_after_hooks") == ["/", 0o027, True, True, 60.0]


def test_a_hook_that_fails_in_a_replacement_is_told(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_TEST_HOOK_FAILS_IF", str(tmp_path / "now"))
    pool = make_pool(1, boot=boot("load_with_hook_failing_later"))
    (pid,) = pool.pids()
    (tmp_path / "now").touch()
    os.kill(pid, signal.SIGKILL)
    assert collect_events(pool, 1, HookFailed) == [
        Died(None, pid, "signal 9 (SIGKILL)"),
        HookFailed("hook_failing_later", "raised RuntimeError: not any more"),
    ]


@pytest.mark.parametrize("method", METHODS)
def test_an_application_that_does_not_load_fails_the_start(
    make_pool: MakePool, method: StartMethod
) -> None:
    with pytest.raises(ChildBootError, match="ImportError: no such thing"):
        make_pool(1, boot=boot("load_nothing"), start_method=method)


def test_a_child_that_never_gets_ready_fails_the_start(make_pool: MakePool) -> None:
    with pytest.raises(ChildBootError, match=r"not ready within 0\.3 s"):
        make_pool(1, boot=boot("load_with_slow_hook"), boot_timeout_seconds=0.3)


def test_a_template_that_never_gets_ready_fails_the_start(make_pool: MakePool) -> None:
    with pytest.raises(ChildBootError, match=r"not ready within 0\.3 s"):
        make_pool(1, boot=boot("load_for_ever"), boot_timeout_seconds=0.3)


def test_a_failed_start_leaves_no_process_behind(make_pool: MakePool) -> None:
    before = {one.pid for one in psutil.Process().children(recursive=True)}
    with pytest.raises(ChildBootError):
        make_pool(3, boot=boot("load_with_raising_hook"))
    assert {one.pid for one in psutil.Process().children(recursive=True)} <= before


@pytest.mark.parametrize("method", [StartMethod.FORK, StartMethod.FORKSERVER])
def test_what_the_import_started_in_a_group_of_its_own_does_not_hold_up_the_end(
    make_pool: MakePool, method: StartMethod, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_TEST_HELPER_PID", str(tmp_path / "pid"))
    pool = make_pool(1, boot=boot("load_with_helper"), start_method=method)
    helper_pid = int((tmp_path / "pid").read_text())
    assert not is_gone(helper_pid)
    began_at = time.monotonic()
    pool.shutdown()
    assert time.monotonic() - began_at < 30
    assert is_gone(helper_pid)


FindTemplate: TypeAlias = Callable[[list[int]], int]


@pytest.fixture
def template_pid() -> FindTemplate:
    """Finds the template of a pool with these children, among processes that the test has started."""
    # Servers and orphans of other tests are children of this process, too.
    others = living_pythons()

    def find(pool_pids: list[int]) -> int:
        (pid,) = living_pythons() - others - set(pool_pids)
        return pid

    return find


def living_pythons() -> set[int]:
    ours = psutil.Process().exe()
    living = [one for one in psutil.Process().children() if one.status() != psutil.STATUS_ZOMBIE]
    return {one.pid for one in living if one.exe() == ours and not is_guard(one.pid)}


def test_a_killed_template_costs_nobody_and_is_started_again(
    make_pool: MakePool, template_pid: FindTemplate
) -> None:
    pool = make_pool(2)
    pids = pool.pids()
    first = template_pid(pids)
    os.kill(first, signal.SIGKILL)
    assert collect_until(pool, lambda: is_gone(first)) == []
    assert pool.pids() == pids
    os.kill(pids[0], signal.SIGKILL)
    collect_until(pool, lambda: pool.places.idle_count == 2 and pids[0] not in pool.pids())
    assert template_pid(pool.pids()) != first


def test_a_template_and_a_child_killed_together_are_both_replaced(
    make_pool: MakePool, template_pid: FindTemplate
) -> None:
    pool = make_pool(1)
    (pid,) = pool.pids()
    os.kill(template_pid([pid]), signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    collect_until(pool, lambda: pool.places.idle_count == 1 and pool.pids() != [pid])
    assert run(pool, "echo", 1) == 1


def test_a_template_that_was_stopped_is_replaced(
    make_pool: MakePool, template_pid: FindTemplate
) -> None:
    pool = make_pool(1, boot_timeout_seconds=4)
    (pid,) = pool.pids()
    stopped = template_pid([pid])
    os.kill(stopped, signal.SIGSTOP)
    os.kill(pid, signal.SIGKILL)
    collect_until(pool, lambda: pool.places.idle_count == 1 and pool.pids() != [pid])
    assert is_gone(stopped)
    assert run(pool, "echo", 1) == 1


def test_children_that_keep_dying_while_booting_are_started_ever_more_slowly(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("POOL_TEST_BOOT_DIES_IF", str(tmp_path / "now"))
    pool = make_pool(1, boot=boot("load_with_dying_hook"))
    (tmp_path / "now").touch()
    os.kill(pool.pids()[0], signal.SIGKILL)
    died_at = []
    for _ in range(4):
        collect_events(pool, 1, Died)
        died_at.append(time.monotonic())
    assert died_at[2] - died_at[1] >= 0.1
    assert died_at[3] - died_at[2] >= 0.2
    (tmp_path / "now").unlink()
    collect_until(pool, lambda: pool.places.idle_count == 1)


@pytest.mark.parametrize("template_may_fork", [True, False])
def test_a_template_that_may_not_fork_fails_the_request_and_lives_on(
    monkeypatch: pytest.MonkeyPatch, template_may_fork: bool
) -> None:
    own_pid, fork, forks = os.getpid(), os.fork, itertools.count(1)

    def limited_fork() -> int:
        if os.getpid() == own_pid:
            assert next(forks) < 5, "it does not give up"
            if template_may_fork:
                return fork()
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", limited_fork)
    ours, theirs = socket.socketpair()
    with ours, socket.socket() as control:
        reserve = Reserve(control, replace(BOOT, forks_ahead=3), own_pid, FunctionProgram())
        reserve.hand_out(theirs.detach())
        ours.settimeout(5)
        assert ours.recv(1) == b""
    assert next(forks) == 2


def wait_until(condition: Callable[[], bool], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
    return True


@pytest.mark.parametrize("method", METHODS)
def test_children_do_not_outlive_their_parent(method: StartMethod, tmp_path: Path) -> None:
    reports = tmp_path / "pids"
    script = (
        f"import sys; sys.path.insert(0, {REPOSITORY!r}); from tests.support.apps import pool_parent; "
        f"pool_parent.main({method.value!r}, {str(reports)!r})"
    )
    parent = psutil.Popen([os.sys.executable, "-c", script])  # type: ignore[attr-defined]
    try:
        assert wait_until(reports.exists, 60)
        family = [int(pid) for pid in reports.read_text().split()]
        assert len(family) >= 2
        assert not any(is_gone(pid) for pid in family)
    finally:
        parent.kill()
        parent.wait()
    assert wait_until(lambda: all(is_gone(pid) for pid in family), 30)
    for pid in family:  # this process adopts them when it has started a pool before
        with suppress(ChildProcessError):
            os.waitpid(pid, 0)


def test_tasks_of_other_children_do_not_hasten_starts_that_fail(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(2)
    refusals: list[float] = []

    def refuse(*_: object) -> None:
        refusals.append(time.monotonic())
        raise OSError(errno.EAGAIN, "no process is left")

    monkeypatch.setattr(pool.launcher, "launch", refuse)
    killed, other = pool.pids()
    os.kill(killed, signal.SIGKILL)
    collect_events(pool, 1, Died)
    assert refusals
    for _ in range(100):
        pool.dispatch(assignment("echo", 1), other)
        collect_events(pool, 1, Reported)
    # The first two follow each other, then come 0.1 s and waits that double.
    waits = (time.monotonic() - refusals[0]) / 0.1
    assert len(refusals) <= 2 + math.log2(1 + waits)


def test_a_worker_that_may_write_no_files_says_so_at_its_start(make_pool: MakePool) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ChildBootError, match=r"`ulimit -f`\) is 0 bytes, .* needs 4096; raise"):
            make_pool(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
