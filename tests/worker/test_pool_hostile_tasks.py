"""Hostile actions of tasks on their own process, and the parts of the worker that must survive
them.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import threading
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from horsies.worker import os_process, protocol
from horsies.worker.child import main
from horsies.worker.pool.events import Died, Reported, Stopped
from horsies.worker.pool.launcher import StartMethod
from horsies.worker.pool.pool import FrameReader
from tests.support.pool import (
    BOOT,
    MakePool,
    assignment,
    collect_events,
    collect_until,
    is_gone,
    next_event,
    run,
    value_of,
)
from tests.support.wait import wait_until


def read_pid(path: Path) -> int:
    return int(path.read_text())


def test_grandchildren_die_with_a_killed_child(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(1)
    marker = tmp_path / "grandchild"
    pid = pool.dispatch(assignment("start_grandchild", str(marker)))
    collect_until(pool, marker.exists)
    grandchild = read_pid(marker)
    assert not is_gone(grandchild)
    os.kill(pid, signal.SIGKILL)
    assert isinstance(next_event(pool), Died)
    collect_until(pool, lambda: is_gone(grandchild))


def test_grandchildren_die_with_a_stopped_task(make_pool: MakePool, tmp_path: Path) -> None:
    pool = make_pool(1)
    marker = tmp_path / "grandchild"
    given = assignment("start_grandchild", str(marker))
    pool.dispatch(given)
    collect_until(pool, marker.exists)
    pool.stop_task(given.task_id, "cancelled")
    assert isinstance(next_event(pool), Stopped)
    collect_until(pool, lambda: is_gone(read_pid(marker)))


def test_orphans_of_children_do_not_stay_as_zombies(make_pool: MakePool) -> None:
    pool = make_pool(1)
    grandchild = run(pool, "leave_grandchild")
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    collect_until(pool, lambda: not psutil.pid_exists(grandchild))


def test_a_process_forked_by_a_task_does_not_answer_for_it(make_pool: MakePool) -> None:
    pool = make_pool(1)
    assert run(pool, "fork_and_return") == "child"
    assert pool.collect(0.1) == []
    assert run(pool, "echo", "next") == "next"


def test_a_process_started_by_a_task_can_be_terminated_by_it(make_pool: MakePool) -> None:
    assert run(make_pool(1), "terminate_forked_process") == -signal.SIGTERM


def test_a_task_that_closes_low_descriptors_still_reports(make_pool: MakePool) -> None:
    pool = make_pool(1)
    assert run(pool, "close_low_descriptors") == "still here"
    assert run(pool, "echo", 1) == 1


def test_a_child_that_closes_its_socket_is_killed_and_replaced(make_pool: MakePool) -> None:
    pool = make_pool(1)
    given = assignment("close_all_descriptors")
    pid = pool.dispatch(given)
    assert next_event(pool) == Died(given, pid, "killed because it closed its socket")
    collect_until(pool, lambda: pool.places.idle_count == 1)


def test_a_child_that_sends_half_a_frame_is_killed_and_nobody_else(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(2)
    sibling = assignment("wait_forever", str(tmp_path / "sibling"))
    pool.dispatch(sibling)
    given = assignment("send_half_a_report")
    pid = pool.dispatch(given)
    event = next_event(pool)
    assert isinstance(event, Died)
    assert (event.assignment, event.pid) == (given, pid)
    assert "malformed frame" in event.description
    assert list(pool.busy) == [sibling.task_id]
    collect_until(pool, lambda: pool.places.idle_count == 1)


@pytest.mark.parametrize(
    "forgery", ["other task", "other claim", "ready", "hello", "assign", "task stopped"]
)
def test_a_child_that_speaks_out_of_turn_is_killed(make_pool: MakePool, forgery: str) -> None:
    pool = make_pool(1)
    given = assignment("write_forgery", forgery)
    pool.dispatch(given)
    event = next_event(pool)
    assert isinstance(event, Died)
    assert event.assignment == given
    assert "malformed frame" in event.description


def test_a_task_that_raises_what_only_its_worker_raises_fails(make_pool: MakePool) -> None:
    pool = make_pool(1)
    pool.dispatch(assignment("raise_task_stopped"))
    event = next_event(pool)
    assert isinstance(event, Reported)
    assert event.report.error_code == "UNHANDLED_EXCEPTION"
    assert "raised TaskStopped, which only its worker raises" in event.report.result_json
    assert run(pool, "echo", 1) == 1


@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="memory is sealed on Linux")
def test_a_task_cannot_shorten_the_memory_it_shares_with_the_worker(make_pool: MakePool) -> None:
    pool = make_pool(1)
    assert run(pool, "shorten_shared_memory") != []
    assert run(pool, "echo", 1) == 1


def test_flooding_stdout_does_not_touch_the_protocol(make_pool: MakePool) -> None:
    assert run(make_pool(1), "flood_stdout", 5_000_000) == 5_000_000


def test_what_a_task_changed_is_put_back_before_the_next_one(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1)
    before = run(pool, "describe_process_state")
    run(pool, "change_process_state", str(tmp_path))
    assert run(pool, "describe_process_state") == before


@pytest.mark.parametrize("method", list(StartMethod))
def test_a_child_dies_with_its_parent_whatever_the_last_task_changed(
    make_pool: MakePool, method: StartMethod
) -> None:
    pool = make_pool(1, start_method=method)
    run(pool, "clear_death_signal")
    assert run(pool, "death_signal") == signal.SIGKILL


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may change its user")
@pytest.mark.parametrize("method", list(StartMethod))
def test_a_child_dies_with_its_parent_though_a_hook_changed_its_user(
    make_pool: MakePool, method: StartMethod
) -> None:
    program = "tests.support.apps.pool_programs:load_with_user_changing_hook"
    pool = make_pool(1, boot=replace(BOOT, program=program), start_method=method)
    assert run(pool, "death_signal") == signal.SIGKILL
    run(pool, "change_user")
    assert run(pool, "death_signal") == signal.SIGKILL


def test_a_process_started_by_a_task_can_be_interrupted_by_it(make_pool: MakePool) -> None:
    assert run(make_pool(1), "interrupt_started_process") == -signal.SIGINT


def test_a_child_is_not_interrupted_itself(make_pool: MakePool) -> None:
    assert run(make_pool(1), "interrupt_itself") == "still here"


def test_a_child_holds_no_socket_but_its_own(make_pool: MakePool) -> None:
    with socket.create_server(("127.0.0.1", 0)):
        pool = make_pool(2)
        (only,) = run(pool, "list_sockets")
        assert only >= 500


def test_a_child_knows_that_it_is_one(make_pool: MakePool) -> None:
    assert run(make_pool(1), "environment", "HORSIES_CHILD_PROCESS") == "1"


def test_the_portable_watch_kills_a_process_whose_parent_hung_up() -> None:
    own_end, child_end = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        os.setsid()
        own_end.close()
        threading.Thread(target=main.watch_parent, args=(child_end,), daemon=True).start()
        os.write(child_end.fileno(), b"1")
        while True:
            signal.pause()
    child_end.close()
    assert own_end.recv(1) == b"1"
    own_end.close()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


def test_log_records_of_a_task_name_it(
    make_pool: MakePool, capfd: pytest.CaptureFixture[str]
) -> None:
    pool = make_pool(1, start_method=StartMethod.SPAWN)
    given = assignment("log_a_line", "hello from the task")
    pool.dispatch(given)
    value_of(next_event(pool))
    (line,) = [line for line in capfd.readouterr().err.splitlines() if "hello from" in line]
    assert f"[log_a_line {given.task_id} #1]" in line


def test_a_task_id_with_any_text_survives_the_trip(make_pool: MakePool) -> None:
    pool = make_pool(1)
    text = 'Grüße, 世界 \U0001f40e " \\ \n'
    assert run(pool, "echo", text) == text
    assert protocol.MAX_FRAME_BYTES > 16_777_216


def test_a_child_that_stopped_itself_is_killed_when_its_time_is_over(
    make_pool: MakePool, tmp_path: Path
) -> None:
    pool = make_pool(1, stop_grace_seconds=0.2)
    given = assignment("stop_itself", str(tmp_path / "marker"), timeout_ms=300)
    pid = pool.dispatch(given)
    assert next_event(pool) == Stopped(given, pid, True, "timeout")
    collect_until(pool, lambda: pool.places.idle_count == 1)


def test_a_child_that_became_another_program_is_killed_and_replaced(make_pool: MakePool) -> None:
    pool = make_pool(1)
    given = assignment("become_another_program")
    pid = pool.dispatch(given)
    assert next_event(pool) == Died(given, pid, "killed because it closed its socket")
    collect_until(pool, lambda: pool.places.idle_count == 1)


@pytest.mark.parametrize("count", [0, 3])
def test_a_child_without_descriptors_costs_no_other_task(make_pool: MakePool, count: int) -> None:
    pool = make_pool(1)
    pool.dispatch(assignment("forbid_descriptors", count))
    # The child may end before its report is read: the death of an idle child comes with it.
    reported, *ends = collect_events(pool, 1, Reported)
    assert value_of(reported) == "still here"
    assert all(isinstance(end, Died) and end.assignment is None for end in ends), ends
    given = assignment("echo", 1)
    collect_until(pool, lambda: pool.places.idle_count == 1)
    pool.dispatch(given)
    event = next_event(pool)
    assert not isinstance(event, Died), event
    collect_until(pool, lambda: pool.places.idle_count == 1)


def test_a_child_that_may_make_no_system_calls_is_replaced(make_pool: MakePool) -> None:
    pool = make_pool(1)
    given = assignment("forbid_system_calls")
    pid = pool.dispatch(given)
    assert next_event(pool) == Died(given, pid, "signal 9 (SIGKILL)")
    collect_until(pool, lambda: pool.places.idle_count == 1)


def test_a_child_that_floods_its_socket_does_not_hold_up_others(make_pool: MakePool) -> None:
    pool = make_pool(2)
    flood = assignment("flood_with_hellos", timeout_ms=60_000)
    pool.dispatch(flood)
    for number in range(20):
        assert run(pool, "echo", number) == number
    pool.stop_task(flood.task_id, "timeout")
    assert isinstance(next_event(pool), Stopped)


def test_frames_without_end_are_not_read_to_their_end(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = make_pool(1)
    monkeypatch.setattr(FrameReader, "receive", lambda frames, child: True)
    (child,) = pool._children.all
    assert pool._frames.drain(child)


@pytest.mark.parametrize("method", list(StartMethod))
def test_children_start_in_a_directory_that_has_been_removed(
    make_pool: MakePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: StartMethod
) -> None:
    release = tmp_path / "release"
    release.mkdir()
    monkeypatch.chdir(release)
    pool = make_pool(1, start_method=method)
    release.rmdir()
    (pid,) = pool.pids()
    os.kill(pid, signal.SIGKILL)
    assert isinstance(next_event(pool), Died)
    collect_until(pool, lambda: pool.places.idle_count == 1)
    assert run(pool, "echo", 1) == 1


def test_a_traced_process_that_stops_has_not_ended() -> None:
    pid = os.fork()
    if pid == 0:
        ctypes.CDLL(None).ptrace(0, 0, 0, 0)  # the parent becomes its tracer
        os.kill(os.getpid(), signal.SIGUSR1)
        os._exit(1)
    try:
        wait_until(lambda: psutil.Process(pid).status() == psutil.STATUS_TRACING_STOP)
        assert os_process.reap(pid) is None
    finally:
        os.kill(pid, signal.SIGKILL)
        os_process.wait_for_exit(pid)
