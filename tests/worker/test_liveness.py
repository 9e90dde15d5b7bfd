"""Liveness: the row of a worker, and its answers to pings."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from psycopg import Connection

from horsies import AppConfig, PostgresConfig
from horsies._version import __version__
from horsies.db.statements.queues import send_notification
from horsies.db.statements.workers import (
    Presence,
    WatchedWorker,
    register_worker,
    see_worker,
)
from horsies.ids import new_id
from horsies.worker import os_process
from horsies.worker.config import WorkerConfig
from horsies.worker.liveness import PONG_CHANNEL_PREFIX, Identity, Liveness, lock_key
from horsies.worker.pool.pool import ChildSummary
from tests.support.examples import examples
from tests.support.statements import named

SEEN_AT = datetime(2026, 1, 31, 12, tzinfo=UTC)
CHANNEL = PONG_CHANNEL_PREFIX + "0123456789abcdef" * 2


def make_liveness(worker_id: str = "") -> Liveness:
    config = AppConfig(broker=PostgresConfig(database_url="postgresql://localhost/unused"))
    worker = WorkerConfig("app:app", 2, ["default"])
    return Liveness(config, worker, Identity(worker_id or new_id(), "host", 7))


def test_the_key_of_a_lock_is_a_positive_bigint_of_the_workers_own() -> None:
    keys = [lock_key(new_id()) for _ in range(1_000)]
    assert len(set(keys)) == 1_000
    assert all(0 <= key < 1 << 63 for key in keys)
    same = new_id()
    assert lock_key(same) == lock_key(same)


# Proofs that the process of another worker has ended


def watched(**changes: Any) -> WatchedWorker:
    """A worker that is this very process."""
    here = Identity.of(new_id())
    row = WatchedWorker(
        new_id(), "1", here.hostname, here.pid, here.process_space, here.process_started, True
    )
    return row._replace(**changes)


def test_a_living_process_is_never_proved_gone() -> None:
    assert not Identity.of(new_id()).sees_gone(watched())


def test_a_process_that_has_ended_is_proved_gone_before_its_parent_collects_it() -> None:
    here = Identity.of(new_id())
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        other = watched(pid=process.pid, process_started=os_process.process_started(process.pid))
        assert not here.sees_gone(other)
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert here.sees_gone(other), "a zombie"
    assert here.sees_gone(other)


def test_another_process_with_the_pid_of_a_worker_is_not_that_worker() -> None:
    row = watched()
    assert row.process_started is not None
    assert Identity.of(new_id()).sees_gone(row._replace(process_started=row.process_started - 1))


@pytest.mark.parametrize(
    "place",
    [
        {"hostname": "elsewhere"},
        {"process_space": "another boot or another pid namespace"},
        {"process_space": None},
        {"process_started": None},
    ],
)
def test_nothing_is_proved_about_a_process_of_another_host_or_container(
    place: dict[str, Any],
) -> None:
    other = watched(process_started=1)
    assert Identity.of(new_id()).sees_gone(other)
    assert not Identity.of(new_id()).sees_gone(other._replace(**place))


def test_a_worker_that_cannot_tell_its_own_process_space_proves_nothing() -> None:
    here = replace(Identity.of(new_id()), process_space=None)
    assert not here.sees_gone(watched(process_started=1, process_space=None))


def test_a_snapshot_without_free_descriptors_leaves_the_use_unknown(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    liveness = make_liveness()
    monkeypatch.setattr("horsies.worker.liveness.psutil.Process.memory_percent", too_many_files)
    state = named(liveness.snapshot(1, 2, [ChildSummary(7, 3.0, 5, None, None)]))
    assert (state.memory_usage_mb, state.cpu_percent, state.memory_percent) == (None, None, None)
    assert state.tasks_running == 1
    (child,) = json.loads(state.children)
    assert child.pop("private_mb") >= 0
    assert child == {"pid": 7, "rss_mb": 3.0, "done": 5, "since": None, "task_id": None}
    assert "Too many open files" in caplog.text


@pytest.mark.skipif(not os_process.IS_LINUX, reason="reads /proc")
def test_the_memory_of_children_is_resident_and_the_part_they_do_not_share_is_beside_it() -> None:
    with forked(lambda: bytearray(os.urandom(1 << 20) * 8)) as pid:
        summary = ChildSummary(pid, os_process.rss_megabytes([pid]), 5, None, None)
        state = named(make_liveness().snapshot(1, 2, [summary, summary]))
    assert state.children_memory_mb == 2 * summary.rss_mb
    for child in json.loads(state.children):
        assert child["rss_mb"] / 2 > child["private_mb"] > 8


@contextmanager
def forked(allocate: Callable[[], object]) -> Iterator[int]:
    """Fork this process; the copy allocates memory and waits."""
    ready, written = os.pipe()
    if (pid := os.fork()) == 0:
        kept = allocate()
        os.write(written, b"ready")
        signal.pause()
        os._exit(0 if kept else 1)
    try:
        os.read(ready, 5)
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ready)
        os.close(written)


def too_many_files(_process: object) -> NoReturn:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


@pytest.mark.parametrize(
    "payload",
    [
        "",
        "ping",
        "null",
        "[]",
        "17",
        '"text"',
        "{}",
        "{not json",
        '{"reply_channel": "x"}',
        '{"correlation_id": "1"}',
        json.dumps({"reply_channel": "task_queue_default", "correlation_id": "1"}),
        json.dumps({"reply_channel": None, "correlation_id": None}),
        "[" * 7_000,
        '{"reply_channel": ' + "[" * 3_000 + "]" * 3_000 + ', "correlation_id": "1"}',
        json.dumps({"reply_channel": PONG_CHANNEL_PREFIX, "correlation_id": "1"}),
        json.dumps({"reply_channel": CHANNEL + "\n", "correlation_id": "1"}),
        json.dumps({"reply_channel": CHANNEL + "f", "correlation_id": "1"}),
        json.dumps({"reply_channel": CHANNEL[:-1] + "\0", "correlation_id": "1"}),
        json.dumps({"reply_channel": CHANNEL[:-1] + "\ud800", "correlation_id": "1"}),
        json.dumps({"reply_channel": CHANNEL[:-1] + "٣", "correlation_id": "1"}),
        json.dumps(
            {"reply_channel": PONG_CHANNEL_PREFIX + "\U0001f40e" * 43, "correlation_id": "1"}
        ),
        json.dumps({"reply_channel": CHANNEL, "correlation_id": "1", "target_worker_id": "other"}),
    ],
)
def test_a_ping_that_is_none_of_ours_is_not_answered(payload: str) -> None:
    assert make_liveness().pongs([payload]) == []


@given(
    payload=st.text()
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ).map(json.dumps)
)
@settings(max_examples=examples(50), deadline=None)
def test_no_payload_harms_a_worker(payload: str) -> None:
    assert make_liveness().pongs([payload]) == []


def test_a_ping_is_answered_with_who_we_are() -> None:
    worker_id = new_id()
    liveness = make_liveness(worker_id)
    for target in (None, worker_id):
        ping = {"reply_channel": CHANNEL, "correlation_id": "42", "target_worker_id": target}
        ((statement, (channel, payload)),) = liveness.pongs([json.dumps(ping), "garbage"])
        assert statement is send_notification
        assert channel == CHANNEL
        assert json.loads(payload) == {
            "correlation_id": "42",
            "worker_id": worker_id,
            "hostname": "host",
            "pid": 7,
        }


@pytest.mark.parametrize("letter", ["y", "\0", "\ud800", "\U0001f40e", '"'])
def test_whatever_a_ping_is_called_its_answer_is_short_and_can_be_sent(
    connection: Connection[Any], letter: str
) -> None:
    ping = {"reply_channel": CHANNEL, "correlation_id": letter * 9_999}
    ((_, pong),) = make_liveness().pongs([json.dumps(ping)])
    payload = pong[1]
    assert len(payload) < 2_000
    connection.execute("LISTEN " + CHANNEL)
    send_notification.run(connection, pong)
    (heard,) = connection.notifies(timeout=30, stop_after=1)
    assert (heard.channel, heard.payload) == (CHANNEL, payload)
    connection.execute("UNLISTEN " + CHANNEL)


def statements(liveness: Liveness) -> list[Any]:
    steps = liveness.steps(receives_notifications=True, waits=False, calls=True)
    return [statement for statement, _ in steps]


def test_a_worker_registers_once_and_again_when_its_row_is_gone() -> None:
    liveness = make_liveness()
    assert statements(liveness) == [register_worker, see_worker]
    assert liveness.note_seen([Presence("id", False, SEEN_AT)])
    assert statements(liveness) == [see_worker]
    assert liveness.note_seen([]), "a deleted row does not mean that others took our tasks"
    assert statements(liveness) == [register_worker, see_worker]


def test_a_worker_registers_its_release() -> None:
    registering, _ = make_liveness().steps(receives_notifications=True, waits=False, calls=True)
    assert named(registering).version == __version__


def test_a_worker_learns_that_others_declared_it_lost() -> None:
    liveness = make_liveness()
    assert not liveness.note_seen([Presence("id", True, SEEN_AT)])
    liveness.forget()
    assert statements(liveness) == [register_worker, see_worker]
